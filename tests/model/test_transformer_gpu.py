"""The model with back end `triton` on a GPU: as close to FP64 as diffusers, and repeatable."""

import functools

import pytest
import torch
from model_support import error, inputs_in, output_gradients, theirs, weights_in
from support import assert_same_bytes

from h3lib.contract import SIZES
from h3lib.model.packing import job_for_rows, pack
from h3lib.model.transformer import ACTIVATIONS, BLOCK_INPUTS, Inputs, Transformer
from h3lib.parallel.shard import SeqShard

pytestmark = pytest.mark.gpu
SMALL = SIZES["small"]
FP32_SUM = 2.0**-20  # of a few thousand terms


def _on_gpu(dtype):
    packed = pack(job_for_rows(264))
    given = inputs_in(SMALL, packed, dtype)
    rows = (given.video.cuda(), given.audio.cuda(), given.text.cuda())
    weights = weights_in(SMALL, dtype, device="cuda")
    inputs = Inputs(*rows, packed.to("cuda"))
    return SMALL, weights, inputs, tuple(x.cuda() for x in output_gradients(given))


@functools.cache
def _ours(saved=ACTIVATIONS):
    size, weights, inputs, gradients = _on_gpu(torch.bfloat16)
    model = Transformer(size, SeqShard.canonical(264), weights, "triton")
    out = model.forward(inputs, saved)
    found = model.backward(*gradients)
    return {**out, **{f"d.{n}": x for n, x in found.inputs.items()}, **found.parameters}


def test_bf16_is_as_close_to_fp64_as_diffusers_in_bf16():
    """As on the CPU (`test_transformer_oracle.py`), with the library's kernels on their side."""
    exact = theirs(*_on_gpu(torch.float64))
    reference = theirs(*_on_gpu(torch.bfloat16))
    for name, value in exact.items():
        off, their_off = error(_ours()[name], value), error(reference[name], value)
        assert off < 0.08 and off < max(2 * their_off, FP32_SUM), (name, off, their_off)


def test_blocks_computed_again_and_runs_give_the_same_bytes():
    again = _ours(BLOCK_INPUTS)
    for name, value in _ours().items():
        assert_same_bytes(again[name], value, name)
