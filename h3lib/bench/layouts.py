"""The untraced block in layouts whose ranks own a GPU each: `h3lib bench layouts --out FILE.json`.

    ours      Block over the peer tree, back end `triton`, calls checked at the end of a round
    theirs    diffusers' block under plain TP, SP or CP over NCCL (`bench/plain.py`), eager, and at
              `COMPILED_ROWS` under torch.compile; autograd, the same weights and rows
    price     ours / theirs, medians of interleaved rounds in one run, the slowest rank's

The bytes of what is timed are compared with one process alone. Where ranks would share a GPU
nothing is timed: the rows say "not run". Memory does not depend on sharing, and is there for all.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from h3lib.bench.measure import environment
from h3lib.contract import PUBLISHED, PeerError, RowsError
from h3lib.layout import Layout
from h3lib.ops.backend import load_backend
from h3lib.parallel.launch import die_with_launcher, run_ranks
from h3lib.provenance import git_commit

LAYOUTS = (
    "tp1", "tp2", "tp2-sp", "cp2", "tp4", "tp4-sp", "tp2-cp2", "cp4", "tp8", "tp8-sp", "tp4-cp2",
    "tp4-cp2-sp", "cp8",
)  # fmt: skip
ROWS = (14910, 37776, 4096, 264)  # in this order: the few rows' graphs come last
COMPILED_ROWS = (14910,)
NOT_RUN = "not run: ranks share a GPU"
TIMEOUT_S = 420.0
LISTS = ("measurements", "memory", "bits", "agreement")


def bench_layouts(
    out: Path, layouts: Sequence[str] = LAYOUTS, rows: Sequence[int] = ROWS
) -> None:
    """Measure every layout that fits the GPUs, write `out` after each.

    **Raises:** PeerError if ranks fail, after the other layouts; LayoutError for a name.
    """
    load_backend("triton", "cuda")
    gpus, found, failures = torch.cuda.device_count(), {name: [] for name in LISTS}, {}
    parsed = [Layout.parse(name) for name in layouts]

    def write(complete: bool) -> None:
        content = _header(gpus, rows) | found | {"failures": failures, "complete": complete}
        out.write_text(json.dumps(content, indent=1) + "\n")

    for layout in tqdm(parsed, "layouts", unit="layout", disable=None):
        if layout.num_ranks > gpus:
            found["measurements"] += [
                {"layout": layout.name, "ranks": layout.num_ranks, "rows": r, "status": NOT_RUN}
                for r in sorted(rows)
            ]
            continue
        for name, lines in _run(layout, rows, failures).items():
            found[name] += lines
        write(complete=False)
    shared = [layout.name for layout in parsed if layout.num_ranks > gpus]
    found["memory"] += _memory_alone(shared, rows)
    write(complete=not failures)
    if failures:
        raise PeerError("layouts", failures, "ranks that end")


def _header(gpus: int, rows: Sequence[int]) -> dict[str, object]:
    from h3lib.bench.layout_case import PROTOCOL
    from h3lib.parallel.peer import CAPACITY_BYTES

    return {
        "environment": environment() | {"commit": git_commit() or "unknown"},
        "contract": PUBLISHED.id,
        "size": "full",
        "gpus": gpus,
        "rows": sorted(rows),
        "nvls": "off",
        "capacity_bytes": CAPACITY_BYTES,
        "protocol": asdict(PROTOCOL),
    }


def _run(layout: Layout, rows: Sequence[int], failures: dict) -> dict[str, list[dict]]:
    """What the ranks of one layout found, as far as they came."""
    with tempfile.TemporaryDirectory(prefix="h3lib-bench-") as folder:
        log, file = Path(folder, "log"), Path(folder, "found.json")
        arguments = [layout.name, str(file), *map(str, rows)]
        try:
            status = run_ranks(
                "h3lib.bench.layouts", arguments, layout.num_ranks, TIMEOUT_S, log, lambda: None
            )
            if status:
                failures[layout.name] = f"exit status {status}: {log.read_text()[-3000:]}"
        except PeerError as error:
            failures[layout.name] = f"{error}: {log.read_text()[-3000:]}"
        return json.loads(file.read_text()) if file.exists() else {}


def _memory_alone(layouts: Sequence[str], rows: Sequence[int]) -> list[dict]:
    from h3lib.bench.rank_memory import rank_memory

    lines = []
    for layout in layouts:
        for count in sorted(rows):
            lines.append(rank_memory(layout, count) | {"measured": "one rank alone"})
            torch.cuda.empty_cache()
    return lines


def rank_main(layout: Layout, out: Path, rows: Sequence[int]) -> None:
    """A rank: measure; rank 0 writes what was found so far after each line."""
    from h3lib.bench.layout_case import Case
    from h3lib.bench.layout_ranks import RankWorld

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    found: dict[str, list[dict]] = {name: [] for name in LISTS}
    world = RankWorld(layout)
    for count in rows:
        try:
            case = Case(world, count)
        except RowsError as error:
            line = {"layout": layout.name, "ranks": layout.num_ranks, "rows": count}
            found["measurements"].append(line | {"status": f"not run: {error}"})
            continue
        for name, line in case.measure(compiled=count in COMPILED_ROWS):
            found[name].append(line)
            if world.rank == 0:
                out.write_text(json.dumps(found))
        del case
        torch.cuda.empty_cache()
    world.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layout", type=Layout.parse)
    parser.add_argument("out", type=Path)
    parser.add_argument("rows", type=int, nargs="+")
    options = parser.parse_args()
    die_with_launcher()
    rank_main(options.layout, options.out, options.rows)


if __name__ == "__main__":
    main()
