"""Which tile a product runs with: one table for each (op, architecture), read by shape alone.

    Tile   rows x columns, blocks of `depth` steps, a ring of `stages` blocks, `group` row tiles
           side by side in L2, the second warpgroup `lag` blocks behind the first, at most `units`
           units of a tree to a program

Nothing here is part of the bits: an entry moves where and when an element is made, never which
additions make it, and `tests/ops/hopper/test_gemm_gpu.py` holds every entry to the same bytes.
Nothing is tuned at run time; `reports/h200/kernels-gemm-tiles.json` holds what each entry costs.

The first entry of a table whose limits the shape meets is taken. A lag needs `stages + lag` blocks
a unit: with fewer the first warpgroup could lap the second and the barrier's parity would repeat.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from h3lib.contract import BackendError

ARCHITECTURE = "sm_90"
WHOLE_ROWS = 128
MAX_DEPTH = 64  # of every entry; the units that a lag is judged by are counted in these


@dataclass(frozen=True)
class Tile:
    """One choice; see the head of this file."""

    columns: int = 128
    depth: int = 64
    stages: int = 5
    group: int = 8
    lag: int = 0
    rows: int = 128
    units: int = 8

    @property
    def swapped(self) -> bool:
        """Whether rows lie on the instruction's n side, columns on its m side."""
        return self.rows != WHOLE_ROWS

    @property
    def m(self) -> int:
        """What one of the two warpgroups has of the instruction's m side."""
        return (self.columns if self.swapped else self.rows) // 2

    @property
    def n(self) -> int:
        """A block's extents are powers of two."""
        if not self.swapped:
            return self.columns
        return 1 << ((self.rows - 1).bit_length() - 1)

    @property
    def tail(self) -> int:
        """More of the n side, by instructions of its own."""
        return self.rows - self.n if self.swapped else 0

    def runs(self, unit_blocks: int, unit_start: int) -> bool:
        """Whether units of so many blocks of MAX_DEPTH that start so can be made with this tile."""
        enough = not self.lag or unit_blocks >= self.stages + self.lag
        return enough and unit_start % self.depth == 0


@dataclass(frozen=True)
class Entry:
    """A tile and the shapes it may serve."""

    tile: Tile
    min_rows: int = 1
    max_rows: int | None = None
    max_columns: int | None = None

    def serves(self, rows: int, columns: int, unit_blocks: int, unit_start: int) -> bool:
        """`unit_blocks` of MAX_DEPTH in the shortest unit; `unit_start` divides units' starts."""
        tile = self.tile
        return (
            self.min_rows <= rows
            and (self.max_rows is None or rows <= self.max_rows)
            and (self.max_columns is None or columns <= self.max_columns)
            and (tile.rows == WHOLE_ROWS or _covered(rows, tile.rows) < _covered(rows, WHOLE_ROWS))
            and tile.runs(unit_blocks, unit_start)
        )


def _covered(rows: int, height: int) -> int:
    """Rows of as many tiles as it takes."""
    return -(-rows // height) * height


WIDE = Tile(columns=256, stages=3, group=16)
SPLIT_MAX_ROWS = 128
TAIL_MAX_ROWS = 272

TABLES: dict[tuple[str, str], tuple[Entry, ...]] = {
    # 264 rows: two tiles of 136 read the weights twice, three of 128 would read them three times.
    ("linear_forward", "sm_90"): (
        Entry(WIDE, min_rows=513),
        Entry(Tile(rows=136, depth=32, stages=10), max_rows=TAIL_MAX_ROWS, max_columns=66 * 128),
        Entry(Tile(rows=264, depth=32, stages=6), min_rows=257, max_rows=264),
        Entry(Tile(columns=256, stages=3, group=4)),
    ),
    ("linear_dx", "sm_90"): (
        Entry(WIDE, min_rows=513),
        Entry(Tile(rows=136, depth=32, stages=10), max_rows=TAIL_MAX_ROWS, max_columns=66 * 128),
        Entry(Tile(rows=264, depth=32, stages=6), min_rows=257, max_rows=264),
        Entry(Tile(columns=256, stages=3, group=4), max_columns=44 * 256),  # 3 x 44 = 132 tiles
        Entry(Tile(stages=4)),
    ),
    # At 5376 columns two tiles of 128 rows keep 84 of 132 multiprocessors busy; 264 rows as three
    # tiles of 96 keep 126 busy, which draw the same power at a lower clock.
    ("unit_tree", "sm_90"): (
        Entry(Tile(units=1), max_rows=SPLIT_MAX_ROWS),
        Entry(Tile(rows=96, stages=6, lag=2), max_rows=3 * 96),
        Entry(Tile(rows=96, stages=6), max_rows=3 * 96),
        Entry(Tile(lag=2)),
        Entry(Tile()),
    ),
    ("row_fold", "sm_90"): (
        Entry(Tile(lag=2)),
        Entry(Tile()),
        Entry(Tile(depth=32)),
        Entry(Tile(depth=16)),
    ),
}


@dataclass(frozen=True)
class Fp32Tile:
    """A choice of the FP32 chain, which runs on the CUDA cores; `warps` of it down and across."""

    rows: int
    columns: int
    depth: int
    warps: tuple[int, int]

    @property
    def num_warps(self) -> int:
        return self.warps[0] * self.warps[1]


FP32_TILES: dict[str, tuple[Fp32Tile, ...]] = {
    "sm_90": (
        Fp32Tile(64, 128, 16, (2, 2)),
        Fp32Tile(32, 32, 32, (4, 1)),
    ),
}
"""The first whose tiles give every multiprocessor one, else the last."""
FP32_LEAST_TILES = 132


def fp32_tile_for(rows: int, columns: int) -> Fp32Tile:
    """The tile of the FP32 chain that the table gives for this shape."""
    for tile in FP32_TILES[ARCHITECTURE]:
        if -(-rows // tile.rows) * -(-columns // tile.columns) >= FP32_LEAST_TILES:
            return tile
    return FP32_TILES[ARCHITECTURE][-1]


def fp32_tiles() -> tuple[Fp32Tile, ...]:
    """Every tile in the FP32 chain's table."""
    return FP32_TILES[ARCHITECTURE]


@functools.lru_cache(maxsize=4096)
def tile_for(
    op: str, rows: int, columns: int, unit_blocks: int, unit_start: int = MAX_DEPTH
) -> Tile:
    """The tile that the op's table gives for this shape.

    **Raises:** BackendError if units start where no block of the table may.
    """
    for entry in TABLES[op, ARCHITECTURE]:
        if entry.serves(rows, columns, unit_blocks, unit_start):
            return entry.tile
    raise BackendError(f"unit starts of {op} are multiples of", unit_start, "a multiple of 16")


def tiles(op: str) -> tuple[Tile, ...]:
    """Every tile in the op's table."""
    return tuple(entry.tile for entry in TABLES[op, ARCHITECTURE])
