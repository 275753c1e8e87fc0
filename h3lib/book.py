"""Execute the notebooks with papermill and put what finished into book/runs/ for the book.

    python -m h3lib.book all
    python -m h3lib.book run notebooks/05_one_layout.ipynb NAME [-p PARAMETER VALUE]...

A page is kept only if its notebook finished (`h3lib.execute`) and the report it is about is whole.
Pages that were executed on another machine, with its GPUs, are committed in reports/*/pages/.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

from h3lib.contract import H3Error
from h3lib.execute import (
    NotebookError,
    check_finished,
    defaults,
    parse_parameters,
    run_notebook,
)
from h3lib.readme import layout_reports, model_line, model_reports, result_line
from h3lib.report import read_report
from h3lib.unmeasured import timed_files, unmeasured

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS, RUNS, WORK = ROOT / "notebooks", ROOT / "book" / "runs", ROOT / "build" / "notebooks"
NEW_REPORTS, EVIDENCE = ROOT / "build" / "reports", ROOT / "reports"
ONE_LAYOUT = NOTEBOOKS / "05_one_layout.ipynb"
SHOWN_LAYOUTS = ("tp4", "tp4-cp2-sp", "tp8-local4")
CELL_TIMEOUT_S = 900


@dataclass(frozen=True)
class Run:
    """One execution: `name` is the file in book/runs/, `title` the heading of its page."""

    notebook: Path
    name: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    title: str | None = None


def plan() -> list[Run]:
    """The runs that make the book: each notebook once, the one about a layout for several.

    A notebook whose default is a file of `reports/` that is not there waits for it.
    """
    runs = []
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        if lacking(notebook):
            continue
        if notebook != ONE_LAYOUT:
            runs.append(Run(notebook, notebook.stem))
            continue
        for layout in SHOWN_LAYOUTS:
            runs.append(
                Run(
                    notebook,
                    f"{notebook.stem}_{layout}",
                    _of_report(layout),
                    f"One layout: {layout}",
                )
            )
    return runs


def lacking(notebook: Path) -> list[str]:
    """Files below reports/ that are defaults of a notebook's parameters and do not exist."""
    named = (str(value) for value in defaults(notebook).values())
    files = (name for name in named if re.fullmatch(r"reports/.*\.json", name))
    return [name for name in files if not (ROOT / name).exists()]


def committed_pages() -> list[Path]:
    """Executed notebooks among the evidence, by name."""
    return sorted(EVIDENCE.glob("*/pages/*.ipynb"))


def copy_pages() -> None:
    """Put the committed pages into book/runs/. **Raises:** NotebookError for an unfinished one."""
    for path in committed_pages():
        book = nbformat.read(path, as_version=4)
        check_finished(path.stem, book)
        nbformat.write(book, RUNS / path.name)


def _of_report(layout: str) -> dict[str, object]:
    """Parameters that load the new report of a layout, if there is one."""
    path = NEW_REPORTS / f"{layout}.json"
    if not path.exists():
        return {"layout": layout}
    report = read_report(path)
    same = {key: report[key] for key in ("layout", "size", "rows", "device", "backend", "seed")}
    return {**same, "report": str(path.relative_to(ROOT))}


def execute(run: Run) -> Path:
    """Run one notebook; its page in book/runs/. What did not finish stays in build/notebooks/.

    **Raises:** NotebookError for parameters that it lacks and for a run that did not finish.
    """
    if not re.fullmatch(r"[\w.-]+", run.name):
        raise NotebookError("name of a page", run.name, "letters, digits, '.', '_' and '-'")
    page, output = RUNS / f"{run.name}.ipynb", WORK / f"{run.name}.ipynb"
    for folder in (RUNS, WORK):
        folder.mkdir(parents=True, exist_ok=True)
    page.unlink(missing_ok=True)
    book = run_notebook(run.notebook, output, run.parameters, CELL_TIMEOUT_S)
    if run.parameters.get("report"):
        read_report(ROOT / str(run.parameters["report"]))
    _dress(book, run.title)
    nbformat.write(book, output)
    os.replace(output, page)
    return page


def _dress(book: nbformat.NotebookNode, title: str | None) -> None:
    """The page's own title; the cell that papermill injected is folded."""
    heading = next(cell for cell in book.cells if cell.cell_type == "markdown")
    if title is not None:
        heading.source = re.sub(r"\A# .*", f"# {title}", heading.source)
    for place in ("input_path", "output_path"):  # of this machine alone
        book.metadata.get("papermill", {}).pop(place, None)
    for cell in book.cells:
        tags = cell.metadata.get("tags", [])
        if "injected-parameters" in tags:
            cell.metadata["tags"] = [*tags, "hide-input"]


def write_tables() -> None:
    """Tables of the status page from all reports (results, where they ran, seconds a phase, what
    was timed), and the sentences of the limits about what was not measured.

    Ranks that share a GPU wait for each other there: their times mean nothing and are left out.
    """
    reports = layout_reports(EVIDENCE, NEW_REPORTS)
    of_model = model_reports(EVIDENCE, NEW_REPORTS)
    tables = {
        "results": [result_line(report) for report in reports],
        "model_results": [model_line(report) for report in of_model],
        "environment": list(
            {tuple(e.items()): e for e in map(_environment_line, [*reports, *of_model])}.values()
        ),
        "seconds": [_seconds_line(r) for r in reports if (r["ranks_per_gpu"] or 1) == 1],
        "timed": list(timed_files(EVIDENCE)),
    }
    for name, lines in tables.items():
        with (RUNS / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([list(lines[0]), *(list(line.values()) for line in lines)])
    text = "".join(f"* {sentence}\n" for sentence in unmeasured(EVIDENCE))
    (RUNS / "unmeasured.txt").write_text(text)


def _environment_line(report: dict) -> dict[str, str]:
    e = report["environment"]
    commit = "not recorded" if e["git_commit"] is None else e["git_commit"][:10]
    return {
        "device": e["device_name"],
        "driver": e["driver"] or "none",
        **{key: e[key] or "none" for key in ("python", "torch", "triton", "numpy")},
        "commit": commit + (" with changes" if e["git_dirty"] else ""),
        "day": e["date"][:10],
    }


def _seconds_line(report: dict) -> dict[str, str]:
    line = {key: str(report[key]) for key in ("layout", "device", "backend", "size", "rows")}
    return line | {phase: f"{seconds:.3g}" for phase, seconds in report["timings_s"].items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m h3lib.book", description="Execute notebooks.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("all", help="every notebook of the book, and the tables of its status page")
    one = commands.add_parser("run", help="one notebook")
    one.add_argument("notebook", type=Path)
    one.add_argument("name", help="name of the page in book/runs/")
    one.add_argument("-p", "--parameter", nargs=2, action="append", default=[])
    one.add_argument("--title", help="heading of the page; with parameters it is else the name")
    options = parser.parse_args(arguments)
    try:
        if options.command == "run":
            values = parse_parameters(options.notebook, dict(options.parameter))
            title = options.title or (options.name if values else None)
            runs = [Run(options.notebook, options.name, values, title)]
        else:
            runs = plan()
            for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
                if files := lacking(notebook):
                    print(f"{notebook.stem}: no page, {', '.join(files)} is not there")
        for run in runs:
            print(execute(run).relative_to(ROOT), flush=True)
        if options.command == "all":
            copy_pages()
            write_tables()
    except H3Error as error:
        print(f"h3lib.book: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
