"""Execute one notebook with papermill: it finished, or a NotebookError names the fault.

papermill's exit status is not enough: it is 0 for a misspelt parameter and for `sys.exit(0)` in a
cell, and a killed kernel leaves a notebook whose cells are all "completed". So names and types are
checked before anything runs, and a run counts only if the exit status is 0, every cell with code
was executed and none failed.
"""

from __future__ import annotations

import ast
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import nbformat
from papermill import inspect_notebook

from h3lib.contract import H3Error, PeerError
from h3lib.parallel.launch import watch

FAULTS = (
    "parameters", "refused", "kernel killed", "timeout", "left early", "out of memory",
    "rank killed", "rank failed", "disk full", "exception", "no report",
)  # fmt: skip
START_TIMEOUT_S = 120
_DEAD_KERNEL = 138  # papermill's exit status
_IN_WORDS = {  # what an error's name or text says, looked for in this order
    "disk full": r"No space left on device|Disk quota exceeded|\[Errno (28|122)\]",
    "out of memory": r"MemoryError|OutOfMemoryError|out of memory|allocate memory",
    "rank killed": r"was killed by signal 9",
    "refused": r"RunRefused|LayoutError|ParameterError",
    "rank failed": r"RunFailed",
    "left early": r"SystemExit",
}
_NUMBERS = {  # one spelling a value: what another reader takes for another number is no number
    int: r"0|-?[1-9]\d*",
    float: r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?",
}


class NotebookError(H3Error, ValueError):
    """A notebook that may not run with these parameters, or that did not finish: `fault`."""

    def __init__(self, subject: str, received: object, accepted: object, fault="parameters"):
        super().__init__(subject, received, accepted)
        self.fault = fault

    def __reduce__(self):
        return type(self), (self.subject, self.received, self.accepted, self.fault)


def defaults(notebook: Path) -> dict[str, object]:
    """The notebook's parameters with their default values.

    **Raises:** NotebookError for what is not the path of a notebook.
    """
    if not notebook.is_file():
        raise NotebookError("notebook", str(notebook), "the path of a notebook")
    declared = inspect_notebook(notebook)
    return {name: ast.literal_eval(entry["default"]) for name, entry in declared.items()}


def check_parameters(notebook: Path, parameters: Mapping[str, object]) -> None:
    """**Raises:** NotebookError for a parameter that is not declared or has another type."""
    declared = defaults(notebook)
    for name, value in parameters.items():
        if name not in declared:
            raise NotebookError(f"parameter of {notebook.name}", name, ", ".join(declared))
        wanted = type(declared[name])
        if type(value) is not wanted:
            raise NotebookError(
                f"parameter {name} of {notebook.name}", value, f"of type {wanted.__name__}"
            )


def parse_parameters(notebook: Path, texts: Mapping[str, str]) -> dict[str, object]:
    """Values from a command line or a grid, each read as the type of the notebook's default.

    A text stays as it is where a text is wanted: `0123456`, `true`, `none`, a path with spaces. A
    number has one spelling; `0123456`, `1_000` and `12e4567` are none, stay texts, and are refused
    by `check_parameters`.
    """
    declared = defaults(notebook)
    return {name: _read(text, type(declared.get(name, ""))) for name, text in texts.items()}


def _read(text: str, wanted: type) -> object:
    if wanted is bool and text in ("true", "false"):
        return text == "true"
    if wanted in _NUMBERS and re.fullmatch(_NUMBERS[wanted], text):
        value = wanted(text)
        return value if math.isfinite(value) else text
    return text


def run_notebook(
    notebook: Path,
    output: Path,
    parameters: Mapping[str, object],
    cell_timeout_s: float,
    total_timeout_s: float = 30 * 24 * 3600.0,
    tick: Callable[[], None] = lambda: None,
) -> nbformat.NotebookNode:
    """The executed notebook, also in `output`, where what did not finish is kept.

    **Raises:** NotebookError for parameters that it lacks and, with its fault, for a run that did
    not finish.
    """
    check_parameters(notebook, parameters)
    output.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "papermill", str(notebook), str(output),
        "--parameters_yaml", json.dumps(dict(parameters)), "--cwd", str(notebook.parent),
        "--no-progress-bar", "--autosave-cell-every", "1",
        "--execution-timeout", str(math.ceil(cell_timeout_s)),
        "--start-timeout", str(START_TIMEOUT_S),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="h3lib-papermill-") as folder:
        log = Path(folder) / "log"
        try:
            status = watch(command, {}, total_timeout_s, log, tick)
        except PeerError as error:
            raise NotebookError(output.name, error.received, error.accepted, "timeout") from error
        words = log.read_text(errors="replace")
    book = _read_notebook(output)
    if status or book is None:
        fault = _fault(status, book, words)
        raise NotebookError(f"exit status of {output.stem}", status, f"0\n{_end(words)}", fault)
    check_finished(output.stem, book)
    return book


def _read_notebook(path: Path) -> nbformat.NotebookNode | None:
    """None where it was never written, or not to its end."""
    try:
        return nbformat.read(path, as_version=4)
    except (OSError, ValueError):
        return None


def _fault(status: int, book: nbformat.NotebookNode | None, words: str) -> str:
    """One of FAULTS, from papermill's exit status, the error in the notebook, papermill's words."""
    if status == _DEAD_KERNEL or "DeadKernelError" in words:
        return "kernel killed"
    if "CellTimeoutError" in words:
        return "timeout"
    said = "\n".join(f"{e.ename}: {e.evalue}" for e in _errors(book)) or _end(words, 1)
    found = (fault for fault, pattern in _IN_WORDS.items() if re.search(pattern, said))
    return next(found, "exception")


def _errors(book: nbformat.NotebookNode | None) -> list[nbformat.NotebookNode]:
    cells = [] if book is None else book.cells
    return [o for cell in cells for o in cell.get("outputs", []) if o.output_type == "error"]


def _end(text: str, num_lines: int = 30) -> str:
    return "\n".join(text.strip().splitlines()[-num_lines:])


def check_finished(name: str, book: nbformat.NotebookNode) -> None:
    """**Raises:** NotebookError unless every cell with code was executed and none failed."""
    if book.metadata.get("papermill", {}).get("exception"):
        raise NotebookError(f"run of {name}", "an exception", "no exception", _fault(0, book, ""))
    for index, cell in enumerate(book.cells):
        if cell.cell_type != "code" or not cell.source.strip():
            continue
        where = f"cell {index} of {name}"
        if cell.execution_count is None:
            raise NotebookError(where, "never executed", "every cell executed", "left early")
        if any(output.output_type == "error" for output in cell.outputs):
            raise NotebookError(where, "an error", "no error", "exception")

