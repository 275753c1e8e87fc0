"""dw and dbias of an index set: the row fold over row units, against NumPy one add at a time."""

import numpy as np
import pytest
import torch
from support import (
    assert_same_bytes,
    block_edges,
    f32,
    normal,
    row_unit_edges,
    special,
    tensor,
    tree_of,
)

from h3lib.contract import NUM_ROW_UNITS, Contract, OperandError, RowUnits
from h3lib.ops.row_product import row_unit_product_roots
from h3lib.ops.tree import root_nodes, tree_sum

SMALL = Contract(row_block=4, key_block=16)


def _expected(dy, x, at, num_rows, contract):
    """[dw, dbias]: chain in a row block over the rows of the set, blocks, 64 row units."""
    size = contract.row_block
    xs = np.concatenate([f32(x), np.ones((len(x), 1), np.float32)], axis=1)
    leaves = []
    for first, last in row_unit_edges(num_rows, size, contract.key_block):
        unit = np.zeros((dy.shape[1], xs.shape[1]), np.float32)
        for block in range(first, last):
            total = np.zeros_like(unit)
            for i, row in enumerate(at.tolist()):
                if block * size <= row < (block + 1) * size:
                    total = total + f32(dy)[i][:, None] * xs[i]
            unit = unit + total
        leaves.append(unit)
    return tree_of(leaves)


def _case(num_rows, share, dtype, make=normal):
    chosen = torch.rand(num_rows, generator=torch.Generator().manual_seed(num_rows)) < share
    at = chosen.nonzero()[:, 0]
    return make(1, len(at), 5, dtype=dtype), make(2, len(at), 3, dtype=dtype), at


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize(
    "num_rows, share", ((1, 1.1), (65, 0.5), (300, 1.1), (300, 0.3), (600, 0.02))
)
def test_the_order(num_rows, share, dtype):
    dy, x, at = _case(num_rows, share, dtype)
    rows = RowUnits(num_rows, SMALL)
    root = row_unit_product_roots(dy, x, at, rows, range(NUM_ROW_UNITS))
    assert_same_bytes(root[0], tensor(_expected(dy, x, at, num_rows, SMALL)))


def test_the_probe_can_fail():
    """One chain over all rows, or row units without row blocks, is another sum."""
    dy, x, at = _case(600, 1.1, torch.float32)
    root = row_unit_product_roots(dy, x, at, RowUnits(600, SMALL), range(NUM_ROW_UNITS))[0]
    for contract in (Contract(row_block=16, key_block=16), Contract(row_block=4, key_block=64)):
        assert not np.array_equal(f32(root), _expected(dy, x, at, 600, contract))
    assert len(block_edges(600, 4, 16)) == 8


@pytest.mark.parametrize("cuts", ((0, 8, 64), (0, 3, 24, 40, 41, 64)))
def test_owners_of_row_units_finish_one_tree(cuts):
    dy, x, at = _case(300, 0.4, torch.float32)
    rows = RowUnits(300, SMALL)
    whole = row_unit_product_roots(dy, x, at, rows, range(NUM_ROW_UNITS))[0]
    roots = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        owned = rows.row_unit_rows(range(start, stop))
        here = (at >= owned.start) & (at < owned.stop)
        roots.append(row_unit_product_roots(dy[here], x[here], at[here], rows, range(start, stop)))
    assert_same_bytes(tree_sum(root_nodes(roots, cuts).get, range(NUM_ROW_UNITS)), whole)


def test_no_row_gives_plus_zero():
    dy, x, at = torch.empty(0, 4), torch.empty(0, 2), torch.empty(0, dtype=torch.int64)
    root = row_unit_product_roots(dy, x, at, RowUnits(70), range(NUM_ROW_UNITS))[0]
    assert_same_bytes(root, torch.zeros(4, 3))


def test_what_rows_outside_the_set_hold_does_not_matter():
    """Not even a NaN: they are not read, rather than multiplied with zero."""
    dy, x, at = _case(300, 0.5, torch.float32, special)
    rows = RowUnits(300, SMALL)
    root = row_unit_product_roots(dy, x, at, rows, range(NUM_ROW_UNITS))[0]
    with np.errstate(all="ignore"):
        assert_same_bytes(root, torch.from_numpy(_expected(dy, x, at, 300, SMALL)))


def test_operands_that_do_not_fit():
    dy, x, at = _case(65, 1.1, torch.float32)
    for wrong in ((dy[1:], x, at), (dy, x[1:], at), (dy.bfloat16(), x, at), (dy[0], x, at)):
        with pytest.raises(OperandError):
            row_unit_product_roots(*wrong, RowUnits(65), range(NUM_ROW_UNITS))
