"""Time of a kernel beside a library's in the same run: medians, rotated random buffers, one JSON.

    ratio = theirs / ours, both medians of interleaved rounds in one process; above 1 is faster

* Buffers are random (a matrix product on zeros runs faster than on data) and several sets are used
  in turn, so that no launch finds its operands in the L2 cache.
* Both sides are warmed up for the same time first: an H200 runs a cold product at 810 TFLOP/s and
  a sustained one at 690 (power), so a cold library must not meet a warm kernel, nor the reverse.
* Sides take turns, in an order that reverses every round: a drift of the clock hits both alike.
* Where ranks measure together, they meet before every window, and the slowest rank's time counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import torch

from h3lib.provenance import gpu_environment

Result = TypeVar("Result")
Call = Callable[[int], object]
"""One launch on the operand set with this index."""
Launch = Callable[[], object]
"""One launch, always on the same operands."""


@dataclass(frozen=True)
class Protocol:
    """How long and how often; `graph` times replays of a CUDA graph, where launches would count."""

    rounds: int = 5
    round_ms: float = 60.0
    warm_up_ms: float = 300.0
    graph: bool = False

    def under_graph(self) -> Protocol:
        return replace(self, graph=True)


STANDARD = Protocol()


@dataclass(frozen=True)
class Ranks:
    """Who measures together: `gather` waits for every rank and gives the values of all; `check`
    follows every window, and raises if one of its collectives failed."""

    gather: Callable[[object], list] = lambda value: [value]
    check: Launch = lambda: None


ALONE = Ranks()


@dataclass(frozen=True)
class Row:
    """One line of `measurements`."""

    op: str
    case: str
    rows: int
    against: str
    ours_us: float
    theirs_us: float
    ratio: float
    graph: bool = False


def compare(
    op: str,
    case: str,
    rows: int,
    against: str,
    ours: Call,
    theirs: Call,
    num_sets: int,
    protocol: Protocol = STANDARD,
) -> Row:
    """Time `ours(i)` against `theirs(i)`, i rotating over `num_sets` operand sets."""
    ours_us, theirs_us = medians([ours, theirs], num_sets, protocol)
    return Row(op, case, rows, against, ours_us, theirs_us, theirs_us / ours_us, protocol.graph)


def medians(calls: Sequence[Call], num_sets: int, protocol: Protocol = STANDARD) -> list[float]:
    """Median time of each call in microseconds, over interleaved rounds."""
    if not protocol.graph:
        return slowest_medians(calls, num_sets, protocol)
    runs = [graphed(call, num_sets) for call in calls]
    return [us / num_sets for us in slowest_medians(runs, 1, protocol)]


def slowest_medians(
    runs: Sequence[Call], num_sets: int, protocol: Protocol, ranks: Ranks = ALONE
) -> list[float]:
    """Median over interleaved rounds of the slowest rank's microseconds in each, of each run."""
    repeats = [_warm_up(run, num_sets, protocol, ranks) for run in runs]
    samples = in_turns(
        len(runs), protocol.rounds, lambda i, _: time_us(runs[i], repeats[i], num_sets, ranks)
    )
    return [
        statistics.median(slowest(rounds)) for rounds in zip(*ranks.gather(samples), strict=True)
    ]


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """The longest time of any rank, in each place."""
    return list(map(max, zip(*ranks, strict=True)))


def in_turns(count: int, rounds: int, sample: Callable[[int, int], float]) -> list[list[float]]:
    """`sample(i, round)` of every i < `count` in every round, by i; the order reverses."""
    samples: list[list[float]] = [[] for _ in range(count)]
    for round_index in range(rounds):
        for i in range(count) if round_index % 2 == 0 else reversed(range(count)):
            samples[i].append(sample(i, round_index))
    return samples


def num_buffer_sets(bytes_per_set: int, cache_bytes: int = 60 << 20) -> int:
    """Sets so that between two uses of one, four times the L2 cache has passed; at least 2."""
    return max(2, -(-4 * cache_bytes // max(1, bytes_per_set)) + 1)


def report(
    rows: Sequence[Row | dict], protocol: Protocol, complete: bool, **others: object
) -> dict[str, object]:
    """The JSON of one benchmark; `complete` is its last key."""
    return {
        "environment": gpu_environment(),
        "protocol": asdict(protocol),
        "measurements": [row if isinstance(row, dict) else asdict(row) for row in rows],
        **others,
        "complete": complete,
    }


def _warm_up(run: Call, sets: int, protocol: Protocol, ranks: Ranks) -> int:
    """Run for `warm_up_ms`; how many launches fill a round, the same on every rank."""
    time_us(run, sets, sets, ranks)  # compiles, or uploads a graph
    first = max(ranks.gather(time_us(run, sets, sets, ranks)))
    repeats = max(1, int(1000 * protocol.warm_up_ms / first))
    steady = max(ranks.gather(time_us(run, repeats, sets, ranks)))
    return max(sets, int(1000 * protocol.round_ms / steady))


def time_us(run: Call, repeats: int, sets: int = 1, ranks: Ranks = ALONE) -> float:
    """Mean time of one launch among `repeats` in a row, between two events."""
    ranks.gather(None)
    took = elapsed_ms(lambda: in_a_row(run, repeats, sets))
    ranks.check()
    return 1000 * took / repeats


def in_a_row(run: Call, repeats: int, sets: int = 1) -> None:
    """The launches of a window or a graph; no result outlives its launch."""
    for i in range(repeats):
        run(i % sets)


def elapsed_ms(launch: Launch) -> float:
    """Milliseconds between an event before and one after it."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    launch()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def graphed(call: Call, num_sets: int) -> Call:
    """A replay that launches every set once."""
    graph, _ = capture(lambda: in_a_row(call, num_sets, num_sets))
    return lambda _: graph.replay()


def capture(
    launch: Callable[[], Result], stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of `launch`, which runs once before, and where its replays leave their results;
    with a stream, both happen on it, as its priority is kept in the graph."""
    first = torch.cuda.Stream() if stream is None else stream
    first.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(first):
        launch()
    first.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = launch()
    return graph, result
