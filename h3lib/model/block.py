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

from dataclasses import dataclass

import torch
from torch import Tensor

from h3lib.contract import NUM_MODALITIES, NUM_MODULATIONS, ModelSize, OperandError
from h3lib.layout import whole
from h3lib.model.attention import Attention
from h3lib.model.context import BlockContext, Rows
from h3lib.model.feed_forward import FeedForward
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
from h3lib.model.weights import parameters
from h3lib.ops import adaln, norm
from h3lib.ops.backend import accumulator, check_operands, check_shape
from h3lib.ops.gemm import linear_forward
from h3lib.parallel.shard import SeqShard

BLOCK_PREFIX = "transformer_blocks.0."


def block_parameters(size: ModelSize) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Global shape and dtype of each parameter of a main block, by its name inside the block."""
    return {
        name.removeprefix(BLOCK_PREFIX): value
        for name, value in parameters(size).items()
        if name.startswith(BLOCK_PREFIX)
    }


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

    def forward(self, x_SD: Tensor, temb_ME: Tensor, rows: Rows) -> Tensor:
        """The block's output `[S, D]`; keeps what the backward needs."""
        ctx = self.ctx
        check_operands(x=x_SD, weights=ctx.weights["norm1.weight"])
        check_shape("x", x_SD, len(ctx.shard.slice_rows), ctx.size.hidden_size)
        check_shape("temb", temb_ME, None, ctx.size.time_embed_dim)
        if temb_ME.dtype != accumulator(x_SD):
            raise OperandError("dtype of temb", temb_ME.dtype, accumulator(x_SD))
        self.table = self._adaln_forward(temb_ME)
        self.norm1 = _ModulatedNorm(ctx, "norm1", "attn.in", rows.table_rows)
        self.norm2 = _ModulatedNorm(ctx, "norm2", "ff.in", rows.table_rows)
        self.table_rows = rows.table_rows
        shift1, scale1, gate1, shift2, scale2, gate2 = self.table.unbind(1)

        a_SD = self.norm1.forward(x_SD, shift1, scale1)
        self.y1 = ctx.slice_node("attn.out", self.attention.forward(a_SD, rows))
        x1_SD = ctx.call(adaln.gated_residual_forward, x_SD, gate1, self.y1, self.table_rows)
        ctx.slice_node("residual1", x1_SD)
        a_SD = self.norm2.forward(x1_SD, shift2, scale2)
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
        _, scale1, gate1, _, scale2, gate2 = self.table.unbind(1)
        dy, dgate2 = self._residual_backward(dout_SD, gate2, self.y2)
        del self.y2
        da = self.feed_forward.backward(ctx.slice_node("d.ff.out", dy))
        dx1, dtable2 = self.norm2.backward(da, scale2, dout_SD)
        ctx.slice_node("d.residual1", dx1)

        dy, dgate1 = self._residual_backward(dx1, gate1, self.y1)
        del self.y1
        da = self.attention.backward(ctx.slice_node("d.attn.out", dy))
        dx, dtable1 = self.norm1.backward(da, scale1, dx1)
        ctx.slice_node("dx", dx, GRADIENT)

        roots = torch.cat((dtable1, dgate1[:, :, None], dtable2, dgate2[:, :, None]), dim=2)
        dtemb = self._adaln_backward(roots)
        gradients, ctx.gradients = ctx.gradients, {}
        return Gradients(dx, dtemb, gradients)

    def _residual_backward(self, dx: Tensor, gate: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        shard = self.ctx.shard
        place = self.table_rows, shard.owner.rows, shard.row_units
        return self.ctx.call(adaln.gated_residual_backward, dx, gate, y, *place)

    def _adaln_forward(self, temb_ME: Tensor) -> Tensor:
        """The table `[3M, 6, D]`: columns of this rank's column units, gathered in order."""
        ctx = self.ctx
        self.temb = temb_ME
        self.s_ME = ctx.node("adaln.s", ctx.call(adaln.adaln_input_forward, temb_ME, ctx.dtype))
        w, bias = ctx.weights["adaln_proj.linear.weight"], ctx.weights["adaln_proj.linear.bias"]
        local = ctx.call(linear_forward, self.s_ME, w, bias)
        units = ctx.shard.contract.num_units
        cuts = [ctx.size.adaln_dim * unit // units for unit in ctx.shard.owner.feature_cuts()]
        m = ctx.node("adaln.m", ctx.shard.mesh.tp.all_gather_columns(local, cuts))
        return m.view(NUM_MODALITIES * len(m), NUM_MODULATIONS, ctx.size.hidden_size)

    def _adaln_backward(self, roots: Tensor) -> Tensor:
        """dtemb from the roots `[R, 3M, 6, D]` of the table's gradient; also dw and dbias."""
        ctx, shard = self.ctx, self.ctx.shard
        num_timesteps = len(self.s_ME)
        table = (NUM_MODALITIES * num_timesteps, NUM_MODULATIONS, ctx.size.hidden_size)
        observe = ctx.observe("d.adaln.m", whole(table))
        dm = shard.sum_row_units(roots, ctx.dtype, observe).view(num_timesteps, -1)
        ctx.node("d.adaln.m", dm.view(table))

        part = shard.feature_range(ctx.size.adaln_dim)
        dm_local = dm[:, part.start : part.stop].contiguous()
        if ctx.trace is None:  # rounded where it is finished
            dw, dbias = ctx.call(adaln.timestep_chain_product, dm_local, self.s_ME, ctx.dtype)
        else:
            dw, dbias = ctx.call(adaln.timestep_chain_dw, dm_local, self.s_ME)
        ctx.gradient("adaln_proj.linear.weight", dw)
        ctx.gradient("adaln_proj.linear.bias", dbias)
        w = ctx.weights["adaln_proj.linear.weight"]
        roots = ctx.unit_tree((dm_local, w))
        observe = ctx.observe("d.adaln.s", whole(tuple(self.s_ME.shape)))
        ds = ctx.node("d.adaln.s", shard.sum_feature_units(roots, ctx.dtype, observe))
        dtemb = ctx.call(adaln.adaln_input_backward, ds, self.temb)
        return ctx.node("dtemb", dtemb, GRADIENT)


class _ModulatedNorm:
    """a = norm(x) * (1 + scale) + shift on the rows of the slice."""

    def __init__(self, ctx: BlockContext, name: str, output: str, table_rows: Tensor):
        self.ctx, self.name, self.output, self.table_rows = ctx, name, output, table_rows

    def forward(self, x_SD: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        ctx, w = self.ctx, self.ctx.weights[f"{self.name}.weight"]
        self.x = x_SD
        h, self.r = ctx.call(norm.rms_norm_forward, x_SD, w, ctx.size.norm_eps)
        ctx.slice_node(f"{self.name}.out", h)
        a = ctx.call(adaln.modulate_forward, h, shift, scale, self.table_rows)
        return ctx.slice_node(self.output, a)

    def backward(self, da: Tensor, scale: Tensor, dx0: Tensor) -> tuple[Tensor, Tensor]:
        """dx0 + dx `[S, D]`, and the roots of (dshift, dscale) `[R, 3M, 2, D]`; dw goes to the
        context."""
        ctx, name = self.ctx, f"{self.name}.weight"
        x, r, w, shard = self.x, self.r, ctx.weights[name], ctx.shard
        del self.x, self.r
        ctx.slice_node(f"d.{self.output}", da)
        place = self.table_rows, shard.owner.rows, shard.row_units
        dh, dtable, roots = ctx.call(adaln.modulated_norm_backward, da, x, w, r, scale, *place)
        ctx.slice_node(f"d.{self.name}.out", dh)
        root = shard.sum_row_units(roots, ctx.dtype, ctx.observe_parameter(name))
        ctx.gradient(name, root)
        return ctx.call(norm.rms_norm_backward, dh, x, w, r, dx0), dtable
