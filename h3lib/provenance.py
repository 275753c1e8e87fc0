"""Where numbers come from: commit, device, driver, versions, date.

Reports of runs (`report.py`) and of benchmarks (`bench/measure.py`) both take it from here.
"""

from __future__ import annotations

import datetime
import platform
import subprocess
from importlib import import_module
from pathlib import Path

import torch


def git_commit() -> str | None:
    """The commit that this package was checked out from, None if it is not of a repository.

    A package that is installed inside another project's checkout is not of that repository.
    """
    here = str(Path(__file__).parent)
    if _output("git", "-C", here, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _output("git", "-C", here, "rev-parse", "HEAD")


def git_dirty() -> bool | None:
    """Whether that checkout has changes of its own, None without a repository."""
    if git_commit() is None:
        return None
    status = _output("git", "-C", str(Path(__file__).parent), "status", "--porcelain")
    return None if status is None else bool(status)


def device_name(device: str) -> str:
    """The name of the current GPU, or of the processor."""
    return torch.cuda.get_device_name() if device == "cuda" else _cpu_name()


def driver_version() -> str | None:
    """The GPU driver's version, None without one."""
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return driver.splitlines()[0] if driver else None


def versions(*names: str) -> dict[str, str | None]:
    """The version of each package (or of `python`), None for one that is not installed."""
    return {name: _version(name) for name in names}


def gpu_environment(commit: str | None = None) -> dict[str, object]:
    """Where a benchmark's numbers were taken: the current GPU, the vendor's libraries that torch
    was built with, versions, date, and the commit, this checkout's unless it is given."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        **setting("torch", "triton"),
        "commit": commit or git_commit() or "unknown",
    }


def setting(*packages: str) -> dict[str, object]:
    """What every environment says: versions, whether the checkout was changed, the date."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {**versions("python", *packages), "git_dirty": git_dirty(), "date": date}


def _version(name: str) -> str | None:
    if name == "python":
        return platform.python_version()
    try:
        return import_module(name).__version__
    except ImportError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
