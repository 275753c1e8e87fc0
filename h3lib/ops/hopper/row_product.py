"""The ends of the model on Hopper: `row_unit_product_roots` and the timestep embedding.

Compositions of registered kernels: the FP32 chain of `gemm_chain.py` (one fused multiply-add a
step) and the chain over rows of `gemm_fold.py` (product rounded, then added).
"""

from __future__ import annotations

from torch import Tensor

from h3lib.contract import RowUnits
from h3lib.ops import timestep
from h3lib.ops.row_product import product_roots, row_unit_product_roots


@row_unit_product_roots.register("triton")
def row_unit_product_roots_hopper(
    dy: Tensor, x: Tensor, at: Tensor, rows: RowUnits, units: range
) -> Tensor:
    """Roots of [dw, dbias] `[R, N, K + 1]`. **Order:**, **Rounds:** as the eager definition."""
    return product_roots(dy.contiguous(), x.contiguous(), at, rows, units, "triton")


@timestep.timestep_embedding_forward.register("triton")
def timestep_embedding_forward_hopper(
    features: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
) -> tuple[Tensor, Tensor]:
    """temb and the input of SiLU, FP32. **Order:** chains, a fused multiply-add a step."""
    return timestep.embed(features, w1, b1, w2, b2, "triton")


@timestep.timestep_embedding_backward.register("triton")
def timestep_embedding_backward_hopper(
    dtemb: Tensor, features: Tensor, inner: Tensor, w2: Tensor
) -> dict[str, Tensor]:
    """Gradients of both linears. **Order:** as the eager definition."""
    return timestep.embed_backward(dtemb, features, inner, w2, "triton")
