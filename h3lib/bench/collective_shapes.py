"""How a collective fills the GPU: `python -m h3lib.bench.collective_shapes --out FILE`.

A row is one `Shape` (`parallel/peer_plan.py`) and one collective of one size: all shapes are timed
in turn in one run, as `bench/collectives.py` times ours and NCCL. The bits never depend on a shape.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from h3lib.bench.collectives import BF16, COLUMNS, Bench
from h3lib.bench.start import start_ranks
from h3lib.files import write_json
from h3lib.parallel.collective import TreeCollective
from h3lib.parallel.launch import die_with_launcher
from h3lib.parallel.peer_plan import Shape
from h3lib.provenance import gpu_environment

_USUAL = Shape()
SHAPES = (
    _USUAL,
    *(replace(_USUAL, channels=n) for n in (32, 64, 132, 528)),
    *(replace(_USUAL, pieces=n) for n in (1, 2, 8)),
    *(replace(_USUAL, block_bytes=n) for n in (8192, 16384)),
    replace(_USUAL, num_warps=4, channels=528),
    *(replace(_USUAL, num_warps=16, channels=n) for n in (64, 132)),
)
SIZES = tuple(m << 20 for m in (8, 32, 128, 512))  # bytes of FP32 roots
GRAPH_BYTES, WHOLE_BYTES = 8 << 20, 128 << 20  # the other collectives are timed at one size


def calls(bench: Bench, collective: TreeCollective, num_bytes: int) -> dict[str, Callable]:
    """Each collective on operands of the size, as in `Bench.measure`."""
    n, size = num_bytes // 4, bench.size
    roots = torch.randn(1, n, device="cuda")
    found = {"all_reduce": lambda: collective.all_reduce(roots, bench.cuts, BF16)}
    if num_bytes == WHOLE_BYTES:
        rows = n // COLUMNS // size
        cuts = [rows * r for r in range(size + 1)]
        wide = roots[:, : cuts[-1] * COLUMNS].view(1, cuts[-1], COLUMNS)
        part = wide[0, :rows].to(BF16)
        found["reduce_scatter_rows"] = lambda: collective.reduce_scatter_rows(
            wide, bench.cuts, cuts, BF16
        )
        found["all_gather_rows"] = lambda: collective.all_gather_rows(part, cuts)
    return found


def rank_main(out: Path) -> None:
    """A rank: time every shape; rank 0 writes the table after each size."""
    die_with_launcher()
    bench, rows = Bench(), []
    trees = [bench.open(bench.ranks, shape) for shape in SHAPES]
    for num_bytes in SIZES:
        by_shape = [calls(bench, TreeCollective(tree), num_bytes) for tree in trees]
        for op in by_shape[0]:
            took = bench.times([found[op] for found in by_shape], num_bytes <= GRAPH_BYTES)
            for shape, us in zip(SHAPES, took, strict=True):
                rows.append({"op": op, "bytes": num_bytes, "us": us} | asdict(shape))
            if bench.rank == 0:
                best = sorted(zip(took, SHAPES, strict=True), key=lambda pair: pair[0])[:3]
                print(f"{op} {num_bytes >> 10} KiB: usual {took[0]:.1f} us; best", flush=True)
                print(*(f"  {us:8.1f} us {shape}" for us, shape in best), sep="\n", flush=True)
        if bench.rank == 0:
            content = {"environment": gpu_environment(), "rows": rows}
            write_json(out, content)
    for tree in trees:
        tree.check()
        tree.close()
    bench.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.out)
        return
    ranks = max(2, torch.cuda.device_count())
    start_ranks("h3lib.bench.collective_shapes", ["--rank", "--out", str(options.out)], ranks)


if __name__ == "__main__":
    main()
