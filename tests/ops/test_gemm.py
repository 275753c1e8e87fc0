"""Products against NumPy in the contract's order: the chain, the unit tree, the row fold."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import (
    EXACT_SPECIALS,
    assert_row_invariant,
    assert_same_bytes,
    block_edges,
    chain_of,
    cuts_of,
    f32,
    normal,
    quiet,
    round_bf16,
    special,
    tensor,
    tree_of,
)

from h3lib.contract import Contract, ContractError, OperandError, RowUnits
from h3lib.ops.gemm import chain, linear_dx, linear_forward, row_fold_roots, unit_tree_roots
from h3lib.ops.tree import root_nodes, tree_sum

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
SMALL = Contract(row_block=4, key_block=16)
BIG = 2.0**13  # BIG * BIG + 1 == BIG * BIG and 1 - BIG * BIG == -BIG * BIG in FP32


def exact(seed: int, *shape: int) -> torch.Tensor:
    """BF16 values with zeros, Inf and NaN among them, all products exact in FP32."""
    return special(seed, *shape, values=EXACT_SPECIALS)


@quiet
def product(a: np.ndarray, b: np.ndarray, start=None) -> np.ndarray:
    """The chain over k of fl(a[m, k] b[k, n])."""
    terms = [a[:, k, None] * b[None, k] for k in range(a.shape[1])]
    return chain_of(np.array(terms).reshape(-1, len(a), b.shape[1]).astype(a.dtype), start)


def finish(parts: list[torch.Tensor], cuts: list[int]) -> torch.Tensor:
    return tree_sum(root_nodes(parts, cuts).get, range(cuts[-1]))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 5), (5, 64, 3), (17, 130, 9)])
def test_chain_adds_ascending_from_zero(dtype, shape):
    m, k, n = shape
    a, b = normal(m, m, k, dtype=dtype), normal(n, k, n, dtype=dtype)
    found = chain(a, b)
    assert found.dtype == F32
    assert_same_bytes(found, torch.from_numpy(product(f32(a), f32(b))))


def test_chain_of_fp64_stays_fp64():
    a, b = normal(1, 3, 20, dtype=F64), normal(2, 20, 4, dtype=F64)
    assert_same_bytes(chain(a, b), torch.from_numpy(product(a.numpy(), b.numpy())))


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_probes_read_the_ascending_order_back(dtype):
    for i, j, k in itertools.permutations(range(6), 3):
        a, b = torch.zeros(1, 6, dtype=dtype), torch.ones(6, 1, dtype=dtype)
        a[0, i], a[0, j], a[0, k] = BIG, 1, -BIG
        b[i], b[k] = BIG, BIG
        expected = 1.0 if j > max(i, k) else 0.0  # the 1 is lost wherever a big sum meets it
        assert chain(a, b).item() == expected, (i, j, k)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_chain_of_negative_zero_terms_is_positive_zero(dtype):
    a, b = torch.full((2, 5), -0.0, dtype=dtype), torch.ones(5, 3, dtype=dtype)
    assert_same_bytes(chain(a, b), torch.zeros(2, 3))


def test_chain_of_no_terms_is_positive_zero_and_of_no_rows_is_empty():
    assert_same_bytes(chain(torch.zeros(2, 0), torch.zeros(0, 3)), torch.zeros(2, 3))
    assert chain(torch.zeros(0, 4), torch.zeros(4, 3)).shape == (0, 3)


def test_fp32_products_are_rounded_before_they_are_added():
    """(1 + e)^2 = 1 + 2e + e^2 with e = 2^-12: rounding the product drops e^2, a fused step not."""
    e = 2.0**-12
    a = torch.tensor([[1.0, 1 + e]])
    b = torch.tensor([[-(1 + 2 * e)], [1 + e]])
    assert chain(a, b).item() == 0.0


@given(st.integers(0, 10**6), st.integers(0, 30), st.sampled_from([BF16, F32]))
def test_a_chain_goes_on_where_it_stopped(seed, split, dtype):
    a, b = special(seed, 4, 30, dtype=dtype), special(seed + 1, 30, 3, dtype=dtype)
    whole = chain(a, b)
    first = chain(a[:, :split], b[:split])
    again = chain(a[:, split:], b[split:], into=first)
    assert again.data_ptr() == first.data_ptr()
    assert_same_bytes(again, whole)


def test_chain_over_leading_dims_is_a_chain_of_each():
    a, b = normal(0, 2, 3, 7), normal(1, 2, 7, 5)
    found = chain(a, b)
    for i in range(2):
        assert_same_bytes(found[i], chain(a[i], b[i]))


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 33), st.sampled_from([BF16, F32]))
def test_rows_and_columns_of_a_chain_do_not_depend_on_their_neighbours(seed, m, n, dtype):
    a, b = special(seed, m, 9, dtype=dtype), special(seed + 7, 9, n, dtype=dtype)
    assert_row_invariant(lambda x: chain(x, b), [a], seed)
    assert_row_invariant(lambda x: chain(a, x.T).T.contiguous(), [b.T.contiguous()], seed)


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 33), st.sampled_from([BF16, F32]))
def test_products_that_underflow_do_not_depend_on_their_neighbours(seed, m, n, dtype):
    """Products near 2^-140 are inexact: a step fused on some lanes alone would show."""
    a = normal(seed, m, 9, dtype=dtype, scale=2.0**-68)
    b = normal(seed + 7, 9, n, dtype=dtype, scale=2.0**-68)
    assert_row_invariant(lambda x: chain(x, b), [a], seed)
    assert_row_invariant(lambda x: chain(a, x.T).T.contiguous(), [b.T.contiguous()], seed)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_linear_adds_the_bias_last_and_rounds_once(dtype):
    x, w, bias = normal(0, 9, 33, dtype=dtype), normal(1, 5, 33, dtype=dtype), normal(2, 5)
    y = product(f32(x), f32(w).T) + f32(bias)
    expected = torch.from_numpy(y) if dtype == F32 else tensor(round_bf16(y), BF16)
    assert_same_bytes(linear_forward(x, w, bias.to(dtype)), expected)


def test_linear_does_not_round_before_the_bias():
    """1 + 2^-8 is halfway in BF16: rounded first it gives 1, then 1; once, it gives 1 + 2^-7."""
    x, w = torch.tensor([[1.0, 2.0**-8]], dtype=BF16), torch.ones(1, 2, dtype=BF16)
    bias = torch.tensor([2.0**-12], dtype=BF16)
    assert linear_forward(x, w, bias).item() == 1 + 2.0**-7


def test_linear_without_bias_and_its_dx_are_chains_rounded_once():
    x, w, dy = normal(3, 6, 40), normal(4, 24, 40), normal(5, 6, 24)
    y = tensor(round_bf16(product(f32(x), f32(w).T)), BF16)
    assert_same_bytes(linear_forward(x, w), y)
    dx = tensor(round_bf16(product(f32(dy), f32(w))), BF16)
    assert_same_bytes(linear_dx(dy, w), dx)


@given(st.integers(0, 10**6), st.integers(1, 40))
def test_rows_of_linears_are_independent(seed, rows):
    w, bias = normal(1, 12, 10), normal(2, 12)
    x, dy = special(seed, rows, 10), special(seed + 1, rows, 12)
    assert_row_invariant(lambda x: linear_forward(x, w, bias), [x], seed)
    assert_row_invariant(lambda dy: linear_dx(dy, w), [dy], seed)


def test_column_shards_of_a_linear_are_columns_of_the_whole():
    x, w, bias = normal(0, 7, 20), normal(1, 16, 20), normal(2, 16)
    whole = linear_forward(x, w, bias)
    for a, b in ((0, 2), (2, 9), (9, 16)):
        assert_same_bytes(linear_forward(x, w[a:b], bias[a:b]), whole[:, a:b].contiguous())


@quiet
def unit_tree_of(parts, num_units: int) -> np.ndarray:
    """Leaf j: one chain over block j of every part in turn; then the tree."""
    leaves = []
    for unit in range(num_units):
        total = None
        for a, b in parts:
            width = a.shape[1] // num_units
            block = slice(unit * width, (unit + 1) * width)
            total = product(f32(a)[:, block], f32(b)[block], total)
        leaves.append(total)
    return tree_of(leaves)


@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("num_units", [1, 2, 4, 8, 16])
def test_unit_tree_adds_one_chain_a_unit_for_every_number_of_units(num_parts, num_units):
    parts = [(normal(i, 5, 48), normal(9 + i, 48, 7)) for i in range(num_parts)]
    root = unit_tree_roots(parts, range(num_units), num_units)
    assert root.shape == (1, 5, 7) and root.dtype == F32
    assert_same_bytes(root[0], torch.from_numpy(unit_tree_of(parts, num_units)))


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 3))
def test_any_owners_of_feature_units_give_the_same_root(seed, owners, num_parts):
    parts = [(exact(seed + i, 3, 32), exact(seed - i - 1, 32, 4)) for i in range(num_parts)]
    cuts, roots = cuts_of(seed, 8, owners), []
    for first, last in zip(cuts, cuts[1:], strict=False):
        own = slice(4 * first, 4 * last)
        local = [(a[:, own], b[own]) for a, b in parts]
        roots.append(unit_tree_roots(local, range(first, last), 8))
    assert_same_bytes(finish(roots, cuts), torch.from_numpy(unit_tree_of(parts, 8)))


def test_a_chain_over_the_whole_axis_is_another_sum():
    a, b = normal(0, 16, 64), normal(1, 64, 16)
    assert not torch.equal(chain(a, b), unit_tree_roots([(a, b)], range(8), 8)[0])


@quiet
def row_fold_of(dy: torch.Tensor, x: torch.Tensor, contract: Contract) -> np.ndarray:
    leaves = []
    for b0, b1 in block_edges(len(x), contract.row_block, contract.key_block):
        rows = slice(b0 * contract.row_block, b1 * contract.row_block)
        leaves.append(product(f32(dy)[rows].T, f32(x)[rows]))
    return tree_of(leaves)


@pytest.mark.parametrize("contract", [SMALL, Contract()], ids=lambda c: c.id)
@pytest.mark.parametrize("num_rows", [1, 7, 63, 64, 65, 129, 264, 300])
def test_row_fold_is_a_chain_over_the_rows_of_each_sequence_unit(num_rows, contract):
    dy, x = normal(num_rows, num_rows, 5), normal(1, num_rows, 3)
    root = row_fold_roots(dy, x, RowUnits(num_rows, contract), range(8))
    assert root.shape == (1, 5, 3) and root.dtype == F32
    assert_same_bytes(root[0], torch.from_numpy(row_fold_of(dy, x, contract)))


@given(st.integers(0, 10**6), st.integers(1, 200), st.integers(1, 8))
def test_any_owners_of_sequence_units_give_the_same_root(seed, num_rows, owners):
    dy, x = exact(seed, num_rows, 3), exact(seed + 1, num_rows, 2)
    rows, cuts, roots = RowUnits(num_rows, SMALL), cuts_of(seed, 8, owners), []
    for first, last in zip(cuts, cuts[1:], strict=False):
        own = rows.sequence_unit_rows(range(first, last))
        part = slice(own.start, own.stop)
        roots.append(row_fold_roots(dy[part], x[part], rows, range(first, last)))
    assert_same_bytes(finish(roots, cuts), torch.from_numpy(row_fold_of(dy, x, SMALL)))


def test_a_rank_without_rows_has_roots_of_positive_zero():
    roots = row_fold_roots(normal(0, 0, 5), normal(1, 0, 3), RowUnits(16, SMALL), range(0, 5))
    assert_same_bytes(roots, torch.zeros(2, 5, 3))


def test_fp64_linear_and_its_gradients_equal_autograd():
    """Both sides add K <= 40 products of size below 25 in FP64: error below 40 * 1000 * 2^-53."""
    x, w = (normal(i, *s, dtype=F64).requires_grad_() for i, s in ((0, (40, 16)), (1, (24, 16))))
    bias = normal(2, 24, dtype=F64).requires_grad_()
    dy = normal(3, 40, 24, dtype=F64)
    y = x @ w.T + bias
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    limit = 40 * 1000 * 2.0**-53
    x, w, bias, y = (t.detach() for t in (x, w, bias, y))
    assert (linear_forward(x, w, bias) - y).abs().max() < limit
    assert (linear_dx(dy, w) - dx).abs().max() < limit
    units = unit_tree_roots([(dy, w)], range(8), 8)
    assert units.dtype == F64 and (units[0] - dx).abs().max() < limit
    fold = row_fold_roots(dy, x, RowUnits(40, SMALL), range(8))
    assert fold.dtype == F64 and (fold[0] - dw).abs().max() < limit


@pytest.mark.parametrize(
    "call,reason",
    [
        (lambda x, w: linear_forward(x.half(), w.half()), "dtype of x: received torch.float16;"),
        (lambda x, w: linear_forward(x, w.float()), "dtype of w: received torch.float32; .* as x"),
        (lambda x, w: linear_forward(x.long(), w.long()), "received torch.int64; accepted: .*bf"),
        (lambda x, w: linear_forward(x, w[:, :3]), r"shape of w: received \(5, 3\); .*\(any, 4\)"),
        (lambda x, w: linear_dx(x, w), r"shape of w: received \(5, 4\); accepted: \(4, any\)"),
        (lambda x, w: linear_forward(x, w.to("meta")), "device of w: received 'meta'; .*cpu as x"),
        (
            lambda x, w: unit_tree_roots([(x, w.T), (x, w)], range(8), 8),
            r"shape of b: received \(5, 4\); accepted: \(4, any\)|reduced axis",
        ),
        (
            lambda x, w: unit_tree_roots([(x, w.T)], range(8), 8),
            "reduced axis: received 4; accepted: a multiple of the 8 units here",
        ),
        (
            lambda x, w: unit_tree_roots([(x, w.T), (x.float(), w.T)], range(4), 8),
            "dtype of a1: received torch.float32; accepted: torch.bfloat16 as a0",
        ),
        (
            lambda x, w: row_fold_roots(x, x, RowUnits(7), range(8)),
            r"shape of dy: received \(6, 4\); accepted: \(7, any\)",
        ),
        (
            lambda x, w: row_fold_roots(x, w, RowUnits(6), range(8)),
            r"shape of x: received \(5, 4\); accepted: \(6, any\)",
        ),
    ],
)
def test_operands_that_do_not_fit_are_refused(call, reason):
    with pytest.raises(OperandError, match=reason):
        call(torch.zeros(6, 4, dtype=BF16), torch.zeros(5, 4, dtype=BF16))


def test_units_outside_the_tree_are_refused():
    with pytest.raises(ContractError, match=r"leaf range: received \(4, 12\)"):
        unit_tree_roots([(torch.zeros(1, 8), torch.zeros(8, 1))], range(4, 12), 8)
