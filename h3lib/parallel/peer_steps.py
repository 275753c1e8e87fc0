"""The steps of a peer collective as launches: shared buffers, plans, programs of the tree.

`PeerSteps` knows no failure policy: a step is launched, `status` says later how it went.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from h3lib.contract import OperandError, PeerError
from h3lib.ops.tree import root_nodes, tree_sum
from h3lib.parallel.peer_kernels import (
    ADD,
    BLOCK,
    COPY_BLOCK,
    MAX_PROGRAMS,
    OPTIONS,
    STAGE_PROGRAMS,
    UNIT,
    barrier_kernel,
    pull_kernel,
    stage_kernel,
    tree_kernel,
)
from h3lib.parallel.peer_memory import GRANULE, Driver, SharedBuffers
from h3lib.parallel.peer_room import PLACE_BYTES, Room
from h3lib.parallel.peer_sync import ABORTS, PAGE_WORDS, RANK, STATUS, TIMEOUT_NS
from h3lib.parallel.transport import group_spans, num_roots

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Segment = tuple[int, int, int]
"""(first element there, first element here, how many)."""


class PeerSteps:
    """Launches on the current stream; `rank` and `size` count inside the group of `control`.

    `bytes_read[p]` counts what was read from rank p's memory.
    """

    def __init__(self, control, capacity_bytes: int, timeout_s: float, driver: Driver):
        """Collective. **Raises:** PeerError on every rank if memory cannot be shared."""
        self.control, self.driver = control, driver
        self.rank, self.size = control.rank, control.size
        self.slot_words = max(1, capacity_bytes // 8 // UNIT) * UNIT
        num_bytes = (PAGE_WORDS.value + 2 * self.slot_words) * 8
        self.buffers = SharedBuffers(control, -(-num_bytes // GRANULE) * GRANULE, driver)
        self._plans: dict[tuple[Segment, ...], Tensor] = {}
        self._side, self.room, self.bytes_read = None, None, [0] * self.size
        self.place_bytes = min(PLACE_BYTES, 4 * capacity_bytes)
        addresses = self.buffers.addresses
        self.page = driver.words(addresses[self.rank], PAGE_WORDS.value)
        self.pages = torch.tensor(addresses, device=self.page.device)
        self.page[RANK.value] = self.rank
        self.page[TIMEOUT_NS.value] = int(timeout_s * 1e9)
        self.synchronize()
        self._check_mapping()

    def _check_mapping(self) -> None:
        """Every rank finds every rank where it looks for it."""
        self.control.gather_objects(None)
        pages = [self.driver.words(a, PAGE_WORDS.value) for a in self.buffers.addresses]
        found = self.control.gather_objects([int(page[RANK.value]) for page in pages])
        for rank, ranks in enumerate(found):
            if ranks != list(range(self.size)):
                self.buffers.release()
                subject = f"ranks that rank {rank} of the group finds in the shared buffers"
                raise PeerError(subject, ranks, list(range(self.size)))

    @property
    def device(self) -> torch.device:
        return self.page.device

    @property
    def slot_bytes(self) -> int:
        return self.slot_words * 8

    @property
    def status(self) -> tuple[int, list[int]]:
        """(kind, ranks of the group that it names) of the first failure; kind 0 if there is none.

        Waits for the current stream."""
        status = int(self.page[STATUS.value])
        return status >> 32, [rank for rank in range(self.size) if status >> rank & 1]

    def open_room(self) -> Room:
        """Memory for roots, opened when it is asked for first. Collective then.

        **Raises:** PeerError on every rank if memory cannot be shared, or inside a CUDA graph."""
        if self.room is None:
            if capturing():
                raise _first_call_in_graph()
            self.room = Room(self.control, self.place_bytes, self.driver)
        return self.room

    def release(self) -> None:
        """Unmap and free."""
        self.buffers.release()
        if self.room is not None:
            self.room.release()

    def row_width(self, rows: int, longest: int) -> int:
        """FP32 elements of each of a slot's rows: `longest` whole units, or as many as fit."""
        fit = self.slot_words * 2 // max(1, rows) // UNIT * UNIT
        if not fit:
            raise OperandError("roots times slices", rows, f"at most {self.slot_words * 2 // UNIT}")
        return min(fit, max(1, -(-longest // UNIT)) * UNIT)

    def stage(self, source: Tensor, segments: tuple[Segment, ...]) -> None:
        """From this rank's tensor into its slot of the coming epoch."""
        if segments:
            grid, plan, width = self._copies(segments, source, STAGE_PROGRAMS)
            stage_kernel[grid](
                source, self.page, self.pages, plan, self.slot_words, width, COPY_BLOCK, **OPTIONS
            )

    def barrier(self, digest: int) -> None:
        """All ranks reach the next epoch, or the status says why not."""
        barrier_kernel[1,](self.page, self.pages, digest, SIZE=self.size, num_warps=1)

    def pull(self, out: Tensor, segments: tuple[Segment, ...]) -> None:
        """One segment from each rank's slot into `out`."""
        for peer, (_, _, length) in enumerate(segments):
            self.bytes_read[peer] += length * out.element_size()
        grid, plan, width = self._copies(segments, out, MAX_PROGRAMS)
        pull_kernel[grid](
            out, self.page, self.pages, plan, self.slot_words, width, COPY_BLOCK, **OPTIONS
        )

    def tree(
        self, out: Tensor, programs: tuple, part: int, width: int, length: int, offset: int
    ) -> None:
        """Each row of `out`, from `offset` on, by its program from the slots' rows of one part.

        **Order:** the program's, which `ops/tree.py` wrote. **Rounds:** once, to `out`'s dtype.
        """
        self._tree(out, programs, (self.pages, self.slot_words), part, width, length, offset)

    def tree_in_room(
        self, out: Tensor, programs: tuple, flat: Tensor, start: int, length: int
    ) -> None:
        """The same from the rows `flat[0, start:]` that every rank has at one place of its room."""
        if self.room.is_new(flat, start) and capturing():
            raise _first_call_in_graph()
        slots = self.room.slots(flat, start), 0  # at fixed addresses, whatever the epoch
        self._tree(out, programs, slots, 0, 0, length, 0)

    def _tree(
        self,
        out: Tensor,
        programs: tuple,
        slots: tuple[Tensor, int],
        part: int,
        width: int,
        length: int,
        offset: int,
    ) -> None:
        if length <= 0:
            return
        grid = (min(-(-length // BLOCK), MAX_PROGRAMS),)
        units = width // UNIT, -(-length // UNIT), offset // UNIT
        for row, program in zip(out, programs, strict=True):
            for peer, _, roots in program:
                self.bytes_read[peer] += 4 * length * (roots > 0)
            tree_kernel[grid](
                row, self.page, *slots, part, *units,
                PROGRAM=program, BLOCK=BLOCK, UNIT=UNIT, **OPTIONS,
            )  # fmt: skip

    def give_up(self, kind: int, ranks: list[int]) -> None:
        """End this rank's waits from a stream of its own; the kernels then tell the others."""
        status = (kind << 32) + sum(1 << rank for rank in ranks)
        self._side = self._side or torch.cuda.Stream()
        with torch.cuda.stream(self._side):
            self.page[ABORTS.value + self.rank].fill_(status)

    def synchronize(self) -> None:
        if self.page.is_cuda:
            torch.cuda.synchronize()

    def _copies(
        self, segments: tuple[Segment, ...], tensor: Tensor, programs: int
    ) -> tuple[tuple[int, int], Tensor, int]:
        """Grid, plan on the device, and how many elements may move at a time."""
        wide = 16 // tensor.element_size()
        aligned = tensor.data_ptr() % 16 == 0
        aligned = aligned and all(value % wide == 0 for segment in segments for value in segment)
        blocks = -(-max(length for *_, length in segments) // COPY_BLOCK)
        grid = (min(max(blocks, 1), max(1, programs // len(segments))), len(segments))
        return grid, self._plan(segments), wide if aligned else 1

    def _plan(self, segments: tuple[Segment, ...]) -> Tensor:
        """Segments on the device, kept for good: a captured graph may read them again."""
        if segments not in self._plans:
            if capturing():
                raise _first_call_in_graph()
            flat = [value for segment in segments for value in segment]
            self._plans[segments] = torch.tensor(flat, device=self.device)
        return self._plans[segments]


def _first_call_in_graph() -> PeerError:
    accepted = "a call with the same sizes before the capture"
    return PeerError("collective inside a CUDA graph", "its first call", accepted)


class _Term:
    """A value of the tree, written down instead of computed: postfix steps."""

    def __init__(self, *steps: tuple[int, int, int]):
        self.steps = steps

    def __add__(self, right: _Term) -> _Term:
        return _Term(*self.steps, *right.steps, (ADD, 0, 0))


@functools.cache
def tree_programs(cuts: tuple[int, ...], first: int, size: int) -> tuple[tuple, ...]:
    """One program for each maximal subtree root of the group's leaves: what `tree_sum` adds.

    A step is (rank, root, number of roots of that rank), or (ADD, 0, 0).
    """
    counts = [num_roots(cuts, first + rank) for rank in range(size)]
    terms = [[_Term((r, i, n)) for i in range(n)] for r, n in enumerate(counts)]
    nodes = root_nodes(terms, cuts, first)
    return tuple(tree_sum(nodes.get, span).steps for span in group_spans(cuts, first, size))


def integers(tensor: Tensor) -> Tensor:
    """Elements as integers of their width: what is copied is never touched as a number."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def padded(num_spans: int, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A result whose rows begin and end at whole units; what is past `length` is not used."""
    return torch.empty(num_spans, -(-length // UNIT) * UNIT, device=device, dtype=dtype)


def capturing() -> bool:
    """Whether the current stream is recording a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
