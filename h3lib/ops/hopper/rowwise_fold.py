"""Backward of modulation and gated residual on Hopper, with the row folds of their gradients.

    modulated norm   dh = bf16(da bf16(1 + scale)); folds of da, da h and dh xhat,
                     xhat = x r and h = bf16(xhat w) made again from x, one operation at a time
    gated residual   dy = bf16(gate dx); the fold of dx y

One program takes a row block and some columns, its rows one at a time in ascending order, so each
term is made in a register, added to its chain from +0 and forgotten: nothing in FP32 is written but
the chains' sums, 1/64 of the rows. Rows of one table row follow each other in runs; between runs
the chain of a table row waits in `sums`, where nobody else writes. `fold.py` does the rest.

Every operation is one IEEE FP32 operation in the eager op's order, rounded to bf16 where the eager
op stores: the bytes are the eager op's. A row of the table that does not exist makes NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h3lib.contract import NUM_ROW_UNITS, OperandError, RowUnits, subtree_roots
from h3lib.ops import adaln
from h3lib.ops.hopper.fold import UnitPlan, finish_roots
from h3lib.ops.hopper.launch import Launch
from h3lib.ops.hopper.rowwise import bf16, load_row, load_table
from h3lib.ops.hopper.rowwise_tiles import UNIT, check_columns, check_rows, row_stride

BF16, F32 = torch.bfloat16, torch.float32
COLUMNS = 256  # 8 a thread; 21 programs for the columns of a row of 5,376
OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}


@triton.jit
def _run_end(table_rows, at, count, BLOCK: tl.constexpr):
    """Where the run of rows with one table row that starts at `at` ends, and that table row."""
    place = tl.arange(0, BLOCK)
    row = tl.load(table_rows + place, mask=place < count, other=-1)
    first = tl.load(table_rows + at)
    return tl.min(tl.where((place >= at) & (row != first), place, count), 0), first


@triton.jit(
    do_not_specialize=["num_rows", "num_table_rows", "width", "da_stride", "x_stride",
                       "scale_stride"]
)  # fmt: skip
def modulated_norm_backward_kernel(
    da, x, w, r, scale, table_rows, dh, sums, num_rows, num_table_rows, width, da_stride, x_stride,
    scale_stride, ROW_BLOCK: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """sums[block] = chains of dw, then of (shift, scale) of each table row."""
    block = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_width = width * 8
    present = column < row_width
    zero = tl.zeros((COLUMNS,), tl.float32)
    own = sums + block * (2 * num_table_rows + 1) * row_width + column
    for slot in range(1, 2 * num_table_rows + 1):
        tl.store(own + slot * row_width, zero, mask=present)
    weight = tl.load(w + column, mask=present, other=0.0).to(tl.float32)
    first = block * ROW_BLOCK
    count = tl.minimum(num_rows - first, ROW_BLOCK).to(tl.int32)
    dw = zero
    at = 0
    while at < count:
        stop, group = _run_end(table_rows + first, at, count, ROW_BLOCK)
        scales, group = load_table(scale, group, num_table_rows, scale_stride, column, present)
        factor = bf16(1.0 + scales)
        shift_sum = own + (1 + 2 * group) * row_width
        tl.debug_barrier()
        dshift = tl.load(shift_sum, mask=present, other=0.0)
        dscale = tl.load(shift_sum + row_width, mask=present, other=0.0)
        for i in tl.range(at, stop, num_stages=STAGES, loop_unroll_factor=UNROLL):
            row = first + i
            d = load_row(da, row, da_stride, column, present)
            xhat = load_row(x, row, x_stride, column, present) * tl.load(r + row)
            dh_row = bf16(d * factor)
            tl.store(dh + row * row_width + column, dh_row.to(dh.dtype.element_ty), mask=present)
            dshift += d
            dscale += d * bf16(xhat * weight)
            dw += dh_row * xhat
        tl.store(shift_sum, dshift, mask=present)
        tl.store(shift_sum + row_width, dscale, mask=present)
        at = stop
    tl.store(own, dw, mask=present)


@triton.jit(
    do_not_specialize=["num_rows", "num_table_rows", "width", "dx_stride", "gate_stride",
                       "y_stride"]
)  # fmt: skip
def gated_residual_backward_kernel(
    dx, gate, y, table_rows, dy, sums, num_rows, num_table_rows, width, dx_stride, gate_stride,
    y_stride, ROW_BLOCK: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """sums[block] = chains of the gate of each table row."""
    block = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_width = width * 8
    present = column < row_width
    own = sums + block * num_table_rows * row_width + column
    for slot in range(num_table_rows):
        tl.store(own + slot * row_width, tl.zeros((COLUMNS,), tl.float32), mask=present)
    first = block * ROW_BLOCK
    count = tl.minimum(num_rows - first, ROW_BLOCK).to(tl.int32)
    at = 0
    while at < count:
        stop, group = _run_end(table_rows + first, at, count, ROW_BLOCK)
        gates, group = load_table(gate, group, num_table_rows, gate_stride, column, present)
        tl.debug_barrier()
        dgate = tl.load(own + group * row_width, mask=present, other=0.0)
        for i in tl.range(at, stop, num_stages=STAGES, loop_unroll_factor=UNROLL):
            row = first + i
            d = load_row(dx, row, dx_stride, column, present)
            term = d * load_row(y, row, y_stride, column, present)
            dy_row = (gates * d).to(dy.dtype.element_ty)
            tl.store(dy + row * row_width + column, dy_row, mask=present)
            dgate += term
        tl.store(own + group * row_width, dgate, mask=present)
        at = stop


STAGES = 3  # fetches in flight, of UNROLL rows each, in shared memory: 8 KB a program
UNROLL = 4


def fold_launch(
    kernel: object,
    operands: dict[str, Tensor],
    arguments: tuple[Tensor, ...],
    num_table_rows: int,
    row_block: int,
) -> Launch:
    """`kernel` over row blocks and columns; `operands` are those of `arguments` with strides."""
    rows, width = next(iter(operands.values())).shape
    strides = [row_stride(name, x) for name, x in operands.items()]
    sizes = (rows, num_table_rows, width // UNIT)
    arguments = (*arguments, *sizes, *strides, row_block, COLUMNS, STAGES, UNROLL)
    return Launch(
        kernel, arguments, OPTIONS, (triton.cdiv(rows, row_block), triton.cdiv(width, COLUMNS))
    )


def _plan(like: Tensor, rows: RowUnits, units: range) -> UnitPlan:
    plan = UnitPlan.of(rows, units, like.device)
    if len(like) != plan.num_rows:
        raise OperandError("rows", len(like), f"{plan.num_rows}, those of the row units {units}")
    return plan


@adaln.modulated_norm_backward.register("triton")
def modulated_norm_backward(
    da: Tensor,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    scale: Tensor,
    table_rows: Tensor,
    rows: RowUnits,
    units: range,
) -> tuple[Tensor, Tensor, Tensor]:
    """dh `[T, D]`, roots `[R, G, 2, D]` of (dshift, dscale) and `[R, D]` of dw.

    da, x `[T, D]`, w `[D]`, scale `[G, D]` BF16; r `[T, 1]` FP32; table_rows `[T]` int64.

    **Order:** as the eager op. **Rounds:** h and dh. **Raises:** OperandError, ContractError.
    """
    operands = {"da": da, "x": x, "scale": scale}
    check_rows(BF16, da=da, x=x)
    check_rows(BF16, w=w[None])
    check_columns(x, table_rows, scale=scale)
    if w.shape != x.shape[1:]:
        raise OperandError("shape of w", tuple(w.shape), tuple(x.shape[1:]))
    if r.dtype != F32 or r.shape != (len(x), 1) or not r.is_contiguous():
        raise OperandError("r", (r.dtype, tuple(r.shape)), (F32, (len(x), 1)))
    plan, width, count = _plan(x, rows, units), x.shape[1], len(scale)
    dh = torch.empty(x.shape, dtype=BF16, device=x.device)
    sums = r.new_empty((plan.num_blocks, (1 + 2 * count) * width))
    if len(x):
        arguments = (da, x, w, r, scale, table_rows, dh, sums)
        kernel, size = modulated_norm_backward_kernel, rows.contract.row_block
        fold_launch(kernel, operands, arguments, count, size).start()
    spans = subtree_roots(units.start, units.stop, NUM_ROW_UNITS)
    roots = finish_roots(sums, plan, units, spans).view(len(spans), 1 + 2 * count, width)
    return dh, roots[:, 1:].unflatten(1, (count, 2)), roots[:, 0]


@adaln.gated_residual_backward.register("triton")
def gated_residual_backward(
    dx: Tensor, gate: Tensor, y: Tensor, table_rows: Tensor, rows: RowUnits, units: range
) -> tuple[Tensor, Tensor]:
    """dy `[T, D]` and roots `[R, G, D]` of dgate.

    dx, y `[T, D]`, gate `[G, D]` BF16; table_rows `[T]` int64.

    **Order:** as the eager op. **Rounds:** dy. **Raises:** OperandError, ContractError.
    """
    operands = {"dx": dx, "gate": gate, "y": y}
    check_rows(BF16, dx=dx, y=y)
    check_columns(dx, table_rows, gate=gate)
    plan, width, count = _plan(dx, rows, units), dx.shape[1], len(gate)
    dy = torch.empty(dx.shape, dtype=BF16, device=dx.device)
    sums = torch.empty((plan.num_blocks, count * width), dtype=F32, device=dx.device)
    if len(dx):
        arguments = (dx, gate, y, table_rows, dy, sums)
        kernel, size = gated_residual_backward_kernel, rows.contract.row_block
        fold_launch(kernel, operands, arguments, count, size).start()
    spans = subtree_roots(units.start, units.stop, NUM_ROW_UNITS)
    return dy, finish_roots(sums, plan, units, spans).view(len(spans), count, width)
