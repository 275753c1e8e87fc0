"""Rotary embedding over (t, h, w): partial, split-half; the last channels of a head pass through.

With h = half the rotated channels, channel j < h is paired with j + h:
    out_j     = bf16(bf16(x_j cos_j) + bf16(-x_{j+h} sin_j))
    out_{j+h} = bf16(bf16(x_{j+h} cos_j) + bf16(x_j sin_j))
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3lib.contract import ModelSize, OperandError
from h3lib.ops.backend import check_operands, check_shape, op


def rope_table(position_ids: Tensor, size: ModelSize, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) of the angles [t g, h g, w g], g_i = theta^(-2i / 2f), each `[T, 3 f]`.

    position_ids `[T, 3]` FP64, cast to FP32 first; angles in FP32. **Rounds:** cos and sin, once.
    """
    check_shape("position_ids", position_ids, None, 3)
    if position_ids.dtype != torch.float64:
        raise OperandError("dtype of position_ids", position_ids.dtype, torch.float64)
    steps = torch.arange(
        0, 2 * size.rope_freq_dim, 2, dtype=torch.float32, device=position_ids.device
    )
    frequency = 1.0 / size.rope_theta ** (steps / (2 * size.rope_freq_dim))
    angles = (position_ids.float()[:, :, None] * frequency).flatten(1)
    return torch.cos(angles).to(dtype), torch.sin(angles).to(dtype)


@op
def rotary_forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate q or k; x `[T, N, H]`, cos and sin `[T, h]` with 2 h <= H; result like x.

    **Rounds:** the products and the sum.
    """
    check_operands(x=x, cos=cos, sin=sin)
    half = cos.shape[-1]
    check_shape("cos", cos, len(x), half)
    check_shape("sin", sin, len(x), half)
    if 2 * half > x.shape[-1]:
        raise OperandError("rotated channels", 2 * half, f"at most {x.shape[-1]}")
    cos, sin = cos[:, None], sin[:, None]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((low * cos + (-high) * sin, high * cos + low * sin, rest), dim=-1)


@op
def rotary_backward(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The forward with -sin; dy is dq (dk) rounded to bf16, so is the result."""
    return rotary_forward(dy, cos, -sin)
