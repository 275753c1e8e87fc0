"""RMSNorm: y = bf16(x r w), r = 1 / sqrt(tree(x x) / n + eps), over the last dim of width n.

Used for hidden rows (n = D) and, per head, for q and k (n = H, one weight for all heads).
Backward, with xhat = x r and g = dy w:  dx = bf16(r (g - xhat tree(g xhat) / n)); the term of dw
in a row is dy xhat, FP32, folded as `ops/fold.py` says or, for q and k, `head_norm_dw_leaves`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3lib.contract import ROW_UNITS_PER_SEQUENCE_UNIT, OperandError, RowUnits
from h3lib.ops.backend import accumulator, check_operands, check_shape, op
from h3lib.ops.fold import fold_row_units
from h3lib.ops.tree import in_row_tree, partial_roots


def _mean(x: Tensor) -> Tensor:
    """tree(x) / n by an IEEE division: by a number, CUDA multiplies with the reciprocal."""
    return in_row_tree(x) / x.new_full((1,), x.shape[-1])


def _square_root(x: Tensor) -> Tensor:
    """IEEE square root, from FP64: on CPU the library's FP32 one is not (0.6 % of values)."""
    return torch.sqrt(x.double()).to(x.dtype)


@op
def rms_norm_forward(x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y = (x r) w; returns (y, r) with r `[..., 1]` FP32.

    x `[..., n]`, w `[n]`; y like x.

    **Order:** in-row tree. **Rounds:** y once.
    """
    check_operands(x=x, w=w)
    check_shape("w", w, x.shape[-1])
    xf = x.to(accumulator(x))
    r = 1 / _square_root(_mean(xf * xf) + eps)
    return (xf * r * w.to(xf.dtype)).to(x.dtype), r


@op
def rms_norm_backward(
    dy: Tensor, x: Tensor, w: Tensor, r: Tensor, dx0: Tensor | None = None
) -> Tensor:
    """dx = r (g - xhat mean(g xhat)); with another gradient dx0 of x, bf16(dx0 + bf16(that)).

    dy, x, dx0 `[..., n]`; dx like x. The term of dw in a row is `norm_dw_terms`.

    **Order:** in-row tree. **Rounds:** dx once, then the sum.
    """
    check_operands(dy=dy, x=x, w=w)
    check_shape("w", w, x.shape[-1])
    check_shape("dy", dy, *x.shape)
    check_shape("r", r, *x.shape[:-1], 1)
    xhat = x.to(r.dtype) * r
    g = dy.to(r.dtype) * w.to(r.dtype)
    dx = (r * (g - xhat * _mean(g * xhat))).to(x.dtype)
    if dx0 is None:
        return dx
    check_operands(x=x, dx0=dx0)
    check_shape("dx0", dx0, *x.shape)
    return dx0 + dx


def norm_dw_terms(dy: Tensor, x: Tensor, r: Tensor) -> Tensor:
    """The rows' terms of dw, dy xhat, in r's dtype, not rounded; all `[..., n]`, r `[..., 1]`."""
    check_operands(dy=dy, x=x)
    check_shape("dy", dy, *x.shape)
    check_shape("r", r, *x.shape[:-1], 1)
    return dy.to(r.dtype) * (x.to(r.dtype) * r)


@op
def head_norm_dw_leaves(
    dy: Tensor,
    x: Tensor,
    r: Tensor,
    rows: RowUnits,
    sequence_units: range,
    num_feature_units: int,
) -> Tensor:
    """Gradient of norm_q or norm_k for each sequence unit and feature unit here, `[S, U_local, H]`.

    dy, x `[T_local, N_local, H]`, r `[T_local, N_local, 1]`: the rows of the sequence units, heads
    of the feature units. Terms: `norm_dw_terms`.

    **Order:** a leaf is (row block, feature unit): rows outer, heads inner, one chain; row blocks
    of a row unit ascending; the eight row units of a sequence unit in a tree. The caller adds
    feature units, then sequence units, each in the unit tree. **Rounds:** nothing.
    """
    check_shape("x", x, len(rows.sequence_unit_rows(sequence_units)), None, None)
    terms = norm_dw_terms(dy, x, r)
    num_rows, num_heads, width = terms.shape
    if num_heads % num_feature_units:
        raise OperandError("heads", num_heads, f"a multiple of the {num_feature_units} units here")
    size = rows.contract.row_block
    by_unit = terms.reshape(num_rows, num_feature_units, num_heads // num_feature_units, width)
    blocks = terms.new_zeros((-(-num_rows // size), num_feature_units, width))
    for i in range(min(size, num_rows)):
        step = by_unit[i::size]
        for head in step.unbind(2):
            blocks[: len(step)] += head
    per = ROW_UNITS_PER_SEQUENCE_UNIT
    first = rows.sequence_unit_blocks(sequence_units.start).start
    leaves = []
    for unit in sequence_units:
        own = rows.sequence_unit_blocks(unit)
        part = blocks[own.start - first : own.stop - first]
        folded = fold_row_units(part, rows, range(per * unit, per * (unit + 1)))
        leaves.append(partial_roots(folded.__getitem__, range(per), per)[0])
    return torch.stack(leaves)
