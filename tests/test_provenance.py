"""Where numbers come from: read from the machine, None where it has no answer."""

import datetime
import subprocess
from pathlib import Path

import torch

import h3lib
from h3lib import provenance
from h3lib.report import environment

ROOT = Path(h3lib.__file__).parent


def _git(*arguments):
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def test_commit_and_changes_are_those_of_the_checkout():
    assert provenance.git_commit() == _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain")
    assert provenance.git_dirty() == (None if status is None else bool(status))


def test_versions_are_those_of_the_packages_and_none_without_one():
    found = provenance.versions("python", "torch", "no_such_package")
    assert found == {
        "python": ".".join(map(str, __import__("sys").version_info[:3])),
        "torch": torch.__version__,
        "no_such_package": None,
    }


def test_no_repository_and_no_driver_are_no_error(monkeypatch):
    def missing(*arguments, **options):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    nothing = provenance.git_commit(), provenance.git_dirty(), provenance.driver_version()
    assert nothing == (None, None, None)


def test_the_environment_of_a_report_is_this_machine_now():
    found = environment("cpu", "node-a")
    assert found["machine"] == "node-a" and found["driver"] is None and found["device_name"]
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(found["date"])
    assert datetime.timedelta(seconds=-1) < age < datetime.timedelta(minutes=1)
