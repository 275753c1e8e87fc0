"""The kernel of the peer tree: one launch a collective, whose programs write into peers' memory.

A program is a *channel*: with the same program of every other rank it takes every `channels`-th
chunk of the elements, in steps. A rank's shared buffer is its pages (`peer_sync.py`) and two
*slots* for each channel. One step is

    push       the roots of a chunk of each peer's slice into that peer's slot of the coming epoch
    barrier    announce the epoch, wait for the same channel of every peer
    tree       the roots of a chunk of this rank's slice, added in the order of `ops/tree.py` and
               rounded once: its own from its tensor, its peers' from its slot. To the result, and
               in an all-reduce into every peer's slot of the coming epoch
    collect    the rounded chunks that the peers wrote into this rank's slot, to the result

Two slots are enough: a channel writes for epoch e + 1 after it has passed barrier e, so the channel
of every peer has announced e, hence has finished reading its slot of epoch e - 1, the same slot.

After an abort a kernel writes no peer's memory, and reads no slot; what is left of the results is
NaN (all bits set, for integers).
"""

from __future__ import annotations

import triton
import triton.language as tl

from h3lib.parallel.peer_sync import (
    EPOCH,
    PAGE_WORDS,
    STATUS,
    TIMEOUT_NS,
    announce,
    tell,
    wait,
)

UNIT = 8  # elements: rows of a slot begin at multiples, so that accesses are 16 bytes wide
ADD, OWN, SLOT, STORE = -1, -2, -3, -4
"""Steps of a program, for a stack: add the two values on top, the lower one left; push a root of
this rank; push a row of this rank's slot; pop a row of the result."""
_ADD, _OWN, _SLOT = tl.constexpr(ADD), tl.constexpr(OWN), tl.constexpr(SLOT)


@triton.jit
def _at(address, dtype: tl.constexpr):
    return tl.multiple_of(address.to(tl.pointer_type(dtype), bitcast=True), 16)


@triton.jit
def _bits(out):
    """Elements as integers of their width: what is copied is never touched as a number."""
    if out.dtype.element_ty == tl.bfloat16:
        return out.to(tl.pointer_type(tl.int16), bitcast=True)
    elif out.dtype.element_ty == tl.float32:
        return out.to(tl.pointer_type(tl.int32), bitcast=True)
    else:
        return out


@triton.jit
def _slot(base, channel, epoch, slot_words, num_pages):
    """The address of a channel's slot of an epoch, in the buffer at `base`."""
    words = num_pages * PAGE_WORDS + (epoch % 2 * num_pages + channel) * slot_words
    return base + words * 8


@triton.jit
def _piece(plan, member, begin, width, WIDTH: tl.constexpr):
    """Where the chunk that begins at `begin` of a member's slice lies, and its length."""
    start = tl.load(plan + 2 * member) + begin
    length = tl.minimum(tl.maximum(tl.load(plan + 2 * member + 1) - begin, 0), width)
    return tl.multiple_of(start, WIDTH), tl.multiple_of(length, WIDTH)


@triton.jit
def _copy(source, destination, length, readable, BLOCK: tl.constexpr):
    """`length` elements, all bits set from `readable` on."""
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(source + at, mask=at < readable, other=-1)
        tl.store(destination + at, value, mask=at < length)


@triton.jit
def _place(writer, reader):
    """The place of a writer among those that write into the slot of a reader."""
    return writer - (writer > reader)


@triton.jit
def _push(
    source, pages, plan, channel, epoch, slot_words, num_pages, size, stride, begin, width,
    RANK: tl.constexpr, ROOTS: tl.constexpr, MOST: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The chunk of every peer's slice, each of this rank's roots; the next rank's first."""
    for row in range(0, (size - 1) * ROOTS):
        peer, root = (RANK + 1 + row // ROOTS) % size, row % ROOTS
        start, length = _piece(plan, peer, begin, width, WIDTH)
        slot = _slot(tl.load(pages + peer), channel, epoch, slot_words, num_pages)
        slot = _at(slot, tl.float32) + (_place(RANK, peer) * MOST + root) * width
        _copy(source + tl.multiple_of(root * stride + start, WIDTH), slot, length, length, BLOCK)


@triton.jit
def _push_part(
    part, pages, channel, epoch, slot_words, num_pages, size, width, length,
    RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A chunk of this rank's part to every peer; the next rank first."""
    for turn in range(1, size):
        peer = (RANK + turn) % size
        slot = _slot(tl.load(pages + peer), channel, epoch, slot_words, num_pages)
        slot = _at(slot, part.dtype.element_ty) + _place(RANK, peer) * width
        _copy(part, slot, length, length, BLOCK)


@triton.jit
def _tree(
    own, slot, out, kept, stride, out_stride, width, length, readable,
    PROGRAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of the roots of this rank's slice, by a stack machine; copies of it to `kept`."""
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        stack = ()
        for step in tl.static_range(len(PROGRAM)):
            if PROGRAM[step][0] == _ADD:
                stack = stack[:-2] + (stack[-2] + stack[-1],)
            elif PROGRAM[step][0] == _OWN:
                row = own + PROGRAM[step][1] * stride
                stack = stack + (tl.load(row + at, mask=at < readable),)
            elif PROGRAM[step][0] == _SLOT:
                row = slot + PROGRAM[step][1] * width
                stack = stack + (tl.load(row + at, mask=at < readable),)
            else:
                root = tl.where(readable == length, stack[-1], float("nan"))
                root = root.to(out.dtype.element_ty)
                tl.store(out + PROGRAM[step][1] * out_stride + at, root, mask=at < length)
                for peer in tl.static_range(len(kept)):
                    tl.store(kept[peer] + at, root, mask=at < readable)
                stack = stack[:-1]


@triton.jit
def _collect(
    bits, slot, plan, size, begin, width, status,
    RANK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of every peer's part, from this rank's slot."""
    for turn in range(1, size):
        peer = (RANK + turn) % size
        start, length = _piece(plan, peer, begin, width, WIDTH)
        readable = tl.multiple_of(tl.where(status == 0, length, 0), WIDTH)
        _copy(slot + _place(peer, RANK) * width, bits + start, length, readable, BLOCK)


@triton.jit(do_not_specialize=[
    "digest", "num_pages", "slot_words", "size", "width_units", "longest", "stride", "out_start",
    "out_stride",
])  # fmt: skip
def peer_kernel(
    source, out, page, pages, plan, digest, num_pages, slot_words, size, width_units, longest,
    stride, out_start, out_stride, RANK: tl.constexpr, SIZE: tl.constexpr, PROGRAM: tl.constexpr,
    ROOTS: tl.constexpr, MOST: tl.constexpr, OFFSET: tl.constexpr, GATHER: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TREE_BLOCK: tl.constexpr, OUT_BLOCK: tl.constexpr,
    LANES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """A collective: reduce-scatter (PROGRAM alone), all-gather (GATHER alone), all-reduce (both).

    `page` is this rank's first page and `pages` are the addresses of all; `plan` holds start and
    length of every member's slice, `width_units` is the length of a chunk. A reduction takes ROOTS
    rows of `source`, `stride` apart; a rank has at most MOST. PROGRAM is subtrees in postfix: (OWN,
    root), (SLOT, row), (ADD, 0), (STORE, row of `out`). A gather takes `source`, this rank's part,
    as integers. Rounded slices and parts lie OFFSET rows into a slot.

    **Order:** that of `ops/tree.py`, from which PROGRAM was written down. **Rounds:** once, to
    the dtype of `out`.
    """
    LAG: tl.constexpr = 1 if GATHER and len(PROGRAM) > 0 else 0  # a chunk comes back a step later
    bits = _bits(out)
    integer: tl.constexpr = bits.dtype.element_ty
    lane = tl.arange(0, LANES).to(tl.int64)
    present = lane < SIZE
    channel, channels = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    heads, own = tl.load(pages + lane, mask=present, other=0), page.to(tl.int64)
    flags = own + channel * (PAGE_WORDS * 8)  # this channel's page
    epoch, status = tl.load(page + channel * PAGE_WORDS + EPOCH), tl.load(page + STATUS)
    timeout_ns = tl.load(page + TIMEOUT_NS)
    num_pages = num_pages.to(tl.int64)
    width = width_units.to(tl.int64) * UNIT
    stride = tl.multiple_of(stride.to(tl.int64), WIDTH)
    out_stride = tl.multiple_of(out_stride.to(tl.int64), WIDTH)
    chunks = tl.maximum(tl.cdiv(longest.to(tl.int64), width), 1)
    for turn in range(0, tl.cdiv(chunks - channel, channels) + LAG):
        begin = (channel + turn * channels) * width
        start, length = _piece(plan, RANK, begin, width, WIDTH)
        epoch += 1
        if status == 0:
            if ROOTS > 0:
                _push(source, pages, plan, channel, epoch, slot_words, num_pages, size, stride,
                      begin, width, RANK, ROOTS, MOST, WIDTH, BLOCK)  # fmt: skip
            if len(PROGRAM) == 0:
                _push_part(source + begin, pages, channel, epoch, slot_words, num_pages, size,
                           width, length, RANK, OUT_BLOCK)  # fmt: skip
        tl.debug_barrier()
        if status == 0:
            announce(heads + channel * (PAGE_WORDS * 8), RANK, epoch, digest, present)
            status = wait(own, flags, epoch, digest, timeout_ns, lane, present)
            if status != 0:
                tl.atomic_cas(page + STATUS, tl.full((), 0, tl.int64), status)
                tell(heads, RANK, status, present)
        tl.debug_barrier()
        readable = tl.multiple_of(tl.where(status == 0, length, 0), WIDTH)
        slot = _slot(own, channel, epoch, slot_words, num_pages)
        if len(PROGRAM) > 0:
            kept = ()
            for turn_of in tl.static_range(1, SIZE if LAG else 1):
                peer = (RANK + turn_of) % SIZE
                there = _slot(tl.load(pages + peer), channel, epoch + 1, slot_words, num_pages)
                there = _at(there + OFFSET * width * 4, out.dtype.element_ty)
                kept = kept + (there + _place(RANK, peer) * width,)
            _tree(source + start, _at(slot, tl.float32), out + tl.multiple_of(
                out_start + begin, WIDTH), kept, stride, out_stride, width, length, readable,
                PROGRAM, TREE_BLOCK)  # fmt: skip
        else:
            _copy(source + begin, bits + start, length, readable, OUT_BLOCK)
        if GATHER:
            if turn >= LAG:
                back = begin - LAG * channels * width
                _collect(bits, _at(slot + OFFSET * width * 4, integer), plan, size, back, width,
                         status, RANK, WIDTH, OUT_BLOCK)  # fmt: skip
    tl.store(page + channel * PAGE_WORDS + EPOCH, epoch)
