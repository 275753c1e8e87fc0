"""Which seeded faults do the usual tolerances let pass?

    python -m h3lib.bench.tolerance --out reports/cpu/tolerance.json

Every mutant of `h3lib.bench.mutants` runs in one layout; each check looks at every rank's output,
then at its gradients, then at the FP32 roots. A check catches a mutant at the first kind of which
it refuses a value. Bytes are compared as this project does; the other checks are those that public
tests use, in their usual constants.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from h3lib.bench.command import write_measured
from h3lib.bench.mutants import MUTANTS, Mutant
from h3lib.canonical import canonical_tensors
from h3lib.compare import different_elements, take
from h3lib.contract import model_size
from h3lib.model.packing import job_for_rows, pack
from h3lib.model.program import BlockProgram, Program
from h3lib.model.trace import GRADIENT, OUTPUT, ROOT, Key, Record
from h3lib.model.weights import SyntheticWeights
from h3lib.parallel.shard import SeqShard
from h3lib.report import environment, machine_names
from h3lib.simulate import play

LAYOUT, ROWS, SIZE = "tp4-cp2-sp", 264, "tiny"
KINDS = (OUTPUT, GRADIENT, ROOT)
Check = Callable[[Tensor, Tensor], bool]
"""Whether a value `[n]` passes against the canonical one."""


def _close(rtol: float, atol: float) -> Check:
    return lambda x, y: torch.allclose(x.float(), y.float(), rtol=rtol, atol=atol)


def _cosine(least: float) -> Check:
    def passes(x: Tensor, y: Tensor) -> bool:
        if not (x.any() or y.any()):
            return True  # a value of zeros has no direction
        return float(F.cosine_similarity(x.double(), y.double(), dim=0)) >= least

    return passes


def _max_or_mean(largest: float, mean: float) -> Check:
    """The largest difference, in parts of the largest value, or the mean one of the mean."""

    def passes(x: Tensor, y: Tensor) -> bool:
        difference, size = (x.double() - y.double()).abs(), y.double().abs()
        return bool(
            difference.max() <= largest * size.max() or difference.mean() <= mean * size.mean()
        )

    return passes


def _similarity(most: float) -> Check:
    """1 - 2 <x, y> / (||x||^2 + ||y||^2)."""

    def passes(x: Tensor, y: Tensor) -> bool:
        x, y = x.double(), y.double()
        if not (x.any() or y.any()):
            return True
        return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum()) <= most

    return passes


CHECKS: dict[str, Check] = {
    "bytes": lambda x, y: not different_elements(x, y).any(),
    "allclose 1e-5, 1e-8": _close(1e-5, 1e-8),
    "allclose 1.6e-2, 1e-5": _close(1.6e-2, 1e-5),
    "allclose 1e-2, 1e-2": _close(1e-2, 1e-2),
    "allclose 5e-2, 5e-2": _close(5e-2, 5e-2),
    "max 5e-2 or mean 1e-2": _max_or_mean(5e-2, 1e-2),
    "similarity 1e-3": _similarity(1e-3),
    "cosine 0.999": _cosine(0.999),
    "cosine 0.99": _cosine(0.99),
}


def refusals(
    mutant: Mutant, program: Program, canonical: dict[Key, Tensor], layout: str
) -> dict[str, dict[str, int]]:
    """By check and kind, how many values of all ranks the check refuses."""
    found = {name: dict.fromkeys(KINDS, 0) for name in CHECKS}

    def look(rank: int, records: list[Record]) -> list[Record]:
        shown = mutant.records(rank, records)
        for record in shown:
            if record.kind in KINDS and record.tensor.numel():
                value, expected = _pair(record, canonical)
                for name, check in CHECKS.items():
                    found[name][record.kind] += not check(value, expected)
        return shown

    with mutant.during():
        play(layout, program, canonical, change=mutant.change, records=look)
    return found


def _pair(record: Record, canonical: dict[Key, Tensor]) -> tuple[Tensor, Tensor]:
    """A rank's piece and the canonical one, flat."""
    value = record.tensor.reshape(-1)
    expected = take(canonical[record.kind, record.name], record.region).reshape(-1)
    if record.start is not None:
        expected = expected[record.start : record.start + len(value)]
    return value, expected


def measure(layout: str = LAYOUT, rows: int = ROWS, size_name: str = SIZE) -> dict:
    """The content of the report."""
    size, packed = model_size(size_name), pack(job_for_rows(rows))
    program = BlockProgram(size, SyntheticWeights(size, 0, "cpu"), packed)
    canonical = canonical_tensors(program.records(SeqShard.canonical(rows)))
    cases = [
        {"mutant": name, "check": check, **counts}
        for name, mutant in MUTANTS.items()
        for check, counts in refusals(mutant, program, canonical, layout).items()
    ]
    return {
        "layout": layout,
        "size": size_name,
        "rows": rows,
        "environment": environment("cpu", machine_names(["here"])[0]),
        "cases": cases,
        "complete": True,
    }


def main() -> None:
    write_measured(__doc__, measure, layout=LAYOUT, rows=ROWS, size=SIZE)


if __name__ == "__main__":
    main()
