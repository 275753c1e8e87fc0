"""Which transport joins which group: the peer tree inside a node, NCCL or Gloo between nodes.

| ranks                       | `peer`                              | `gloo` |
| --------------------------- | ----------------------------------- | ------ |
| of one node of the layout   | CUDA IPC and kernels that read peers | Gloo   |
| of several nodes            | NCCL if every rank owns a GPU, else Gloo | Gloo |

NCCL refuses two ranks on one GPU. The choice is made once, from the layout and from whether ranks
own a GPU, and is in the report;
what was chosen and does not work is an error, never another transport.
"""

from __future__ import annotations

from h3lib.layout import Layout
from h3lib.parallel.gloo import GlooWorld
from h3lib.parallel.mesh import Group, mesh_groups
from h3lib.parallel.nccl import NcclTransport
from h3lib.parallel.transport import Level

TRANSPORTS = ("gloo", "peer")


def transports_of(layout: Layout, groups: list[Group], transport: str, owns_gpu: bool) -> dict:
    """(transport, for every group) that `Levels` opens."""
    between = "nccl" if transport == "peer" and owns_gpu else "gloo"
    return {
        group: transport if len({layout.node(rank) for rank in group}) == 1 else between
        for group in groups
    }


def join(
    layout: Layout, timeout_s: float, transport: str, owns_gpu: bool
) -> tuple[GlooWorld, Levels]:
    """The world of the ranks that were started, and the levels of their groups; none open yet.

    **Raises:** PeerError if the others do not join within `timeout_s`.
    """
    groups = mesh_groups(layout)
    transports = transports_of(layout, groups, transport, owns_gpu)
    between = [group for group in groups if transports[group] == "nccl"]
    world = GlooWorld(groups, timeout_s, data_groups=between)
    return world, Levels(world, transports)


class Levels:
    """Opens the level of a group, each once; `close` closes what it opened."""

    def __init__(self, world: GlooWorld, transports: dict[Group, str]):
        self.world, self.transports = world, transports
        self.opened: dict[Group, Level] = {}

    def __call__(self, group: Group, rank: int) -> Level:
        """Collective over the group. **Raises:** PeerError on every rank if it cannot be opened."""
        if group not in self.opened:
            self.opened[group] = self._open(group, rank)
        return self.opened[group]

    def _open(self, group: Group, rank: int) -> Level:
        kind = self.transports[group]
        if kind == "nccl":
            return NcclTransport(self.world, list(group), rank)
        control = self.world.connect(group, rank)
        if kind == "gloo":
            return control
        from h3lib.parallel.peer import PeerTree  # needs Triton, which Gloo does not

        return PeerTree(control)

    def used(self) -> list[str]:
        """The transports of the groups that were opened, for the report."""
        return sorted({self.transports[group] for group in self.opened})

    def close(self) -> None:
        for level in self.opened.values():
            if hasattr(level, "close"):
                level.close()
        self.opened = {}
