"""One rank of an injection: work, break or watch, tell what happened, then join a new group."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from h3lib.contract import CONTRACT_ID, H3Error, subtree_roots
from h3lib.faults.catalogue import (
    AFTER,
    BEFORE,
    DURING,
    GRAPH,
    OPENINGS,
    SIGNALS,
    Injection,
)
from h3lib.faults.sabotage import around, be_late, expandable_segments, open_tree, spoilt
from h3lib.ops.tree import tree_sum
from h3lib.parallel.collective import Collective, TreeCollective
from h3lib.parallel.gloo import GlooWorld, require_same
from h3lib.parallel.hierarchical import HierarchicalCollective
from h3lib.parallel.launch import die_with_parent
from h3lib.parallel.peer_memory import free_kept
from h3lib.parallel.transport import Level

ROWS, NUM_LEAVES = 16, 8
_START_S = 40.0
_PATIENCE_S = 10.0
_MANY = 10**6


class Group:
    """A world, its collective, and operands whose results are known beforehand."""

    def __init__(self, injection: Injection, name: str, strike: Callable[[], None] | None = None):
        """`strike` is given on the victim alone, and called when the peers have met."""
        self.injection, self.trees = injection, []
        self.fault = injection.fault if strike is not None else ""
        size = injection.num_ranks
        half = size // 2
        whole = tuple(range(size))
        groups = [whole]
        if injection.levels == 2:
            groups += [whole[:half], whole[half:], *[(r, r + half) for r in range(half)]]
        timeout_s = injection.timeout_s if name == "first" else _START_S
        name = f"{name} {injection.number}"
        self.world = GlooWorld(groups, timeout_s, name, start_timeout_s=_START_S)
        self.rank = self.world.rank
        try:
            if strike is not None:
                strike()
            require_same(self.world, self._fingerprint())
            self.collective = self._connect(whole)
        except H3Error:
            self.close()
            raise
        generator = torch.Generator().manual_seed(injection.number)
        columns = max(1, injection.num_elements // ROWS)
        leaves = torch.randn(NUM_LEAVES, ROWS, columns, generator=generator)
        self.leaves = leaves.to(injection.device)

    def _connect(self, whole: tuple[int, ...]) -> Collective:
        if self.injection.levels == 1:
            return TreeCollective(self._open(whole))
        half = len(whole) // 2
        local = whole[:half] if self.rank < half else whole[half:]
        equals = (self.rank % half, self.rank % half + half)
        between = self.world.connect(equals, self.rank)
        return HierarchicalCollective(self._open(local), between)

    def _open(self, ranks: tuple[int, ...]) -> Level:
        control = self.world.connect(ranks, self.rank)
        if self.injection.device == "cpu":
            return control
        self.trees.append(open_tree(control, self.fault))
        return self.trees[-1]

    def _fingerprint(self) -> dict[str, str]:
        """What a run compares of its ranks; on GPUs the peer tree compares its own."""
        same = {"contract": CONTRACT_ID, "torch": torch.__version__, "device": "cpu"}
        wrong = self.injection.device == "cpu" and self.fault in OPENINGS
        return same | ({self.fault: "another"} if wrong else {})

    def roots(self) -> Tensor:
        cuts = self.injection.cuts(NUM_LEAVES)
        spans = subtree_roots(cuts[self.rank], cuts[self.rank + 1], NUM_LEAVES)
        return torch.stack([self._sum(span) for span in spans])

    def _sum(self, span: range) -> Tensor:
        return tree_sum(lambda s: self.leaves[s.start] if len(s) == 1 else None, span)

    def call(
        self, wrong: str = "", within: contextlib.AbstractContextManager | None = None
    ) -> Tensor:
        """The collective once, `within` a context that its operands are not made in; `wrong` says
        what this rank alone does otherwise."""
        injection, name = self.injection, self.injection.collective
        if wrong == "collective":
            name = "all_gather_rows" if name != "all_gather_rows" else "all_gather_columns"
        leaf_cuts, row_cuts = injection.cuts(NUM_LEAVES), injection.cuts(ROWS)
        if name.startswith("all_gather"):
            part = self.leaves[0][row_cuts[self.rank] : row_cuts[self.rank + 1]]
            part = part.T if name == "all_gather_columns" else part
            operands = spoilt(part, row_cuts, wrong, name)
        else:
            operands = *spoilt(self.roots(), leaf_cuts, wrong, name), torch.float32
            if name == "reduce_scatter_rows":
                operands = *operands[:2], row_cuts, torch.float32
        with within or contextlib.nullcontext():
            return getattr(self.collective, name)(*operands)

    def expected(self) -> Tensor:
        """The result, without a collective."""
        rows, name = self.injection.cuts(ROWS), self.injection.collective
        if name.startswith("all_gather"):
            return self.leaves[0].T if name == "all_gather_columns" else self.leaves[0]
        total = self._sum(range(NUM_LEAVES))
        return total if name == "all_reduce" else total[rows[self.rank] : rows[self.rank + 1]]

    def close(self) -> None:
        try:
            for tree in self.trees:
                tree.close()
        finally:
            self.world.close()


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().cpu().numpy().tobytes()).hexdigest()


class Rank:
    """One rank of an injection: before, the fault, and what came of it."""

    def __init__(self, injection: Injection, rank: int, folder: Path):
        self.injection, self.struck = injection, folder / f"struck {injection.number}"
        self.is_victim = rank == injection.victim
        self.wrong_bytes = 0

    def first(self) -> dict:
        """The group that fails; `waited_s` counts from the last moment of the fault."""
        group, error, typed = None, "", True
        try:
            expands = self.is_victim and self.injection.fault == "expandable segments"
            with expandable_segments() if expands else contextlib.nullcontext():
                group = Group(self.injection, "first", self._mark if self.is_victim else None)
                self._work(group)
        except H3Error as caught:
            error = str(caught)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            typed = self.is_victim and self.injection.fault == "exception"
            if group is not None:
                group.world.fail_alone(caught)
        return {
            "error": error,
            "typed": typed,
            "waited_s": self._since_fault(),
            "wrong_bytes": self.wrong_bytes,
            "refused": group is None or self._refused(group),
            "closed": group is None or self._closed(group),
        }

    def _work(self, group: Group) -> None:
        injection, expected = self.injection, digest(group.expected())
        step = self._graph(group) if injection.when == GRAPH else group.call
        for _ in range(injection.calls_before + (injection.when == AFTER)):
            self._compare(step(), expected)
        if injection.fault in SIGNALS:
            if self.is_victim:
                self._signal()
            for _ in range(_MANY):  # until the fault is noticed
                self._compare(step(), expected)
        if injection.fault == "nothing":
            for wrong in injection.spoilt_calls():
                group.call(wrong)
        if not self.is_victim:
            self._compare(step(), expected)
            return
        self._fault()
        if injection.when == GRAPH:
            self._compare(step(), expected)
        else:
            faulty = group.call(injection.fault, around(injection, self._mark))
            self._compare(faulty, expected)

    def _fault(self) -> None:
        """What the victim does before its faulty call."""
        injection = self.injection
        if injection.fault.startswith("late"):
            if injection.when != DURING:
                be_late(injection, self._mark)
            return
        self._mark()
        if injection.fault == "exception":
            raise ValueError("a mistake outside of any collective")

    def _signal(self) -> None:
        """Be killed or stopped; `during` and in a graph it strikes while the calls go on."""
        injection = self.injection
        number = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[injection.fault]
        waits = injection.when in (BEFORE, AFTER)

        def strike() -> None:
            time.sleep(0 if waits else injection.delay_s)
            self._mark()
            os.kill(os.getpid(), number)

        threading.Thread(target=strike, daemon=True).start()
        if waits:
            time.sleep(_START_S)

    def _mark(self) -> None:
        self.struck.write_text(repr(time.monotonic()))

    def _since_fault(self) -> float:
        try:
            return time.monotonic() - float(self.struck.read_text())
        except (OSError, ValueError):
            return 0.0

    def _compare(self, value: Tensor, expected: str) -> None:
        self.wrong_bytes += digest(value) != expected

    def _graph(self, group: Group) -> Callable[[], Tensor]:
        """The collective as a CUDA graph; a replay is checked before its result is looked at.

        A victim that calls otherwise captures that; all have made its call once, as a capture asks.
        """
        calls = ["", *self.injection.spoilt_calls()]
        for wrong in calls:
            group.call(wrong)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            value = group.call(calls[-1] if self.is_victim else "")

        def step() -> Tensor:
            graph.replay()
            for tree in group.trees:
                tree.check(self.injection.collective)
            return value

        return step

    def _refused(self, group: Group) -> bool:
        try:
            group.call()
        except H3Error as error:
            return "a use after" in str(error)
        except Exception:
            return False
        return False

    def _closed(self, group: Group) -> bool:
        """Closing says nothing new: no error, or none after the first."""
        try:
            group.close()
        except H3Error:
            return False
        return True

    def second(self) -> dict:
        """A new group of as many ranks, the bytes it gives, and buffers of the first still kept."""
        try:
            group = Group(self.injection, "second")
            equal = digest(group.call()) == digest(group.expected())
            group.close()
        except Exception as error:
            return {"equal": False, "kept": 0, "error": f"{type(error).__name__}: {error}"}
        return {"equal": equal, "kept": free_kept(_PATIENCE_S), "error": ""}


def rank_main(there: dict[str, str], connection: Connection, folder: str) -> None:
    """A process that plays one rank of an injection after the other, until it is told None."""
    die_with_parent()
    os.environ.update(there)
    torch.set_num_threads(1)
    number = int(there["RANK"])
    for injection, part in iter(connection.recv, None):
        rank = Rank(injection, number, Path(folder))
        if injection.device == "cuda":
            taken = number if injection.spread else injection.number
            torch.cuda.set_device(taken % torch.cuda.device_count())
        connection.send(getattr(rank, part)())
    os._exit(0)
