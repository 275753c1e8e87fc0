"""The block against an independent oracle: diffusers' own MiniMax-H3 block, and golden numbers."""

import pytest
import torch
from block_support import GOLDEN, KEYFRAMES, TINY, packed_rows
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3TransformerBlock

from h3lib.contract import Contract
from h3lib.model.block import BLOCK_PREFIX, Block, block_parameters
from h3lib.model.context import Rows
from h3lib.model.inputs import block_inputs
from h3lib.model.packing import Job, pack
from h3lib.model.weights import SyntheticWeights, parameter_values, parameters, uniform
from h3lib.ops.adaln import table_rows
from h3lib.ops.rope import rope_table
from h3lib.parallel.shard import SeqShard


def _weights(dtype, size=TINY, seed=3):
    source = SyntheticWeights(size, seed)
    return {name: source.read(BLOCK_PREFIX + name).to(dtype) for name in block_parameters(size)}


def _ours(size, weights, x, dout, temb, packed, contract=Contract()):  # noqa: B008
    cos, sin = rope_table(packed.position_ids, size, x.dtype)
    rows = Rows(table_rows(packed.timestep_indices, packed.token_tags, len(temb)), cos, sin)
    block = Block(size, SeqShard.canonical(len(x), contract), weights)
    out = block.forward(x, temb, rows)
    found = block.backward(dout)
    return {"out": out, "dx": found.dx, "dtemb": found.dtemb, **found.parameters}


def _theirs(size, weights, x, dout, temb, packed):
    block = MiniMaxH3TransformerBlock(
        size.hidden_size, size.num_attention_heads, size.attention_head_dim, size.ffn_dim,
        size.time_embed_dim, size.norm_eps, size.norm_eps,
    ).to(x.dtype)  # fmt: skip
    block.load_state_dict(weights)
    cos, sin = (torch.cat((t, t), dim=-1) for t in rope_table(packed.position_ids, size, x.dtype))
    x, temb = x[None].clone().requires_grad_(), temb.clone().requires_grad_()
    out = block(
        x, temb, table_rows(packed.timestep_indices, packed.token_tags, len(temb)), (cos, sin)
    )
    out.backward(dout[None])
    gradients = {name: parameter.grad for name, parameter in block.named_parameters()}
    return {"out": out.detach()[0], "dx": x.grad[0], "dtemb": temb.grad, **gradients}


def _case(dtype, packed):
    source = SyntheticWeights(TINY, 3)
    shard = SeqShard.canonical(packed.num_rows)
    given = block_inputs(TINY, source, packed, shard, seed=5, dtype=torch.bfloat16)
    temb = given.temb.to(torch.promote_types(dtype, torch.float32))
    return given.x.to(dtype), given.dout.to(dtype), temb


def _error(value, exact):
    return float((value.double() - exact.double()).norm() / exact.double().norm())


JOBS = {"264 rows": packed_rows(264), "keyframes": pack(KEYFRAMES)}


@pytest.mark.parametrize("job", JOBS)
def test_fp64_output_and_every_gradient_equal_diffusers(job):
    """Sums of at most n = 512 terms of FP64 differ by about sqrt(n) eps = 5e-15 of their size in
    another order; ten such sums follow each other. A wrong formula shows at 1e-2 and more."""
    args = (TINY, _weights(torch.float64), *_case(torch.float64, JOBS[job]), JOBS[job])
    ours, theirs = _ours(*args), _theirs(*args)
    assert ours.keys() == theirs.keys()
    errors = {name: _error(ours[name], theirs[name]) for name in theirs}
    assert max(errors.values()) < 5e-14, errors


@pytest.mark.parametrize("job", JOBS)
def test_bf16_is_as_close_to_fp64_as_diffusers_in_bf16(job):
    """Both round at the same points, so both errors are draws of one distribution: about 30
    roundings in a row of relative size 2^-9 / sqrt(3) each give 0.6 %. A tensor of 32 elements
    estimates its error to within 1 / sqrt(2 * 32) = 13 %; three deviations of a ratio of two such
    are 1.13^3 squared, about 2. Ours must not be worse than that, nor leave 3 %."""
    packed = JOBS[job]
    exact = _ours(TINY, _weights(torch.float64), *_case(torch.float64, packed), packed)
    args = (TINY, _weights(torch.bfloat16), *_case(torch.bfloat16, packed), packed)
    ours, theirs = _ours(*args), _theirs(*args)
    for name, value in exact.items():
        error, reference = _error(ours[name], value), _error(theirs[name], value)
        assert error < 0.03 and error < 2 * reference, (name, error, reference)


def test_golden_numbers_of_block_0():
    """FP32 everywhere, U = 2 units (two heads); printed to six decimals, tolerance 1e-3."""
    names = sorted(parameters(GOLDEN))
    weights = {
        name: parameter_values(
            BLOCK_PREFIX + name,
            parameters(GOLDEN)[BLOCK_PREFIX + name]._replace(dtype=torch.float32),
            names.index(BLOCK_PREFIX + name),
        )
        for name in block_parameters(GOLDEN)
    }
    job = Job(128, 64, 5, text_rows=3, vision_rows=(range(1, 2),), audio_latents=3)
    packed = pack(job, 0.25, 0.75)
    x, temb = (
        (1.7 * uniform(key, torch.arange(rows * width))).float().view(rows, width)
        for key, rows, width in ((1003, 25, 24), (1004, 2, 16))
    )
    out = _ours(GOLDEN, weights, x, x, temb, packed, Contract(num_units=2))["out"]
    expected = {
        (0, 0): (-42.301048, 4.412048, 15.534523, 21.777485),
        (1, 0): (9.487822, 22.873058, -62.930347, 1.858204),
        (24, 20): (-51.777599, -5.011184, -10.890539, 13.604176),
    }
    for (row, column), values in expected.items():
        got = out[row, column : column + 4]
        assert torch.allclose(got, torch.tensor(values), rtol=0, atol=1e-3)
    assert abs(float(out.double().sum()) + 1124.98739) < 1e-2  # 600 terms
    assert abs(float(out.double().abs().sum()) - 10655.73669) < 1e-2
