"""What a launch of the peer kernel is given: programs of the tree, rows of a slot, chunks, blocks.

Every rank derives the same chunks and rows from what all ranks of a group know, so nothing about
them is sent.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from h3lib.contract import OperandError
from h3lib.ops.tree import root_nodes, tree_sum
from h3lib.parallel.peer_kernels import ADD, OWN, SLOT, STORE, UNIT
from h3lib.parallel.transport import Slice, group_spans, num_roots

_CHUNK_UNIT = 16  # elements: a chunk of any dtype is a multiple of 16 bytes
Program = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shape:
    """How a collective fills the GPU; the same on every rank of a group, and never in the bits."""

    channels: int = 264
    """Programs at most: two a multiprocessor of an H200. Beside a product, fewer."""
    pieces: int = 4
    """Chunks a channel takes of a large message: it pushes one while others are added."""
    piece_bytes: int = 16384
    """Of a chunk: what is less is not cut into pieces."""
    grain_bytes: int = 4096
    """A chunk is a multiple, but where a slot has no room for one."""
    num_warps: int = 8
    block_bytes: int = 32768
    """What a program loads before it uses it."""

    @property
    def options(self) -> dict[str, object]:
        """Of the compiler: registers for two programs of eight warps a multiprocessor."""
        return {"num_warps": self.num_warps, "enable_fp_fusion": False, "maxnreg": 128}

    def chunk(self, longest: int, item: int, room: int) -> int:
        """Elements of a chunk of slices of at most `longest`, where a slot has `room` for so many.

        0 if not even the smallest fits."""
        grain, each = self.grain_bytes // item, -(-longest // self.channels)
        wanted = max(-(-each // self.pieces), min(each, self.piece_bytes // item), 1)
        room = room // grain * grain or room // _CHUNK_UNIT * _CHUNK_UNIT
        return min(-(-wanted // grain) * grain, room)


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

    def whole(self, unit: int) -> bool:
        """Whether all slices begin and end at multiples of `unit` elements."""
        return not any(bound % unit for piece in self.slices for bound in piece)

    def bytes_sent(self, rank: int) -> list[int]:
        """What `rank` writes into the memory of a peer: 4 R |its slice|, and |own slice| rounded;
        nothing into its own."""
        own = (self.slices[rank][1] - self.slices[rank][0]) * self.item * self.gather
        roots = 4 * self.roots[rank] if self.roots else 0
        sent = [roots * (stop - start) + own for start, stop in self.slices]
        return sent[:rank] + [0] + sent[rank + 1 :]


@dataclass(frozen=True, eq=False)
class Plan:
    """The launch of a `Work` on one rank."""

    grid: tuple[int, int, int]
    sizes: tuple[int, int]
    """Length of a chunk in units, of the longest slice in elements."""
    constants: tuple
    sent: tuple[int, ...]
    """Bytes, into the memory of each rank."""


@functools.lru_cache(1024)
def plan(work: Work, rank: int, shape: Shape, slot_bytes: int, aligned: bool) -> Plan:
    """`aligned`: this rank's operands begin, and their rows lie apart, by whole units.

    **Raises:** OperandError if a slot has no room for the smallest chunk."""
    unit = UNIT if work.programs else 16 // work.item
    width = unit if aligned and work.whole(unit) else 1
    writers, most = len(work.slices) - 1, max(work.roots, default=0)
    row_bytes = writers * (4 * most + work.gather * work.item)
    item = 4 if work.programs else work.item
    chunk = shape.chunk(work.longest, item, slot_bytes // max(1, row_bytes))
    if not chunk:
        accepted = f"at most {slot_bytes // _CHUNK_UNIT}"
        raise OperandError("bytes of a slot for one element", row_bytes, accepted)
    program = _placed(work, rank, most)
    loads = sum(kind in (OWN, SLOT) for kind, _ in program)
    block = _power(shape.block_bytes // 4)
    blocks = block, block // max(1, _power(loads) // 2), _power(shape.block_bytes // work.item)
    constants = (
        rank, len(work.slices), program, work.roots[rank] if work.roots else 0,
        most, writers * most, work.gather, width,
        *(min(number, _power(chunk)) for number in blocks), 32 * shape.num_warps, UNIT,
    )  # fmt: skip
    grid = min(shape.channels, max(1, -(-work.longest // chunk)))
    sizes, sent = (chunk // UNIT, work.longest), tuple(work.bytes_sent(rank))
    return Plan((grid, 1, 1), sizes, constants, sent)


def _power(number: int) -> int:
    """The power of two that is not less."""
    return 1 << (number - 1).bit_length()


def _placed(work: Work, rank: int, most: int) -> Program:
    """All programs, with the row of this rank's slot where a peer's root lies."""

    def place(step: tuple[int, int]) -> tuple[int, int]:
        peer, root = step
        if peer == ADD:
            return step
        return (OWN, root) if peer == rank else (SLOT, (peer - (peer > rank)) * most + root)

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
