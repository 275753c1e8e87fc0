"""Litmus tests of the peer protocol: `python -m h3lib.bench.litmus --out FILE`.

Programs of one kernel a GPU play ranks, on one GPU and, where there are two, in turn on both: the
primitives are those of `parallel/peer_sync.py`, the data are written and read by ordinary stores
and loads of all threads, 10^6 rounds in some seconds. A round is

    write into every rank's slot; announce; wait; read the own slot; count what is not right

    message passing   data before the flag; broken: the flag before the data
    flag reuse        two slots by parity; broken: one slot, which a fast rank overwrites
    digest reuse      two places by parity; broken: one place
    order             release and acquire; broken: relaxed
    scope             of the system; broken: of the GPU, which is enough on one
    abort             one rank stays away: all others name it, and it is told; broken: nobody tells

A broken variant that shows no error makes the test itself fail. One may show none: between GPUs the
memory model promises nothing at GPU scope, but a machine that keeps the order all the same is not
wrong. Its errors are counted, and any number passes.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton.language as tl
from torch import Tensor

from h3lib.bench.litmus_kernels import (
    EARLY_FLAG,
    GPU_SCOPE,
    NOT_TOLD,
    ONE_DIGEST,
    ONE_SLOT,
    RELAXED,
    TOLD,
    WARPS,
    WELL,
    WORDS,
    abort_kernel,
    exchange_kernel,
)
from h3lib.files import write_json
from h3lib.parallel.peer_sync import PAGE_WORDS
from h3lib.provenance import gpu_environment

SIZE = 8
ROUNDS, BROKEN_ROUNDS, ABORT_ROUNDS = 10**6, 10**5, 10**4
ABORT_TIMEOUT_NS = 50_000
NONE, SOME, ANY = "no error", "errors", "any number of errors"


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
    ("order", "broken: relaxed", RELAXED, BROKEN_ROUNDS, SOME),
)
SCOPES = {1: ("of the GPU, the only one", NONE), 2: ("broken: of the GPU, not of the system", ANY)}
ABORTS_TOLD = (("the protocol", TOLD, NONE), ("broken: nobody is told", NOT_TOLD, SOME))


def run_all(rounds: int = ROUNDS, abort_rounds: int = ABORT_ROUNDS) -> Iterator[Litmus]:
    """Every test once, on one GPU, then on two if there are."""
    for gpus in range(1, min(2, torch.cuda.device_count()) + 1):
        for test, name, variant, most, expected in EXCHANGES:
            count = min(rounds, most)
            errors = Ranks(gpus).exchange(count, variant)
            yield Litmus(test, name, gpus, SIZE, count, errors, expected)
        name, expected = SCOPES[gpus]
        errors = Ranks(gpus).exchange(rounds, GPU_SCOPE)
        yield Litmus("scope", name, gpus, SIZE, rounds, errors, expected)
        for name, variant, expected in ABORTS_TOLD:
            errors = Ranks(gpus).abort(abort_rounds, variant)
            yield Litmus("abort", name, gpus, SIZE, abort_rounds, errors, expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="commit that is tested, if not this checkout's")
    options = parser.parse_args()
    found = []
    for litmus in run_all():
        print(litmus, "passed" if litmus.passed else "FAILED", flush=True)
        found.append(litmus)
    content = {
        "environment": gpu_environment(options.commit),
        "litmus": [asdict(litmus) | {"passed": litmus.passed} for litmus in found],
        "passed": all(litmus.passed for litmus in found),
        "complete": True,
    }
    write_json(options.out, content)


if __name__ == "__main__":
    main()
