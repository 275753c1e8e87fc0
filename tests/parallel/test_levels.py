"""Which transport joins which group."""

from types import SimpleNamespace

import pytest
import torch

from h3lib.contract import PeerError
from h3lib.layout import Layout
from h3lib.parallel.levels import Levels, take_gpus, transports_of
from h3lib.parallel.mesh import mesh_groups


def chosen(name: str, transport: str, owns_gpu: bool) -> dict[tuple[int, ...], str]:
    layout = Layout.parse(name)
    return transports_of(layout, mesh_groups(layout), transport, owns_gpu)


def test_groups_of_one_node_are_peers_and_equal_ranks_of_nodes_are_not():
    found = chosen("tp8-local4", "peer", owns_gpu=False)
    assert found[0, 1, 2, 3] == found[4, 5, 6, 7] == "peer"
    assert found[0, 4] == found[3, 7] == "gloo"
    assert found[0, 1, 2, 3, 4, 5, 6, 7] == "gloo"
    assert set(chosen("tp4-cp2-sp", "peer", owns_gpu=False).values()) == {"peer"}


def test_nccl_joins_nodes_only_where_every_rank_owns_a_gpu():
    assert chosen("tp8-local4", "peer", owns_gpu=True)[0, 4] == "nccl"
    assert set(chosen("tp8-local4", "gloo", owns_gpu=True).values()) == {"gloo"}


class World:
    closed = False

    def connect(self, ranks, rank):
        return ("level", ranks, rank)

    def close(self):
        self.closed = True


def test_a_group_is_opened_once_and_what_was_opened_is_reported():
    levels = Levels(World(), {(0, 1): "gloo", (0, 2): "gloo", (1, 3): "nccl"}, ["", ""])
    assert levels.ranks_per_gpu() is None
    assert levels((0, 1), 0) is levels((0, 1), 0)
    assert list(levels.opened) == [(0, 1)] and levels.used() == ["gloo"]
    levels.close()
    assert levels.opened == {}
    with pytest.raises(KeyError):
        levels((5, 6), 5)


class Opened:
    def __init__(self, name, closed, fails=False):
        self.name, self.closed, self.fails = name, closed, fails

    def close(self):
        self.closed.append(self.name)
        if self.fails:
            raise PeerError(self.name, "a peer that died", "none")


def test_everything_is_closed_in_the_order_of_opening_also_when_a_peer_fails_meanwhile():
    world, closed = World(), []
    levels = Levels(world, {}, [])
    levels.opened = {
        (0, 1): Opened("first", closed, fails=True),
        (0, 2): Opened("second", closed),
        (0, 3): "no close",
    }
    with pytest.raises(PeerError, match="first: received 'a peer that died'"):
        levels.close()
    assert closed == ["first", "second"] and world.closed and levels.opened == {}


class HostWorld:
    """Rank `rank` of ranks on hosts; every other rank says `others`."""

    def __init__(self, hosts, rank, others):
        self.members, self.rank = SimpleNamespace(hosts=hosts), rank
        self.others, self.failed = others, None

    def gather_objects(self, value):
        return [value if r == self.rank else other for r, other in enumerate(self.others)]

    def fail(self, error):
        self.failed = error
        return error


@pytest.fixture
def visible(monkeypatch):
    """The GPUs that this process sees."""
    uuids = ["GPU-a", "GPU-b"]
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: taken.append(uuids[index]))
    named = lambda index: SimpleNamespace(uuid=uuids[index])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", named)
    return uuids


def test_ranks_of_a_host_take_its_gpus_in_turn_and_know_all_uuids(visible):
    hosts, others = ["m", "n", "n", "n"], [("GPU-x", ""), ("GPU-a", ""), ("", ""), ("GPU-a", "")]
    gpus = take_gpus(HostWorld(hosts, 2, others), on_gpu=True)
    assert gpus == ["GPU-x", "GPU-a", "GPU-b", "GPU-a"]
    assert Levels(World(), {}, gpus).ranks_per_gpu() == 2


def test_ranks_that_see_one_gpu_each_own_it(visible):
    """CUDA_VISIBLE_DEVICES hides the others: two ranks, one visible GPU, none shared."""
    visible[:] = ["GPU-b"]
    assert take_gpus(HostWorld(["n", "n"], 1, [("GPU-a", "")] * 2), True) == ["GPU-a", "GPU-b"]
    assert take_gpus(HostWorld(["n", "n"], 1, [("GPU-b", "")] * 2), True) == ["GPU-b", "GPU-b"]
    assert take_gpus(HostWorld(["n", "n"], 1, [("GPU-a", "")] * 2), False) == ["GPU-a", ""]


def test_a_rank_without_a_gpu_is_named_on_every_rank(visible):
    world = HostWorld(["n", "n"], 0, [("GPU-a", ""), ("", "no CUDA-capable device is detected")])
    with pytest.raises(PeerError, match="GPU of rank 1: received 'no CUDA-capable") as raised:
        take_gpus(world, True)
    assert raised.value is world.failed
