"""What the attention backward needs beside q, k, v and dO: delta, and -L and delta by head.

    delta[t, n] = sum_h dO[t, n, h] O[t, n, h], FP32, O as it was rounded
    by_head = [-L, delta] transposed to [2, N, rows padded to 64]

A row's 128 products, each rounded, are added by one fixed tree of the threads that hold them; it
depends on the head dim alone. One fused pass: O and dO are read once, 107 MB each at T = 7,457.
The transposed copy makes 64 queries of a head one TMA box; its padding is masked by its reader.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h3lib.contract import Contract, OperandError
from h3lib.ops import attention
from h3lib.ops.hopper.attention_tiles import TILE_ROWS, check_attention
from h3lib.ops.hopper.compat import TMA_ALIGNMENT_BYTES
from h3lib.ops.hopper.launch import Again, Launch, kept_by_signature

DELTA_ROWS = 32


@triton.jit(do_not_specialize=["num_pairs", "num_heads", "dout_stride", "out_stride"])
def delta_kernel(
    dout, out, delta, num_pairs, num_heads, dout_stride, out_stride, ROWS: tl.constexpr
):
    """delta of ROWS (row, head) pairs; strides in units of 8 elements (16 bytes)."""
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = pair // num_heads
    column = (pair - row * num_heads)[:, None] * 128 + tl.arange(0, 128)[None, :]
    row = row.to(tl.int64)
    present = pair < num_pairs
    g = tl.load(dout + row[:, None] * (dout_stride * 8) + column, mask=present[:, None], other=0.0)
    o = tl.load(out + row[:, None] * (out_stride * 8) + column, mask=present[:, None], other=0.0)
    tl.store(delta + pair, tl.sum(g.to(tl.float32) * o.to(tl.float32), 1), mask=present)


@triton.jit(do_not_specialize=["num_rows", "num_heads", "padded"])
def by_head_kernel(lse, delta, by_head, num_rows, num_heads, padded, HEADS: tl.constexpr):
    """-L and delta `[T, N]` to `[2, N, padded]`, so that 64 queries of a head are one TMA box."""
    row = tl.program_id(0) * 64 + tl.arange(0, 64)
    head = tl.arange(0, HEADS)
    present = (row < num_rows)[:, None] & (head < num_heads)[None, :]
    source = row.to(tl.int64)[:, None] * num_heads + head[None, :]
    target = head.to(tl.int64)[None, :] * padded + row[:, None]
    inside = (row < padded)[:, None] & (head < num_heads)[None, :]
    tl.store(by_head + target, -tl.load(lse + source, mask=present, other=0.0), mask=inside)
    half = num_heads.to(tl.int64) * padded
    tl.store(by_head + half + target, tl.load(delta + source, mask=present, other=0.0), mask=inside)


def delta_launch(dout: Tensor, out: Tensor, delta: Tensor) -> Launch:
    """delta over these operands."""
    num_pairs = delta.numel()
    strides = [_row_stride(name, x) for name, x in (("dout", dout), ("out", out))]
    operands = (dout, out, delta, num_pairs, out.shape[1], *strides, DELTA_ROWS)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return Launch(delta_kernel, operands, options, (triton.cdiv(num_pairs, DELTA_ROWS),))


def _row_stride(name: str, x: Tensor) -> int:
    """Row stride in units of 8 elements (16 bytes). **Raises:** OperandError for another stride."""
    stride = x.stride(0) if len(x) > 1 else x.shape[1] * x.shape[2]
    if stride % 8:
        raise OperandError(f"stride of {name}", stride, "a multiple of 8 elements")
    if x.device.type == "cuda" and x.data_ptr() % TMA_ALIGNMENT_BYTES:
        raise OperandError(
            f"address of {name}", hex(x.data_ptr()), f"a multiple of {TMA_ALIGNMENT_BYTES}"
        )
    return stride // 8


def by_head_launch(lse: Tensor, delta: Tensor, by_head: Tensor) -> Launch:
    """-L and delta by head; by_head `[2, N, rows padded to 64]`."""
    num_rows, num_heads = lse.shape
    operands = (
        lse,
        delta,
        by_head,
        num_rows,
        num_heads,
        by_head.shape[2],
        triton.next_power_of_2(num_heads),
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return Launch(by_head_kernel, operands, options, (by_head.shape[2] // TILE_ROWS,))


@attention.attention_delta.register("triton")
def attention_delta(dout: Tensor, out: Tensor) -> Tensor:
    """delta = sum over the head dim of dO O, `[T, N]` FP32; dout, out `[T, N, 128]` BF16.

    A shard without rows launches nothing.

    **Order:** see the top of the file. **Rounds:** nothing but the FP32 products and sums.
    **Raises:** OperandError, BackendError for what the kernel cannot take; there is no fallback.
    """
    launch = _kept_delta(dout, out)
    delta = out.new_empty(out.shape[:2], dtype=torch.float32)
    if len(out):
        launch.start(dout, out, delta)
    return delta


@kept_by_signature
def _kept_delta(dout: Tensor, out: Tensor) -> Again:
    check_attention(Contract(), {"out": out, "dout": dout}, {})
    return Again(delta_launch(dout, out, out.new_empty(out.shape[:2], dtype=torch.float32)), 3)
