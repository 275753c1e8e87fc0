"""Which transport joins which group."""

import pytest

from h3lib.layout import Layout
from h3lib.parallel.levels import Levels, transports_of
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
    def connect(self, ranks, rank):
        return ("level", ranks, rank)


def test_a_group_is_opened_once_and_what_was_opened_is_reported():
    levels = Levels(World(), {(0, 1): "gloo", (0, 2): "gloo", (1, 3): "nccl"})
    assert levels((0, 1), 0) is levels((0, 1), 0)
    assert list(levels.opened) == [(0, 1)] and levels.used() == ["gloo"]
    levels.close()
    assert levels.opened == {}
    with pytest.raises(KeyError):
        levels((5, 6), 5)
