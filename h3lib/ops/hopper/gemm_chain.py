"""`linear_forward` and `linear_dx` on sm_90: one chain for each element, one rounding.

    BF16   wgmma in ascending steps of 16 from +0, FP32 accumulator (`gemm_kernel`, WIDTH 1)
    FP32   one IEEE fused multiply-add a step, ascending from +0, on the CUDA cores (`gemm_fp32`)

Neither depends on the tile, on the number of rows or on what the other rows hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3lib.contract import OperandError
from h3lib.ops.backend import check_operands, check_out, check_shape
from h3lib.ops.gemm import linear_dx, linear_forward
from h3lib.ops.hopper.compat import check_device
from h3lib.ops.hopper.directives import MAX_DEPTH, Tile, tile_for
from h3lib.ops.hopper.gemm_fp32 import chain_fp32
from h3lib.ops.hopper.gemm_launch import Launch, check_matrix_dtype, k_last, prepare, right_operand
from h3lib.ops.hopper.launch import kept_by_signature


@linear_forward.register("triton")
def linear_forward_hopper(
    x: Tensor, w: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """y = x @ w^T + bias; x `[T, K]`, w `[N, K]`, bias `[N]`, y `[T, N]` in x's dtype, in `out` if
    that is given.

    **Order:** chain over K, then the bias. **Rounds:** once. **Raises:** OperandError for a dtype
    other than BF16 or FP32, for an operand that is not on the GPU, or that TMA cannot read, an
    `out` of another shape or dtype.
    """
    return _product(_forward_launch(x, w, bias, out), x, w.transpose(0, 1), bias, out)


@kept_by_signature
def _forward_launch(
    x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor | None
) -> Launch | None:
    check_operands(x=x, w=w)
    check_shape("x", x, None, None)
    check_shape("w", w, None, x.shape[1])
    if bias is not None:
        check_shape("bias", bias, w.shape[0])
        check_matrix_dtype(bias=bias)
        check_device(bias=bias)
        if not bias.is_contiguous():
            raise OperandError("stride of bias", bias.stride(), "contiguous")
    return _template("linear_forward", {"x": x, "w": w.transpose(0, 1)}, bias, out)


@linear_dx.register("triton")
def linear_dx_hopper(dy: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """dx = dy @ w; dy `[T, N]`, w `[N, K]`, dx `[T, K]` in dy's dtype, in `out` if that is given.

    **Order:** chain over N. **Rounds:** once. **Raises:** as `linear_forward_hopper`.
    """
    return _product(_dx_launch(dy, w, out), dy, w, None, out)


@kept_by_signature
def _dx_launch(dy: Tensor, w: Tensor, out: Tensor | None) -> Launch | None:
    check_operands(dy=dy, w=w)
    check_shape("dy", dy, None, None)
    check_shape("w", w, dy.shape[1], None)
    return _template("linear_dx", {"dy": dy, "w": w}, None, out)


def _template(
    op: str, operands: dict[str, Tensor], bias: Tensor | None, out: Tensor | None
) -> Launch | None:
    """a @ b + bias, None in FP32 and for a rank that owns no rows."""
    check_matrix_dtype(**operands)
    check_device(**operands)
    a, b = operands.values()
    if a.shape[1] == 0:
        raise OperandError("reduced axis", 0, "at least 1")
    shape = (a.shape[0], b.shape[1])
    if out is not None:
        check_out(out, shape, a.dtype)
    if a.dtype == torch.float32 or not shape[0] * shape[1]:
        return None
    like = a.new_empty(shape) if out is None else out
    tile = tile_for(op, *shape, -(-a.shape[1] // MAX_DEPTH))
    return chain_launch(like[None], a, b, tile, bias, tuple(operands)).template()


def _product(
    launch: Launch | None, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None
) -> Tensor:
    """a @ b + bias in a's dtype."""
    if a.dtype == torch.float32:
        y = chain_fp32(a, b, bias=bias)
        return y if out is None else out.copy_(y)
    out = a.new_empty((a.shape[0], b.shape[1])) if out is None else out
    if launch is not None:
        launch.on((a, b), out, bias).run()
    return out


def chain_launch(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    tile: Tile,
    bias: Tensor | None = None,
    names: tuple[str, ...] = ("a", "b"),
) -> Launch:
    """out `[1, M, N]` = a `[M, K]` @ b `[K, N]` + bias, BF16 operands."""
    blocks = -(-a.shape[1] // tile.depth)
    return prepare(
        out, [k_last(names[0], a)], [right_operand(names[1], b)], tile, 1, (blocks,), bias=bias
    )
