"""The kernel of the peer tree: one launch a collective, whose programs read peers and write none.

A program is a *channel*: with the same program of every other rank it takes every `channels`-th
chunk of the elements, in steps. A rank's shared buffer is its pages (`peer_sync.py`) and two
*slots* for each channel. One step is

    stage      what peers read of a chunk, into the slot of the coming epoch
    barrier    announce the epoch, wait for the same channel of every peer
    tree       the roots of this rank's slice, added in the order of `ops/tree.py`, rounded once:
               its own from its tensor, its peers' from their slots; to the result, and in an
               all-reduce to the slot of the coming epoch, which the next step's barrier publishes
    pull       every peer's part, or rounded slice, from its slot

Two slots are enough: a channel stages epoch e + 1 after it has passed barrier e, so the channel of
every peer has announced e, hence has finished reading the slot of epoch e - 1, the same slot.

After an abort a kernel reads no peer and changes no slot, so that a slower peer finds its slot as
it was; what is left of the results is NaN (all bits set, for integers).
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

ADD, OWN, STORE = -1, -2, -3
"""Steps of a program, for a stack: add the two values on top, the lower one left; push a root of
this rank; pop a row of the result. Any other number pushes a row of the slot of that peer."""
_ADD, _OWN, _STORE = tl.constexpr(ADD), tl.constexpr(OWN), tl.constexpr(STORE)
UNIT = 8  # elements: rows of a slot begin at multiples, so that accesses are 16 bytes wide


@triton.jit
def _at(address, dtype: tl.constexpr):
    return tl.multiple_of(address.to(tl.pointer_type(dtype), bitcast=True), 16)


@triton.jit
def _slot(base, channel, epoch, slot_words, CHANNELS: tl.constexpr):
    """The address of a channel's slot of an epoch, in the buffer at `base`."""
    words = CHANNELS * PAGE_WORDS + (epoch % 2 * CHANNELS + channel) * slot_words
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
def _stage(
    source, slot, plan, stride, begin, width, rows,
    RANK: tl.constexpr, ROOTS: tl.constexpr, ONE_SHOT: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """This rank's roots of the chunk of every other slice, or of the slice that all finish."""
    for row in range(0, rows):
        member = row // ROOTS
        if not ONE_SHOT:
            member += (member >= RANK).to(tl.int32)
        start, length = _piece(plan, member, begin, width, WIDTH)
        start = tl.multiple_of(row % ROOTS * stride + start, WIDTH)
        _copy(source + start, slot + row * width, length, length, BLOCK)


@triton.jit
def _tree(
    own, out, kept, slots, stride, out_stride, width, length, readable,
    PROGRAM: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of the roots of this rank's slice: a stack machine; `kept` is a copy of them."""
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        stack = ()
        for step in tl.static_range(len(PROGRAM)):
            if PROGRAM[step][0] == _ADD:
                stack = stack[:-2] + (stack[-2] + stack[-1],)
            elif PROGRAM[step][0] == _STORE:
                root = tl.where(readable == length, stack[-1], float("nan"))
                root = root.to(out.dtype.element_ty)
                tl.store(out + PROGRAM[step][1] * out_stride + at, root, mask=at < length)
                if KEEP:
                    tl.store(kept + at, root, mask=at < readable)
                stack = stack[:-1]
            elif PROGRAM[step][0] == _OWN:
                row = own + PROGRAM[step][1] * stride
                stack = stack + (tl.load(row + at, mask=at < readable),)
            else:
                row = slots[PROGRAM[step][0]] + PROGRAM[step][1] * width
                stack = stack + (tl.load(row + at, mask=at < readable),)


@triton.jit
def _pull(
    bits, pages, plan, channel, epoch, slot_words, size, begin, width, status,
    OFFSET: tl.constexpr, RANK: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of every peer's part from its slot, OFFSET roots in; the next rank's first."""
    for turn in range(1, size):
        peer = (RANK + turn) % size
        start, length = _piece(plan, peer, begin, width, WIDTH)
        readable = tl.multiple_of(tl.where(status == 0, length, 0), WIDTH)
        slot = _slot(tl.load(pages + peer), channel, epoch, slot_words, CHANNELS)
        part = _at(slot + OFFSET * width * 4, bits.dtype.element_ty)
        _copy(part, bits + start, length, readable, BLOCK)


@triton.jit(do_not_specialize=[
    "digest", "slot_words", "size", "rows", "width_units", "longest", "stride", "out_start",
    "out_stride",
])  # fmt: skip
def peer_kernel(
    source, out, bits, pages, plan, digest, slot_words, size, rows, width_units, longest, stride,
    out_start, out_stride, RANK: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr,
    PROGRAM: tl.constexpr, ROOTS: tl.constexpr, OFFSET: tl.constexpr, ONE_SHOT: tl.constexpr, GATHER: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    TREE_BLOCK: tl.constexpr, OUT_BLOCK: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """A collective: reduce-scatter (PROGRAM alone), all-gather (GATHER alone), all-reduce (both).

    `plan` holds start and length of every member's slice. A reduction takes ROOTS roots, rows of
    `source` that lie `stride` apart, and stages `rows` of them a chunk: of every other slice, or, where
    all slices are one, of that one. PROGRAM is subtrees in postfix: (peer, row of its slot), (OWN,
    root), (ADD, 0), (STORE, row of `out`). A gather takes `source`, this rank's part. OFFSET is where rounded slices
    lie in a slot, in rows. `width_units` is the length of a chunk. `bits` is `out` as integers.

    **Order:** that of `ops/tree.py`, from which PROGRAM was written down. **Rounds:** once, to
    the dtype of `out`.
    """
    LAG: tl.constexpr = 1 if GATHER and len(PROGRAM) > 0 else 0  # a chunk is pulled a step later
    lane = tl.arange(0, LANES).to(tl.int64)
    present = lane < SIZE
    channel = tl.program_id(0).to(tl.int64)
    channels = tl.num_programs(0).to(tl.int64)
    own = tl.load(pages + RANK)
    heads = tl.load(pages + lane, mask=present, other=0)
    head, page = _at(own, tl.int64), own + channel * (PAGE_WORDS * 8)
    epoch = tl.load(_at(page, tl.int64) + EPOCH)
    status = tl.load(head + STATUS)
    timeout_ns = tl.load(head + TIMEOUT_NS)
    width = width_units.to(tl.int64) * UNIT
    stride = tl.multiple_of(stride.to(tl.int64), WIDTH)
    out_stride = tl.multiple_of(out_stride.to(tl.int64), WIDTH)
    chunks = tl.maximum(tl.cdiv(longest.to(tl.int64), width), 1)
    for turn in range(0, tl.cdiv(chunks - channel, channels) + LAG):
        begin = (channel + turn * channels) * width
        slot = _slot(own, channel, epoch + 1, slot_words, CHANNELS)
        if status == 0:
            if len(PROGRAM) > 0:
                _stage(source, _at(slot, tl.float32), plan, stride, begin, width,
                       rows, RANK, ROOTS, ONE_SHOT, WIDTH, BLOCK)  # fmt: skip
            else:
                _, length = _piece(plan, RANK, begin, width, WIDTH)
                kept = _at(slot, bits.dtype.element_ty)
                _copy(source + begin, kept, length, length, OUT_BLOCK)
        tl.debug_barrier()
        epoch += 1
        if status == 0:
            announce(heads + channel * (PAGE_WORDS * 8), RANK, epoch, digest, present)
            status = wait(own, page, epoch, digest, timeout_ns, lane, present)
            if status != 0:
                tl.atomic_cas(head + STATUS, tl.full((), 0, tl.int64), status)
                tell(heads, RANK, status, present)
        tl.debug_barrier()
        start, length = _piece(plan, RANK, begin, width, WIDTH)
        readable = tl.multiple_of(tl.where(status == 0, length, 0), WIDTH)
        if len(PROGRAM) > 0:
            slots = ()
            for peer in tl.static_range(SIZE):
                address = _slot(tl.load(pages + peer), channel, epoch, slot_words, CHANNELS)
                slots = slots + (_at(address, tl.float32),)
            kept = _slot(own, channel, epoch + 1, slot_words, CHANNELS) + OFFSET * width * 4
            _tree(source + start, out + tl.multiple_of(out_start + begin, WIDTH),
                  _at(kept, out.dtype.element_ty), slots, stride, out_stride, width, length,
                  readable, PROGRAM, LAG, TREE_BLOCK)  # fmt: skip
        else:
            _copy(source + begin, bits + start, length, readable, OUT_BLOCK)
        if GATHER:
            if turn >= LAG:
                back = begin - LAG * channels * width
                _pull(bits, pages, plan, channel, epoch, slot_words, size, back, width, status,
                      OFFSET, RANK, CHANNELS, WIDTH, OUT_BLOCK)  # fmt: skip
    tl.store(_at(page, tl.int64) + EPOCH, epoch)
