"""RMSNorm and rotary on Hopper, each one fused read and write pass.

    norm      ms = sum(x x) / n;  r = 1 / sqrt(ms + eps);  y = bf16((x r) w)
              g = dy w;  c = sum(g xhat) / n;  dx = bf16(r (g - xhat c)), bf16(dx0 + dx) if given
    rotary    out_j = bf16(bf16(x_j cos_j) + bf16(-x_{j+h} sin_j)), and so on; backward with -sin

One IEEE FP32 operation per written operation, division and square root to nearest. The sum of a row
is one fixed tree of the threads that hold it: `SHAPES` gives rows, columns and warps of a program
from the width alone, so that a row's bits depend on the row and the width. Rotary has no sum and
gives the eager op's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from h3lib.contract import OperandError
from h3lib.ops import norm, rope
from h3lib.ops.hopper.compat import check_device
from h3lib.ops.hopper.launch import Again, Launch, kept_by_signature
from h3lib.ops.hopper.rowwise import bf16
from h3lib.ops.hopper.rowwise_tiles import OPTIONS, UNIT, row_stride

BF16, F32 = torch.bfloat16, torch.float32
MAX_WIDTH = 8192
MAX_REGISTERS = 128  # left alone, ptxas stops at 64 and spills one where the backward adds dx0
HEADS_PER_PROGRAM = 16  # 8 would load 8 bytes a thread


def shape_for(width: int) -> tuple[int, int, int]:
    """Columns, rows and warps of a program for rows of this width."""
    columns = triton.next_power_of_2(width)
    return columns, max(1, 4096 // columns), 8 if columns > 2048 else 4


@triton.jit
def _tile(num_rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Rows and element offsets of this program, and which elements exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    present = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    return row, column, row[:, None] * WIDTH + column[None, :], present


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_forward_kernel(
    x, w, y, r, num_rows, eps, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    row, column, at, present = _tile(num_rows, WIDTH, COLUMNS, ROWS)
    x_row = tl.load(x + at, mask=present, other=0.0).to(tl.float32)
    weight = tl.load(w + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(x_row * x_row, 1), tl.full((ROWS,), WIDTH, tl.float32))
    inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    y_row = (x_row * inverse[:, None]) * weight[None, :]
    tl.store(y + at, y_row.to(tl.bfloat16), mask=present)
    tl.store(r + row, inverse, mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_backward_kernel(
    dy, x, w, r, dx0, dx, num_rows,
    ADD: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, column, at, present = _tile(num_rows, WIDTH, COLUMNS, ROWS)
    dy_row = tl.load(dy + at, mask=present, other=0.0).to(tl.float32)
    x_row = tl.load(x + at, mask=present, other=0.0).to(tl.float32)
    weight = tl.load(w + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    inverse = tl.load(r + row, mask=row < num_rows, other=0.0)[:, None]
    xhat = x_row * inverse
    g = dy_row * weight[None, :]
    mean = tl.div_rn(tl.sum(g * xhat, 1), tl.full((ROWS,), WIDTH, tl.float32))
    dx_row = inverse * (g - xhat * mean[:, None])
    if ADD:
        dx_row = tl.load(dx0 + at, mask=present, other=0.0).to(tl.float32) + bf16(dx_row)
    tl.store(dx + at, dx_row.to(tl.bfloat16), mask=present)


@triton.jit(do_not_specialize=["num_heads", "stride", "table_stride"])
def rotary_kernel(
    x, cos, sin, out, num_heads, stride, table_stride,
    BACKWARD: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One row, HEADS heads: the two rotated halves, then the channels that pass."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, CHANNELS)
    c = tl.load(cos + row * (table_stride * 8) + channel, mask=channel < HALF, other=0.0)
    s = tl.load(sin + row * (table_stride * 8) + channel, mask=channel < HALF, other=0.0)
    c, s = c.to(tl.float32)[None, :], s.to(tl.float32)[None, :]
    if BACKWARD:
        s = -s
    source = x + row * (stride * 8) + head[:, None] * WIDTH + channel[None, :]
    target = out + (row * num_heads + head)[:, None] * WIDTH + channel[None, :]
    present = (head < num_heads)[:, None] & (channel < HALF)[None, :]
    low = tl.load(source, mask=present, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=present, other=0.0).to(tl.float32)
    rotated = bf16(low * c) + bf16((-high) * s)
    tl.store(target, rotated.to(tl.bfloat16), mask=present)
    rotated = bf16(high * c) + bf16(low * s)
    tl.store(target + HALF, rotated.to(tl.bfloat16), mask=present)
    passed = (head < num_heads)[:, None] & (channel < WIDTH - 2 * HALF)[None, :]
    rest = tl.load(source + 2 * HALF, mask=passed)
    tl.store(target + 2 * HALF, rest, mask=passed)


def _check_norm(w: Tensor, operands: dict[str, Tensor]) -> None:
    """**Raises:** OperandError, BackendError."""
    check_device(w=w, **operands)
    first = next(iter(operands.values()))
    for name, x in (operands | {"w": w}).items():
        if x.dtype != BF16 or x.device != first.device:
            raise OperandError(
                f"dtype of {name}", (x.dtype, str(x.device)), (BF16, str(first.device))
            )
        if not x.is_contiguous():
            raise OperandError(f"strides of {name}", x.stride(), "contiguous")
    width = first.shape[-1]
    if width % UNIT or not 0 < width <= MAX_WIDTH:
        raise OperandError("width of a row", width, f"a multiple of {UNIT} up to {MAX_WIDTH}")
    for name, x in operands.items():
        if x.shape != first.shape:
            raise OperandError(f"shape of {name}", tuple(x.shape), tuple(first.shape))
    if w.shape != (width,):
        raise OperandError("shape of w", tuple(w.shape), (width,))


def norm_launch(
    kernel: object, tensors: Sequence[Tensor | None], x: Tensor, scalar: float | bool
) -> Launch:
    """One pass over the rows of x, programs shaped by the width alone."""
    width = x.shape[-1]
    columns, rows, warps = shape_for(width)
    num_rows = x.numel() // width
    arguments = (*tensors, num_rows, scalar, width, columns, rows)
    options = OPTIONS | {"num_warps": warps, "maxnreg": MAX_REGISTERS}
    return Launch(kernel, arguments, options, (-(-num_rows // rows),))


@norm.rms_norm_forward.register("triton")
def rms_norm_forward(x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y = (x r) w and r `[..., 1]` FP32; x `[..., n]`, w `[n]` BF16, contiguous.

    **Order:** a tree that depends on n alone. **Rounds:** y once. **Raises:** OperandError.
    """
    launch = _forward_launch(x, w, eps)
    y, r = torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=F32)
    if x.numel():
        launch.start(x, w, y, r)
    return y, r


@kept_by_signature
def _forward_launch(x: Tensor, w: Tensor, eps: float) -> Again:
    _check_norm(w, {"x": x})
    return Again(norm_launch(rms_norm_forward_kernel, [None] * 4, x, eps), 4)


@norm.rms_norm_backward.register("triton")
def rms_norm_backward(
    dy: Tensor, x: Tensor, w: Tensor, r: Tensor, dx0: Tensor | None = None
) -> Tensor:
    """dx, or bf16(dx0 + dx), `[..., n]`; all BF16 but r, FP32, contiguous.

    **Order:** a tree that depends on n alone. **Rounds:** dx once, then the sum.
    **Raises:** OperandError.
    """
    launch = _backward_launch(dy, x, w, r, dx0)
    dx = torch.empty_like(x)
    if x.numel():
        launch.start(dy, x, w, r, x if dx0 is None else dx0, dx)
    return dx


@kept_by_signature
def _backward_launch(dy: Tensor, x: Tensor, w: Tensor, r: Tensor, dx0: Tensor | None) -> Again:
    _check_norm(w, {"x": x, "dy": dy} | ({} if dx0 is None else {"dx0": dx0}))
    if r.dtype != F32 or r.shape != (*x.shape[:-1], 1) or not r.is_contiguous():
        raise OperandError("r", (r.dtype, tuple(r.shape)), (F32, (*x.shape[:-1], 1)))
    return Again(norm_launch(rms_norm_backward_kernel, [None] * 6, x, dx0 is not None), 6)


def rotary_launch(
    x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None, backward: bool
) -> Launch:
    """One pass over `[T, N, H]`."""
    rows, heads, width = x.shape
    half = cos.shape[1]
    channels = triton.next_power_of_2(max(half, width - 2 * half))
    strides = [row_stride("x", x), row_stride("cos", cos)]
    arguments = (
        x,
        cos,
        sin,
        out,
        heads,
        *strides,
        backward,
        half,
        width,
        channels,
        HEADS_PER_PROGRAM,
    )
    return Launch(rotary_kernel, arguments, OPTIONS, (rows, -(-heads // HEADS_PER_PROGRAM)))


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    launch = _rotary_launch(x, cos, sin, backward)
    out = x.new_empty(x.shape)
    if x.numel():
        launch.start(x, cos, sin, out)
    return out


@kept_by_signature
def _rotary_launch(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Again:
    check_device(x=x, cos=cos, sin=sin)
    for name, t in {"x": x, "cos": cos, "sin": sin}.items():
        if t.dtype != BF16 or t.device != x.device:
            raise OperandError(f"dtype of {name}", (t.dtype, str(t.device)), (BF16, str(x.device)))
    if x.ndim != 3 or cos.ndim != 2 or len(cos) != len(x) or 2 * cos.shape[1] > x.shape[2]:
        accepted = f"({len(x)}, half the rotated channels)"
        raise OperandError("shape of cos", tuple(cos.shape), accepted)
    if sin.shape != cos.shape or sin.stride() != cos.stride():
        raise OperandError("shape and strides of sin", tuple(sin.shape), tuple(cos.shape))
    if cos.shape[1] % UNIT or x.shape[2] % UNIT:
        raise OperandError(
            "rotated and head channels", (cos.shape[1], x.shape[2]), f"multiples of {UNIT}"
        )
    return Again(rotary_launch(x, cos, sin, None, backward), 4)


@rope.rotary_forward.register("triton")
def rotary_forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate q or k; x `[T, N, H]`, cos and sin `[T, h]`, BF16. **Rounds:** products and sum."""
    return _rotary(x, cos, sin, False)


@rope.rotary_backward.register("triton")
def rotary_backward(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The forward with -sin."""
    return _rotary(dy, cos, sin, True)
