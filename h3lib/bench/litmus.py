"""Litmus tests of the peer protocol: `python -m h3lib.bench.litmus --out FILE`.

Programs of one kernel play ranks: the primitives are those of `parallel/peer_sync.py`, the data are
written and read by ordinary stores and loads, 10^6 rounds in a few seconds. A round is

    write this rank's slot; announce; wait; read the slots of all ranks; count what is not right

    message passing   data before the flag; broken: the flag before the data
    flag reuse        two slots by parity; broken: one slot, which a fast rank overwrites
    digest reuse      two places by parity; broken: one place
    abort             one rank stays away: every other names it, and it is told

A broken variant that shows no error makes the test itself fail.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl

from h3lib.bench.measure import environment
from h3lib.files import write_json
from h3lib.parallel.peer_sync import (
    ABORTS,
    DIGESTS,
    EPOCHS,
    MAX_PEERS,
    MISSING,
    PAGE_WORDS,
    announce,
    load_acquire,
    now_ns,
    store_relaxed,
    store_release,
    tell,
    wait,
)

SIZE = 8
ROUNDS, BROKEN_ROUNDS, ABORT_ROUNDS = 10**6, 10**5, 10**4
ABORT_TIMEOUT_NS = 50_000
WORDS = tl.constexpr(128)  # of a slot: four a lane
SECOND_NS = tl.constexpr(10**9)
WELL, EARLY_FLAG, ONE_SLOT, ONE_DIGEST = (tl.constexpr(i) for i in range(4))


@triton.jit
def _pause(duration_ns):
    until = now_ns() + duration_ns
    now = now_ns()
    while now < until:
        now = now_ns()


@triton.jit
def _dawdle(epoch, rank):
    """Now and then a rank is late, another one each time."""
    if (epoch * 7 + rank * 3) % 16 == 0:
        _pause(2000)


@triton.jit
def exchange_kernel(pages, slots, errors, rounds, SIZE: tl.constexpr, VARIANT: tl.constexpr):
    """`rounds` rounds by SIZE programs; `errors[rank]` counts wrong words and failed waits."""
    rank = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, MAX_PEERS)
    present = lane < SIZE
    peers = tl.load(pages + lane, mask=present, other=0)
    own = tl.load(pages + rank)
    word = tl.arange(0, WORDS)
    same = tl.zeros([MAX_PEERS], tl.int64)
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
            _dawdle(epoch, rank)
        mine = slots + (place * SIZE + rank) * WORDS + word
        tl.store(mine, (epoch * SIZE + rank) * WORDS + word)
        tl.debug_barrier()
        if VARIANT == ONE_DIGEST:
            for parity in tl.static_range(2):
                at = DIGESTS + parity * MAX_PEERS + rank
                store_relaxed(peers + at * 8, same + digest, present)
            store_release(peers + (EPOCHS + rank) * 8, same + epoch, present)
        elif VARIANT != EARLY_FLAG:
            announce(peers, rank, epoch, digest, present)
        _dawdle(epoch + 1, rank)
        status = wait(own, epoch, digest, SECOND_NS, present)
        failed += (status != 0).to(tl.int64)
        tl.debug_barrier()
        _dawdle(epoch + 2, rank)
        for peer in tl.static_range(SIZE):
            theirs = tl.load(slots + (place * SIZE + peer) * WORDS + word)
            wrong += (theirs != (epoch * SIZE + peer) * WORDS + word).to(tl.int64)
        tl.debug_barrier()
    tl.store(errors + rank, tl.sum(wrong, axis=0) + failed)


@triton.jit
def _meet(peers, own, rank, epoch, present):
    """An epoch of all, whatever was told."""
    announce(peers, rank, epoch, epoch, present)
    same = tl.zeros([MAX_PEERS], tl.int64)
    flags = own + (EPOCHS + tl.arange(0, MAX_PEERS).to(tl.int64)) * 8
    deadline = now_ns() + SECOND_NS
    seen = tl.min(load_acquire(flags, present, same + epoch), axis=0)
    while (seen < epoch) & (now_ns() < deadline):
        seen = tl.min(load_acquire(flags, present, same + epoch), axis=0)


@triton.jit
def abort_kernel(pages, errors, rounds, timeout_ns, SIZE: tl.constexpr):
    """In round r rank r % SIZE comes only after the others have given up."""
    rank = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, MAX_PEERS)
    present = lane < SIZE
    peers = tl.load(pages + lane, mask=present, other=0)
    own = tl.load(pages + rank)
    one = tl.full((), 1, tl.int64)
    wrong = tl.full((), 0, tl.int64)
    epoch = tl.full((), 0, tl.int64)
    round_index = tl.full((), 0, tl.int64)
    while round_index < rounds:
        away = round_index % SIZE
        epoch += 3
        if rank == away:
            _pause(3 * timeout_ns)
        announce(peers, rank, epoch - 2, epoch, present)
        status = wait(own, epoch - 2, epoch, timeout_ns, present)
        tell(peers, rank, status, present)
        wrong += (status != (one * MISSING << 32) + (one << away)).to(tl.int64)
        tl.debug_barrier()
        _meet(peers, own, rank, epoch - 1, present)  # all have told
        cleared = own + (ABORTS + lane.to(tl.int64)) * 8
        store_relaxed(cleared, tl.zeros([MAX_PEERS], tl.int64), present)
        tl.debug_barrier()
        _meet(peers, own, rank, epoch, present)  # all have cleared their pages
        round_index += 1
    tl.store(errors + rank, wrong)


@dataclass(frozen=True)
class Litmus:
    """One test: how many rounds, how many errors, and whether there must be some."""

    test: str
    variant: str
    ranks: int
    rounds: int
    errors: int
    must_fail: bool

    @property
    def passed(self) -> bool:
        return self.errors >= 0 and (self.errors > 0) == self.must_fail


class Pages:
    """Fresh pages of SIZE ranks in one allocation, and the slots between them."""

    def __init__(self):
        self.words = torch.zeros(SIZE, PAGE_WORDS.value, dtype=torch.int64, device="cuda")
        self.pages = torch.tensor([page.data_ptr() for page in self.words], device="cuda")
        self.slots = torch.zeros(2 * SIZE * WORDS.value, dtype=torch.int64, device="cuda")
        self.errors = torch.full((SIZE,), -1, dtype=torch.int64, device="cuda")

    def exchange(self, rounds: int, variant: tl.constexpr) -> int:
        exchange_kernel[SIZE,](
            self.pages, self.slots, self.errors, rounds, SIZE, variant.value, num_warps=1
        )
        return self._total()

    def abort(self, rounds: int) -> int:
        abort_kernel[SIZE,](
            self.pages, self.errors, rounds, ABORT_TIMEOUT_NS, SIZE, num_warps=1
        )
        return self._total()

    def _total(self) -> int:
        if int(self.errors.min()) < 0:
            return -1  # a program did not end
        return int(self.errors.sum())


VARIANTS = (
    ("message passing and flag reuse", "the protocol", WELL, ROUNDS, False),
    ("message passing", "broken: the flag before the data", EARLY_FLAG, BROKEN_ROUNDS, True),
    ("flag reuse", "broken: one slot", ONE_SLOT, BROKEN_ROUNDS, True),
    ("digest reuse", "broken: one place for digests", ONE_DIGEST, BROKEN_ROUNDS, True),
)


def run_all(rounds: int = ROUNDS, abort_rounds: int = ABORT_ROUNDS) -> list[Litmus]:
    """Every test once."""
    found = []
    for test, name, variant, most, must_fail in VARIANTS:
        count = min(rounds, most)
        errors = Pages().exchange(count, variant)
        found.append(Litmus(test, name, SIZE, count, errors, must_fail))
    errors = Pages().abort(abort_rounds)
    found.append(Litmus("abort", "the protocol", SIZE, abort_rounds, errors, False))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True, help="commit that is tested")
    options = parser.parse_args()
    found = run_all()
    for litmus in found:
        print(litmus, "passed" if litmus.passed else "FAILED", flush=True)
    content = {
        "environment": environment() | {"commit": options.commit},
        "litmus": [asdict(litmus) | {"passed": litmus.passed} for litmus in found],
        "passed": all(litmus.passed for litmus in found),
        "complete": True,
    }
    write_json(options.out, content)


if __name__ == "__main__":
    main()
