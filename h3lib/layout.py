"""Layout names, the rank grid, and who owns which units and rows.

`tp4-cp2-sp-pp2-local4` = four tensor-parallel ranks times two context-parallel ranks, norms split
by rows inside a TP group, two pipeline stages of such ranks, four ranks on a node. Ranks are
node-major; mesh axes are (pp, cp, tp), so rank = (stage * cp + cp_rank) * tp + tp_rank.
Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from h3lib.contract import (
    NUM_ROW_UNITS,
    NUM_SEQUENCE_UNITS,
    ROW_UNITS_PER_SEQUENCE_UNIT,
    Contract,
    LayoutError,
    RowUnits,
)

MAX_STAGES = 64
TP_DEGREES = (1, 2, 4, 8)
CP_DEGREES = tuple(range(1, NUM_SEQUENCE_UNITS + 1))

_N = r"(0|[1-9][0-9]{0,3})"
_NAME = re.compile(rf"(?:tp{_N}(?:-cp{_N})?|cp{_N})(-sp)?(?:-pp{_N})?(?:-local{_N})?")

Ranges = tuple[range, ...]
Region = tuple[Ranges, ...]
"""A part of a tensor: for each dim the index ranges taken, in order."""


def whole(shape: tuple[int, ...]) -> Region:
    """The region that is the whole tensor."""
    return tuple((range(size),) for size in shape)


def region_shape(region: Region) -> tuple[int, ...]:
    """The shape of the part that a region takes."""
    return tuple(sum(len(part) for part in ranges) for ranges in region)


@dataclass(frozen=True)
class Layout:
    """One way to place the model on ranks; `local_size` None means every rank on one node.

    `pp` stages hold contiguous layers; inside a stage tp, cp and sp are the same everywhere.
    """

    tp: int = 1
    cp: int = 1
    sp: bool = False
    local_size: int | None = None
    pp: int = 1

    def __post_init__(self):
        degrees = (self.tp, self.cp, self.local_size or 1, self.pp)
        if not all(type(degree) is int for degree in degrees):
            raise LayoutError("degrees", degrees, "integers")
        if self.tp not in TP_DEGREES:
            raise LayoutError("tp degree", self.tp, ", ".join(map(str, TP_DEGREES)))
        if self.cp not in CP_DEGREES:
            raise LayoutError("cp degree", self.cp, "1 to 8")
        if not 1 <= self.pp <= MAX_STAGES:
            raise LayoutError("pp degree", self.pp, f"1 to {MAX_STAGES}")
        if self.local_size is not None:
            self._check_nodes()

    def _check_nodes(self) -> None:
        local = self.local_size
        if local < 1 or (self.tp % local and local % self.tp):
            raise LayoutError(
                "local size",
                local,
                f"a divisor or a multiple of tp = {self.tp}, so that a group "
                "holds the same local ranks on every node it touches",
            )
        if self.num_ranks % local:
            raise LayoutError(
                "local size",
                local,
                f"a divisor of the number of ranks {self.num_ranks}: nodes hold equally many ranks",
            )
        if self.stage_size % local and local % self.stage_size:
            raise LayoutError(
                "local size",
                local,
                f"a divisor or a multiple of the {self.stage_size} ranks of a stage",
            )

    @classmethod
    def parse(cls, name: str) -> Layout:
        """The layout called `name`, e.g. `tp4-cp2-sp`.

        **Raises:** LayoutError with the reason if the name cannot exist.
        """
        match = _NAME.fullmatch(name) if isinstance(name, str) and name else None
        if match is None:
            raise LayoutError(
                "layout name",
                name,
                "tp1 tp2 tp4 tp8, cp1..cp8, sp, ppN, localN, in this order, joined "
                "by '-', with tp or cp named, e.g. tp4-cp2-sp, tp2-pp4 or tp8-local4",
            )
        tp, cp, cp_alone, sp, pp, local = match.groups()
        degrees = int(tp or 1), int(cp or cp_alone or 1), bool(sp)
        return cls(*degrees, int(local) if local else None, int(pp or 1))

    @property
    def name(self) -> str:
        parts = [f"tp{self.tp}"] if self.tp > 1 or self.cp == 1 else []
        parts += [f"cp{self.cp}"] if self.cp > 1 else []
        parts += ["sp"] if self.sp else []
        parts += [f"pp{self.pp}"] if self.pp > 1 else []
        parts += [f"local{self.local_size}"] if self.local_size else []
        return "-".join(parts)

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp

    @property
    def num_ranks(self) -> int:
        return self.stage_size * self.pp

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // (self.local_size or self.num_ranks)

    def place(self, rank: int) -> tuple[int, int]:
        """(cp_rank, tp_rank) of a rank in its stage."""
        if not 0 <= rank < self.num_ranks:
            raise LayoutError("rank", rank, f"0 to {self.num_ranks - 1} in {self.name}")
        return divmod(rank % self.stage_size, self.tp)

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // self.stage_size

    def layers(self, num_layers: int, stage: int) -> range:
        """The contiguous layers of a stage.

        **Raises:** LayoutError if there are fewer layers than stages.
        """
        if num_layers < self.pp:
            raise LayoutError("pp degree", self.pp, f"at most the number of layers, {num_layers}")
        return range(num_layers * stage // self.pp, num_layers * (stage + 1) // self.pp)

    def node(self, rank: int) -> int:
        return rank // (self.local_size or self.num_ranks)

    def tp_group(self, rank: int) -> list[int]:
        """Global ranks that share this rank's rows, by tp_rank."""
        first = rank - rank % self.tp
        return list(range(first, first + self.tp))

    def cp_group(self, rank: int) -> list[int]:
        """Global ranks of the stage that share this rank's feature units, by cp_rank."""
        first = self.stage(rank) * self.stage_size
        return list(range(first + rank % self.tp, first + self.stage_size, self.tp))

    def stage_group(self, rank: int) -> list[int]:
        """Global ranks of this rank's stage."""
        first = self.stage(rank) * self.stage_size
        return list(range(first, first + self.stage_size))

    def pp_group(self, rank: int) -> list[int]:
        """Global ranks at this rank's place of every stage, by stage."""
        return list(range(rank % self.stage_size, self.num_ranks, self.stage_size))


@dataclass(frozen=True)
class Ownership:
    """Who owns which units and rows of `num_rows` active rows: the *cuts* of every axis.

    A cut list of n ranks has n + 1 entries; rank r owns [cuts[r], cuts[r + 1]).
    """

    layout: Layout
    rows: RowUnits

    @classmethod
    def of(cls, layout: Layout, num_rows: int, contract: Contract) -> Ownership:
        if contract.num_units % layout.tp:
            raise LayoutError(
                "tp degree", layout.tp, f"a divisor of num_units = {contract.num_units}"
            )
        return cls(layout, RowUnits(num_rows, contract))

    def feature_cuts(self) -> tuple[int, ...]:
        """Feature units (and column units of the AdaLN linear) by tp_rank."""
        units = self.rows.contract.num_units
        return tuple(units * t // self.layout.tp for t in range(self.layout.tp + 1))

    def sequence_cuts(self) -> tuple[int, ...]:
        """Sequence units by cp_rank."""
        return tuple(NUM_SEQUENCE_UNITS * c // self.layout.cp for c in range(self.layout.cp + 1))

    def shard_row_cuts(self) -> tuple[int, ...]:
        """Rows of a CP shard by cp_rank."""
        starts = [
            self.rows.sequence_unit_rows(range(s, NUM_SEQUENCE_UNITS)).start
            for s in self.sequence_cuts()[:-1]
        ]
        return (*starts, self.rows.num_rows)

    def row_unit_cuts(self) -> tuple[int, ...]:
        """Row units by rank of the stage under SP, by cp_rank without."""
        per_unit = ROW_UNITS_PER_SEQUENCE_UNIT
        cuts = [per_unit * s for s in self.sequence_cuts()]
        if not self.layout.sp:
            return tuple(cuts)
        tp = self.layout.tp
        inner = [
            start + (stop - start) * t // tp
            for start, stop in zip(cuts, cuts[1:], strict=False)
            for t in range(tp)
        ]
        return (*inner, NUM_ROW_UNITS)

    def row_cuts(self) -> tuple[int, ...]:
        """Rows by the owners of `row_unit_cuts`: slices under SP, CP shards without."""
        rows = [self._first_row(unit) for unit in self.row_unit_cuts()[:-1]]
        return (*rows, self.rows.num_rows)

    def slice_row_cuts(self, cp_rank: int) -> tuple[int, ...]:
        """Rows of one CP shard by tp_rank: equal to the shard for every rank without SP."""
        cuts = self.row_unit_cuts()
        first = cp_rank * self.layout.tp
        edges = cuts[first : first + self.layout.tp + 1]
        rows = [self._first_row(unit) for unit in edges[:-1]]
        return (*rows, self.shard_row_cuts()[cp_rank + 1])

    def _first_row(self, unit: int) -> int:
        return self.rows.row_unit_rows(range(unit, NUM_ROW_UNITS)).start
