"""What a check of bits found: elements compared, how many differ, whether they should.

Bytes are compared, as integers; two NaN are equal whatever their payload.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from h3lib.compare import different_elements
from h3lib.contract import ReportError


@dataclass
class Finding:
    """One check; `different` is -1 where dtype or shape were not those expected."""

    check: str
    case: str
    elements: int = 0
    different: int = 0
    expected: str = "equal"
    details: dict[str, object] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        agrees = (self.different > 0) == (self.expected == "different")
        return agrees and self.elements > 0 and self.different >= 0

    def compare(self, value: Tensor, whole: Tensor) -> Finding:
        """Add two tensors of one dtype and shape to what was compared."""
        different = difference(value, whole)
        self.elements += value.numel()
        self.different = -1 if -1 in (different, self.different) else self.different + different
        return self


def difference(value: Tensor, expected: Tensor) -> int:
    """Elements whose bytes differ; -1 if dtype or shape do."""
    try:
        return int(different_elements(value, expected).sum())
    except ReportError:
        return -1


def found(check: str, case: str, value: Tensor, expected: Tensor, equal: bool = True) -> Finding:
    """One comparison; `equal` is False for a mutant, which must differ."""
    return Finding(check, case, expected="equal" if equal else "different").compare(value, expected)


def in_a_cold_process(code: str) -> str:
    """The last line that `code` prints in a process that compiles every kernel again."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env=os.environ | {"TRITON_CACHE_DIR": cache},
        )  # fmt: skip
    return done.stdout.splitlines()[-1]


Check = Callable[[], Iterator[Finding]]


def run_checks(checks: Mapping[str, Check]) -> Iterator[Finding]:
    """Every finding; a check that raises is a finding that failed."""
    for name, check in checks.items():
        try:
            yield from check()
        except Exception:  # noqa: BLE001  named in the report, and the report has not passed
            yield Finding("raised", name, 1, 1, details={"error": traceback.format_exc()})
