"""The check can fail: each seeded fault turns the table red, in FP32 roots where BF16 hides it."""

import pytest
import torch
from block_support import SMALL_BLOCKS, play, red

from h3lib.bench.mutants import (
    ArrivalOrder,
    Bf16Partials,
    DroppedShard,
    StartAtOwnRank,
    Unreduced,
    last_row_dropped,
    on_axes,
)
from h3lib.compare import different_elements
from h3lib.contract import NUM_ROW_UNITS
from h3lib.ops import adaln, gemm
from h3lib.ops.tree import partial_roots
from h3lib.parallel.control import RingControl
from h3lib.parallel.shard import SeqShard

LAYOUT, ROWS = "tp4-cp2-sp", 264


TP_ROOTS = {("root", name) for name in ("attn.out", "ff.out", "d.ff.in", "d.attn.in")}


@pytest.mark.parametrize(
    "fault", (StartAtOwnRank, ArrivalOrder, Unreduced, DroppedShard, Bf16Partials, RingControl)
)
def test_a_faulty_sum_over_tp_is_red_in_its_roots(fault):
    assert TP_ROOTS <= red(play(LAYOUT, ROWS, change=on_axes(fault, "tp")))


@pytest.mark.parametrize("fault", (StartAtOwnRank, ArrivalOrder, Bf16Partials))
def test_a_faulty_sum_over_many_row_ranks_is_red_in_the_norm_gradients(fault):
    found = red(play(LAYOUT, 257, SMALL_BLOCKS, change=on_axes(fault, "rows")))
    assert {("root", "norm1.weight"), ("root", "norm2.weight"), ("root", "d.adaln.m")} <= found


def test_a_faulty_sum_over_cp_is_red_in_weight_gradients():
    """257 rows in small blocks fill every unit; 264 in published ones fill three, and with three
    leaves the reversed order is the same sum."""
    found = red(play("cp4", 257, SMALL_BLOCKS, change=on_axes(ArrivalOrder, "cp")))
    weights = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2")
    assert {("root", f"{name}.weight") for name in weights} <= found


def test_two_ranks_cannot_show_an_order_but_the_control_still_differs():
    """a + b = b + a: the reason why orders are tested with four ranks or more."""
    assert red(play("tp2", ROWS, change=on_axes(ArrivalOrder, "tp"))) == set()
    assert TP_ROOTS <= red(play("tp2", ROWS, change=on_axes(RingControl, "tp")))


def test_bf16_outputs_hide_an_order_that_roots_show():
    found = play(LAYOUT, ROWS, change=on_axes(ArrivalOrder, "tp"))
    share = {t["kind"]: t["different"] / t["total"] for t in found if t["name"] == "attn.out"}
    assert share["root"] > 0.05
    assert share["node"] < share["root"] / 20


def test_a_leaf_that_depends_on_sp_is_red(monkeypatch):
    """Under SP the slice is folded as one leaf, not by row units."""

    def one_leaf(terms, rows, units, groups=None, num_groups=1):
        folded = terms.new_zeros((num_groups, *terms.shape[1:]))
        for i, term in enumerate(terms):
            folded[0 if groups is None else groups[i]] += term
        first = lambda unit: folded if unit == units.start else torch.zeros_like(folded)  # noqa: E731
        return partial_roots(first, units, NUM_ROW_UNITS)

    play(LAYOUT, 257, SMALL_BLOCKS)  # the canonical values are made before the fault
    monkeypatch.setattr(adaln, "row_unit_roots", one_leaf)
    found = red(play(LAYOUT, 257, SMALL_BLOCKS))
    assert {("root", "norm1.weight"), ("root", "norm2.weight"), ("root", "d.adaln.m")} <= found


def test_dropping_the_last_row_is_red():
    play(LAYOUT, ROWS)
    with last_row_dropped():
        found = red(play(LAYOUT, ROWS))
    assert ("root", "ff.net.2.weight") in found and ("gradient", "ff.net.2.weight") in found


def test_a_rank_that_shows_fewer_rows_is_red_by_coverage():
    def shorter(rank, records):
        return [r for r in records if not (rank == 7 and r.name == "out")]

    assert ("output", "out") in red(play(LAYOUT, ROWS, records=shorter))


def test_a_rank_that_does_not_show_a_replicated_value_is_red():
    def silent(rank, records):
        return [r for r in records if not (rank and r.name in ("out", "dx"))]

    found = red(play("tp4", ROWS, records=silent))
    assert {("output", "out"), ("gradient", "dx")} <= found


class _GlobalRankAsTpRank(SeqShard):
    @property
    def tp_rank(self):
        return min(self.rank, self.owner.layout.tp - 1)


def test_the_global_rank_as_tp_rank_is_red():
    def change(shard, world):
        return _GlobalRankAsTpRank(shard.owner, shard.rank, shard.mesh)

    found = red(play("tp4-cp2", ROWS, change=change))
    assert ("output", "out") in found and ("root", "attn.out") in found


def test_a_chain_that_starts_from_its_first_term_is_red_where_all_terms_are_negative_zero():
    def from_first_term(a, b):
        products = [a[:, k, None].float() * b[None, k, :].float() for k in range(a.shape[1])]
        total = products[0]
        for product in products[1:]:
            total = total + product
        return total

    a = torch.full((3, 5), -0.0, dtype=torch.bfloat16)
    b = torch.ones((5, 2), dtype=torch.bfloat16)
    ours, faulty = gemm.chain(a, b), from_first_term(a, b)
    assert not torch.signbit(ours).any() and torch.signbit(faulty).all()
    assert different_elements(faulty, ours).all()
    assert torch.equal(faulty, ours), "a comparison by value would pass"
