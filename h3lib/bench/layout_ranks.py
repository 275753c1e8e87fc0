"""One rank of `h3lib bench layouts`: its world, its meshes, and times that all ranks agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from h3lib.bench.left_out import Give, LeftOut, Noted
from h3lib.bench.measure import Call, Launch, Protocol, Ranks, graphed, slowest_medians
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

    def noted_mesh(self, notes: list[Launch], give: Give) -> Mesh:
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
        self, calls: Mapping[str, Launch], protocol: Protocol
    ) -> tuple[dict[str, float], str | None]:
        """Median milliseconds of each call, of the slowest rank in each round; or why none.

        A call that cannot be recorded as a CUDA graph, where `protocol.graph` asks for it, on any
        rank is the only reason.
        """
        runs = [lambda _, call=call: call() for call in calls.values()]
        if protocol.graph:
            runs, reason = self._graphs(runs)
            if reason:
                return {}, reason
        num_calls = GRAPH_CALLS if protocol.graph else 1
        medians = slowest_medians(runs, 1, protocol, Ranks(self.gather, self.check))
        ms = [us / 1000 / num_calls for us in medians]
        return dict(zip(calls, ms, strict=True)), None

    def _graphs(self, runs: Sequence[Call]) -> tuple[list[Call], str | None]:
        graphs, reason = [], None
        for run in runs:
            try:
                graphs.append(graphed(run, GRAPH_CALLS))
            except RuntimeError as error:
                reason = f"no CUDA graph: {str(error).splitlines()[0]}"
            reason = next((r for r in self.gather(reason) if r), None)
            if reason:
                return [], reason
        return graphs, None

    def close(self) -> None:
        self.levels.close()
