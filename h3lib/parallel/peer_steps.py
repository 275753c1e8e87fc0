"""Launches of the peer kernel: shared buffers, operands, status.

`PeerSteps` knows no failure policy: a collective is launched, `status` says later how it went.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from h3lib.contract import PeerError
from h3lib.parallel.peer_kernels import UNIT, peer_kernel
from h3lib.parallel.peer_memory import Driver, SharedBuffers
from h3lib.parallel.peer_plan import Plan, Shape, Work, plan
from h3lib.parallel.peer_sync import (
    ABORTS,
    DIGESTS,
    EPOCHS,
    MARK,
    MAX_PEERS,
    PAGE_WORDS,
    RANK,
    STATUS,
    TIMEOUT_NS,
)
from h3lib.parallel.transport import Slice

_GRANULE = 2 << 20  # an IPC handle stands for whole pages of 2 MiB
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Ready:
    """A launch but for its tensors; slices are kept on the device, a graph may read them again."""

    plan: Plan
    slices: Tensor
    kernel: object = None


class PeerSteps:
    """Launches on the current stream; `rank` and `size` count inside the group of `control`.

    `bytes_sent[p]` counts what was written into rank p's memory.
    """

    def __init__(
        self, control, capacity_bytes: int, timeout_s: float, driver: Driver, shape: Shape
    ):
        """Collective. **Raises:** PeerError on every rank if memory cannot be shared."""
        self.control, self.driver, self.shape = control, driver, shape
        self.channels = shape.channels  # at most so many are launched; the same on every rank
        self.rank, self.size = control.rank, control.size
        self.slot_words = max(1, capacity_bytes // 8 // shape.channels // UNIT) * UNIT
        self.head_words = shape.channels * PAGE_WORDS.value
        num_bytes = (self.head_words + 2 * shape.channels * self.slot_words) * 8
        self.buffers = SharedBuffers(control, -(-num_bytes // _GRANULE) * _GRANULE, driver)
        self._ready: dict[tuple, Ready] = {}
        self._side, self.bytes_sent = None, [0] * self.size
        mark = secrets.randbits(62)
        self._agree(lambda: self._write_page(timeout_s, mark))
        marks = self.buffers.gather(mark)
        self._agree(lambda: self._check_mapping(marks))

    def _agree(self, step: Callable[[], None]) -> None:
        """One step of opening, collective. **Raises:** PeerError on every rank if it fails on one;
        then nothing is mapped."""
        failure = None
        try:
            step()
        except RuntimeError as error:  # PeerError, or of CUDA
            cause = str(error).splitlines()[0]
            name = self.control.ranks[self.rank]
            failure = f"shared memory of rank {name}", PeerError("first use", cause, "no error")
        self.buffers.agree(failure)

    def _write_page(self, timeout_s: float, mark: int) -> None:
        addresses = self.buffers.addresses
        self.page = self.driver.words(addresses[self.rank], PAGE_WORDS.value)
        self.pages = torch.tensor(addresses, device=self.page.device)
        self.page[RANK.value], self.page[MARK.value] = self.rank, mark
        self.page[TIMEOUT_NS.value] = int(timeout_s * 1e9)
        self.synchronize()

    def _check_mapping(self, marks: list[int]) -> None:
        """Every rank finds every rank's buffer of this opening where it looks for it."""
        pages = [self.driver.words(a, PAGE_WORDS.value) for a in self.buffers.addresses]
        found = [int(page[MARK.value]) for page in pages]
        seen = zip(self.control.ranks, found, marks, strict=True)
        wrong = [rank for rank, mark, expected in seen if mark != expected]
        if wrong:
            raise PeerError("ranks whose buffers are others", wrong, [])

    @property
    def device(self) -> torch.device:
        return self.page.device

    @property
    def status(self) -> tuple[int, list[int]]:
        """(kind, ranks of the group that it names) of the first failure; kind 0 if there is none.

        Waits for the current stream."""
        status = int(self.page[STATUS.value])
        return status >> 32, [rank for rank in range(self.size) if status >> rank & 1]

    @property
    def announced(self) -> int:
        """The digest that this rank announced last, in a graph too."""
        epoch = int(self.page[EPOCHS.value + self.rank])
        return int(self.page[DIGESTS.value + epoch % 2 * MAX_PEERS.value + self.rank])

    def gather(self, work: Work, part: Tensor, out: Tensor, digest: int) -> None:
        """Every rank's part, its slice of `out`; both flat."""
        self._launch(work, integers(part), integers(out), digest, (0, 0, 0))

    def reduce(
        self, work: Work, flat: Tensor, out: Tensor, out_start: int, digest: int
    ) -> None:
        """This rank's slice of all ranks' FP32 roots `flat` `[R, n]`: each row of `out` by its
        program, from `out_start` on; where `work` gathers, every slice, each where it lies.

        **Order:** the programs', which `ops/tree.py` wrote. **Rounds:** once, to `out`'s dtype.
        """
        stride = flat.stride(0) if flat.shape[0] > 1 else 0
        out_stride = out.stride(0) if out.shape[0] > 1 else 0
        self._launch(work, flat, out, digest, (stride, out_start, out_stride))

    def _launch(
        self, work: Work, source: Tensor, out: Tensor, digest: int, strides: tuple[int, int, int]
    ) -> None:
        """The compiled kernel is kept for all it depends on, so that a launch after the first costs
        a look-up and the driver."""
        source_whole, out_whole = source.data_ptr() % 16 == 0, out.data_ptr() % 16 == 0
        key = work, strides, source_whole, out_whole, out.dtype, self.channels
        ready = self._ready.get(key)
        if ready is None:
            aligned = source_whole and out_whole and not any(value % UNIT for value in strides)
            shape = replace(self.shape, channels=self.channels)
            launch = plan(work, self.rank, shape, self.slot_words * 8, aligned)
            ready = self._ready[key] = Ready(launch, self._on_device(work.slices))
        for peer, count in enumerate(ready.plan.sent):
            self.bytes_sent[peer] += count
        operands = (
            source, out, self.page, self.pages, ready.slices, digest, self.shape.channels,
            self.slot_words, self.size, *ready.plan.sizes, *strides, *ready.plan.constants,
        )  # fmt: skip
        if ready.kernel is None:  # always, in the interpreter
            ready.kernel = peer_kernel[ready.plan.grid](*operands, **self.shape.options)
        else:
            ready.kernel[ready.plan.grid](*operands)

    def give_up(self, kind: int, ranks: list[int]) -> None:
        """End this rank's waits from a stream of its own; the kernels then tell the others."""
        status = (kind << 32) + sum(1 << rank for rank in ranks)
        self._side = self._side or torch.cuda.Stream()
        with torch.cuda.stream(self._side):
            self.page[ABORTS.value + self.rank].fill_(status)

    def synchronize(self) -> None:
        if self.page.is_cuda:
            torch.cuda.synchronize()

    def _on_device(self, slices: tuple[Slice, ...]) -> Tensor:
        """Start and length of slices."""
        if capturing():
            accepted = "a call with the same sizes before the capture"
            raise PeerError("collective inside a CUDA graph", "its first call", accepted)
        flat = [value for start, stop in slices for value in (start, stop - start)]
        return torch.tensor(flat, device=self.device)


def integers(tensor: Tensor) -> Tensor:
    """Elements as integers of their width: what is copied is never touched as a number."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def capturing() -> bool:
    """Whether the current stream is recording a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
