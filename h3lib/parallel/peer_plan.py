"""What a launch of the peer kernel is given: programs of the tree, rows of a slot, chunks, blocks.

Every rank derives the same chunks and rows from what all ranks of a group know, so nothing about
them is sent.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from h3lib.contract import OperandError
from h3lib.ops.tree import root_nodes, tree_sum
from h3lib.parallel.peer_kernels import ADD, OWN, STORE, UNIT
from h3lib.parallel.transport import Slice, group_spans, num_roots

_CHUNK_UNIT = 16  # elements: a chunk of any dtype is a multiple of 16 bytes
Program = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shape:
    """How a collective fills the GPU; the same on every rank of a group, and never in the bits."""

    channels: int = 528
    """Programs at most: four a multiprocessor of an H200. Beside a product, fewer."""
    pieces: int = 4
    """Chunks a channel takes of a large message: it stages one while others use the links."""
    grain: int = 1024
    """Elements: a chunk is a multiple, but where a slot has no room for one."""
    num_warps: int = 8
    block_bytes: int = 16384
    """What a program loads before it uses it."""

    def chunk(self, longest: int, room: int) -> int:
        """Elements of a chunk of slices of at most `longest`, where a slot has `room` for so many.

        0 if not even the smallest fits."""
        grains = max(1, -(-longest // (self.channels * self.pieces * self.grain)))
        fit = room // self.grain * self.grain or room // _CHUNK_UNIT * _CHUNK_UNIT
        return min(grains * self.grain, fit)


@dataclass(frozen=True)
class Work:
    """One collective, as all ranks of a group know it.

    A reduction has `roots[p]` roots of rank p, and a program for each root of the group. `slices`
    are what each rank finishes of a row, or brings to a gather. `item` is the size of a result.
    """

    slices: tuple[Slice, ...]
    item: int
    gather: bool
    roots: tuple[int, ...] = ()
    programs: tuple[Program, ...] = ()

    @property
    def longest(self) -> int:
        return max(stop - start for start, stop in self.slices)

    @property
    def one_shot(self) -> bool:
        """Whether all ranks finish the same slice."""
        return len(self.roots) > 1 and len(set(self.slices)) == 1

    @property
    def rows(self) -> int:
        """Rows of a slot for one root: a slice of each peer, or the one of all."""
        return 1 if self.one_shot else len(self.slices) - 1

    def bytes_read(self, rank: int) -> list[int]:
        """What `rank` reads from the memory of each rank, its own too.

        4 |own slice| a root, and what it gathers; its own rounded slice it has.
        """
        length = self.slices[rank][1] - self.slices[rank][0]
        read = [0] * len(self.slices)
        for peer, _ in (step for program in self.programs for step in program if step[0] != ADD):
            read[peer] += 4 * length
        for peer, (start, stop) in enumerate(self.slices):
            if self.gather and not (self.programs and peer == rank):
                read[peer] += (stop - start) * self.item
        return read


@dataclass(frozen=True)
class Plan:
    """The launch of a `Work` on one rank."""

    grid: tuple[int]
    chunk: int
    staged: int
    """Rows that a chunk of this rank's roots takes in a slot."""
    constants: tuple
    read: tuple[int, ...]
    """Bytes, from the memory of each rank."""


@functools.lru_cache(1024)
def plan(work: Work, rank: int, shape: Shape, slot_bytes: int, width: int) -> Plan:
    """**Raises:** OperandError if a slot has no room for the smallest chunk."""
    offset = work.rows * max(work.roots, default=0)
    row_bytes = 4 * offset + work.gather * work.item
    chunk = shape.chunk(work.longest, slot_bytes // max(1, row_bytes))
    if not chunk:
        accepted = f"at most {slot_bytes // _CHUNK_UNIT}"
        raise OperandError("bytes of a slot for one element", row_bytes, accepted)
    mine = work.roots[rank] if work.roots else 0
    loads = max((sum(p != ADD for p, _ in program) for program in work.programs), default=1)
    most = _power(chunk)
    constants = (
        rank, len(work.slices), shape.channels, _placed(work, rank), max(1, mine), offset,
        work.one_shot, work.gather, width,
        min(_power(shape.block_bytes // 4), most),
        min(max(_power(2 * shape.block_bytes // 4 // max(1, loads)), 256), most),
        min(_power(shape.block_bytes // work.item), most), 32 * shape.num_warps, UNIT,
    )  # fmt: skip
    grid = min(shape.channels, max(1, -(-work.longest // chunk)))
    staged = work.rows * mine
    return Plan((grid,), chunk, staged, constants, tuple(work.bytes_read(rank)))


def _power(number: int) -> int:
    """The power of two that is not less."""
    return 1 << (number - 1).bit_length()


def _placed(work: Work, rank: int) -> Program:
    """All programs, with the row of the peer's slot where a root lies; own ones are not staged."""

    def place(step: tuple[int, int]) -> tuple[int, int]:
        peer, root = step
        if peer == rank:
            return OWN, root
        if peer == ADD or work.one_shot:
            return peer, root
        return peer, (rank - (rank > peer)) * work.roots[peer] + root

    return tuple(
        step
        for row, program in enumerate(work.programs)
        for step in (*map(place, program), (STORE, row))
    )


class _Term:
    """A value of the tree, written down instead of computed: postfix steps."""

    def __init__(self, *steps: tuple[int, int]):
        self.steps = steps

    def __add__(self, right: _Term) -> _Term:
        return _Term(*self.steps, *right.steps, (ADD, 0))


@functools.cache
def roots_of_ranks(cuts: tuple[int, ...], first: int, size: int) -> tuple[int, ...]:
    """How many maximal subtree roots each rank of the group has."""
    return tuple(num_roots(cuts, first + rank) for rank in range(size))


@functools.cache
def tree_programs(cuts: tuple[int, ...], first: int, size: int) -> tuple[Program, ...]:
    """One program for each maximal subtree root of the group's leaves: what `tree_sum` adds.

    A step is (rank, root), or (ADD, 0).
    """
    counts = roots_of_ranks(cuts, first, size)
    terms = [[_Term((r, i)) for i in range(n)] for r, n in enumerate(counts)]
    nodes = root_nodes(terms, cuts, first)
    return tuple(tree_sum(nodes.get, span).steps for span in group_spans(cuts, first, size))
