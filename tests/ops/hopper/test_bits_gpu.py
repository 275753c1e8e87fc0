"""The kernels' bits on a GPU: every finding of `h3lib bench bits`."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is pinned in the GPU requirements")

from h3lib.bench import bits


@pytest.mark.gpu
@pytest.mark.parametrize(
    "part, name", [(part, name) for part, checks in bits.PARTS.items() for name in checks]
)
def test_bits(part, name):
    torch.manual_seed(0)
    findings = list(bits.PARTS[part][name]())
    assert findings
    failed = [finding for finding in findings if not finding.passed]
    assert not failed, f"{len(failed)} of {len(findings)} failed, the first: {failed[0]}"
