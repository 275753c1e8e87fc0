"""Kernels of the peer tree: stage, barrier, then pull or tree; each reads peers, none writes them.

A rank's shared buffer is its page (`peer_sync.py`) and two *slots*. One step of a collective is

    stage      this rank's elements into the slot of the coming epoch
    barrier    announce the epoch, wait for every peer: one warp, so that ranks may share a GPU
    pull       every peer's part from its slot           (gather)
    tree       every rank's roots from its slot, added in the order of `ops/tree.py`, rounded once

Two slots are enough: a rank stages epoch e + 1 after it has passed barrier e, so every peer has
reached barrier e, hence has finished reading the slot of epoch e - 1, the same slot.

After an abort no kernel reads a peer or changes its own slot: a slot that a slower peer still reads
stays as it was, and memory of a rank that is gone is not touched. Results are filled with NaN (all
bits set, for integers).
"""

from __future__ import annotations

import triton
import triton.language as tl

from h3lib.parallel.peer_sync import (
    EPOCH,
    MAX_PEERS,
    PAGE_WORDS,
    RANK,
    STATUS,
    TIMEOUT_NS,
    announce,
    tell,
    wait,
)

ADD = -1  # in a program: add the two values on top of the stack, the lower one left
UNIT = 8  # elements: offsets inside a slot are multiples, so that accesses are 16 bytes wide
BLOCK = 2048
NUM_WARPS = 8
MAX_PROGRAMS = 64  # they saturate 18 NVLinks, and leave the other multiprocessors to products
STAGE_PROGRAMS = 528  # staging is local: 64 programs read 1 TB/s of an H200's memory, not 4
COPY_BLOCK = 4096  # four loads of 16 bytes a thread in flight
OPTIONS = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}


@triton.jit(do_not_specialize=["digest"])
def barrier_kernel(page, pages, digest, SIZE: tl.constexpr):
    """One epoch forward, all ranks together; after a failure it returns at once."""
    present = tl.arange(0, MAX_PEERS) < SIZE
    epoch = tl.load(page + EPOCH) + 1
    rank = tl.load(page + RANK)
    timeout_ns = tl.load(page + TIMEOUT_NS)
    status = tl.load(page + STATUS)
    tl.store(page + EPOCH, epoch)
    peers = tl.load(pages + tl.arange(0, MAX_PEERS), mask=present, other=0)
    own = tl.load(pages + rank)
    if status == 0:
        announce(peers, rank, epoch, digest, present)
        status = wait(own, epoch, digest, timeout_ns, present)
        if status != 0:
            tl.store(page + STATUS, status)
            tell(peers, rank, status, present)


@triton.jit
def _slot(base, epoch, slot_words, dtype: tl.constexpr):
    """Where the slot of an epoch begins, in the buffer at the 64-bit address `base`."""
    address = base + (PAGE_WORDS + epoch % 2 * slot_words) * 8
    return tl.multiple_of(address.to(tl.pointer_type(dtype), bitcast=True), 16)


@triton.jit
def _segment(plan, index, WIDTH: tl.constexpr):
    """(from, to, length) of a segment, all multiples of WIDTH elements."""
    source = tl.multiple_of(tl.load(plan + index * 3), WIDTH)
    destination = tl.multiple_of(tl.load(plan + index * 3 + 1), WIDTH)
    return source, destination, tl.multiple_of(tl.load(plan + index * 3 + 2), WIDTH)


@triton.jit
def _unless_failed(page, length, WIDTH: tl.constexpr):
    """`length`, 0 after an abort."""
    return tl.multiple_of(tl.where(tl.load(page + STATUS) == 0, length, 0), WIDTH)


@triton.jit
def _copy(source, destination, length, readable, BLOCK: tl.constexpr):
    """`length` elements, by all programs of the first grid axis; ones from `readable` on."""
    for start in range(tl.program_id(0) * BLOCK, length, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(source + at, mask=at < readable, other=-1)
        tl.store(destination + at, value, mask=at < length)


@triton.jit(do_not_specialize=["slot_words"])
def stage_kernel(
    source, page, pages, plan, slot_words, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Segments of this rank's tensor into its own slot of the coming epoch; none after an abort."""
    dtype: tl.constexpr = source.dtype.element_ty
    base = tl.load(pages + tl.load(page + RANK))
    slot = _slot(base, tl.load(page + EPOCH) + 1, slot_words, dtype)
    begin, end, length = _segment(plan, tl.program_id(1), WIDTH)
    length = _unless_failed(page, length, WIDTH)
    _copy(source + begin, slot + end, length, length, BLOCK)


@triton.jit(do_not_specialize=["slot_words"])
def pull_kernel(out, page, pages, plan, slot_words, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One segment from each peer's slot into this rank's tensor."""
    dtype: tl.constexpr = out.dtype.element_ty
    peer = tl.program_id(1)
    slot = _slot(tl.load(pages + peer), tl.load(page + EPOCH), slot_words, dtype)
    begin, end, length = _segment(plan, peer, WIDTH)
    readable = _unless_failed(page, length, WIDTH)
    _copy(slot + begin, out + end, length, readable, BLOCK)


@triton.jit(do_not_specialize=["slot_words", "part", "width_units", "length_units", "out_units"])
def tree_kernel(
    out,
    page,
    pages,
    slot_words,
    part,
    width_units,
    length_units,
    out_units,
    PROGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One subtree of one part, from the roots in every rank's slot.

    A slot holds `[parts, R, width]`. PROGRAM is the subtree in postfix: (rank, root, R of that
    rank), or (ADD, 0, 0). **Order:** that of `ops/tree.py`, from which it was written down.
    **Rounds:** once, to the dtype of `out`.
    """
    epoch = tl.load(page + EPOCH)
    length = length_units.to(tl.int64) * UNIT
    readable = _unless_failed(page, length, UNIT)
    width = width_units.to(tl.int64) * UNIT
    out += out_units.to(tl.int64) * UNIT
    for start in range(tl.program_id(0) * BLOCK, length, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        stack = ()
        for step in tl.static_range(len(PROGRAM)):
            if PROGRAM[step][0] < 0:
                stack = stack[:-2] + (stack[-2] + stack[-1],)
            else:
                slot = _slot(tl.load(pages + PROGRAM[step][0]), epoch, slot_words, tl.float32)
                row = part * PROGRAM[step][2] + PROGRAM[step][1]
                stack = stack + (tl.load(slot + row * width + at, mask=at < readable),)
        root = tl.where(readable == length, stack[0], float("nan"))
        tl.store(out + at, root.to(out.dtype.element_ty), mask=at < length)
