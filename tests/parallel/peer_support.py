"""The peer tree without a GPU: shared memory instead of CUDA's, Triton's interpreter, processes.

The interpreter has no inline PTX, so the primitives of `peer_sync.py` are replaced by plain loads
and stores. Memory order is thus not tested here; everything else of the protocol is.
"""

import ctypes
import mmap
import os
import time
from pathlib import Path

import torch
import triton
import triton.language as tl

from h3lib.parallel import peer_sync
from h3lib.parallel.peer_memory import DriverError


@triton.jit
def store_word(address, value, present):
    tl.store(address.to(tl.pointer_type(tl.int64), bitcast=True), value, mask=present)


@triton.jit
def load_word(address, present, absent):
    words = tl.load(address.to(tl.pointer_type(tl.int64), bitcast=True), mask=present, other=0)
    return tl.where(present, words, absent)


def now_ns(lane):
    time.sleep(0.0005)  # the other processes of this core must come to their turn
    return tl.full(lane.shape, time.monotonic_ns(), tl.int64)


def without_ptx() -> None:
    """Let the interpreter run `peer_sync.py`; call before the first kernel."""
    peer_sync.store_release = peer_sync.store_relaxed = store_word
    peer_sync.load_acquire = peer_sync.load_relaxed = load_word
    peer_sync.now_ns = now_ns


class FileDriver:
    """A driver whose buffers are files that processes map."""

    def __init__(self, folder: Path, fail: str = ""):
        self.folder, self.fail, self.count = folder, fail, 0
        self.maps: dict[int, tuple] = {}

    def _refuse(self, function: str) -> None:
        if function == self.fail:
            raise DriverError(function, "CUDA_ERROR_NOT_SUPPORTED", "CUDA_SUCCESS")

    def _map(self, path: str) -> int:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        hold = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(hold)
        self.maps[address] = (memory, hold, path)
        return address

    def allocate(self, num_bytes: int) -> int:
        self._refuse("allocate")
        self.count += 1
        path = self.folder / f"{os.getpid()}-{self.count}"
        with open(path, "wb") as file:
            file.truncate(num_bytes)
        return self._map(str(path))

    def free(self, address: int) -> None:
        os.unlink(self.maps[address][2])
        self.close(address)

    def export(self, address: int) -> bytes:
        self._refuse("export")
        return self.maps[address][2].encode()

    def open(self, handle: bytes) -> int:
        self._refuse("open")
        try:
            return self._map(handle.decode())
        except OSError as error:
            raise DriverError("open", error.strerror, "CUDA_SUCCESS") from None

    def close(self, address: int) -> None:
        del self.maps[address]

    def words(self, address: int, count: int) -> torch.Tensor:
        array = (ctypes.c_int64 * count).from_address(address)
        return torch.frombuffer(array, dtype=torch.int64, count=count)
