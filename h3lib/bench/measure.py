"""Time of a kernel beside a library's in the same run: medians, rotated random buffers, one JSON.

    ratio = theirs / ours, both medians of interleaved rounds in one process; above 1 is faster

* Buffers are random (a matrix product on zeros runs faster than on data) and several sets are used
  in turn, so that no launch finds its operands in the L2 cache.
* Both sides are warmed up for the same time first: an H200 runs a cold product at 810 TFLOP/s and
  a sustained one at 690 (power), so a cold library must not meet a warm kernel, nor the reverse.
* Sides take turns, in an order that reverses every round: a drift of the clock hits both alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from h3lib.provenance import gpu_environment

Call = Callable[[int], object]
"""One launch on the operand set with this index."""


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
    runs = [graphed(call, num_sets) if protocol.graph else call for call in calls]
    sets = 1 if protocol.graph else num_sets  # a graph already holds one launch of every set
    repeats = [_warm_up(run, sets, protocol) for run in runs]
    times: list[list[float]] = [[] for _ in calls]
    for round_index in range(protocol.rounds):
        order = range(len(calls)) if round_index % 2 == 0 else reversed(range(len(calls)))
        for i in order:
            times[i].append(time_us(runs[i], repeats[i], sets))
    per_launch = num_sets if protocol.graph else 1
    return [statistics.median(t) / per_launch for t in times]


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


def _warm_up(run: Call, sets: int, protocol: Protocol) -> int:
    """Run for `warm_up_ms`; how many launches fill a round."""
    first = time_us(run, 2 * sets, sets)
    repeats = max(1, int(1000 * protocol.warm_up_ms / first))
    steady = time_us(run, repeats, sets)
    return max(sets, int(1000 * protocol.round_ms / steady))


def time_us(run: Call, repeats: int, sets: int = 1) -> float:
    """Mean time of one launch among `repeats` in a row, between two events."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for i in range(repeats):
        run(i % sets)
    stop.record()
    stop.synchronize()
    return 1000 * start.elapsed_time(stop) / repeats


def graphed(call: Call, num_sets: int) -> Call:
    """A replay that launches every set once."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(num_sets):
            call(i)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(num_sets):
            call(i)
    return lambda _: graph.replay()
