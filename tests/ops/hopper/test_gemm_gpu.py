"""The products' bits on a GPU: every finding of `h3lib.bench.gemm_bits`."""

import pytest
import torch

from h3lib.bench import gemm_bits, gemm_probes

CHECKS = (*gemm_bits.CHECKS, *gemm_probes.PROBES[:-1])


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_bits(check):
    torch.manual_seed(0)
    findings = list(check())
    assert findings
    failed = [finding for finding in findings if not finding.passed]
    assert not failed, f"{len(failed)} of {len(findings)} failed, the first: {failed[0]}"


@pytest.mark.gpu
def test_accuracy_against_fp64():
    """Within the bound of the order; and no worse than twice cuBLAS's error."""
    torch.manual_seed(0)
    for row in gemm_probes.measure_accuracy():
        assert row["error_over_bound"] < 1, row
        assert row["relative_error"] < 2 * row["cublas_relative_error"], row
