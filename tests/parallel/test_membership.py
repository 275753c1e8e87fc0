"""Who is late, and who may still have memory mapped, without processes or clocks of hosts."""

import threading
import time

import pytest
import torch.distributed as dist

from h3lib.contract import PeerError
from h3lib.parallel import peer_memory
from h3lib.parallel.membership import Hold, Verdicts
from h3lib.parallel.peer_memory import DriverError, SharedBuffers, free_kept


class Running:
    """Members of whom `gone` have ended and `stopped` are stopped."""

    places = (None,) * 3

    def __init__(self, gone=(), stopped=()):
        self.gone, self.stopped = set(gone), set(stopped)

    def ended(self, rank):
        return rank in self.gone

    def fault(self, rank):
        return "ended" if rank in self.gone else "stopped" if rank in self.stopped else None


def settle(ages: dict[int, float], groups=None, missing=None) -> list[str]:
    """The verdict of every rank that noticed; a rank has been in its collective for its age."""
    store, found = dist.HashStore(), {}

    def rank_main(rank: int, age: float) -> None:
        verdicts = Verdicts(store, Running(), rank, timeout_s=1.0)
        ranks, entered = (groups or {}).get(rank, [0, 1, 2]), time.monotonic() - age
        awaited = (missing or {}).get(rank)
        found[rank] = verdicts.settle("a call", ranks, entered, "a timeout", awaited)

    threads = [threading.Thread(target=rank_main, args=item) for item in ages.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [str(found[rank]) for rank in sorted(found)]


@pytest.fixture(autouse=True)
def no_wall_clock(monkeypatch):
    """Hosts' clocks differ by any amount: nothing here may read one."""
    monkeypatch.setattr(time, "time", lambda: 1 / 0)


def test_the_rank_that_entered_last_by_its_own_clock_was_late():
    errors = settle({0: 2.5, 1: 0.7, 2: 2.4})
    assert len(set(errors)) == 1
    assert errors[0].startswith("rank 1 in a call: received 'late by 1.")


def test_a_rank_that_says_nothing_did_not_come():
    (first, second) = settle({0: 2.5, 2: 2.4})
    assert first == second
    assert first.startswith("rank 1 in a call: received 'late: it did not come'")


def test_ranks_that_entered_together_blame_nobody():
    errors = settle({0: 2.5, 1: 2.4, 2: 2.3})
    assert len(set(errors)) == 1 and "received 'a timeout'" in errors[0]


def test_a_rank_that_waits_itself_is_not_the_one_that_is_late():
    """Two levels: rank 2 waits for 3 inside its node, 3 and 0 for rank 1, which says nothing."""
    groups = {0: [0, 1], 2: [2, 3], 3: [1, 3]}
    errors = settle({0: 2.3, 2: 2.5, 3: 2.4}, groups, {0: [1], 2: [3]})
    assert len(set(errors)) == 1
    assert errors[0].startswith("rank 1 in a call: received 'late: it did not come'")


def test_who_had_not_come_at_the_timeout_was_late_even_if_it_says_the_same_now():
    errors = settle({0: 2.5, 2: 2.4}, {0: [0, 2], 2: [0, 2]}, {0: [2], 2: [2]})
    assert len(set(errors)) == 1 and errors[0].startswith("rank 2 in a call: received 'late'")


class Driver:
    """Counts what is allocated and mapped; freeing what a peer maps is what must not happen."""

    def __init__(self):
        self.freed, self.closed = [], []

    def allocate(self, num_bytes):
        return 100

    def export(self, address):
        return b"handle"

    def open(self, handle):
        return 200

    def close(self, address):
        self.closed.append(address)

    def free(self, address):
        self.freed.append(address)


class Control:
    """Rank 0 of three that agree, until `fails`."""

    rank, size, ranks = 0, 3, (0, 1, 2)

    def __init__(self, members):
        self.store, self.members, self.fails = dist.HashStore(), members, False

    def hold(self):
        return Hold(self.store, self.members, 0, [1, 2], "let go/1")

    def gather_objects(self, value):
        if self.fails:
            raise PeerError("process group", "a use after: a failure", "a new one")
        return [value] * 3


@pytest.fixture
def shared(monkeypatch):
    monkeypatch.setattr(peer_memory, "PATIENCE_S", 0.2)
    control, driver = Control(Running()), Driver()
    return control, driver, SharedBuffers(control, 64, driver)


def test_a_group_that_is_well_unmaps_meets_and_frees(shared):
    control, driver, buffers = shared
    met = []

    def gather(value):
        met.append((driver.closed[:], driver.freed[:]))

    control.gather_objects = gather
    buffers.release()
    assert met == [([200, 200], [])] and driver.freed == [100]
    assert free_kept() == 0


def test_after_a_failure_a_buffer_is_freed_when_every_peer_has_let_go_or_ended(shared):
    control, driver, buffers = shared
    control.fails = True
    buffers.release()
    assert driver.closed == [200, 200] and driver.freed == [] and free_kept() == 1
    assert control.store.check(["let go/1/0"])
    Hold(control.store, control.members, 1, [0, 2], "let go/1").let_go()
    assert free_kept() == 1
    control.members.gone.add(2)
    assert free_kept() == 0 and driver.freed == [100]


def test_a_stopped_peer_is_not_waited_for(shared):
    control, driver, buffers = shared
    control.fails, control.members.gone, control.members.stopped = True, {1}, {2}
    began = time.monotonic()
    buffers.release()
    assert time.monotonic() - began < 0.15 and free_kept() == 1
    control.members.gone.add(2)
    assert free_kept(5.0) == 0


def test_a_peer_that_fails_while_buffers_are_opened_leaves_nothing_mapped(monkeypatch):
    control, driver = Control(Running(gone=(1, 2))), Driver()
    answers = iter([[(b"handle", None)] * 3])

    def gather(value):
        for answer in answers:
            return answer
        raise PeerError("process group", "a failure", "an answer")

    control.gather_objects = gather
    with pytest.raises(PeerError, match="a failure"):
        SharedBuffers(control, 64, driver)
    assert driver.closed == [200, 200] and driver.freed == [100]


def test_a_mapping_that_the_driver_refuses_names_both_ranks():
    control, driver = Control(Running()), Driver()

    def refuse(handle):
        raise DriverError("open", "CUDA_ERROR_INVALID_VALUE", "CUDA_SUCCESS")

    driver.open = refuse
    with pytest.raises(PeerError, match="memory of rank 1 mapped by rank 0: received 'open: CUDA"):
        SharedBuffers(control, 64, driver)
    assert driver.freed == [100]
