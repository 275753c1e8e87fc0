"""Row fold over row units: every reduction over rows that is not a product.

Rows are added one at a time inside a row block, row blocks of a row unit in ascending order, and
the 64 row units in a balanced tree (`ops/tree.py`). Gradients of norm weights, biases and the
AdaLN table use it. Terms are FP32 and not rounded; only the root is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3lib.contract import NUM_ROW_UNITS, OperandError, RowUnits
from h3lib.ops.backend import check_shape, op
from h3lib.ops.tree import partial_roots


def fold_row_blocks(
    terms: Tensor, rows: RowUnits, groups: Tensor | None = None, num_groups: int = 1
) -> Tensor:
    """Chains over the rows of each row block, `[B, num_groups, ...]`, from terms `[T_local, ...]`.

    `groups` `[T_local]` says which sum a row belongs to (a row of the AdaLN table). The first row
    starts a row block.

    **Order:** ascending rows from +0, restricted to the rows of a group. **Rounds:** nothing.
    """
    size = rows.contract.row_block
    num_blocks = -(-len(terms) // size)
    blocks = torch.arange(num_blocks, device=terms.device)
    total = terms.new_zeros((num_blocks, num_groups, *terms.shape[1:]))
    for i in range(min(size, len(terms))):
        step = terms[i::size]
        at = blocks[: len(step)]
        group = torch.zeros_like(at) if groups is None else groups[i::size]
        total[at, group] = total[at, group] + step
    return total


def fold_row_units(blocks: Tensor, rows: RowUnits, units: range) -> list[Tensor]:
    """Row blocks of each row unit added in ascending order from +0; absent row units are +0.

    blocks `[B, ...]`, the row blocks of the row units `units`; one `[...]` for each unit.
    """
    first = rows.row_unit_blocks(units.start).start
    folded = []
    for unit in units:
        total = blocks.new_zeros(blocks.shape[1:])
        for block in rows.row_unit_blocks(unit):
            total = total + blocks[block - first]
        folded.append(total)
    return folded


@op
def row_unit_roots(
    terms: Tensor, rows: RowUnits, units: range, groups: Tensor | None = None, num_groups: int = 1
) -> Tensor:
    """Roots of sum_t terms[t] over this rank's row units, for each group of rows.

    terms `[T_local, ...]` FP32, the rows of the row units `units`; result `[R, num_groups, ...]`.

    **Order:** chain inside a row block, row blocks of a row unit ascending, tree over the 64 row
    units. **Rounds:** nothing.
    """
    check_shape("terms", terms, len(rows.row_unit_rows(units)), *terms.shape[1:])
    if terms.dtype not in (torch.float32, torch.float64):
        raise OperandError("dtype of terms", terms.dtype, "torch.float32, torch.float64")
    if groups is not None:
        check_shape("groups", groups, len(terms))
        if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
            outside = groups[(groups < 0) | (groups >= num_groups)][0].item()
            raise OperandError("group of a row", outside, f"0 to {num_groups - 1}")
    folded = fold_row_units(fold_row_blocks(terms, rows, groups, num_groups), rows, units)
    return partial_roots(lambda unit: folded[unit - units.start], units, NUM_ROW_UNITS)
