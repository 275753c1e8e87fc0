"""Kernels of the litmus tests (`litmus.py`): programs play ranks, a channel each.

Broken variants leave out one thing that the protocol does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from h3lib.parallel.peer_sync import (
    ABORTS,
    DIGESTS,
    EPOCHS,
    MAX_PEERS,
    MISSING,
    announce,
    load,
    load_acquire,
    load_relaxed,
    now_ns,
    store,
    store_relaxed,
    store_release,
    tell,
    wait,
)

WARPS = 8
LANES = tl.constexpr(256)  # as many threads as a channel has
WORDS = tl.constexpr(256)  # of a writer: one a thread
SECOND_NS = tl.constexpr(10**9)
WELL, EARLY_FLAG, ONE_SLOT, ONE_DIGEST, RELAXED, GPU_SCOPE = (tl.constexpr(i) for i in range(6))
TOLD, NOT_TOLD = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def _now_ns(lane):
    """One time for all threads."""
    return tl.max(now_ns(lane), axis=0)


@triton.jit
def _pause(lane, duration_ns):
    until = _now_ns(lane) + duration_ns
    now = _now_ns(lane)
    while now < until:
        now = _now_ns(lane)


@triton.jit
def _dawdle(lane, epoch, rank):
    """Now and then a rank is late, another one each time."""
    if (epoch * 7 + rank * 3) % 16 == 0:
        _pause(lane, 2000)


@triton.jit
def _weak_exchange(peers, own, rank, epoch, lane, present, VARIANT: tl.constexpr):
    """Announce and wait without the order, or the scope, that the protocol has; 1 if late."""
    same = lane * 0
    flags = own + (EPOCHS + lane) * 8
    there = peers + (EPOCHS + rank) * 8
    if VARIANT == RELAXED:
        store_relaxed(there, same + epoch, present)
    else:
        store(there, same + epoch, present, "release.gpu")
    deadline = _now_ns(lane) + SECOND_NS
    seen = tl.min(same, axis=0)
    while (seen < epoch) & (_now_ns(lane) < deadline):
        if VARIANT == RELAXED:
            seen = tl.min(load_relaxed(flags, present, same + epoch), axis=0)
        else:
            seen = tl.min(load(flags, present, same + epoch, "acquire.gpu"), axis=0)
    return (seen < epoch).to(tl.int64)


@triton.jit
def _slot(slots, reader, place, writer, SIZE: tl.constexpr):
    """What a rank writes into the slot of a reader."""
    address = tl.load(slots + reader) + (place * SIZE + writer) * WORDS * 8
    return address.to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit(do_not_specialize=["first", "step", "rounds"])
def exchange_kernel(
    pages, slots, errors, first, step, rounds, SIZE: tl.constexpr, VARIANT: tl.constexpr
):
    """`rounds` rounds by the ranks of one GPU: `first`, `first + step`, ...

    `errors[rank]` counts wrong words and failed waits."""
    rank = tl.program_id(0).to(tl.int64) * step + first
    lane = tl.arange(0, LANES).to(tl.int64)
    present = lane < SIZE
    peers = tl.load(pages + lane, mask=present, other=0)
    own = tl.load(pages + rank)
    word = tl.arange(0, WORDS)
    same = lane * 0
    wrong = tl.zeros([WORDS], tl.int64)
    failed = tl.full((), 0, tl.int64)
    epoch = tl.full((), 0, tl.int64)
    while (epoch < rounds) & (failed == 0):
        epoch += 1
        digest = epoch * 1000003
        place = epoch % 2
        if VARIANT == ONE_SLOT:
            place = epoch * 0
        if VARIANT == EARLY_FLAG:
            announce(peers, rank, epoch, digest, present)
            _dawdle(lane, epoch, rank)
        for reader in tl.static_range(SIZE):
            value = ((epoch * SIZE + rank) * SIZE + reader) * WORDS + word
            tl.store(_slot(slots, reader, place, rank, SIZE) + word, value)
        tl.debug_barrier()
        if (VARIANT == RELAXED) | (VARIANT == GPU_SCOPE):
            failed += _weak_exchange(peers, own, rank, epoch, lane, present, VARIANT)
        else:
            if VARIANT == ONE_DIGEST:
                for parity in tl.static_range(2):
                    at = DIGESTS + parity * MAX_PEERS + rank
                    store_relaxed(peers + at * 8, same + digest, present)
                store_release(peers + (EPOCHS + rank) * 8, same + epoch, present)
            elif VARIANT != EARLY_FLAG:
                announce(peers, rank, epoch, digest, present)
            _dawdle(lane, epoch + 1, rank)
            status = wait(own, own, epoch, digest, SECOND_NS, lane, present)
            failed += (status != 0).to(tl.int64)
        tl.debug_barrier()
        _dawdle(lane, epoch + 2, rank)
        for peer in tl.static_range(SIZE):
            theirs = tl.load(_slot(slots, rank, place, peer, SIZE) + word)
            value = ((epoch * SIZE + peer) * SIZE + rank) * WORDS + word
            wrong += (theirs != value).to(tl.int64)
        tl.debug_barrier()
    tl.store(errors + rank, tl.sum(wrong, axis=0) + failed)


@triton.jit
def _meet(peers, own, rank, epoch, lane, present):
    """An epoch of all, whatever was told."""
    announce(peers, rank, epoch, epoch, present)
    flags = own + (EPOCHS + lane) * 8
    deadline = _now_ns(lane) + SECOND_NS
    seen = tl.min(load_acquire(flags, present, lane * 0 + epoch), axis=0)
    while (seen < epoch) & (_now_ns(lane) < deadline):
        seen = tl.min(load_acquire(flags, present, lane * 0 + epoch), axis=0)


@triton.jit(do_not_specialize=["first", "step", "rounds", "timeout_ns"])
def abort_kernel(
    pages, errors, first, step, rounds, timeout_ns, SIZE: tl.constexpr, VARIANT: tl.constexpr
):
    """In round r rank r % SIZE comes only after the others have given up."""
    rank = tl.program_id(0).to(tl.int64) * step + first
    lane = tl.arange(0, LANES).to(tl.int64)
    present = lane < SIZE
    peers = tl.load(pages + lane, mask=present, other=0)
    own = tl.load(pages + rank)
    one, same = tl.full((), 1, tl.int64), lane * 0
    wrong = tl.full((), 0, tl.int64)
    epoch = tl.full((), 1, tl.int64)
    round_index = tl.full((), 0, tl.int64)
    if rounds > 0:
        _meet(peers, own, rank, epoch, lane, present)  # the kernels of both GPUs run
    while round_index < rounds:
        away = round_index % SIZE
        epoch += 3
        if rank == away:
            _pause(lane, 3 * timeout_ns)
        announce(peers, rank, epoch - 2, epoch, present)
        status = wait(own, own, epoch - 2, epoch, timeout_ns, lane, present)
        if VARIANT == TOLD:
            tell(peers, rank, status, present)
        wrong += (status != (one * MISSING << 32) + (one << away)).to(tl.int64)
        tl.debug_barrier()
        _meet(peers, own, rank, epoch - 1, lane, present)  # all have told
        store_relaxed(own + (ABORTS + lane) * 8, same, present)
        tl.debug_barrier()
        _meet(peers, own, rank, epoch, lane, present)  # all have cleared their pages
        round_index += 1
    tl.store(errors + rank, wrong)
