"""One op, several back ends: the caller names the back end, nothing chooses it at run time."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence

import torch

from h3lib.contract import BackendError, OperandError

BACKENDS = {"eager": None, "triton": "h3lib.ops.hopper"}
"""Each back end and the package whose import registers its kernels."""


class Op:
    """An op whose eager function is its definition; other back ends register beside it.

    **Raises:** BackendError for a back end that the op does not have. There is no fallback.
    """

    def __init__(self, eager: Callable):
        functools.update_wrapper(self, eager)
        self.implementations = {"eager": eager}

    def __call__(self, *args, backend: str = "eager", **kwargs):
        if backend not in self.implementations:
            accepted = ", ".join(self.implementations)
            raise BackendError(f"back end of {self.__name__}", backend, accepted)
        return self.implementations[backend](*args, **kwargs)

    def register(self, backend: str) -> Callable:
        """Decorator that adds `backend` to this op."""

        def add(function: Callable) -> Callable:
            self.implementations[backend] = function
            return function

        return add


def op(eager: Callable) -> Op:
    """Make the eager definition callable with `backend=`."""
    return Op(eager)


def load_backend(name: str, device: str) -> None:
    """Register a back end's kernels, if this machine can run them on tensors of `device`.

    **Raises:** BackendError for an unknown name, a device it does not run on, or a Triton or GPU
    for which its kernels were not tested.
    """
    if name not in BACKENDS:
        raise BackendError("back end", name, ", ".join(BACKENDS))
    if name == "eager":
        return
    if device != "cuda":
        raise BackendError(f"device of back end {name}", device, "cuda")
    try:
        importlib.import_module(BACKENDS[name])
    except ImportError as error:
        raise BackendError(f"back end {name}", str(error), "an installed Triton") from error


class Beside:
    """Kernels that run beside products, one after the other; products leave them multiprocessors.

    Where and when an element is made changes, never which additions make it.
    """

    def __init__(self):
        self._held: dict[object, tuple[int, float]] = {}

    def hold(self, owner: object, multiprocessors: int, flops: float) -> None:
        """For the owner, while products of about so many operations run, or until `release`."""
        self._held[owner] = multiprocessors, flops

    def release(self, owner: object) -> None:
        self._held.pop(owner, None)

    def leave(self, flops: float) -> int:
        """Multiprocessors that a product of so many operations, launched now, leaves free."""
        most = max((held for held, _ in self._held.values()), default=0)
        for owner, (held, left) in list(self._held.items()):
            if left > flops:
                self._held[owner] = held, left - flops
                break
            flops -= left
            del self._held[owner]
        return most


BESIDE = Beside()
"""Of this process."""


def accumulator(tensor: torch.Tensor) -> torch.dtype:
    """The dtype that sums of this tensor are kept in: FP32, or FP64 for the FP64 oracle."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


FLOATS = (torch.bfloat16, torch.float32, torch.float64)


def check_operands(**operands: torch.Tensor) -> None:
    """**Raises:** OperandError unless all are BF16, FP32 or FP64, of one dtype and device."""
    first_name, first = next(iter(operands.items()))
    for name, tensor in operands.items():
        if tensor.dtype not in FLOATS:
            raise OperandError(f"dtype of {name}", tensor.dtype, ", ".join(map(str, FLOATS)))
        if tensor.dtype != first.dtype:
            raise OperandError(f"dtype of {name}", tensor.dtype, f"{first.dtype} as {first_name}")
        if tensor.device != first.device:
            raise OperandError(
                f"device of {name}", str(tensor.device), f"{first.device} as {first_name}"
            )


def check_shape(name: str, tensor: torch.Tensor, *shape: int | None) -> None:
    """**Raises:** OperandError unless the tensor has this shape; None stands for any size."""
    fits = tensor.ndim == len(shape) and all(
        want is None or want == size for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        accepted = "(" + ", ".join("any" if size is None else str(size) for size in shape) + ")"
        raise OperandError(f"shape of {name}", tuple(tensor.shape), accepted)


def check_out(out: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """**Raises:** OperandError unless a result of this shape and dtype can be made in `out`."""
    check_shape("out", out, *shape)
    if out.dtype != dtype or not out.is_contiguous():
        raise OperandError("out", (out.dtype, out.stride()), f"{dtype}, contiguous")


def check_shapes(**operands: torch.Tensor) -> None:
    """**Raises:** OperandError unless all have the shape of the first."""
    first = next(iter(operands.values()))
    for name, tensor in operands.items():
        check_shape(name, tensor, *first.shape)
