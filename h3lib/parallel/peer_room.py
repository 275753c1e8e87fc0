"""Room: shared memory in which products make their roots, so that no collective has to stage them.

Two places at fixed addresses, used by turns. A place is read by peers in one collective and may be
written again once that collective is over on this rank, because it ends with a barrier that every
peer passes after it has read: an all-reduce by itself, a reduce-scatter by one more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3lib.parallel.overlap import MAX_CHUNK_BYTES
from h3lib.parallel.peer_memory import GRANULE, Driver, SharedBuffers
from h3lib.parallel.peer_sync import PAGE_WORDS

PLACES = 2
PLACE_BYTES = MAX_CHUNK_BYTES
_WORD = 8


class Room:
    """The places of one rank; every rank of the group opens its own at the same time."""

    def __init__(self, control, place_bytes: int, driver: Driver):
        """Collective. **Raises:** PeerError on every rank if memory cannot be shared."""
        self.rank = control.rank
        self.place_bytes = -(-place_bytes // GRANULE) * GRANULE
        self.buffers = SharedBuffers(control, PLACES * self.place_bytes, driver)
        own, words = self.buffers.addresses[self.rank], self.place_bytes // _WORD
        self._places = [
            driver.words(own + i * self.place_bytes, words).view(torch.float32)
            for i in range(PLACES)
        ]
        self._slots: dict[int, Tensor] = {}

    def place(self, index: int, num_elements: int) -> Tensor | None:
        """FP32 memory, None if the place has not as much."""
        place = self._places[index]
        return place[:num_elements] if num_elements <= len(place) else None

    def offset(self, flat: Tensor) -> int:
        """Bytes from the first place to a tensor in one; -1 for a tensor elsewhere."""
        offset = flat.data_ptr() - self.buffers.addresses[self.rank]
        return offset if flat.numel() and 0 <= offset < PLACES * self.place_bytes else -1

    def is_new(self, flat: Tensor, start: int) -> bool:
        """Whether `slots` would have to copy something to the device."""
        return self.offset(flat) + 4 * start not in self._slots

    def slots(self, flat: Tensor, start: int) -> Tensor:
        """For each rank the head of a buffer whose slot would begin at its `flat[start]`.

        Kept for good, as plans are: a captured graph may read them again.
        """
        offset = self.offset(flat) + 4 * start
        if self.is_new(flat, start):
            heads = [a + offset - PAGE_WORDS.value * _WORD for a in self.buffers.addresses]
            self._slots[offset] = torch.tensor(heads, device=flat.device)
        return self._slots[offset]

    def release(self) -> None:
        self.buffers.release()
