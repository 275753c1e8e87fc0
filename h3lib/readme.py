"""The results tables and the figure of the README, written from the report files.

python -m h3lib.readme           write them
python -m h3lib.readme --check   exit status 1 if they are not what reports/ says
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from h3lib.contract import ReportError
from h3lib.layout import Layout
from h3lib.prices import price_figure, price_line, price_text, prices, timed_lines, timing_files
from h3lib.report import read_report

ROOT = Path(__file__).resolve().parents[1]
START, END = "<!-- results: python -m h3lib.readme -->", "<!-- /results -->"
MODEL_START, MODEL_END = "<!-- model: python -m h3lib.readme -->", "<!-- /model -->"
PRICE_START, PRICE_END = "<!-- prices: python -m h3lib.readme -->", "<!-- /prices -->"
FIGURE = ROOT / "book" / "figures" / "prices.svg"
_SIZES = ("tiny", "small", "full")
_SAME_RUN = ("layout", "local_size", "size", "rows", "device", "backend")
_SAME_PROGRAM = ("blocks", "recompute", "points")


def layout_reports(*folders: Path | str) -> list[dict]:
    """The reports of `h3lib run` of one block, by device, size, rows, ranks and layout.

    They are looked for in folders and below. A report takes the place of one of the same run in an
    earlier folder. Other JSON files (benchmarks) are passed over.

    **Raises:** ReportError for one that is not whole.
    """
    return [report for report in _newest(*folders) if not is_of_model(report)]


def model_reports(*folders: Path | str) -> list[dict]:
    """The same of the whole model and of generations; generations last."""
    reports = [report for report in _newest(*folders) if is_of_model(report)]
    return sorted(reports, key=lambda report: "points" in report)


def is_of_model(report: dict) -> bool:
    """Whether a report is of more than one block alone."""
    return report.get("blocks", 1) > 1 or "points" in report


def _newest(*folders: Path | str) -> list[dict]:
    newest = {}
    for report in every_layout_report(*folders):
        same = tuple(report[key] for key in _SAME_RUN)
        program = tuple(report.get(key) for key in _SAME_PROGRAM)
        newest[*same, *program, *report["digests"].values()] = report
    return sorted(
        newest.values(),
        key=lambda r: (
            r["device"], _SIZES.index(r["size"]), r["rows"], r["num_ranks"],
            -Layout.parse(r["layout"]).tp, r["layout"],
        ),
    )  # fmt: skip


def every_layout_report(*folders: Path | str) -> Iterator[dict]:
    """The reports of `h3lib run` in folders and below, by path; those of the same run too.

    **Raises:** ReportError for one that is not whole.
    """
    for path in (path for folder in folders for path in sorted(Path(folder).rglob("*.json"))):
        if _is_layout_report(path):
            yield read_report(path)


def _is_layout_report(path: Path) -> bool:
    try:
        report = json.loads(path.read_text())
    except ValueError as error:
        raise ReportError(f"report {path}", str(error), "a complete JSON report") from error
    return isinstance(report, dict) and "layout" in report and "tensors" in report


def result_line(report: dict) -> dict[str, str]:
    """What a report says, in one line of text cells."""
    tensors, control = report["tensors"], report["control"]
    different = sum(tensor["different"] for tensor in tensors)
    different += report.get("untraced", {}).get("different", 0)
    total = sum(tensor["total"] for tensor in tensors)
    share = control["different"] / control["total"] if control["total"] else 0
    ranks, shared = str(report["num_ranks"]), report["ranks_per_gpu"] or 0
    return {
        "layout": report["layout"],
        "ranks": f"{ranks}, {shared} a GPU" if shared > 1 else ranks,
        "device": report["device"],
        "back end": report["backend"],
        "size": report["size"],
        "rows": f"{report['rows']:,}",
        "values equal": f"{sum(not t['different'] for t in tensors)} of {len(tensors)}",
        "elements compared": f"{total:,}",
        "different": f"{different:,}",
        "control differs": f"{share:.0%}" if control["applicable"] else "n/a",
    }


def model_line(report: dict) -> dict[str, str]:
    """What a report of the model says; what ran is in the second cell."""
    line, points = result_line(report), report.get("points")
    if points is not None:
        what = f"generation, {points - 1} steps, and its replay"
    else:
        again = ", blocks computed again" if report["recompute"] else ""
        what = f"forward and backward{again}"
    blocks = {"what": what, "blocks": str(report["blocks"])}
    return {"layout": line.pop("layout"), **blocks, **line}


def markdown_table(lines: Sequence[dict[str, str]]) -> str:
    """Lines with one set of keys as a Markdown table."""
    if not lines:
        return "No report yet: `make reproduce` writes them to `build/reports/`.\n"
    rows = [list(lines[0]), ["---"] * len(lines[0]), *(list(line.values()) for line in lines)]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def with_results(readme: str, table: str, start: str = START, end: str = END) -> str:
    """The README's text with this table between the markers."""
    before, rest = readme.split(start)
    return f"{before}{start}\n{table}{end}{rest.split(end)[1]}"


def main(arguments: Sequence[str]) -> int:
    path, folder = ROOT / "README.md", ROOT / "reports"
    old = path.read_text()
    new = with_results(old, markdown_table([result_line(r) for r in layout_reports(folder)]))
    of_model = markdown_table([model_line(r) for r in model_reports(folder)])
    new = with_results(new, of_model, MODEL_START, MODEL_END)
    found = prices(timed_lines(timing_files(folder)))
    table = markdown_table(list(map(price_line, found)))
    text = price_text(found, table, FIGURE.relative_to(ROOT).as_posix())
    new = with_results(new, text, PRICE_START, PRICE_END)
    figure = price_figure(found) if found else None
    if list(arguments) == ["--check"]:
        stale = new != old or figure != (FIGURE.read_text() if FIGURE.exists() else None)
        if stale:
            print("README.md or prices.svg differ from reports/; run python -m h3lib.readme")
        return int(stale)
    path.write_text(new)
    if figure is None:
        FIGURE.unlink(missing_ok=True)
    else:
        FIGURE.write_text(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
