"""The whole model against an independent oracle: diffusers' own MiniMax-H3 transformer."""

import functools

import pytest
import torch
from block_support import KEYFRAMES, TINY, packed_rows
from model_support import error, inputs_in, ours, output_gradients, theirs, weights_in

from h3lib.contract import SIZES
from h3lib.model.packing import Job, pack

JOBS = {  # one row of text would have no gradient of q and k in the refiner
    "264 rows": packed_rows(264),
    "keyframes": pack(KEYFRAMES),
    "small": pack(Job.parse("64x64x5", text_rows=12)),
}


@functools.cache
def _case(job: str, dtype: torch.dtype):
    size = SIZES["small"] if job == "small" else TINY
    inputs = inputs_in(size, JOBS[job], dtype)
    return size, weights_in(size, dtype), inputs, output_gradients(inputs)


@functools.cache
def _exact(job: str) -> dict:
    return ours(*_case(job, torch.float64))


FP32_SUM = 2.0**-22  # of up to 256 terms; the heads' bias gradients meet no BF16 at all
CASES = ("264 rows", "keyframes", pytest.param("small", marks=pytest.mark.slow))


@pytest.mark.parametrize("job", CASES)
def test_fp64_outputs_and_every_gradient_equal_diffusers(job):
    """Sums of n <= 8,192 FP64 terms in another order differ by about sqrt(n) eps = 2e-14 of their
    size, those of `tiny` (n <= 512) by 5e-15; a gradient at the first layer has passed about thirty
    such sums, which add up as a walk, a factor of 5. A wrong formula shows at 1e-2 and more."""
    reference = theirs(*_case(job, torch.float64))
    assert _exact(job).keys() == reference.keys()
    errors = {name: error(_exact(job)[name], value) for name, value in reference.items()}
    assert max(errors.values()) < (1e-13 if job == "small" else 3e-14), errors


@pytest.mark.parametrize("job", CASES)
def test_bf16_is_as_close_to_fp64_as_diffusers_in_bf16(job):
    """Both round at the same points, so both errors are draws of one distribution: a block's thirty
    roundings give 0.6 % (see the block's oracle), four to six blocks in a row, forward and
    backward, three times that. A tensor of 32 elements estimates its error to within 13 %; three
    deviations of a ratio of two are about 2."""
    found, reference = ours(*_case(job, torch.bfloat16)), theirs(*_case(job, torch.bfloat16))
    for name, exact in _exact(job).items():
        ours_off, theirs_off = error(found[name], exact), error(reference[name], exact)
        most = max(2 * theirs_off, 4 * FP32_SUM)
        assert ours_off < 0.08 and ours_off < most, (name, ours_off, theirs_off)
