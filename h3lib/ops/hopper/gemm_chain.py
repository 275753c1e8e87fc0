"""`linear_forward` and `linear_dx` on sm_90: one chain for each element, one rounding.

    BF16   wgmma in ascending steps of 16 from +0, FP32 accumulator (`gemm_kernel`, WIDTH 1)
    FP32   one IEEE fused multiply-add a step, ascending from +0, on the CUDA cores: no TF32

Neither depends on the tile, on the number of rows or on what the other rows hold.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h3lib.contract import OperandError
from h3lib.ops.backend import check_operands, check_out, check_shape
from h3lib.ops.gemm import linear_dx, linear_forward
from h3lib.ops.hopper.compat import check_device
from h3lib.ops.hopper.directives import MAX_DEPTH, Fp32Tile, Tile, fp32_tile_for, tile_for
from h3lib.ops.hopper.gemm_launch import Launch, check_matrix_dtype, k_last, prepare, right_operand


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
    check_operands(x=x, w=w)
    check_shape("x", x, None, None)
    check_shape("w", w, None, x.shape[1])
    if bias is not None:
        check_shape("bias", bias, w.shape[0])
        check_matrix_dtype(bias=bias)
        check_device(bias=bias)
        if not bias.is_contiguous():
            raise OperandError("stride of bias", bias.stride(), "contiguous")
    return _product("linear_forward", {"x": x, "w": w.transpose(0, 1)}, bias, out)


@linear_dx.register("triton")
def linear_dx_hopper(dy: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """dx = dy @ w; dy `[T, N]`, w `[N, K]`, dx `[T, K]` in dy's dtype, in `out` if that is given.

    **Order:** chain over N. **Rounds:** once. **Raises:** as `linear_forward_hopper`.
    """
    check_operands(dy=dy, w=w)
    check_shape("dy", dy, None, None)
    check_shape("w", w, dy.shape[1], None)
    return _product("linear_dx", {"dy": dy, "w": w}, None, out)


def _product(
    op: str, operands: dict[str, Tensor], bias: Tensor | None, out: Tensor | None
) -> Tensor:
    """a @ b + bias in a's dtype; a rank that owns no rows launches nothing."""
    check_matrix_dtype(**operands)
    check_device(**operands)
    a, b = operands.values()
    if a.shape[1] == 0:
        raise OperandError("reduced axis", 0, "at least 1")
    shape = (a.shape[0], b.shape[1])
    if out is not None:
        check_out(out, shape, a.dtype)
    if a.dtype == torch.float32:
        y = chain_fp32(a, b, bias=bias)
        return y if out is None else out.copy_(y)
    if out is None:
        out = a.new_empty(shape)
    if out.numel():
        tile = tile_for(op, *out.shape, -(-a.shape[1] // MAX_DEPTH))
        chain_launch(out[None], a, b, tile, bias, tuple(operands)).run()
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


def chain_fp32(
    a: Tensor,
    b: Tensor,
    into: Tensor | None = None,
    bias: Tensor | None = None,
    tile: Fp32Tile | None = None,
) -> Tensor:
    """C = a @ b + bias for FP32 a `[M, K]`, b `[K, N]`; `into` is a chain to go on with, in place.

    **Order:** ascending k, one fused multiply-add a step, from +0 or from `into`; then the bias.
    **Raises:** OperandError unless a and b are contiguous in one of their dims.
    """
    out = a.new_empty((a.shape[0], b.shape[1])) if into is None else into
    if not out.numel():
        return out
    if not a.shape[1]:
        return out.zero_() if into is None else out
    a_k_first, a_stride = _leading("a", a)
    b_k_first, b_stride = _leading("b", b)
    tile = tile or fp32_tile_for(out.shape[1])
    grid = (triton.cdiv(out.shape[0], tile.rows), triton.cdiv(out.shape[1], tile.columns))
    chain_fp32_kernel[grid](
        a, b, out, bias, *out.shape, a.shape[1], a_stride, b_stride, TA=a_k_first, TB=b_k_first,
        INTO=into is not None, BIAS=bias is not None, **fp32_options(tile),
    )  # fmt: skip
    return out


def fp32_options(tile: Fp32Tile) -> dict[str, int]:
    return {
        "BM": tile.rows, "BN": tile.columns, "BK": tile.depth,
        "num_warps": tile.num_warps, "num_stages": tile.stages,
    }  # fmt: skip


def _leading(name: str, x: Tensor) -> tuple[bool, int]:
    """(whether the first dim is the contiguous one, the other dim's stride)."""
    if x.stride(1) == 1 or x.shape[1] == 1:
        return False, x.stride(0)
    if x.stride(0) == 1 or x.shape[0] == 1:
        return True, x.stride(1)
    raise OperandError(f"strides of {name}", x.stride(), "one of them 1")


@triton.jit(
    do_not_specialize=["M", "N", "K", "a_stride", "b_stride"],
    do_not_specialize_on_alignment=["a", "b", "c", "bias"],
)
def chain_fp32_kernel(
    a, b, c, bias, M, N, K, a_stride, b_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TA: tl.constexpr, TB: tl.constexpr, INTO: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """c = a @ b (+ bias): TA, TB say that a, b are contiguous in their first dim."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    step = tl.arange(0, BK)
    m64, n64 = m.to(tl.int64), n.to(tl.int64)
    at = c + m64[:, None] * N + n64[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    if INTO:
        acc = tl.load(at, mask=inside, other=0.0)
    for k in range(0, K, BK):
        kk = (k + step).to(tl.int64)
        left = (
            m64[:, None] + kk[None, :] * a_stride if TA else m64[:, None] * a_stride + kk[None, :]
        )
        right = (
            kk[:, None] + n64[None, :] * b_stride if TB else kk[:, None] * b_stride + n64[None, :]
        )
        x = tl.load(a + left, mask=(m < M)[:, None] & (kk < K)[None, :], other=0.0)
        y = tl.load(b + right, mask=(kk < K)[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    if BIAS:
        acc = acc + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(at, acc, mask=inside)
