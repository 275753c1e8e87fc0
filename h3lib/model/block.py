"""The MiniMax-H3 block, forward and backward, on one rank of any layout.

    m = AdaLN(temb)                              # [M, 18 D], viewed [3M, 6, D]
    x = x + gate_msa[row] * Attention(norm1(x) * (1 + scale_msa[row]) + shift_msa[row])
    x = x + gate_mlp[row] * SwiGLU(norm2(x) * (1 + scale_mlp[row]) + shift_mlp[row])

Every intermediate that the eager model stores is rounded where it stores it (BF16), every gradient
of such a value once; sums in between are FP32. The block knows no rank: it asks its `SeqShard`
which units and rows are here and who finishes a tree. With `SeqShard.canonical` it *is* the
canonical block.

Shape suffixes: T rows of the CP shard, S rows of the slice (S = T without SP), M timesteps,
D hidden, E time embedding, A local heads x head dim, F local FFN units.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from h3lib.contract import NUM_MODALITIES, NUM_MODULATIONS, ModelSize, OperandError
from h3lib.model.attention import Attention
from h3lib.model.context import BlockContext, Rows
from h3lib.model.feed_forward import FeedForward
from h3lib.model.modulation import AdaLN, ModulatedNorm
from h3lib.model.trace import (
    GRADIENT,
    NODE,
    NODE_ROOTS,
    NODES,
    OUTPUT,
    ROOT,
    Key,
    Trace,
)
from h3lib.model.weights import parameters, under
from h3lib.ops import adaln
from h3lib.ops.backend import accumulator, check_operands, check_shape
from h3lib.parallel.shard import SeqShard

BLOCK_PREFIX = "transformer_blocks.0."


@functools.cache
def block_parameters(size: ModelSize) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Global shape and dtype of each parameter of a main block, by its name inside the block."""
    return MappingProxyType(under(BLOCK_PREFIX, parameters(size)))


def block_values(size: ModelSize, num_rows: int, num_timesteps: int) -> dict[Key, tuple]:
    """Global shape of everything that a traced block shows, by (kind, name)."""
    rows = {"D": size.hidden_size, "A": size.inner_dim, "F": size.ffn_dim}
    rows["N"] = size.num_attention_heads
    shapes = {letter: (num_rows, width) for letter, width in rows.items()}
    shapes["E"] = (num_timesteps, size.time_embed_dim)
    shapes["m"] = (num_timesteps, size.adaln_dim)
    shapes["table"] = (NUM_MODALITIES * num_timesteps, NUM_MODULATIONS, size.hidden_size)
    values = {(OUTPUT, "out"): shapes["D"], (GRADIENT, "dx"): shapes["D"]}
    values[GRADIENT, "dtemb"] = shapes["E"]
    values |= {(NODE, name): shapes[letter] for name, letter in NODES.items()}
    values |= {(ROOT, name): shapes[NODES[name]] for name in NODE_ROOTS}
    for name, (shape, _) in block_parameters(size).items():
        values |= {(GRADIENT, name): shape, (ROOT, name): shape}
    return values


@dataclass
class Gradients:
    """dx `[S, D]`, dtemb `[M, E]` FP32, and each parameter's gradient (the rank's part) by name."""

    dx: Tensor
    dtemb: Tensor
    parameters: dict[str, Tensor]


class Block:
    """One main block on one rank.

    `weights` holds this rank's part of every parameter, by its name inside the block. One dtype
    for all (BF16; FP32 or FP64 for oracles); temb is FP32 (FP64 with FP64 weights).

    **Raises:** ContractError if the size does not divide into the contract's units, OperandError
    for a missing or mis-shaped weight.
    """

    def __init__(
        self,
        size: ModelSize,
        shard: SeqShard,
        weights: dict[str, Tensor],
        backend: str = "eager",
        trace: Trace | None = None,
    ):
        self.ctx = BlockContext(size, shard, weights, block_parameters(size), backend, trace)
        self.attention = Attention(self.ctx)
        self.feed_forward = FeedForward(self.ctx)
        self.norm1 = ModulatedNorm(self.ctx, "norm1", "attn.in")
        self.norm2 = ModulatedNorm(self.ctx, "norm2", "ff.in")
        self.adaln = AdaLN(self.ctx, "adaln_proj.linear", NUM_MODALITIES, NUM_MODULATIONS)

    def forward(self, x_SD: Tensor, temb_ME: Tensor, rows: Rows) -> Tensor:
        """The block's output `[S, D]`; keeps what the backward needs."""
        ctx = self.ctx
        check_operands(x=x_SD, weights=ctx.weights["norm1.weight"])
        check_shape("x", x_SD, len(ctx.shard.slice_rows), ctx.size.hidden_size)
        check_shape("temb", temb_ME, None, ctx.size.time_embed_dim)
        if temb_ME.dtype != accumulator(x_SD):
            raise OperandError("dtype of temb", temb_ME.dtype, accumulator(x_SD))
        table = self.adaln.forward(temb_ME)
        shift1, scale1, gate1, shift2, scale2, gate2 = table.unbind(1)  # each [3M, D]
        self.gates, self.table_rows = (gate1, gate2), rows.table_rows

        a_SD = self.norm1.forward(x_SD, shift1, scale1, self.table_rows)
        self.y1 = ctx.slice_node("attn.out", self.attention.forward(a_SD, rows))
        x1_SD = ctx.call(adaln.gated_residual_forward, x_SD, gate1, self.y1, self.table_rows)
        ctx.slice_node("residual1", x1_SD)
        a_SD = self.norm2.forward(x1_SD, shift2, scale2, self.table_rows)
        self.y2 = ctx.slice_node("ff.out", self.feed_forward.forward(a_SD))
        out = ctx.call(adaln.gated_residual_forward, x1_SD, gate2, self.y2, self.table_rows)
        return ctx.slice_node("out", out, OUTPUT)

    def backward(self, dout_SD: Tensor) -> Gradients:
        """Gradients of everything, once after each `forward`, whose values it lets go.

        **Order:** contract, section 2. **Rounds:** each once; a value used twice: the BF16
        gradients are added and rounded. **Raises:** OperandError without a forward before it.
        """
        ctx = self.ctx
        if not hasattr(self, "y2"):
            raise OperandError("backward of a block", "no forward before it", "one after a forward")
        gate1, gate2 = self.gates
        dy, dgate2 = self._residual_backward(dout_SD, gate2, self.y2)
        del self.y2
        da = self.feed_forward.backward(ctx.slice_node("d.ff.out", dy))
        dx1, dtable2 = self.norm2.backward(da, dout_SD)
        ctx.slice_node("d.residual1", dx1)

        dy, dgate1 = self._residual_backward(dx1, gate1, self.y1)
        del self.y1
        da = self.attention.backward(ctx.slice_node("d.attn.out", dy))
        dx, dtable1 = self.norm1.backward(da, dx1)
        ctx.slice_node("dx", dx, GRADIENT)

        roots = torch.cat((dtable1, dgate1[:, :, None], dtable2, dgate2[:, :, None]), dim=2)
        dtemb = self.adaln.backward(roots)
        return Gradients(dx, dtemb, ctx.take_gradients())

    def _residual_backward(self, dx: Tensor, gate: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        shard = self.ctx.shard
        place = self.table_rows, shard.owner.rows, shard.row_units
        return self.ctx.call(adaln.gated_residual_backward, dx, gate, y, *place)
