"""Which tile a product runs with: one table for each (op, architecture), read by shape alone.

    Tile   128 x columns, blocks of `depth` steps, a ring of `stages` blocks, `group` row tiles side
           by side in L2, the second warpgroup `lag` blocks behind the first

Nothing here is part of the bits: an entry moves where and when an element is made, never which
additions make it, and `tests/ops/hopper/test_gemm_gpu.py` holds every entry to the same bytes.
Nothing is tuned at run time; `h3lib.bench.gemm` gives what each entry costs.

The first entry of a table whose limits the shape meets is taken. A lag needs `stages + lag` blocks
a unit: with fewer the first warpgroup could lap the second and the barrier's parity would repeat.
"""

from __future__ import annotations

from dataclasses import dataclass

from h3lib.contract import BackendError

ARCHITECTURE = "sm_90"
MAX_DEPTH = 64  # of every entry; the units that a lag is judged by are counted in these


@dataclass(frozen=True)
class Tile:
    """One choice; see the head of this file."""

    columns: int = 128
    depth: int = 64
    stages: int = 5
    group: int = 8
    lag: int = 0


@dataclass(frozen=True)
class Entry:
    """A tile and the shapes it may serve."""

    tile: Tile
    min_rows: int = 1
    max_columns: int | None = None

    def serves(self, rows: int, columns: int, unit_blocks: int, unit_start: int) -> bool:
        """`unit_blocks` of MAX_DEPTH in the shortest unit; `unit_start` divides units' starts."""
        tile = self.tile
        enough = not tile.lag or unit_blocks >= tile.stages + tile.lag
        narrow = self.max_columns is None or columns <= self.max_columns
        return rows >= self.min_rows and narrow and enough and unit_start % tile.depth == 0


WIDE = Tile(columns=256, stages=3, group=16)

TABLES: dict[tuple[str, str], tuple[Entry, ...]] = {
    # Few rows are bound by L2, so tiles are wide; ff-down's dx would need two waves of them.
    ("linear_forward", "sm_90"): (
        Entry(WIDE, min_rows=513),
        Entry(Tile(columns=256, stages=3, group=4)),
    ),
    ("linear_dx", "sm_90"): (
        Entry(WIDE, min_rows=513),
        Entry(Tile(columns=256, stages=3, group=4), max_columns=44 * 256),  # 3 x 44 = 132 tiles
        Entry(Tile(stages=4)),
    ),
    ("unit_tree", "sm_90"): (
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
