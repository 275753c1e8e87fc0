"""What the kernels take from Triton, the same under every tested Triton, and what is refused.

    Triton   3.6.0 (the GPU machine's) and 3.7.1 (what torch 2.13 pins), no other
    device   compute capability 9.0, no other: `wgmma` exists there alone
    operand  CUDA, strides that a TMA descriptor can describe

Gluon is experimental, so its names are imported here and nowhere else. What differs:

* the CTA barrier is `thread_barrier` in 3.6 and `barrier` in 3.7;
* `warpgroup_mma_init` is not exported by either, and is needed to carry an accumulator in a loop;
* `shared_memory_descriptor.slice` is broken in 3.7.1 (its decorator was lost): use more buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from h3lib.contract import BackendError, OperandError
from h3lib.ops.backend import BESIDE

TESTED_TRITON = ("3.6.0", "3.7.1")
CAPABILITY = (9, 0)
TMA_ALIGNMENT_BYTES = 16
TMA_MAX_EXTENT = 1 << 31  # coordinates are signed 32-bit


def require_triton(version: str) -> None:
    """**Raises:** BackendError for a Triton whose compiled code was not read and compared."""
    if version not in TESTED_TRITON:
        raise BackendError("Triton version", version, ", ".join(TESTED_TRITON))


require_triton(triton.__version__)

from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.language.nvidia.hopper import (  # noqa: E402
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402

thread_barrier = gl.thread_barrier if triton.__version__ == "3.6.0" else gl.barrier

__all__ = [
    "TensorDescriptor",
    "check_device",
    "fence_async_shared",
    "gl",
    "gluon",
    "map_on",
    "mbarrier",
    "num_multiprocessors",
    "programs_for",
    "require_triton",
    "tensor_map",
    "thread_barrier",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device."""
    if device.type != "cuda":  # compiling without a GPU: an H200's
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs_for(device: torch.device, flops: float) -> int:
    """How many persistent programs a product of so many operations has now: one a multiprocessor,
    but for those that kernels beside it need."""
    return max(1, num_multiprocessors(device) - BESIDE.leave(flops))


def check_device(**operands: Tensor) -> None:
    """**Raises:** OperandError for an operand that is not on a CUDA device; BackendError for a GPU
    of another architecture than sm_90. Operands on `meta` pass: they compile, they do not run."""
    current = None
    for name, tensor in operands.items():
        device = tensor.device
        if device.type == "meta":
            continue
        if device.type != "cuda":
            raise OperandError(f"device of {name}", str(device), "cuda, for back end triton")
        current = torch.cuda.current_device() if current is None else current
        if device.index != current:
            accepted = f"cuda:{current}, the current device"
            raise OperandError(f"device of {name}", str(device), accepted)
        if (found := _capability(current)) != CAPABILITY:
            accepted = "sm_90 (compute capability 9.0)"
            raise BackendError("compute capability", f"{found[0]}.{found[1]}", accepted)


def tensor_map(
    name: str, base: Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]
) -> TensorDescriptor:
    """TMA descriptor of a view of `base`, boxes of `block`, zero-filled outside, 128-byte swizzle.

    **Raises:** OperandError unless the last dim has stride 1, the others a multiple of 16 bytes,
    the base is 16-byte aligned and every extent is 1 to 2^31 - 1.
    """
    if base.device.type == "cuda" and base.data_ptr() % TMA_ALIGNMENT_BYTES:
        accepted = f"a multiple of {TMA_ALIGNMENT_BYTES}"
        raise OperandError(f"address of {name}", hex(base.data_ptr()), accepted)
    return _view(_geometry(name, base.dtype, tuple(shape), tuple(strides), tuple(block)), base)


def map_on(view: TensorDescriptor, base: Tensor) -> TensorDescriptor:
    """The same view of another tensor of the same signature."""
    return _view(view.__dict__, base)


def _view(geometry: dict[str, object], base: Tensor) -> TensorDescriptor:
    view = TensorDescriptor.__new__(TensorDescriptor)  # its constructor checks everything anew
    view.__dict__ |= geometry
    view.base = base
    return view


@functools.lru_cache(maxsize=4096)
def _geometry(
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    block: tuple[int, ...],
) -> dict[str, object]:
    """What a descriptor says beside its base, checked once: a third of a launch on the host."""
    size = dtype.itemsize
    if strides[-1] != 1:
        raise OperandError(f"stride of the last dim of {name}", strides[-1], 1)
    for stride in strides[:-1]:
        if stride * size % TMA_ALIGNMENT_BYTES or stride <= 0:
            accepted = f"a positive multiple of {TMA_ALIGNMENT_BYTES} bytes"
            raise OperandError(f"stride of {name} in bytes", stride * size, accepted)
    for extent in shape:
        if not 0 < extent < TMA_MAX_EXTENT:
            raise OperandError(f"extent of {name}", extent, f"1 to {TMA_MAX_EXTENT - 1}")
    none = torch.empty(0, dtype=dtype, device="meta")
    layout = _swizzled(block, dtype)
    return vars(TensorDescriptor(none, list(shape), list(strides), list(block), layout))


@functools.cache
def _swizzled(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Made once a block shape: it costs as much as the rest of a launch."""
    element = {torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(block), element)
