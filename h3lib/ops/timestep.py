"""Timestep embedding, FP32 throughout, replicated on every rank.

features = [cos(t f), sin(t f)],  f_i = exp(-ln(10000) i / half)
temb     = linear_2(SiLU(linear_1(features)))
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from h3lib.ops.adaln import timestep_chain_dw
from h3lib.ops.backend import check_shape, op
from h3lib.ops.gemm import linear_dx, linear_forward
from h3lib.ops.swiglu import silu, silu_derivative


def timestep_features(timestep: Tensor, freq_dim: int) -> Tensor:
    """Sinusoids of timesteps in [0, 1], unscaled: `[M]` to `[M, freq_dim]` FP32, cosines first."""
    check_shape("timestep", timestep, None)
    half = freq_dim // 2
    steps = torch.arange(half, dtype=torch.float32, device=timestep.device)
    angles = timestep.float()[:, None] * torch.exp(-math.log(10000.0) * steps / half)
    return torch.cat((torch.cos(angles), torch.sin(angles)), dim=-1)


@op
def timestep_embedding_forward(
    features: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
) -> tuple[Tensor, Tensor]:
    """temb `[M, E]` FP32 from features `[M, f]`; also the input of SiLU, kept for the backward.

    w1 `[E1, f]`, w2 `[E, E1]`. **Order:** chains. **Rounds:** nothing below FP32.
    """
    return embed(features, w1, b1, w2, b2, "eager")


def embed(
    features: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
    """The forward with the linears of a back end."""
    inner = linear_forward(features, w1, b1, backend=backend)
    return linear_forward(silu(inner), w2, b2, backend=backend), inner


@op
def timestep_embedding_backward(
    dtemb: Tensor, features: Tensor, inner: Tensor, w2: Tensor
) -> dict[str, Tensor]:
    """Gradients of both linears by their checkpoint names.

    **Order:** dw, dbias: chains over timesteps, ascending; dx: chain over outputs.
    """
    return embed_backward(dtemb, features, inner, w2, "eager")


def embed_backward(
    dtemb: Tensor, features: Tensor, inner: Tensor, w2: Tensor, backend: str
) -> dict[str, Tensor]:
    """The backward with the linears of a back end."""
    dw2, db2 = timestep_chain_dw(dtemb, silu(inner), backend=backend)
    dinner = linear_dx(dtemb, w2, backend=backend) * silu_derivative(inner)
    dw1, db1 = timestep_chain_dw(dinner, features, backend=backend)
    return {
        "linear_1.weight": dw1,
        "linear_1.bias": db1,
        "linear_2.weight": dw2,
        "linear_2.bias": db2,
    }
