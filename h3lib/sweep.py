"""`h3lib sweep`: a grid of layouts, rows and seeds, each cell one executed notebook and its report.

A cell lives in build/sweeps/KEY. Its key is the SHA-256 of what decides the result: the notebook's
cells, all parameters, this package's sources, the environment's fingerprint. A cell is finished if
the record there names the digests of an executed notebook and a whole, equal report that are there
still; it is then not run again. Only a finished cell's report goes to build/reports, where the book
looks. Whatever else happens, the partial notebook stays with the cell.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table

from h3lib.book import NEW_REPORTS, ROOT
from h3lib.contract import H3Error, ReportError
from h3lib.execute import START_TIMEOUT_S, NotebookError, run_notebook
from h3lib.files import write_json
from h3lib.grid import Cell, GridError, digest_of, read_grid
from h3lib.layout import Layout
from h3lib.rank import DIFFERENT, EQUAL, FAILED, REFUSED
from h3lib.report import read_report

STATUS = {"equal": EQUAL, "different": DIFFERENT, "unsupported": REFUSED, "failed": FAILED}
_SEVERITY = ("different", "failed", "unsupported", "equal")
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: one of STATUS, and why; `skipped` if an earlier run's was kept."""

    state: str
    reason: str = ""
    seconds: float = 0.0
    skipped: bool = False


def is_finished(cell: Cell) -> bool:
    """Whether record, executed notebook and report are there, agree, and say equal."""
    try:
        record = json.loads((cell.folder / "cell.json").read_text())
        found = {path.name: digest_of(path) for path in (cell.executed, cell.report)}
        return record == _record(cell, found) and _equal(cell)
    except (OSError, ValueError):
        return False


def _record(cell: Cell, digests: dict[str, str]) -> dict:
    return {"key": cell.key, "parameters": dict(cell.parameters), "digests": digests}


def _equal(cell: Cell) -> bool:
    """The verdict of the cell's report. **Raises:** ReportError if it is not of this cell."""
    report = read_report(cell.report)
    for name in ("layout", "size", "rows", "device", "backend", "seed"):
        asked = cell.parameters.get(name, report[name])
        asked = Layout.parse(asked).name if name == "layout" else asked
        if report[name] != asked:
            raise ReportError(f"{name} of the report", report[name], asked)
    return report["equal"]


def run_cell(cell: Cell, stopping: threading.Event) -> Outcome:
    """Run one cell unless it is finished; never raises but for an interrupt."""
    started = time.monotonic()
    try:
        with _alone(cell.folder):
            if is_finished(cell):
                outcome = Outcome("equal", skipped=True)
            else:
                outcome = _attempt(cell, stopping)
            if outcome.state == "equal":
                _publish(cell)
    except OSError as error:
        fault = "disk full" if error.errno in _FULL else "exception"
        outcome = Outcome("failed", f"{fault}: {error}")
    return replace(outcome, seconds=time.monotonic() - started)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _attempt(cell: Cell, stopping: threading.Event) -> Outcome:
    published = _published(cell)
    for path in (cell.folder / "cell.json", cell.report, cell.executed, published):
        path.unlink(missing_ok=True)

    def tick() -> None:
        if stopping.is_set():
            raise KeyboardInterrupt

    parameters = {**cell.parameters, "out": str(cell.report)}
    limit = cell.timeout_s + START_TIMEOUT_S
    try:
        run_notebook(cell.notebook, cell.executed, parameters, cell.timeout_s, limit, tick)
    except NotebookError as error:
        return _not_finished(cell, error)
    try:
        equal = _equal(cell)
    except ReportError as error:
        return Outcome("failed", f"no report: {error}")
    if not equal:
        return Outcome("different", "the report says so, the notebook did not notice")
    digests = {path.name: digest_of(path) for path in (cell.executed, cell.report)}
    write_json(cell.folder / "cell.json", _record(cell, digests))
    return Outcome("equal")


def _not_finished(cell: Cell, error: NotebookError) -> Outcome:
    """A whole report that says different explains the notebook's failed assertion."""
    words = [line for line in str(error.accepted).splitlines() if line.strip()]
    why = f"{error.fault}: {words[-1].strip() if words else error.received}"
    if error.fault == "refused":
        return Outcome("unsupported", why)
    if error.fault == "exception":
        try:
            if not _equal(cell):
                return Outcome("different", str(cell.report))
        except ReportError:
            pass
    return Outcome("failed", why)


def _published(cell: Cell) -> Path:
    return NEW_REPORTS / "sweeps" / f"{cell.key}.json"


def _publish(cell: Cell) -> None:
    """The finished cell's report, whole, where the book looks."""
    place = _published(cell)
    place.parent.mkdir(parents=True, exist_ok=True)
    new = place.with_suffix(".new")
    shutil.copyfile(cell.report, new)
    os.replace(new, place)


def room(cells: list[Cell]) -> int:
    """Ranks that run at once: as many as processors or, if a cell asks for them, GPUs."""
    if any(cell.parameters.get("launcher") == "srun" for cell in cells):
        return 1  # each cell takes the allocation
    if any(cell.parameters.get("device") == "cuda" for cell in cells):
        return max(1, torch.cuda.device_count())
    return len(os.sched_getaffinity(0))


def run_cells(cells: list[Cell], jobs: int | None, console: Console) -> list[Outcome]:
    """Every cell's outcome, in order; cells run side by side while their ranks have room."""
    outcomes: dict[int, Outcome] = {}
    running: dict[Future, int] = {}
    waiting, free, stopping = list(range(len(cells))), room(cells), threading.Event()
    pool = ThreadPoolExecutor(max_workers=jobs or len(cells))
    with Live(console=console, auto_refresh=False, transient=True) as live:
        try:
            while waiting or running:
                busy = sum(cells[i].ranks for i in running.values())
                while waiting and len(running) < (jobs or len(cells)):
                    if running and busy + cells[waiting[0]].ranks > free:
                        break
                    i = waiting.pop(0)
                    running[pool.submit(run_cell, cells[i], stopping)] = i
                    busy += cells[i].ranks
                if console.is_terminal:
                    live.update(_table(cells, outcomes, set(running.values())), refresh=True)
                for future in wait(running, timeout=1.0, return_when=FIRST_COMPLETED).done:
                    i = running.pop(future)
                    outcomes[i] = future.result()
                    if not console.is_terminal:
                        done = f"[{len(outcomes)}/{len(cells)}] {line(cells[i], outcomes[i])}"
                        print(done, file=sys.stderr, flush=True)
        finally:
            stopping.set()
            pool.shutdown(cancel_futures=True)
    return [outcomes[i] for i in range(len(cells))]


def _table(cells: list[Cell], outcomes: dict[int, Outcome], running: set[int]) -> Table:
    table = Table(*cells[0].varied, "state", "seconds", title=f"{len(outcomes)} of {len(cells)}")
    for i, cell in enumerate(cells):
        state = outcomes[i].state if i in outcomes else "running" if i in running else "waiting"
        seconds = f"{outcomes[i].seconds:.1f}" if i in outcomes else ""
        table.add_row(*cell.varied.values(), state, seconds)
    return table


def line(cell: Cell, outcome: Outcome) -> str:
    """One cell in one line."""
    when = "kept" if outcome.skipped else f"{outcome.seconds:.1f} s"
    why = f"  {outcome.reason}" if outcome.reason else ""
    return f"{outcome.state:<12}{cell.name}  {when}  {_shown(cell.folder)}{why}"


def _shown(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def sweep(path: Path, only: int | None = None, jobs: int | None = None, count: bool = False) -> int:
    """Run a grid file to the exit status of its gravest cell: see _SEVERITY."""
    try:
        cells = read_grid(path)
        if only is not None and not 0 <= only < len(cells):
            raise GridError("cell", only, f"0 to {len(cells) - 1}")
        if jobs is not None and jobs < 1:
            raise GridError("jobs", jobs, "at least 1")
    except H3Error as error:
        print(f"h3lib sweep: {error}", file=sys.stderr)
        return REFUSED
    if count:
        print(len(cells))
        return EQUAL
    cells = cells if only is None else [cells[only]]
    outcomes = run_cells(cells, jobs, Console(stderr=True))
    for cell, outcome in zip(cells, outcomes, strict=True):
        print(line(cell, outcome))
    states = {outcome.state for outcome in outcomes}
    return STATUS[next(state for state in _SEVERITY if state in states)]
