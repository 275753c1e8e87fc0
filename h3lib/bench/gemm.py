"""Products of one main block at full size beside cuBLAS: `python -m h3lib.bench.gemm speed`.

`speed` times every case of `gemm_cases`; `tiles` every entry of every directive table, so that the
tables can be judged; `bits` runs the checks of `gemm_bits` and `gemm_probes`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from h3lib.bench import gemm_bits, gemm_probes
from h3lib.bench.gemm_bits import Finding
from h3lib.bench.gemm_cases import CASES, NUM_UNITS, Case, fp32_cases, timestep_cases
from h3lib.bench.measure import (
    Protocol,
    Row,
    compare,
    environment,
    medians,
    report,
)
from h3lib.contract import RowUnits
from h3lib.ops.hopper import directives
from h3lib.ops.hopper.gemm_chain import chain_fp32, chain_launch
from h3lib.ops.hopper.gemm_fold import fold_launch
from h3lib.ops.hopper.gemm_tree import subtree_launch

BITS = {check.__name__: check for check in (*gemm_bits.CHECKS, *gemm_probes.PROBES)}
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
    chosen = directives.fp32_tile_for(len(sets[0][1]))
    outs = [chain_fp32(sets[0][0], sets[0][1].T, tile=tile) for tile in tiles]
    calls = [
        lambda i, tile=tile: chain_fp32(sets[i][0], sets[i][1].T, tile=tile) for tile in tiles
    ]
    *times, theirs_us = medians([*calls, lambda i: case.theirs(*sets[i])], len(sets), how)
    for tile, us, out in zip(tiles, times, outs, strict=True):
        yield {
            "op": "fp32_chain", "case": case.name, "rows": TILE_ROWS[-1], "graph": False,
            "tile": asdict(tile), "us": us, "theirs_us": theirs_us, "chosen": tile == chosen,
            "same_bytes": gemm_bits.difference(out, outs[0]) == 0,
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
    same = [gemm_bits.difference(out, outs[0]) == 0 for out in outs]
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


def run_check(name: str) -> list[dict[str, object]]:
    """Findings (or accuracy rows) of one check, in a process of its own."""
    torch.manual_seed(0)
    results = list(BITS[name]())
    return [asdict(r) | {"passed": r.passed} if isinstance(r, Finding) else r for r in results]


def bits_report(commit: str, jobs: int) -> dict[str, object]:
    """Every check; `jobs` at a time, since most of the time goes into compiling."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        results = dict(zip(BITS, pool.map(run_check, BITS), strict=True))
    accuracy = results.pop("measure_accuracy")
    findings = [finding for rows in results.values() for finding in rows]
    failed = [finding for finding in findings if not finding["passed"]]
    for name, rows in results.items():
        print(name, len(rows), "findings", sum(not row["passed"] for row in rows), "failed")
    for finding in failed[:30]:
        print(finding)
    return {
        "environment": environment() | {"commit": commit},
        "findings": findings,
        "accuracy": accuracy,
        "passed": not failed,
        "complete": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("speed", "tiles", "bits"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True, help="commit that is measured")
    parser.add_argument("--jobs", type=int, default=1, help="checks of `bits` at a time")
    parser.add_argument("--round-ms", type=float, default=Protocol.round_ms)
    parser.add_argument("--warm-up-ms", type=float, help="five rounds unless given")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    if args.what == "bits":
        args.out.write_text(json.dumps(bits_report(args.commit, args.jobs), indent=1) + "\n")
        return
    warm_up_ms = args.warm_up_ms or 5 * args.round_ms
    protocol, rows = Protocol(round_ms=args.round_ms, warm_up_ms=warm_up_ms), []
    for row in (measure_tiles if args.what == "tiles" else measure_all)(protocol):
        print(row, flush=True)
        rows.append(row)
        content = report(rows, args.commit, protocol, complete=False)
        args.out.write_text(json.dumps(content, indent=1) + "\n")
    content = report(rows, args.commit, protocol, complete=True)
    args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
