"""Messages of a mesh are counted one by one; here are the counts that can be known without."""

import json
from collections import Counter

import pytest

from h3lib.bench.mesh_traffic import (
    GPU_COUNTS,
    GPUS_PER_NODE,
    attention_messages,
    cannon_messages,
    count,
    placements,
    ring_messages,
    traffic,
)
from h3lib.book import ROOT
from h3lib.contract import LayoutError


def test_the_committed_counts_are_those_of_this_code():
    committed = json.loads((ROOT / "reports" / "model" / "mesh-traffic.json").read_text())
    assert committed == count()
    assert {cell["gpus"] for cell in committed["cells"]} == set(GPU_COUNTS)


@pytest.mark.parametrize("num_rows, num_columns", [(1, 16), (2, 8), (4, 4), (16, 1), (12, 12)])
def test_bytes_in_all_have_a_closed_form(num_rows, num_columns):
    ranks = num_rows * num_columns
    messages = [m for m in ring_messages(num_rows, num_columns, 3, 5) if m[0] != m[1]]
    assert sum(m[2] for m in messages) == ranks * (3 * (num_columns - 1) + 5 * (num_rows - 1))
    received = Counter(destination for _, destination, _ in messages)
    assert set(received.values()) == {num_columns - 1 + num_rows - 1}


@pytest.mark.parametrize("num_rows, num_columns", [(4, 4), (8, 8), (2, 8), (12, 12), (18, 8)])
def test_every_placement_fills_every_node(num_rows, num_columns):
    found = placements(num_rows, num_columns)
    assert {"rows", "columns", "cyclic", "random"} <= set(found)
    for name, node in found.items():
        sizes = Counter(node)
        assert set(sizes.values()) == {GPUS_PER_NODE}, name
        assert sorted(sizes) == list(range(num_rows * num_columns // GPUS_PER_NODE)), name


def test_egress_on_a_square_of_eight_by_hand():
    """A node that is a mesh row: only columns leave it. A tile of 2 x 4: two rows, four columns."""
    where = placements(8, 8)

    def egress(place):
        return traffic(ring_messages(8, 8, 3, 2), where[place])["egress_bytes"] / 8

    assert egress("rows") == 8 * 7 * 2
    assert egress("columns") == 8 * 7 * 3
    assert egress("tiles 2x4") == 2 * 7 * 3 + 4 * 7 * 2
    assert egress("tiles 4x2") == 4 * 7 * 3 + 2 * 7 * 2


def test_a_node_alone_sends_nothing_and_skews_of_cannon_are_counted():
    one_node = [0] * 16
    assert traffic(attention_messages(4, 4, 10), one_node)["egress_bytes"] == 0
    square = [m for m in cannon_messages(4, 4, 10) if m[0] != m[1]]
    flat = [m for m in cannon_messages(2, 8, 10) if m[0] != m[1]]
    assert len(square) == 16 * (3 + 3) + 2 * 4 * 3, "rows and columns 1 to 3 are skewed"
    assert len(flat) == 16 * (7 + 1)


@pytest.mark.parametrize("num_gpus", [8, 20])
def test_gpus_that_are_no_whole_nodes_are_refused(num_gpus):
    with pytest.raises(LayoutError, match=str(num_gpus)):
        count((num_gpus,))
