"""What a check of bits found, and the JSON of all checks of one program."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from h3lib.bench.measure import environment

INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


@dataclass
class Finding:
    """One check: elements compared, elements that differ, and whether a difference is expected."""

    check: str
    case: str
    elements: int = 0
    different: int = 0
    expected: str = "equal"
    details: dict[str, object] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return bool(self.elements) and (self.different > 0) == (self.expected == "different")

    def compare(self, value: Tensor, whole: Tensor) -> Finding:
        """Bytes; two NaN are equal whatever their payload."""
        kind = INTEGERS[whole.dtype]
        differ = value.contiguous().view(kind) != whole.contiguous().view(kind)
        differ &= ~(value.isnan() & whole.isnan())
        self.elements += differ.numel()
        self.different += int(differ.sum())
        return self


Check = Callable[[], Iterator[Finding]]


def run_checks(checks: Mapping[str, Check]) -> Iterator[Finding]:
    """Every finding; a check that raises is a finding that failed."""
    for name, check in checks.items():
        try:
            yield from check()
        except Exception:  # noqa: BLE001  named in the report, and the report has not passed
            yield Finding("raised", name, 1, 1, details={"error": traceback.format_exc()})


def write_findings(checks: Mapping[str, Check], commit: str, out: Path) -> None:
    """Run every check, print each finding, write the report; `complete` is its last key."""
    findings = []
    for finding in run_checks(checks):
        findings.append(asdict(finding) | {"passed": finding.passed})
        print(findings[-1], flush=True)
    result = {
        "environment": environment() | {"commit": commit},
        "findings": findings,
        "passed": all(finding["passed"] for finding in findings),
        "complete": True,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
