"""Formats lose what they say; in FP32 the place does not matter, in fewer bytes it does."""

import json

import pytest
import torch

from h3lib.bench.compression import (
    BLOCK,
    FORMATS,
    LAYOUTS,
    at_nodes,
    at_units,
    block_scaled,
    roots_sent,
)
from h3lib.bench.order_free import bytes_sent, tree_root
from h3lib.book import ROOT
from h3lib.compare import different_elements
from h3lib.layout import Layout

LEAVES = torch.randn(8, 9, 2 * BLOCK, generator=torch.Generator().manual_seed(5))


def equal(a, b):
    return not different_elements(a.reshape(-1), b.reshape(-1)).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp32_is_the_tree_in_every_layout(layout):
    rounded = FORMATS["FP32"][1]
    for at in (at_nodes, at_units):
        assert all(equal(r, tree_root(LEAVES)) for r in at(LEAVES, Layout.parse(layout), rounded))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "FP32"])
def test_fewer_bytes_know_the_layout_unless_they_are_taken_at_units(name):
    rounded = FORMATS[name][1]
    two, four = (Layout.parse(n) for n in ("tp8-local4", "tp8-local2"))
    at_two, at_four = at_nodes(LEAVES, two, rounded), at_nodes(LEAVES, four, rounded)
    assert not equal(at_two[0], at_two[1]), "nodes differ among themselves"
    assert not any(equal(a, b) for a in at_two for b in at_four)
    results = [r for n in LAYOUTS for r in at_units(LEAVES, Layout.parse(n), rounded)]
    assert all(equal(r, results[0]) for r in results)
    assert not equal(results[0], tree_root(LEAVES))


@pytest.mark.parametrize("bits", [8, 16])
def test_a_block_scale_is_a_power_of_two_and_loses_half_a_step(bits):
    given = LEAVES[0] * torch.logspace(-20, 20, 9)[:, None]
    given[0] = 0
    found = block_scaled(bits)(given)
    top = given.unflatten(-1, (-1, BLOCK)).abs().amax(-1, keepdim=True).double()
    step = torch.exp2(torch.ceil(torch.log2(top / (2 ** (bits - 1) - 1))))
    error = (found.double() - given.double()).unflatten(-1, (-1, BLOCK)).abs()
    assert (error <= step / 2).all()
    assert equal(found[0], given[0])
    assert equal(block_scaled(bits)(found), found), "what the format can write stays"


def test_roots_between_nodes_by_hand():
    assert roots_sent(Layout.parse("tp8")) == {"node": 0, "unit": 0}
    assert roots_sent(Layout.parse("tp8-local4")) == {"node": 2, "unit": 8}
    assert roots_sent(Layout.parse("tp8-local2")) == {"node": 12, "unit": 24}


def test_bytes_of_two_shots():
    assert bytes_sent(1) == dict.fromkeys(bytes_sent(1), 0)
    assert bytes_sent(8)["tree, FP32 roots, BF16 result"] == 7 / 8 * 6


def test_the_committed_reports_say_what_the_pages_say():
    free = json.loads((ROOT / "reports" / "cpu" / "order-free.json").read_text())
    assert free["complete"]
    assert all(set(case["distinct_order_free"].values()) == {1} for case in free["cases"])
    assert all(case["distinct_fp32"]["all"] > 1 for case in free["cases"])
    compressed = json.loads((ROOT / "reports" / "cpu" / "compression.json").read_text())
    assert compressed["complete"]
    for case in compressed["cases"]:
        invariant = case["where"] == "unit" or case["format"] == "FP32"
        assert (case["distinct"] == 1) == invariant, case
