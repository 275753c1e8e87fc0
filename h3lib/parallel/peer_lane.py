"""The lane of a peer tree: a stream on which collectives run beside products.

    home    product 0 | product 1 ............. | product 2 ..... | join
                  \\ event    \\ event                           / event
    lane           collective 0 | collective 1 ...............

Its kernels have priority, and products launched meanwhile leave them some multiprocessors: those of
a product take all registers of theirs and stay to the end, so nothing else would find a place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from h3lib.ops.backend import BESIDE
from h3lib.parallel.later import Later
from h3lib.parallel.overlap import LINK_BYTES, PRODUCT_FLOPS

LANE_BYTES = 8 << 20  # of all rows, or of one root: less is over before a stream has begun
LANE_MULTIPROCESSORS = 16
LANE_CHANNELS = 32  # two programs of a collective fit on a multiprocessor
FLOPS_A_BYTE = PRODUCT_FLOPS / LINK_BYTES
_FIRST = -1  # priority


class Lane:
    """One stream; `home` is the stream of the caller while a collective is launched on it."""

    def __init__(self, settle: Callable[[], None]):
        """`settle` raises if a collective failed."""
        self.settle, self.home = settle, None
        self._stream = torch.cuda.Stream(priority=_FIRST)
        self._running: list[_Running] = []

    def later(self, run: Callable[[], Tensor], sent: Callable[[], int]) -> Later:
        """Launch what `run` launches, after all that was launched before; `sent` counts bytes."""
        before = sent()
        self.home = torch.cuda.current_stream()
        self._stream.wait_stream(self.home)
        try:
            with torch.cuda.stream(self._stream):
                result, done = run(), torch.cuda.Event()
                done.record()
        finally:
            home, self.home = self.home, None
        result.record_stream(home)  # else its memory could be given away while it is read there
        running = _Running(self, run, result, done)
        self._running.append(running)
        BESIDE.hold(running, LANE_MULTIPROCESSORS, FLOPS_A_BYTE * (sent() - before))
        return running

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def join_all(self) -> None:
        """What is launched now comes after every collective of the lane."""
        for running in list(self._running):
            running.join()

    def left(self, running: _Running) -> None:
        self._running.remove(running)
        BESIDE.release(running)


class _Running(Later):
    """It keeps `run`, hence the operands, until it is joined."""

    def __init__(self, lane: Lane, run: Callable[[], Tensor], result: Tensor, done):
        super().__init__(result)
        self._lane, self._run, self._done = lane, run, done

    def join(self) -> None:
        if self._run is not None:
            torch.cuda.current_stream().wait_event(self._done)
            self._lane.left(self)
            self._run = None

    def value(self) -> Tensor:
        self.join()
        self._lane.settle()
        return self._result
