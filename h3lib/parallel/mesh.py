"""The mesh: which ranks talk to each other, and the collective of every axis.

Axes: `tp` (same rows, other feature units), `cp` (same feature units, other rows), `rows`, over
which the row units are spread: the whole stage under SP, the cp axis without, and `pp` (the same
place in every stage, other layers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from h3lib.layout import Layout
from h3lib.parallel.collective import Collective, LocalCollective, TreeCollective
from h3lib.parallel.hierarchical import HierarchicalCollective
from h3lib.parallel.overlap import AS_SUITS, Chunks
from h3lib.parallel.pipeline import Pipeline
from h3lib.parallel.transport import Level

Group = tuple[int, ...]
Connect = Callable[[Group, int], Level]
"""Opens the group of these global ranks, seen from the given global rank."""


@dataclass(frozen=True)
class Mesh:
    """The axes of one rank."""

    tp: Collective
    cp: Collective
    rows: Collective
    pp: Pipeline
    chunks: Chunks = AS_SUITS


def local_mesh() -> Mesh:
    """The mesh of a world of one."""
    return Mesh(*(LocalCollective() for _ in range(3)), Pipeline())


def build_mesh(
    layout: Layout, rank: int, connect: Connect, chunks: Chunks = AS_SUITS
) -> Mesh:
    """The collectives of `rank`, hierarchical where a group has several ranks on several nodes;
    `chunks` says how products are cut that share their time with a collective."""
    axes = (_collective(layout, axis, rank, connect) for axis in _axes(layout, rank))
    return Mesh(*axes, _pipeline(layout, rank, connect), chunks)


def _pipeline(layout: Layout, rank: int, connect: Connect) -> Pipeline:
    if layout.pp == 1:
        return Pipeline()
    stages, stage = tuple(layout.pp_group(rank)), layout.stage(rank)
    before = connect(stages[stage - 1 : stage + 1], rank) if stage else None
    after = connect(stages[stage : stage + 2], rank) if stage < layout.pp - 1 else None
    return Pipeline(stage, layout.pp, before, after, TreeCollective(connect(stages, rank)))


def mesh_groups(layout: Layout) -> list[Group]:
    """Every group that some rank of the layout connects, in one order for all ranks.

    Whole axes are among them where they are hierarchical too: the control is flat.
    """
    groups: dict[Group, None] = {}
    for rank in range(layout.num_ranks):
        for axis in _axes(layout, rank):
            levels = (axis, *_levels(layout, axis, rank))
            groups.update(dict.fromkeys(group for group in levels if len(group) > 1))
        if layout.pp > 1:
            stages = tuple(layout.pp_group(rank))
            pairs = (stages[i : i + 2] for i in range(layout.pp - 1))
            groups.update(dict.fromkeys((stages, *pairs)))
    return list(groups)


def _axes(layout: Layout, rank: int) -> tuple[Group, Group, Group]:
    cp = tuple(layout.cp_group(rank))
    return tuple(layout.tp_group(rank)), cp, tuple(layout.stage_group(rank)) if layout.sp else cp


def _levels(layout: Layout, axis: Group, rank: int) -> list[Group]:
    """One group for a flat axis; for a hierarchical one this node's ranks, then their equals."""
    by_node: dict[int, list[int]] = {}
    for member in axis:
        by_node.setdefault(layout.node(member), []).append(member)
    local = by_node[layout.node(rank)]
    if len(by_node) == 1 or len(local) == 1:
        return [axis]
    place = local.index(rank)
    return [tuple(local), tuple(members[place] for members in by_node.values())]


def _collective(layout: Layout, axis: Group, rank: int, connect: Connect) -> Collective:
    if len(axis) == 1:
        return LocalCollective()
    levels = [connect(group, rank) for group in _levels(layout, axis, rank)]
    return TreeCollective(*levels) if len(levels) == 1 else HierarchicalCollective(*levels)
