"""What the row-wise kernels share: the door, and how a row is addressed.

Rows are any multiple of 16 bytes apart and contiguous within, as slices of a joined projection are.
Widths and strides reach a kernel in units of 8 elements: it then knows that every access is whole
16-byte words, whatever the layout, without being specialised for one.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from h3lib.contract import OperandError
from h3lib.ops.hopper.compat import TMA_ALIGNMENT_BYTES, check_device

UNIT = 8  # BF16 elements in 16 bytes
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def check_rows(dtype: torch.dtype, **operands: Tensor) -> None:
    """`[T, C]` operands of one dtype, shape and sm_90 GPU, rows of whole 16-byte words.

    **Raises:** OperandError for anything else, BackendError for another GPU.
    """
    check_device(**operands)
    first_name, first = next(iter(operands.items()))
    for name, x in operands.items():
        if x.dtype != dtype:
            raise OperandError(f"dtype of {name}", x.dtype, dtype)
        if x.ndim != 2 or x.shape != first.shape or x.shape[1] % UNIT or not x.shape[1]:
            accepted = f"{tuple(first.shape)} as {first_name}, the width a multiple of {UNIT}"
            raise OperandError(f"shape of {name}", tuple(x.shape), accepted)
        if x.device != first.device:
            raise OperandError(
                f"device of {name}", str(x.device), f"{first.device} as {first_name}"
            )
        row_stride(name, x)


def check_columns(like: Tensor, table_rows: Tensor, **columns: Tensor) -> None:
    """Columns of the AdaLN table `[G, C]`, C as `like`'s, and table_rows `[T]` int64 beside them.

    Whether a row of the table exists is left to the kernel: to ask here would wait for the GPU.

    **Raises:** OperandError.
    """
    check_device(table_rows=table_rows)
    first = next(iter(columns.values()))
    check_rows(like.dtype, **columns)
    if first.shape[1] != like.shape[1]:
        name = next(iter(columns))
        raise OperandError(f"shape of {name}", tuple(first.shape), f"(any, {like.shape[1]})")
    accepted = (torch.int64, (len(like),), True)
    received = (table_rows.dtype, tuple(table_rows.shape), table_rows.is_contiguous())
    if received != accepted:
        raise OperandError("dtype, shape and contiguity of table_rows", received, accepted)


def row_stride(name: str, x: Tensor) -> int:
    """Stride of dim 0 of `[T, ..., C]`, the rest contiguous, in units of 8 elements.

    **Raises:** OperandError for other strides, or an address that is not a multiple of 16 bytes.
    """
    stride = _stride_of_rows(tuple(x.shape), x.stride())
    if stride is None:
        raise OperandError(f"strides of {name}", x.stride(), f"(a multiple of {UNIT}, contiguous)")
    if x.device.type == "cuda" and x.data_ptr() % TMA_ALIGNMENT_BYTES:
        accepted = f"a multiple of {TMA_ALIGNMENT_BYTES}"
        raise OperandError(f"address of {name}", hex(x.data_ptr()), accepted)
    return stride


@functools.lru_cache(maxsize=4096)
def _stride_of_rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """The row stride in units of 8 elements, None where the kernels cannot read such rows."""
    contiguous = 1
    for size, stride in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        if size != 1 and stride != contiguous:
            return None
        contiguous *= size
    stride = strides[0] if shape[0] > 1 else UNIT
    return None if stride % UNIT or stride < 0 else stride // UNIT
