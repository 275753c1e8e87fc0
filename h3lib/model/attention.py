"""The attention part of a block: q, k, v column-parallel by heads, to_out row-parallel.

    q, k, v = a W^T;  q, k = rope(norm(q, k));  y = W_out softmax(q k^T / sqrt(H)) v

K and V of all rows are gathered over cp for the forward and dq; q, dO, L and delta for dk, dv. Each
gather starts as soon as its operand is there, and is waited for where its result is used.
"""

from __future__ import annotations

from torch import Tensor

from h3lib.contract import NUM_SEQUENCE_UNITS
from h3lib.model.context import BlockContext, Rows
from h3lib.ops import attention, rope
from h3lib.ops.gemm import linear_dx, linear_forward
from h3lib.ops.norm import head_norm_dw_leaves, rms_norm_backward, rms_norm_forward
from h3lib.ops.tree import stacked_roots
from h3lib.parallel.later import Later

W_OUT = "attn.to_out.0.weight"


class Attention:
    """One rank's heads and rows; letters as in `block.py`, N local heads, H head dim."""

    def __init__(self, ctx: BlockContext):
        self.ctx = ctx
        self.heads = {name: _HeadNorm(ctx, name) for name in "qk"}

    def forward(self, a_SD: Tensor, rows: Rows) -> Tensor:
        """y `[S, D]`. Forward: all-gather rows (SP), chains, K/V over cp, unit tree over tp."""
        ctx, gather, width = self.ctx, self.ctx.shard.gather_sequence, self.ctx.size.inner_dim
        w_k, w_v, w_q = (ctx.weights[_weight(name)] for name in "kvq")
        self.a_TD, (k_TA, v_TA) = ctx.enter(a_SD, linear_forward, w_k, w_v)
        self.k = self.heads["k"].forward(ctx.unit_node("attn.k", k_TA, width), rows)
        k_all = gather(self.k)  # K and V of the others come while q is made
        ctx.unit_node("attn.v", v_TA, width)
        self.v = v_TA.unflatten(-1, (-1, ctx.size.attention_head_dim))
        v_all = gather(self.v)
        q_TA = ctx.unit_node("attn.q", ctx.call(linear_forward, self.a_TD, w_q), width)
        self.q = self.heads["q"].forward(q_TA, rows)
        self.k_all, self.v_all = k_all.value(), v_all.value()
        o, self.lse = ctx.call(
            attention.attention_forward, self.q, self.k_all, self.v_all, ctx.shard.contract
        )
        self.o = o
        self.o_TA = ctx.unit_node("attn.heads", o.flatten(1), ctx.size.inner_dim)
        ctx.unit_node("attn.lse", self.lse, ctx.size.num_attention_heads)
        return ctx.leave("attn.out", (self.o_TA, ctx.weights[W_OUT].transpose(0, 1)))

    def backward(self, dy_SD: Tensor) -> Tensor:
        """da `[S, D]`; dw of the four linears and of both head norms go to the context."""
        ctx, width, gather = self.ctx, self.ctx.size.inner_dim, self.ctx.shard.gather_sequence
        q, lse = gather(self.q), gather(self.lse)  # queries come while products are made
        dy_TD, (do_TA,) = ctx.enter(dy_SD, linear_dx, ctx.weights[W_OUT])
        do = ctx.unit_node("d.attn.heads", do_TA, width).view_as(self.o)
        coming = [q, gather(do), lse]
        delta = ctx.call(attention.attention_delta, do, self.o)
        ctx.unit_node("attn.delta", delta, ctx.size.num_attention_heads)
        coming.append(gather(delta))
        ctx.weight_gradient(W_OUT, dy_TD, self.o_TA)
        dq, dk, dv = self._attention_backward(do, delta, coming)
        del q, lse, coming, do, do_TA, delta
        del self.q, self.k, self.v, self.k_all, self.v_all, self.o, self.o_TA, self.lse
        gradients = {
            "q": self.heads["q"].backward(dq),
            "k": self.heads["k"].backward(dk),
            "v": ctx.unit_node("d.attn.v", dv.flatten(1), width),
        }
        for name, dy_TA in gradients.items():
            ctx.weight_gradient(_weight(name), dy_TA, self.a_TD)
        del self.a_TD
        parts = [(dy_TA, ctx.weights[_weight(name)]) for name, dy_TA in gradients.items()]
        return ctx.leave("d.attn.in", *parts)

    def _attention_backward(
        self, do: Tensor, delta: Tensor, coming: list[Later]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv `[T, N, H]`; q, dO, L and delta of all rows are `coming`."""
        ctx, contract = self.ctx, self.ctx.shard.contract
        dq = ctx.call(
            attention.attention_dq, self.q, self.k_all, self.v_all, do, self.lse, delta, contract
        )
        q_all, *others = (later.value() for later in coming)
        dk, dv = ctx.call(attention.attention_dkv, q_all, self.k, self.v, *others, contract)
        return dq, dk, dv


class _HeadNorm:
    """rope(norm(q)) or rope(norm(k)), each head by one shared weight `[H]`; without positions the
    norm alone."""

    def __init__(self, ctx: BlockContext, name: str):
        self.ctx, self.name, self.weight = ctx, name, f"attn.norm_{name}.weight"

    def forward(self, y_TA: Tensor, rows: Rows) -> Tensor:
        ctx, width = self.ctx, self.ctx.size.inner_dim
        self.rows = rows
        self.x = y_TA.unflatten(-1, (-1, ctx.size.attention_head_dim))
        h, self.r = ctx.call(rms_norm_forward, self.x, ctx.weights[self.weight], ctx.size.norm_eps)
        ctx.unit_node(f"attn.{self.name}_norm", h.flatten(1), width)
        if rows.cos is None:
            return h
        rotated = ctx.call(rope.rotary_forward, h, rows.cos, rows.sin)
        ctx.unit_node(f"attn.{self.name}_rope", rotated.flatten(1), width)
        return rotated

    def backward(self, dy: Tensor) -> Tensor:
        """Gradient of the projection's output `[T, A]`; dw goes to the context.

        **Order** of dw: feature units over tp, then sequence units over cp, each in the unit tree.
        """
        ctx, shard, width = self.ctx, self.ctx.shard, self.ctx.size.inner_dim
        ctx.unit_node(f"d.attn.{self.name}_rope", dy.flatten(1), width)
        dh = dy
        if self.rows.cos is not None:
            dh = ctx.call(rope.rotary_backward, dy, self.rows.cos, self.rows.sin)
        dx = ctx.call(rms_norm_backward, dh, self.x, ctx.weights[self.weight], self.r)
        leaves = ctx.call(
            head_norm_dw_leaves,
            dh,
            self.x,
            self.r,
            shard.owner.rows,
            shard.sequence_units,
            len(shard.feature_units),
        ).transpose(0, 1)  # [U_local, S_local, H]
        del self.x, self.r
        roots = stacked_roots(leaves, shard.feature_units, shard.contract.num_units)
        by_sequence = shard.sum_feature_units(roots, roots.dtype)
        roots = stacked_roots(by_sequence, shard.sequence_units, NUM_SEQUENCE_UNITS)
        observe = ctx.observe_parameter(self.weight)
        ctx.coming[self.weight] = shard.sum_sequence_units(roots, ctx.dtype, observe)
        return ctx.unit_node(f"d.attn.{self.name}", dx.flatten(1), width)


def _weight(name: str) -> str:
    return f"attn.to_{name}.weight"
