"""Projection with optional logical keys: y = x W^T + b on packed rows, differentiable.

    dx = dy W,   dw = row fold over sequence units,   db = row fold over row units

Padded rows are outside: their y and dx are +0, their x and dy are not read (they may hold NaN).
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3lib.contract import NUM_ROW_UNITS, NUM_SEQUENCE_UNITS, PUBLISHED, Contract, RowUnits
from h3lib.ops.backend import accumulator
from h3lib.ops.fold import row_unit_roots
from h3lib.ops.gemm import linear_dx, linear_forward, row_fold_roots
from h3lib.rows import LogicalRows


def projection(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    logical_keys: Tensor | None = None,
    contract: Contract = PUBLISHED,
    backend: str = "eager",
) -> Tensor:
    """y = x W^T + b for packed rows x `[T, K]`, w `[N, K]`, bias `[N]`; y `[T, N]` in x's dtype.

    **Order:** y and dx: chains. dw: chain over the rows of each sequence unit, then the unit tree.
    dbias: row fold over row units. **Rounds:** each result once, to the dtype of x or of its
    parameter. **Raises:** RowsError for keys that cannot be ordered, OperandError for operands.
    """
    rows = LogicalRows(len(x), len(x)) if logical_keys is None else LogicalRows.of(logical_keys)
    return _Projection.apply(x, w, bias, rows, RowUnits(rows.num_rows, contract), backend)


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias, rows, units, backend):
        x = rows.gather(x)
        ctx.save_for_backward(x, w)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.rows, ctx.units, ctx.backend = rows, units, backend
        return rows.scatter(linear_forward(x, w, bias, backend=backend))

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = ctx.rows.gather(dy)
        dx = dw = dbias = None
        if ctx.needs_input_grad[0]:
            dx = ctx.rows.scatter(linear_dx(dy, w, backend=ctx.backend))
        if ctx.needs_input_grad[1]:
            every = range(NUM_SEQUENCE_UNITS)
            dw = row_fold_roots(dy, x, ctx.units, every, backend=ctx.backend)[0].to(w.dtype)
        if ctx.needs_input_grad[2]:
            terms, every = dy.to(accumulator(dy)), range(NUM_ROW_UNITS)
            root = row_unit_roots(terms, ctx.units, every, backend=ctx.backend)[0, 0]
            dbias = root.to(ctx.bias_dtype)
        return dx, dw, dbias, None, None, None
