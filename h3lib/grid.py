"""A grid file: which cells a sweep has, and the key that stands for all that decides a cell.

    grid:                       # every combination is one cell, the last name varying fastest
      layout: [tp4, tp4-cp2-sp]
      rows: [264, 1097]
      seed: [0, 1]
    fixed: {size: tiny}         # the same in every cell
    timeout_s: 900              # of each cell
    notebook: other.ipynb       # beside this file; without it, the notebook of one layout
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import nbformat
import yaml

from h3lib.book import ONE_LAYOUT, ROOT
from h3lib.contract import H3Error, LayoutError
from h3lib.doctor import fingerprint_digest
from h3lib.execute import check_parameters, defaults, parse_parameters
from h3lib.layout import Layout

SWEEPS = ROOT / "build" / "sweeps"
_FIELDS = ("notebook", "grid", "fixed", "timeout_s")


class GridError(H3Error, ValueError):
    """A grid file that does not say what to run."""


@dataclass(frozen=True)
class Cell:
    """One combination: all parameters but `out`; `varied`, what tells it from its neighbours."""

    notebook: Path
    parameters: Mapping[str, object]
    varied: Mapping[str, str]
    timeout_s: float
    key: str

    @property
    def name(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.varied.items())

    @property
    def folder(self) -> Path:
        return SWEEPS / self.key

    @property
    def executed(self) -> Path:
        return self.folder / "notebook.ipynb"

    @property
    def report(self) -> Path:
        return self.folder / "report.json"

    @property
    def ranks(self) -> int:
        """How many ranks it starts; 1 for a layout that will be refused."""
        try:
            return Layout.parse(self.parameters["layout"]).num_ranks
        except LayoutError:
            return 1


def read_grid(path: Path) -> list[Cell]:
    """The cells of a grid file, the last name of `grid` varying fastest.

    Every value is read as the notebook's parameter has it, not as YAML would.

    **Raises:** GridError for a file of another form; NotebookError for a parameter that the
    notebook lacks or a value of another type.
    """
    try:
        content = yaml.load(path.read_text(), Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise GridError(f"grid {path}", str(error), "a YAML file") from error
    if not isinstance(content, dict) or not set(content) <= set(_FIELDS) or "grid" not in content:
        received = list(content) if isinstance(content, dict) else content
        raise GridError(f"fields of {path.name}", received, f"grid, and of {', '.join(_FIELDS)}")
    grid, fixed = content["grid"], content.get("fixed") or {}
    _check_values(path.name, grid, fixed)
    notebook = ONE_LAYOUT
    if "notebook" in content:
        notebook = (path.parent / content["notebook"]).resolve()
    if not notebook.is_file():
        raise GridError(f"notebook of {path.name}", str(notebook), "a notebook that exists")
    timeout = content.get("timeout_s", "900")
    if not timeout.isdecimal() or int(timeout) < 1:
        raise GridError(f"timeout_s of {path.name}", timeout, "whole seconds, at least 1")
    combinations = [
        dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())
    ]
    return [_cell(notebook, varied, fixed, int(timeout)) for varied in combinations]


def _check_values(name: str, grid: object, fixed: object) -> None:
    lists = grid.values() if isinstance(grid, dict) and grid else [None]
    for values in lists:
        texts = isinstance(values, list) and values and all(isinstance(v, str) for v in values)
        if not texts or len(set(values)) != len(values):
            raise GridError(f"grid of {name}", values, "a list of different values for each name")
    if not isinstance(fixed, dict) or not all(isinstance(value, str) for value in fixed.values()):
        raise GridError(f"fixed of {name}", fixed, "one value for each name")
    if set(fixed) & set(grid):
        raise GridError(f"fixed of {name}", sorted(set(fixed) & set(grid)), "names not in grid")


def _cell(notebook: Path, varied: dict, fixed: dict, timeout_s: float) -> Cell:
    parameters = parse_parameters(notebook, {**fixed, **varied})
    check_parameters(notebook, parameters)
    everything = {**defaults(notebook), **parameters}
    missing = {"layout", "out"} - set(everything)
    if missing:
        raise GridError(f"parameters of {notebook.name}", sorted(everything), "layout and out too")
    if everything.pop("out"):
        raise GridError("parameter out", parameters["out"], "nothing: each cell has its own")
    return Cell(notebook, everything, varied, timeout_s, _key(notebook, everything))


def _key(notebook: Path, parameters: Mapping[str, object]) -> str:
    cells = [(c.cell_type, c.source) for c in nbformat.read(notebook, as_version=4).cells]
    package = [
        (str(p.relative_to(ROOT)), digest_of(p)) for p in sorted((ROOT / "h3lib").rglob("*.py"))
    ]
    content = [cells, sorted(parameters.items()), package, fingerprint_digest()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
