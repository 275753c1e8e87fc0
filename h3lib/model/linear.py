"""One linear at an end of the model: input projections, context embedder, output heads.

    y = x W^T + b,   dx = dy W,   dw = sum dy^T x and dbias = sum dy over the rows of an index set
"""

from __future__ import annotations

from torch import Tensor

from h3lib.model.context import BlockContext
from h3lib.ops.backend import accumulator, check_shape
from h3lib.ops.gemm import linear_dx, linear_forward
from h3lib.ops.row_product import row_unit_product_roots
from h3lib.parallel.shard import SeqShard


def select(named: dict, prefixes: tuple[str, ...]) -> dict:
    """The entries whose names start with one of the prefixes."""
    return {name: value for name, value in named.items() if name.startswith(prefixes)}


class Linear:
    """One linear at an end of the model, on the rows of one stream; its parameters are whole here.

    **Order:** forward and dx: chains; dw, dbias: row fold over row units, of `shard`'s rows.
    **Rounds:** each result once, to the weight's dtype; dw and dbias after their root.
    """

    def __init__(self, ctx: BlockContext, name: str):
        self.ctx, self.name = ctx, name
        self.w, self.bias = ctx.weights[f"{name}.weight"], ctx.weights[f"{name}.bias"]

    def forward(self, x: Tensor) -> Tensor:
        """y = x W^T + b in the weight's dtype; keeps x."""
        check_shape(f"rows of {self.name}", x, None, self.w.shape[1])
        self.x = x.to(self.w.dtype)
        return self.ctx.call(linear_forward, self.x, self.w, self.bias)

    def dx(self, dy: Tensor) -> Tensor:
        """dx = dy W in the weight's dtype."""
        return self.ctx.call(linear_dx, dy.to(self.w.dtype), self.w)

    def backward(self, dy: Tensor, at: Tensor, shard: SeqShard) -> None:
        """dw and dbias of the rows with logical numbers `at` `[n]`; they go to the context."""
        ctx, rows = self.ctx, shard.owner.rows
        dy = dy.to(self.w.dtype)
        roots = ctx.call(row_unit_product_roots, dy, self.x, at, rows, shard.row_units)
        root = shard.sum_row_units(roots, accumulator(dy)).value()
        ctx.gradient(f"{self.name}.weight", root[:, :-1].contiguous())
        ctx.gradient(f"{self.name}.bias", root[:, -1].contiguous())
