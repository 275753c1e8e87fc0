"""How GPU work is timed, by a clock that the calls themselves set: no GPU is needed."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from h3lib.bench.measure import Protocol, Ranks, capture, medians, slowest_medians

pytest.importorskip("triton")

from h3lib.bench import collectives, transformer  # noqa: E402
from h3lib.bench.layout_ranks import GRAPH_CALLS, RankWorld  # noqa: E402

PROTOCOL = Protocol(rounds=3, round_ms=6.0, warm_up_ms=12.0)


@pytest.fixture
def gpu(monkeypatch):
    """`launched` lists what was launched and by whom it was captured; `now` is in milliseconds."""
    state = SimpleNamespace(now=0.0, launched=[], stream="usual", graphs=[], capturing=None)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = state.now

        def elapsed_time(self, other):
            return other.at - self.at

        def synchronize(self):
            state.launched.append("|")

    class Graph:
        def __init__(self):
            state.graphs.append(self)
            self.held = []

        def replay(self):
            for launch in self.held:
                launch()

    @contextlib.contextmanager
    def on(stream):
        state.stream, before = stream, state.stream
        yield
        state.stream = before

    @contextlib.contextmanager
    def record(graph, stream, capture_error_mode):
        state.capturing = graph
        with on(stream or "capture"):
            yield
        state.capturing = None

    def launch(what, ms):
        def run():
            state.launched.append(what)
            state.now += ms

        if state.capturing is None:
            run()
        else:
            state.capturing.held.append(run)
        return what, state.stream

    def stream():
        return SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)

    for name, value in {
        "Event": Event, "CUDAGraph": Graph, "graph": record, "stream": on, "Stream": stream,
        "current_stream": lambda: "usual", "synchronize": lambda: None,
        "reset_peak_memory_stats": lambda: None, "max_memory_allocated": lambda: 7,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    state.launch = launch
    return state


def windows(gpu) -> list[str]:
    """What was launched, a word for each window."""
    return "".join(gpu.launched).split("|")


def test_sides_warm_up_as_long_and_take_turns_over_sets_in_a_reversing_order(gpu):
    ours, theirs = (lambda i, m=m, ms=ms: gpu.launch(m[i], ms) for m, ms in (("ab", 1), ("xy", 3)))
    assert medians([ours, theirs], 2, PROTOCOL) == [1000, 3000]
    warm_up = ["ab", "ab", "ab" * 6, "xy", "xy", "xy" * 2]
    assert windows(gpu) == [
        *warm_up, "ababab", "xy", "xy", "ababab", "ababab", "xy", ""
    ]  # fmt: skip


def test_a_graph_holds_every_set_once_and_the_time_is_of_one_launch(gpu):
    calls = [lambda i: gpu.launch("ab"[i], 1.0)]
    assert medians(calls, 2, PROTOCOL.under_graph()) == [1000]
    assert windows(gpu)[:3] == ["ab" + "ab", "ab", "ab" * 6], "first outside the graph"
    assert len(gpu.graphs) == 1 and len(gpu.graphs[0].held) == 2


def test_a_captured_result_is_the_graphs_and_the_stream_is_kept(gpu):
    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    for given, expected in ((None, "capture"), (stream, stream)):
        _, result = capture(lambda: gpu.launch("a", 1.0), given)
        assert result == ("a", expected)
    assert windows(gpu) == ["aa"]


def test_the_slowest_rank_of_each_round_counts(gpu):
    """A peer that takes 1, 1, 9 where this rank takes 1, 9, 1: at the end 9, not 1."""
    mine = iter([1.0] * 8 + [1.0, 9.0, 1.0])
    checks = []

    def gather(value):
        if isinstance(value, list):
            assert value == [[1000, 9000, 1000]]
            return [value, [[1000, 1000, 9000]]]
        return [value, value and 2 * value]  # the peer takes twice as long to warm up

    one_window = Protocol(rounds=3, round_ms=2.0, warm_up_ms=12.0)
    ranks = Ranks(gather, lambda: checks.append(len(gpu.launched)))
    assert slowest_medians([lambda _: gpu.launch("a", next(mine))], 1, one_window, ranks) == [9000]
    assert windows(gpu) == ["a", "a", "a" * 6, "a", "a", "a", ""]
    assert len(checks) == 6, "after every window"


def world(**given) -> SimpleNamespace:
    """Of one rank, as far as times need it."""
    return SimpleNamespace(gather=lambda value: [value], check=lambda: None, **given)


def test_layouts_give_milliseconds_or_the_reason_for_which_there_is_no_graph(gpu):
    rank = world(_graphs=lambda runs: RankWorld._graphs(rank, runs))
    calls = {"ours": lambda: gpu.launch("a", 2.0), "theirs": lambda: gpu.launch("x", 3.0)}
    for protocol in (PROTOCOL, PROTOCOL.under_graph()):
        assert RankWorld.times(rank, calls, protocol) == ({"ours": 2, "theirs": 3}, None)
    assert [len(graph.held) for graph in gpu.graphs] == [GRAPH_CALLS] * 2

    def refuse():
        raise RuntimeError("cannot be captured\nat length")

    found = RankWorld.times(rank, calls | {"theirs": refuse}, PROTOCOL.under_graph())
    assert found == ({}, "no CUDA graph: cannot be captured")
    rank.gather = lambda value: [value, "no CUDA graph: of another rank"]
    found = RankWorld.times(rank, calls, PROTOCOL.under_graph())
    assert found == ({}, "no CUDA graph: of another rank")


@pytest.mark.parametrize("graph", (False, True))
def test_collectives_drop_the_round_that_warms_up(gpu, graph):
    """Its launches take 50; those of round k take k."""
    rounds, repeats = range(1, 1 + collectives.ROUNDS), collectives.REPEATS
    ms = [50.0] * collectives.WARM_UP + [float(k) for k in rounds for _ in range(repeats)]
    costs = {m: iter(ms) for m in "ax"}
    calls = [lambda m=m: gpu.launch(m, 4.0 if graph else next(costs[m])) for m in "ax"]
    bench = SimpleNamespace(
        world=SimpleNamespace(gather_objects=lambda value: [value]),
        tree=SimpleNamespace(check=lambda: None),
    )
    assert collectives.Bench.times(bench, calls, graph) == [4000, 4000]
    calls = collectives.GRAPH_CALLS if graph else 1
    sizes = [len(window) for window in windows(gpu)]
    first = collectives.WARM_UP * calls + (2 * calls if graph else 0)
    assert sizes[0] == first and sizes[1] == collectives.WARM_UP * calls
    assert sizes[2:-1] == [collectives.REPEATS * calls] * 2 * collectives.ROUNDS
    assert [w[-1] for w in windows(gpu)[:6]] == ["a", "x", "x", "a", "a", "x"]


def test_the_whole_model_takes_turns_in_one_order_and_its_first_launch_does_not_count(gpu):
    costs = iter([99.0, 99.0, 1.0, 10.0, 5.0, 10.0, 2.0, 10.0])
    calls = {m: lambda m=m: gpu.launch(m, next(costs)) for m in "ax"}
    other = {(1.0, 5.0, 2.0): [4.0, 1.0, 1.0], (10.0, 10.0, 10.0): [0.0, 0.0, 0.0]}

    def gather(value):
        return [None] * 2 if value is None else [value, other[tuple(value)]]

    found = transformer.timed(calls, 3, Ranks(gather))
    assert found == {
        "a": {"ms": 4.0, "launches_ms": [4.0, 5.0, 2.0], "peak_bytes": 7},
        "x": {"ms": 10.0, "launches_ms": [10.0] * 3, "peak_bytes": 7},
    }
    assert windows(gpu) == ["a", "x"] * 4 + [""]
