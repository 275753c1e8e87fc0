"""AdaLN: the table from the timestep embedding, its per-row gather, modulation, gated residual.

    table  m = bf16(bf16(SiLU(temb)) W^T + b), viewed [3M, 6, D]: row = timestep * 3 + modality
    in     a = bf16(bf16(h bf16(1 + scale[row])) + shift[row])
    out    x' = bf16(x + bf16(gate[row] y))

The six chunks are shift, scale, gate before attention, then the same three before the FFN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3lib.contract import NUM_MODALITIES, OperandError
from h3lib.ops.backend import accumulator, check_operands, check_shape, check_shapes, op
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
def modulate_forward(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """a = bf16(bf16(h bf16(1 + scale)) + shift); all `[T, D]`, shift and scale gathered by row.

    **Rounds:** 1 + scale, the product, the sum.
    """
    check_operands(h=h, shift=shift, scale=scale)
    check_shapes(h=h, shift=shift, scale=scale)
    return h * (1 + scale) + shift


@op
def modulate_backward(da: Tensor, h: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """dh = bf16(da bf16(1 + scale)), and the rows' terms of (dshift, dscale) = (da, da h).

    All `[T, D]`; terms `[T, 2, D]` FP32, not rounded.
    """
    check_operands(da=da, h=h, scale=scale)
    check_shapes(da=da, h=h, scale=scale)
    daf = da.to(accumulator(da))
    return da * (1 + scale), torch.stack((daf, daf * h.to(daf.dtype)), dim=1)


@op
def gated_residual_forward(x: Tensor, gate: Tensor, y: Tensor) -> Tensor:
    """x' = bf16(x + bf16(gate y)); all `[T, D]`, the gate gathered by row, used as it is."""
    check_operands(x=x, gate=gate, y=y)
    check_shapes(x=x, gate=gate, y=y)
    return x + gate * y


@op
def gated_residual_backward(dx: Tensor, gate: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """dy = bf16(gate dx), and the rows' terms of dgate = dx y.

    dx is the complete gradient of the sum, `[T, D]`; terms `[T, D]` FP32, not rounded.
    """
    check_operands(dx=dx, gate=gate, y=y)
    check_shapes(dx=dx, gate=gate, y=y)
    accumulate = accumulator(dx)
    return gate * dx, dx.to(accumulate) * y.to(accumulate)


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
