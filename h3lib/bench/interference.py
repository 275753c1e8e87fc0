"""A product beside a collective, each on a stream: `h3lib bench interference --out FILE.json`.

    product slowdown      its time while collectives run all the while / its time alone on all
                          multiprocessors, whatever it leaves free
    collective slowdown   its time while products run all the while / its time alone with as many
                          programs as it has by default, whatever its limit
    gain                  1 / product slowdown + 1 / collective slowdown: what two streams do in the
                          time in which one of the two would do 1; at 1 they are no faster than one
    of NCCL               what a product loses / what it loses beside NCCL's with its default CTAs
    multiprocessors       that a launch can be on at once: its programs, at most all; from a profile

One rank a GPU, two or more. Products of one wave have a tile for each multiprocessor and lose a
whole wave if one is taken; one of many waves can leave some free, as products beside a lane do. All
work is replayed from CUDA graphs, so that no host keeps pace; alone
and beside take turns, medians, the slowest rank's. How many programs a collective of the peer tree
has is not part of its bits.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from h3lib.bench.collectives import BF16, COLUMNS, Bench, Call
from h3lib.bench.start import start_ranks
from h3lib.contract import PeerError
from h3lib.files import write_json
from h3lib.ops.backend import BESIDE, load_backend
from h3lib.ops.gemm import linear_forward
from h3lib.parallel.collective import TreeCollective
from h3lib.parallel.launch import die_with_launcher
from h3lib.parallel.nccl import NcclLibrary
from h3lib.parallel.peer_lane import LANE_CHANNELS, LANE_MULTIPROCESSORS
from h3lib.parallel.peer_plan import Shape
from h3lib.parallel.place import own_place
from h3lib.provenance import gpu_environment

BUSY = -1  # priority of a stream that goes before others
ROUNDS, WINDOW_US = 3, 5_000.0
COVER, MOST_COVER = 3, 96  # times the window for which the other side's work is laid out
CALLS = 8  # in a graph
ROWS = 8192  # of a collective's operand, 5,376 columns in FP32: 176 MB a rank
ONE_WAVE = (1408, 3072, 21504)  # 11 x 12 tiles of 128 x 256, on 132 multiprocessors
MANY_WAVES = (4096, 43008, 5376)  # ff-in of 4,096 rows
CHANNELS = ((None, 0), (None, BUSY), (64, 0), (LANE_CHANNELS, 0), (LANE_CHANNELS, BUSY), (16, 0))
NCCL_CTAS = (8, 4)
REDUCE_SCATTER, ALL_REDUCE = "reduce_scatter_rows to BF16", "all_reduce to BF16"
OURS, NCCL = "peer tree", "NCCL FP32"


@dataclass(frozen=True)
class Work:
    """`CALLS` calls in a graph, and the stream that they are replayed on; `limit` is that of a
    collective's programs, None for the default, or how many multiprocessors a product leaves."""

    name: str
    way: str
    limit: int | None
    priority: int
    call: Call
    graph: torch.cuda.CUDAGraph
    stream: torch.cuda.Stream

    def describe(self, what: str) -> dict[str, object]:
        """Its part of a line; `what` is "product" or "collective"."""
        named = {what: self.name, f"{what}_way": self.way}
        if what == "product":
            return named | {"left_free": self.limit or 0}
        return named | {"programs": self.limit, "high_priority": self.priority < 0}


class Interference:
    """One rank of the benchmark."""

    def __init__(self):
        self.bench = Bench()
        if not self.bench.owns_gpu:
            raise PeerError("ranks on a GPU", "more than one", "one: NCCL takes no more")
        self.world, self.rank, self.size = self.bench.world, self.bench.rank, self.bench.size
        self.trees = {None: self.bench.tree}

    def capture(
        self, name: str, way: str, call: Call, limit: int | None = None, priority: int = 0
    ) -> Work:
        """A call as a graph on a stream of its own."""
        stream = torch.cuda.Stream(priority=priority)
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                call()
        return Work(name, way, limit, priority, call, graph, stream)

    def products(self) -> list[Work]:
        """Of one wave by cuBLAS and by this project, and of many waves by this project, on all
        multiprocessors and on as many as a lane leaves."""

        def operands(rows: int, columns: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
            shapes = (rows, depth), (columns, depth)
            return tuple(torch.randn(shape, device="cuda", dtype=BF16) for shape in shapes)

        x, w = operands(*ONE_WAVE)
        wide = operands(*MANY_WAVES)

        def many_waves() -> None:
            linear_forward(*wide, backend="triton")

        def leaving() -> None:
            BESIDE.hold(self, LANE_MULTIPROCESSORS, math.inf)
            many_waves()
            BESIDE.release(self)

        return [
            self.capture("one wave", "cuBLAS", lambda: torch.matmul(x, w.T)),
            self.capture("one wave", "h3lib", lambda: linear_forward(x, w, backend="triton")),
            self.capture("many waves", "h3lib", many_waves),
            self.capture("many waves", "h3lib", leaving, LANE_MULTIPROCESSORS),
        ]

    def collectives(self) -> list[Work]:
        """Ours with several numbers of channels, first with the default; NCCL's with its own number
        of CTAs and with fewer."""
        bench, size = self.bench, self.size
        roots = torch.randn(1, ROWS, COLUMNS, device="cuda")
        cuts = [ROWS * rank // size for rank in range(size + 1)]
        out = torch.empty(ROWS // size, COLUMNS, device="cuda")
        flat = torch.zeros(ROWS * COLUMNS, device="cuda")  # in place: zeros stay finite

        scattered = roots, bench.cuts, cuts, BF16
        reduced = roots.view(1, -1), bench.cuts, BF16
        found = []
        for count, priority in CHANNELS:
            if count not in self.trees:
                self.trees[count] = bench.open(bench.ranks, Shape(channels=count))
            ours = TreeCollective(self.trees[count])
            for name, call in (
                (REDUCE_SCATTER, lambda c=ours: c.reduce_scatter_rows(*scattered)),
                (ALL_REDUCE, lambda c=ours: c.all_reduce(*reduced)),
            ):
                found.append(self.capture(name, OURS, call, count, priority))
        for most in (None, *NCCL_CTAS):
            library = NcclLibrary(self.world, list(bench.ranks), most)
            for name, call in (
                (REDUCE_SCATTER, lambda nccl=library: nccl.reduce_scatter(out, roots[0])),
                (ALL_REDUCE, lambda nccl=library: nccl.all_reduce(flat)),
            ):
                found.append(self.capture(name, NCCL, call, most))
        return found

    def pair(self, product: Work, collective: Work) -> dict[str, object]:
        """Both alone and beside each other."""
        samples: dict[str, list[float]] = {}
        sides = {"product": (product, collective), "collective": (collective, product)}
        replays = {name: self._replays(work) for name, (work, _) in sides.items()}
        for _ in range(ROUNDS):
            for name, (work, other) in sides.items():
                alone, _ = self._window(work, replays[name])
                samples.setdefault(f"{name}_alone_us", []).append(alone)
                beside = self._covered(work, replays[name], other, alone)
                samples.setdefault(f"{name}_beside_us", []).append(beside)
        mine = {name: statistics.median(taken) for name, taken in samples.items()}
        ranks = self.world.gather_objects(mine)
        times = {name: max(rank[name] for rank in ranks) for name in mine}
        return {**product.describe("product"), **collective.describe("collective"), **times}

    def _replays(self, work: Work) -> int:
        """Replays that fill a window, the same on every rank."""
        self._window(work, 1)  # a graph's first replay also uploads it
        took, _ = self._window(work, 1)
        longest = max(self.world.gather_objects(took))
        return max(1, math.ceil(WINDOW_US / (CALLS * longest)))

    def _covered(self, work: Work, replays: int, other: Work, alone_us: float) -> float:
        """Time of a call while the other work runs from before its window until after it.

        **Raises:** PeerError if the other work always ends too early.
        """
        other_us, _ = self._window(other, 1)
        ratio = max(self.world.gather_objects(replays * alone_us / other_us))
        cover = COVER
        while cover <= MOST_COVER:
            took, covered = self._window(work, replays, other, math.ceil(cover * ratio) + 1)
            if all(self.world.gather_objects(covered)):
                return took
            cover *= 2
        raise PeerError(f"{other.name} beside {work.name}", "ended first", "one that lasts")

    def _window(
        self, work: Work, replays: int, other: Work | None = None, others: int = 0
    ) -> tuple[float, bool]:
        """Microseconds of a call, and whether the other work was still running at the end."""
        began, start, stop, ended = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        self.world.gather_objects(None)
        if other is not None:
            with torch.cuda.stream(other.stream):
                other.graph.replay()
                began.record()
                for _ in range(others):
                    other.graph.replay()
                ended.record()
            work.stream.wait_event(began)
        with torch.cuda.stream(work.stream):
            start.record()
            for _ in range(replays):
                work.graph.replay()
            stop.record()
        torch.cuda.synchronize()
        took = 1000 * start.elapsed_time(stop) / (replays * CALLS)
        return took, other is not None and stop.elapsed_time(ended) > 0

    def launches(self, work: Work) -> list[dict[str, object]]:
        """Kernels of one call, as the profiler saw them. **Raises:** PeerError if it saw none."""
        self.world.gather_objects(None)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            with torch.cuda.stream(work.stream):
                work.call()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory(prefix="h3lib-profile-") as folder:
            path = Path(folder, "trace.json")
            seen.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        found = [_launch(event) for event in events if event.get("cat") == "kernel"]
        if not all(self.world.gather_objects(found)):
            raise PeerError(f"kernels in a profile of {work.name}", 0, "at least one on every rank")
        return found

    def close(self) -> None:
        for tree in self.trees.values():
            tree.check()
        for count, tree in self.trees.items():
            if count is not None:  # that one is the bench's
                tree.close()
        self.bench.close()


def relate(lines: list[dict]) -> None:
    """Add what needs the line of the default as well: slowdowns, gain, and of_nccl, None where
    nothing is lost beside NCCL."""
    default = {
        (line["product"], line["product_way"], line["collective"], line["collective_way"]): line
        for line in lines
        if line["programs"] is None and not line["high_priority"] and not line["left_free"]
    }
    for line in lines:
        same = line["product"], line["product_way"], line["collective"]
        alone = default[*same, line["collective_way"]]
        line["product_slowdown"] = line["product_beside_us"] / alone["product_alone_us"]
        line["collective_slowdown"] = line["collective_beside_us"] / alone["collective_alone_us"]
        line["gain"] = 1 / line["product_slowdown"] + 1 / line["collective_slowdown"]
        theirs = default[*same, NCCL]
        lost = theirs["product_beside_us"] / theirs["product_alone_us"] - 1
        line["of_nccl"] = (line["product_slowdown"] - 1) / lost if lost > 0 else None


def _launch(event: dict) -> dict[str, object]:
    """A kernel of a trace: programs and threads of its launch."""
    programs, threads = (math.prod(event["args"][key]) for key in ("grid", "block"))
    all_of_them = torch.cuda.get_device_properties(0).multi_processor_count
    return {
        "kernel": event["name"].split("(")[0].split("<")[0],
        "programs": programs,
        "threads": threads,
        "multiprocessors": min(programs, all_of_them),
        "us": event["dur"],
    }


def rank_main(out: Path) -> None:
    """A rank: measure; rank 0 writes the report, whole or `complete: false`."""
    die_with_launcher()
    load_backend("triton", "cuda")
    torch.manual_seed(0)
    run = Interference()
    products, collectives = run.products(), run.collectives()
    found, profiles = [], []

    def write(complete: bool) -> None:
        if run.rank:
            return
        content = {
            "environment": gpu_environment(),
            "ranks": run.size,
            "nvls": "off",
            "protocol": {"rounds": ROUNDS, "window_us": WINDOW_US, "graph_calls": CALLS},
            "shapes": {"one wave": ONE_WAVE, "many waves": MANY_WAVES, "roots": (ROWS, COLUMNS)},
            "measurements": found,
            "launches": profiles,
            "complete": complete,
        }
        write_json(out, content)

    for collective in collectives:
        for product in products:
            found.append(run.pair(product, collective))
            if run.rank == 0:
                print(found[-1], flush=True)
        write(complete=False)
    for what, works in (("product", products), ("collective", collectives)):
        profiles.extend(work.describe(what) | {"kernels": run.launches(work)} for work in works)
    run.close()
    relate(found)
    write(complete=True)


def bench_interference(out: Path) -> None:
    """One rank a GPU; write `out`. **Raises:** PeerError for one GPU, and if a rank fails."""
    gpus = torch.cuda.device_count()
    if gpus < 2:
        raise PeerError("GPUs", gpus, "2 or more, one a rank")
    start_ranks("h3lib.bench.interference", ["--out", str(out)], gpus)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    (rank_main if own_place() is not None else bench_interference)(options.out)


if __name__ == "__main__":
    main()
