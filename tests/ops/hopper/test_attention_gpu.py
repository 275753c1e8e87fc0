"""The attention kernels' bits on a GPU: every finding of `h3lib.bench.attention_bits`."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is pinned in the GPU requirements")

from h3lib.bench import attention_bits


@pytest.mark.gpu
@pytest.mark.parametrize("name", attention_bits.checks())
def test_bits(name):
    torch.manual_seed(0)
    findings = list(attention_bits.checks()[name]())
    assert findings
    failed = [finding for finding in findings if not finding.passed]
    assert not failed, f"{len(failed)} of {len(findings)} failed, the first: {failed[0]}"
