"""`h3lib run`: start the ranks, watch them, and turn what happened into a status.

0 all bytes equal, 1 some differ, 2 unsupported or invalid request, 3 a rank failed or timed out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from h3lib.contract import H3Error, PeerError, ReportError
from h3lib.parallel.launch import LAUNCHERS, run_ranks, run_step
from h3lib.parallel.place import own_place
from h3lib.rank import DIFFERENT, EQUAL, FAILED, REFUSED, run_rank
from h3lib.report import PHASES, read_report
from h3lib.request import Request, RequestError

_LOG_LINES = 15


def run(request: Request, launcher: str = "local") -> int:
    """Run a request to its exit status; as one rank if this process was started as one.

    A report of an earlier run at the same place is removed first, so that what is there afterwards
    is of this run. Launcher `local` starts the ranks here, `srun` on this Slurm allocation's nodes.
    """
    try:
        place = own_place()
    except PeerError as error:
        return _say(FAILED, str(error))
    if place is not None:
        status = run_rank(request, place)
        if place.rank == 0 and status in (EQUAL, DIFFERENT):
            _summary(request)
        return status
    try:
        request.remove_old_report()
        request.check()
        _check_launcher(launcher)
    except H3Error as error:
        return _say(REFUSED, str(error))
    with tempfile.TemporaryDirectory(prefix="h3lib-run-") as folder:
        status = (_start if launcher == "local" else _start_step)(request, Path(folder))
    if status in (EQUAL, DIFFERENT):
        _summary(request)
    return status


def _check_launcher(launcher: str) -> None:
    """**Raises:** RequestError for a launcher that is unknown, or srun where there is no Slurm."""
    if launcher not in LAUNCHERS:
        raise RequestError("launcher", launcher, ", ".join(LAUNCHERS))
    if launcher == "srun" and (shutil.which("srun") is None or "SLURM_JOB_ID" not in os.environ):
        raise RequestError("launcher", launcher, "local: this is no allocation of Slurm")


def _start_step(request: Request, scratch: Path) -> int:
    """The ranks as a step of Slurm; only a report that says the same makes 0 or 1 of its status."""
    layout, log, arguments = request.parsed_layout, scratch / "log", [json.dumps(asdict(request))]
    try:
        code = run_step(
            "h3lib.rank", arguments, layout.num_ranks, layout.local_size, request.timeout_s, log
        )
        if code in (EQUAL, DIFFERENT) and read_report(request.out)["equal"] == (code == EQUAL):
            return code
    except (PeerError, ReportError) as error:
        _say(FAILED, _tail(log))
        return _say(FAILED, str(error))
    _say(FAILED, _tail(log))
    return code if code == REFUSED else FAILED


def _start(request: Request, scratch: Path) -> int:
    layout, log = request.parsed_layout, scratch / "log"
    bar = tqdm(total=len(PHASES) - 1, desc=layout.name, unit="phase", disable=None, delay=2)

    def tick() -> None:
        try:
            phase = (scratch / "phase").read_text()
        except OSError:
            return
        if phase in PHASES:
            bar.set_postfix_str(phase, refresh=False)
            bar.update(PHASES.index(phase) - bar.n)

    arguments = [json.dumps(asdict(request)), str(scratch)]
    try:
        code = run_ranks("h3lib.rank", arguments, layout.num_ranks, request.timeout_s, log, tick)
    except PeerError as error:
        _say(FAILED, _tail(log))
        return _say(FAILED, str(error))
    finally:
        bar.close()
    statuses = {int(path.read_text() or FAILED) for path in scratch.glob("status-*")}
    if code == 0 and len(statuses) == 1:
        return statuses.pop()
    _say(FAILED, _tail(log))
    return REFUSED if statuses == {REFUSED} else FAILED


def _tail(log: Path) -> str:
    """Which ranks were killed, what the ranks said themselves, else which torchrun saw end."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([*_killed("\n".join(lines)), _words(lines)])


def _killed(text: str) -> list[str]:
    """Ranks that a signal ended before any other: their peers only say that a peer is gone."""
    ranks = re.findall(r"failed \(exitcode: -9\) local_rank: (\d+)", text)
    srun = r"^srun: error: \S+: tasks? ([\d,-]+): (?:Killed|Out Of Memory)"
    ranks += re.findall(srun, text, re.M)
    why = "as Linux does when memory runs out"
    return [f"h3lib: rank {rank} was killed by signal 9, {why}" for rank in dict.fromkeys(ranks)]


def _words(lines: list[str]) -> str:
    own = list(dict.fromkeys(line for line in lines if line.startswith("h3lib: ")))
    if own and not own[0].endswith("Traceback (most recent call last):"):
        return "\n".join(own[:_LOG_LINES])
    if own:
        start = lines.index(own[0])
        return "\n".join(lines[start : start + 3 * _LOG_LINES])
    ended = re.findall(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", "\n".join(lines))
    if ended:
        return "; ".join(f"rank {rank} ended with exit code {code}" for code, rank in ended)
    return "\n".join(lines[-_LOG_LINES:]) or "a rank ended without a word"


def _say(status: int, message: str) -> int:
    print(message if message.startswith("h3lib: ") else f"h3lib: {message}", file=sys.stderr)
    return status


def _summary(request: Request) -> None:
    report = read_report(request.out)
    tensors, control = report["tensors"], report["control"]
    wrong = [tensor for tensor in tensors if tensor["different"]]
    compared = sum(tensor["total"] for tensor in tensors)
    verdict = "not applicable"
    if control["applicable"]:
        verdict = f"{control['different']:,} of {control['total']:,} differ"
    print(
        f"{report['layout']}  {report['size']}  {report['rows']} rows  {report['device']}: "
        f"{len(tensors) - len(wrong)} of {len(tensors)} values equal on {report['num_ranks']} "
        f"ranks ({compared:,} elements); control: {verdict}"
    )
    if report["untraced"]["different"]:
        counts = "{different:,} of {total:,} differ".format(**report["untraced"])
        print(f"  outputs and gradients without a trace: {counts}")
    if report.get("first_different_step") is not None:
        print(f"  first step that differs: {report['first_different_step']}")
    for tensor in wrong[:_LOG_LINES]:
        counts = f"{tensor['different']:,} of {tensor['total']:,} differ"
        print(f"  {tensor['kind']} {tensor['name']}: {counts}, first {tensor['first']}")
