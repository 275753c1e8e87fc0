"""Rotary embedding: the table of diffusers bit for bit, rounding points, pass-through, inverse."""

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_minimax_h3 import (
    MiniMaxH3RotaryPosEmbed,
    _apply_rotary_emb,
)
from hypothesis import given
from hypothesis import strategies as st
from support import (
    assert_row_invariant,
    assert_same_bytes,
    f32,
    normal,
    round_bf16,
    special,
    tensor,
)

from h3lib.contract import SIZES, OperandError
from h3lib.ops.rope import rope_table, rotary_backward, rotary_forward

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def positions(num_rows: int, seed: int = 0) -> torch.Tensor:
    """Positions like those of a packed job: fractions, negative widths, some hundred rows."""
    ids = normal(seed, num_rows, 3, dtype=F64, scale=40)
    ids[:, 0] = ids[:, 0].abs() * 5 / 3
    return ids


@pytest.mark.parametrize("size", ["full", "small", "tiny"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_table_is_that_of_diffusers_bit_for_bit(size, dtype):
    size, ids = SIZES[size], positions(300)
    cos_of, sin_of = MiniMaxH3RotaryPosEmbed(size.rope_freq_dim, size.rope_theta)(ids)
    cos, sin = rope_table(ids, size, dtype)
    half = size.rotary_dim // 2
    assert cos.shape == (300, half)
    for found, expected in ((cos, cos_of), (sin, sin_of)):
        assert_same_bytes(found, expected[:, :half].to(dtype).contiguous())
        assert_same_bytes(found, expected[:, half:].to(dtype).contiguous())


def test_positions_are_rounded_to_fp32_before_the_angles():
    ids = torch.tensor([[1 / 3, 1e-9, 100.1]], dtype=F64)
    rounded = rope_table(ids.float().double(), SIZES["tiny"], F32)
    for found, expected in zip(rope_table(ids, SIZES["tiny"], F32), rounded, strict=True):
        assert_same_bytes(found, expected)


def test_angles_are_ordered_t_then_h_then_w():
    ids = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=F64)
    sin = rope_table(ids, SIZES["tiny"], F32)[1].view(3, 3, 4)
    steps = [1.0, 0.1, 0.01, 0.001]  # 10000^(-2i/8)
    for axis in range(3):
        assert sin[axis, axis].tolist() == pytest.approx(np.sin(steps).tolist(), abs=1e-7)
        others = [i for i in range(3) if i != axis]
        assert not sin[axis, others].any()


@given(st.integers(0, 10**6), st.integers(1, 80))
def test_rows_of_the_table_are_independent(seed, num_rows):
    ids = positions(num_rows, seed)
    assert_row_invariant(lambda ids: rope_table(ids, SIZES["tiny"], F32), [ids], seed)


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_rotation_is_that_of_diffusers_bit_for_bit(dtype):
    size = SIZES["tiny"]
    x, ids = normal(0, 50, 16, 32, dtype=dtype), positions(50)
    table = [t.to(dtype) for t in rope_table(ids, size, F32)]
    twice = [torch.cat((t, t), -1) for t in table]
    expected = _apply_rotary_emb(x[None], *twice)[0]
    assert_same_bytes(rotary_forward(x, *table), expected)


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """One channel pair at a time, products and sum rounded."""
    half, out = cos.shape[1], x.copy()
    with np.errstate(all="ignore"):
        for j in range(half):
            c, s = cos[:, j, None], sin[:, j, None]
            low, high = x[..., j], x[..., j + half]
            out[..., j] = round_bf16(round_bf16(low * c) + round_bf16(-high * s))
            out[..., j + half] = round_bf16(round_bf16(high * c) + round_bf16(low * s))
    return out


@given(st.integers(0, 10**6))
def test_products_and_sum_are_rounded_in_both_directions(seed):
    x = special(seed, 5, 2, 10)
    cos, sin = normal(seed, 5, 4), normal(seed + 1, 5, 4)
    assert_same_bytes(
        rotary_forward(x, cos, sin), tensor(rotated(f32(x), f32(cos), f32(sin)), BF16)
    )
    assert_same_bytes(
        rotary_backward(x, cos, sin), tensor(rotated(f32(x), f32(cos), -f32(sin)), BF16)
    )


def test_last_channels_pass_through_untouched():
    x = special(1, 6, 2, 32)
    cos, sin = rope_table(positions(6), SIZES["tiny"], BF16)
    for function in (rotary_forward, rotary_backward):
        assert_same_bytes(function(x, cos, sin)[..., 24:], x[..., 24:])


@given(st.integers(0, 10**6), st.integers(1, 60))
def test_rows_are_independent(seed, num_rows):
    x = special(seed, num_rows, 3, 10)
    cos, sin = special(seed + 1, num_rows, 4), special(seed + 2, num_rows, 4)
    assert_row_invariant(rotary_forward, [x, cos, sin], seed)
    assert_row_invariant(rotary_backward, [x, cos, sin], seed)


def test_fp64_rotation_equals_autograd():
    """Two products of values below 6: error below 4 * 36 * 2^-53 < 2e-14."""
    x, dy = normal(0, 9, 2, 32, dtype=F64), normal(1, 9, 2, 32, dtype=F64)
    cos, sin = rope_table(positions(9), SIZES["tiny"], F64)
    xg = x.clone().requires_grad_()
    pair = torch.complex(xg[..., :12], xg[..., 12:24]) * torch.complex(cos, sin)[:, None]
    y = torch.cat((pair.real, pair.imag, xg[..., 24:]), -1)
    (dx,) = torch.autograd.grad(y, xg, dy)
    assert (rotary_forward(x, cos, sin) - y.detach()).abs().max() < 2e-14
    assert (rotary_backward(dy, cos, sin) - dx).abs().max() < 2e-14


@pytest.mark.parametrize(
    "call,reason",
    [
        (lambda x, c: rotary_forward(x, c.float(), c), "dtype of cos: received torch.float32"),
        (lambda x, c: rotary_forward(x, c, c.double()), "dtype of sin: received torch.float64"),
        (lambda x, c: rotary_forward(x, c[:3], c), r"shape of cos: received \(3, 4\).*\(5, 4\)"),
        (
            lambda x, c: rope_table(torch.zeros(5, 2), SIZES["tiny"], F32),
            r"shape of position_ids: received \(5, 2\); accepted: \(any, 3\)",
        ),
    ],
)
def test_operands_that_do_not_fit_are_refused(call, reason):
    with pytest.raises(OperandError, match=reason):
        call(torch.zeros(5, 2, 10, dtype=BF16), torch.zeros(5, 4, dtype=BF16))
