"""The benchmark of kernels: which parts there are; a part that it does not know starts nothing."""

import subprocess
import sys

import pytest

from h3lib.bench.kernels import PARTS, bench_kernels
from h3lib.contract import BackendError


def test_an_unknown_part_is_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(BackendError, match="part of the benchmark: received 'nothing'; accepted"):
        bench_kernels(tmp_path / "out.json", ["rowwise", "nothing"])
    assert not list(tmp_path.iterdir())


def test_the_command_line_names_every_part(tmp_path):
    command = [sys.executable, "-m", "h3lib.cli", "bench", "kernels", "--out", "out.json"]
    done = subprocess.run(
        [*command, "--parts", "nothing"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    assert all(part in done.stderr for part in PARTS)
