"""Shared by the block's tests: packed jobs, canonical values made once, and the red entries."""

from __future__ import annotations

import functools

import torch

from h3lib.contract import PUBLISHED, SIZES, Contract, ModelSize
from h3lib.model.packing import Job, Packed, job_for_rows, pack
from h3lib.simulate import canonical_block, play_layout

TINY = SIZES["tiny"]
GOLDEN = ModelSize(
    "golden", hidden_size=24, num_attention_heads=2, attention_head_dim=16, ffn_dim=32,
    time_embed_dim=16, time_embed_hidden_dim=24, freq_dim=8, rope_freq_dim=2, text_dim=8,
    num_layers=2, in_channels=4, audio_in_channels=6,
)  # fmt: skip
SMALL_BLOCKS = Contract(row_block=4, key_block=16)
NAMED_LAYOUTS = ("tp2", "tp4", "tp8", "tp4-cp2", "tp4-cp2-sp", "tp8-local4")
KEYFRAMES = Job.parse(
    "64x64x5", text_rows=9, keyframes=("first", "last"), vision_rows=(range(2, 4),)
)


@functools.cache
def packed_rows(num_rows: int) -> Packed:
    return pack(job_for_rows(num_rows))


@functools.cache
def canonical(num_rows: int, contract: Contract = PUBLISHED) -> dict:
    return canonical_block(TINY, packed_rows(num_rows), contract)


def play(layout, num_rows: int, contract: Contract = PUBLISHED, **changes) -> list[dict]:
    """The report's tensors of a layout, every rank a thread of this process."""
    return play_layout(
        layout, TINY, packed_rows(num_rows), canonical(num_rows, contract), contract, **changes
    )


def red(tensors: list[dict]) -> set[tuple[str, str]]:
    """(kind, name) of what differs or is not covered."""
    return {(t["kind"], t["name"]) for t in tensors if t["different"] or not t["covered"]}


def permuted(packed: Packed, order: torch.Tensor) -> Packed:
    """The same job with its rows stored in another order, all metadata with them."""
    inverse = order.argsort()
    return Packed(
        job=packed.job,
        position_ids=packed.position_ids[order],
        token_tags=packed.token_tags[order],
        timestep=packed.timestep,
        timestep_indices=packed.timestep_indices[order],
        logical_keys=packed.logical_keys[order],
        video_indices=inverse[packed.video_indices],
        audio_indices=inverse[packed.audio_indices],
        text_indices=inverse[packed.text_indices],
    )


def padded(packed: Packed, at: int, count: int) -> Packed:
    """The same job with `count` padding rows stored before row `at`."""

    def insert(values: torch.Tensor, fill: float) -> torch.Tensor:
        pad = torch.full((count, *values.shape[1:]), fill, dtype=values.dtype)
        return torch.cat((values[:at], pad, values[at:]))

    def move(indices: torch.Tensor) -> torch.Tensor:
        return indices + count * (indices >= at)

    return Packed(
        job=packed.job,
        position_ids=insert(packed.position_ids, 0),
        token_tags=insert(packed.token_tags, -1),
        timestep=packed.timestep,
        timestep_indices=insert(packed.timestep_indices, 0),
        logical_keys=insert(packed.logical_keys, -1),
        video_indices=move(packed.video_indices),
        audio_indices=move(packed.audio_indices),
        text_indices=move(packed.text_indices),
    )
