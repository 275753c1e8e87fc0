"""Claims, written down apart from the runs and counted in the committed files.

python -m h3lib.claims           print every claim and what the files say
python -m h3lib.claims --check   the same; exit status 1 if one does not stand

An entry of `reports/claims.yml`:

    id: products-chain
    claim: Chains reach 0.95 of cuBLAS at 14,910 and 37,776 rows.
    file: reports/h200/kernels.json
    lines: measurements                 # the list in the file
    where: {op: [linear_forward, linear_dx], rows: [14910, 37776]}
    value: ratio
    holds: ">= 0.95"                    # for every line that is left
    least: 4                            # and so many of them must be there

`any: true` asks for one line instead of all. A claim that the measurement refused stays in the file
with `missed: why`; then it must be missed, and an entry that is not any more is an error too.
"""

from __future__ import annotations

import json
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from h3lib.contract import ReportError
from h3lib.readme import ROOT

CLAIMS = ROOT / "reports" / "claims.yml"
COMPARISONS: Mapping[str, Callable] = {
    "==": operator.eq, "!=": operator.ne, ">=": operator.ge, "<=": operator.le,
    ">": operator.gt, "<": operator.lt,
}  # fmt: skip
REQUIRED = {"id", "claim", "file", "lines", "value", "holds", "least"}
OPTIONAL = {"where", "any", "missed"}


@dataclass(frozen=True)
class Outcome:
    """What a file says about a claim: how many lines it is about, how many hold."""

    id: str
    claim: str
    file: str
    holding: int
    lines: int
    held: bool
    missed: str | None

    @property
    def stands(self) -> bool:
        """Held, or missed as the entry says."""
        return self.held == (self.missed is None)


def read_claims(path: Path = CLAIMS) -> list[dict]:
    """The entries. **Raises:** ReportError for one that lacks a field, has another, or repeats."""
    entries = yaml.safe_load(path.read_text())
    for entry in entries:
        fields = set(entry)
        if not REQUIRED <= fields <= REQUIRED | OPTIONAL:
            accepted = f"{sorted(REQUIRED)} and perhaps {sorted(OPTIONAL)}"
            raise ReportError(f"fields of claim {entry.get('id')}", sorted(fields), accepted)
        if not isinstance(entry["least"], int) or entry["least"] < 1:
            raise ReportError(f"least of claim {entry['id']}", entry["least"], "1 or more lines")
    names = [entry["id"] for entry in entries]
    if len(set(names)) != len(names):
        raise ReportError("ids of claims", names, "each once")
    return entries


def check(entry: Mapping[str, object], root: Path = ROOT) -> Outcome:
    """Read the file of a claim and count.

    **Raises:** ReportError for a file that is not there or not complete, a list or field that it
    does not have, or a comparison that is none.
    """
    path = root / str(entry["file"])
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ReportError(f"file of claim {entry['id']}", str(error), "a JSON file") from error
    if content.get("complete") is not True:
        raise ReportError(f"{entry['file']} of claim {entry['id']}", "incomplete", "complete: true")
    lines = _selected(entry, content)
    symbol, _, limit = str(entry["holds"]).partition(" ")
    if symbol not in COMPARISONS or not limit:
        raise ReportError(f"comparison of claim {entry['id']}", entry["holds"], [*COMPARISONS])
    values = [_field(entry, line, str(entry["value"])) for line in lines]
    holding = sum(bool(COMPARISONS[symbol](value, yaml.safe_load(limit))) for value in values)
    enough = 1 if entry.get("any") else len(lines)
    if len(lines) < entry["least"]:
        raise ReportError(f"lines of claim {entry['id']}", len(lines), f"{entry['least']} or more")
    held = holding >= enough
    return Outcome(
        entry["id"], entry["claim"], entry["file"], holding, len(lines), held, entry.get("missed")
    )


def _selected(entry: Mapping, content: Mapping) -> list[Mapping]:
    lines = content.get(entry["lines"])
    if not isinstance(lines, list):
        raise ReportError(f"list of claim {entry['id']}", entry["lines"], sorted(content))
    where = entry.get("where", {})
    return [
        line
        for line in lines
        if all(
            _field(entry, line, key) in (wanted if isinstance(wanted, list) else [wanted])
            for key, wanted in where.items()
        )
    ]


def _field(entry: Mapping, line: Mapping, key: str) -> object:
    if key not in line:
        raise ReportError(f"field of claim {entry['id']}", key, sorted(line))
    return line[key]


def main(arguments: Sequence[str]) -> int:
    outcomes, failed = [], False
    for entry in read_claims():
        try:
            outcomes.append(check(entry))
        except ReportError as error:
            failed = True
            print(f"claims: {error}")
    for outcome in outcomes:
        verdict = "held" if outcome.held else "missed"
        mark = "" if outcome.stands else "   NOT AS WRITTEN"
        print(f"{verdict:<7}{outcome.holding:>5} of {outcome.lines:<5} {outcome.id}{mark}")
    wrong = [outcome.id for outcome in outcomes if not outcome.stands]
    return int(failed or (bool(wrong) and list(arguments) == ["--check"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
