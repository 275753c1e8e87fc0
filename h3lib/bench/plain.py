"""diffusers' block under tensor, sequence and context parallelism as it is usually written.

    tp      column- and row-parallel products; a sum in the rows' dtype after the latter, and of the
            gradients of the rows before the former (Megatron-LM)
    sp      a gather of rows and a scattered sum in their places
    cp      K and V of all rows gathered; gradients of weights summed while the backward goes on

The library adds, in its own order: this is what determinism is priced against. The weights of a
rank are those of `parallel/shard.py`; rows are cut evenly, which the library needs, after a few
more where they cannot be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_minimax_h3 import (
    MiniMaxH3AttnProcessor,
    MiniMaxH3TransformerBlock,
    _apply_rotary_emb,
)
from torch import Tensor, nn

from h3lib.bench.left_out import Give, new_buffer
from h3lib.contract import ModelSize
from h3lib.layout import Layout
from h3lib.model.inputs import BlockInputs
from h3lib.parallel.nccl import NcclLibrary

Map = Callable[[Tensor], Tensor]
Wait = Callable[[], None]


@dataclass(frozen=True)
class Axis:
    """The library's collectives on the ranks of one mesh axis, of tensors whose first dim is
    cut evenly."""

    rank: int
    size: int
    library: NcclLibrary

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, in its place. **Order:** the library's."""
        x = x.contiguous()
        self.library.all_reduce(x)
        return x

    def start_sum(self, x: Tensor) -> Wait:
        """Begin to sum a contiguous x in its place; the stream waits for it when it is told to."""
        return self.library.start_all_reduce(x).wait

    def gather(self, x: Tensor) -> Tensor:
        """`[n, ...]` of every rank to `[size n, ...]`."""
        out = x.new_empty(self.size * len(x), *x.shape[1:])
        self.library.all_gather(out, x.contiguous())
        return out

    def scatter_sum(self, x: Tensor) -> Tensor:
        """This rank's part of the sum: `[size n, ...]` to `[n, ...]`. **Order:** the library's."""
        out = x.new_empty(len(x) // self.size, *x.shape[1:])
        self.library.reduce_scatter(out, x.contiguous())
        return out

    def own(self, x: Tensor) -> Tensor:
        """This rank's part of x."""
        return x.chunk(self.size)[self.rank]


@dataclass(frozen=True)
class LeftOutAxis(Axis):
    """The library's axis with nothing moved or added."""

    give: Give = new_buffer

    def sum(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def start_sum(self, x: Tensor) -> Wait:
        return lambda: None

    def gather(self, x: Tensor) -> Tensor:
        shape = (self.size * len(x), *x.shape[1:])
        return self.give(self.size * x.numel(), x.dtype, x.device).view(shape)

    def scatter_sum(self, x: Tensor) -> Tensor:
        return self.own(x).contiguous()


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, there: Map, back: Map) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return ctx.back(dy), None, None


@torch.compiler.disable
def move(x: Tensor, there: Map, back: Map) -> Tensor:
    """there(x), whose gradient dy is back(dy)."""
    return _Move.apply(x, there, back)


def same(x: Tensor) -> Tensor:
    """x, as another tensor of the same bytes in the same place."""
    return x.view_as(x)


class _Attention(MiniMaxH3AttnProcessor):
    """Their attention with K and V of every CP rank."""

    def __init__(self, cp: Axis):
        self.cp = cp

    def __call__(self, attn, hidden_states, rotary_emb=None, attention_mask=None):
        q, k, v = (
            linear(hidden_states).unflatten(-1, (attn.heads, -1))
            for linear in (attn.to_q, attn.to_k, attn.to_v)
        )
        q, k = (
            _apply_rotary_emb(norm(x), *rotary_emb)
            for norm, x in ((attn.norm_q, q), (attn.norm_k, k))
        )
        k, v = (move(x, _batched(self.cp.gather), _batched(self.cp.scatter_sum)) for x in (k, v))
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        return attn.to_out[0](out.transpose(1, 2).flatten(2, 3))


@dataclass
class PlainBlock:
    """One rank's part of their block; `weights` are the rank's parts, by name in the block."""

    size: ModelSize
    layout: Layout
    tp: Axis
    cp: Axis
    weights: dict[str, Tensor]
    module: nn.Module = field(init=False)
    pending: list[Wait] = field(init=False, default_factory=list)

    def __post_init__(self):
        size, tp = self.size, self.tp.size
        with torch.device("meta"):
            module = MiniMaxH3TransformerBlock(
                size.hidden_size, size.num_attention_heads // tp, size.attention_head_dim,
                size.ffn_dim // tp, size.time_embed_dim, size.norm_eps, size.norm_eps,
            )  # fmt: skip
            module.adaln_proj.linear = nn.Linear(size.time_embed_dim, size.adaln_dim // tp)
        module.load_state_dict(self.weights, assign=True)
        self.module = module.requires_grad_()
        if tp > 1:
            self._split_features()
        if self.cp.size > 1:
            module.attn.set_processor(_Attention(self.cp))
        for name, parameter in module.named_parameters():
            axes = self._axes(name)
            if axes:
                parameter.register_hook(self._sum_over(axes))

    def padded_rows(self, num_rows: int) -> int:
        """Rows that are computed: as many more as an even cut needs."""
        ranks = self.cp.size * (self.tp.size if self.layout.sp else 1)
        return -(-num_rows // ranks) * ranks

    def cut(self, given: BlockInputs) -> BlockInputs:
        """This rank's rows of all rows: those of its slice, and for rotary those of its shard.

        Rows that are added are the last one again, with a gradient of 0.
        """
        more = self.padded_rows(len(given.x)) - len(given.x)
        metadata = (given.rows.table_rows, given.rows.cos, given.rows.sin)
        x, table_rows, cos, sin = (
            self.cp.own(torch.cat((t, *[t[-1:]] * more))) for t in (given.x, *metadata)
        )
        dout = self.cp.own(torch.cat((given.dout, *[torch.zeros_like(given.dout[-1:])] * more)))
        if self.layout.sp:
            x, table_rows, dout = map(self.tp.own, (x, table_rows, dout))
        return BlockInputs(x, dout, given.temb, type(given.rows)(table_rows, cos, sin))

    def caller(self, given: BlockInputs, backward: bool, compiled: bool = False) -> Callable:
        """One launch on this rank's rows (`cut`): the output, or it and every gradient by name."""
        module = torch.compile(self.module, dynamic=False) if compiled else self.module
        rotary = tuple(torch.cat((t, t), dim=-1) for t in (given.rows.cos, given.rows.sin))
        x, temb = given.x[None].clone().requires_grad_(), given.temb.clone().requires_grad_()
        if self.cp.size > 1:
            temb.register_hook(self._sum_over([self.cp]))
        named = dict(self.module.named_parameters())
        leaves, names = [x, temb, *named.values()], ["dx", "dtemb", *named]

        def call() -> dict[str, Tensor]:
            with torch.set_grad_enabled(backward):
                out = module(x, temb, given.rows.table_rows, rotary)
                if not backward:
                    return {"out": out[0]}
                found = torch.autograd.grad(out, leaves, given.dout[None])
            while self.pending:
                self.pending.pop()()
            found = dict(zip(names, found, strict=True))
            return {"out": out[0].detach(), **found, "dx": found["dx"][0]}

        return call

    def _split_features(self) -> None:
        """Rows enter and leave the products, and the columns of the AdaLN table meet."""
        tp, sp, module = self.tp, self.layout.sp, self.module
        enter = (_batched(tp.gather), _batched(tp.scatter_sum)) if sp else (same, tp.sum)
        leave = (enter[1], enter[0]) if sp else (tp.sum, same)
        for part in (module.attn, module.ff):
            part.register_forward_pre_hook(lambda _, args: (move(args[0], *enter), *args[1:]))
            part.register_forward_hook(lambda _, args, out: move(out, *leave))
        back = _by_columns(tp.scatter_sum if sp else tp.own)
        linear = module.adaln_proj.linear
        linear.register_forward_pre_hook(lambda _, args: (move(args[0], same, tp.sum),))
        linear.register_forward_hook(lambda _, args, m: move(m, _by_columns(tp.gather), back))

    def _axes(self, name: str) -> list[Axis]:
        """Axes over which the gradient of a parameter is summed after its product."""
        of_rows = self.layout.sp and name in ("norm1.weight", "norm2.weight")
        of_heads = name in ("attn.norm_q.weight", "attn.norm_k.weight")
        axes = [self.tp] if of_rows or of_heads else []
        return [axis for axis in (*axes, self.cp) if axis.size > 1]

    def _sum_over(self, axes: list[Axis]) -> Map:
        @torch.compiler.disable
        def hook(gradient: Tensor) -> Tensor:
            gradient = gradient.contiguous()
            for axis in axes[:-1]:
                gradient = axis.sum(gradient)
            self.pending.append(axes[-1].start_sum(gradient))
            return gradient

        return hook


def _batched(map_rows: Map) -> Map:
    """The map of rows on the one batch of `[1, n, ...]`."""
    return lambda x: map_rows(x[0])[None]


def _by_columns(map_rows: Map) -> Map:
    """The map of rows on the columns of a matrix."""
    return lambda x: map_rows(x.t()).t().contiguous()
