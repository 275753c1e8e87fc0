"""The mesh: axes, groups known to all ranks in one order, hierarchies where nodes cut an axis."""

import pytest

from h3lib.contract import LayoutError
from h3lib.layout import CP_DEGREES, TP_DEGREES, Layout
from h3lib.parallel.collective import LocalCollective, TreeCollective
from h3lib.parallel.hierarchical import HierarchicalCollective
from h3lib.parallel.mesh import build_mesh, local_mesh, mesh_groups
from h3lib.parallel.transport import ThreadWorld


def layouts():
    """Every layout, flat and with every node shape that the layout accepts."""
    for tp in TP_DEGREES:
        for cp in CP_DEGREES:
            for sp in (False, True):
                for local in (None, *range(1, tp * cp + 1)):
                    try:
                        yield Layout(tp, cp, sp, local)
                    except LayoutError:
                        continue


LAYOUTS = list(layouts())


class Opened:
    """Notes the groups that a rank opens and whom it would reach."""

    def __init__(self):
        self.groups = []

    def __call__(self, group, rank):
        self.groups.append(tuple(group))
        return ThreadWorld(64).connect(group, rank)


def shape(collective) -> str:
    if isinstance(collective, HierarchicalCollective):
        return f"{collective.nodes.size}x{collective.local.size}"
    return "local" if isinstance(collective, LocalCollective) else str(collective.size)


def axes(layout: Layout, rank: int = 0) -> tuple[str, str, str]:
    mesh = build_mesh(layout, rank, Opened())
    return shape(mesh.tp), shape(mesh.cp), shape(mesh.rows)


@pytest.mark.parametrize(
    "name,expected",
    [
        ("tp1", ("local", "local", "local")),
        ("tp4", ("4", "local", "local")),
        ("cp3", ("local", "3", "3")),
        ("tp4-cp2", ("4", "2", "2")),
        ("tp4-cp2-sp", ("4", "2", "8")),
        ("tp4-sp", ("4", "local", "4")),
        ("tp8-local4", ("2x4", "local", "local")),
        ("tp8-cp2-sp-local4", ("2x4", "2", "4x4")),  # a cp group has one rank a node: flat
        ("tp2-cp4-local4", ("2", "2x2", "2x2")),
        ("tp2-cp4-sp-local4", ("2", "2x2", "2x4")),
        ("tp4-cp6-local8", ("4", "3x2", "3x2")),
        ("tp8-local1", ("8", "local", "local")),
        ("tp8-local8", ("8", "local", "local")),
    ],
)
def test_axes_of_a_layout(name, expected):
    layout = Layout.parse(name)
    for rank in range(layout.num_ranks):
        assert axes(layout, rank) == expected


def test_every_rank_has_its_place_on_every_axis_of_every_layout():
    for layout in LAYOUTS:
        for rank in range(layout.num_ranks):
            mesh = build_mesh(layout, rank, Opened())
            cp_rank, tp_rank = layout.place(rank)
            assert (mesh.tp.rank, mesh.tp.size) == (tp_rank, layout.tp), layout.name
            assert (mesh.cp.rank, mesh.cp.size) == (cp_rank, layout.cp), layout.name
            rows = (rank, layout.num_ranks) if layout.sp else (cp_rank, layout.cp)
            assert (mesh.rows.rank, mesh.rows.size) == rows, layout.name


def test_all_ranks_list_the_groups_that_any_rank_opens_once():
    """Process groups are made by all ranks together: a group missing on one rank would hang."""
    for layout in LAYOUTS:
        groups = mesh_groups(layout)
        assert len(set(groups)) == len(groups)
        opened = Opened()
        for rank in range(layout.num_ranks):
            build_mesh(layout, rank, opened)
        assert set(opened.groups) <= set(groups), layout.name
        assert all(len(group) > 1 for group in groups)


def test_flat_groups_of_hierarchical_axes_are_listed_for_the_control():
    groups = mesh_groups(Layout.parse("tp8-local4"))
    assert groups == [tuple(range(8)), (0, 1, 2, 3), (0, 4), (1, 5), (2, 6), (3, 7), (4, 5, 6, 7)]
    assert mesh_groups(Layout()) == []


def test_levels_of_a_hierarchy_stay_in_the_node_and_in_the_place():
    for layout in LAYOUTS:
        if layout.num_nodes == 1:
            continue
        for rank in range(layout.num_ranks):
            opened = Opened()
            mesh = build_mesh(layout, rank, opened)
            for collective in (mesh.tp, mesh.cp, mesh.rows):
                if isinstance(collective, HierarchicalCollective):
                    local, nodes = opened.groups[:2]
                    assert {layout.node(r) for r in local} == {layout.node(rank)}
                    assert {r % layout.local_size for r in nodes} == {rank % layout.local_size}
                    assert local[collective.local.rank] == nodes[collective.nodes.rank] == rank
                if not isinstance(collective, LocalCollective):
                    taken = 2 if isinstance(collective, HierarchicalCollective) else 1
                    del opened.groups[:taken]
            assert opened.groups == []


def test_mesh_of_a_world_of_one_opens_nothing():
    mesh = local_mesh()
    for collective in (mesh.tp, mesh.cp, mesh.rows):
        assert isinstance(collective, LocalCollective)
        assert isinstance(collective, TreeCollective)
    opened = Opened()
    build_mesh(Layout(), 0, opened)
    assert opened.groups == []
