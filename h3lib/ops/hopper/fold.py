"""Row folds on Hopper: sums over rows that are no products, without atomics.

    chains   one program a row block and column tile: rows ascending from +0, one add a row
    roots    row blocks of a row unit ascending from +0, then the tree, lower index on the left

Chains read terms (`row_unit_roots`) or make them from BF16 operands (`head_norm_dw_leaves`, and
`rowwise_fold.py` in the pass that makes the gradient of the rows); their sums are 1/64 of the rows,
so the roots cost little. The orders are the eager ones and every step is one IEEE operation: the
bits equal the eager op's. A row that is not of a group adds +0 to it: no sum is -0.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from h3lib.contract import (
    NUM_ROW_UNITS,
    ROW_UNITS_PER_SEQUENCE_UNIT,
    ContractError,
    OperandError,
    RowUnits,
    subtree_roots,
)
from h3lib.ops import fold, norm
from h3lib.ops.hopper.compat import check_device
from h3lib.ops.hopper.launch import Again, Launch

BF16 = torch.bfloat16
COLUMNS = 256
OPTIONS = {"num_warps": 2, "enable_fp_fusion": False}
HEAD_STAGES = 3  # rows in flight, in shared memory: 7 KB of two operands a program
HEAD_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
ROOT_COLUMNS = 32
WORD = 4  # columns in 16 bytes
ROOT_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit(do_not_specialize=["num_rows", "width"])
def row_blocks_kernel(
    terms, groups, sums, num_rows, width,
    ROW_BLOCK: tl.constexpr, GROUPS: tl.constexpr, GROUPED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """sums[block, g, column] = chain of the terms of the block's rows that are of group g."""
    block = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    group = tl.arange(0, GROUPS if GROUPED else 1)
    present = column < width
    total = tl.zeros((GROUPS if GROUPED else 1, COLUMNS), tl.float32)
    first = block * ROW_BLOCK
    for i in range(tl.minimum(num_rows - first, ROW_BLOCK).to(tl.int32)):
        term = tl.load(terms + (first + i) * width + column, mask=present, other=0.0)[None, :]
        if GROUPED:
            term = tl.where(tl.load(groups + first + i) == group[:, None], term, 0.0)
        total += term
    at = sums + (block * (GROUPS if GROUPED else 1) + group[:, None]) * width + column[None, :]
    tl.store(at, total, mask=present[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_heads"])
def head_blocks_kernel(
    dy, x, r, sums, num_rows, num_heads,
    HEADS: tl.constexpr, ROW_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """sums[block, unit, channel] = one chain of dy (x r) over rows (outer) and heads (inner).

    HEADS of a unit are the model's, the same for every layout.
    """
    block, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, HEAD_DIM)
    total = tl.zeros((HEAD_DIM,), tl.float32)
    first = block * ROW_BLOCK
    count = tl.minimum(num_rows - first, ROW_BLOCK).to(tl.int32)
    for i in tl.range(0, count, num_stages=STAGES):
        for head in tl.static_range(HEADS):
            at = (first + i) * num_heads + unit * HEADS + head
            xhat = tl.load(x + at * HEAD_DIM + channel).to(tl.float32) * tl.load(r + at)
            total += tl.load(dy + at * HEAD_DIM + channel).to(tl.float32) * xhat
    tl.store(sums + (block * tl.num_programs(1) + unit) * HEAD_DIM + channel, total)


@triton.jit(
    do_not_specialize=["first", "done", "most", "slot_words", "num_blocks", "num_slots"]
)  # fmt: skip
def roots_kernel(
    sums, roots, starts, first, done, most, slot_words, num_blocks, num_slots,
    SLOTS: tl.constexpr, WORD: tl.constexpr, UNITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """roots[done + i] = the tree over UNITS row units, each the chain of its row blocks.

    Unit u has the row blocks starts[u] to starts[u + 1], `most` at most. The columns of a row block
    are `num_slots` slots of `slot_words` words of WORD columns; with SLOTS, `[B, num_slots]` behind
    the sums says which of them were written (1.0, else 0.0). A program has columns of one slot.
    """
    slot_width = slot_words * WORD
    unit = first + tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    start = tl.load(starts + unit)
    count = tl.load(starts + unit + 1) - start
    start = start.to(tl.int64)
    tiles = (slot_width + COLUMNS - 1) // COLUMNS
    slot = tl.program_id(0) // tiles
    column = (tl.program_id(0) - slot * tiles) * COLUMNS + tl.arange(0, COLUMNS)
    present = column < slot_width
    column += slot * slot_width
    width = num_slots * slot_width
    there = sums + num_blocks.to(tl.int64) * width + start * num_slots + slot
    own = sums + start[:, None] * width + column[None, :]
    nodes = tl.zeros((UNITS, COLUMNS), tl.float32)
    if SLOTS:
        written = tl.load(there, mask=count > 0, other=0.0)
    for i in range(most):  # a unit without an i-th row block adds +0 to a sum that is never -0
        inside = i < count
        if SLOTS:
            inside = written != 0.0
            there += num_slots
            written = tl.load(there, mask=i + 1 < count, other=0.0)  # on its way beside the sums
        nodes += tl.load(own, mask=inside[:, None] & present[None, :], other=0.0)
        own += width
    for level in tl.static_range(0, UNITS.bit_length() - 1):
        pairs = tl.reshape(nodes, (UNITS >> (level + 1), 2, COLUMNS))
        left, right = tl.split(tl.permute(pairs, (0, 2, 1)))
        nodes = left + right
    root = tl.reshape(nodes, (COLUMNS,))
    target = roots + (done + tl.program_id(1)).to(tl.int64) * width + column
    tl.store(target, root, mask=present)


def _check(terms: Tensor) -> None:
    check_device(terms=terms)
    if terms.dtype != torch.float32 or not terms.is_contiguous():
        received = (terms.dtype, terms.stride())
        raise OperandError("dtype and strides of terms", received, "torch.float32, contiguous")


@dataclass(frozen=True)
class UnitPlan:
    """Rows and row blocks of a run of row units, and the row blocks of each: `starts` counts from
    the first and ends with the end of the last, `most` is the longest's."""

    num_rows: int
    num_blocks: int
    starts: Tensor
    most: int

    @classmethod
    @functools.cache
    def of(cls, rows: RowUnits, units: range, device: torch.device) -> UnitPlan:
        """Kept, so that a CUDA graph copies nothing from the host after a first eager call.

        **Raises:** ContractError for a row block that is not a power of two.
        """
        size = rows.contract.row_block
        if size & (size - 1):
            raise ContractError("row_block", size, "a power of two, for back end triton")
        blocks = [rows.row_unit_blocks(unit) for unit in units]
        edges = [b.start - blocks[0].start for b in blocks] + [blocks[-1].stop - blocks[0].start]
        num_rows = len(rows.row_unit_rows(units))
        starts = torch.tensor(edges, dtype=torch.int32, device=device)
        return cls(num_rows, -(-num_rows // size), starts, max(map(len, blocks)))


def finish_roots(
    sums: Tensor, width: int, plan: UnitPlan, units: range, spans: Sequence[range]
) -> Tensor:
    """Roots `[len(spans), width]` from the row blocks' sums `[B, width]` of the row units `units`.

    **Order:** row blocks of a unit ascending from +0, a span's units in the balanced tree.
    """
    roots = sums.new_empty((len(spans), width))
    for launch in roots_launches(width, plan, units, spans):
        launch.start(sums, roots)
    return roots


def roots_launches(
    width: int, plan: UnitPlan, units: range, spans: Sequence[range], num_slots: int = 0
) -> list[Again]:
    """A launch on (sums, roots) for each run of spans of one length.

    With `num_slots` a row block wrote some of so many slots of equal width, the others are +0, and
    behind the sums `[B, num_slots]` says which of them.
    """
    slots = max(1, num_slots)
    word = WORD if width // slots % WORD == 0 else 1
    launches, done = [], 0
    for size, group in itertools.groupby(spans, key=len):
        count = len(list(group))
        first = spans[done].start - units.start
        sizes = (first, done, plan.most, width // slots // word, plan.num_blocks, slots)
        operands = (None, None, plan.starts, *sizes, num_slots > 0, word, size, ROOT_COLUMNS)
        grid = (slots * -(-width // slots // ROOT_COLUMNS), count)
        launches.append(Again(Launch(roots_kernel, operands, ROOT_OPTIONS, grid), 2))
        done += count
    return launches


@fold.row_unit_roots.register("triton")
def row_unit_roots(
    terms: Tensor,
    rows: RowUnits,
    units: range,
    groups: Tensor | None = None,
    num_groups: int = 1,
) -> Tensor:
    """Roots of sum_t terms[t] over this rank's row units, for each group of rows.

    terms `[T_local, ...]` FP32 contiguous, groups `[T_local]` int64; result `[R, num_groups, ...]`.

    **Order:** as the eager op. **Rounds:** nothing. **Raises:** OperandError for other operands.
    """
    _check(terms)
    plan = UnitPlan.of(rows, units, terms.device)
    if len(terms) != plan.num_rows:
        raise OperandError("rows of terms", len(terms), plan.num_rows)
    width, size = terms.shape[1:].numel(), rows.contract.row_block
    padded = triton.next_power_of_2(num_groups)
    blocks = terms.new_empty((plan.num_blocks, padded * width))
    if plan.num_blocks:
        tile = max(32, COLUMNS // padded)
        grouped = groups is not None
        operands = (terms, groups if grouped else terms, blocks, plan.num_rows, width)
        constants = (size, padded, grouped, tile)
        grid = (plan.num_blocks, -(-width // tile))
        Launch(row_blocks_kernel, (*operands, *constants), OPTIONS, grid).start()
    spans = subtree_roots(units.start, units.stop, NUM_ROW_UNITS)
    roots = finish_roots(blocks, padded * width, plan, units, spans)
    return roots.view(len(spans), padded, *terms.shape[1:])[:, :num_groups]


@norm.head_norm_dw_leaves.register("triton")
def head_norm_dw_leaves(
    dy: Tensor,
    x: Tensor,
    r: Tensor,
    rows: RowUnits,
    sequence_units: range,
    num_feature_units: int,
) -> Tensor:
    """Gradient of norm_q or norm_k by sequence and feature unit, `[S, U_local, H]`.

    dy, x `[T_local, N_local, H]` BF16, r `[T_local, N_local, 1]` FP32, contiguous, H a power of
    two; the terms dy (x r) are made in registers.

    **Order:** as the eager op. **Rounds:** nothing. **Raises:** OperandError for other operands.
    """
    check_device(dy=dy, x=x, r=r)
    for name, tensor, dtype, last in (
        ("dy", dy, BF16, x.shape[-1]),
        ("x", x, BF16, x.shape[-1]),
        ("r", r, torch.float32, 1),
    ):
        received = tensor.dtype, tuple(tensor.shape), tensor.is_contiguous()
        if received != (dtype, (*x.shape[:-1], last), True):
            accepted = f"{dtype}, {(*x.shape[:-1], last)}, contiguous"
            raise OperandError(name, received, accepted)
    num_rows, num_heads, width = x.shape
    if width & (width - 1) or num_heads % num_feature_units:
        accepted = f"heads divisible by {num_feature_units}, a head dim that is a power of two"
        raise OperandError("heads and head dim", (num_heads, width), accepted)
    per = ROW_UNITS_PER_SEQUENCE_UNIT
    units = range(per * sequence_units.start, per * sequence_units.stop)
    plan = UnitPlan.of(rows, units, x.device)
    if num_rows != plan.num_rows:
        raise OperandError("rows of x", num_rows, plan.num_rows)
    sums = r.new_empty((plan.num_blocks, num_feature_units * width))
    if plan.num_blocks:
        head_launch(dy, x, r, sums, rows.contract.row_block, num_feature_units).start()
    spans = [range(per * unit, per * (unit + 1)) for unit in sequence_units]
    leaves = finish_roots(sums, num_feature_units * width, plan, units, spans)
    return leaves.view(len(sequence_units), num_feature_units, width)


def head_launch(
    dy: Tensor, x: Tensor, r: Tensor, sums: Tensor, row_block: int, num_feature_units: int
) -> Launch:
    """Chains of every row block and feature unit."""
    num_rows, num_heads, width = x.shape
    per_unit = num_heads // num_feature_units
    operands = (dy, x, r, sums, num_rows, num_heads, per_unit, row_block, width, HEAD_STAGES)
    grid = (-(-num_rows // row_block), num_feature_units)
    return Launch(head_blocks_kernel, operands, HEAD_OPTIONS, grid)
