"""Communication that a block exposes, with overlap and without: `h3lib bench overlap --out FILE`.

    exposed    time of the block - time of the same block with its communication left out
    reduction  1 - exposed with overlap / exposed without

One rank a GPU, tensor parallel over all of them (with and without sequence parallel), then context
parallel; medians of interleaved rounds in one run, the slowest rank's. A block with its
communication left out runs the same kernels and gives wrong results, which nothing reads. With
overlap and without, every output and gradient is compared byte for byte.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from h3lib.bench.collectives import Bench
from h3lib.bench.left_out import Buffers, LeftOut
from h3lib.bench.measure import Row
from h3lib.bench.start import start_ranks
from h3lib.compare import different_elements
from h3lib.contract import PUBLISHED, SIZES, PeerError
from h3lib.files import write_json
from h3lib.layout import Layout, Ownership
from h3lib.model.block import Block
from h3lib.model.inputs import block_inputs, block_results, block_weights
from h3lib.model.packing import job_for_rows, pack
from h3lib.model.weights import SyntheticWeights
from h3lib.parallel.collective import TreeCollective
from h3lib.parallel.launch import die_with_launcher
from h3lib.parallel.mesh import Mesh, local_mesh
from h3lib.parallel.overlap import AS_SUITS, IN_TURN, Chunks
from h3lib.parallel.shard import SeqShard
from h3lib.parallel.transport import Level
from h3lib.provenance import gpu_environment

ROWS = (14910, 4096, 264)
GRAPH_MAX_ROWS = 264
PASSES = {"block forward": False, "block forward + backward": True}
WITH, WITHOUT, LEFT_OUT = "with overlap", "without overlap", "communication left out"


@dataclass(frozen=True, kw_only=True)
class ExposedRow(Row):
    """A line of `measurements` with what its times say of the communication, in microseconds."""

    left_out_us: float
    exposed_us: float
    exposed_without_us: float
    reduction: float


class Case:
    """One layout and number of rows: the same block on three meshes, all ranks on one axis."""

    def __init__(
        self, ranks: Level, layout: Layout, rows: int, size: str, device: str, backend: str
    ):
        self.layout, self.rows = layout, rows
        source = SyntheticWeights(SIZES[size], 0, device)
        owner = Ownership.of(layout, rows, PUBLISHED)
        peers = TreeCollective(ranks)
        silent = TreeCollective(LeftOut(ranks.rank, ranks.size, Buffers()))
        meshes = {
            WITH: self._mesh(peers, AS_SUITS),
            WITHOUT: self._mesh(peers, IN_TURN),
            LEFT_OUT: self._mesh(silent, IN_TURN),
        }
        shards = {name: SeqShard(owner, ranks.rank, mesh) for name, mesh in meshes.items()}
        packed = pack(job_for_rows(rows)).to(device)
        self.given = block_inputs(SIZES[size], source, packed, shards[WITH], seed=0)
        weights = block_weights(SIZES[size], source, shards[WITH])
        self.blocks = {
            name: Block(SIZES[size], shard, weights, backend) for name, shard in shards.items()
        }

    def _mesh(self, ranks: TreeCollective, chunks: Chunks) -> Mesh:
        axes = {"tp": ranks} if self.layout.cp == 1 else {"cp": ranks, "rows": ranks}
        axes |= {"rows": ranks} if self.layout.sp else {}
        return replace(local_mesh(), chunks=chunks, **axes)

    def call(self, name: str, backward: bool) -> Callable[[], dict[str, Tensor]]:
        """One launch of the forward, or of forward + backward; everything that it gives."""
        return partial(block_results, self.blocks[name], self.given, backward)

    def compare(self) -> tuple[int, int]:
        """How many elements this rank compares between overlap and none, and how many differ."""
        found, expected = (self.call(name, backward=True)() for name in (WITH, WITHOUT))
        pairs = [(found[key].reshape(-1), expected[key].reshape(-1)) for key in expected]
        different = sum(int(different_elements(*pair).sum()) for pair in pairs)
        return sum(value.numel() for value, _ in pairs), different


def check(bench: Bench, case: Case) -> dict[str, object]:
    """The same over all ranks, as a line of the report."""
    counts = case.compare()
    bench.tree.check()
    elements, different = map(sum, zip(*bench.world.gather_objects(counts), strict=True))
    return {
        "check": "overlap against none", "case": case.layout.name, "rows": case.rows,
        "elements": elements, "different": different, "passed": elements > 0 and different == 0,
    }  # fmt: skip


def measure(bench: Bench, case: Case, op: str, backward: bool, graph: bool) -> ExposedRow:
    """The three times of a pass, and what they say of the communication."""
    calls = [case.call(name, backward) for name in (WITH, WITHOUT, LEFT_OUT)]
    ours, without, left_out = bench.times(calls, graph)
    exposed, exposed_without = ours - left_out, without - left_out
    return ExposedRow(
        op, case.layout.name, case.rows, WITHOUT, ours, without, without / ours, graph,
        left_out_us=left_out, exposed_us=exposed, exposed_without_us=exposed_without,
        reduction=1 - exposed / exposed_without,
    )  # fmt: skip


def rank_main(out: Path, rows: Sequence[int]) -> None:
    """A rank: measure; rank 0 writes the report after every number of rows."""
    die_with_launcher()
    bench = Bench()
    if not bench.owns_gpu:
        raise PeerError("GPUs", torch.cuda.device_count(), f"{bench.size}, one a rank")
    measurements, checks = [], []

    def write(complete: bool) -> None:
        content = {
            "environment": gpu_environment(),
            "ranks": bench.size,
            "nvls": "off",
            "measurements": [asdict(row) for row in measurements],
            "bits": checks,
            "complete": complete,
        }
        if bench.rank == 0:
            write_json(out, content)

    for layout in (Layout(bench.size), Layout(bench.size, sp=True), Layout(cp=bench.size)):
        for num_rows in rows:
            case = Case(bench.tree, layout, num_rows, "full", "cuda", "triton")
            checks.append(check(bench, case))
            for op, backward in PASSES.items():
                for graph in (False, True) if num_rows <= GRAPH_MAX_ROWS else (False,):
                    measurements.append(measure(bench, case, op, backward, graph))
                    write(complete=False)
            del case
            torch.cuda.empty_cache()
    bench.close()
    write(complete=True)


def bench_overlap(out: Path, rows: Sequence[int] = ROWS, timeout_s: float = 600.0) -> None:
    """One rank a GPU; write `out`. **Raises:** PeerError if a rank fails, or for one GPU."""
    ranks = torch.cuda.device_count()
    if ranks < 2:
        raise PeerError("GPUs", ranks, "2 or more: a rank alone exposes nothing")
    start_ranks("h3lib.bench.overlap", [str(out), *map(str, rows)], ranks, timeout_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("rows", type=int, nargs="*", default=ROWS)
    options = parser.parse_args()
    rank_main(options.out, options.rows)


if __name__ == "__main__":
    main()
