"""The tree: its shape read back by symbols and probes, any cut into owners, the in-row tree."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_same_bytes, cuts_of, f32, halves_of, normal, special, tree_of

from h3lib.contract import ContractError, OperandError
from h3lib.ops.tree import in_row_tree, partial_roots, root_nodes, stacked_roots, tree_sum

BIG = 2.0**25  # BIG + 1 == BIG and 1 - BIG == -BIG in FP32


class Symbol(str):
    """Adding writes down what was added, the left operand first."""

    def __add__(self, other):
        return Symbol(f"({str.__str__(self)}+{str.__str__(other)})")


def leaves_sum(leaves, owned=None):
    known = range(len(leaves)) if owned is None else owned

    def node(span):
        return leaves[span.start] if len(span) == 1 and span.start in known else None

    return tree_sum(node, range(len(leaves)))


def finish(leaves: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """Each owner reduces its leaves to roots, then the roots are finished."""
    parts = [
        partial_roots(leaves.__getitem__, range(a, b), len(leaves))
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    return tree_sum(root_nodes(parts, cuts).get, range(len(leaves)))


def test_tree_is_written_as_in_the_contract():
    symbols = [Symbol(i) for i in range(8)]
    assert leaves_sum(symbols) == "(((0+1)+(2+3))+((4+5)+(6+7)))"
    assert leaves_sum(symbols[:2]) == "(0+1)"
    assert leaves_sum(symbols[:1]) == "0"


def test_a_node_with_one_child_is_that_child():
    symbols = [Symbol(i) for i in range(8)]
    assert leaves_sum(symbols, owned=(2, 5, 7)) == "(2+(5+7))"
    assert leaves_sum(symbols, owned=(6,)) == "6"
    assert leaves_sum(symbols, owned=()) is None


@pytest.mark.parametrize("num_leaves", [4, 8, 16])
def test_probes_read_the_tree_back(num_leaves):
    """BIG + 1 loses the 1, so the sum is 1 only where BIG meets -BIG before the 1 joins them."""
    for i, j, k in itertools.permutations(range(num_leaves), 3):
        leaves = torch.zeros(num_leaves)
        leaves[i], leaves[j], leaves[k] = BIG, 1.0, -BIG
        level = (i ^ k).bit_length()  # the smallest subtree that holds both has 2**level leaves
        expected = 0.0 if j >> level == i >> level else 1.0
        assert leaves_sum(leaves).item() == expected, (i, j, k)


def test_sequential_and_other_orders_would_read_differently():
    leaves = torch.tensor([BIG, 1.0, -BIG, 0.0])
    assert leaves_sum(leaves).item() == 0.0
    assert leaves_sum(leaves[[0, 2, 1, 3]]).item() == 1.0


@given(st.integers(0, 10**6), st.sampled_from([2, 4, 8, 64]), st.integers(1, 8))
def test_any_cut_into_owners_gives_the_same_bytes(seed, num_leaves, owners):
    leaves = special(seed, num_leaves, 5, dtype=torch.float32)
    cuts = cuts_of(seed, num_leaves, min(owners, num_leaves))
    expected = torch.from_numpy(np.array(tree_of(f32(leaves))))
    assert_same_bytes(finish(leaves, cuts), expected)


def test_probes_survive_every_cut_into_two_or_three_owners():
    for i, j, k in itertools.permutations(range(8), 3):
        leaves = torch.zeros(8)
        leaves[i], leaves[j], leaves[k] = BIG, 1.0, -BIG
        expected = leaves_sum(leaves).item()
        for inner in itertools.combinations(range(1, 8), 1 + (i + j) % 2):
            assert finish(leaves, [0, *inner, 8]).item() == expected


def test_absent_leaves_and_leaves_of_positive_zero_give_the_same_bits():
    leaves = normal(3, 8, 40, dtype=torch.float32)
    zeroed = leaves.clone()
    zeroed[[0, 3, 4, 5]] = 0.0
    assert_same_bytes(leaves_sum(leaves, owned=(1, 2, 6, 7)), leaves_sum(zeroed))


def test_partial_roots_are_ascending_and_make_each_leaf_once():
    made = []

    def leaf(i):
        made.append(i)
        return torch.tensor(float(10**i))

    assert partial_roots(leaf, range(2, 7), 8).tolist() == [1100.0, 110000.0, 1000000.0]
    assert made == [2, 3, 4, 5, 6]


def test_roots_that_are_not_those_of_the_owners_leaves_are_refused():
    with pytest.raises(OperandError, match="subtree roots of owner 1: received 1; accepted: 2"):
        root_nodes([torch.zeros(1, 3)] * 2, [0, 2, 5, 8])


def test_leaves_outside_the_tree_are_refused():
    with pytest.raises(ContractError, match=r"received \(6, 9\)"):
        partial_roots(lambda i: torch.zeros(()), range(6, 9), 8)


@pytest.mark.parametrize("width", [*range(1, 20), 31, 32, 33, 96, 100, 128])
def test_in_row_tree_adds_halves_of_the_padded_row(width):
    x = special(width, 12, width, dtype=torch.float32)
    x[:6] = normal(width, 6, width, dtype=torch.float32)
    found = in_row_tree(x)
    assert found.shape == (12, 1)
    assert_same_bytes(found[:, 0], torch.from_numpy(np.array(halves_of(f32(x)))))


@pytest.mark.parametrize("width", [4, 6, 8, 13])
def test_probes_read_the_in_row_tree_back(width):
    """Element i meets those equal to it modulo p/2, p/4, ...: bits are joined from the top."""
    padded = 1 << (width - 1).bit_length()
    for i, j, k in itertools.permutations(range(width), 3):
        x = torch.zeros(1, width)
        x[0, i], x[0, j], x[0, k] = BIG, 1.0, -BIG
        period = padded
        while i % period != k % period:
            period //= 2
        expected = 0.0 if j % period == i % period else 1.0
        assert in_row_tree(x).item() == expected, (i, j, k)


def test_in_row_tree_of_negative_zeros_depends_on_the_width_alone():
    assert_same_bytes(in_row_tree(torch.full((1, 4), -0.0)), torch.tensor([[-0.0]]))
    assert_same_bytes(in_row_tree(torch.full((1, 3), -0.0)), torch.tensor([[0.0]]))


@given(st.integers(0, 10**6), st.integers(0, 63), st.integers(1, 64))
def test_stacked_roots_are_those_of_the_same_leaves(seed, first, count):
    owned = range(first, min(first + count, 64))
    leaves = special(seed, len(owned), 5, dtype=torch.float32)
    expected = partial_roots(lambda unit: leaves[unit - first], owned, 64)
    assert_same_bytes(stacked_roots(leaves, owned, 64), expected)
