"""The ledger of digests: what every equal run computed, kept when its report is replaced.

python -m h3lib.ledger           add the runs of reports/ that reports/ledger.csv does not have
python -m h3lib.ledger --check   exit status 1 if one is missing or two entries contradict

One line a value and run. Two runs that had the same question (`QUESTION`: contract, model size,
weights, inputs, back end, kind of GPU, or of CPU with its vector instructions, software, value)
must have the same SHA-256, whatever their layout, machine, date and commit. Lines are added and
never changed: a kernel that changes a bit contradicts the ledger until the contract, or the
software, has another name.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from h3lib.contract import ReportError
from h3lib.readme import ROOT, every_layout_report

LEDGER = ROOT / "reports" / "ledger.csv"
DIGITS = 16
QUESTION = (
    "contract", "size", "rows", "weights", "inputs", "backend", "device", "torch", "triton",
    "kind", "tensor",
)  # fmt: skip
RUN = ("layout", "ranks_per_gpu", "machine", "date", "commit")
COLUMNS = (*QUESTION, *RUN, "sha256")
Entry = dict[str, str]


def entries(report: dict) -> list[Entry]:
    """What a report of equal bytes adds to the ledger; nothing for one that differs."""
    where = report["environment"]
    run = {
        **{key: report[key] for key in ("contract", "size", "rows", "backend", "layout")},
        **{key: report["digests"][key][:DIGITS] for key in ("weights", "inputs")},
        **{key: where[key] or "" for key in ("torch", "triton", "machine", "date")},
        "device": ", ".join(filter(None, (where["device_name"], where.get("cpu_capability")))),
        "ranks_per_gpu": report["ranks_per_gpu"] or "",
        "commit": (where["git_commit"] or "")[:DIGITS],
    }
    tensors = report["tensors"] if report["equal"] else []
    values = (
        {**run, "kind": t["kind"], "tensor": t["name"], "sha256": t["sha256"][:DIGITS]}
        for t in tensors
    )
    return [{column: str(value[column]) for column in COLUMNS} for value in values]


def contradictions(ledger: Iterable[Entry]) -> list[tuple[Entry, Entry]]:
    """Pairs of entries with one question and two answers, each beside the first that was given."""
    first: dict[tuple, Entry] = {}
    found = []
    for entry in ledger:
        before = first.setdefault(tuple(entry[key] for key in QUESTION), entry)
        if before["sha256"] != entry["sha256"]:
            found.append((before, entry))
    return found


def read_ledger(path: Path) -> list[Entry]:
    """The lines of a ledger; none where there is no file yet.

    **Raises:** ReportError for columns that are not `COLUMNS`, or a line that lacks one.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ReportError(f"columns of {path.name}", reader.fieldnames, COLUMNS)
        ledger = list(reader)
    if len({tuple(map(str, entry.values())) for entry in ledger}) < len(ledger):
        raise ReportError(f"lines of {path.name}", "one twice", "each entry once")
    for line, entry in enumerate(ledger, start=2):
        if None in entry or None in entry.values() or len(entry["sha256"]) != DIGITS:
            raise ReportError(f"line {line} of {path.name}", entry, f"a value of each of {COLUMNS}")
    return ledger


def missing(ledger: Sequence[Entry], reports: Iterable[dict]) -> list[Entry]:
    """The entries of these reports that the ledger does not have."""
    known = {tuple(entry.values()) for entry in ledger}
    return [e for report in reports for e in entries(report) if tuple(e.values()) not in known]


def main(arguments: Sequence[str]) -> int:
    ledger = read_ledger(LEDGER)
    new = missing(ledger, every_layout_report(ROOT / "reports"))
    conflicts = contradictions([*ledger, *new])
    for before, entry in conflicts:
        print(f"ledger: two digests of {entry['kind']} {entry['tensor']}: {before} and {entry}")
    if conflicts:
        return 1
    if list(arguments) == ["--check"]:
        if new:
            print(f"ledger: {len(new)} entries of reports/ missing; run python -m h3lib.ledger")
        return int(bool(new))
    with LEDGER.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*ledger, *new])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
