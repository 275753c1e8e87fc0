"""Placement: which part of each parameter and of each row tensor a rank owns.

Column-parallel weights are split on outputs, row-parallel ones on inputs, always by whole feature
units; norm weights are replicated. Parameter names are those of the diffusers checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from h3lib.contract import PUBLISHED, Contract, LayoutError, RowsError
from h3lib.layout import Layout, Ownership, Region, whole
from h3lib.parallel.collective import Collective, Observe
from h3lib.parallel.later import Later
from h3lib.parallel.mesh import Mesh, local_mesh
from h3lib.parallel.overlap import (
    ColumnProduct,
    RowProduct,
    gather_products,
    one_root,
    reduce_product,
)
from h3lib.rows import LogicalRows

REPLICATED, COLUMN, ROW = "replicated", "column-parallel", "row-parallel"
GATED_COLUMN = "gated column-parallel"

PLACEMENT = (
    # pattern of the name inside a block, placement; a linear is (out, in)
    (r"attn\.to_[qkv]\.weight", COLUMN),
    (r"attn\.to_out\.0\.weight", ROW),
    (r"ff\.net\.0\.proj\.weight", GATED_COLUMN),  # rows are [value; gate]: each half by units
    (r"ff\.net\.2\.weight", ROW),
    (r"adaln_proj\.linear\.(weight|bias)", COLUMN),
    (r"(norm1|norm2|final_norm|attn\.norm_q|attn\.norm_k)\.weight", REPLICATED),
    (r"norm_out\.linear\.(weight|bias)", COLUMN),
    (r"(time_embedder|token_refiner|norm_out\.norm)\..*", REPLICATED),
    (r"(audio_)?proj_(in|out)\.(weight|bias)|context_embedder\.(weight|bias)", REPLICATED),
)
_BLOCK = re.compile(r"transformer_blocks\.\d+\.")


def placement(name: str) -> str:
    """How a parameter is split, by its full checkpoint name or its name inside a block."""
    local = _BLOCK.sub("", name)
    for pattern, kind in PLACEMENT:
        if re.fullmatch(pattern, local):
            return kind
    raise LayoutError("parameter name", name, "a parameter of the model")


def parameter_region(name: str, shape: tuple[int, ...], owner: Ownership, tp_rank: int) -> Region:
    """The part of the parameter `name` of global `shape` that `tp_rank` owns."""
    kind = placement(name)
    region = list(whole(shape))
    if kind == REPLICATED:
        return tuple(region)
    cuts, units = owner.feature_cuts(), owner.rows.contract.num_units
    dim = 1 if kind == ROW else 0
    width = shape[dim] // 2 if kind == GATED_COLUMN else shape[dim]
    part = range(width * cuts[tp_rank] // units, width * cuts[tp_rank + 1] // units)
    region[dim] = (part,)
    if kind == GATED_COLUMN:
        region[dim] = (part, range(part.start + width, part.stop + width))
    return tuple(region)


@dataclass(frozen=True)
class SeqShard:
    """One rank's place: the units and rows it owns, and how rows enter and leave its products.

    A CP *shard* holds the rows of its sequence units. Under SP each rank of the TP group owns a
    *slice* of these rows (whole row units) for norms, AdaLN and residuals; without SP the slice is
    the shard.
    """

    owner: Ownership
    rank: int
    mesh: Mesh

    @classmethod
    def canonical(cls, num_rows: int, contract: Contract = PUBLISHED) -> SeqShard:
        """The place of a world of one."""
        return cls(Ownership.of(Layout(), num_rows, contract), 0, local_mesh())

    @property
    def contract(self) -> Contract:
        return self.owner.rows.contract

    @property
    def cp_rank(self) -> int:
        return self.owner.layout.place(self.rank)[0]

    @property
    def tp_rank(self) -> int:
        return self.owner.layout.place(self.rank)[1]

    @property
    def stage(self) -> int:
        """The pipeline stage."""
        return self.owner.layout.stage(self.rank)

    @property
    def feature_units(self) -> range:
        return _part(self.owner.feature_cuts(), self.tp_rank)

    @property
    def sequence_units(self) -> range:
        return _part(self.owner.sequence_cuts(), self.cp_rank)

    @property
    def row_units(self) -> range:
        layout = self.owner.layout
        member = self.rank % layout.stage_size if layout.sp else self.cp_rank
        return _part(self.owner.row_unit_cuts(), member)

    @property
    def shard_rows(self) -> range:
        """Logical rows of the CP shard."""
        return _part(self.owner.shard_row_cuts(), self.cp_rank)

    @property
    def slice_rows(self) -> range:
        """Logical rows whose norms and residuals are computed here."""
        if not self.owner.layout.sp:
            return self.shard_rows
        return _part(self.owner.slice_row_cuts(self.cp_rank), self.tp_rank)

    def enter(
        self, x: Tensor, products: Sequence[ColumnProduct]
    ) -> tuple[Tensor, list[Tensor]]:
        """Rows into column-parallel products: slice `[T_slice, ...]` to shard `[T_shard, ...]`,
        and the products of the shard's rows.

        An all-gather over tp under SP, while the products of the slice's rows are made; else
        nothing moves.
        """
        if not self.owner.layout.sp:
            return x, [product.make(x, None) for product in products]
        cuts = self.owner.slice_row_cuts(self.cp_rank)
        return gather_products(self.mesh.tp, x, cuts, products, self.mesh.chunks)

    def leave(
        self, product: RowProduct, dtype: torch.dtype, observe: Observe | None = None
    ) -> Tensor:
        """Rows out of a row-parallel product of the shard's rows: `[T_slice, D]`.

        A tree reduce-scatter over tp under SP, else a tree all-reduce, beside the product itself
        where the level can.

        **Order:** unit tree over feature units. **Rounds:** once, to `dtype`.
        """
        row_cuts = None
        if self.owner.layout.sp:
            first = self.shard_rows.start
            row_cuts = [row - first for row in self.owner.slice_row_cuts(self.cp_rank)]
        cuts, mesh = self.owner.feature_cuts(), self.mesh
        return reduce_product(mesh.tp, product, cuts, dtype, row_cuts, observe, mesh.chunks)

    def gather_sequence(self, x: Tensor) -> Later:
        """All rows in logical order: `[T_shard, ...]` to `[T, ...]`, an all-gather over cp, beside
        what follows until the value is asked for."""
        if self.owner.layout.cp == 1:
            return Later(x)
        cp, cuts = self.mesh.cp, self.owner.shard_row_cuts()
        row_bytes = x.shape[1:].numel() * x.element_size()
        return self._later(cp, lambda: cp.all_gather_rows(x, cuts), cuts[-1] * row_bytes)

    def _later(self, axis: Collective, run: Callable[[], Tensor], num_bytes: int) -> Later:
        return axis.later(run, num_bytes) if self.mesh.chunks.beside else Later(run())

    def sum_feature_units(
        self, roots: Tensor, dtype: torch.dtype, observe: Observe | None = None
    ) -> Tensor:
        """The unit tree over feature units, roots `[R, ...]` to `[...]` on every TP rank."""
        return self.mesh.tp.all_reduce(roots, self.owner.feature_cuts(), dtype, observe)

    def sum_sequence_units(
        self, roots: Tensor, dtype: torch.dtype, observe: Observe | None = None
    ) -> Later:
        """The unit tree over sequence units, roots `[R, ...]` to `[...]` on every CP rank, beside
        what follows until the value is asked for."""
        cp, cuts = self.mesh.cp, self.owner.sequence_cuts()
        num_bytes = one_root(roots)
        return self._later(cp, lambda: cp.all_reduce(roots, cuts, dtype, observe), num_bytes)

    def sum_row_units(
        self, roots: Tensor, dtype: torch.dtype, observe: Observe | None = None
    ) -> Later:
        """The tree over the 64 row units, roots `[R, ...]` to `[...]` on every rank, as before."""
        rows, cuts = self.mesh.rows, self.owner.row_unit_cuts()
        num_bytes = one_root(roots)
        return self._later(rows, lambda: rows.all_reduce(roots, cuts, dtype, observe), num_bytes)

    def feature_range(self, width: int) -> range:
        """This rank's part of a feature axis of global `width`."""
        units = self.contract.num_units
        return range(
            width * self.feature_units.start // units, width * self.feature_units.stop // units
        )


def coshard(shard: SeqShard, rows: LogicalRows, *packed: Tensor) -> list[Tensor]:
    """Each packed tensor `[num_packed, ...]` cut to this rank's logical rows, ascending.

    Rows and all their metadata go through here together, so they cannot part. Order and padding
    are resolved first: a padded row reaches no rank.

    **Raises:** RowsError for another number of rows than the shard's layout was made for.
    """
    if rows.num_rows != shard.owner.rows.num_rows:
        raise RowsError("active rows", rows.num_rows, f"{shard.owner.rows.num_rows} as the shard")
    part = slice(shard.slice_rows.start, shard.slice_rows.stop)
    return [rows.gather(tensor)[part] for tensor in packed]


def _part(cuts: tuple[int, ...], index: int) -> range:
    return range(cuts[index], cuts[index + 1])
