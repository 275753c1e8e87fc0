"""AdaLN: table rows, modulation and gate with every rounding point, chains over timesteps."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import (
    assert_row_invariant,
    assert_same_bytes,
    chain_of,
    f32,
    normal,
    quiet,
    round_bf16,
    special,
    tensor,
)

from h3lib.contract import OperandError
from h3lib.ops.adaln import (
    adaln_input_backward,
    adaln_input_forward,
    gated_residual_backward,
    gated_residual_forward,
    modulate_backward,
    modulate_forward,
    table_rows,
    timestep_chain_dw,
)
from h3lib.ops.swiglu import silu, silu_derivative

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def test_table_row_is_timestep_times_three_plus_tag_and_padding_counts_as_video():
    found = table_rows(torch.tensor([0, 0, 0, 1, 2, 1]), torch.tensor([0, 1, 2, 0, 2, -1]), 3)
    assert found.tolist() == [0, 1, 2, 3, 8, 3]


@given(st.integers(0, 10**6))
def test_modulation_rounds_scale_product_and_sum(seed):
    h, shift, scale = (special(seed + i, 6, 9) for i in range(3))
    with np.errstate(all="ignore"):
        one_plus = round_bf16(np.float32(1) + f32(scale))
        expected = round_bf16(round_bf16(f32(h) * one_plus) + f32(shift))
    assert_same_bytes(modulate_forward(h, shift, scale), tensor(expected, BF16))


@given(st.integers(0, 10**6))
def test_modulation_backward_rounds_dh_and_not_the_terms(seed):
    da, h, scale = (special(seed + i, 6, 9) for i in range(3))
    dh, terms = modulate_backward(da, h, scale)
    with np.errstate(all="ignore"):
        one_plus = round_bf16(np.float32(1) + f32(scale))
        expected = tensor(round_bf16(f32(da) * one_plus), BF16)
        dscale = torch.from_numpy(f32(da) * f32(h))
    assert_same_bytes(dh, expected)
    assert terms.shape == (6, 2, 9) and terms.dtype == F32
    assert_same_bytes(terms[:, 0], da.float())
    assert_same_bytes(terms[:, 1], dscale)


@given(st.integers(0, 10**6))
def test_gated_residual_rounds_the_gated_branch_then_the_sum(seed):
    x, gate, y = (special(seed + i, 6, 9) for i in range(3))
    with np.errstate(all="ignore"):
        branch = round_bf16(f32(gate) * f32(y))
        expected = tensor(round_bf16(f32(x) + branch), BF16)
        dy_of, dgate_of = round_bf16(f32(gate) * f32(x)), f32(x) * f32(y)
    assert_same_bytes(gated_residual_forward(x, gate, y), expected)
    dy, dgate = gated_residual_backward(x, gate, y)
    assert_same_bytes(dy, tensor(dy_of, BF16))
    assert dgate.dtype == F32
    assert_same_bytes(dgate, torch.from_numpy(dgate_of))


def test_skipping_a_rounding_point_would_show():
    """h (1 + scale) + shift = (1 + 2^-7) (1 + 2^-7) + 2^-8, a tie once 2^-14 is rounded away."""
    h, scale = torch.tensor([1.0078125], dtype=BF16), torch.tensor([2.0**-7], dtype=BF16)
    shift = torch.tensor([2.0**-8], dtype=BF16)
    fused = (h.float() * (1 + scale.float()) + shift.float()).to(BF16)
    assert modulate_forward(h, shift, scale).item() == 1.015625
    assert fused.item() == 1.0234375


@given(st.integers(0, 10**6), st.integers(1, 70))
def test_rows_are_independent(seed, num_rows):
    rows = [special(seed + i, num_rows, 19) for i in range(3)]
    for function in (
        modulate_forward,
        modulate_backward,
        gated_residual_forward,
        gated_residual_backward,
    ):
        assert_row_invariant(function, rows, seed)


@given(st.integers(0, 10**6), st.integers(1, 40))
def test_timesteps_are_independent(seed, num_timesteps):
    temb, ds = special(seed, num_timesteps, 13, dtype=F32), special(seed + 1, num_timesteps, 13)
    assert_row_invariant(lambda temb: adaln_input_forward(temb, BF16), [temb], seed)
    assert_row_invariant(adaln_input_backward, [ds, temb], seed)


def test_silu_runs_in_fp32_on_the_fp32_embedding_and_is_rounded_once():
    temb = normal(0, 3, 500, dtype=F32, scale=3)
    s = adaln_input_forward(temb, BF16)
    assert_same_bytes(s, tensor(round_bf16(f32(silu(temb))), BF16))
    early = adaln_input_forward(temb.to(BF16).float(), BF16)  # rounds the embedding first
    assert not torch.equal(s, early)


def test_gradient_of_the_embedding_is_fp32_and_not_rounded():
    temb, ds = normal(0, 3, 50, dtype=F32), normal(1, 3, 50)
    dtemb = adaln_input_backward(ds, temb)
    assert_same_bytes(dtemb, ds.float() * silu_derivative(temb))
    assert not torch.equal(dtemb, dtemb.to(BF16).float())


@quiet
def chains_of(dm: np.ndarray, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return chain_of(dm[:, :, None] * s[:, None, :]), chain_of(dm)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("num_timesteps", [1, 2, 3, 9])
def test_weight_gradient_is_a_chain_over_timesteps(dtype, num_timesteps):
    dm, s = normal(0, num_timesteps, 6, dtype=dtype), normal(1, num_timesteps, 4, dtype=dtype)
    dw, dbias = timestep_chain_dw(dm, s)
    dw_of, dbias_of = chains_of(f32(dm), f32(s))
    assert_same_bytes(dw, torch.from_numpy(dw_of))
    assert_same_bytes(dbias, torch.from_numpy(dbias_of))


def test_weight_gradient_of_negative_zeros_is_positive_zero():
    dw, dbias = timestep_chain_dw(torch.full((2, 3), -0.0), torch.ones(2, 2))
    assert_same_bytes(dw, torch.zeros(3, 2))
    assert_same_bytes(dbias, torch.zeros(3))


def test_weight_gradient_ascends_over_timesteps():
    dm, s = torch.tensor([[2.0**25], [1.0], [-(2.0**25)]]), torch.ones(3, 1)
    assert timestep_chain_dw(dm, s)[0].item() == 0.0
    assert timestep_chain_dw(dm[[0, 2, 1]], s)[0].item() == 1.0


def test_columns_of_the_weight_gradient_are_rows_of_the_whole():
    dm, s = normal(0, 3, 48), normal(1, 3, 5)
    dw, dbias = timestep_chain_dw(dm, s)
    for a, b in ((0, 6), (6, 42), (42, 48)):
        part, part_bias = timestep_chain_dw(dm[:, a:b].contiguous(), s)
        assert_same_bytes(part, dw[a:b])
        assert_same_bytes(part_bias, dbias[a:b])


def test_fp64_ops_equal_autograd_through_the_gather():
    """At most 8 products of values below 6 in FP64: error below 8 * 300 * 2^-53 < 3e-13."""
    t, d, e = 10, 7, 5
    x, y, h, dout = (normal(i, t, d, dtype=F64) for i in range(4))
    shapes = ((2, e), (9 * d, e), (9 * d,))
    temb, w, bias = (normal(9 + i, *shape, dtype=F64) for i, shape in enumerate(shapes))
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 0, 0, 4, 2])
    leaves = [z.clone().requires_grad_() for z in (y, h, temb, w, bias)]
    yg, hg, tembg, wg, biasg = leaves
    s = tembg * torch.sigmoid(tembg)
    shift, scale, gate = (s @ wg.T + biasg).view(6, 3, d)[rows].unbind(1)
    a = hg * (1 + scale) + shift
    out = x + gate * yg
    expected = torch.autograd.grad([a, out], leaves, [dout, dout])

    s = adaln_input_forward(temb, F64)
    table = (s @ w.T + bias).view(6, 3, d)
    shift, scale, gate = table[rows].unbind(1)
    close = {"a": (modulate_forward(h, shift, scale), a.detach())}
    close["out"] = gated_residual_forward(x, gate, y), out.detach()
    dh, terms = modulate_backward(dout, h, scale)
    dy, dgate = gated_residual_backward(dout, gate, y)
    dtable = torch.zeros(6, 3, d, dtype=F64)
    dtable.index_add_(0, rows, torch.cat((terms, dgate[:, None]), 1))
    dm = dtable.view(2, -1)
    dw, dbias = timestep_chain_dw(dm, s)
    dtemb = adaln_input_backward(dm @ w, temb)
    names = ("dy", "dh", "dtemb", "dw", "dbias")
    close |= dict(zip(names, zip((dy, dh, dtemb, dw, dbias), expected, strict=True), strict=True))
    for name, (value, want) in close.items():
        assert value.dtype == F64
        assert (value - want).abs().max() < 3e-12, name


@pytest.mark.parametrize(
    "call,reason",
    [
        (lambda a, b: modulate_forward(a, a, b), "dtype of scale: received torch.float32; .* as h"),
        (lambda a, b: modulate_backward(a, b, a), "dtype of h: received torch.float32; .* as da"),
        (lambda a, b: gated_residual_forward(a, b, a), "dtype of gate: received torch.float32"),
        (lambda a, b: gated_residual_backward(a, a, b), "dtype of y: received torch.float32"),
        (lambda a, b: modulate_forward(*[a.half()] * 3), "dtype of h: received torch.float16; acc"),
        (lambda a, b: timestep_chain_dw(a, b), "dtype of s: received torch.float32; .* as dm"),
        (
            lambda a, b: timestep_chain_dw(a, a[:1]),
            r"shape of s: received \(1, 3\); accepted: \(2, any\)",
        ),
    ],
)
def test_operands_that_do_not_fit_are_refused(call, reason):
    with pytest.raises(OperandError, match=reason):
        call(torch.zeros(2, 3, dtype=BF16), torch.zeros(2, 3))
