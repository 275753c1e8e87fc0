"""The processes that play injections: one for each rank, replaced when it is killed or hangs.

Several worlds can play at once, each an injection after the other; what an injection leads to does
not depend on what was played before it or beside it.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext

from h3lib.faults.catalogue import SIGNALS, Injection
from h3lib.faults.rank import rank_main
from h3lib.parallel.gloo import rank_environment, serve_store

_START_S = 120.0  # for a process to be there, and a group to be opened
_SLACK_S = 20.0


@dataclass
class Played:
    """What the ranks of an injection said: of the group that fails, and of the one after it."""

    first: dict[int, dict]
    second: dict[int, dict]
    hangs: list[int] = field(default_factory=list)
    processes_left: int = 0


class World:
    """Ranks that find each other by a store in this process."""

    def __init__(self, context: BaseContext, num_ranks: int):
        self.context, self.num_ranks = context, num_ranks
        self.store = serve_store()
        self.folder = tempfile.TemporaryDirectory(prefix="h3lib-faults-")
        self.processes, self.connections = {}, {}
        for rank in range(num_ranks):
            self._start(rank)

    def _start(self, rank: int) -> None:
        here, there = self.context.Pipe()
        environment = rank_environment(self.store, rank, self.num_ranks)
        process = self.context.Process(
            target=rank_main, args=(environment, there, self.folder.name), daemon=True
        )
        process.start()
        there.close()
        self.processes[rank], self.connections[rank] = process, here

    def play(self, injection: Injection) -> Played:
        """An injection from start to end; afterwards every rank is there again."""
        everyone = range(self.num_ranks)
        leaves = injection.fault in SIGNALS
        watched = [rank for rank in everyone if not (leaves and rank == injection.victim)]
        self._tell(injection, "first")
        first = self._hear(watched, _START_S + 2 * injection.timeout_s + _SLACK_S)
        hangs = [rank for rank in watched if rank not in first]
        left = sum(self._replace(rank) for rank in everyone if rank not in first)
        self._tell(injection, "second")
        second = self._hear(list(everyone), _START_S)
        well = [rank for rank in second if second[rank]["equal"]]
        left += sum(self._replace(rank) for rank in everyone if rank not in well)
        return Played(first, second, hangs, left)

    def _tell(self, injection: Injection, part: str) -> None:
        for connection in self.connections.values():
            connection.send((injection, part))

    def _hear(self, ranks: list[int], timeout_s: float) -> dict[int, dict]:
        """What the ranks said before the time was over; a process that ended says nothing."""
        deadline, said = time.monotonic() + timeout_s, {}
        waiting = {self.connections[rank]: rank for rank in ranks}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in multiprocessing.connection.wait(list(waiting), left):
                rank = waiting.pop(connection)
                try:
                    said[rank] = connection.recv()
                except (EOFError, OSError):
                    pass
        return said

    def _replace(self, rank: int) -> int:
        """A new process for a rank; 1 if the old one could not be ended, else 0."""
        left = self._kill(rank)
        self._start(rank)
        return left

    def _kill(self, rank: int) -> int:
        process = self.processes[rank]
        process.kill()
        process.join(20)
        self.connections[rank].close()
        return int(process.is_alive())

    def end(self) -> int:
        """End all processes; how many did not when they were told."""
        for connection in self.connections.values():
            try:
                connection.send(None)
            except OSError:
                pass
        left = 0
        for rank, process in self.processes.items():
            process.join(20)
            if process.is_alive():
                left += 1
                self._kill(rank)
        self.folder.cleanup()
        return left
