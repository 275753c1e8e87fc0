"""Products: the chain, the unit tree and the row fold.

    chain       C[m, n] = ((+0 + a[m,0] b[0,n]) + a[m,1] b[1,n]) + ...
    unit tree   one chain for each feature unit of the reduced axis, added by `ops/tree.py`
    row fold    dw[n, k] = the tree over sequence units of chains over their rows of dy[t,n] x[t,k]

BF16 operands have exact products in FP32 (short of FP32's own overflow and underflow, where it
matters whether the CPU fuses: peers must agree on its capability). FP32 operands: the product is
rounded, then added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from h3lib.contract import NUM_SEQUENCE_UNITS, OperandError, RowUnits
from h3lib.ops.backend import accumulator, check_operands, check_out, check_shape, op
from h3lib.ops.tree import partial_roots


def chain(a: Tensor, b: Tensor, into: Tensor | None = None) -> Tensor:
    """C = sum_k a[..., m, k] * b[..., k, n], unrounded; `into` is a chain to go on with, in place.

    a `[..., M, K]`, b `[..., K, N]` of one dtype; result `[..., M, N]` in the accumulator's dtype.

    **Order:** ascending k from +0, one accumulator. **Rounds:** nothing but the accumulator.
    """
    dtype = accumulator(a)
    exact = a.dtype == b.dtype == torch.bfloat16
    a_steps = a.transpose(-1, -2).to(dtype).contiguous().unsqueeze(-1).unbind(-3)
    b_steps = b.to(dtype).contiguous().unsqueeze(-2).unbind(-3)
    if into is None:
        shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        into = torch.zeros(shape, dtype=dtype, device=a.device)
    if into.numel() == 0:
        return into
    product = torch.empty_like(into) if not exact else None
    for a_k, b_k in zip(a_steps, b_steps, strict=True):
        if exact:  # with or without fused multiply-add: one rounding, that of the sum
            into.addcmul_(a_k, b_k)
        else:
            into.add_(torch.mul(a_k, b_k, out=product))
    return into


def check_roots(out: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`out`, which roots `[R, T, N]` can be made in, each contiguous. **Raises:** OperandError."""
    check_shape("out", out, *shape)
    for root in out:
        check_out(root, shape[1:], dtype)
    return out


def _made(result: Tensor, out: Tensor | None) -> Tensor:
    """The result, in `out` if that is given."""
    if out is None:
        return result
    check_out(out, result.shape, result.dtype)
    return out.copy_(result)


@op
def linear_forward(
    x: Tensor, w: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """y = x @ w^T + bias, the reduced axis whole on this rank (column-parallel or replicated).

    x `[T, K]`, w `[N, K]` (local `[N_local, K]`), bias `[N]`; y `[T, N]` in x's dtype, made in
    `out` if that is given.

    **Order:** chain over K, then the bias. **Rounds:** once, to x's dtype.
    """
    check_operands(x=x, w=w)
    check_shape("x", x, None, None)
    check_shape("w", w, None, x.shape[-1])
    if bias is not None:
        check_shape("bias", bias, len(w))
        if bias.dtype not in (x.dtype, accumulator(x)):
            raise OperandError("dtype of bias", bias.dtype, f"{x.dtype}, {accumulator(x)}")
    y = chain(x, w.transpose(0, 1))
    if bias is not None:
        y = y + bias.to(y.dtype)
    return _made(y.to(x.dtype), out)


@op
def linear_dx(dy: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """dx = dy @ w, the outputs whole on this rank (row-parallel or replicated).

    dy `[T, N]`, w `[N, K]` (local `[N, K_local]`); dx `[T, K]` in dy's dtype, made in `out` if that
    is given.

    **Order:** chain over N. **Rounds:** once, to dy's dtype.
    """
    check_operands(dy=dy, w=w)
    check_shape("w", w, dy.shape[-1], None)
    return _made(chain(dy, w).to(dy.dtype), out)


@op
def unit_tree_roots(
    parts: list[tuple[Tensor, Tensor]], units: range, num_units: int, out: Tensor | None = None
) -> Tensor:
    """Roots of sum_parts a @ b, the reduced axis cut into feature units, of which `units` are here.

    Each part is (a `[T, K_local]`, b `[K_local, N]`); result `[R, T, N]`, R maximal subtree roots,
    made in `out` if that is given. One part is to_out or ff-down; three are dx of q, k, v; two are
    dx of value and gate.

    **Order:** leaf j = one chain over block j of the first part, then of the next; leaves in the
    unit tree. **Rounds:** nothing.
    """
    if not parts or not units:
        raise OperandError("parts and units", (len(parts), units), "at least one of each")
    check_operands(
        **{
            f"{name}{i}": t
            for i, part in enumerate(parts)
            for name, t in zip("ab", part, strict=True)
        }
    )
    for a, b in parts:
        check_shape("a", a, len(parts[0][0]), None)
        check_shape("b", b, a.shape[-1], None)
        if a.shape[-1] % len(units):
            raise OperandError(
                "reduced axis", a.shape[-1], f"a multiple of the {len(units)} units here"
            )

    def leaf(unit: int) -> Tensor:
        total = None
        for a, b in parts:
            width = a.shape[-1] // len(units)
            block = slice((unit - units.start) * width, (unit - units.start + 1) * width)
            total = chain(a[:, block], b[block], into=total)
        return total

    roots = partial_roots(leaf, units, num_units)
    return roots if out is None else check_roots(out, roots.shape, roots.dtype).copy_(roots)


@op
def row_fold_roots(dy: Tensor, x: Tensor, rows: RowUnits, units: range) -> Tensor:
    """Roots of dw = dy^T @ x over this rank's sequence units.

    dy `[T_local, N]`, x `[T_local, K]`, the rows of the sequence units `units`, in logical order;
    result `[R, N, K]`.

    **Order:** chain over the rows of each sequence unit, then the unit tree. **Rounds:** nothing.
    """
    check_operands(dy=dy, x=x)
    owned = rows.sequence_unit_rows(units)
    check_shape("dy", dy, len(owned), None)
    check_shape("x", x, len(owned), None)

    def leaf(unit: int) -> Tensor:
        r = rows.sequence_unit_rows(range(unit, unit + 1))
        part = slice(r.start - owned.start, r.stop - owned.start) if r else slice(0)
        return chain(dy[part].transpose(0, 1), x[part])

    return partial_roots(leaf, units, NUM_SEQUENCE_UNITS)


@op
def unit_tree_product(
    parts: list[tuple[Tensor, Tensor]], num_units: int, dtype: torch.dtype
) -> Tensor:
    """sum_parts a @ b, all feature units here: parts as in `unit_tree_roots`, result `[T, N]`.

    **Order:** as `unit_tree_roots`. **Rounds:** once, to `dtype`, after the root. A kernel can
    round where it finishes the tree, so that no FP32 partial is written.
    """
    return unit_tree_roots(parts, range(num_units), num_units)[0].to(dtype)


@op
def row_fold_product(dy: Tensor, x: Tensor, rows: RowUnits, dtype: torch.dtype) -> Tensor:
    """dw = dy^T @ x, all rows here: dy `[T, N]`, x `[T, K]`, result `[N, K]`.

    **Order:** as `row_fold_roots`. **Rounds:** once, to `dtype`, after the root.
    """
    return row_fold_roots(dy, x, rows, range(NUM_SEQUENCE_UNITS))[0].to(dtype)
