"""Timestep embedding: golden numbers, diffusers' sinusoids bit for bit, chains and gradients."""

import math
from itertools import count

import pytest
import torch
from diffusers.models.embeddings import Timesteps
from hypothesis import given
from hypothesis import strategies as st
from support import assert_row_invariant, assert_same_bytes, chain_of, f32, normal

from h3lib.contract import ModelSize, OperandError
from h3lib.model.weights import parameter_values, parameters
from h3lib.ops.gemm import linear_dx, linear_forward
from h3lib.ops.swiglu import silu, silu_derivative
from h3lib.ops.timestep import (
    timestep_embedding_backward,
    timestep_embedding_forward,
    timestep_features,
)

F32, F64 = torch.float32, torch.float64
GOLDEN = ModelSize("golden", 24, 2, 16, 32, 16, 24, 8, 2, 8, 2, in_channels=4, audio_in_channels=6)
NAMES = [f"linear_{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")]


def golden_parameters() -> list[torch.Tensor]:
    """Keyed by the name's number among all names sorted as strings."""
    table = parameters(GOLDEN)
    keys = dict(zip(sorted(table), count(), strict=False))
    assert len(keys) == 62 and keys["time_embedder.linear_2.weight"] == 16
    names = [f"time_embedder.{name}" for name in NAMES]
    return [parameter_values(name, table[name], keys[name]) for name in names]


def test_golden_embedding():
    """The numbers are given to 6 decimals; FP32 chains of 24 terms below 8 err below 3e-5."""
    features = timestep_features(torch.tensor([0.25, 0.75]), GOLDEN.freq_dim)
    temb, _ = timestep_embedding_forward(features, *golden_parameters())
    assert temb.shape == (2, 16) and temb.dtype == F32
    expected = (
        [-1.000731, -0.117690, 2.389904, -4.593349],
        [-0.730883, 0.358033, 2.516946, -5.163151],
    )
    for found, want in zip(temb[:, :4].tolist(), expected, strict=True):
        assert found == pytest.approx(want, abs=3e-5)


@pytest.mark.parametrize("freq_dim", [8, 32, 256])
def test_features_are_those_of_diffusers_bit_for_bit(freq_dim):
    timestep = torch.cat((torch.tensor([0.0, 0.25, 0.999, 1.0]), normal(0, 9, dtype=F32).abs()))
    expected = Timesteps(freq_dim, flip_sin_to_cos=True, downscale_freq_shift=0)(timestep)
    assert_same_bytes(timestep_features(timestep, freq_dim), expected)


def test_features_are_cosines_then_sines_of_the_unscaled_timestep():
    features = timestep_features(torch.tensor([0.0, 0.5]), 4)
    assert features[0].tolist() == [1.0, 1.0, 0.0, 0.0]
    angles = [0.5, 0.5 * 10000**-0.5]
    expected = [*map(math.cos, angles), *map(math.sin, angles)]
    assert features[1].tolist() == pytest.approx(expected, abs=1e-7)


@given(st.integers(0, 10**6), st.integers(1, 20))
def test_timesteps_are_independent(seed, num_timesteps):
    timestep = normal(seed, num_timesteps, dtype=F32).abs()
    weights = golden_parameters()

    def embed(timestep):
        features = timestep_features(timestep, GOLDEN.freq_dim)
        return features, *timestep_embedding_forward(features, *weights)

    assert_row_invariant(embed, [timestep], seed)


def test_embedding_is_two_chains_around_silu_in_fp32():
    features = timestep_features(torch.tensor([0.3, 0.9]), 8)
    w1, b1, w2, b2 = golden_parameters()
    temb, inner = timestep_embedding_forward(features, w1, b1, w2, b2)
    terms = f32(features).T[:, :, None] * f32(w1).T[:, None, :]
    assert_same_bytes(inner, torch.from_numpy(chain_of(terms) + f32(b1)))
    assert_same_bytes(temb, linear_forward(silu(inner), w2, b2))


def test_backward_is_chains_over_timesteps_and_over_outputs():
    features = timestep_features(torch.tensor([0.1, 0.5, 1.0]), 8)
    w1, b1, w2, b2 = golden_parameters()
    _, inner = timestep_embedding_forward(features, w1, b1, w2, b2)
    dtemb = normal(3, 3, 16, dtype=F32)
    found = timestep_embedding_backward(dtemb, features, inner, w2)
    dinner = linear_dx(dtemb, w2) * silu_derivative(inner)
    for name, dy, x in (("linear_1", dinner, features), ("linear_2", dtemb, silu(inner))):
        dw = chain_of(f32(dy)[:, :, None] * f32(x)[:, None, :])
        assert_same_bytes(found[f"{name}.weight"], torch.from_numpy(dw))
        assert_same_bytes(found[f"{name}.bias"], torch.from_numpy(chain_of(f32(dy))))


def test_fp64_embedding_and_its_gradients_equal_autograd():
    """Chains of at most 24 products below 50 in FP64: error below 24 * 1200 * 2^-53 < 4e-12."""
    features = timestep_features(torch.tensor([0.25, 0.75]), 8).double()
    weights = [w.double().requires_grad_() for w in golden_parameters()]
    w1, b1, w2, b2 = weights
    expected = torch.nn.functional.silu(features @ w1.T + b1) @ w2.T + b2
    dtemb = normal(0, 2, 16, dtype=F64)
    gradients = torch.autograd.grad(expected, weights, dtemb)
    temb, inner = timestep_embedding_forward(features, *(w.detach() for w in weights))
    assert temb.dtype == F64
    assert (temb - expected.detach()).abs().max() < 4e-12
    found = timestep_embedding_backward(dtemb, features, inner, w2.detach())
    assert list(found) == NAMES
    for name, want in zip(NAMES, gradients, strict=True):
        assert (found[name] - want).abs().max() < 4e-12, name


def test_timesteps_of_another_shape_are_refused():
    with pytest.raises(OperandError, match=r"shape of timestep: received \(2, 1\); .*\(any\)"):
        timestep_features(torch.zeros(2, 1), 8)
