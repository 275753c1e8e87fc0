"""Litmus tests of the peer protocol: `python -m h3lib.bench.litmus --out FILE`.

Programs of one kernel a GPU play ranks, on one GPU and, where there are two, in turn on both: the
primitives are those of `parallel/peer_sync.py`, the data are written and read by ordinary stores
and loads of all threads, 10^6 rounds in some seconds. A round is

    write into every rank's slot; announce; wait; read the own slot; count what is not right

    message passing   data before the flag; broken: the flag before the data
    flag reuse        two slots by parity; broken: one slot, which a fast rank overwrites
    digest reuse      two places by parity; broken: one place
    order and scope   release and acquire at system scope; broken: relaxed, or at GPU scope
    abort             one rank stays away: all others name it, and it is told; broken: nobody tells

A broken variant that shows no error makes the test itself fail, but for order and scope: the memory
model promises nothing there, and a GPU that happens to keep the order is not wrong. Its errors are
counted, and either number passes.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    load_relaxed,
    now_ns,
    store_relaxed,
    store_release,
    tell,
    wait,
)

SIZE, WARPS = 8, 8
ROUNDS, BROKEN_ROUNDS, ABORT_ROUNDS = 10**6, 10**5, 10**4
ABORT_TIMEOUT_NS = 50_000
LANES = tl.constexpr(256)  # as many threads as a channel has
WORDS = tl.constexpr(256)  # of a writer: one a thread
SECOND_NS = tl.constexpr(10**9)
WELL, EARLY_FLAG, ONE_SLOT, ONE_DIGEST, RELAXED, GPU_SCOPE = (tl.constexpr(i) for i in range(6))
TOLD, NOT_TOLD = tl.constexpr(0), tl.constexpr(1)
NONE, SOME, ANY = "no error", "errors", "any number of errors"


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
def _store_gpu(address, value, present):
    """A release at the scope of this GPU."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.release.gpu.global.u64 [$1], $2; "
        "mov.u32 $0, 0; }",
        "=r,l,l,r",
        [address, value, present.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load_gpu(address, present, absent):
    """An acquire at the scope of this GPU."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.u64 $0, $3; "
        "@p ld.acquire.gpu.global.u64 $0, [$1]; }",
        "=&l,l,r,l",
        [address, present.to(tl.int32), absent],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _weak_exchange(peers, own, rank, epoch, lane, present, VARIANT: tl.constexpr):
    """Announce and wait without the order, or the scope, that the protocol has; 1 if late."""
    same = lane * 0
    flags = own + (EPOCHS + lane) * 8
    there = peers + (EPOCHS + rank) * 8
    if VARIANT == RELAXED:
        store_relaxed(there, same + epoch, present)
    else:
        _store_gpu(there, same + epoch, present)
    deadline = _now_ns(lane) + SECOND_NS
    seen = tl.min(same, axis=0)
    while (seen < epoch) & (_now_ns(lane) < deadline):
        if VARIANT == RELAXED:
            seen = tl.min(load_relaxed(flags, present, same + epoch), axis=0)
        else:
            seen = tl.min(_load_gpu(flags, present, same + epoch), axis=0)
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


@dataclass(frozen=True)
class Litmus:
    """One test: on how many GPUs, how many rounds, how many errors, and what is expected of them:
    NONE, SOME or ANY."""

    test: str
    variant: str
    gpus: int
    ranks: int
    rounds: int
    errors: int
    expected: str

    @property
    def passed(self) -> bool:
        """-1 errors: a program did not end."""
        if self.expected == ANY:
            return self.errors >= 0
        return self.errors > 0 if self.expected == SOME else self.errors == 0


class Ranks:
    """Fresh pages and slots of SIZE ranks, in turn on `gpus` GPUs that reach each other."""

    def __init__(self, gpus: int):
        self.gpus = gpus
        devices = [torch.device("cuda", rank % gpus) for rank in range(SIZE)]
        for device in devices[:gpus]:  # a copy makes PyTorch map the peer's memory
            for other in devices[:gpus]:
                torch.zeros(1, device=other).to(device)
        zeros = functools.partial(torch.zeros, dtype=torch.int64)
        self.words = [zeros(PAGE_WORDS.value, device=device) for device in devices]
        self.slots = [zeros(2 * SIZE * WORDS.value, device=device) for device in devices]
        self.errors = [zeros(SIZE, device=device) for device in devices[:gpus]]

    def exchange(self, rounds: int, variant: tl.constexpr) -> int:
        slots = [self._addresses(self.slots, errors.device) for errors in self.errors]

        def launch(first: int, pages: Tensor, errors: Tensor, rounds: int) -> None:
            exchange_kernel[SIZE // self.gpus,](
                pages, slots[first], errors, first, self.gpus, rounds, SIZE, variant.value,
                num_warps=WARPS,
            )  # fmt: skip

        return self._run(launch, rounds)

    def abort(self, rounds: int, variant: tl.constexpr) -> int:
        def launch(first: int, pages: Tensor, errors: Tensor, rounds: int) -> None:
            abort_kernel[SIZE // self.gpus,](
                pages, errors, first, self.gpus, rounds, ABORT_TIMEOUT_NS, SIZE, variant.value,
                num_warps=WARPS,
            )  # fmt: skip

        return self._run(launch, rounds)

    def _addresses(self, tensors: list[Tensor], device: torch.device) -> Tensor:
        return torch.tensor([tensor.data_ptr() for tensor in tensors], device=device)

    def _run(self, launch: Callable[[int, Tensor, Tensor, int], None], rounds: int) -> int:
        """Errors of all ranks; -1 if a program did not end. No round is played until the kernels of
        all GPUs are loaded."""
        pages = [self._addresses(self.words, errors.device) for errors in self.errors]
        for played in (0, rounds):
            for first, errors in enumerate(self.errors):
                with torch.cuda.device(first):
                    launch(first, pages[first], errors.fill_(-1), played)
            found = [errors.tolist()[rank :: self.gpus] for rank, errors in enumerate(self.errors)]
        counts = [count for of_gpu in found for count in of_gpu]
        return -1 if min(counts) < 0 else sum(counts)


EXCHANGES = (
    ("message passing and flag reuse", "the protocol", WELL, ROUNDS, NONE),
    ("message passing", "broken: the flag before the data", EARLY_FLAG, BROKEN_ROUNDS, SOME),
    ("flag reuse", "broken: one slot", ONE_SLOT, BROKEN_ROUNDS, SOME),
    ("digest reuse", "broken: one place for digests", ONE_DIGEST, BROKEN_ROUNDS, SOME),
    ("order", "broken: relaxed", RELAXED, ROUNDS, ANY),
    ("scope", "broken: of the GPU, not of the system", GPU_SCOPE, ROUNDS, ANY),
)
ABORTS_TOLD = (("the protocol", TOLD, NONE), ("broken: nobody is told", NOT_TOLD, SOME))


def run_all(rounds: int = ROUNDS, abort_rounds: int = ABORT_ROUNDS) -> Iterator[Litmus]:
    """Every test once, on one GPU, then on two if there are."""
    for gpus in range(1, min(2, torch.cuda.device_count()) + 1):
        for test, name, variant, most, expected in EXCHANGES:
            count = min(rounds, most)
            errors = Ranks(gpus).exchange(count, variant)
            yield Litmus(test, name, gpus, SIZE, count, errors, expected)
        for name, variant, expected in ABORTS_TOLD:
            errors = Ranks(gpus).abort(abort_rounds, variant)
            yield Litmus("abort", name, gpus, SIZE, abort_rounds, errors, expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True, help="commit that is tested")
    options = parser.parse_args()
    found = []
    for litmus in run_all():
        print(litmus, "passed" if litmus.passed else "FAILED", flush=True)
        found.append(litmus)
    content = {
        "environment": environment() | {"commit": options.commit},
        "litmus": [asdict(litmus) | {"passed": litmus.passed} for litmus in found],
        "passed": all(litmus.passed for litmus in found),
        "complete": True,
    }
    write_json(options.out, content)


if __name__ == "__main__":
    main()
