"""Start ranks with torchrun or srun and leave none running, whatever happens.

The launcher and every rank of torchrun ask the kernel to be killed when their parent dies; the
caller stops a late run with TERM, then KILL. A rank that dies makes torchrun stop the others. Under
srun the ranks are Slurm's, which ends them with their step.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from h3lib.contract import PeerError

_PR_SET_PDEATHSIG = 1
_GRACE_S = 3.0
LAUNCHERS = ("local", "srun")
_LAUNCHER = "torch.distributed.run"


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_launcher() -> None:
    """The same for a rank; at once if its launcher ended while the rank was starting."""
    die_with_parent()
    try:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        parent = b""
    if _LAUNCHER.encode() not in parent:
        os._exit(3)


def run_ranks(
    module: str,
    arguments: Sequence[str],
    num_ranks: int,
    timeout_s: float,
    log: Path,
    tick: Callable[[], None],
    variables: Mapping[str, str] | None = None,
) -> int:
    """`python -m module arguments` on `num_ranks` ranks of this machine; torchrun's exit status.

    Their output goes to `log`, their temporary files beside it; `tick` is called a few times a
    second; `variables` join their environment.

    **Raises:** PeerError if they have not ended after `timeout_s`; then none is left running.
    """
    command = [
        sys.executable,
        "-m",
        _LAUNCHER,
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
        "--monitor-interval",
        "0.1",
        "-m",
        module,
        *arguments,
    ]
    settings = {**_one_thread(), "TMPDIR": str(log.parent), **(variables or {})}
    return watch(command, settings, timeout_s, log, tick)


def run_step(
    module: str,
    arguments: Sequence[str],
    num_ranks: int,
    local_size: int | None,
    timeout_s: float,
    log: Path,
) -> int:
    """The same as a step over the nodes of this Slurm allocation, ranks node by node.

    srun's exit status is the greatest of the ranks'. `local_size` ranks a node; None leaves it to
    the allocation. Ranks that outlive the first to end by a minute are ended.

    **Raises:** PeerError as `run_ranks`.
    """
    shape = ["--ntasks", str(num_ranks), "--distribution", "block"]
    if local_size is not None:
        nodes = str(num_ranks // local_size)
        shape += ["--nodes", nodes, "--ntasks-per-node", str(local_size)]
    command = ["srun", "--overlap", "--kill-on-bad-exit=0", "--wait=60", *shape]
    command += [sys.executable, "-m", module, *arguments]
    return watch(command, _one_thread(), timeout_s, log, lambda: None)


def _one_thread() -> dict[str, str]:
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def watch(
    command: Sequence[str],
    settings: dict[str, str],
    timeout_s: float,
    log: Path,
    tick: Callable[[], None],
) -> int:
    """A command's exit status; its output goes to `log`; `tick` is called ten times a second.

    **Raises:** PeerError if it has not ended after `timeout_s`. Then, and if `tick` raises, neither
    it nor what it started is left running.
    """
    environment = {**os.environ, **settings}
    deadline = time.monotonic() + timeout_s
    with log.open("w") as output:
        agent = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            while agent.poll() is None:
                if time.monotonic() > deadline:
                    raise PeerError("ranks", f"no end after {timeout_s:g} s", "an end in time")
                tick()
                time.sleep(0.1)
            return agent.returncode
        finally:
            stop(agent)


def stop(agent: subprocess.Popen) -> None:
    """End the launcher and its ranks: TERM, a short wait, KILL."""
    ranks = descendants(agent.pid)
    if agent.poll() is None:
        _signal_group(agent.pid, signal.SIGTERM)
        try:
            agent.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            pass
    _signal_group(agent.pid, signal.SIGKILL)
    for rank in ranks:
        try:
            os.kill(rank, signal.SIGKILL)
        except ProcessLookupError:
            pass
    agent.wait()


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass


def descendants(pid: int) -> list[int]:
    """Processes that this one started, from any of its threads, directly or through others."""
    found, parents = [], [pid]
    while parents:
        for task in Path(f"/proc/{parents.pop()}/task").glob("*/children"):
            try:
                children = [int(child) for child in task.read_text().split()]
            except OSError:
                continue
            found += children
            parents += children
    return found
