"""Row fold over row units: chains in row blocks, blocks ascending, a tree of 64; groups."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import (
    assert_same_bytes,
    chain_of,
    cuts_of,
    f32,
    normal,
    quiet,
    row_unit_edges,
    special,
    tree_of,
)

from h3lib.contract import Contract, OperandError, RowUnits
from h3lib.ops.fold import fold_row_blocks, fold_row_units, row_unit_roots
from h3lib.ops.tree import root_nodes, tree_sum

F32, F64 = torch.float32, torch.float64
SMALL = Contract(row_block=4, key_block=16)


@quiet
def fold_of(terms: np.ndarray, contract: Contract, members=None) -> np.ndarray:
    """The published order over the rows in `members` (all rows if None)."""
    size, zero = contract.row_block, np.zeros(terms.shape[1:], terms.dtype)
    members = set(range(len(terms))) if members is None else members
    units = []
    for b0, b1 in row_unit_edges(len(terms), size, contract.key_block):
        total = zero
        for block in range(b0, b1):
            rows = [r for r in range(block * size, (block + 1) * size) if r in members]
            total = total + (chain_of(terms[rows]) if rows else zero)
        units.append(total)
    return tree_of(units)


def roots_of(terms, rows, cuts, groups=None, num_groups=1):
    roots = []
    for first, last in zip(cuts, cuts[1:], strict=False):
        own = rows.row_unit_rows(range(first, last))
        part = slice(own.start, own.stop)
        own_groups = None if groups is None else groups[part]
        roots.append(row_unit_roots(terms[part], rows, range(first, last), own_groups, num_groups))
    return roots


def finish(roots, cuts):
    return tree_sum(root_nodes(roots, cuts).get, range(64))


@pytest.mark.parametrize("contract", [SMALL, Contract()], ids=lambda c: c.id)
@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 63, 64, 65, 128, 257, 264, 530])
def test_fold_is_the_published_order(num_rows, contract):
    terms = normal(num_rows, num_rows, 6, dtype=F32)
    root = row_unit_roots(terms, RowUnits(num_rows, contract), range(64))
    assert root.shape == (1, 1, 6) and root.dtype == F32
    assert_same_bytes(root[0, 0], torch.from_numpy(fold_of(f32(terms), contract)))


def test_530_small_blocks_rows_add_several_blocks_inside_a_row_unit():
    assert max(b - a for a, b in row_unit_edges(530, 4, 16)) >= 3


@given(st.integers(0, 10**6), st.integers(1, 300), st.integers(1, 12), st.integers(1, 6))
def test_any_owners_and_any_groups_give_the_same_roots(seed, num_rows, owners, num_groups):
    terms = special(seed, num_rows, 3, dtype=F32)
    groups = torch.randint(num_groups, (num_rows,), generator=torch.Generator().manual_seed(seed))
    rows, cuts = RowUnits(num_rows, SMALL), cuts_of(seed, 64, owners)
    found = finish(roots_of(terms, rows, cuts, groups, num_groups), cuts)
    assert found.shape == (num_groups, 3)
    for group in range(num_groups):
        members = set((groups == group).nonzero()[:, 0].tolist())
        expected = fold_of(f32(terms), SMALL, members)
        assert_same_bytes(found[group], torch.from_numpy(expected), f"group {group}")


def test_a_group_equals_a_fold_in_which_the_other_rows_are_positive_zero():
    terms, groups = normal(0, 300, 4, dtype=F32), torch.arange(300) % 3
    rows = RowUnits(300, SMALL)
    found = row_unit_roots(terms, rows, range(64), groups, 4)[0]
    for group in range(3):
        kept = torch.where((groups == group)[:, None], terms, torch.zeros(()))
        assert_same_bytes(found[group], row_unit_roots(kept, rows, range(64))[0, 0])
    assert_same_bytes(found[3], torch.zeros(4))  # a table row that no row uses


def test_terms_of_negative_zero_fold_to_positive_zero():
    for num_rows in (1, 4, 17, 300):
        terms = torch.full((num_rows, 2), -0.0)
        root = row_unit_roots(terms, RowUnits(num_rows, SMALL), range(64))
        assert_same_bytes(root, torch.zeros(1, 1, 2))


def test_probes_show_chains_in_blocks_and_blocks_ascending():
    """BIG + 1 and 1 - BIG lose the 1: what it meets first decides."""
    rows, big = RowUnits(1025, SMALL), 2.0**25
    assert rows.row_unit_blocks(0) == range(0, 4)

    def root(*places: int) -> float:
        terms = torch.zeros(1025, 1)
        for row, value in zip(places, (big, 1.0, -big), strict=True):
            terms[row] = value
        return row_unit_roots(terms, rows, range(64)).item()

    for step in (1, 4):  # inside one row block, and from block to block of one row unit
        assert root(0, step, 2 * step) == 0.0
        assert root(step, 0, 2 * step) == 0.0
        assert root(2 * step, step, 0) == 0.0
        assert root(0, 2 * step, step) == 1.0
    assert root(3, 5, 4) == 0.0  # the 1 joins -big in its own block; one chain over both gives 1
    assert root(0, 4, 3) == 1.0


def test_row_blocks_of_the_last_short_block():
    terms = normal(1, 10, 3, dtype=F32)
    blocks = fold_row_blocks(terms, RowUnits(10, SMALL))
    assert blocks.shape == (3, 1, 3)
    for i, part in enumerate(f32(terms)[a : a + 4] for a in (0, 4, 8)):
        assert_same_bytes(blocks[i, 0], torch.from_numpy(chain_of(part)))


def test_absent_row_units_are_positive_zero():
    rows = RowUnits(5, SMALL)
    blocks = fold_row_blocks(normal(0, 5, 2, dtype=F32), rows)[:, 0]
    folded = fold_row_units(blocks, rows, range(64))
    filled = [u for u in range(64) if rows.row_unit_blocks(u)]
    assert len(folded) == 64 and len(filled) == 2
    for unit in set(range(64)) - set(filled):
        assert_same_bytes(folded[unit], torch.zeros(2))


def test_a_rank_without_rows_has_roots_of_positive_zero():
    roots = row_unit_roots(torch.zeros(0, 3), RowUnits(5, SMALL), range(0, 5), torch.zeros(0), 2)
    assert_same_bytes(roots, torch.zeros(2, 2, 3))


def test_fp64_fold_is_the_sum():
    """300 terms below 6 in FP64: error below 300 * 1800 * 2^-53."""
    terms = normal(5, 300, 4, dtype=F64)
    root = row_unit_roots(terms, RowUnits(300, SMALL), range(64))
    assert root.dtype == F64
    assert (root[0, 0] - terms.sum(0)).abs().max() < 300 * 1800 * 2.0**-53


def test_another_number_of_rows_is_refused():
    with pytest.raises(OperandError, match=r"shape of terms: received \(6, 2\); .*\(5, 2\)"):
        row_unit_roots(torch.zeros(6, 2), RowUnits(5, SMALL), range(64))
