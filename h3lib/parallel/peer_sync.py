"""Synchronisation of peer kernels: flags in the memory of each rank, written by its peers.

A *channel* is what one program of a collective does on every rank. A rank has a *page* for each
channel at the head of its shared buffer, 64-bit words:

    epochs   [32]      the last epoch that rank p has announced here
    digests  [2, 32]   what rank p says it is doing, by the parity of the epoch
    aborts   [32]      why rank p has given up, 0 while it has not; in the first page alone
    own words          the channel's epoch; in the first page status, timeout, rank,
                       and a mark by which peers know that they see this buffer

Patterns, each used by name in `peer_kernels.py` and tried alone in `bench/litmus.py`:

* **message passing** (`announce`, `wait`): data, then `st.release.sys` of the epoch; the peer's
  `ld.acquire.sys` that sees the epoch sees the data;
* **flag reuse**: epochs only grow, and a wait is for *at least* an epoch, so a flag is never
  cleared; a digest has two places by parity, since a peer may be one epoch ahead, never two;
* **bounded wait**: every wait ends at a deadline of the GPU's global timer;
* **abort** (`tell`): whoever gives up says why to all, and their waits end too.

Between the data and the flag, on both sides, stands a barrier of the program's threads. A wait is
one answer for all of them: lanes poll, and the answer is reduced over the whole program.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_PEERS = tl.constexpr(32)
EPOCHS = tl.constexpr(0)
DIGESTS = tl.constexpr(32)
ABORTS = tl.constexpr(96)
EPOCH = tl.constexpr(128)
STATUS = tl.constexpr(129)
TIMEOUT_NS = tl.constexpr(130)
RANK = tl.constexpr(131)
MARK = tl.constexpr(132)
PAGE_WORDS = tl.constexpr(256)

MISSING = tl.constexpr(1)  # kinds of a status; the low 32 bits name the ranks
DISAGREES = tl.constexpr(2)
_EVER = tl.constexpr(1 << 62)


@triton.jit
def now_ns(lane):
    """The GPU's global timer as each lane reads it; the same for all processes on it."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,l", [lane], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def store(address, value, present, HOW: tl.constexpr):
    """`value` to each present lane's `address`; HOW is PTX's order and scope."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st." + HOW + ".global.u64 [$1], $2; "
        "mov.u32 $0, 0; }",
        "=r,l,l,r",
        [address, value, present.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load(address, present, absent, HOW: tl.constexpr):
    """What each present lane's `address` holds, else `absent`; HOW is PTX's order and scope."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.u64 $0, $3; "
        "@p ld." + HOW + ".global.u64 $0, [$1]; }",
        "=&l,l,r,l",
        [address, present.to(tl.int32), absent],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def store_release(address, value, present):
    """A store after everything this thread has seen or done."""
    store(address, value, present, "release.sys")


@triton.jit
def store_relaxed(address, value, present):
    """A store visible to the system, in no order."""
    store(address, value, present, "relaxed.sys")


@triton.jit
def load_acquire(address, present, absent):
    """A load before everything that follows."""
    return load(address, present, absent, "acquire.sys")


@triton.jit
def load_relaxed(address, present, absent):
    """A load in no order."""
    return load(address, present, absent, "relaxed.sys")


@triton.jit
def announce(peers, rank, epoch, digest, present):
    """Message passing, the writer: tell every peer that this rank's channel has reached `epoch`.

    `peers` are the addresses of the channel's page on every rank.
    """
    same = peers * 0
    store_relaxed(peers + (DIGESTS + epoch % 2 * MAX_PEERS + rank) * 8, same + digest, present)
    store_release(peers + (EPOCHS + rank) * 8, same + epoch, present)


@triton.jit
def _progress(head, page, epoch, lane, present):
    """Flags, aborts, and for each lane 0 if its peer has come, 1 if not, 3 if it gave up."""
    seen = load_acquire(page + (EPOCHS + lane) * 8, present, lane * 0 + _EVER)
    told = load_relaxed(head + (ABORTS + lane) * 8, present, lane * 0)
    return seen, told, tl.where(told != 0, 3, (seen < epoch).to(tl.int32))


@triton.jit
def wait(head, page, epoch, digest, timeout_ns, lane, present):
    """Message passing, the reader: until every peer has reached `epoch`; the status, 0 if well.

    `page` is this rank's page of the channel and `head` its first one, as 64-bit addresses.
    """
    deadline = now_ns(lane) + timeout_ns
    seen, told, state = _progress(head, page, epoch, lane, present)
    worst = tl.max(state, axis=0)
    while worst == 1:
        seen, told, state = _progress(head, page, epoch, lane, present)
        worst = tl.max(tl.where((state == 1) & (now_ns(lane) >= deadline), 2, state), axis=0)
    bit = tl.where(lane < MAX_PEERS, (lane * 0 + 1) << (lane % MAX_PEERS), 0)
    theirs = load_relaxed(page + (DIGESTS + epoch % 2 * MAX_PEERS + lane) * 8, present, lane * 0)
    missing = tl.sum(tl.where(present & (seen < epoch), bit, 0), axis=0)
    other = tl.sum(tl.where(present & (theirs != digest), bit, 0), axis=0)
    reason = tl.max(told, axis=0)
    status = tl.where(other != 0, (DISAGREES << 32) + other, 0)
    status = tl.where(missing != 0, (MISSING << 32) + missing, status)
    return tl.where(reason != 0, reason, status)


@triton.jit
def tell(heads, rank, status, present):
    """Abort: tell every peer's first page why this rank gives up."""
    store_relaxed(heads + (ABORTS + rank) * 8, heads * 0 + status, present)
