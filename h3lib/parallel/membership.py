"""Who the ranks of a world are, and which of them is to blame when one does not answer.

A rank that waits in vain knows that something failed, not what. All survivors settle on one
verdict:

1. a verdict that a peer has published in the store is adopted;
2. else a process of this host that has ended, or is stopped, is named;
3. else every rank says again and again how long ago it entered the collective that failed, how
   long ago it saw the failure, by its own monotonic clock, and for whom it waited. After the
   timeout and a grace, the nearest rank that says nothing was late: one that was waited for, or
   for which such a rank waits in its turn. If all say something, it is the one that entered last,
   or was the last to see the failure, since it was away inside the collective. Clocks of different
   hosts are never compared.

The first verdict that reaches the store is the one (compare and set), so every survivor raises the
same error.
"""

from __future__ import annotations

import ast
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from h3lib.contract import PeerError

GRACE_S = 2.0
_SPREAD_S = 0.5  # ranks that enter a collective within this time are not late
_POLL_S = 0.05  # an age in the store is as old as this


@dataclass(frozen=True)
class Place:
    """One rank's process; `start` tells it from a later process with the same number."""

    host: str
    pid: int
    start: str

    @classmethod
    def here(cls) -> Place:
        return cls(socket.gethostname(), os.getpid(), _stat(os.getpid())[1])


def _stat(pid: int) -> tuple[str, str]:
    """(state letter, start time) of a process of this host; empty if there is none."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return "", ""
    return words[0], words[19]


class Members:
    """The places of all ranks; processes that this one cannot see are never judged by it."""

    def __init__(self, places: list[Place]):
        self.places = places
        here = socket.gethostname()
        self._visible = [p.host == here and _stat(p.pid)[1] == p.start for p in places]

    @property
    def hosts(self) -> list[str]:
        return [place.host for place in self.places]

    def ended(self, rank: int) -> bool:
        """Whether the rank's process is known to have ended."""
        return self._state(rank) == ""

    def fault(self, rank: int) -> str | None:
        """What is wrong with the rank's process, None if it runs or cannot be seen."""
        state = self._state(rank)
        if state == "":
            return "its process ended"
        return "its process is stopped" if state in ("T", "t") else None

    def _state(self, rank: int) -> str | None:
        """State letter, empty for an ended process, None for one that cannot be seen."""
        if not self._visible[rank]:
            return None
        place = self.places[rank]
        state, start = _stat(place.pid)
        return "" if start != place.start or state in ("Z", "X") else state


class Verdicts:
    """The one verdict of a world, kept in the store by which its ranks met."""

    def __init__(self, store: dist.Store, members: Members, rank: int, timeout_s: float):
        self.store, self.members, self.rank = store, members, rank
        self.timeout_s = timeout_s

    def publish(self, error: PeerError) -> PeerError:
        """Settle on `error`, or on what another rank settled on before."""
        text = json.dumps([error.subject, repr(error.received), str(error.accepted)])
        try:
            return _parse(self.store.compare_set("verdict", "", text).decode())
        except RuntimeError:  # the store is gone: nobody is left to agree with
            return error

    def published(self) -> bool:
        try:
            return self.store.check(["verdict"])
        except RuntimeError:
            return False

    def settle(
        self,
        what: str,
        ranks: list[int],
        entered: float,
        cause: str,
        missing: list[int] | None = None,
    ) -> PeerError:
        """The verdict on a collective of `ranks` that failed here; `entered` is of this process's
        `time.monotonic`. `missing` are those that had not come when the timeout was over, if that
        is known."""
        failed = time.monotonic()
        deadline = (failed if missing else entered + self.timeout_s) + GRACE_S
        awaited = [rank for rank in missing or ranks if rank != self.rank]
        try:
            while True:
                now = time.monotonic()
                said = json.dumps([now - entered, now - failed, awaited])
                self.store.set(f"failed/{self.rank}", said)
                if self.published():
                    return _parse(self.store.get("verdict").decode())
                if (fault := self._fault()) is not None:
                    return self.publish(self._error(what, *fault))
                if time.monotonic() > deadline:
                    return self.publish(self._late(what, cause, missing or []))
                time.sleep(_POLL_S)
        except RuntimeError:
            fault = self._fault()
            return self._error(what, *fault) if fault else self._unknown(what, cause)

    def _fault(self) -> tuple[int, str] | None:
        for rank in range(len(self.members.places)):
            if rank != self.rank and (fault := self.members.fault(rank)) is not None:
                return rank, fault
        return None

    def _late(self, what: str, cause: str, missing: list[int]) -> PeerError:
        """Ages were said within one poll of now, so their differences are those of the moments."""
        ages: dict[int, list[float]] = {}
        asked = [self.rank]
        for rank in asked:  # grows by those for whom a rank waited: the nearest first
            if rank in ages:
                continue
            if not self.store.check([f"failed/{rank}"]):
                return self._error(what, rank, "late: it did not come")
            *ages[rank], awaited = json.loads(self.store.get(f"failed/{rank}"))
            asked += awaited
        for since in range(2):  # the entry, the failure
            last = min(ages, key=lambda rank, since=since: ages[rank][since])
            delay = max(said[since] for said in ages.values()) - ages[last][since]
            if delay > _SPREAD_S:
                return self._error(what, last, f"late by {delay:.1f} s")
        return self._error(what, missing[0], "late") if missing else self._unknown(what, cause)

    def _error(self, what: str, rank: int, fault: str) -> PeerError:
        return PeerError(f"rank {rank} in {what}", fault, f"an answer in {self.timeout_s:g} s")

    def _unknown(self, what: str, cause: str) -> PeerError:
        accepted = f"an answer in {self.timeout_s:g} s"
        return PeerError(f"peers of rank {self.rank} in {what}", cause, accepted)


class Hold:
    """Memory that the ranks of a group share: which of them may still have it mapped.

    A rank says in the store that it has let go. A process that has ended has let go of everything;
    one that cannot be seen and says nothing never has.
    """

    def __init__(self, store: dist.Store, members: Members, rank: int, peers: list[int], name: str):
        self.store, self.members, self.rank, self.peers = store, members, rank, peers
        self.name = name

    def let_go(self) -> None:
        try:
            self.store.set(f"{self.name}/{self.rank}", "")
        except RuntimeError:  # the store is gone, and peers hear of it in the same way
            pass

    def holders(self) -> list[int]:
        """Peers that may still have the memory mapped."""
        return [rank for rank in self.peers if not self._has_let_go(rank)]

    def _has_let_go(self, rank: int) -> bool:
        if self.members.ended(rank):
            return True
        try:
            return self.store.check([f"{self.name}/{rank}"])
        except RuntimeError:
            return False


def _parse(text: str) -> PeerError:
    subject, received, accepted = json.loads(text)
    try:
        received = ast.literal_eval(received)
    except (ValueError, SyntaxError):
        pass
    return PeerError(subject, received, accepted)
