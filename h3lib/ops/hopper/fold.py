"""Row folds on Hopper: sums over rows that are no products, without atomics.

    1  chains      one program a row block and column tile: rows ascending from +0, one add a row
    2  row units   row blocks of a row unit added in ascending order from +0
    3  the tree    halves of aligned spans, the lower index on the left

The terms are read once, in FP32; sums of row blocks are 1/64 of that, so steps 2 and 3 cost little.
The orders are the eager ones and every step is one IEEE add: the bits equal the eager op's on the
same terms. A row that is not of a group adds +0 to it, which changes nothing (no sum is -0).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from h3lib.contract import (
    NUM_ROW_UNITS,
    ROW_UNITS_PER_SEQUENCE_UNIT,
    OperandError,
    RowUnits,
    subtree_roots,
)
from h3lib.ops import fold, norm
from h3lib.ops.hopper.compat import check_device

COLUMNS = 256
OPTIONS = {"num_warps": 2, "enable_fp_fusion": False}


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


@triton.jit(do_not_specialize=["num_rows", "num_heads", "heads_per_unit"])
def head_blocks_kernel(
    terms, sums, num_rows, num_heads, heads_per_unit,
    ROW_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """sums[block, unit, channel] = one chain over rows (outer) and the unit's heads (inner)."""
    block, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, HEAD_DIM)
    total = tl.zeros((HEAD_DIM,), tl.float32)
    first = block * ROW_BLOCK
    steps = tl.minimum(num_rows - first, ROW_BLOCK).to(tl.int32) * heads_per_unit
    for i in range(steps):
        row, head = first + i // heads_per_unit, unit * heads_per_unit + i % heads_per_unit
        total += tl.load(terms + (row * num_heads + head) * HEAD_DIM + channel)
    tl.store(sums + (block * tl.num_programs(1) + unit) * HEAD_DIM + channel, total)


@triton.jit(do_not_specialize=["width"])
def row_units_kernel(sums, starts, units, width, COLUMNS: tl.constexpr):
    """units[u] = sums of row blocks starts[u] to starts[u + 1], ascending from +0."""
    unit = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    present = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    first = tl.load(starts + unit)
    own = sums + first.to(tl.int64) * width
    for i in range(tl.load(starts + unit + 1) - first):
        total += tl.load(own + i * width + column, mask=present, other=0.0)
    tl.store(units + unit * width + column, total, mask=present)


def _check(terms: Tensor) -> None:
    check_device(terms=terms)
    if terms.dtype != torch.float32 or not terms.is_contiguous():
        received = (terms.dtype, terms.stride())
        raise OperandError("dtype and strides of terms", received, "torch.float32, contiguous")


@functools.cache
def _row_unit_starts(rows: RowUnits, units: range, device: torch.device) -> Tensor:
    """First row block of each unit, and the end of the last; kept, so that a CUDA graph that
    replays the fold after a first eager call copies nothing from the host."""
    first = rows.row_unit_blocks(units.start).start
    edges = [rows.row_unit_blocks(u).start - first for u in units]
    edges.append(rows.row_unit_blocks(units[-1]).stop - first)
    return torch.tensor(edges, dtype=torch.int32, device=device)


def _row_units(blocks: Tensor, rows: RowUnits, units: range) -> Tensor:
    """Row blocks `[B, W]` to row units `[len(units), W]`."""
    width = blocks.shape[1]
    starts = _row_unit_starts(rows, units, blocks.device)
    folded = blocks.new_empty((len(units), width))
    grid = (len(units), triton.cdiv(width, COLUMNS))
    row_units_kernel[grid](blocks, starts, folded, width, COLUMNS=COLUMNS, **OPTIONS)
    return folded


def _halves(nodes: Tensor) -> Tensor:
    """The balanced tree over dim 0, a power of two of nodes."""
    while len(nodes) > 1:
        nodes = nodes[0::2] + nodes[1::2]
    return nodes[0]


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
    owned = len(rows.row_unit_rows(units))
    if len(terms) != owned:
        raise OperandError("rows of terms", len(terms), owned)
    width, size = terms.shape[1:].numel(), rows.contract.row_block
    padded = triton.next_power_of_2(num_groups)
    num_blocks = triton.cdiv(owned, size)
    blocks = terms.new_empty((num_blocks, padded, width))
    if num_blocks:
        tile = max(32, COLUMNS // padded)
        row_blocks_kernel[num_blocks, triton.cdiv(width, tile)](
            terms, terms if groups is None else groups, blocks, owned, width,
            ROW_BLOCK=size, GROUPS=padded, GROUPED=groups is not None, COLUMNS=tile, **OPTIONS,
        )  # fmt: skip
    folded = _row_units(blocks.view(num_blocks, padded * width), rows, units)
    roots = [
        _halves(folded[span.start - units.start : span.stop - units.start])
        for span in subtree_roots(units.start, units.stop, NUM_ROW_UNITS)
    ]
    stacked = torch.stack(roots).view(len(roots), padded, *terms.shape[1:])
    return stacked[:, :num_groups]


@norm.head_norm_dw_leaves.register("triton")
def head_norm_dw_leaves(
    terms: Tensor, rows: RowUnits, sequence_units: range, num_feature_units: int
) -> Tensor:
    """Gradient of norm_q or norm_k by sequence and feature unit, `[S, U_local, H]`.

    terms `[T_local, N_local, H]` FP32 contiguous, H a power of two.

    **Order:** as the eager op. **Rounds:** nothing. **Raises:** OperandError for other operands.
    """
    _check(terms)
    num_rows, num_heads, width = terms.shape
    if width & (width - 1) or num_heads % num_feature_units:
        accepted = f"heads divisible by {num_feature_units}, a head dim that is a power of two"
        raise OperandError("heads and head dim", (num_heads, width), accepted)
    size = rows.contract.row_block
    num_blocks = triton.cdiv(num_rows, size)
    blocks = terms.new_empty((num_blocks, num_feature_units, width))
    if num_blocks:
        head_blocks_kernel[num_blocks, num_feature_units](
            terms, blocks, num_rows, num_heads, num_heads // num_feature_units,
            ROW_BLOCK=size, HEAD_DIM=width, **OPTIONS,
        )  # fmt: skip
    per = ROW_UNITS_PER_SEQUENCE_UNIT
    units = range(per * sequence_units.start, per * sequence_units.stop)
    folded = _row_units(blocks.view(num_blocks, num_feature_units * width), rows, units)
    by_sequence = folded.view(len(sequence_units), per, num_feature_units, width)
    return _halves(by_sequence.transpose(0, 1))
