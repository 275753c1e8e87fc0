"""What the three Hopper attention kernels share: the door, descriptors, one accumulator layout.

A tile is 64 rows of one head, owned by one warpgroup of four warps; a block is 128 keys (forward,
dq) or 64 queries (dk, dv). Tensors `[T, N, 128]` are read as `[T, N * 128]` through TMA with any
row stride: rows past the end arrive as zero and are never written, so every tail is masked where a
zero is not neutral. The products are `wgmma` with k = 16 a step, in ascending order into one FP32
accumulator, whatever the block: block sizes here are speed, only the places where the forward
rescales (every 128 keys) are bits.

Exponent and logarithm are `ex2.approx.ftz` and `lg2.approx.ftz`, pinned with the kernels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from h3lib.contract import Contract, ContractError, OperandError
from h3lib.ops.hopper.compat import TensorDescriptor, check_device, gl, gluon, tensor_map

HEAD_DIM = 128
KEY_BLOCK = 128
TILE_ROWS = 64


def _fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()


# What the kernels read: constants, and the accumulator's layout with those that follow from it.
SCORE_SCALE = gl.constexpr(_fp32(math.log2(math.e) / math.sqrt(HEAD_DIM)))
GRADIENT_SCALE = gl.constexpr(_fp32(1 / math.sqrt(HEAD_DIM)))
ACC = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
)
A_OPERAND = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
ROW = gl.constexpr(gl.SliceLayout(1, ACC.value))
COLUMN = gl.constexpr(gl.SliceLayout(0, ACC.value))

FP32_ROW = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def heads_map(name: str, x: Tensor, rows: int) -> TensorDescriptor:
    """TMA boxes of `rows` rows of one head over `[T, N, 128]`, any row stride."""
    width = x.shape[1] * HEAD_DIM
    stride = x.stride(0) if len(x) > 1 else width
    return tensor_map(name, x, [len(x), width], [stride, 1], [rows, HEAD_DIM])


def statistics_map(x: Tensor) -> TensorDescriptor:
    """TMA boxes of 64 numbers of a contiguous FP32 tensor."""
    return TensorDescriptor(x, [x.numel()], [1], [TILE_ROWS], FP32_ROW)


def check_attention(
    contract: Contract, queries: dict[str, Tensor], keys: dict[str, Tensor]
) -> None:
    """The door: `[T, N, 128]` BF16 on one sm_90 GPU, heads side by side; queries alike, keys alike.

    Row strides and addresses are left to `tensor_map`. **Raises:** ContractError for another key
    block; BackendError for another GPU; OperandError for the rest.
    """
    if contract.key_block != KEY_BLOCK:
        raise ContractError("key_block", contract.key_block, KEY_BLOCK)
    check_device(**queries, **keys)
    like = next(iter(queries.values()))
    for group in filter(None, (queries, keys)):
        first_name, first = next(iter(group.items()))
        for name, x in group.items():
            _check_heads(name, x, like)
            if len(x) != len(first):
                raise OperandError(f"rows of {name}", len(x), f"{len(first)} as {first_name}")


def _check_heads(name: str, x: Tensor, like: Tensor) -> None:
    if x.dtype != torch.bfloat16:
        raise OperandError(f"dtype of {name}", x.dtype, torch.bfloat16)
    if x.ndim != 3 or x.shape[2] != HEAD_DIM or x.shape[1] < 1:
        raise OperandError(f"shape of {name}", tuple(x.shape), f"(any, at least 1, {HEAD_DIM})")
    if x.shape[1] != like.shape[1]:
        raise OperandError(f"heads of {name}", x.shape[1], f"{like.shape[1]} as the queries")
    if x.device != like.device:
        raise OperandError(f"device of {name}", str(x.device), f"{like.device} as the queries")
    heads_apart = x.stride(1) if x.shape[1] > 1 else HEAD_DIM
    if x.stride(2) != 1 or heads_apart != HEAD_DIM:
        raise OperandError(f"strides of {name}", x.stride(), f"(any, {HEAD_DIM}, 1)")


def check_statistics(like: Tensor, **statistics: Tensor) -> None:
    """lse and delta: contiguous FP32 `[T, N]`. **Raises:** OperandError."""
    for name, x in statistics.items():
        received = (x.dtype, tuple(x.shape), str(x.device))
        accepted = (torch.float32, tuple(like.shape[:2]), str(like.device))
        if received != accepted:
            raise OperandError(name, received, accepted)
        if not x.is_contiguous():
            raise OperandError(f"strides of {name}", x.stride(), "contiguous")


def check_rows(name: str, whole: Tensor) -> None:
    """The gathered side holds every row there is. **Raises:** OperandError if it has none."""
    if len(whole) == 0:
        raise OperandError(f"rows of {name}", 0, "at least 1")


@gluon.jit
def ex2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def lg2(x):
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def divide(a, b):
    """A tile a by a row's b to nearest, b from 2^-20 to 2^60, |a| from 2^-100; no branches.

    r is 1 / b to nearest and two corrections of a r follow: the first leaves an error below one
    unit in the last place, from which the second rounds correctly (Markstein). Zero and what is
    not finite need no correction. `div.rn` itself takes 20 instructions and two branches.
    """
    zeros = gl.zeros((64, 128), gl.float32, ACC)
    r = gl.div_rn(gl.full((64,), 1.0, gl.float32, ROW), b)[:, None] + zeros
    minus_b = zeros - b[:, None]
    first = a * r
    q = gl.fma(gl.fma(first, minus_b, a), r, first)
    q = gl.fma(gl.fma(q, minus_b, a), r, q)
    corrected = (gl.abs(first) < float("inf")) & (first != 0.0)
    return gl.where(corrected, q, first)

