"""Shared by the tests of the whole model: diffusers' own model, its weights and its inputs."""

from __future__ import annotations

import torch

from h3lib.bench.transformer import diffusers_model
from h3lib.contract import PUBLISHED, ModelSize
from h3lib.layout import Layout
from h3lib.model.packing import Packed
from h3lib.model.transformer import Inputs, Transformer, stage_parameters
from h3lib.model.weights import SyntheticWeights, parameters, synthetic_rows
from h3lib.ops.backend import accumulator
from h3lib.parallel.shard import SeqShard


def weights_in(
    size: ModelSize, dtype: torch.dtype, seed: int = 3, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Synthetic weights; the FP32 ones in the accumulator of `dtype`, the others in `dtype`."""
    source, high = SyntheticWeights(size, seed, device), accumulator(torch.empty(0, dtype=dtype))
    return {
        name: source.read(name).to(high if stored == torch.float32 else dtype)
        for name, (_, stored) in parameters(size).items()
    }


def inputs_in(size: ModelSize, packed: Packed, dtype: torch.dtype, seed: int = 5) -> Inputs:
    """Random rows; text as BF16 holds them, in `dtype`."""
    high = accumulator(torch.empty(0, dtype=dtype))

    def rows(label, indices, width, stored):
        return synthetic_rows(label, seed, torch.arange(len(indices)), width, stored)

    return Inputs(
        rows("video", packed.video_indices, size.video_dim, torch.float32).to(high),
        rows("audio", packed.audio_indices, size.audio_in_channels, torch.float32).to(high),
        rows("text", packed.text_indices, size.text_dim, torch.bfloat16).to(dtype),
        packed,
    )


def output_gradients(inputs: Inputs, seed: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Random gradients of both velocities: all ones would hide orders."""

    def like(name, x):
        rows = torch.arange(len(x))
        return synthetic_rows(f"d{name}", seed, rows, x.shape[1], torch.float32).to(x.dtype)

    return like("video", inputs.video), like("audio", inputs.audio)


def ours(size, weights, inputs, gradients, contract=PUBLISHED, **options) -> dict:
    """Outputs and every gradient of a world of one, by name."""
    shard = SeqShard.canonical(inputs.packed.num_rows, contract)
    assert stage_parameters(size, Layout(), 0).keys() == weights.keys()
    model = Transformer(size, shard, weights)
    out = model.forward(inputs, **options)
    found = model.backward(*gradients)
    given = {f"d.{name}": value for name, value in found.inputs.items()}
    return {**out, **given, **found.parameters}


def theirs(size, weights, inputs, gradients) -> dict:
    """The same from diffusers and autograd."""
    model, packed = diffusers_model(size, weights).requires_grad_(), inputs.packed
    names = ("video", "audio", "text")
    rows = [getattr(inputs, name)[None].clone().requires_grad_() for name in names]
    out = model(
        *rows, packed.timestep, packed.timestep_indices, packed.token_tags, packed.position_ids,
        packed.video_indices, packed.audio_indices, packed.text_indices, return_dict=False,
    )  # fmt: skip
    torch.autograd.backward(out, [gradient[None] for gradient in gradients])
    found = {"video": out[0].detach()[0], "audio": out[1].detach()[0]}
    found |= {f"d.{n}": x.grad[0] for n, x in zip(names, rows, strict=True)}
    return found | {name: parameter.grad for name, parameter in model.named_parameters()}


def error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact.double()).norm() / exact.double().norm())
