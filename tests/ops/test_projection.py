"""Projection on packed rows: permutation and padding change no bit; gradients in order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_same_bytes, generator, normal

from h3lib.contract import Contract, OperandError, RowsError, RowUnits
from h3lib.ops.fold import row_unit_roots
from h3lib.ops.gemm import linear_dx, linear_forward, row_fold_roots
from h3lib.ops.projection import projection

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
SMALL = Contract(row_block=4, key_block=16)


def run(x, w, bias, dy, keys=None, contract=SMALL):
    """y and the gradients of x, w and bias."""
    leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
    y = projection(*leaves, keys, contract)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def operands(num_rows: int, seed: int = 0, dtype=BF16):
    shapes = ((num_rows, 6), (5, 6), (5,), (num_rows, 5))
    return [normal(seed + i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("num_rows", [1, 17, 63, 65, 264, 300])
@pytest.mark.parametrize("contract", [SMALL, Contract()], ids=lambda c: c.id)
def test_gradients_are_the_folds_rounded_once(num_rows, contract):
    x, w, bias, dy = operands(num_rows)
    y, dx, dw, dbias = run(x, w, bias, dy, contract=contract)
    units = RowUnits(num_rows, contract)
    assert_same_bytes(y, linear_forward(x, w, bias))
    assert_same_bytes(dx, linear_dx(dy, w))
    assert_same_bytes(dw, row_fold_roots(dy, x, units, range(8))[0].to(BF16))
    assert_same_bytes(dbias, row_unit_roots(dy.float(), units, range(64))[0, 0].to(BF16))


@given(st.integers(0, 10**6), st.integers(1, 80), st.integers(0, 9), st.sampled_from([2, 3]))
def test_permuting_and_padding_rows_with_their_keys_changes_no_bit(seed, num_rows, pad, columns):
    x, w, bias, dy = operands(num_rows, seed)
    y, dx, dw, dbias = run(x, w, bias, dy)
    numbers = torch.arange(num_rows)
    minor = numbers if columns == 2 else numbers % 5
    major = [] if columns == 2 else [numbers // 5]
    keys = torch.stack([torch.zeros_like(numbers), *major, minor], 1)
    keys = torch.cat((keys, torch.full((pad, columns), -1)))
    order = torch.randperm(num_rows + pad, generator=generator(seed))
    nan = torch.full((pad, 6), float("nan"), dtype=BF16)
    packed_x, packed_dy = torch.cat((x, nan))[order], torch.cat((dy, nan[:, :5]))[order]
    found = run(packed_x, w, bias, packed_dy, keys[order])
    zeros = torch.zeros(pad, 6, dtype=BF16)
    assert_same_bytes(found[0], torch.cat((y, zeros[:, :5]))[order], "y")
    assert_same_bytes(found[1], torch.cat((dx, zeros))[order], "dx")
    assert_same_bytes(found[2], dw, "dw")
    assert_same_bytes(found[3], dbias, "dbias")


def test_another_order_of_the_same_rows_would_change_dw():
    x, w, bias, dy = operands(100, dtype=F32)
    order = torch.randperm(100, generator=generator(1))
    dw = run(x, w, bias, dy)[2]
    assert not torch.equal(dw, run(x[order], w, bias, dy[order])[2])
    keys = torch.stack((torch.zeros_like(order), order), 1)
    assert_same_bytes(run(x[order], w, bias, dy[order], keys)[2], dw)


def test_only_the_gradients_asked_for_are_made():
    x, w, bias, dy = operands(20)
    w.requires_grad_()
    y = projection(x, w, None, None, SMALL)
    y.backward(dy)
    assert x.grad is None
    assert_same_bytes(w.grad, run(x, w.detach(), bias, dy)[2])


def test_a_gradient_that_is_not_contiguous_gives_the_same_bytes():
    x, w, bias, dy = operands(30)
    spread = torch.stack((dy, dy), -1)[..., 0]
    assert not spread.is_contiguous()
    whole = zip(run(x, w, bias, spread), run(x, w, bias, dy), strict=True)
    for found, expected in whole:
        assert_same_bytes(found, expected)


def test_parameter_gradients_have_the_dtype_of_the_parameter():
    x, w, _, dy = operands(20)
    bias = normal(2, 5, dtype=F32)
    y, dx, dw, dbias = run(x, w, bias, dy)
    assert (y.dtype, dx.dtype, dw.dtype, dbias.dtype) == (BF16, BF16, BF16, F32)
    assert_same_bytes(dbias, row_unit_roots(dy.float(), RowUnits(20, SMALL), range(64))[0, 0])


def test_fp64_gradients_pass_a_numerical_check():
    x, w, bias, _ = operands(19, dtype=F64)
    keys = torch.stack((torch.zeros(19, dtype=torch.int64), torch.arange(19).flip(0)), 1)
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    assert torch.autograd.gradcheck(lambda *t: projection(*t, keys, SMALL), leaves)


def test_fp64_equals_autograd_of_a_linear():
    """19 rows of 6 products below 25 in FP64: error below 19 * 500 * 2^-53 < 2e-12."""
    x, w, bias, dy = operands(19, dtype=F64)
    leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
    y = torch.nn.functional.linear(*leaves)
    expected = (y.detach(), *torch.autograd.grad(y, leaves, dy))
    for found, want in zip(run(x, w, bias, dy), expected, strict=True):
        assert (found - want).abs().max() < 2e-12


def test_keys_that_cannot_be_ordered_are_refused():
    x, w, bias, _ = operands(3)
    with pytest.raises(RowsError, match=r"two active rows: received \(0, 1\)"):
        projection(x, w, bias, torch.tensor([[0, 1], [0, 0], [0, 1]]))
    with pytest.raises(RowsError, match="number of packed rows: received 3; accepted: 2"):
        projection(x, w, bias, torch.tensor([[0, 1], [0, 0]]))
    with pytest.raises(RowsError, match="number of active rows: received 0"):
        projection(x[:0], w, bias)


def test_operands_that_do_not_fit_are_refused():
    x, w, bias, _ = operands(3)
    with pytest.raises(OperandError, match="dtype of w: received torch.float32; .* as x"):
        projection(x, w.float(), bias)
    with pytest.raises(OperandError, match=r"shape of w: received \(6, 5\); accepted: \(any, 6\)"):
        projection(x, w.T, bias)
