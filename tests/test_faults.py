"""`h3lib faults`: a short run finds nothing, and what it looks for is counted when it is there."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from h3lib.faults.catalogue import CAUSES, FAULTS, HARMLESS, draw
from h3lib.faults.injection import COUNTS, FaultsError, judge, run_faults
from h3lib.faults.rounds import leaks, run_rounds
from h3lib.faults.world import Played


def injection(**changes):
    (drawn,) = draw(1, 0, "cpu", 4)
    there = {"fault": "killed", "when": "before", "victim": 2, "levels": 1, "timeout_s": 3.0}
    return replace(drawn, **there | changes)


def survivor(**changes) -> dict:
    error = "rank 2 in all_reduce: received 'its process ended'; accepted: an answer in 3 s"
    well = {"error": error, "typed": True, "waited_s": 3.1, "wrong_bytes": 0}
    return well | {"refused": True, "closed": True} | changes


AFTER = {rank: {"equal": True, "kept": 0} for rank in range(4)}
WRONG = {
    "hangs": lambda found, after: found.pop(1),
    "wrong_bytes": lambda found, after: found[1].update(wrong_bytes=1),
    "untyped_errors": lambda found, after: found[1].update(typed=False),
    "unnamed_errors": lambda found, after: [
        f.update(error="rank 3: received 'its process ended by rank 2'") for f in found.values()
    ],
    "unnamed_causes": lambda found, after: [f.update(error="rank 2: x") for f in found.values()],
    "different_errors": lambda found, after: found[1].update(error="rank 2: its process ended"),
    "late_errors": lambda found, after: found[1].update(waited_s=8.1),
    "not_refused": lambda found, after: found[1].update(refused=False),
    "new_group_wrong": lambda found, after: after[1].update(equal=False),
    "buffers_left": lambda found, after: after[1].update(kept=1),
}


def judged(change=lambda found, after: None, missing=(), left=0):
    found = {rank: survivor() for rank in (0, 1, 3)}
    after = {rank: dict(there) for rank, there in AFTER.items()}
    change(found, after)
    return judge(injection(), Played(found, after, list(missing), left))


def test_an_injection_that_went_well_passes():
    assert judged().passed and not judged(left=1).passed


@pytest.mark.parametrize("count", WRONG)
def test_what_must_not_be_is_counted(count):
    outcome = judged(WRONG[count], missing=[1] if count == "hangs" else [])
    assert [name for name in COUNTS if getattr(outcome, name)] == [count]


def test_a_survivor_that_raised_nothing_is_counted():
    outcome = judged(lambda found, after: found[1].update(error=""))
    assert outcome.untyped_errors == 1


def test_a_group_that_could_not_be_closed_is_counted():
    assert judged(lambda found, after: found[1].update(closed=False)).untyped_errors == 1


def test_of_two_ranks_that_disagree_either_may_be_named():
    found = {rank: survivor(error="shape of a call on rank 1: received 3; accepted: 2 as on rank 0")
             for rank in (0, 1)}  # fmt: skip
    for size, unnamed in ((2, 0), (4, 1)):
        case = injection(fault="shape", victim=0, num_ranks=size)
        after = {rank: {"equal": True, "kept": 0} for rank in range(size)}
        assert judge(case, Played(found, after)).unnamed_errors == unnamed


def test_every_fault_is_drawn_at_every_time_before_one_comes_again():
    whole = [(fault.name, when) for fault in FAULTS for when in fault.when]
    drawn = draw(2 * len(whole), 7, "cuda", 4)
    for part in (drawn[: len(whole)], drawn[len(whole) :]):
        assert sorted((d.fault, d.when) for d in part) == sorted(whole)
    assert [d.number for d in drawn] == list(range(len(drawn)))
    assert {d.levels for d in drawn if d.when != "graph"} == {1, 2}
    assert {d.levels for d in drawn if d.when == "graph"} == {1}
    assert {d.victim for d in drawn} == {0, 1, 2, 3} and {d.spread for d in drawn} == {True, False}
    on_cpu = {(d.fault, d.when) for d in draw(200, 7, "cpu", 4)}
    gpu_only = {fault.name for fault in FAULTS if fault.gpu_only}
    assert on_cpu == {kind for kind in whole if kind[0] not in gpu_only and kind[1] != "graph"}


def test_a_longer_run_begins_as_a_shorter_one_and_seeds_differ():
    assert draw(90, 3, "cuda", 4)[:45] == draw(45, 3, "cuda", 4)
    assert draw(45, 4, "cuda", 4) != draw(45, 3, "cuda", 4)


def test_every_fault_that_is_not_harmless_has_a_cause_to_be_named():
    assert {name for name, cause in CAUSES.items() if not cause} == set(HARMLESS) - {"nothing"}


def test_a_short_run_finds_nothing(tmp_path):
    out = tmp_path / "faults.json"
    command = [sys.executable, "-m", "h3lib.cli", "faults", "--count", "4", "--seed", "5"]
    command += ["--jobs", "2"]
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["complete"] and report["injections"] == 4
    assert [o["injection"]["number"] for o in report["outcomes"]] == [0, 1, 2, 3]
    assert not any(report["totals"].values())
    assert all(outcome["passed"] for outcome in report["outcomes"])


@pytest.mark.parametrize(
    "count,ranks,jobs,words",
    [(0, 4, 1, "count"), (1, 1, 1, "ranks"), (1, 9, 1, "ranks"), (1, 4, -1, "jobs")],
)
def test_what_cannot_be_run_is_refused(count, ranks, jobs, words, tmp_path):
    with pytest.raises(FaultsError, match=words):
        run_faults(count, 0, tmp_path / "faults.json", num_ranks=ranks, jobs=jobs)


def test_open_close_rounds_leave_nothing():
    assert leaks(run_rounds(12, "cpu")) == []


@pytest.mark.slow
def test_a_thousand_open_close_rounds_leave_nothing():
    assert leaks(run_rounds(1000, "cpu", timeout_s=1800)) == []


def test_a_leak_is_seen():
    held = {"open_files": 5, "threads": 2}
    there = {"settled": held, "end": held | {"open_files": 6}, "digests": 2}
    assert leaks([there]) == ["rank 0: open_files 5 to 6", "rank 0: other bytes"]
