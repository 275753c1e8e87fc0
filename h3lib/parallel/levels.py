"""Which transport joins which group: the peer tree inside a node, NCCL or Gloo between nodes.

| ranks                       | `peer`                              | `gloo` |
| --------------------------- | ----------------------------------- | ------ |
| of one node of the layout   | CUDA IPC and kernels that read peers | Gloo   |
| of several nodes            | NCCL if every rank owns a GPU, else Gloo | Gloo |

NCCL refuses two ranks on one GPU. The choice is made once, from the layout and from the UUIDs of
the ranks' GPUs, so alike on every rank, and is in the report; what was chosen and does not work is
an error, never another transport.
"""

from __future__ import annotations

import contextlib

import torch

from h3lib.contract import PeerError
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
    layout: Layout, timeout_s: float, transport: str, on_gpu: bool
) -> tuple[GlooWorld, Levels]:
    """The world of the ranks that were started, and the levels of their groups; none open yet.

    On GPUs every rank takes one (`take_gpus`). **Raises:** PeerError if the others do not join
    within `timeout_s`, or a rank has no GPU.
    """
    groups = mesh_groups(layout)
    world = GlooWorld(groups, timeout_s)
    try:
        gpus = take_gpus(world, on_gpu)
        owns_gpu = all(gpus) and len(set(gpus)) == len(gpus)
        levels = Levels(world, transports_of(layout, groups, transport, owns_gpu), gpus)
        world.open_data([group for group in groups if levels.transports[group] == "nccl"])
    except PeerError:
        world.close()
        raise
    return world, levels


def take_gpus(world: GlooWorld, on_gpu: bool) -> list[str]:
    """The ranks of a host take the GPUs that they see in turn; the UUID of every rank's, empty for
    a rank that is not `on_gpu`. Collective.

    **Raises:** PeerError on every rank if one cannot take a GPU.
    """
    hosts, rank, gpu, failure = world.members.hosts, world.rank, "", ""
    try:
        if on_gpu:
            index = hosts[:rank].count(hosts[rank]) % max(1, torch.cuda.device_count())
            torch.cuda.set_device(index)
            gpu = str(torch.cuda.get_device_properties(index).uuid)
    except (RuntimeError, AssertionError) as error:  # torch has both for a GPU that is not there
        failure = str(error).splitlines()[0]
    taken = world.gather_objects((gpu, failure))
    for other, (_, cause) in enumerate(taken):
        if cause:
            raise world.fail(PeerError(f"GPU of rank {other}", cause, "a GPU that works"))
    return [gpu for gpu, _ in taken]


class Levels:
    """Opens the level of a group, each once; `close` closes what it opened, and the world.

    `gpus` are the UUIDs of all ranks' GPUs, empty on CPUs; `checked` as `PeerTree`."""

    def __init__(
        self,
        world: GlooWorld,
        transports: dict[Group, str],
        gpus: list[str],
        checked: bool = True,
    ):
        self.world, self.transports, self.gpus = world, transports, gpus
        self.checked = checked
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

        return PeerTree(control, checked=self.checked)

    def used(self) -> list[str]:
        """The transports of the groups that were opened, for the report."""
        return sorted({self.transports[group] for group in self.opened})

    def ranks_per_gpu(self) -> int | None:
        """The most ranks that share a GPU; None on CPUs."""
        return max((self.gpus.count(gpu) for gpu in self.gpus if gpu), default=None)

    def close(self) -> None:
        """Close what was opened, in that order, then the world.

        **Raises:** PeerError if a peer fails now; everything is closed all the same.
        """
        with contextlib.ExitStack() as last_first:
            last_first.callback(self.world.close)
            for level in reversed(self.opened.values()):
                if hasattr(level, "close"):
                    last_first.callback(level.close)
            self.opened = {}
