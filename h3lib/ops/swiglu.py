"""SiLU and SwiGLU: y = bf16(value bf16(SiLU(gate))), SiLU(g) = g / (1 + exp(-g)).

SiLU is written from `exp`: the library's sigmoid and SiLU depend on the position in the buffer on
CPU (70-86 of 200 random slices differ), `exp` does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3lib.ops.backend import accumulator, check_operands, check_shapes, op


def silu(g: Tensor) -> Tensor:
    """SiLU(g) = g / (1 + exp(-g)), in g's dtype (FP32 or FP64)."""
    return g / (1 + torch.exp(-g))


def silu_derivative(g: Tensor) -> Tensor:
    """SiLU'(g) = s (1 + g (1 - s)), s = 1 / (1 + exp(-g)), in g's dtype (FP32 or FP64)."""
    s = 1 / (1 + torch.exp(-g))
    return s * (1 + g * (1 - s))


@op
def swiglu_forward(value: Tensor, gate: Tensor) -> Tensor:
    """y = bf16(value bf16(SiLU(gate))); all `[T, F]` (local: the rank's feature units).

    **Rounds:** SiLU(gate), then the product.
    """
    check_operands(value=value, gate=gate)
    check_shapes(value=value, gate=gate)
    return value * silu(gate.to(accumulator(gate))).to(gate.dtype)


@op
def swiglu_backward(dy: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    """[dvalue, dgate] side by side `[T, 2 F]`, as the projection's output is; the rest `[T, F]`.

    dvalue = bf16(dy bf16(SiLU(g))), dgate = bf16(bf16(dy value) SiLU'(g)).
    """
    check_operands(dy=dy, value=value, gate=gate)
    check_shapes(dy=dy, value=value, gate=gate)
    g = gate.to(accumulator(gate))
    dvalue = dy * silu(g).to(gate.dtype)
    dgate = (dy * value).to(g.dtype) * silu_derivative(g)
    return torch.cat((dvalue, dgate.to(gate.dtype)), dim=-1)
