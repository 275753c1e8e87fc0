"""The contract's units: every row in exactly one row unit, edges as published, typed errors."""

import itertools
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import block_edges, row_unit_edges

from h3lib import contract
from h3lib.contract import (
    PUBLISHED,
    SIZES,
    Contract,
    ContractError,
    H3Error,
    PeerError,
    RowsError,
    RowUnits,
    model_size,
    subtree_roots,
)

SMALL = Contract(row_block=4, key_block=16)


def edges(units: RowUnits) -> list[tuple[int, int]]:
    return [(r.start, r.stop) for r in map(units.row_unit_blocks, range(64))]


def longest_row_unit(num_rows: int, contract: Contract) -> int:
    return max(stop - start for start, stop in edges(RowUnits(num_rows, contract)))


def test_published_sizes_and_identifier():
    assert (PUBLISHED.num_units, PUBLISHED.row_block, PUBLISHED.key_block) == (8, 64, 128)
    assert PUBLISHED.mma_k == 16
    assert PUBLISHED.id == "h3-parallel-v1"
    assert SMALL.id == "h3-parallel-v1/row_block=4/key_block=16"
    assert Contract(num_units=4).id == "h3-parallel-v1/num_units=4"


def test_row_units_up_to_10000_rows_are_the_published_edges_and_partition_the_rows():
    seen = {}
    for num_rows in range(1, 10_001):
        units = RowUnits(num_rows)
        sizes = units.num_key_blocks, units.num_row_blocks
        assert sizes == (-(-num_rows // 128), -(-num_rows // 64))
        if sizes not in seen:  # the cuts depend on the numbers of blocks alone: once each
            seen[sizes] = edges(units)
            assert seen[sizes] == row_unit_edges(num_rows, 64, 128)
            blocks = [(r.start, r.stop) for r in map(units.sequence_unit_blocks, range(8))]
            assert blocks == block_edges(num_rows, 64, 128)
            joined = [b for start, stop in seen[sizes] for b in range(start, stop)]
            assert joined == list(range(sizes[1]))
        assert units.row_unit_rows(range(64)) == range(num_rows)
        assert units.sequence_unit_rows(range(8)) == range(num_rows)
        assert units.block_rows(range(sizes[1] - 1, sizes[1])).stop == num_rows
    assert len(seen) == 157


@pytest.mark.parametrize("row_block,key_block", [(4, 16), (8, 16), (16, 32), (128, 128), (4, 128)])
def test_other_block_sizes_partition_the_rows_at_the_published_formula(row_block, key_block):
    contract = Contract(row_block=row_block, key_block=key_block)
    for num_rows in range(1, 700):
        units = RowUnits(num_rows, contract)
        assert edges(units) == row_unit_edges(num_rows, row_block, key_block)
        rows = [row for u in range(64) for row in units.row_unit_rows(range(u, u + 1))]
        assert rows == list(range(num_rows))
        rows = [row for s in range(8) for row in units.sequence_unit_rows(range(s, s + 1))]
        assert rows == list(range(num_rows))


@given(st.integers(1, 2000), st.integers(0, 64), st.integers(0, 64))
def test_a_run_of_units_holds_the_rows_of_its_units(num_rows, first, last):
    first, last = sorted((first, last))
    for units, rows_of in (
        (range(first, last), RowUnits(num_rows, SMALL).row_unit_rows),
        (range(first // 8, last // 8), RowUnits(num_rows, SMALL).sequence_unit_rows),
    ):
        one_by_one = [row for u in units for row in rows_of(range(u, u + 1))]
        assert list(rows_of(units)) == one_by_one


def test_264_rows_fill_sequence_units_2_5_and_7():
    units = RowUnits(264)
    rows = {s: units.sequence_unit_rows(range(s, s + 1)) for s in range(8)}
    filled = {s: (r.start, r.stop) for s, r in rows.items() if r}
    assert filled == {2: (0, 128), 5: (128, 256), 7: (256, 264)}


def test_896_rows_leave_a_sequence_unit_empty_and_897_do_not():
    for num_rows, empty in ((896, 1), (897, 0)):
        units = RowUnits(num_rows)
        assert sum(not units.sequence_unit_blocks(s) for s in range(8)) == empty


@pytest.mark.parametrize("row_block,key_block,first", [(4, 16, 257), (8, 16, 513), (64, 128, 4097)])
def test_no_row_unit_holds_two_row_blocks_below(row_block, key_block, first):
    contract = Contract(row_block=row_block, key_block=key_block)
    assert all(longest_row_unit(rows, contract) == 1 for rows in range(1, first, 3))
    assert longest_row_unit(first - 1, contract) == 1
    assert longest_row_unit(first, contract) == 2


@pytest.mark.parametrize("num_rows", [0, -1, 1.0, "7", None])
def test_row_count_that_is_not_a_positive_integer_is_refused(num_rows):
    with pytest.raises(RowsError, match="number of active rows.*at least 1") as caught:
        RowUnits(num_rows)
    assert repr(num_rows) in str(caught.value)


@pytest.mark.parametrize(
    "field,value,accepted",
    [
        ("row_block", 0, "positive integer"),
        ("row_block", -4, "positive integer"),
        ("row_block", 48, "key_block: received 128; accepted: a multiple of row_block = 48"),
        ("row_block", 256, "a multiple of row_block = 256"),
        ("key_block", 96, "key_block: received 96; accepted: a multiple of row_block = 64"),
        ("key_block", 128.0, "positive integer"),
        ("mma_k", 48, "a multiple of mma_k = 48"),
        ("mma_k", True, "positive integer"),
        ("num_units", 0, "positive integer"),
        ("num_units", 6, "power of two"),
        ("num_units", "8", "positive integer"),
    ],
)
def test_bad_block_size_is_refused_with_the_reason(field, value, accepted):
    with pytest.raises(ContractError, match=accepted):
        Contract(**{field: value})


def test_key_block_below_the_depth_of_the_matrix_instruction_is_refused():
    with pytest.raises(ContractError, match="received 8; accepted: a multiple of mma_k = 16"):
        Contract(row_block=8, key_block=8)
    assert Contract(row_block=8, key_block=8, mma_k=8).key_block == 8


def maximal_nodes(start: int, stop: int, num_leaves: int) -> list[range]:
    """Every aligned node inside [start, stop) whose parent is not inside."""
    nodes, width = [], 1
    while width <= num_leaves:
        nodes += [range(at, at + width) for at in range(0, num_leaves, width)]
        width *= 2
    inside = [n for n in nodes if start <= n.start and n.stop <= stop]
    parents = [
        range(n.start - n.start % (2 * len(n)), n.start - n.start % (2 * len(n)) + 2 * len(n))
        for n in inside
    ]
    roots = [n for n, parent in zip(inside, parents, strict=True) if parent not in inside]
    return sorted(roots, key=lambda n: n.start)


@pytest.mark.parametrize("num_leaves", [1, 2, 4, 8, 16, 64])
def test_subtree_roots_are_the_maximal_nodes(num_leaves):
    for start, stop in itertools.combinations_with_replacement(range(num_leaves + 1), 2):
        assert list(subtree_roots(start, stop, num_leaves)) == maximal_nodes(
            start, stop, num_leaves
        )


def test_subtree_roots_of_the_contracts_examples():
    assert subtree_roots(2, 4, 8) == (range(2, 4),)  # tp4, rank 1
    assert subtree_roots(2, 5, 8) == (range(2, 4), range(4, 5))  # cp3, rank 1
    assert subtree_roots(0, 8, 8) == (range(0, 8),)
    assert subtree_roots(3, 3, 8) == ()


@pytest.mark.parametrize("num_leaves", [0, -8, 3, 6, 12])
def test_a_tree_of_other_than_a_power_of_two_is_refused(num_leaves):
    with pytest.raises(ContractError, match=f"number of leaves: received {num_leaves}; .*power"):
        subtree_roots(0, 1, num_leaves)


@pytest.mark.parametrize("start,stop", [(-1, 4), (5, 4), (0, 9)])
def test_leaves_outside_the_tree_are_refused(start, stop):
    with pytest.raises(ContractError, match=r"0 <= start <= stop <= 8") as caught:
        subtree_roots(start, stop, 8)
    assert caught.value.received == (start, stop)


def test_released_widths():
    full = model_size("full")
    assert (full.inner_dim, full.rotary_dim, full.adaln_dim) == (7168, 96, 96768)
    assert (full.hidden_size, full.ffn_dim, full.time_embed_dim) == (5376, 14336, 2688)
    assert (full.num_layers, full.norm_eps, full.rope_theta) == (50, 1e-5, 10000.0)


def test_tiny_size_hides_neither_the_order_over_heads_nor_the_pass_through_channels():
    tiny = model_size("tiny")
    assert tiny.num_attention_heads == 2 * PUBLISHED.num_units
    assert tiny.inner_dim > tiny.hidden_size
    assert tiny.rotary_dim == 24 < tiny.attention_head_dim == 32


@pytest.mark.parametrize("name", ["full", "small", "tiny"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_size_divides_into_the_published_units(name, device):
    model_size(name).check(PUBLISHED, device)


@pytest.mark.parametrize(
    "change,device,reason",
    [
        ({"num_attention_heads": 12}, "cpu", "num_attention_heads: received 12"),
        ({"ffn_dim": 260}, "cpu", "ffn_dim: received 260; accepted: a multiple of num_units = 8"),
        ({"rope_freq_dim": 6}, "cpu", "rotary_dim: received 36; accepted: at most 32"),
        ({"hidden_size": 97}, "cpu", "adaln_dim: received 1746"),
        ({"ffn_dim": 320}, "cuda", "feature unit of ffn_dim: received 40; accepted: a multiple"),
        (
            {"attention_head_dim": 28, "rope_freq_dim": 2},
            "cuda",
            "feature unit of inner_dim: received 56",
        ),
    ],
)
def test_size_that_the_units_do_not_divide_is_refused(change, device, reason):
    with pytest.raises(ContractError, match=reason):
        replace(SIZES["tiny"], **change).check(PUBLISHED, device)


def test_widths_below_the_matrix_instruction_are_accepted_on_the_cpu():
    replace(SIZES["tiny"], ffn_dim=320).check(PUBLISHED, "cpu")


@pytest.mark.parametrize("num_units", [1, 2, 4, 16])
def test_sizes_with_another_number_of_units(num_units):
    replace(SIZES["tiny"], hidden_size=96).check(Contract(num_units=num_units))
    with pytest.raises(ContractError, match="num_attention_heads: received 16; .* = 32"):
        SIZES["tiny"].check(Contract(num_units=32))


def test_unknown_size_names_the_sizes():
    with pytest.raises(ContractError, match="received 'huge'; accepted: full, small, tiny"):
        model_size("huge")


def test_every_error_is_one_family_and_crosses_processes_whole():
    kinds = [k for k in vars(contract).values() if isinstance(k, type) and issubclass(k, H3Error)]
    assert len(kinds) == 9
    for kind in kinds:
        error = pickle.loads(pickle.dumps(kind("degree", 3, "1, 2")))
        assert type(error) is kind
        assert str(error) == "degree: received 3; accepted: 1, 2"
        assert (error.subject, error.received, error.accepted) == ("degree", 3, "1, 2")
    assert issubclass(PeerError, RuntimeError)
    assert issubclass(RowsError, ValueError)
