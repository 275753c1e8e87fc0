"""`h3lib faults`: a short run finds nothing, and what it looks for is counted when it is there."""

import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from h3lib.faults.injection import COUNTS, FaultsError, draw, judge, run_faults
from h3lib.faults.rounds import leaks, run_rounds


def injection(**changes):
    drawn = draw(random.Random(0), 0, "cpu", 4)
    return replace(drawn, fault="killed", when="before", victim=2, timeout_s=3.0, **changes)


def survivor(**changes) -> dict:
    error = "rank 2 in all_reduce: received 'its process ended'; accepted: an answer in 3 s"
    well = {"error": error, "typed": True, "waited_s": 3.1, "wrong_bytes": 0, "refused": True}
    return well | changes


AFTER = {rank: {"equal": True} for rank in range(4)}
WRONG = {
    "hangs": lambda found, after: found.pop(1),
    "wrong_bytes": lambda found, after: found[1].update(wrong_bytes=1),
    "untyped_errors": lambda found, after: found[1].update(typed=False),
    "unnamed_errors": lambda found, after: [f.update(error="rank 3: x") for f in found.values()],
    "different_errors": lambda found, after: found[1].update(error="rank 2: y"),
    "late_errors": lambda found, after: found[1].update(waited_s=8.1),
    "not_refused": lambda found, after: found[1].update(refused=False),
    "new_group_wrong": lambda found, after: after[1].update(equal=False),
}


def judged(change=lambda found, after: None, missing=(), left=0):
    found = {rank: survivor() for rank in (0, 1, 3)}
    after = {rank: dict(there) for rank, there in AFTER.items()}
    change(found, after)
    return judge(injection(), found, list(missing), after, left)


def test_an_injection_that_went_well_passes():
    assert judged().passed and not judged(left=1).passed


@pytest.mark.parametrize("count", WRONG)
def test_what_must_not_be_is_counted(count):
    outcome = judged(WRONG[count], missing=[1] if count == "hangs" else [])
    assert [name for name in COUNTS if getattr(outcome, name)] == [count]


def test_a_survivor_that_raised_nothing_is_counted():
    outcome = judged(lambda found, after: found[1].update(error=""))
    assert outcome.untyped_errors == 1


def test_every_family_of_faults_is_drawn():
    drawn = [draw(random.Random(seed), seed, "cpu", 4) for seed in range(300)]
    faults = {d.fault for d in drawn}
    assert {"killed", "stopped", "late", "late within the timeout", "dtype", "contract"} <= faults
    assert {d.when for d in drawn} == {"before", "during", "after"}
    assert {d.levels for d in drawn} == {1, 2} and {d.victim for d in drawn} == {0, 1, 2, 3}
    assert {d.when for d in [draw(random.Random(s), s, "cuda", 4) for s in range(99)]} >= {"graph"}


def test_a_short_run_finds_nothing(tmp_path):
    out = tmp_path / "faults.json"
    command = [sys.executable, "-m", "h3lib.cli", "faults", "--count", "3", "--seed", "5"]
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["complete"] and report["injections"] == 3
    assert not any(report["totals"].values())
    assert all(outcome["passed"] for outcome in report["outcomes"])


@pytest.mark.parametrize("count,ranks,words", [(0, 4, "count"), (1, 1, "ranks"), (1, 9, "ranks")])
def test_what_cannot_be_run_is_refused(count, ranks, words, tmp_path):
    with pytest.raises(FaultsError, match=words):
        run_faults(count, 0, tmp_path / "faults.json", num_ranks=ranks)


def test_open_close_rounds_leave_nothing():
    assert leaks(run_rounds(12, "cpu")) == []


@pytest.mark.slow
def test_a_thousand_open_close_rounds_leave_nothing():
    assert leaks(run_rounds(1000, "cpu", timeout_s=1800)) == []


def test_a_leak_is_seen():
    held = {"open_files": 5, "threads": 2}
    there = {"settled": held, "end": held | {"open_files": 6}, "digests": 2}
    assert leaks([there]) == ["rank 0: open_files 5 to 6", "rank 0: other bytes"]
