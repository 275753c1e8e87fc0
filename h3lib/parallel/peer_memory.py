"""Memory that the processes of a node share: one buffer a rank, mapped by all of its group.

Buffers come from the CUDA driver, not from PyTorch's allocator, whose expandable segments have no
IPC handles. Opening and closing are collective: what fails on one rank is the same typed error on
all, and leaves nothing allocated or mapped.

A buffer is freed only when no peer has it mapped: CUDA leaves anything else undefined. What a peer
that does not answer may still have mapped is kept, and freed at a later opening or closing.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from h3lib.contract import PeerError
from h3lib.parallel.membership import Hold

PATIENCE_S = 5.0  # for peers that run to let go of a buffer after a failure
_POLL_S = 0.02
_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1


class DriverError(PeerError):
    """A call of the memory driver that failed on one rank."""


class Driver(Protocol):
    """What a shared buffer needs; addresses are integers. Every method may raise a DriverError."""

    def allocate(self, num_bytes: int) -> int:
        """A zeroed buffer."""

    def free(self, address: int) -> None: ...

    def export(self, address: int) -> bytes:
        """A handle by which other processes open the buffer."""

    def open(self, handle: bytes) -> int: ...

    def close(self, address: int) -> None: ...

    def words(self, address: int, count: int) -> Tensor:
        """A view of 64-bit words at an address."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


class _Array:
    """Device memory that PyTorch can view through the CUDA array interface."""

    def __init__(self, address: int, count: int):
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "<i8", "data": (address, False), "version": 3,
        }  # fmt: skip


class CudaDriver:
    """`libcuda` on the current device; PyTorch has made its context."""

    def __init__(self):
        self.device = torch.device("cuda", torch.cuda.current_device())
        torch.empty(1, device=self.device)  # the context, current in this thread
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def allocate(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        try:
            self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
            self._call("cuCtxSynchronize")
        except DriverError:
            quietly(self.free, address.value)
            raise
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def export(self, address: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
        )
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def words(self, address: int, count: int) -> Tensor:
        return torch.as_tensor(_Array(address, count), device=self.device)

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._cuda, function)(*arguments)
        if status:
            name = ctypes.c_char_p()
            self._cuda.cuGetErrorName(status, ctypes.byref(name))
            received = name.value.decode() if name.value else f"CUDA error {status}"
            raise DriverError(function, received, "CUDA_SUCCESS")


@dataclass(frozen=True)
class _Kept:
    """A buffer of a failed group that peers may still have mapped."""

    driver: Driver
    address: int
    hold: Hold


_kept: list[_Kept] = []


def free_kept(patience_s: float = 0.0) -> int:
    """Free the buffers of failed groups that no peer has mapped any more; how many are kept.

    Waits up to `patience_s` for peers that run."""
    deadline = time.monotonic() + patience_s
    while True:
        answering = False
        for kept in _kept.copy():
            holders = kept.hold.holders()
            if not holders:
                quietly(kept.driver.free, kept.address)
                _kept.remove(kept)
            answering |= any(kept.hold.members.fault(rank) is None for rank in holders)
        if not answering or time.monotonic() > deadline:
            return len(_kept)
        time.sleep(_POLL_S)


class SharedBuffers:
    """One buffer of `num_bytes` a rank; `addresses[r]` is where rank r's is mapped here."""

    def __init__(self, control, num_bytes: int, driver: Driver):
        """Collective over the group of `control` (`gather_objects`, `hold`, `ranks`, `rank`).

        **Raises:** PeerError on every rank, naming the rank and the driver's reason.
        """
        self.control, self.driver = control, driver
        self.addresses: list[int] = []
        self._own, self._opened, self._hold = 0, [], control.hold()
        free_kept()
        handle, failure = None, None
        try:
            self._own = driver.allocate(num_bytes)
            handle = driver.export(self._own)
        except DriverError as error:
            failure = f"shared memory of rank {self._name(control.rank)}", error
        answers = self.gather((handle, failure))
        self._raise_first([failure for _, failure in answers])
        self.agree(self._map([handle for handle, _ in answers]))

    def _name(self, place: int) -> int:
        return self.control.ranks[place]

    def _map(self, handles: list[bytes]) -> tuple[str, DriverError] | None:
        for place, handle in enumerate(handles):
            try:
                address = self._own
                if place != self.control.rank:
                    address = self.driver.open(handle)
                    self._opened.append(address)
            except DriverError as error:
                here = self._name(self.control.rank)
                return f"memory of rank {self._name(place)} mapped by rank {here}", error
            self.addresses.append(address)
        return None

    def agree(self, failure: tuple[str, PeerError] | None) -> None:
        """Collective. **Raises:** PeerError on every rank if one has a failure (what it could not
        do, why); everything is released."""
        self._raise_first(self.gather(failure))

    def _raise_first(self, failures: list[tuple[str, PeerError] | None]) -> None:
        for what, error in filter(None, failures):
            self.release()
            raise PeerError(what, f"{error.subject}: {error.received}", error.accepted)

    def gather(self, value: object) -> list:
        """Every rank's value; everything is released if the group fails."""
        try:
            return self.control.gather_objects(value)
        except PeerError:
            self.release()
            raise

    def release(self) -> None:
        """Unmap the peers' buffers; free the own one when no peer has it mapped.

        The caller's kernels have ended. While the world is well the ranks meet between the two,
        so that nobody frees what another has mapped. After a failure they cannot: each says in the
        store that it has unmapped, and waits `PATIENCE_S` for the peers that run; then a buffer
        that a stopped or late peer may have mapped is kept (`free_kept`). What the driver refuses
        here is left to it.
        """
        for address in self._opened:
            quietly(self.driver.close, address)
        own, self._own, self._opened, self.addresses = self._own, 0, [], []
        try:
            self.control.gather_objects(None)
        except PeerError:
            self._hold.let_go()
            if own:
                _kept.append(_Kept(self.driver, own, self._hold))
            free_kept(PATIENCE_S)
            return
        if own:
            quietly(self.driver.free, own)
        free_kept()


def quietly(function: Callable[[int], None], address: int) -> None:
    """Unmap or free; what the driver refuses is left to it."""
    try:
        function(address)
    except DriverError:
        pass
