"""Backward of modulation and gated residual on Hopper, with the row folds of their gradients.

    modulated norm   dh = bf16(da bf16(1 + scale)); folds of da, da h and dh xhat,
                     xhat = x r and h = bf16(xhat w) made again from x, one operation at a time
    gated residual   dy = bf16(gate dx); the fold of dx y

One program takes a row block and some columns, its rows one at a time in ascending order, so each
term is made in a register, added to its chain from +0 and forgotten: nothing in FP32 is written but
the chains' sums, 1/64 of the rows. Rows of one table row follow each other in runs; between runs
the chain of a table row waits in `sums`, where nobody else writes. Table rows that a row block does
not have are neither written nor read; which it has is said behind the sums. `fold.py` does the
rest.

Every operation is one IEEE FP32 operation in the eager op's order, rounded to bf16 where the eager
op stores: the bytes are the eager op's. A row of the table that does not exist makes NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from h3lib.contract import NUM_ROW_UNITS, OperandError, RowUnits, subtree_roots
from h3lib.ops import adaln
from h3lib.ops.hopper.fold import UnitPlan, roots_launches
from h3lib.ops.hopper.launch import Again, Launch, kept_by_signature
from h3lib.ops.hopper.rowwise import bf16, load_row, load_table
from h3lib.ops.hopper.rowwise_tiles import UNIT, check_columns, check_rows, row_stride

BF16, F32 = torch.bfloat16, torch.float32
COLUMNS = 256  # 8 a thread; 21 programs for the columns of a row of 5,376
STAGES = 3  # fetches in flight, of UNROLL rows each, in shared memory: 8 KB a program
UNROLL = 4
OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}


@triton.jit
def _run_end(table_rows, at, count, num_table_rows, BLOCK: tl.constexpr):
    """Where the run of rows with one table row that starts at `at` ends, that table row, and
    whether an earlier run of the block had it (a table row that does not exist counts as row 0)."""
    place = tl.arange(0, BLOCK)
    row = tl.load(table_rows + place, mask=place < count, other=-1)
    first = tl.load(table_rows + at)
    stop = tl.min(tl.where((place >= at) & (row != first), place, count), 0)
    row = tl.where((row >= 0) & (row < num_table_rows), row, 0)
    slot = tl.where((first >= 0) & (first < num_table_rows), first, 0)
    return stop, first, tl.max(((place < at) & (row == slot)).to(tl.int32), 0) > 0


@triton.jit
def _slots(sums, num_blocks, num_slots, row_width):
    """Where behind the sums a row block says which slots it wrote: none so far.

    The programs of the first columns say it; a scalar is stored by one thread, so in this order.
    """
    there = sums + num_blocks.to(tl.int64) * num_slots * row_width
    there += tl.program_id(0).to(tl.int64) * num_slots
    if tl.program_id(1) == 0:
        for slot in range(num_slots):
            tl.store(there + slot, 0.0)
    return there


@triton.jit
def _waiting(sums, earlier, present):
    """The chain as an earlier run of this block left it, or +0."""
    return tl.load(sums, mask=present & earlier, other=0.0)


@triton.jit(
    do_not_specialize=["num_rows", "num_table_rows", "width", "da_stride", "x_stride",
                       "scale_stride"]
)  # fmt: skip
def modulated_norm_backward_kernel(
    da, x, w, r, scale, table_rows, dh, sums,
    num_rows, num_table_rows, width, da_stride, x_stride, scale_stride,
    ROW_BLOCK: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """sums[block] = chains of dw, then of (shift, scale) of each table row."""
    block = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_width = width * 8
    present = column < row_width
    num_slots = 2 * num_table_rows + 1
    own = sums + block * num_slots * row_width + column
    there = _slots(sums, tl.num_programs(0), num_slots, row_width)
    weight = tl.load(w + column, mask=present, other=0.0).to(tl.float32)
    first = block * ROW_BLOCK
    count = tl.minimum(num_rows - first, ROW_BLOCK).to(tl.int32)
    dw = tl.zeros((COLUMNS,), tl.float32)
    at = 0
    while at < count:
        runs = table_rows + first
        stop, group, earlier = _run_end(runs, at, count, num_table_rows, ROW_BLOCK)
        scales, group = load_table(scale, group, num_table_rows, scale_stride, column, present)
        factor = bf16(1.0 + scales)
        shift_sum = own + (1 + 2 * group) * row_width
        tl.debug_barrier()
        dshift = _waiting(shift_sum, earlier, present)
        dscale = _waiting(shift_sum + row_width, earlier, present)
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
        if tl.program_id(1) == 0:
            tl.store(there + 1 + 2 * group, 1.0)
            tl.store(there + 2 + 2 * group, 1.0)
        at = stop
    tl.store(own, dw, mask=present)
    if tl.program_id(1) == 0:
        tl.store(there, 1.0)


@triton.jit(
    do_not_specialize=["num_rows", "num_table_rows", "width", "dx_stride", "gate_stride",
                       "y_stride"]
)  # fmt: skip
def gated_residual_backward_kernel(
    dx, gate, y, table_rows, dy, sums,
    num_rows, num_table_rows, width, dx_stride, gate_stride, y_stride,
    ROW_BLOCK: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """sums[block] = chains of the gate of each table row."""
    block = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_width = width * 8
    present = column < row_width
    own = sums + block * num_table_rows * row_width + column
    there = _slots(sums, tl.num_programs(0), num_table_rows, row_width)
    first = block * ROW_BLOCK
    count = tl.minimum(num_rows - first, ROW_BLOCK).to(tl.int32)
    at = 0
    while at < count:
        runs = table_rows + first
        stop, group, earlier = _run_end(runs, at, count, num_table_rows, ROW_BLOCK)
        gates, group = load_table(gate, group, num_table_rows, gate_stride, column, present)
        tl.debug_barrier()
        dgate = _waiting(own + group * row_width, earlier, present)
        for i in tl.range(at, stop, num_stages=STAGES, loop_unroll_factor=UNROLL):
            row = first + i
            d = load_row(dx, row, dx_stride, column, present)
            term = d * load_row(y, row, y_stride, column, present)
            dy_row = (gates * d).to(dy.dtype.element_ty)
            tl.store(dy + row * row_width + column, dy_row, mask=present)
            dgate += term
        tl.store(own + group * row_width, dgate, mask=present)
        if tl.program_id(1) == 0:
            tl.store(there + group, 1.0)
        at = stop


def fold_launch(
    kernel: object,
    operands: dict[str, Tensor],
    tensors: Sequence[Tensor | None],
    num_table_rows: int,
    row_block: int,
) -> Launch:
    """`kernel` over row blocks and columns; `operands` are those of `tensors` with strides."""
    rows, width = next(iter(operands.values())).shape
    strides = [row_stride(name, x) for name, x in operands.items()]
    sizes = (rows, num_table_rows, width // UNIT, *strides)
    arguments = (*tensors, *sizes, row_block, COLUMNS, STAGES, UNROLL)
    return Launch(kernel, arguments, OPTIONS, (-(-rows // row_block), -(-width // COLUMNS)))


@dataclass(frozen=True)
class FoldPass:
    """Both launches of a backward pass, for operands of one signature."""

    chains: Again | None  # None where there are no rows
    roots: list[Again]
    num_sums: int
    shape: tuple[int, int]  # of the roots

    @classmethod
    def of(
        cls,
        kernel: object,
        operands: dict[str, Tensor],
        num_tensors: int,
        num_table_rows: int,
        num_slots: int,
        rows: RowUnits,
        units: range,
    ) -> FoldPass:
        """`kernel` takes `num_tensors` tensors; the first of `operands` has a row for each row.

        **Raises:** OperandError for other rows than those of the row units.
        """
        like = next(iter(operands.values()))
        plan = UnitPlan.of(rows, units, like.device)
        if len(like) != plan.num_rows:
            accepted = f"{plan.num_rows}, those of the row units {units}"
            raise OperandError("rows", len(like), accepted)
        tensors, size = [None] * num_tensors, rows.contract.row_block
        launch = fold_launch(kernel, operands, tensors, num_table_rows, size)
        spans = subtree_roots(units.start, units.stop, NUM_ROW_UNITS)
        width = num_slots * like.shape[1]
        return cls(
            Again(launch, num_tensors) if len(like) else None,
            roots_launches(width, plan, units, spans, num_slots),
            plan.num_blocks * (width + num_slots),
            (len(spans), width),
        )

    def start(self, *tensors: Tensor) -> Tensor:
        """Roots `[R, slots * D]`; `tensors` are the kernel's but for the sums."""
        sums = tensors[0].new_empty(self.num_sums, dtype=F32)
        roots = sums.new_empty(self.shape)
        if self.chains is not None:
            self.chains.start(*tensors, sums)
        for each in self.roots:
            each.start(sums, roots)
        return roots


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
    fold_pass = _modulated_norm_pass(da, x, w, r, scale, table_rows, rows, units)
    dh, width = x.new_empty(x.shape), x.shape[1]
    roots = fold_pass.start(da, x, w, r, scale, table_rows, dh)
    return dh, roots[:, width:].view(len(roots), len(scale), 2, width), roots[:, :width]


@kept_by_signature
def _modulated_norm_pass(
    da: Tensor,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    scale: Tensor,
    table_rows: Tensor,
    rows: RowUnits,
    units: range,
) -> FoldPass:
    check_rows(BF16, da=da, x=x)
    check_rows(BF16, w=w[None])
    check_columns(x, table_rows, scale=scale)
    if w.shape != x.shape[1:]:
        raise OperandError("shape of w", tuple(w.shape), tuple(x.shape[1:]))
    if r.dtype != F32 or r.shape != (len(x), 1) or not r.is_contiguous():
        raise OperandError("r", (r.dtype, tuple(r.shape)), (F32, (len(x), 1)))
    operands, count = {"da": da, "x": x, "scale": scale}, len(scale)
    kernel, num_slots = modulated_norm_backward_kernel, 1 + 2 * count
    return FoldPass.of(kernel, operands, 8, count, num_slots, rows, units)


@adaln.gated_residual_backward.register("triton")
def gated_residual_backward(
    dx: Tensor, gate: Tensor, y: Tensor, table_rows: Tensor, rows: RowUnits, units: range
) -> tuple[Tensor, Tensor]:
    """dy `[T, D]` and roots `[R, G, D]` of dgate.

    dx, y `[T, D]`, gate `[G, D]` BF16; table_rows `[T]` int64.

    **Order:** as the eager op. **Rounds:** dy. **Raises:** OperandError, ContractError.
    """
    fold_pass = _gated_residual_pass(dx, gate, y, table_rows, rows, units)
    dy = dx.new_empty(dx.shape)
    roots = fold_pass.start(dx, gate, y, table_rows, dy)
    return dy, roots.view(len(roots), len(gate), dx.shape[1])


@kept_by_signature
def _gated_residual_pass(
    dx: Tensor, gate: Tensor, y: Tensor, table_rows: Tensor, rows: RowUnits, units: range
) -> FoldPass:
    check_rows(BF16, dx=dx, y=y)
    check_columns(dx, table_rows, gate=gate)
    operands, count = {"dx": dx, "gate": gate, "y": y}, len(gate)
    return FoldPass.of(gated_residual_backward_kernel, operands, 6, count, count, rows, units)
