"""SiLU and SwiGLU: every rounding point, no dependence on neighbours, FP64 against autograd."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import (
    assert_row_invariant,
    assert_same_bytes,
    f32,
    normal,
    quiet,
    round_bf16,
    special,
    tensor,
)

from h3lib.contract import OperandError
from h3lib.ops.swiglu import silu, silu_derivative, swiglu_backward, swiglu_forward

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def exp_of(x: np.ndarray) -> np.ndarray:
    """The library's `exp`, asked for one element at a time."""
    one = [torch.exp(torch.tensor([v], dtype=F32)).item() for v in x.reshape(-1).tolist()]
    return np.array(one, dtype=np.float32).reshape(x.shape)


@quiet
def silu_of(g: np.ndarray) -> np.ndarray:
    return g / (np.float32(1) + exp_of(-g))


@quiet
def derivative_of(g: np.ndarray) -> np.ndarray:
    one = np.float32(1)
    s = one / (one + exp_of(-g))
    return s * (one + g * (one - s))


@given(st.integers(0, 10**6), st.integers(1, 40))
def test_silu_is_written_from_exp_wherever_the_element_stands(seed, width):
    g = special(seed, 3, width, dtype=F32) * 20
    assert_same_bytes(silu(g), torch.from_numpy(silu_of(f32(g))))
    assert_same_bytes(silu_derivative(g), torch.from_numpy(derivative_of(f32(g))))


def test_exp_is_within_one_unit_of_the_last_place():
    """The oracle above takes the library's exp; it is the exponential, to one unit."""
    x = np.linspace(-80, 80, 401, dtype=np.float32)
    exact = np.array([math.exp(v) for v in x.tolist()])
    assert (np.abs(exp_of(x) - exact) <= np.spacing(exact.astype(np.float32))).all()


def test_silu_at_the_ends():
    g = torch.tensor([0.0, -0.0, 200.0, -200.0, math.inf, math.nan])
    assert_same_bytes(silu(g), torch.tensor([0.0, -0.0, 200.0, -0.0, math.inf, math.nan]))
    derivative = silu_derivative(g[:4])
    assert_same_bytes(derivative, torch.tensor([0.5, 0.5, 1.0, -0.0]))


@given(st.integers(0, 10**6))
def test_swiglu_rounds_silu_then_the_product(seed):
    value, gate, dy = (special(seed + i, 4, 11) for i in range(3))
    activated = round_bf16(silu_of(f32(gate)))
    with np.errstate(all="ignore"):
        y_of = round_bf16(f32(value) * activated)
        dvalue_of = round_bf16(f32(dy) * activated)
        inner = round_bf16(f32(dy) * f32(value))
        dgate_of = round_bf16(inner * derivative_of(f32(gate)))
    assert_same_bytes(swiglu_forward(value, gate), tensor(y_of, BF16))
    dvalue, dgate = swiglu_backward(dy, value, gate).chunk(2, -1)
    assert_same_bytes(dvalue, tensor(dvalue_of, BF16))
    assert_same_bytes(dgate, tensor(dgate_of, BF16))


def test_skipping_a_rounding_point_would_show():
    value, gate, dy = (normal(i, 40, 40) for i in range(3))
    v, g, d = value.float(), gate.float(), dy.float()
    assert not torch.equal(swiglu_forward(value, gate), (v * silu(g)).to(BF16))
    dvalue, dgate = swiglu_backward(dy, value, gate).chunk(2, -1)
    assert not torch.equal(dvalue, (d * silu(g)).to(BF16))
    assert not torch.equal(dgate, (d * v * silu_derivative(g)).to(BF16))


@given(st.integers(0, 10**6), st.integers(1, 70), st.integers(1, 20))
def test_rows_are_independent(seed, num_rows, width):
    rows = [special(seed + i, num_rows, width) for i in range(3)]
    assert_row_invariant(swiglu_forward, rows[:2], seed)
    assert_row_invariant(swiglu_backward, rows, seed)


@given(st.integers(0, 10**6), st.integers(0, 30), st.integers(1, 10))
def test_a_slice_of_units_is_a_slice_of_the_whole(seed, first, count):
    value, gate, dy = (special(seed + i, 5, 40) for i in range(3))
    part = slice(first, first + count)
    own = [x[:, part].contiguous() for x in (value, gate, dy)]
    assert_same_bytes(swiglu_forward(*own[:2]), swiglu_forward(value, gate)[:, part])
    whole = swiglu_backward(dy, value, gate).chunk(2, -1)
    parts = swiglu_backward(own[2], *own[:2]).chunk(2, -1)
    for found, expected in zip(parts, whole, strict=True):
        assert_same_bytes(found, expected[:, part])


def test_fp64_swiglu_and_its_gradients_equal_autograd():
    """Ten operations on values below 10 in FP64: error below 10 * 100 * 2^-53 < 2e-13."""
    value, gate, dy = (normal(i, 20, 20, dtype=F64) for i in range(3))
    vg, gg = value.clone().requires_grad_(), gate.clone().requires_grad_()
    expected = vg * torch.nn.functional.silu(gg)
    grads = torch.autograd.grad(expected, (vg, gg), dy)
    found = (swiglu_forward(value, gate), *swiglu_backward(dy, value, gate).chunk(2, -1))
    for value, want in zip(found, (expected.detach(), *grads), strict=True):
        assert value.dtype == F64
        assert (value - want).abs().max() < 2e-13


def test_operands_of_two_dtypes_are_refused():
    x = torch.zeros(2, 3, dtype=BF16)
    with pytest.raises(OperandError, match="dtype of gate: received torch.float32; .* as value"):
        swiglu_forward(x, x.float())
    with pytest.raises(OperandError, match="dtype of value: received torch.float64; .* as dy"):
        swiglu_backward(x, x.double(), x)
    with pytest.raises(OperandError, match="dtype of value: received torch.float16; accepted"):
        swiglu_forward(x.half(), x.half())
