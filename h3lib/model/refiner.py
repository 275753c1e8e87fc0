"""The text refiner: two plain blocks and a norm over the text rows, replicated on every rank.

    e = e + Attention(norm1(e));  e = e + SwiGLU(norm2(e))      (no AdaLN, no rotary embedding)
    e = final_norm(e)

It sees text rows alone, with their own T, in logical order; a world of one on every rank, so that
no byte of it is exchanged.
"""

from __future__ import annotations

from torch import Tensor

from h3lib.contract import ModelSize
from h3lib.model.attention import Attention
from h3lib.model.context import UNMODULATED, BlockContext
from h3lib.model.feed_forward import FeedForward
from h3lib.model.modulation import Norm
from h3lib.model.trace import Trace, part_trace
from h3lib.model.weights import parameters, under
from h3lib.parallel.shard import SeqShard


class Refiner:
    """The refiner on `num_rows` text rows; `weights` by the checkpoint's names."""

    def __init__(
        self,
        size: ModelSize,
        shard: SeqShard,
        weights: dict[str, Tensor],
        backend: str = "eager",
        trace: Trace | None = None,
    ):
        def context(prefix: str, only: str = "") -> BlockContext:
            shapes, held = (under(prefix + only, named) for named in (parameters(size), weights))
            shapes, held = ({only + name: n[name] for name in n} for n in (shapes, held))
            part = part_trace(trace, prefix, shapes)
            return BlockContext(size, shard, held, shapes, backend, part)

        prefixes = [
            f"token_refiner.refiner_blocks.{layer}." for layer in range(size.num_refiner_layers)
        ]
        self.contexts = {prefix: context(prefix) for prefix in prefixes}
        self.contexts["token_refiner."] = context("token_refiner.", "final_norm.")
        self.blocks = [_RefinerBlock(self.contexts[prefix]) for prefix in prefixes]
        self.final_norm = Norm(self.contexts["token_refiner."], "final_norm")

    def forward(self, e_TD: Tensor) -> Tensor:
        """Refined text rows, `[T, D]`. **Order**, **Rounds:** those of a block without AdaLN."""
        for block in self.blocks:
            e_TD = block.forward(e_TD)
        return self.final_norm.forward(e_TD)

    def backward(self, de_TD: Tensor) -> Tensor:
        """Gradient of the rows that came in; parameters go to the contexts.

        **Order:** blocks from last to first. **Rounds:** as `_RefinerBlock.backward`.
        """
        de_TD = self.final_norm.backward(de_TD)
        for block in reversed(self.blocks):
            de_TD = block.backward(de_TD)
        return de_TD

    def take_gradients(self) -> dict[str, Tensor]:
        """As `BlockContext.take_gradients`, by full names."""
        return {
            prefix + name: value
            for prefix, ctx in self.contexts.items()
            for name, value in ctx.take_gradients().items()
        }


class _RefinerBlock:
    """A pre-norm block on the rows of a world of one."""

    def __init__(self, ctx: BlockContext):
        self.norm1, self.norm2 = Norm(ctx, "norm1"), Norm(ctx, "norm2")
        self.attention, self.feed_forward = Attention(ctx), FeedForward(ctx)

    def forward(self, x: Tensor) -> Tensor:
        """**Rounds:** each sum, to the rows' dtype."""
        x = x + self.attention.forward(self.norm1.forward(x), UNMODULATED)
        return x + self.feed_forward.forward(self.norm2.forward(x))

    def backward(self, dout: Tensor) -> Tensor:
        """**Rounds:** a value used twice: the BF16 gradients are added and rounded."""
        dx1 = self.norm2.backward(self.feed_forward.backward(dout), dout)
        return self.norm1.backward(self.attention.backward(dx1), dx1)
