"""Launches of the peer kernel: shared buffers, operands, status.

`PeerSteps` knows no failure policy: a collective is launched, `status` says later how it went.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from h3lib.contract import PeerError
from h3lib.ops.hopper.launch import Launch
from h3lib.parallel.peer_kernels import UNIT, peer_kernel
from h3lib.parallel.peer_memory import Driver, SharedBuffers
from h3lib.parallel.peer_plan import Shape, Work, plan
from h3lib.parallel.peer_sync import (
    ABORTS,
    DIGESTS,
    EPOCHS,
    MAX_PEERS,
    PAGE_WORDS,
    RANK,
    STATUS,
    TIMEOUT_NS,
)
from h3lib.parallel.transport import Slice

_GRANULE = 2 << 20  # an IPC handle stands for whole pages of 2 MiB
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PeerSteps:
    """Launches on the current stream; `rank` and `size` count inside the group of `control`.

    `bytes_sent[p]` counts what was written into rank p's memory.
    """

    def __init__(
        self, control, capacity_bytes: int, timeout_s: float, driver: Driver, shape: Shape
    ):
        """Collective. **Raises:** PeerError on every rank if memory cannot be shared."""
        self.control, self.driver, self.shape = control, driver, shape
        self.rank, self.size = control.rank, control.size
        self.slot_words = max(1, capacity_bytes // 8 // shape.channels // UNIT) * UNIT
        self.head_words = shape.channels * PAGE_WORDS.value
        num_bytes = (self.head_words + 2 * shape.channels * self.slot_words) * 8
        self.buffers = SharedBuffers(control, -(-num_bytes // _GRANULE) * _GRANULE, driver)
        self._slices: dict[tuple[Slice, ...], Tensor] = {}
        self._side, self.bytes_sent = None, [0] * self.size
        self._agree(lambda: self._write_page(timeout_s))
        self._agree(self._check_mapping)

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

    def _write_page(self, timeout_s: float) -> None:
        addresses = self.buffers.addresses
        self.page = self.driver.words(addresses[self.rank], PAGE_WORDS.value)
        self.pages = torch.tensor(addresses, device=self.page.device)
        self.page[RANK.value] = self.rank
        self.page[TIMEOUT_NS.value] = int(timeout_s * 1e9)
        self.synchronize()

    def _check_mapping(self) -> None:
        """Every rank finds every rank where it looks for it."""
        pages = [self.driver.words(a, PAGE_WORDS.value) for a in self.buffers.addresses]
        found = [int(page[RANK.value]) for page in pages]
        if found != list(range(self.size)):
            raise PeerError("ranks found in the buffers", found, list(range(self.size)))

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
        part, out = integers(part), integers(out)
        self._launch(work, part, out, digest, (0, 0, 0), _whole(work, 16 // work.item, part, out))

    def reduce(
        self, work: Work, flat: Tensor, out: Tensor, out_start: int, digest: int
    ) -> None:
        """This rank's slice of all ranks' FP32 roots `flat` `[R, n]`: each row of `out` by its
        program, from `out_start` on; where `work` gathers, every slice, each where it lies.

        **Order:** the programs', which `ops/tree.py` wrote. **Rounds:** once, to `out`'s dtype.
        """
        stride = flat.stride(0) if len(flat) > 1 else 0
        strides = stride, out_start, out.stride(0) if len(out) > 1 else 0
        whole = _whole(work, UNIT, flat, out) and not any(value % UNIT for value in strides)
        self._launch(work, flat, out, digest, strides, whole)

    def _launch(
        self,
        work: Work,
        source: Tensor,
        out: Tensor,
        digest: int,
        strides: tuple[int, int, int],
        whole: bool,
    ) -> None:
        width = (UNIT if work.programs else 16 // work.item) if whole else 1
        launch = plan(work, self.rank, self.shape, self.slot_words * 8, width)
        for peer, count in enumerate(launch.sent):
            self.bytes_sent[peer] += count
        operands = (
            source, out, integers(out), self.pages, self._on_device(work.slices), digest,
            self.shape.channels, self.slot_words, self.size, launch.chunk // UNIT, work.longest,
            *strides, *launch.constants,
        )  # fmt: skip
        options = {"num_warps": self.shape.num_warps, "enable_fp_fusion": False}
        Launch(peer_kernel, operands, options, launch.grid).start()

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
        """Start and length of slices, kept for good: a captured graph may read them again."""
        if slices not in self._slices:
            if capturing():
                accepted = "a call with the same sizes before the capture"
                raise PeerError("collective inside a CUDA graph", "its first call", accepted)
            flat = [value for start, stop in slices for value in (start, stop - start)]
            self._slices[slices] = torch.tensor(flat, device=self.device)
        return self._slices[slices]


def _whole(work: Work, unit: int, *tensors: Tensor) -> bool:
    """Whether everything begins and ends at multiples of `unit` elements and of 16 bytes."""
    bounds = (value for piece in work.slices for value in piece)
    return not any(t.data_ptr() % 16 for t in tensors) and not any(b % unit for b in bounds)


def integers(tensor: Tensor) -> Tensor:
    """Elements as integers of their width: what is copied is never touched as a number."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def capturing() -> bool:
    """Whether the current stream is recording a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
