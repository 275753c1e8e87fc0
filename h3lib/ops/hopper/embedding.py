"""The AdaLN linear's input on Hopper: s = bf16(SiLU(temb)), dtemb = ds SiLU'(temb), and its dw.

A few timesteps of a few thousand channels, FP32; exp is `ex2.approx(x log2(e))` as in `rowwise.py`,
every other operation one IEEE FP32 operation in the eager op's order. An element's bits depend on
its operands alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h3lib.contract import OperandError
from h3lib.ops import adaln
from h3lib.ops.backend import check_operands, check_shape
from h3lib.ops.hopper.compat import check_device
from h3lib.ops.hopper.gemm_fold import timestep_chain_kernel
from h3lib.ops.hopper.launch import Launch

COLUMNS = 1024
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
PRODUCT_TILE = {"BC": 8, "BE": 256, "num_warps": 2}  # 172 us; 32 x 256 226, a fill 156 (H200)


@triton.jit(do_not_specialize=["count"])
def adaln_input_forward_kernel(temb, s, count, COLUMNS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    g = tl.load(temb + at, mask=at < count, other=0.0)
    silu = tl.div_rn(g, 1.0 + tl.exp(-g))
    tl.store(s + at, silu.to(s.dtype.element_ty), mask=at < count)


@triton.jit(do_not_specialize=["count"])
def adaln_input_backward_kernel(ds, temb, dtemb, count, COLUMNS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    g = tl.load(temb + at, mask=at < count, other=0.0)
    d = tl.load(ds + at, mask=at < count, other=0.0).to(tl.float32)
    s = tl.div_rn(1.0, 1.0 + tl.exp(-g))
    tl.store(dtemb + at, d * (s * (1.0 + g * (1.0 - s))), mask=at < count)


def _check(temb: Tensor, **others: Tensor) -> None:
    check_device(temb=temb, **others)
    if temb.dtype != torch.float32:
        raise OperandError("dtype of temb", temb.dtype, torch.float32)
    for name, tensor in {"temb": temb, **others}.items():
        if tensor.shape != temb.shape or not tensor.is_contiguous():
            received = (tuple(tensor.shape), tensor.stride())
            accepted = f"{tuple(temb.shape)}, contiguous"
            raise OperandError(f"shape and strides of {name}", received, accepted)


@adaln.adaln_input_forward.register("triton")
def adaln_input_forward(temb: Tensor, dtype: torch.dtype) -> Tensor:
    """s = bf16(SiLU(temb)), temb `[M, E]` FP32. **Rounds:** once, to `dtype`."""
    _check(temb)
    s = torch.empty_like(temb, dtype=dtype)
    grid = (triton.cdiv(temb.numel(), COLUMNS),)
    operands = (temb, s, temb.numel(), COLUMNS)
    Launch(adaln_input_forward_kernel, operands, OPTIONS, grid).start()
    return s


@adaln.adaln_input_backward.register("triton")
def adaln_input_backward(ds: Tensor, temb: Tensor) -> Tensor:
    """dtemb = ds SiLU'(temb), `[M, E]` FP32, not rounded."""
    _check(temb, ds=ds)
    dtemb = torch.empty_like(temb)
    grid = (triton.cdiv(temb.numel(), COLUMNS),)
    operands = (ds, temb, dtemb, temb.numel(), COLUMNS)
    Launch(adaln_input_backward_kernel, operands, OPTIONS, grid).start()
    return dtemb


@adaln.timestep_chain_product.register("triton")
def timestep_chain_product(dm: Tensor, s: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dw `[C, E]` and dbias `[C]` in `dtype`; dm `[M, C]`, s `[M, E]` of one dtype, contiguous.

    The kernel of `timestep_chain_dw`, which rounds as it stores: 520 MB are written in place of
    1 GB in FP32 and its copy. **Order:**, **Raises:** as there. **Rounds:** once.
    """
    check_operands(dm=dm, s=s)
    check_device(dm=dm, s=s)
    check_shape("s", s, len(dm), None)
    for name, tensor in {"dm": dm, "s": s}.items():
        received = tensor.dtype, len(tensor) > 0, tensor.is_contiguous()
        if received != (torch.bfloat16, True, True):
            accepted = "torch.bfloat16, at least one row, contiguous"
            raise OperandError(f"dtype, rows and contiguity of {name}", received, accepted)
    if dtype != torch.bfloat16:
        raise OperandError("dtype of the product", dtype, torch.bfloat16)
    columns, width = dm.shape[1], s.shape[1]
    dw, dbias = dm.new_empty((columns, width)), dm.new_empty(columns)
    tile = PRODUCT_TILE
    grid = (triton.cdiv(columns, tile["BC"]), triton.cdiv(width, tile["BE"]))
    operands = (dm, s, dw, dbias, len(dm), columns, width, tile["BC"], tile["BE"])
    options = {"num_warps": tile["num_warps"], "enable_fp_fusion": False}
    Launch(timestep_chain_kernel, operands, options, grid).start()
    return dw, dbias
