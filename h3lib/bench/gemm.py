"""Products of one main block at full size beside cuBLAS: `h3lib bench kernels --out FILE`.

Part `gemm` times every case of `gemm_cases`; part `tiles` every entry of every directive table, so
that the tables can be judged.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch
from torch import Tensor

from h3lib.bench.findings import difference
from h3lib.bench.gemm_cases import CASES, NUM_UNITS, Case, fp32_cases, timestep_cases
from h3lib.bench.measure import (
    Protocol,
    Row,
    compare,
    medians,
)
from h3lib.contract import RowUnits
from h3lib.ops.hopper import directives
from h3lib.ops.hopper.gemm_chain import chain_launch
from h3lib.ops.hopper.gemm_fold import fold_launch
from h3lib.ops.hopper.gemm_fp32 import chain_fp32
from h3lib.ops.hopper.gemm_tree import subtree_launch

ROWS = (264, 4096, 14910, 37776)
GRAPH_MAX_ROWS = 264


def few_rows(protocol: Protocol) -> Protocol:
    """A third of the time: hundreds of launches fit all the same."""
    third = protocol.round_ms / 3, protocol.warm_up_ms / 3
    return replace(protocol, round_ms=third[0], warm_up_ms=third[1])


def measure(case: Case, rows: int, protocol: Protocol) -> Row:
    sets = case.sets(rows)
    return compare(
        case.op, case.name, rows, case.against, lambda i: case.ours(*sets[i]),
        lambda i: case.theirs(*sets[i]), len(sets), protocol,
    )  # fmt: skip


def measure_all(protocol: Protocol) -> Iterator[Row]:
    """Every case; small ones under a CUDA graph too: an eager launch costs more than they do."""
    plan = [(case, rows) for rows in ROWS for case in CASES]
    plan += [(case, 2) for case in timestep_cases()] + [(case, 14910) for case in fp32_cases()]
    for case, rows in plan:
        few = rows <= GRAPH_MAX_ROWS
        yield measure(case, rows, few_rows(protocol) if few else protocol)
        if few:
            yield measure(case, rows, few_rows(protocol).under_graph())


TILE_CASES = {
    "linear_forward": (0, 1),
    "linear_dx": (2, 3),
    "unit_tree": (4, 6),
    "row_fold": (8,),
}
TILE_ROWS = (264, 14910)


def measure_tiles(protocol: Protocol) -> Iterator[dict[str, object]]:
    """Every entry of every table that can make the shape, interleaved, beside the library.

    `chosen` is the one that the table gives; `same_bytes` says that the results are equal.
    """
    for rows, (op, cases) in itertools.product(TILE_ROWS, TILE_CASES.items()):
        how = few_rows(protocol).under_graph() if rows <= GRAPH_MAX_ROWS else protocol
        for case in (CASES[i] for i in cases):
            yield from _measure_table(op, case, rows, how)
    for case in fp32_cases():
        yield from _measure_fp32_table(case, few_rows(protocol))


def _measure_fp32_table(case: Case, how: Protocol) -> Iterator[dict[str, object]]:
    sets, tiles = case.sets(TILE_ROWS[-1]), directives.fp32_tiles()
    chosen = directives.fp32_tile_for(TILE_ROWS[-1], len(sets[0][1]))
    outs = [chain_fp32(sets[0][0], sets[0][1].T, tile=tile) for tile in tiles]
    calls = [
        lambda i, tile=tile: chain_fp32(sets[i][0], sets[i][1].T, tile=tile) for tile in tiles
    ]
    *times, theirs_us = medians([*calls, lambda i: case.theirs(*sets[i])], len(sets), how)
    for tile, us, out in zip(tiles, times, outs, strict=True):
        yield {
            "op": "fp32_chain", "case": case.name, "rows": TILE_ROWS[-1], "graph": False,
            "tile": asdict(tile), "us": us, "theirs_us": theirs_us, "chosen": tile == chosen,
            "same_bytes": difference(out, outs[0]) == 0,
        }  # fmt: skip


def _measure_table(op: str, case: Case, rows: int, how: Protocol) -> Iterator[dict[str, object]]:
    sets = case.sets(rows)
    plan = [_planned(op, *operands) for operands in sets]
    shape, blocks, launch = plan[0]
    tiles = [t for t in directives.tiles(op) if t.runs(blocks, directives.MAX_DEPTH)]
    outs = [torch.empty(1, *shape, device="cuda", dtype=torch.bfloat16) for _ in tiles]
    ready = [[p[2](out, tile) for p in plan] for tile, out in zip(tiles, outs, strict=True)]
    for launches in ready:
        launches[0].run()
    same = [difference(out, outs[0]) == 0 for out in outs]
    calls = [lambda i, launches=launches: launches[i].run() for launches in ready]
    calls.append(lambda i: case.theirs(*sets[i]))
    *times, theirs_us = medians(calls, len(sets), how)
    chosen = directives.tile_for(op, *shape, blocks)
    for tile, us, equal in zip(tiles, times, same, strict=True):
        yield {
            "op": op, "case": case.name, "rows": rows, "graph": how.graph, "tile": asdict(tile),
            "us": us, "theirs_us": theirs_us, "chosen": tile == chosen, "same_bytes": equal,
        }  # fmt: skip


def _planned(op: str, a: Tensor, b: Tensor, *parts: Tensor) -> tuple:
    """(shape of the result, blocks in the shortest unit, launch of `out` with a tile)."""
    every = range(NUM_UNITS)
    if op == "row_fold":
        keys = RowUnits(len(a))
        units = [keys.sequence_unit_rows(range(u, u + 1)) for u in every]
        return (
            (a.shape[1], b.shape[1]),
            min(len(rows) for rows in units) // directives.MAX_DEPTH,
            lambda out, tile: fold_launch(out, a, b, keys, every, every, tile),
        )
    right = b if b.shape[0] == a.shape[1] else b.T
    blocks = a.shape[1] // directives.MAX_DEPTH
    if op == "unit_tree":
        pairs = [(a, right)]
        if parts:
            pairs = list(zip(parts, right.chunk(len(parts)), strict=True))
        return (
            (len(a), right.shape[1]),
            blocks // NUM_UNITS,
            lambda out, tile: subtree_launch(out[0], pairs, every, every, tile),
        )
    return (len(a), right.shape[1]), blocks, lambda out, tile: chain_launch(out, a, right, tile)
