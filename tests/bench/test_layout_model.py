"""The layout model: its list of collectives is what the block asks for, its bytes what is read."""

import json
import threading

import pytest

from h3lib.bench.layout_model import (
    BACKWARD,
    FINISH,
    FORWARD,
    GATHER,
    NIC,
    NODE,
    Collective,
    Link,
    collectives,
    communication_us,
    compute_us,
    fit,
    fitted_links,
    groups,
    measured_points,
    steps,
)
from h3lib.book import ROOT
from h3lib.contract import PUBLISHED, SIZES, ReportError
from h3lib.layout import Layout, Ownership
from h3lib.model.block import Block
from h3lib.model.inputs import block_inputs, block_weights
from h3lib.model.packing import job_for_rows, pack
from h3lib.model.weights import SyntheticWeights
from h3lib.parallel import collective
from h3lib.parallel.mesh import build_mesh
from h3lib.parallel.shard import SeqShard
from h3lib.parallel.transport import ThreadWorld

TINY, ROWS = SIZES["tiny"], 1024  # one key block a sequence unit: every rank has equally many rows


def _asked(layout: Layout, monkeypatch) -> tuple[list[tuple], int]:
    """(op, ranks, elements, bytes of one in the result, roots) that rank 0's block asks for."""
    found, packed = [], pack(job_for_rows(ROWS))
    rank_of_thread: dict[int, int] = {}

    def note(op: str, axis: collective.Collective, *numbers: int) -> None:
        if rank_of_thread[threading.get_ident()] == 0 and axis.size > 1:
            found.append((op, axis.size, *numbers))

    def watch(op: str, numbers) -> None:
        plain = getattr(collective.Collective, op)

        def watched(self, x, *rest, **named):
            note(op, self, *numbers(x, *rest))
            return plain(self, x, *rest, **named)

        monkeypatch.setattr(collective.Collective, op, watched)

    watch("all_gather_rows", lambda x, cuts: (cuts[-1] * x[0].numel(), x.itemsize, 0))
    watch("all_gather_columns", lambda x, cuts: (cuts[-1] * len(x), x.itemsize, 0))
    watch("all_reduce", lambda x, cuts, dtype, *_: (x[0].numel(), dtype.itemsize, len(x)))
    watch(
        "reduce_scatter_rows",
        lambda x, cuts, rows, dtype, *_: (x[0].numel(), dtype.itemsize, len(x)),
    )
    world, owner = ThreadWorld(layout.num_ranks), Ownership.of(layout, ROWS, PUBLISHED)

    def rank_main(rank: int) -> None:
        rank_of_thread[threading.get_ident()] = rank
        shard = SeqShard(owner, rank, build_mesh(layout, rank, world.connect))
        source = SyntheticWeights(TINY, 0)
        given = block_inputs(TINY, source, packed, shard, 0)
        block = Block(TINY, shard, block_weights(TINY, source, shard))
        block.forward(given.x, given.temb, given.rows)
        block.backward(given.dout)

    world.run(rank_main)
    return found, len(packed.timestep)


@pytest.mark.parametrize("name", ["tp2", "cp2", "tp4-cp2-sp", "tp8-sp", "cp3"])
def test_the_list_of_collectives_is_what_the_block_asks_for(name, monkeypatch):
    layout = Layout.parse(name)
    asked, timesteps = _asked(layout, monkeypatch)
    ranks = {axis: local * nodes for axis, (local, nodes) in groups(layout).items()}
    listed = [
        (call.op, ranks[call.axis], call.elements, call.item, call.roots)
        for call in collectives(layout, ROWS, timesteps, TINY)
        if ranks[call.axis] > 1
    ]
    if name == "cp3":  # its ranks have 2 or 3 sequence units: the list is of the rank with most
        asked, listed = ([line[:2] for line in lines] for lines in (asked, listed))
    assert listed == asked


def test_bytes_of_every_kind_of_collective_by_hand():
    reduce = Collective(FORWARD, "", "tp", "all_reduce", 1 << 24, 2, 1)
    scatter = Collective(FORWARD, "", "tp", "reduce_scatter_rows", 1 << 24, 2, 1)
    gather = Collective(FORWARD, "", "cp", "all_gather_rows", 1 << 24, 2)
    n = 1 << 24
    assert steps(reduce, 1, 1) == []
    assert steps(reduce, 8, 1) == [(FINISH, NODE, 3.5 * n), (GATHER, NODE, 1.75 * n)]
    assert steps(scatter, 8, 1) == [(FINISH, NODE, 3.5 * n)]
    assert steps(gather, 8, 1) == [(GATHER, NODE, 1.75 * n)]
    # two nodes of four: slices of the node's roots cross once, rounded slices not at all
    assert steps(reduce, 4, 2) == [(FINISH, NODE, 3 * n), (FINISH, NIC, n), (GATHER, NODE, 1.5 * n)]
    assert steps(scatter, 4, 2) == [(FINISH, NODE, 3 * n), (FINISH, NIC, n / 2)]
    assert steps(gather, 4, 2) == [(GATHER, NIC, n / 4), (GATHER, NODE, 1.5 * n)]
    # one rank a node: two-shot over the network
    assert steps(reduce, 1, 2) == [(FINISH, NIC, 2 * n), (GATHER, NIC, n)]
    few = Collective(FORWARD, "", "tp", "all_reduce", 100, 2, 1)
    assert steps(few, 8, 1) == [(FINISH, NODE, 2800)], "one-shot"


def test_a_fit_finds_the_link_that_made_the_points():
    points = [(b, 5 + b / 200) for b in (0, 1e3, 1e5, 1e7)]
    found = fit(points)
    assert (found.alpha_us, found.bytes_per_us) == (pytest.approx(5), pytest.approx(200))
    for wrong in (points[:1], [(1e3, 9.0), (1e6, 8.0)]):
        with pytest.raises(ReportError):
            fit(wrong)


def test_rows_that_time_the_host_are_left_out():
    row = {"op": "reduce_scatter_rows to BF16", "ours_us": 100.0, "graph": False}
    changes = [{"bytes": 32 << 20}, {"bytes": 128 << 20}, {"bytes": 4096, "graph": True}]
    rows = [{**row, **change} for change in (*changes, {"bytes": 4096, "ours_us": None})]
    points = measured_points({"ranks": 2, "measurements": rows}, FINISH)
    assert points == [(64 << 20, 100.0), (2048, 100.0)]


def test_the_model_of_one_rank_is_near_the_measured_block():
    report = json.loads((ROOT / "reports" / "h200" / "kernels.json").read_text())
    alone = report["measurements"]
    for rows in (4096, 14910, 37776):
        passes = compute_us(alone, Layout(), rows)
        for op, modelled in (
            ("block forward", passes[FORWARD]),
            ("block forward + backward", sum(passes.values())),
        ):
            row = next(r for r in alone if (r["op"], r["rows"]) == (op, rows))
            assert modelled == pytest.approx(row["ours_us"], rel=0.1), (op, rows)
    with pytest.raises(ReportError, match="none at 100 rows"):
        compute_us(alone, Layout(), 100)


def test_a_layout_on_more_nodes_takes_longer_and_one_rank_says_nothing():
    rows = [
        {"op": f"{op} of something", "ours_us": 7 + b / 2e5, "graph": True, "bytes": b}
        for op in ("reduce_scatter_rows", "all_gather_rows")
        for b in (1 << 12, 1 << 22)
    ]
    links = fitted_links({"ranks": 2, "measurements": rows}, Link(20.0, 5e4))

    def total(name: str) -> float:
        found = communication_us(Layout.parse(name), 14910, 2, links)
        return sum(sum(levels.values()) for levels in found.values())

    assert total("tp1") == 0
    assert total("tp8") < total("tp8-local4")
    assert {*communication_us(Layout(), 264, 2, links)} == {FORWARD, BACKWARD}
