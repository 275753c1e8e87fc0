"""An all-reduce without an order: partial sums as integers, which add the same in any order.

    M = max over all leaves and elements |leaf|         exact, an all-reduce of maxima
    s = 31 - log2(U) - e,  where 2^(e-1) <= M < 2^e     U leaves cannot overflow 32 bits
    q = round(leaf * 2^s) to int32, half to even        at each leaf, before anything is added
    root = fl32(sum(q) * 2^-s)                          an all-reduce of int32 by any algorithm

Integer addition is associative, so one result holds for any order, algorithm, number of ranks and
ownership of leaves, and the sum may be left to a stock library. It is *another* result than that of
`h3-parallel-v1`: this arithmetic has a contract id of its own, and the block never uses it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from h3lib.contract import OperandError

CONTRACT_ID = "h3-order-free-v1"


def order_free_all_reduce(
    leaves: Tensor, num_leaves: int, dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> Tensor:
    """sum_u leaf_u over the ranks of `group` (None: this process alone), the same on every rank.

    leaves `[num_leaves, ...]`, local `[U_local, ...]` FP32, each leaf on one rank; result `[...]`.

    **Order:** none. **Rounds:** each leaf to a multiple of 2^-s, the sum to FP32, then to `dtype`.
    **Raises:** OperandError on every rank for leaves that are not FP32, a number of leaves that is
    no power of two, more leaves here than there are, or a value that is not finite.
    """
    if leaves.dtype != torch.float32:
        raise OperandError("dtype of leaves", leaves.dtype, torch.float32)
    if num_leaves < 1 or num_leaves & (num_leaves - 1) or len(leaves) > num_leaves:
        received = (len(leaves), num_leaves)
        raise OperandError("leaves here and in all", received, "at most a power of two")
    largest = leaves.abs().amax() if leaves.numel() else leaves.new_zeros(())
    largest = largest.nan_to_num(nan=torch.inf, posinf=torch.inf)  # a library's max may drop a NaN
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    if not torch.isfinite(largest):
        raise OperandError("largest leaf", largest.item(), "a finite number")
    scale = scale_of(largest, num_leaves)
    total = to_integers(leaves, scale).sum(0, dtype=torch.int32)
    if group is not None:
        dist.all_reduce(total, dist.ReduceOp.SUM, group)
    return from_integers(total, scale).to(dtype)


def scale_of(largest: Tensor, num_leaves: int) -> int:
    """s: the power of two by which leaves up to `largest` are multiplied; 0 where all are zero."""
    bits = 31 - (num_leaves.bit_length() - 1)
    return bits - int(torch.frexp(largest).exponent) if largest > 0 else 0


def to_integers(leaves: Tensor, scale: int) -> Tensor:
    """round(leaf * 2^scale) as int32, half to even; exact in FP64 but for the rounding."""
    return torch.round(leaves.double() * 2.0**scale).to(torch.int32)


def from_integers(total: Tensor, scale: int) -> Tensor:
    """fl32(total * 2^-scale): one rounding."""
    return (total.double() * 2.0**-scale).float()
