"""Every op refuses operands that would broadcast, naming what it got and what it accepts."""

import numpy as np
import pytest
import torch
from support import assert_same_bytes, f32, normal

from h3lib.contract import PUBLISHED, LayoutError, OperandError, RowUnits
from h3lib.layout import Layout
from h3lib.ops import adaln, attention, fold, gemm, norm, rope, swiglu
from h3lib.ops.projection import projection

F32 = torch.float32


def z(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


HEADS, QUERY = z(5, 2, 4), z(5, 2, dtype=F32)
ROWS = RowUnits(5)


def head_norm_dw_leaves(dy: int, x: int, r: int, units: int) -> torch.Tensor:
    operands = z(dy, 4, 3), z(x, 4, 3), z(r, 4, 1, dtype=F32)
    return norm.head_norm_dw_leaves(*operands, ROWS, range(8), units)


CASES = {
    "bias of one": (lambda: gemm.linear_forward(z(6, 4), z(5, 4), z(1)), "bias"),
    "bias of rows": (lambda: gemm.linear_forward(z(6, 4), z(5, 4), z(6, 5)), "bias"),
    "bias too short": (lambda: gemm.linear_forward(z(6, 4), z(5, 4), z(3)), "bias"),
    "x of three dims": (lambda: gemm.linear_forward(z(2, 6, 4), z(5, 4)), "shape of x"),
    "projection of three dims": (lambda: projection(z(2, 5, 4), z(3, 4)), "shape of x"),
    "parts of other rows": (
        lambda: gemm.unit_tree_roots([(z(5, 8), z(8, 3)), (z(1, 8), z(8, 3))], range(8), 8),
        "shape of a",
    ),
    "one scale": (
        lambda: adaln.modulate_forward(z(6, 4), z(6, 4), z(1, 4), torch.arange(6)),
        "shape of scale",
    ),
    "narrow shift": (
        lambda: adaln.modulate_forward(z(6, 4), z(6, 1), z(6, 4), torch.arange(6)),
        "shape of shift",
    ),
    "one gate": (
        lambda: adaln.gated_residual_forward(z(6, 4), z(4), z(6, 4), torch.arange(6)),
        "shape of gate",
    ),
    "one table row": (
        lambda: adaln.gated_residual_forward(z(6, 4), z(6, 4), z(6, 4), torch.arange(1)),
        "shape of table_rows",
    ),
    "one y row": (
        lambda: adaln.gated_residual_backward(
            z(5, 4), z(5, 4), z(1, 4), torch.arange(5), ROWS, range(64)
        ),
        "shape of y",
    ),
    "rows of other units": (
        lambda: adaln.gated_residual_backward(
            z(5, 4), z(5, 4), z(5, 4), torch.arange(5), ROWS, range(8)
        ),
        "shape of terms",
    ),
    "one modulated r": (
        lambda: adaln.modulated_norm_backward(
            z(5, 4), z(5, 4), z(4), z(1, 1, dtype=F32), z(5, 4), torch.arange(5), ROWS, range(64)
        ),
        "shape of r",
    ),
    "one modulated weight": (
        lambda: adaln.modulated_norm_backward(
            z(5, 4), z(5, 4), z(1), z(5, 1, dtype=F32), z(5, 4), torch.arange(5), ROWS, range(64)
        ),
        "shape of w",
    ),
    "one dx0": (
        lambda: norm.rms_norm_backward(z(6, 4), z(6, 4), z(4), z(6, 1, dtype=F32), z(1, 4)),
        "shape of dx0",
    ),
    "bf16 temb": (lambda: adaln.adaln_input_forward(z(2, 4), torch.bfloat16), "dtype of temb"),
    "one ds": (lambda: adaln.adaln_input_backward(z(1, 4), z(2, 4, dtype=F32)), "shape of ds"),
    "one r": (
        lambda: norm.rms_norm_backward(z(6, 4), z(6, 4), z(4), z(1, 1, dtype=F32)),
        "shape of r",
    ),
    "one dy": (
        lambda: norm.rms_norm_backward(z(1, 4), z(6, 4), z(4), z(6, 1, dtype=F32)),
        "shape of dy",
    ),
    "one weight": (
        lambda: norm.rms_norm_backward(z(6, 4), z(6, 4), z(1), z(6, 1, dtype=F32)),
        "shape of w",
    ),
    "more rows": (lambda: head_norm_dw_leaves(9, 9, 9, 2), "shape of x"),
    "more dy": (lambda: head_norm_dw_leaves(9, 5, 5, 2), "shape of dy"),
    "one r of heads": (lambda: head_norm_dw_leaves(5, 5, 1, 2), "shape of r"),
    "heads": (lambda: head_norm_dw_leaves(5, 5, 5, 3), "heads"),
    "few groups": (
        lambda: fold.row_unit_roots(z(5, 2, dtype=F32), ROWS, range(64), torch.zeros(3).long(), 2),
        "shape of groups",
    ),
    "group too large": (
        lambda: fold.row_unit_roots(z(5, 2, dtype=F32), ROWS, range(64), torch.full((5,), 2), 2),
        "group of a row: received 2; accepted: 0 to 1",
    ),
    "group below 0": (
        lambda: fold.row_unit_roots(z(5, 2, dtype=F32), ROWS, range(64), torch.full((5,), -1), 2),
        "group of a row: received -1",
    ),
    "bf16 terms": (lambda: fold.row_unit_roots(z(5, 2), ROWS, range(64)), "dtype of terms"),
    "one gate row": (lambda: swiglu.swiglu_forward(z(6, 4), z(1, 4)), "shape of gate"),
    "one dy row": (lambda: swiglu.swiglu_backward(z(1, 4), z(6, 4), z(6, 4)), "shape of value"),
    "one sin": (lambda: rope.rotary_forward(z(5, 2, 10), z(5, 4), z(5, 1)), "shape of sin"),
    "rotary too wide": (lambda: rope.rotary_forward(z(5, 2, 6), z(5, 4), z(5, 4)), "rotated chan"),
    "one lse": (
        lambda: attention.attention_dq(*[HEADS] * 4, QUERY[:1], QUERY, PUBLISHED),
        "shape of lse",
    ),
    "one dout": (
        lambda: attention.attention_dq(*[HEADS] * 3, HEADS[:1], QUERY, QUERY, PUBLISHED),
        "shape of dout",
    ),
    "bf16 lse": (
        lambda: attention.attention_dq(*[HEADS] * 4, QUERY.bfloat16(), QUERY, PUBLISHED),
        "dtype of lse",
    ),
    "one delta": (
        lambda: attention.attention_dkv(*[HEADS] * 4, QUERY, QUERY[:1], PUBLISHED),
        "shape of delta",
    ),
    "delta of one": (lambda: attention.attention_delta(HEADS, HEADS[:1]), "shape of out"),
}


@pytest.mark.parametrize("case", CASES)
def test_operands_that_would_broadcast_are_refused(case):
    call, reason = CASES[case]
    with pytest.raises(OperandError, match=reason):
        call()


@pytest.mark.parametrize("name", ["tp8-cp2-local1\u0666", "tp" + "9" * 5000])
def test_names_with_other_digits_or_endless_numbers_are_refused(name):
    with pytest.raises(LayoutError):
        Layout.parse(name)


def test_square_root_of_the_norm_is_ieee():
    x, w = normal(0, 4000, 1, dtype=F32), torch.ones(1)
    mean = f32(x)[:, 0] * f32(x)[:, 0] + np.float32(1e-5)
    expected = torch.from_numpy(np.float32(1) / np.sqrt(mean))
    assert_same_bytes(norm.rms_norm_forward(x, w, 1e-5)[1][:, 0], expected)
