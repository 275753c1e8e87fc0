"""One rank of an injection: work, break or watch, tell what happened, then join a new group."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from h3lib.contract import CONTRACT_ID, H3Error, subtree_roots
from h3lib.ops.tree import tree_sum
from h3lib.parallel.collective import Collective, TreeCollective
from h3lib.parallel.gloo import GlooWorld, require_same
from h3lib.parallel.hierarchical import HierarchicalCollective
from h3lib.parallel.launch import die_with_parent
from h3lib.parallel.transport import Level

COLLECTIVES = ("all_reduce", "reduce_scatter_rows", "all_gather_rows", "all_gather_columns")
ROWS, NUM_LEAVES = 16, 8
_START_S = 40.0
_MANY = 10**6


@dataclass(frozen=True)
class Injection:
    """What is broken, on whom and when; `levels` 2 is a hierarchy of two nodes."""

    number: int
    fault: str
    when: str
    victim: int
    collective: str
    calls_before: int
    num_elements: int
    levels: int
    device: str
    num_ranks: int
    timeout_s: float
    delay_s: float

    def cuts(self, total: int) -> list[int]:
        return [total * i // self.num_ranks for i in range(self.num_ranks + 1)]


class Group:
    """A world, its collective, and operands whose results are known beforehand."""

    def __init__(self, injection: Injection, name: str, faulty: bool):
        self.injection, self.trees = injection, []
        size = injection.num_ranks
        half = size // 2
        whole = tuple(range(size))
        groups = [whole]
        if injection.levels == 2:
            groups += [whole[:half], whole[half:], *[(r, r + half) for r in range(half)]]
        self.world = GlooWorld(groups, injection.timeout_s, name, start_timeout_s=_START_S)
        self.rank = self.world.rank
        try:
            require_same(self.world, self._fingerprint(faulty))
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
        from h3lib.parallel.peer import PeerTree  # needs Triton

        self.trees.append(PeerTree(control, 1 << 20))
        return self.trees[-1]

    def _fingerprint(self, faulty: bool) -> dict[str, str]:
        same = {"contract": CONTRACT_ID, "torch": torch.__version__, "device": "one"}
        key = {"contract": "contract", "version": "torch", "device": "device"}
        fault = key.get(self.injection.fault)
        return same | ({fault: "another"} if faulty and fault else {})

    def roots(self) -> Tensor:
        cuts = self.injection.cuts(NUM_LEAVES)
        spans = subtree_roots(cuts[self.rank], cuts[self.rank + 1], NUM_LEAVES)
        return torch.stack([self._sum(span) for span in spans])

    def _sum(self, span: range) -> Tensor:
        return tree_sum(lambda s: self.leaves[s.start] if len(s) == 1 else None, span)

    def call(self, wrong: str = "") -> Tensor:
        """The collective once; `wrong` says what this rank alone does otherwise."""
        injection, name = self.injection, self.injection.collective
        if wrong == "collective":
            name = "all_gather_rows" if name != "all_gather_rows" else "all_gather_columns"
        leaf_cuts, row_cuts = injection.cuts(NUM_LEAVES), injection.cuts(ROWS)
        if name.startswith("all_gather"):
            part = self.leaves[0][row_cuts[self.rank] : row_cuts[self.rank + 1]]
            part = part.T if name == "all_gather_columns" else part
            return getattr(self.collective, name)(*_spoilt(part, row_cuts, wrong, name))
        roots, *cuts = _spoilt(self.roots(), leaf_cuts, wrong, name)
        if name == "all_reduce":
            return self.collective.all_reduce(roots, *cuts, torch.float32)
        return self.collective.reduce_scatter_rows(roots, *cuts, row_cuts, torch.float32)

    def expected(self) -> Tensor:
        """The result, without a collective."""
        rows, name = self.injection.cuts(ROWS), self.injection.collective
        if name.startswith("all_gather"):
            return self.leaves[0].T if name == "all_gather_columns" else self.leaves[0]
        total = self._sum(range(NUM_LEAVES))
        return total if name == "all_reduce" else total[rows[self.rank] : rows[self.rank + 1]]

    def close(self) -> None:
        for tree in self.trees:
            tree.close()
        self.world.close()


def _spoilt(part: Tensor, cuts: list[int], wrong: str, name: str) -> tuple[Tensor, list[int]]:
    """The operand as one rank should not bring it."""
    if wrong == "shape":
        part = torch.cat([part, part], dim=0 if name == "all_gather_columns" else -1)
    elif wrong == "shape of as many elements":
        part = part.unsqueeze(-2)
    elif wrong == "dtype":
        part = part.to(torch.float64)
    elif wrong == "cuts":
        cuts = [cut + 1 for cut in cuts]
    return part, cuts


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().cpu().numpy().tobytes()).hexdigest()


class Rank:
    """One rank of an injection: before, the fault, and what came of it."""

    def __init__(self, injection: Injection, rank: int, folder: Path):
        self.injection, self.folder = injection, folder
        self.is_victim = rank == injection.victim
        self.wrong_bytes = 0

    def first(self) -> dict:
        """The group that fails; `waited_s` counts from the moment of the fault."""
        group, error, typed = None, "", True
        if self.is_victim and self.injection.when == "before":
            self._mark()  # those that are marked later are marked again
        try:
            group = Group(self.injection, "first", self.is_victim)
            self._work(group)
        except H3Error as caught:
            error = str(caught)
        except Exception as caught:
            error, typed = f"{type(caught).__name__}: {caught}", False
        return {
            "error": error,
            "typed": typed,
            "waited_s": self._since_fault(),
            "wrong_bytes": self.wrong_bytes,
            "refused": group is None or self._refused(group),
            "closed": group is None or group.close() is None,
        }

    def _work(self, group: Group) -> None:
        injection, expected = self.injection, digest(group.expected())
        step = self._graph(group) if injection.when == "graph" else group.call
        for _ in range(injection.calls_before + (injection.when == "after")):
            self._compare(step(), expected)
        if self.is_victim:
            self._fault(group)
        wrong = injection.fault if self.is_victim and injection.when != "graph" else ""
        if injection.fault not in ("killed", "stopped"):
            self._compare(group.call(wrong), expected)
            return
        for _ in range(_MANY):  # until the fault is noticed
            self._compare(step(), expected)

    def _fault(self, group: Group) -> None:
        """Be killed, stopped or late; `during` strikes while the calls go on."""
        injection = self.injection
        number = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}.get(injection.fault)

        def strike() -> None:
            time.sleep(injection.delay_s if injection.when in ("during", "graph") else 0)
            self._mark()
            os.kill(os.getpid(), number)

        if number is not None:
            threading.Thread(target=strike, daemon=True).start()
            if injection.when in ("before", "after"):
                time.sleep(_START_S)
        elif injection.fault.startswith("late"):
            self._mark()
            whole = injection.fault == "late"
            time.sleep(injection.timeout_s + 1.5 if whole else injection.timeout_s / 4)

    def _mark(self) -> None:
        (self.folder / "struck").write_text(repr(time.time()))

    def _since_fault(self) -> float:
        try:
            return time.time() - float((self.folder / "struck").read_text())
        except (OSError, ValueError):
            return 0.0

    def _compare(self, value: Tensor, expected: str) -> None:
        self.wrong_bytes += digest(value) != expected

    def _graph(self, group: Group) -> Callable[[], Tensor]:
        """The collective as a CUDA graph; a replay is checked before its result is looked at."""
        group.call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            value = group.call()

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

    def second(self) -> dict:
        """A new group of as many ranks, and the bytes it gives."""
        group = Group(self.injection, "second", False)
        equal = digest(group.call()) == digest(group.expected())
        group.close()
        return {"equal": equal}


def rank_main(injection: Injection, there: dict[str, str], folder: str, replaces: bool) -> None:
    """A process of an injection; one that replaces a lost victim only joins the new group."""
    die_with_parent()
    os.environ.update(there)
    torch.set_num_threads(1)
    number, scratch = int(there["RANK"]), Path(folder)
    if injection.device == "cuda":
        torch.cuda.set_device(number % torch.cuda.device_count())
    rank = Rank(injection, number, scratch)
    if not replaces:
        _say(scratch / f"first-{number}", rank.first())
    _say(scratch / f"second-{number}", rank.second())
    os._exit(0)


def _say(path: Path, content: dict) -> None:
    path.with_suffix(".new").write_text(json.dumps(content))
    os.replace(path.with_suffix(".new"), path)
