"""AdaLN: the table from the timestep embedding, its per-row gather, modulation, gated residual.

    table  m = bf16(bf16(SiLU(temb)) W^T + b), viewed [3M, 6, D]: row = timestep * 3 + modality
    in     a = bf16(bf16(h bf16(1 + scale[row])) + shift[row])
    out    x' = bf16(x + bf16(gate[row] y))

No op gathers the table: each takes its columns `[G, D]` and the row of the table of each row. Nor
does one keep the FP32 terms of a row fold: a backward op gives what it folds them to.

The six chunks are shift, scale, gate before attention, then the same three before the FFN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3lib.contract import NUM_MODALITIES, OperandError, RowUnits
from h3lib.ops.backend import accumulator, check_operands, check_shape, check_shapes, op
from h3lib.ops.fold import row_unit_roots
from h3lib.ops.swiglu import silu, silu_derivative


def table_rows(timestep_indices: Tensor, token_tags: Tensor, num_timesteps: int) -> Tensor:
    """Row of the AdaLN table for each packed row, `[T]`: timestep * 3 + tag, padding's tag as 0.

    **Raises:** OperandError for a tag outside -1 to 2 or a timestep index that is not one.
    """
    check_shapes(timestep_indices=timestep_indices, token_tags=token_tags)
    limits = {
        "timestep index": (timestep_indices, 0, num_timesteps - 1),
        "token tag": (token_tags, -1, NUM_MODALITIES - 1),
    }
    for name, (values, least, most) in limits.items():
        outside = values[(values < least) | (values > most)]
        if len(outside):
            raise OperandError(name, outside[0].item(), f"{least} to {most}")
    return timestep_indices * NUM_MODALITIES + token_tags.clamp(min=0)


@op
def adaln_input_forward(temb: Tensor, dtype: torch.dtype) -> Tensor:
    """s = bf16(SiLU(temb)): SiLU in FP32 on the FP32 embedding `[M, E]`, then one rounding."""
    _check_embedding(temb)
    return silu(temb).to(dtype)


@op
def adaln_input_backward(ds: Tensor, temb: Tensor) -> Tensor:
    """dtemb = ds SiLU'(temb), FP32 `[M, E]`, not rounded."""
    _check_embedding(temb)
    check_shapes(temb=temb, ds=ds)
    return ds.to(temb.dtype) * silu_derivative(temb)


def _check_embedding(temb: Tensor) -> None:
    if temb.dtype not in (torch.float32, torch.float64):
        raise OperandError("dtype of temb", temb.dtype, "torch.float32, torch.float64")


@op
def modulate_forward(h: Tensor, shift: Tensor, scale: Tensor, table_rows: Tensor) -> Tensor:
    """a = bf16(bf16(h bf16(1 + scale[row])) + shift[row]).

    h `[T, D]`; shift, scale `[G, D]`, columns of the table's G rows; table_rows `[T]`: each row's.

    **Rounds:** 1 + scale, the product, the sum.
    """
    check_operands(h=h, shift=shift, scale=scale)
    _check_table(h, table_rows, shift=shift, scale=scale)
    return h * (1 + scale)[table_rows] + shift[table_rows]


@op
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
    """dh = bf16(da bf16(1 + scale[row])) of a = modulation(h), h = norm(x), and both row folds.

    da, x `[T, D]`, w `[D]`, r `[T, 1]` of the norm, scale `[G, D]`, table_rows `[T]`: the rows of
    the row units `units`. Gives dh `[T, D]`; FP32 roots `[R, G, 2, D]` of the table's (shift,
    scale), whose terms are da and da h on the rounded h; FP32 roots `[R, D]` of dw, terms dh xhat.

    **Order:** both as `row_unit_roots`, the table's restricted to the rows that use its row.
    **Rounds:** dh once (and h, as the forward did); the terms and the roots not.
    """
    check_operands(da=da, x=x, w=w, scale=scale)
    check_shapes(da=da, x=x)
    check_shape("w", w, x.shape[-1])
    check_shape("r", r, len(x), 1)
    _check_table(da, table_rows, scale=scale)
    xhat, daf = x.to(r.dtype) * r, da.to(r.dtype)
    h = (xhat * w.to(r.dtype)).to(x.dtype)
    dh = da * (1 + scale)[table_rows]
    terms = torch.stack((daf, daf * h.to(r.dtype)), dim=1)
    table = row_unit_roots(terms, rows, units, table_rows, len(scale))
    return dh, table, row_unit_roots(dh.to(r.dtype) * xhat, rows, units)[:, 0]


@op
def gated_residual_forward(x: Tensor, gate: Tensor, y: Tensor, table_rows: Tensor) -> Tensor:
    """x' = bf16(x + bf16(gate[row] y)); x, y `[T, D]`, gate `[G, D]`, table_rows `[T]`."""
    check_operands(x=x, gate=gate, y=y)
    check_shapes(x=x, y=y)
    _check_table(x, table_rows, gate=gate)
    return x + gate[table_rows] * y


@op
def gated_residual_backward(
    dx: Tensor, gate: Tensor, y: Tensor, table_rows: Tensor, rows: RowUnits, units: range
) -> tuple[Tensor, Tensor]:
    """dy = bf16(gate[row] dx), and the row fold of dgate, whose terms are dx y.

    dx `[T, D]` is the complete gradient of the sum; y `[T, D]`, gate `[G, D]`, table_rows `[T]`:
    the rows of the row units `units`. Gives dy and FP32 roots `[R, G, D]`.

    **Order:** as `row_unit_roots`, restricted to the rows that use a table row. **Rounds:** dy
    once; the terms and the roots not.
    """
    check_operands(dx=dx, gate=gate, y=y)
    check_shapes(dx=dx, y=y)
    _check_table(dx, table_rows, gate=gate)
    accumulate = accumulator(dx)
    terms = dx.to(accumulate) * y.to(accumulate)
    return gate[table_rows] * dx, row_unit_roots(terms, rows, units, table_rows, len(gate))


def _check_table(like: Tensor, table_rows: Tensor, **columns: Tensor) -> None:
    """Columns of the table `[G, D]`, and a row of it for each row of `like`."""
    for name, column in columns.items():
        check_shape(name, column, len(next(iter(columns.values()))), like.shape[-1])
    check_shape("table_rows", table_rows, len(like))
    num_rows = len(next(iter(columns.values())))
    outside = table_rows[(table_rows < 0) | (table_rows >= num_rows)]
    if len(outside):
        raise OperandError("table row", outside[0].item(), f"0 to {num_rows - 1}")


@op
def timestep_chain_dw(dm: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """dw = sum_i dm[i]^T s[i] and dbias = sum_i dm[i] of a linear whose rows are timesteps.

    dm `[M, C]`, s `[M, E]`; FP32 roots dw `[C, E]`, dbias `[C]`, not rounded.

    **Order:** chain over timesteps, ascending, from +0.
    """
    check_operands(dm=dm, s=s)
    check_shape("s", s, len(dm), None)
    dmf, sf = dm.to(accumulator(dm)), s.to(accumulator(s))
    dw = dmf.new_zeros((dm.shape[1], s.shape[1]))
    dbias = dmf.new_zeros(dm.shape[1])
    for dm_i, s_i in zip(dmf, sf, strict=True):
        dw += dm_i[:, None] * s_i
        dbias += dm_i
    return dw, dbias


@op
def timestep_chain_product(dm: Tensor, s: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dw and dbias of `timestep_chain_dw`, rounded where they are finished.

    **Order:** a chain over the timesteps, ascending. **Rounds:** once, to `dtype`.
    """
    return tuple(root.to(dtype) for root in timestep_chain_dw(dm, s))
