"""One rank of `h3lib bench layouts`: its world, its meshes, and times that all ranks agree on."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from h3lib.bench.left_out import Give, LeftOut, Noted
from h3lib.bench.measure import Protocol
from h3lib.bench.plain import Axis, LeftOutAxis
from h3lib.layout import Layout
from h3lib.parallel.gloo import GlooWorld
from h3lib.parallel.levels import Levels, transports_of
from h3lib.parallel.mesh import Group, Mesh, build_mesh, mesh_groups
from h3lib.parallel.nccl import NcclLibrary
from h3lib.parallel.peer import PeerTree
from h3lib.parallel.place import own_place

TIMEOUT_S = 90.0
GRAPH_CALLS = 4
Call = Callable[[], object]


class RankWorld:
    """The ranks of a layout, each with a GPU of its own."""

    def __init__(self, layout: Layout):
        torch.cuda.set_device(own_place().rank)
        groups = mesh_groups(layout)
        self.layout = layout
        self.world = GlooWorld(groups, TIMEOUT_S, data_groups=groups)
        self.rank = self.world.rank
        transports = transports_of(layout, groups, "peer", owns_gpu=True)
        self.levels = Levels(self.world, transports, [], checked=False)

    def gather(self, value: object) -> list:
        """Every rank's value."""
        return self.world.gather_objects(value)

    def mesh(self) -> Mesh:
        """Over the peer tree; calls are not checked before `check`."""
        return build_mesh(self.layout, self.rank, self.levels)

    def noted_mesh(self, notes: list[Call], give: Give) -> Mesh:
        """The same, with every call of a level noted."""
        return build_mesh(
            self.layout, self.rank, lambda group, rank: Noted(self.levels(group, rank), notes, give)
        )

    def left_out_mesh(self, give: Give) -> Mesh:
        """Nothing moves."""
        return build_mesh(
            self.layout, self.rank, lambda group, rank: LeftOut(group.index(rank), len(group), give)
        )

    def axes(self, give: Give | None = None) -> tuple[Axis, Axis]:
        """The library's tp and cp; with `give`, left out."""
        groups = self.layout.tp_group(self.rank), self.layout.cp_group(self.rank)
        return tuple(self._axis(tuple(group), give) for group in groups)

    def _axis(self, group: Group, give: Give | None) -> Axis:
        rank, size = group.index(self.rank), len(group)
        if give is not None:
            return LeftOutAxis(rank, size, None, give)
        return Axis(rank, size, NcclLibrary(self.world, list(group)) if size > 1 else None)

    @property
    def trees(self) -> list[PeerTree]:
        opened = self.levels.opened.values()
        return [level for level in opened if isinstance(level, PeerTree)]

    def check(self) -> None:
        """**Raises:** PeerError if a collective since the last time failed."""
        for tree in self.trees:
            tree.check()

    def times(
        self, calls: Mapping[str, Call], protocol: Protocol
    ) -> tuple[dict[str, float], str | None]:
        """Median milliseconds of each call, of the slowest rank in each round; or why none.

        A call that cannot be recorded as a CUDA graph, where `protocol.graph` asks for it, on any
        rank is the only reason.
        """
        runs = list(calls.values())
        if protocol.graph:
            runs, reason = self._graphs(runs)
            if reason:
                return {}, reason
        repeats = [self._warm_up(run, protocol) for run in runs]
        samples: list[list[float]] = [[] for _ in runs]
        for round_index in range(protocol.rounds):
            order = range(len(runs)) if round_index % 2 == 0 else reversed(range(len(runs)))
            for i in order:
                samples[i].append(self._time_ms(runs[i], repeats[i]))
        per_launch = GRAPH_CALLS if protocol.graph else 1
        slowest = [list(map(max, zip(*rank, strict=True))) for rank in self._by_call(samples)]
        medians = [statistics.median(rounds) / per_launch for rounds in slowest]
        return dict(zip(calls, medians, strict=True)), None

    def _by_call(self, samples: Sequence[Sequence[float]]) -> list[list[Sequence[float]]]:
        """For each call the rounds of every rank."""
        ranks = self.gather(samples)
        return [[rank[i] for rank in ranks] for i in range(len(samples))]

    def _graphs(self, runs: Sequence[Call]) -> tuple[list[Call], str | None]:
        graphs, reason = [], None
        for run in runs:
            try:
                graphs.append(_graphed(run))
            except RuntimeError as error:
                reason = f"no CUDA graph: {str(error).splitlines()[0]}"
            reason = next((r for r in self.gather(reason) if r), None)
            if reason:
                return [], reason
        return graphs, None

    def _warm_up(self, run: Call, protocol: Protocol) -> int:
        """How many launches fill a round, the same on every rank."""
        self._time_ms(run, 1)
        once = max(self.gather(self._time_ms(run, 1)))
        steady = max(self.gather(self._time_ms(run, max(1, int(protocol.warm_up_ms / once)))))
        return max(1, int(protocol.round_ms / steady))

    def _time_ms(self, run: Call, repeats: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.gather(None)
        start.record()
        for _ in range(repeats):
            run()
        stop.record()
        stop.synchronize()
        self.check()
        return start.elapsed_time(stop) / repeats

    def close(self) -> None:
        self.levels.close()


def _graphed(run: Call) -> Call:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(GRAPH_CALLS):
            run()
    return graph.replay
