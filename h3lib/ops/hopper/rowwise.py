"""Element-wise ops of the block on Hopper, each one fused read and write pass.

    swiglu      y = bf16(value bf16(SiLU(g))),  SiLU(g) = g / (1 + exp(-g))
                dvalue = bf16(dy bf16(SiLU)),  dgate = bf16(bf16(dy value) (s (1 + g (1 - s))))
    modulate    a = bf16(bf16(h bf16(1 + scale[row])) + shift[row])
    residual    x' = bf16(x + bf16(gate[row] y))

Every operation is one IEEE FP32 operation in the eager op's order, rounded to bf16 where the eager
op stores; exp is `ex2.approx(x log2(e))`, pinned here, so swiglu alone differs from eager, in last
places. One program takes 2,048 columns of one row; an element's bits depend on its operands alone.
The row of the AdaLN table is read where it is; one that does not exist makes NaN. The backward of
modulation and residual is in `rowwise_fold.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h3lib.ops import adaln, swiglu
from h3lib.ops.hopper.launch import Again, Launch, kept_by_signature
from h3lib.ops.hopper.rowwise_tiles import (
    OPTIONS,
    UNIT,
    check_columns,
    check_rows,
    row_stride,
)

COLUMNS = 2048
BF16 = torch.bfloat16


@triton.jit
def _columns(width, COLUMNS: tl.constexpr):
    """This program's row and columns, and which of them exist."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return tl.program_id(0).to(tl.int64), column, column < width * 8


@triton.jit
def load_row(x, row, stride, column, present):
    return tl.load(x + row * (stride * 8) + column, mask=present, other=0.0).to(tl.float32)


@triton.jit
def bf16(x):
    """Rounded to bf16, held as FP32."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def load_table(x, row, num_rows, stride, column, present):
    """A row of the AdaLN table, NaN (and row 0) if it does not exist, and which one it is."""
    exists = (row >= 0) & (row < num_rows)
    row = tl.where(exists, row, 0)
    values = load_row(x, row, stride, column, present)
    return tl.where(exists, values, float("nan")), row


@triton.jit
def _sigmoid_denominator(g):
    return 1.0 + tl.exp(-g)


@triton.jit(do_not_specialize=["width", "v_stride", "g_stride"])
def swiglu_forward_kernel(value, gate, y, width, v_stride, g_stride, COLUMNS: tl.constexpr):
    row, column, present = _columns(width, COLUMNS)
    v = load_row(value, row, v_stride, column, present)
    g = load_row(gate, row, g_stride, column, present)
    silu = bf16(tl.div_rn(g, _sigmoid_denominator(g)))
    tl.store(y + row * (width * 8) + column, (v * silu).to(tl.bfloat16), mask=present)


@triton.jit(do_not_specialize=["width", "dy_stride", "v_stride", "g_stride"])
def swiglu_backward_kernel(
    dy, value, gate, dhidden, width, dy_stride, v_stride, g_stride, COLUMNS: tl.constexpr
):
    row, column, present = _columns(width, COLUMNS)
    d = load_row(dy, row, dy_stride, column, present)
    v = load_row(value, row, v_stride, column, present)
    g = load_row(gate, row, g_stride, column, present)
    denominator = _sigmoid_denominator(g)
    silu, s = tl.div_rn(g, denominator), tl.div_rn(1.0, denominator)
    dvalue = dhidden + row * (width * 16) + column
    tl.store(dvalue, (d * bf16(silu)).to(tl.bfloat16), mask=present)
    derivative = s * (1.0 + g * (1.0 - s))
    tl.store(dvalue + width * 8, (bf16(d * v) * derivative).to(tl.bfloat16), mask=present)


@triton.jit(
    do_not_specialize=["num_table_rows", "width", "h_stride", "shift_stride", "scale_stride"]
)
def modulate_forward_kernel(
    h, shift, scale, table_rows, a, num_table_rows, width, h_stride, shift_stride, scale_stride,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, present = _columns(width, COLUMNS)
    at = tl.load(table_rows + row)
    scales, _ = load_table(scale, at, num_table_rows, scale_stride, column, present)
    shifts, _ = load_table(shift, at, num_table_rows, shift_stride, column, present)
    product = bf16(load_row(h, row, h_stride, column, present) * bf16(1.0 + scales))
    tl.store(a + row * (width * 8) + column, (product + shifts).to(tl.bfloat16), mask=present)


@triton.jit(do_not_specialize=["num_table_rows", "width", "x_stride", "gate_stride", "y_stride"])
def gated_residual_forward_kernel(
    x, gate, y, table_rows, out, num_table_rows, width, x_stride, gate_stride, y_stride,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, present = _columns(width, COLUMNS)
    at = tl.load(table_rows + row)
    gates, _ = load_table(gate, at, num_table_rows, gate_stride, column, present)
    gated = bf16(gates * load_row(y, row, y_stride, column, present))
    total = load_row(x, row, x_stride, column, present) + gated
    tl.store(out + row * (width * 8) + column, total.to(tl.bfloat16), mask=present)


def elementwise_launch(
    kernel: object, operands: dict[str, Tensor], out: tuple[Tensor | None, ...], *others: object
) -> Launch:
    """One pass of `kernel` over rows; `others` stand between `out` and the width."""
    rows, width = next(iter(operands.values())).shape
    strides = [row_stride(name, x) for name, x in operands.items()]
    arguments = (*operands.values(), *out, *others, width // UNIT, *strides, COLUMNS)
    return Launch(kernel, arguments, OPTIONS, (rows, -(-width // COLUMNS)))


def table_launch(
    kernel: object,
    operands: dict[str, Tensor],
    table_rows: Tensor,
    num_table: int,
    out: Tensor | None,
) -> Launch:
    """One pass of `kernel` over the rows of the first operand, each with its row of the table."""
    return elementwise_launch(kernel, operands, (table_rows, out), num_table)


@swiglu.swiglu_forward.register("triton")
def swiglu_forward(value: Tensor, gate: Tensor) -> Tensor:
    """y = bf16(value bf16(SiLU(gate))); all `[T, F]` BF16. **Rounds:** SiLU(gate), the product."""
    launch = _swiglu_launch(value, gate)
    y = value.new_empty(value.shape)
    if len(value):
        launch.start(value, gate, y)
    return y


@kept_by_signature
def _swiglu_launch(value: Tensor, gate: Tensor) -> Again:
    operands = {"value": value, "gate": gate}
    check_rows(BF16, **operands)
    return Again(elementwise_launch(swiglu_forward_kernel, operands, (None,)), 3)


@swiglu.swiglu_backward.register("triton")
def swiglu_backward(dy: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    """[dvalue, dgate] side by side `[T, 2 F]`; the rest `[T, F]`, all BF16; see the top."""
    launch = _swiglu_backward_launch(dy, value, gate)
    dhidden = dy.new_empty((len(dy), 2 * dy.shape[1]))
    if len(dy):
        launch.start(dy, value, gate, dhidden)
    return dhidden


@kept_by_signature
def _swiglu_backward_launch(dy: Tensor, value: Tensor, gate: Tensor) -> Again:
    operands = {"dy": dy, "value": value, "gate": gate}
    check_rows(BF16, **operands)
    return Again(elementwise_launch(swiglu_backward_kernel, operands, (None,)), 4)


@adaln.modulate_forward.register("triton")
def modulate_forward(h: Tensor, shift: Tensor, scale: Tensor, table_rows: Tensor) -> Tensor:
    """a = bf16(bf16(h bf16(1 + scale[row])) + shift[row]); h `[T, D]`, shift, scale `[G, D]`."""
    launch = _modulate_launch(h, shift, scale, table_rows)
    a = h.new_empty(h.shape)
    if len(h):
        launch.start(h, shift, scale, table_rows, a)
    return a


@kept_by_signature
def _modulate_launch(h: Tensor, shift: Tensor, scale: Tensor, table_rows: Tensor) -> Again:
    check_rows(BF16, h=h)
    check_columns(h, table_rows, shift=shift, scale=scale)
    operands = {"h": h, "shift": shift, "scale": scale}
    return Again(table_launch(modulate_forward_kernel, operands, table_rows, len(scale), None), 5)


@adaln.gated_residual_forward.register("triton")
def gated_residual_forward(x: Tensor, gate: Tensor, y: Tensor, table_rows: Tensor) -> Tensor:
    """x' = bf16(x + bf16(gate[row] y)); x, y `[T, D]`, gate `[G, D]`, all BF16."""
    launch = _gated_residual_launch(x, gate, y, table_rows)
    out = x.new_empty(x.shape)
    if len(x):
        launch.start(x, gate, y, table_rows, out)
    return out


@kept_by_signature
def _gated_residual_launch(x: Tensor, gate: Tensor, y: Tensor, table_rows: Tensor) -> Again:
    check_rows(BF16, x=x, y=y)
    check_columns(x, table_rows, gate=gate)
    operands = {"x": x, "gate": gate, "y": y}
    kernel = gated_residual_forward_kernel
    return Again(table_launch(kernel, operands, table_rows, len(gate), None), 5)
