"""The feed-forward part of a block: column-parallel in, SwiGLU, row-parallel out.

[value, gate] = a W_in^T;  y = W_out (value * SiLU(gate))
"""

from __future__ import annotations

from torch import Tensor

from h3lib.model.context import BlockContext
from h3lib.ops.gemm import linear_dx, linear_forward
from h3lib.ops.swiglu import swiglu_backward, swiglu_forward

W_IN, W_OUT = "ff.net.0.proj.weight", "ff.net.2.weight"


class FeedForward:
    """One rank's FFN units; letters as in `block.py`."""

    def __init__(self, ctx: BlockContext):
        self.ctx = ctx

    def forward(self, a_SD: Tensor) -> Tensor:
        """y `[S, D]`. Forward: all-gather rows (SP), chain, SwiGLU, unit tree over tp."""
        ctx, width = self.ctx, self.ctx.size.ffn_dim
        self.a_TD, (hidden,) = ctx.enter(a_SD, linear_forward, ctx.weights[W_IN])
        value, gate = hidden.chunk(2, dim=-1)
        self.value_TF = ctx.unit_node("ff.value", value, width)
        self.gate_TF = ctx.unit_node("ff.gate", gate, width)
        y_TF = ctx.call(swiglu_forward, self.value_TF, self.gate_TF)
        self.y_TF = ctx.unit_node("ff.swiglu", y_TF, width)
        return ctx.leave("ff.out", (self.y_TF, ctx.weights[W_OUT].transpose(0, 1)))

    def backward(self, dy_SD: Tensor) -> Tensor:
        """da `[S, D]`; dw of both linears go to the context."""
        ctx, width = self.ctx, self.ctx.size.ffn_dim
        dy_TD, (dy_TF,) = ctx.enter(dy_SD, linear_dx, ctx.weights[W_OUT])
        ctx.weight_gradient(W_OUT, dy_TD, self.y_TF)
        del self.y_TF
        ctx.unit_node("d.ff.swiglu", dy_TF, width)
        dhidden = ctx.call(swiglu_backward, dy_TF, self.value_TF, self.gate_TF)
        del dy_TF, self.value_TF, self.gate_TF
        dvalue, dgate = dhidden.chunk(2, dim=-1)
        ctx.unit_node("d.ff.value", dvalue, width)
        ctx.unit_node("d.ff.gate", dgate, width)
        ctx.weight_gradient(W_IN, dhidden, self.a_TD)
        del self.a_TD
        w_value, w_gate = ctx.weights[W_IN].chunk(2)
        return ctx.leave("d.ff.in", (dvalue, w_value), (dgate, w_gate))
