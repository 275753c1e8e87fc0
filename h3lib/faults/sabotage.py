"""What the victim of an injection does otherwise: operands, memory, versions, time.

Everything is done to this process alone, and undone by `restored`.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from h3lib.faults.catalogue import DURING, OPENINGS, Injection
from h3lib.parallel import gloo
from h3lib.parallel.transport import Level

_BUFFER_BYTES = 1 << 20
_TOO_MANY_BYTES = 1 << 46
_CYCLES_A_SECOND = 2e9  # of the fastest clock: a GPU sleeps at least as long


def spoilt(part: Tensor, cuts: list[int], wrong: str, name: str) -> tuple[Tensor, list[int]]:
    """The operand of collective `name` as one rank should not bring it."""
    if wrong == "shape":
        part = torch.cat([part, part], dim=0 if name == "all_gather_columns" else -1)
    elif wrong == "shape of as many elements":
        part = part.unsqueeze(-2)
    elif wrong == "dtype":
        part = part.to(torch.float64)
    elif wrong == "cuts":
        cuts = [cut + 1 for cut in cuts]
    elif wrong == "operand elsewhere":
        other = (part.device.index + 1) % torch.cuda.device_count()
        part = part.to("cpu" if other == part.device.index else f"cuda:{other}")
    return part, cuts


@contextlib.contextmanager
def expandable_segments() -> Iterator[None]:
    """PyTorch's allocator as under PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and it is."""
    set_allocator = torch._C._accelerator_setAllocatorSettings
    torch.cuda.empty_cache()
    set_allocator("expandable_segments:True")
    try:
        there = torch.empty(1 << 24, device="cuda")  # more than any segment has to spare
        if not any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()):
            raise RuntimeError(f"no expandable segment for {there.shape}")
        yield
    finally:
        set_allocator("expandable_segments:False")


@contextlib.contextmanager
def without_memory(injection: Injection) -> Iterator[None]:
    """No memory is left for what the collective makes; the allocators' own errors."""
    if injection.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1e-9)
        room = []  # what segments in use have to spare, in the smallest blocks of the large pool
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            while True:
                room.append(torch.empty((1 << 20) + 512, dtype=torch.uint8, device="cuda"))
        try:
            yield
        finally:
            room.clear()
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    with replaced(gloo, "pack_bytes", lambda *_: torch.empty(_TOO_MANY_BYTES, dtype=torch.uint8)):
        yield


@contextlib.contextmanager
def late_inside(injection: Injection, mark: Callable[[], None]) -> Iterator[None]:
    """Late in the next collective: its header is sent, or it is asked for and its GPU is busy."""
    if injection.device == "cuda":
        mark()
        torch.cuda._sleep(int(_delay_s(injection) * _CYCLES_A_SECOND))
        yield
        return
    original, late = gloo.GlooTransport._move, []

    def slowly(*arguments):
        if not late:
            late.append(True)
            be_late(injection, mark)
        return original(*arguments)

    with replaced(gloo.GlooTransport, "_move", slowly):
        yield


@contextlib.contextmanager
def replaced(place: object, name: str, value: object) -> Iterator[None]:
    original = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, original)


def around(injection: Injection, mark: Callable[[], None]) -> contextlib.AbstractContextManager:
    """What the victim's faulty call happens in; `mark` says that it has begun."""
    if injection.fault == "out of memory":
        return without_memory(injection)
    if injection.fault.startswith("late") and injection.when == DURING:
        return late_inside(injection, mark)
    return contextlib.nullcontext()


def be_late(injection: Injection, mark: Callable[[], None]) -> None:
    mark()
    time.sleep(_delay_s(injection))


def _delay_s(injection: Injection) -> float:
    timeout_s = injection.timeout_s
    return timeout_s + 1.5 if injection.fault == "late" else timeout_s / 4


def open_tree(control: gloo.GlooTransport, fault: str) -> Level:
    """A peer tree, opened as the victim of `fault` does; as ever without one."""
    from h3lib.parallel.peer import PeerTree  # needs Triton
    from h3lib.parallel.peer_memory import CudaDriver, DriverError

    class OtherTree(PeerTree):
        """A rank with another contract, version or GPU model."""

        def _fingerprint(self, capacity_bytes: int) -> dict[str, object]:
            return super()._fingerprint(capacity_bytes) | {fault: "another"}

    class Broken(CudaDriver):
        """The driver of a machine with one fault."""

        def allocate(self, num_bytes: int) -> int:
            if fault == "buffer out of memory":
                return super().allocate(_TOO_MANY_BYTES)
            if fault == "memory without IPC":
                return self._from_a_pool(num_bytes)
            return super().allocate(num_bytes)

        def _from_a_pool(self, num_bytes: int) -> int:
            """Stream-ordered memory, for which the driver has no IPC handle."""
            address = ctypes.c_uint64()
            size, stream = ctypes.c_size_t(num_bytes), ctypes.c_void_p()
            self._call("cuMemAllocAsync", ctypes.byref(address), size, stream)
            return address.value

        def export(self, address: int) -> bytes:
            if fault != "stale handle":
                return super().export(address)
            freed = super().allocate(2 << 20)
            handle = super().export(freed)
            self.free(freed)
            return handle

        def open(self, handle: bytes) -> int:
            if fault == "IPC not permitted":
                raise DriverError(
                    "cuIpcOpenMemHandle_v2", "CUDA_ERROR_NOT_PERMITTED", "CUDA_SUCCESS"
                )
            return super().open(handle)

        def close(self, address: int) -> None:
            if fault != "leaked mapping":
                super().close(address)

    kind = OtherTree if fault in OPENINGS else PeerTree
    return kind(control, _BUFFER_BYTES, driver=Broken() if fault else None)
