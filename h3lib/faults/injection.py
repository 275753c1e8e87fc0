"""`h3lib faults`: break collectives on purpose and look at what the others do.

Each injection is a fresh world of processes with one victim. Every survivor must raise one typed
error that names the victim, within the timeout plus 5 s, return no wrong byte, and be refused by
the failed group; a new group of as many ranks must give the old digest; no process may be left.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from h3lib.contract import H3Error
from h3lib.faults.rank import COLLECTIVES, Injection, rank_main
from h3lib.parallel.gloo import rank_environment, serve_store
from h3lib.report import environment

SIGNALS = ("killed", "stopped")
DELAYS = ("late", "late within the timeout")
CALLS = ("shape", "shape of as many elements", "dtype", "collective", "cuts")
OPENINGS = ("contract", "version", "device")
WHEN = ("before", "during", "after")
TIMEOUT_S = {"cpu": 3.0, "cuda": 3.0}
SLACK_S = 5.0  # beyond the timeout, for a survivor's error
_START_S = 60.0


class FaultsError(H3Error, ValueError):
    """A number of injections or of ranks that cannot be run."""


@dataclass(frozen=True)
class Outcome:
    """What one injection led to; everything but the first line should be 0 or False."""

    injection: Injection
    error: str
    waited_s: float
    hangs: int
    wrong_bytes: int
    untyped_errors: int
    unnamed_errors: int
    different_errors: int
    late_errors: int
    not_refused: int
    new_group_wrong: int
    processes_left: int

    @property
    def passed(self) -> bool:
        return not any(getattr(self, count) for count in COUNTS)


COUNTS = (
    "hangs",
    "wrong_bytes",
    "untyped_errors",
    "unnamed_errors",
    "different_errors",
    "late_errors",
    "not_refused",
    "new_group_wrong",
    "processes_left",
)


def draw(rng: random.Random, number: int, device: str, num_ranks: int) -> Injection:
    """One random injection; each family of faults is as likely as another."""
    family = rng.choice((SIGNALS, SIGNALS, DELAYS, CALLS, OPENINGS))
    fault, collective = rng.choice(family), rng.choice(COLLECTIVES)
    if fault == "cuts" and not collective.startswith("all_gather"):
        fault = "shape"
    when = rng.choice(WHEN) if family in (SIGNALS, DELAYS) else "before"
    if device == "cuda" and family is SIGNALS and rng.random() < 0.25:
        when = "graph"
    return Injection(
        number=number,
        fault=fault,
        when=when,
        victim=rng.randrange(num_ranks),
        collective=collective,
        calls_before=rng.randrange(4),
        num_elements=rng.choice((5, 1000, 40_000)),
        levels=2 if num_ranks % 2 == 0 and when != "graph" and rng.random() < 0.3 else 1,
        device=device,
        num_ranks=num_ranks,
        timeout_s=TIMEOUT_S[device],
        delay_s=round(rng.uniform(0.0, 0.02), 4),
    )


class World:
    """The processes of one injection."""

    def __init__(self, context, injection: Injection, folder: Path):
        self.context, self.injection, self.folder = context, injection, folder
        self.store = serve_store()
        self.ranks = {rank: self._start(rank, False) for rank in range(injection.num_ranks)}
        self.all = list(self.ranks.values())

    def _start(self, rank: int, replaces: bool):
        there = rank_environment(self.store, rank, self.injection.num_ranks)
        arguments = (self.injection, there, str(self.folder), replaces)
        process = self.context.Process(target=rank_main, args=arguments, daemon=True)
        process.start()
        return process

    def report(self, rank: int, part: str) -> dict | None:
        try:
            return json.loads((self.folder / f"{part}-{rank}").read_text())
        except (OSError, ValueError):
            return None

    def wait(self, part: str, ranks: list[int], timeout_s: float) -> list[int]:
        """Ranks that have not said how `part` went when the time is over."""
        deadline = time.monotonic() + timeout_s
        missing = ranks
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if self.report(rank, part) is None]
            time.sleep(0.02)
        return missing

    def replace(self, rank: int) -> None:
        """A new process in the place of a victim that has gone."""
        self.ranks[rank].kill()
        self.ranks[rank].join(10)
        self.ranks[rank] = self._start(rank, True)
        self.all.append(self.ranks[rank])

    def end(self) -> int:
        """End all processes; how many had to be, or could not be, ended."""
        left = 0
        for process in self.ranks.values():
            process.join(20)
        for process in self.all:
            if process.is_alive():
                left += 1
                os.kill(process.pid, signal.SIGKILL)
                process.join(10)
        return left


def run_injection(context, injection: Injection) -> Outcome:
    """Run one injection from start to end."""
    everyone = list(range(injection.num_ranks))
    survivors = [rank for rank in everyone if rank != injection.victim]
    leaves = injection.fault in SIGNALS
    watched = survivors if leaves else everyone
    with tempfile.TemporaryDirectory(prefix="h3lib-faults-") as folder:
        world = World(context, injection, Path(folder))
        bound = _START_S + 2 * injection.timeout_s + 4 * SLACK_S
        missing = world.wait("first", watched, bound)
        found = {r: world.report(r, "first") for r in watched if r not in missing}
        if leaves:
            world.replace(injection.victim)
        for rank in missing:
            world.replace(rank)
        second = world.wait("second", everyone, _START_S)
        after = {rank: world.report(rank, "second") for rank in everyone if rank not in second}
        left = world.end()
    return judge(injection, found, missing, after, left)


def judge(
    injection: Injection, found: dict[int, dict], missing: list[int], after: dict, left: int
) -> Outcome:
    """Count what must not be."""
    survivors = {rank: f for rank, f in found.items() if rank != injection.victim}
    expected = injection.fault != "late within the timeout"
    texts = {f["error"] for f in survivors.values()}
    named = [re.search(rf"\brank(s \[)? ?{injection.victim}\b", text) for text in texts]
    bound = injection.timeout_s + SLACK_S
    return Outcome(
        injection=injection,
        error=min(texts, default="", key=len),
        waited_s=round(max((f["waited_s"] for f in survivors.values()), default=0.0), 3),
        hangs=len(missing),
        wrong_bytes=sum(f["wrong_bytes"] for f in found.values()),
        untyped_errors=sum(bool(f["error"]) != expected or not f["typed"] for f in found.values()),
        unnamed_errors=sum(match is None for match in named) if expected else 0,
        different_errors=max(0, len(texts) - 1),
        late_errors=sum(f["waited_s"] > bound for f in survivors.values()),
        not_refused=sum(not f["refused"] for f in found.values()) if expected else 0,
        new_group_wrong=injection.num_ranks - sum(f["equal"] for f in after.values()),
        processes_left=left,
    )


def run_faults(count: int, seed: int, out: Path, device: str = "cpu", num_ranks: int = 4) -> int:
    """Run `count` random injections and write `out`; 0 if none of them went wrong, else 1.

    **Raises:** FaultsError for a count or a number of ranks that cannot be run.
    """
    if count < 1:
        raise FaultsError("count", count, "at least 1")
    if not 2 <= num_ranks <= 8:
        raise FaultsError("ranks", num_ranks, "2 to 8")
    context, rng = multiprocessing.get_context("forkserver"), random.Random(seed)
    context.set_forkserver_preload(["h3lib.faults.rank"])
    outcomes: list[Outcome] = []
    for number in tqdm(range(count), desc="faults", unit="injection", disable=None, delay=2):
        outcomes.append(run_injection(context, draw(rng, number, device, num_ranks)))
        if not outcomes[-1].passed:
            print(outcomes[-1], flush=True)
        _write(out, outcomes, seed, device, complete=number + 1 == count)
    totals = {name: sum(getattr(outcome, name) for outcome in outcomes) for name in COUNTS}
    print(f"{count} injections, {num_ranks} ranks, {device}: {totals}")
    return int(any(totals.values()))


def _write(out: Path, outcomes: list[Outcome], seed: int, device: str, complete: bool) -> None:
    content = {
        "environment": environment(device, "node-a"),
        "seed": seed,
        "injections": len(outcomes),
        "totals": {name: sum(getattr(o, name) for o in outcomes) for name in COUNTS},
        "longest_wait_s": max(outcome.waited_s for outcome in outcomes),
        "outcomes": [asdict(o) | {"passed": o.passed} for o in outcomes],
        "complete": complete,
    }
    out.write_text(json.dumps(content, indent=1) + "\n")

