"""dw and dbias of the linears at the ends of the model: a row fold over row units of products.

    dw = sum_i dy[i]^T x[i],   dbias = sum_i dy[i]     over the rows of one index set, ascending

The input projections, the context embedder and the output heads use it; a rank holds the rows of
the index set that are among its row units.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3lib.contract import NUM_ROW_UNITS, RowUnits, subtree_roots
from h3lib.ops.adaln import timestep_chain_dw
from h3lib.ops.backend import accumulator, check_operands, check_shape, op
from h3lib.ops.tree import tree_sum


@op
def row_unit_product_roots(
    dy: Tensor, x: Tensor, at: Tensor, rows: RowUnits, units: range
) -> Tensor:
    """Roots of [dw, dbias] `[R, N, K + 1]` over this rank's row units.

    dy `[n, N]`, x `[n, K]` of one dtype, the rows of the index set that are here; `at` `[n]` int64:
    the logical row of each, ascending.

    **Order:** chain inside a row block (FP32: the product rounded, then added), restricted to the
    rows of the index set; row blocks of a row unit ascending; tree over the 64 row units.
    **Rounds:** nothing. **Raises:** OperandError for operands that do not fit each other.
    """
    return product_roots(dy, x, at, rows, units, "eager")


def product_roots(
    dy: Tensor, x: Tensor, at: Tensor, rows: RowUnits, units: range, backend: str
) -> Tensor:
    """The order above, with the back end's own chain over the rows of a row block."""
    check_operands(dy=dy, x=x)
    check_shape("dy", dy, len(at), None)
    check_shape("x", x, len(at), None)
    blocks = range(rows.row_unit_blocks(units[0]).start, rows.row_unit_blocks(units[-1]).stop)
    starts = [rows.block_rows(range(block, block + 1)).start for block in blocks]
    edges = torch.tensor([*starts, rows.num_rows], device=at.device)
    cuts = torch.searchsorted(at, edges).tolist()

    def row_unit(unit: int) -> Tensor | None:
        total = None
        for block in rows.row_unit_blocks(unit):
            part = slice(*cuts[block - blocks.start : block - blocks.start + 2])
            if part.start < part.stop:
                dw, dbias = timestep_chain_dw(dy[part], x[part], backend=backend)
                leaf = torch.cat((dw, dbias[:, None]), dim=1)
                total = leaf if total is None else total + leaf
        return total

    def node(span: range) -> Tensor | None:
        return row_unit(span.start) if len(span) == 1 else None

    roots = [tree_sum(node, span) for span in subtree_roots(units[0], units[-1] + 1, NUM_ROW_UNITS)]
    absent = dy.new_zeros((dy.shape[1], x.shape[1] + 1), dtype=accumulator(dy))
    return torch.stack([absent if root is None else root for root in roots])
