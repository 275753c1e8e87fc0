"""The AdaLN linear's input on Hopper: s = bf16(SiLU(temb)) and dtemb = ds SiLU'(temb).

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
from h3lib.ops.hopper.compat import check_device

COLUMNS = 1024
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


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
    adaln_input_forward_kernel[grid](temb, s, temb.numel(), COLUMNS=COLUMNS, **OPTIONS)
    return s


@adaln.adaln_input_backward.register("triton")
def adaln_input_backward(ds: Tensor, temb: Tensor) -> Tensor:
    """dtemb = ds SiLU'(temb), `[M, E]` FP32, not rounded."""
    _check(temb, ds=ds)
    dtemb = torch.empty_like(temb)
    grid = (triton.cdiv(temb.numel(), COLUMNS),)
    adaln_input_backward_kernel[grid](ds, temb, dtemb, temb.numel(), COLUMNS=COLUMNS, **OPTIONS)
    return dtemb
