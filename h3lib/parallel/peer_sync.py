"""Synchronisation of peer kernels: flags in the memory of each rank, written by its peers.

A rank's *page* is the head of its shared buffer, 64-bit words:

    epochs   [32]      the last epoch that rank p has announced here
    digests  [2, 32]   what rank p says it is doing, by the parity of the epoch
    aborts   [32]      why rank p has given up, 0 while it has not
    own words          epoch, status, timeout, rank; nobody else touches them

Patterns, each used by name in `peer_kernels.py` and tried alone in `bench/litmus.py`:

* **message passing** (`announce`, `wait`): data, then `st.release.sys` of the epoch; the peer's
  `ld.acquire.sys` that sees the epoch sees the data;
* **flag reuse**: epochs only grow, and a wait is for *at least* an epoch, so a flag is never
  cleared; a digest has two places by parity, since a peer may be one epoch ahead, never two;
* **bounded wait**: every wait ends at a deadline of the GPU's global timer;
* **abort** (`tell`): whoever gives up says why to all, and their waits end too.

An epoch is announced in stream order after the kernel that wrote the data, so the release covers
the writes of that kernel; what follows the wait in stream order sees what the acquire saw.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_PEERS = tl.constexpr(32)  # one lane of a warp each
EPOCHS = tl.constexpr(0)
DIGESTS = tl.constexpr(32)
ABORTS = tl.constexpr(96)
EPOCH = tl.constexpr(128)
STATUS = tl.constexpr(129)
TIMEOUT_NS = tl.constexpr(130)
RANK = tl.constexpr(131)
PAGE_WORDS = tl.constexpr(512)

MISSING = tl.constexpr(1)  # kinds of a status; the low 32 bits name the ranks
DISAGREES = tl.constexpr(2)
_EVER = tl.constexpr(1 << 62)


@triton.jit
def now_ns():
    """The GPU's global timer; the same for all processes on it."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def store_release(address, value, present):
    """`value` to each present lane's `address`, after everything this thread has seen or done."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.release.sys.global.u64 [$1], $2; "
        "mov.u32 $0, 0; }",
        "=r,l,l,r",
        [address, value, present.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def store_relaxed(address, value, present):
    """`value` to each present lane's `address`, visible to the system, in no order."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.relaxed.sys.global.u64 [$1], $2; "
        "mov.u32 $0, 0; }",
        "=r,l,l,r",
        [address, value, present.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_acquire(address, present, absent):
    """What each present lane's `address` holds, before everything that follows; else `absent`."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.u64 $0, $3; "
        "@p ld.acquire.sys.global.u64 $0, [$1]; }",
        "=&l,l,r,l",
        [address, present.to(tl.int32), absent],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_relaxed(address, present, absent):
    """What each present lane's `address` holds, in no order; else `absent`."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.u64 $0, $3; "
        "@p ld.relaxed.sys.global.u64 $0, [$1]; }",
        "=&l,l,r,l",
        [address, present.to(tl.int32), absent],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def announce(peers, rank, epoch, digest, present):
    """Message passing, the writer: tell every peer's page that this rank has reached `epoch`."""
    same = tl.zeros([MAX_PEERS], tl.int64)
    store_relaxed(peers + (DIGESTS + epoch % 2 * MAX_PEERS + rank) * 8, same + digest, present)
    store_release(peers + (EPOCHS + rank) * 8, same + epoch, present)


@triton.jit
def wait(page, epoch, digest, timeout_ns, present):
    """Message passing, the reader: until every peer has reached `epoch`; the status, 0 if well.

    `page` is this rank's page as a 64-bit address.
    """
    lane = tl.arange(0, MAX_PEERS).to(tl.int64)
    zero = tl.zeros([MAX_PEERS], tl.int64)
    deadline = now_ns() + timeout_ns
    seen = load_acquire(page + (EPOCHS + lane) * 8, present, zero + _EVER)
    aborts = load_relaxed(page + (ABORTS + lane) * 8, present, zero)
    waiting = (tl.min(seen, axis=0) < epoch) & (tl.max(aborts, axis=0) == 0)
    while waiting:
        seen = load_acquire(page + (EPOCHS + lane) * 8, present, zero + _EVER)
        aborts = load_relaxed(page + (ABORTS + lane) * 8, present, zero)
        waiting = (tl.min(seen, axis=0) < epoch) & (tl.max(aborts, axis=0) == 0)
        waiting = waiting & (now_ns() < deadline)
    theirs = load_relaxed(page + (DIGESTS + epoch % 2 * MAX_PEERS + lane) * 8, present, zero)
    missing = tl.sum(tl.where(present & (seen < epoch), zero + 1 << lane, zero), axis=0)
    other = tl.sum(tl.where(present & (theirs != digest), zero + 1 << lane, zero), axis=0)
    told = tl.max(aborts, axis=0)
    status = tl.where(other != 0, (DISAGREES << 32) + other, 0)
    status = tl.where(missing != 0, (MISSING << 32) + missing, status)
    return tl.where(told != 0, told, status)


@triton.jit
def tell(peers, rank, status, present):
    """Abort: tell every peer's page why this rank gives up."""
    same = tl.zeros([MAX_PEERS], tl.int64)
    store_relaxed(peers + (ABORTS + rank) * 8, same + status, present)
