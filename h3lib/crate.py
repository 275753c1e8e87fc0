"""Pack the evidence as an RO-Crate: every report, the log, the papers, each with its SHA-256.

    python -m h3lib.crate build/crate           write it
    python -m h3lib.crate --check build/crate   exit status 1 unless every digest is right
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rocrate.rocrate import ROCrate

from h3lib.contract import H3Error, ReportError
from h3lib.readme import ROOT, layout_reports, result_line

PAPERS = ("README.md", "ARTIFACT.md", "CITATION.cff", "codemeta.json", "LICENSE", "reports/LOG.md")
_TYPES = {".json": "application/json", ".md": "text/markdown", ".cff": "application/yaml"}
_SHA256 = {"sha256": "https://schema.org/sha256"}  # a term that RO-Crate 1.1 lacks


def write_crate(folder: Path) -> int:
    """Write the crate of what is committed; how many files it holds.

    **Raises:** ReportError for a report that is not whole: it is no evidence.
    """
    software = json.loads((ROOT / "codemeta.json").read_text())
    layout_reports(ROOT / "reports")
    crate = ROCrate(gen_preview=False)
    crate.name = f"{software['name']} {software['version']}: reports of runs and benchmarks"
    crate.description = software["description"]
    crate.license = software["license"]
    crate.metadata.extra_terms.update(_SHA256)
    paths = [ROOT / name for name in PAPERS] + sorted((ROOT / "reports").rglob("*.json"))
    for path in paths:
        crate.add_file(path, str(path.relative_to(ROOT)), properties=_properties(path))
    crate.write(folder)
    return len(paths)


def _properties(path: Path) -> dict[str, object]:
    content = path.read_bytes()
    properties = {
        "name": str(path.relative_to(ROOT)),
        "encodingFormat": _TYPES.get(path.suffix, "text/plain"),
        "contentSize": str(len(content)),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    if path.suffix == ".json" and path.is_relative_to(ROOT / "reports"):
        properties |= _of_report(json.loads(content))
    return properties


def _of_report(report: dict) -> dict[str, object]:
    """What a report says of itself: when, of which commit, with what result."""
    if report.get("complete") is not True:
        raise ReportError("complete of a report", report.get("complete"), True)
    known = report.get("environment", {})
    found = {"dateCreated": known.get("date"), "version": known.get("git_commit")}
    if "tensors" in report:
        found["description"] = "; ".join(f"{k}: {v}" for k, v in result_line(report).items())
    return {key: value for key, value in found.items() if value is not None}


def check_crate(folder: Path) -> int:
    """How many files have the digest that the crate gives.

    **Raises:** ReportError for one that is changed or missing, or for a folder that is no crate.
    """
    try:
        entities = ROCrate(folder).data_entities
    except Exception as error:  # rocrate has no error of its own for what is no crate
        raise ReportError(f"crate {folder}", str(error), "an RO-Crate") from error
    for entity in entities:
        path = folder / entity.id
        found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "nothing"
        if found != entity["sha256"]:
            raise ReportError(f"SHA-256 of {entity.id}", found, entity["sha256"])
    return len(entities)


def main(arguments: Sequence[str]) -> int:
    checking, places = "--check" in arguments, [a for a in arguments if a != "--check"]
    if len(places) != 1:
        print("usage: python -m h3lib.crate [--check] FOLDER", file=sys.stderr)
        return 2
    try:
        count = (check_crate if checking else write_crate)(Path(places[0]))
    except H3Error as error:
        print(f"h3lib.crate: {error}", file=sys.stderr)
        return 1
    print(f"{places[0]}: {count} files {'as the crate says' if checking else 'written'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
