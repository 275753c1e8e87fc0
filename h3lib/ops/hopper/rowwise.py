"""Element-wise ops of the block on Hopper, each one fused read and write pass.

    swiglu      y = bf16(value bf16(SiLU(g))),  SiLU(g) = g / (1 + exp(-g))
                dvalue = bf16(dy bf16(SiLU)),  dgate = bf16(bf16(dy value) (s (1 + g (1 - s))))
    modulate    a = bf16(bf16(h bf16(1 + scale)) + shift)
                dh = bf16(da bf16(1 + scale)); terms da, da h in FP32
    residual    x' = bf16(x + bf16(gate y)); dy = bf16(gate dx), terms dx y in FP32

Every operation is one IEEE FP32 operation in the eager op's order, rounded to bf16 where the eager
op stores; exp is `ex2.approx(x log2(e))`, pinned here, so swiglu alone differs from eager, in last
places. One program takes 2,048 columns of one row; an element's bits depend on its operands alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h3lib.ops import adaln, swiglu
from h3lib.ops.hopper.attention_tiles import Launch
from h3lib.ops.hopper.rowwise_tiles import OPTIONS, UNIT, check_rows, row_stride

COLUMNS = 2048
BF16 = torch.bfloat16


@triton.jit
def _columns(width, COLUMNS: tl.constexpr):
    """This program's row and columns, and which of them exist."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return tl.program_id(0).to(tl.int64), column, column < width * 8


@triton.jit
def _load(x, row, stride, column, present):
    return tl.load(x + row * (stride * 8) + column, mask=present, other=0.0).to(tl.float32)


@triton.jit
def _bf16(x):
    """Rounded to bf16, held as FP32."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _sigmoid_denominator(g):
    return 1.0 + tl.exp(-g)


@triton.jit(do_not_specialize=["width", "v_stride", "g_stride"])
def swiglu_forward_kernel(value, gate, y, width, v_stride, g_stride, COLUMNS: tl.constexpr):
    row, column, present = _columns(width, COLUMNS)
    v = _load(value, row, v_stride, column, present)
    g = _load(gate, row, g_stride, column, present)
    silu = _bf16(tl.div_rn(g, _sigmoid_denominator(g)))
    tl.store(y + row * (width * 8) + column, (v * silu).to(tl.bfloat16), mask=present)


@triton.jit(do_not_specialize=["width", "dy_stride", "v_stride", "g_stride"])
def swiglu_backward_kernel(
    dy, value, gate, dvalue, dgate, width, dy_stride, v_stride, g_stride, COLUMNS: tl.constexpr
):
    row, column, present = _columns(width, COLUMNS)
    d = _load(dy, row, dy_stride, column, present)
    v = _load(value, row, v_stride, column, present)
    g = _load(gate, row, g_stride, column, present)
    denominator = _sigmoid_denominator(g)
    silu, s = tl.div_rn(g, denominator), tl.div_rn(1.0, denominator)
    at = row * (width * 8) + column
    tl.store(dvalue + at, (d * _bf16(silu)).to(tl.bfloat16), mask=present)
    derivative = s * (1.0 + g * (1.0 - s))
    tl.store(dgate + at, (_bf16(d * v) * derivative).to(tl.bfloat16), mask=present)


@triton.jit(do_not_specialize=["width", "h_stride", "shift_stride", "scale_stride"])
def modulate_forward_kernel(
    h, shift, scale, a, width, h_stride, shift_stride, scale_stride, COLUMNS: tl.constexpr
):
    row, column, present = _columns(width, COLUMNS)
    factor = _bf16(1.0 + _load(scale, row, scale_stride, column, present))
    product = _bf16(_load(h, row, h_stride, column, present) * factor)
    total = product + _load(shift, row, shift_stride, column, present)
    tl.store(a + row * (width * 8) + column, total.to(tl.bfloat16), mask=present)


@triton.jit(do_not_specialize=["width", "da_stride", "h_stride", "scale_stride"])
def modulate_backward_kernel(
    da, h, scale, dh, terms, width, da_stride, h_stride, scale_stride, COLUMNS: tl.constexpr
):
    row, column, present = _columns(width, COLUMNS)
    d = _load(da, row, da_stride, column, present)
    factor = _bf16(1.0 + _load(scale, row, scale_stride, column, present))
    tl.store(dh + row * (width * 8) + column, (d * factor).to(tl.bfloat16), mask=present)
    at = 2 * row * (width * 8) + column
    tl.store(terms + at, d, mask=present)
    tl.store(terms + at + width * 8, d * _load(h, row, h_stride, column, present), mask=present)


@triton.jit(do_not_specialize=["width", "x_stride", "gate_stride", "y_stride"])
def gated_residual_forward_kernel(
    x, gate, y, out, width, x_stride, gate_stride, y_stride, COLUMNS: tl.constexpr
):
    row, column, present = _columns(width, COLUMNS)
    g = _load(gate, row, gate_stride, column, present)
    gated = _bf16(g * _load(y, row, y_stride, column, present))
    total = _load(x, row, x_stride, column, present) + gated
    tl.store(out + row * (width * 8) + column, total.to(tl.bfloat16), mask=present)


@triton.jit(do_not_specialize=["width", "dx_stride", "gate_stride", "y_stride"])
def gated_residual_backward_kernel(
    dx, gate, y, dy, terms, width, dx_stride, gate_stride, y_stride, COLUMNS: tl.constexpr
):
    row, column, present = _columns(width, COLUMNS)
    d = _load(dx, row, dx_stride, column, present)
    at = row * (width * 8) + column
    dy_row = _load(gate, row, gate_stride, column, present) * d
    tl.store(dy + at, dy_row.to(tl.bfloat16), mask=present)
    tl.store(terms + at, d * _load(y, row, y_stride, column, present), mask=present)


def elementwise_launch(
    kernel: object, operands: dict[str, Tensor], results: list[Tensor]
) -> Launch:
    """One pass of `kernel` over `[T, C]` operands into contiguous results."""
    rows, width = next(iter(operands.values())).shape
    strides = [row_stride(name, x) for name, x in operands.items()]
    arguments = (*operands.values(), *results, width // UNIT, *strides, COLUMNS)
    return Launch(kernel, arguments, OPTIONS, (rows, triton.cdiv(width, COLUMNS)))


def _run(kernel: object, operands: dict[str, Tensor], *terms: int | None) -> tuple[Tensor, ...]:
    """The bf16 result of `kernel`, and an FP32 or bf16 tensor for each entry of `terms`.

    An entry is None for a second bf16 result, else how many rows of FP32 terms a row has.
    """
    check_rows(BF16, **operands)
    first = next(iter(operands.values()))
    rows, width = first.shape
    results = [torch.empty((rows, width), dtype=BF16, device=first.device)]
    for count in terms:
        shape = (rows, width) if count in (None, 1) else (rows, count, width)
        dtype = BF16 if count is None else torch.float32
        results.append(torch.empty(shape, dtype=dtype, device=first.device))
    if rows:
        elementwise_launch(kernel, operands, results).start(first.device)
    return tuple(results)


@swiglu.swiglu_forward.register("triton")
def swiglu_forward(value: Tensor, gate: Tensor) -> Tensor:
    """y = bf16(value bf16(SiLU(gate))); all `[T, F]` BF16. **Rounds:** SiLU(gate), the product."""
    return _run(swiglu_forward_kernel, {"value": value, "gate": gate})[0]


@swiglu.swiglu_backward.register("triton")
def swiglu_backward(dy: Tensor, value: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """dvalue and dgate, see the top of the file; all `[T, F]` BF16."""
    return _run(swiglu_backward_kernel, {"dy": dy, "value": value, "gate": gate}, None)


@adaln.modulate_forward.register("triton")
def modulate_forward(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """a = bf16(bf16(h bf16(1 + scale)) + shift); all `[T, D]` BF16."""
    return _run(modulate_forward_kernel, {"h": h, "shift": shift, "scale": scale})[0]


@adaln.modulate_backward.register("triton")
def modulate_backward(da: Tensor, h: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """dh `[T, D]` BF16, and the rows' terms (da, da h) `[T, 2, D]` FP32, not rounded."""
    return _run(modulate_backward_kernel, {"da": da, "h": h, "scale": scale}, 2)


@adaln.gated_residual_forward.register("triton")
def gated_residual_forward(x: Tensor, gate: Tensor, y: Tensor) -> Tensor:
    """x' = bf16(x + bf16(gate y)); all `[T, D]` BF16."""
    return _run(gated_residual_forward_kernel, {"x": x, "gate": gate, "y": y})[0]


@adaln.gated_residual_backward.register("triton")
def gated_residual_backward(dx: Tensor, gate: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """dy = bf16(gate dx) `[T, D]` BF16, and the rows' terms dx y `[T, D]` FP32, not rounded."""
    return _run(gated_residual_backward_kernel, {"dx": dx, "gate": gate, "y": y}, 1)
