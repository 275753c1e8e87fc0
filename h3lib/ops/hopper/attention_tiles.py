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

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from h3lib.contract import Contract, ContractError, OperandError

HEAD_DIM = 128
KEY_BLOCK = 128
TILE_ROWS = 64


def _fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()


SCORE_SCALE = _fp32(math.log2(math.e) / math.sqrt(HEAD_DIM))
GRADIENT_SCALE = _fp32(1 / math.sqrt(HEAD_DIM))

BF16_TILE = gl.NVMMASharedLayout.get_default_for([TILE_ROWS, HEAD_DIM], gl.bfloat16)
FP32_ROW = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


class Launch(NamedTuple):
    """A kernel, its operands and its fixed options: tests compile one, ops start it."""

    kernel: object
    operands: tuple
    options: dict
    grid: tuple[int, ...]

    def start(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self.kernel[self.grid](*self.operands, **self.options)


def heads_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """TMA boxes of `rows` rows of one head over `[T, N, 128]`, any row stride."""
    width = x.shape[1] * HEAD_DIM
    stride = x.stride(0) if len(x) > 1 else width
    return TensorDescriptor(x, [len(x), width], [stride, 1], [rows, HEAD_DIM], BF16_TILE)


def row_descriptor(x: Tensor) -> TensorDescriptor:
    """TMA boxes of 64 numbers over a contiguous FP32 tensor."""
    return TensorDescriptor(x, [x.numel()], [1], [TILE_ROWS], FP32_ROW)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """**Raises:** OperandError for anything but a Hopper GPU: `wgmma` exists on sm_90 alone."""
    if device.type != "cuda":
        raise OperandError("device", str(device), "a CUDA device of compute capability 9.0")
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) != (9, 0):
        raise OperandError("compute capability", f"{properties.major}.{properties.minor}", "9.0")
    return properties.multi_processor_count


def check_attention(contract: Contract, queries: dict[str, Tensor], keys: dict[str, Tensor]) -> None:
    """The door: `[T, N, 128]` BF16, heads contiguous, 16-byte rows; queries alike, keys alike.

    **Raises:** ContractError for another key block, OperandError for anything else.
    """
    if contract.key_block != KEY_BLOCK:
        raise ContractError("key_block", contract.key_block, KEY_BLOCK)
    _, like = next(iter(queries.items()))
    for name, x in (queries | keys).items():
        _check_heads(name, x, like)
    for group in (queries, keys):
        first_name, first = next(iter(group.items()))
        for name, x in group.items():
            if len(x) != len(first):
                raise OperandError(f"rows of {name}", len(x), f"{len(first)} as {first_name}")


def _check_heads(name: str, x: Tensor, like: Tensor) -> None:
    if x.dtype != torch.bfloat16:
        raise OperandError(f"dtype of {name}", x.dtype, torch.bfloat16)
    if x.ndim != 3 or x.shape[2] != HEAD_DIM or x.shape[1] < 1:
        raise OperandError(f"shape of {name}", tuple(x.shape), f"(any, at least 1, {HEAD_DIM})")
    if x.shape[1] != like.shape[1] or x.device != like.device:
        raise OperandError(
            f"heads and device of {name}", (x.shape[1], str(x.device)), (like.shape[1], str(like.device))
        )
    num_multiprocessors(x.device)
    heads_apart = x.stride(1) if x.shape[1] > 1 else HEAD_DIM
    rows_apart = x.stride(0) if len(x) > 1 else x.shape[1] * HEAD_DIM
    if x.stride(2) != 1 or heads_apart != HEAD_DIM or rows_apart % 8 or rows_apart < x.shape[1] * HEAD_DIM:
        raise OperandError(f"strides of {name}", x.stride(), f"(a multiple of 8, {HEAD_DIM}, 1), rows apart")
    if x.data_ptr() % 16:
        raise OperandError(f"address of {name}", x.data_ptr(), "a multiple of 16 bytes")


def check_statistics(like: Tensor, **statistics: Tensor) -> None:
    """lse and delta: contiguous FP32 `[T, N]`. **Raises:** OperandError."""
    for name, x in statistics.items():
        if x.dtype != torch.float32 or x.shape != like.shape[:2] or x.device != like.device:
            received = (x.dtype, tuple(x.shape), str(x.device))
            raise OperandError(f"{name}", received, (torch.float32, tuple(like.shape[:2]), str(like.device)))
        if not x.is_contiguous():
            raise OperandError(f"strides of {name}", x.stride(), "contiguous")


def check_rows(**whole: Tensor) -> None:
    """The gathered side holds every row of the document. **Raises:** OperandError if it has none."""
    for name, x in whole.items():
        if len(x) == 0:
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
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """The ring's next slot; its parity turns at each wrap."""
    wrapped = (slot + 1 == SLOTS).to(gl.int32)
    return (slot + 1) * (1 - wrapped), phase ^ wrapped
