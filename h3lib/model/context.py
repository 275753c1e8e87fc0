"""What the parts of a model share: size, place, weights, back end, gradients and trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from h3lib.contract import ModelSize, OperandError
from h3lib.layout import Region, region_shape, whole
from h3lib.model.trace import GRADIENT, NODE, ROOT, Trace
from h3lib.ops.backend import Op, accumulator, load_backend
from h3lib.ops.fold import row_unit_roots
from h3lib.ops.gemm import (
    linear_dx,
    linear_forward,
    row_fold_product,
    row_fold_roots,
    unit_tree_product,
    unit_tree_roots,
)
from h3lib.parallel.collective import Observe
from h3lib.parallel.later import Later
from h3lib.parallel.overlap import ColumnProduct, RowProduct
from h3lib.parallel.shard import SeqShard, parameter_region
from h3lib.parallel.transport import num_roots


@dataclass(frozen=True)
class Rows:
    """Metadata of this rank's rows: the AdaLN table row of each row of the slice `[S]`, and the
    rotary cos, sin of each row of the shard `[T, h]`; None where a block has neither."""

    table_rows: Tensor | None
    cos: Tensor | None
    sin: Tensor | None


UNMODULATED = Rows(None, None, None)
"""Rows of the text refiner: no AdaLN, no rotary embedding."""


@dataclass
class BlockContext:
    """One block on one rank, or another part of the model; `shapes` names its parameters, global.

    `dtype` is that of the residual stream: the first weight's unless it is given. Gradients that
    are summed over ranks are `coming` until they are taken.
    """

    size: ModelSize
    shard: SeqShard
    weights: dict[str, Tensor]
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    backend: str
    trace: Trace | None
    dtype: torch.dtype | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)
    coming: dict[str, Later] = field(default_factory=dict)

    def __post_init__(self):
        self.dtype = self.dtype or next(iter(self.weights.values())).dtype
        device = next(iter(self.weights.values())).device.type
        load_backend(self.backend, device)
        self.size.check(self.shard.contract, device)
        for name, (shape, _) in self.shapes.items():
            local = region_shape(
                parameter_region(name, shape, self.shard.owner, self.shard.tp_rank)
            )
            if name not in self.weights:
                raise OperandError(
                    "weights", sorted(self.weights), f"{name} of {local}"
                )
            if tuple(self.weights[name].shape) != local:
                raise OperandError(f"shape of {name}", tuple(self.weights[name].shape), local)

    def call(self, op: Op, *args):
        """The op on this block's back end."""
        return op(*args, backend=self.backend)

    def row_units(self, terms: Tensor) -> Tensor:
        """Roots of a row fold over the row units of the slice."""
        return self.call(row_unit_roots, terms, self.shard.owner.rows, self.shard.row_units)

    def unit_tree(self, *parts: tuple[Tensor, Tensor], out: Tensor | None = None) -> Tensor:
        """Roots of the sum of a @ b over the feature units here."""
        units, num_units = self.shard.feature_units, self.shard.contract.num_units
        return self.call(unit_tree_roots, list(parts), units, num_units, out)

    def enter(self, x_SD: Tensor, op: Op, *weights: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The rows of the shard `[T, D]`, and of each weight the column-parallel product `op`."""
        dim = {linear_forward: 0, linear_dx: 1}[op]
        products = [
            ColumnProduct(
                w.shape[dim], lambda x, out, w=w: op(x, w, backend=self.backend, out=out)
            )
            for w in weights
        ]
        return self.shard.enter(x_SD, products)

    def leave(self, name: str, *parts: tuple[Tensor, Tensor]) -> Tensor:
        """The row-parallel product sum of a @ b, `[S, D]`: unit tree over tp, rounded once."""
        if self.trace is None and self.shard.owner.layout.tp == 1:  # rounded where it is finished
            units = self.shard.contract.num_units
            return self.call(unit_tree_product, list(parts), units, self.dtype)

        def make(ranges: Sequence[range]) -> Tensor:
            rows = [[(a[r.start : r.stop], b) for a, b in parts] for r in ranges]
            if len(rows) == 1:
                return self.unit_tree(*rows[0])
            a, lengths = parts[0][0], [len(r) for r in ranges]
            here = num_roots(self.shard.owner.feature_cuts(), self.shard.tp_rank)
            shape = (here, sum(lengths), self.size.hidden_size)
            roots = a.new_empty(shape, dtype=accumulator(a))
            for some, out in zip(rows, roots.split(lengths, dim=1), strict=True):
                self.unit_tree(*some, out=out)
            return roots

        depth = sum(a.shape[1] for a, _ in parts)
        product = RowProduct(len(parts[0][0]), self.size.hidden_size, depth, make)
        region = ((self.shard.shard_rows,), (range(self.size.hidden_size),))
        return self.shard.leave(product, self.dtype, self.observe(name, region))

    def weight_gradient(self, name: str, dy: Tensor, x: Tensor) -> None:
        """dw = dy^T x, row fold over sequence units, summed over cp beside what follows."""
        shard, dtype = self.shard, self.weights[name].dtype
        if self.trace is None and shard.owner.layout.cp == 1:  # rounded where it is finished
            self.gradient(name, self.call(row_fold_product, dy, x, shard.owner.rows, dtype))
            return
        roots = self.call(row_fold_roots, dy, x, shard.owner.rows, shard.sequence_units)
        observe = self.observe_parameter(name)
        self.coming[name] = shard.sum_sequence_units(roots, dtype, observe)

    def take_gradients(self) -> dict[str, Tensor]:
        """Every gradient that was made since they were taken last, complete."""
        for name, later in self.coming.items():
            self.gradient(name, later.value())
        found, self.gradients, self.coming = self.gradients, {}, {}
        return found

    def gradient(self, name: str, root: Tensor) -> None:
        """Keep the gradient of a parameter, rounded to the parameter's dtype if it is not yet."""
        self.gradients[name] = root.to(self.weights[name].dtype)
        if self.trace is not None:
            if root.dtype != self.weights[name].dtype:
                self.trace.add(name, ROOT, root, self.parameter_part(name))
            self.trace.add(name, GRADIENT, self.gradients[name], self.parameter_part(name))

    def parameter_part(self, name: str) -> Region:
        return parameter_region(name, self.shapes[name][0], self.shard.owner, self.shard.tp_rank)

    def node(self, name: str, tensor: Tensor, kind: str = NODE) -> Tensor:
        """Name a value that is whole on every rank."""
        if self.trace is None:
            return tensor
        return self._node(name, tensor, whole(tuple(tensor.shape)), kind)

    def slice_node(self, name: str, tensor: Tensor, kind: str = NODE) -> Tensor:
        """Name a value of the slice's rows, all columns."""
        if self.trace is None:
            return tensor
        return self._node(
            name, tensor, ((self.shard.slice_rows,), *whole(tuple(tensor.shape[1:]))), kind
        )

    def unit_node(self, name: str, tensor: Tensor, width: int) -> Tensor:
        """Name a value of the shard's rows and this rank's part of a feature axis of `width`."""
        if self.trace is None:
            return tensor
        part = (self.shard.feature_range(width),)
        return self._node(
            name, tensor, ((self.shard.shard_rows,), part, *whole(tuple(tensor.shape[2:])))
        )

    def _node(self, name: str, tensor: Tensor, region: Region, kind: str = NODE) -> Tensor:
        self.trace.add(name, kind, tensor, region)
        return tensor

    def observe(self, name: str, region: Region) -> Observe | None:
        """Observer of the FP32 roots of a value whose rank's part is `region`."""
        return None if self.trace is None else self.trace.root(name, region)

    def observe_parameter(self, name: str) -> Observe | None:
        return self.observe(name, self.parameter_part(name))
