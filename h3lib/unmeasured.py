"""What no report here measures, in sentences that follow the files: a part of the book's limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from h3lib.prices import NOT_TIMED, prices, timed_lines, timing_files
from h3lib.readme import layout_reports

BENCHMARKS = {  # a file's name: what would be known if it were there
    "overlap.json": "How much communication a block hides behind its products, with a GPU for each "
    "rank: `h3lib bench overlap` measures it, and no report of it is here. Bytes of that are "
    "compared on shared GPUs.",
    "interference.json": "What a collective takes from a product beside it: `h3lib bench "
    "interference` measures it on two GPUs or more, and no report of it is here.",
    "transformer-*.json": "The time of the whole model in a layout: `python -m "
    "h3lib.bench.transformer --layout tp2` measures it, and no report of it is here.",
}


def _most_gpus(reports: list[dict], timed: list[dict]) -> int:
    """GPUs of the largest run whose ranks each owned one, verified or timed."""
    own = [
        report["num_ranks"]
        for report in reports
        if report["device"] == "cuda" and report["ranks_per_gpu"] == 1
    ]
    return max([0, *own, *(line["ranks"] for line in timed)])


def unmeasured(folder: Path) -> list[str]:
    """Sentences about a folder of reports, each Markdown; none about what is there."""
    reports, timed = layout_reports(folder), timed_lines(timing_files(folder))
    gpus, nodes = _most_gpus(reports, timed), max(map(_nodes, reports), default=1)
    found = [
        f"{gpus or 'No'} GPUs were the most that a run had with one for each rank "
        "([](runs/06_results.ipynb) says which layouts): with more ranks, several share a GPU."
    ]
    if nodes == 1:
        found.append("Several nodes, and NCCL between nodes, were not run.")
    if not prices(timed):
        found.append(NOT_TIMED)
    found += [words for name, words in BENCHMARKS.items() if not any(folder.rglob(name))]
    return found


def timed_files(folder: Path) -> Iterator[dict[str, str]]:
    """Where and at which commit each benchmark ran on GPUs, one line a file."""
    for path in sorted(folder.rglob("*.json")):
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or not content.get("measurements"):
            continue
        where = content.get("environment", {})
        if "gpu" in where and "commit" in where:
            yield {
                "file": path.relative_to(folder).as_posix(),
                "GPU": where["gpu"],
                "commit": str(where["commit"])[:10],
                "day": where["date"][:10] if "date" in where else "not recorded",
            }


def _nodes(report: dict) -> int:
    return len(set(report.get("nodes", [0])))
