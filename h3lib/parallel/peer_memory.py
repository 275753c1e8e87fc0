"""Memory that the processes of a node share: one buffer a rank, mapped by all of its group.

Buffers come from the CUDA driver, not from PyTorch's allocator, whose expandable segments have no
IPC handles. Opening and closing are collective: what fails on one rank is the same typed error on
all, and leaves nothing allocated or mapped.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch
from torch import Tensor

from h3lib.contract import PeerError

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
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        self._call("cuCtxSynchronize")
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


class SharedBuffers:
    """One buffer of `num_bytes` a rank; `addresses[r]` is where rank r's is mapped here."""

    def __init__(self, control, num_bytes: int, driver: Driver):
        """Collective over the group of `control` (`gather_objects`, `rank`, `size`).

        **Raises:** PeerError on every rank, naming the rank and the driver's reason.
        """
        self.control, self.driver = control, driver
        self.addresses: list[int] = []
        self._own, self._opened = 0, []
        handle, failure = None, None
        try:
            self._own = driver.allocate(num_bytes)
            handle = driver.export(self._own)
        except DriverError as error:
            failure = error
        answers = control.gather_objects((handle, failure))
        self._agree([failure for _, failure in answers], "shared memory")
        self._agree(control.gather_objects(self._map([handle for handle, _ in answers])), "mapping")

    def _map(self, handles: list[bytes]) -> DriverError | None:
        for rank, handle in enumerate(handles):
            try:
                address = self._own
                if rank != self.control.rank:
                    address = self.driver.open(handle)
                    self._opened.append(address)
            except DriverError as error:
                return error
            self.addresses.append(address)
        return None

    def _agree(self, failures: list[DriverError | None], what: str) -> None:
        """Release everything and raise if one rank failed."""
        for rank, failure in enumerate(failures):
            if failure is not None:
                self.release()
                raise PeerError(
                    f"{what} of rank {rank} of the group",
                    f"{failure.subject}: {failure.received}",
                    failure.accepted,
                )

    def release(self) -> None:
        """Unmap the peers' buffers and free the own one; what fails here is left to the driver."""
        for address in self._opened:
            _quietly(self.driver.close, address)
        if self._own:
            _quietly(self.driver.free, self._own)
        self._own, self._opened, self.addresses = 0, [], []


def _quietly(function, address: int) -> None:
    try:
        function(address)
    except DriverError:
        pass
