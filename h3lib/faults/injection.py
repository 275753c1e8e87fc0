"""`h3lib faults`: break collectives on purpose and look at what the others do.

Each injection has one victim. Every survivor must raise one typed error that names the victim and
the cause, within the timeout plus 5 s, return no wrong byte, and be refused by the failed group; a
new group of as many ranks must give the old digest; no process, no buffer and no GPU memory may be
left.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.context import BaseContext
from pathlib import Path

import torch
from tqdm import tqdm

from h3lib.contract import H3Error
from h3lib.faults.catalogue import CAUSES, Injection, draw, well
from h3lib.faults.world import Played, World
from h3lib.files import write_json
from h3lib.report import environment

SLACK_S = 5.0  # beyond the timeout, for a survivor's error
_FREED_S = 20.0  # for the driver to take back the memory of processes that ended
_MOST_JOBS = 8


class FaultsError(H3Error, ValueError):
    """Injections, ranks or jobs that cannot be run."""


@dataclass(frozen=True)
class Outcome:
    """What one injection led to; everything but the first three should be 0."""

    injection: Injection
    error: str
    waited_s: float
    hangs: int
    wrong_bytes: int
    untyped_errors: int
    unnamed_errors: int
    unnamed_causes: int
    different_errors: int
    late_errors: int
    not_refused: int
    new_group_wrong: int
    buffers_left: int
    processes_left: int

    @property
    def passed(self) -> bool:
        return not any(getattr(self, count) for count in COUNTS)


COUNTS = (
    "hangs",
    "wrong_bytes",
    "untyped_errors",
    "unnamed_errors",
    "unnamed_causes",
    "different_errors",
    "late_errors",
    "not_refused",
    "new_group_wrong",
    "buffers_left",
    "processes_left",
)


def judge(injection: Injection, played: Played) -> Outcome:
    """Count what must not be."""
    found, expected = played.first, injection.expects_error()
    survivors = {rank: f for rank, f in found.items() if rank != injection.victim}
    texts = {f["error"] for f in survivors.values()}
    bound = injection.timeout_s + SLACK_S
    return Outcome(
        injection=injection,
        error=min(texts, default="", key=len),
        waited_s=round(max((f["waited_s"] for f in survivors.values()), default=0.0), 3),
        hangs=len(played.hangs),
        wrong_bytes=sum(f["wrong_bytes"] for f in found.values()),
        untyped_errors=sum(
            bool(f["error"]) != expected or not f["typed"] or not f["closed"]
            for f in found.values()
        ),
        unnamed_errors=sum(not _names(text, injection) for text in texts) if expected else 0,
        unnamed_causes=sum(not re.search(CAUSES[injection.fault], text) for text in texts)
        if expected
        else 0,
        different_errors=max(0, len(texts) - 1),
        late_errors=sum(f["waited_s"] > bound for f in survivors.values()),
        not_refused=sum(not f["refused"] for f in found.values()) if expected else 0,
        new_group_wrong=injection.num_ranks - sum(s["equal"] for s in played.second.values()),
        buffers_left=sum(s["kept"] for s in played.second.values()),
        processes_left=played.processes_left,
    )


def _names(text: str, injection: Injection) -> bool:
    """Whether the subject is the victim; of two ranks that disagree nobody knows which is wrong."""
    two = injection.num_ranks == 2 * injection.levels
    subject = text if two else text.partition(": received")[0]
    return re.search(rf"\brank(s \[)? ?{injection.victim}\b", subject) is not None


def run_faults(
    count: int, seed: int, out: Path, device: str = "cpu", num_ranks: int = 4, jobs: int = 0
) -> int:
    """Run `count` random injections, `jobs` at a time, and write `out`; 0 if none of them went
    wrong, else 1. As many jobs as the processors carry, at most 8, if it is 0. What is injected
    depends on the seed alone.

    **Raises:** FaultsError for a count, or a number of ranks or jobs, that cannot be run.
    """
    if count < 1:
        raise FaultsError("count", count, "at least 1")
    if not 2 <= num_ranks <= 8:
        raise FaultsError("ranks", num_ranks, "2 to 8")
    if jobs < 0:
        raise FaultsError("jobs", jobs, "at least 1")
    jobs = jobs or max(1, min(_MOST_JOBS, (os.cpu_count() or 1) // num_ranks))
    context = multiprocessing.get_context("forkserver")
    gpu = ["h3lib.parallel.peer"] if device == "cuda" else []
    context.set_forkserver_preload(["h3lib.faults.rank", "h3lib.faults.server", *gpu])
    where = environment(device, "node-a")  # first: it may make this process a GPU context
    began, before = time.monotonic(), _gpu_bytes(context, device)
    campaign = Campaign(context, draw(count, seed, device, num_ranks), min(jobs, count))
    outcomes: dict[int, Outcome] = {}
    run = {"seed": seed, "jobs": campaign.jobs, "gpus": len(before), "seconds": 0.0}
    for outcome in tqdm(campaign.play(), "faults", count, unit="injection", disable=None, delay=2):
        outcomes[outcome.injection.number] = outcome
        if not outcome.passed:
            print(outcome, flush=True)
        run["seconds"] = round(time.monotonic() - began, 1)
        _write(out, outcomes, where, run)
    left = {
        "processes_left": campaign.processes_left,
        "gpu_bytes_left": _gpu_bytes_left(context, device, before),
    }
    totals = _write(out, outcomes, where, run, left)
    print(f"{count} injections, {num_ranks} ranks, {device}, {run['seconds']} s: {totals}")
    return int(any(totals.values()))


class Campaign:
    """Injections, played by several worlds at once; each takes the next that nobody has taken."""

    def __init__(self, context: BaseContext, injections: list[Injection], jobs: int):
        self.injections, self.jobs, self.processes_left = injections, jobs, 0
        self._worlds = [World(context, injections[0].num_ranks) for _ in range(jobs)]

    def play(self) -> Iterator[Outcome]:
        """Outcomes as they come. On GPUs injections of nothing come first: they compile kernels.

        **Raises:** FaultsError if nothing is injected and something is wrong.
        """
        first = self.injections[0]
        try:
            if first.device == "cuda":
                for outcome in self._play_all(well(first.device, first.num_ranks)):
                    if not outcome.passed:
                        raise FaultsError("outcome without a fault", outcome, "nothing wrong")
            yield from self._play_all(self.injections)
        finally:
            self.processes_left = sum(world.end() for world in self._worlds)

    def _play_all(self, injections: list[Injection]) -> Iterator[Outcome]:
        waiting, done = queue.SimpleQueue(), queue.SimpleQueue()
        for injection in injections:
            waiting.put(injection)

        def play(world: World) -> None:
            try:
                while True:
                    injection = waiting.get_nowait()
                    done.put(judge(injection, world.play(injection)))
            except queue.Empty:
                pass
            except BaseException as error:  # noqa: BLE001  raised where outcomes are waited for
                done.put(error)

        threads = [threading.Thread(target=play, args=(world,)) for world in self._worlds]
        for thread in threads:
            thread.start()
        try:
            for _ in injections:
                outcome = done.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
        finally:
            while not waiting.empty():
                waiting.get()
            for thread in threads:
                thread.join()


def _gpu_bytes(context: BaseContext, device: str) -> list[int]:
    """Bytes in use on every GPU, seen by a process that then ends."""
    if device == "cpu":
        return []
    here, there = context.Pipe()
    process = context.Process(target=_say_gpu_bytes, args=(there,))
    process.start()
    used = here.recv()
    process.join()
    return used


def _say_gpu_bytes(there) -> None:
    used = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        used.append(total - free)
    there.send(used)


def _gpu_bytes_left(context: BaseContext, device: str, before: list[int]) -> int:
    """Bytes more in use than before, on all GPUs, when the driver has had the time to free."""
    deadline = time.monotonic() + _FREED_S
    while True:
        now = _gpu_bytes(context, device)
        more = sum(max(0, b - a) for a, b in zip(before, now, strict=True))
        if not more or time.monotonic() > deadline:
            return more
        time.sleep(1.0)


def _write(
    out: Path,
    outcomes: dict[int, Outcome],
    where: dict[str, object],
    run: dict[str, object],
    left: dict[str, int] | None = None,
) -> dict[str, int]:
    """The outcomes in the order of the injections; complete with what is `left` after the last."""
    listed = [outcomes[number] for number in sorted(outcomes)]
    totals = {name: sum(getattr(outcome, name) for outcome in listed) for name in COUNTS}
    for name, more in (left or {}).items():
        totals[name] = totals.get(name, 0) + more
    content = {
        "environment": where,
        **run,
        "injections": len(listed),
        "totals": totals,
        "longest_wait_s": max(outcome.waited_s for outcome in listed),
        "outcomes": [asdict(outcome) | {"passed": outcome.passed} for outcome in listed],
        "complete": left is not None,
    }
    write_json(out, content)
    return totals
