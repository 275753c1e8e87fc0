"""Collectives beside NCCL: `h3lib bench collectives --out FILE.json`, one rank a GPU.

    ratio      NCCL's time / ours: medians of interleaved rounds in one run, the slowest rank's
    bytes      of the FP32 operand of one rank (reductions), of the BF16 result (gathers)
    links      bytes sent by (source, destination), counted, and asserted equal to the closed form
    alpha, beta   least squares of time = alpha + bytes sent to peers / beta, two-shot

NCCL runs with its default settings but NVLS off, in place, on data so small that no number of sums
overflows. Where ranks share a GPU there is no link and
processes take turns: nothing is compared then, the rows say "not run", and only what one rank
alone does is timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from h3lib.bench.measure import Protocol, graphed, medians, time_us
from h3lib.bench.start import start_ranks
from h3lib.contract import PeerError
from h3lib.files import write_json
from h3lib.parallel.collective import TreeCollective
from h3lib.parallel.gloo import GlooWorld
from h3lib.parallel.launch import die_with_launcher
from h3lib.parallel.nccl import NcclLibrary
from h3lib.parallel.peer import CAPACITY_BYTES, PeerTree
from h3lib.parallel.peer_plan import Shape
from h3lib.parallel.transport import num_roots
from h3lib.provenance import gpu_environment

TIMEOUT_S = 300.0
SMALL = tuple(1 << k for k in (12, 14, 16, 18, 20, 22, 23))  # bytes; timed as CUDA graphs
LARGE = tuple((1 << 20) * m for m in (32, 64, 128, 256, 512))
ROUNDS, REPEATS, WARM_UP, GRAPH_CALLS = 7, 10, 5, 8
COLUMNS, TINY = 5376, 2.0**-100
BF16, F32 = torch.bfloat16, torch.float32
NOT_RUN = "not run: ranks share a GPU"
Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One line of `measurements`; times are None where the comparison was not run."""

    op: str
    case: str
    bytes: int
    against: str
    ours_us: float | None
    theirs_us: float | None
    ratio: float | None
    graph: bool
    status: str = "run"


class Bench:
    """One rank of the benchmark."""

    def __init__(self):
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % gpus)
        self.ranks, self.owns_gpu = tuple(range(size)), size <= gpus
        groups = [self.ranks, *((r,) for r in self.ranks)]
        data = [self.ranks] if self.owns_gpu else []
        self.world = GlooWorld(groups, TIMEOUT_S, data_groups=data)
        self.rank, self.size = self.world.rank, self.world.size
        self.tree = self.open(self.ranks)
        self.collective = TreeCollective(self.tree)
        self.nccl = NcclLibrary(self.world, list(self.ranks)) if self.owns_gpu else None
        self.cuts = [8 * r // size for r in range(size + 1)]
        self.rows: list[Row] = []

    def open(self, ranks: tuple[int, ...], shape: Shape | None = None) -> PeerTree:
        control = self.world.connect(ranks, self.rank)
        return PeerTree(control, checked=False, shape=shape)

    def compare(self, op: str, case: str, num_bytes: int, ours: Call, theirs: Call | None) -> None:
        """One row; small operands are timed as CUDA graphs."""
        graph = num_bytes <= SMALL[-1]
        if theirs is None:
            self.rows.append(Row(op, case, num_bytes, "NCCL", None, None, None, graph, NOT_RUN))
            return
        ours_us, theirs_us = self.times([ours, theirs], graph)
        ratio = theirs_us / ours_us
        self.rows.append(Row(op, case, num_bytes, "NCCL", ours_us, theirs_us, ratio, graph))

    def times(self, calls: list[Call], graph: bool) -> list[float]:
        """Median of each call in microseconds, of the slowest rank."""
        runs = [lambda _, call=call: call() for call in calls]
        runs = [graphed(run, GRAPH_CALLS) for run in runs] if graph else runs
        samples: list[list[float]] = [[] for _ in calls]
        for round_index in range(-1, ROUNDS):  # the first round warms both up
            order = range(len(runs)) if round_index % 2 else reversed(range(len(runs)))
            for i in order:
                self.world.gather_objects(None)
                took = time_us(runs[i], REPEATS if round_index >= 0 else WARM_UP)
                if round_index >= 0:
                    samples[i].append(took / (GRAPH_CALLS if graph else 1))
        self.tree.check()
        mine = [statistics.median(taken) for taken in samples]
        return [max(rank[i] for rank in self.world.gather_objects(mine)) for i in range(len(mine))]

    def measure(self, num_bytes: int) -> None:
        """Every collective on FP32 operands of `num_bytes`."""
        n = num_bytes // 4
        roots = torch.randn(1, n, device="cuda")
        copy = roots[0] * TINY
        nccl = self.nccl
        ours = lambda: self.collective.all_reduce(roots, self.cuts, BF16)  # noqa: E731
        for case, x in (("NCCL FP32", copy), ("NCCL BF16", copy.to(BF16))):
            theirs = None if nccl is None else lambda x=x: nccl.all_reduce(x)
            self.compare("all_reduce to BF16", case, num_bytes, ours, theirs)
        rows = self.size * max(1, n // COLUMNS // self.size)
        if n < rows * COLUMNS:
            return
        operand = roots[:, : rows * COLUMNS].view(1, rows, COLUMNS)
        cuts = [rows * r // self.size for r in range(self.size + 1)]
        own = slice(cuts[self.rank], cuts[self.rank + 1])
        part, whole = operand[0, own].to(BF16), operand[0].to(BF16)
        scattered = operand[0, own].clone()
        self.compare(
            "reduce_scatter_rows to BF16", "NCCL FP32", num_bytes,
            lambda: self.collective.reduce_scatter_rows(operand, self.cuts, cuts, BF16),
            None if nccl is None else lambda: nccl.reduce_scatter(scattered, operand[0]),
        )  # fmt: skip
        self.compare(
            "all_gather_rows of BF16", "NCCL BF16", whole.numel() * 2,
            lambda: self.collective.all_gather_rows(part, cuts),
            None if nccl is None else lambda: nccl.all_gather(whole, part),
        )  # fmt: skip

    def links(self, n: int) -> dict[str, object]:
        """Bytes by (source, destination) of one all-reduce to BF16.

        **Raises:** PeerError if they are not those of the closed form.
        """
        before = self.tree.bytes_sent
        self.collective.all_reduce(torch.zeros(1, n, device="cuda"), self.cuts, BF16)
        mine = [b - a for a, b in zip(before, self.tree.bytes_sent, strict=True)]
        table = self.world.gather_objects(mine)
        expected = link_bytes(self.tree, self.cuts, n)
        if table != expected:
            raise PeerError("bytes by (source, destination)", table, expected)
        return {"op": "all_reduce to BF16", "elements": n, "sent": table, "closed_form": expected}

    def alone(self) -> list[dict[str, object]]:
        """The steps of one rank in a world of one, to BF16: launches and local memory alone."""
        tree = self.open((self.rank,))
        collective, found = TreeCollective(tree), []
        short = Protocol(ROUNDS, round_ms=5.0, warm_up_ms=10.0)
        for num_bytes in (SMALL[0], SMALL[-1], LARGE[2]):
            roots = torch.randn(1, num_bytes // 4, device="cuda")
            call = lambda roots=roots: collective.all_reduce(roots, [0, 8], BF16)  # noqa: E731
            cast = lambda roots=roots: roots.to(BF16)  # noqa: E731
            for graph in (False, True):
                took = [0.0, 0.0]
                how = short.under_graph() if graph else short
                for rank in self.ranks:  # one rank at a time: they may share the GPU
                    if rank == self.rank:
                        calls = [lambda _, c=c: c() for c in (call, cast)]
                        took = medians(calls, GRAPH_CALLS, how)
                    self.world.gather_objects(None)
                found.append({"what": "all_reduce in a world of one", "bytes": num_bytes,
                              "graph": graph, "us": took[0], "cast_us": took[1]})  # fmt: skip
            tree.check()
        tree.close()
        return found

    def close(self) -> None:
        self.tree.close()
        self.world.close()


def link_bytes(tree: PeerTree, cuts: list[int], n: int) -> list[list[int]]:
    """Closed form of an all-reduce to BF16: row r holds what r writes into every rank's memory.

    Two-shot: 4 R_r |slice p| + 2 |slice r| into a peer p; one-shot: 4 R_r n.
    """
    roots = [num_roots(cuts, rank) for rank in range(tree.size)]
    slices = tree.slices(n, max(roots))
    lengths = [stop - start for start, stop in slices]
    two_shot = len(set(slices)) > 1
    return [
        [(4 * roots[r] * lengths[p] + 2 * two_shot * lengths[r]) * (p != r)
         for p in range(tree.size)]
        for r in range(tree.size)
    ]  # fmt: skip


def fit(rows: list[Row], size: int) -> dict[str, object]:
    """alpha and beta of the two-shot all-reduce: time = alpha + bytes from peers / beta."""
    points = [
        (6 * (row.bytes // 4) * (size - 1) / size, row.ours_us)
        for row in rows
        if row.op.startswith("all_reduce") and row.case == "NCCL FP32" and row.bytes >= LARGE[0]
        and row.ours_us is not None
    ]  # fmt: skip
    if len(points) < 2:
        return {"level": "peers of a node", "status": NOT_RUN}
    x = torch.tensor([[1.0, b] for b, _ in points], dtype=torch.float64)
    y = torch.tensor([[us] for _, us in points], dtype=torch.float64)
    alpha, slope = torch.linalg.lstsq(x, y).solution.flatten().tolist()
    return {"level": "peers of a node", "alpha_us": alpha, "beta_bytes_per_us": 1 / slope}


def rank_main(out: Path) -> None:
    """A rank: measure; rank 0 writes the report."""
    die_with_launcher()
    torch.manual_seed(0)
    bench = Bench()
    for num_bytes in (*SMALL, *LARGE):
        bench.measure(num_bytes)
    links = [bench.links(n) for n in (1000, (1 << 20) + 3, 1 << 24)]
    alone = bench.alone()
    bench.close()
    if bench.rank:
        return
    content = {
        "environment": gpu_environment(),
        "ranks": bench.size,
        "ranks_per_gpu": 1 if bench.owns_gpu else bench.size // torch.cuda.device_count(),
        "nvls": "off",
        "capacity_bytes": CAPACITY_BYTES,
        "shape": asdict(bench.tree.shape),
        "protocol": {"rounds": ROUNDS, "repeats": REPEATS, "graph_calls": GRAPH_CALLS},
        "measurements": [asdict(row) for row in bench.rows],
        "links": links,
        "fit": fit(bench.rows, bench.size),
        "alone": alone,
        "complete": True,
    }
    write_json(out, content)


def bench_collectives(out: Path) -> None:
    """One rank a GPU, or two on one GPU; write `out`. **Raises:** PeerError if a rank fails."""
    start_ranks("h3lib.bench.collectives", [str(out)], max(2, torch.cuda.device_count()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    rank_main(parser.parse_args().out)


if __name__ == "__main__":
    main()
