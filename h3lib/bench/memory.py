"""Closed form of what one rank's block holds between its forward and its backward, by layout.

BF16 tensors that have a row for each row of the rank alone; tables, FP32 statistics of rows and the
output are left out. What is measured is in the list `memory` of `h3lib bench layouts`.
"""

from __future__ import annotations

from h3lib.contract import PUBLISHED, ModelSize, model_size
from h3lib.layout import Layout, Ownership

BF16, FP32 = 2, 4


def saved_parts(layout: Layout, rows: int, size: ModelSize | None = None) -> dict[str, int]:
    """Closed form of what the rank with most rows saves, BF16 tensors alone, by where it is saved.

    K and V of all rows, gathered, are apart: a ring that meets shards in order keeps none of them.
    """
    size = size or model_size("full")
    owner, tp = Ownership.of(layout, rows, PUBLISHED), layout.tp
    shard, own = _most(owner.shard_row_cuts()), _most(owner.row_cuts())
    heads, ffn = size.inner_dim // tp, size.ffn_dim // tp
    return {
        "residual stream": BF16 * 3 * own * size.hidden_size,  # after attention, and both results
        "inputs of products": BF16 * 2 * shard * size.hidden_size,
        "heads": BF16 * 6 * shard * heads,  # q, k before the norm and after; v; out
        "feed-forward": BF16 * 3 * shard * ffn,
        "K and V gathered": BF16 * 2 * rows * heads if layout.cp > 1 else 0,
    }


def own_output(layout: Layout, rows: int, size: ModelSize | None = None) -> int:
    """Bytes of the block's output on the rank with most rows."""
    size = size or model_size("full")
    return BF16 * _most(Ownership.of(layout, rows, PUBLISHED).row_cuts()) * size.hidden_size


def gathered_in_backward(layout: Layout, rows: int, size: ModelSize | None = None) -> int:
    """Bytes of Q, dO, log-sum-exp and delta of all rows, which dK and dV are made from; 0 if
    nothing is gathered."""
    size = size or model_size("full")
    if layout.cp == 1:
        return 0
    width, heads = size.inner_dim // layout.tp, size.num_attention_heads // layout.tp
    return rows * (2 * BF16 * width + 2 * FP32 * heads)


def _most(cuts: tuple[int, ...]) -> int:
    return max(b - a for a, b in zip(cuts, cuts[1:], strict=False))
