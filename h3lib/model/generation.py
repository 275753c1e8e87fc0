"""The generation gate: every step of a rollout, and its replay as training would compute it.

    rollout   N - 1 steps of the sampler; nothing is saved for a backward
    replay    each step again from the rollout's latents before it, by a model that saves what its
              backward needs

A layout is right if each velocity and each latent has the bytes of one process alone, in both. The
canonical values of the replay *are* those of the rollout, so that a replay that differs from the
trajectory it belongs to differs from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from tqdm import tqdm

from h3lib.contract import ModelSize, RowsError
from h3lib.layout import Layout
from h3lib.model.inputs import model_inputs, rank_weights
from h3lib.model.packing import Packed
from h3lib.model.program import BlockProgram, ModelProgram, Program, Step, no_step
from h3lib.model.sampler import Latents, Sampler, first_latents
from h3lib.model.trace import OUTPUT, Key, Record
from h3lib.model.transformer import BLOCK_INPUTS, NOTHING, Inputs, Transformer
from h3lib.model.weights import WeightSource, synthetic_rows
from h3lib.parallel.shard import SeqShard

ROLLOUT, REPLAY = "rollout", "replay"
STREAMS = ("video", "audio")


@dataclass(frozen=True)
class GenerationProgram(ModelProgram):
    """A generation of `points` grid points from random text and noise.

    `replays` False: the replay's values are the rollout's by definition (the canonical run).
    """

    points: int = 5
    replays: bool = True

    def records(self, shard: SeqShard, backward: bool = True, step: Step = no_step) -> list[Record]:
        """Every velocity and latent; without `backward` those of the rollout alone."""
        weights = rank_weights(self.size, self.source, shard)
        model = Transformer(self.size, shard, weights, self.backend)
        sampler, text, latents = self.sampler, self._text(), self._first_latents()
        step("forward")
        found, trajectory = [], []
        rollout = sampler.rollout(
            lambda inputs: model.forward(inputs, NOTHING), latents, text, self.packed
        )
        steps = sampler.video.num_steps
        for velocity, following in tqdm(rollout, ROLLOUT, steps, unit="step", disable=None):
            trajectory.append((latents, velocity, following))
            found += _step_records(ROLLOUT, len(trajectory) - 1, velocity, following)
            latents = following
        if backward and self.replays:
            step(REPLAY)
            for i, (before, _, _) in enumerate(trajectory):
                packed = sampler.packed(i, self.packed)
                inputs = Inputs(before.video, before.audio, text, packed)
                velocity = model.forward(inputs, BLOCK_INPUTS)
                following = sampler.step(before, velocity, i)
                found += _step_records(REPLAY, i, velocity, following)
        elif backward:
            found += [_as_replay(record) for record in found]
        return found

    def untraced(self, shard: SeqShard) -> list[Record]:
        """Nothing: a generation keeps no trace."""
        return []

    @property
    def sampler(self) -> Sampler:
        return Sampler.of(self.packed.job, self.points)

    def values(self) -> dict[Key, tuple[int, ...]]:
        job = self.packed.job
        rows = {"video": job.num_condition_rows + job.num_video_rows, "audio": job.num_audio_rows}
        widths = {"video": self.size.video_dim, "audio": self.size.audio_in_channels}
        return {
            (OUTPUT, value_name(run, i, stream, what)): (rows[stream], widths[stream])
            for run in (ROLLOUT, REPLAY)
            for i in range(self.sampler.video.num_steps)
            for stream in STREAMS
            for what in ("velocity", "latents")
        }

    def control_keys(self) -> Mapping[str, Key]:
        """The last video latents. No sum of a forward crosses cp: it is not looked at."""
        last = self.sampler.video.num_steps - 1
        return {"tp": (OUTPUT, value_name(ROLLOUT, last, "video", "latents"))}

    def given(self) -> tuple[Iterator[tuple[str, Tensor]], Iterator[Tensor]]:
        weights, packed, latents = super().given()[0], self.packed, self._first_latents()
        others = (packed.position_ids, packed.token_tags, *self.sampler.sigmas)
        return weights, iter((latents.video, latents.audio, self._text(), *others))

    def check_layout(self, layout: Layout) -> None:
        super().check_layout(layout)
        if not self.packed.job.num_video_rows:
            raise RowsError("video rows of a generation", 0, "at least 1: 19 packed rows or more")
        _ = self.sampler

    def _text(self) -> Tensor:
        return model_inputs(self.size, self.packed, self.seed).text

    def _first_latents(self) -> Latents:
        """Noise, and random keyframes where the job has some."""
        job, size = self.packed.job, self.size
        _, height, width = job.latent_shape
        channels, pixels = torch.arange(size.in_channels), height * width
        conditions = []
        for name in job.keyframes:
            rows = synthetic_rows(name, self.seed, channels, pixels, torch.float32)
            conditions.append(rows.view(-1, 1, height, width))
        device = self.packed.token_tags.device
        return first_latents(job, size, self.seed, tuple(conditions)).to(device)


def make_program(
    size: ModelSize, num_blocks: int, source: WeightSource, packed: Packed, seed: int = 0,
    backend: str = "eager", recompute: bool = False, points: int | None = None,
    canonical: bool = False,
) -> Program:  # fmt: skip
    """What a run computes: a generation if there are grid points; else block 0 alone for one block,
    or the model with its first `num_blocks` blocks. `canonical`: what one process alone runs."""
    given = (source, packed, seed, backend)
    shorter = replace(size, num_layers=num_blocks)
    if points is not None:
        return GenerationProgram(shorter, *given, points=points, replays=not canonical)
    if num_blocks == 1:
        return BlockProgram(size, *given)
    return ModelProgram(shorter, *given, recompute and not canonical)


def value_name(run: str, step: int, stream: str, what: str) -> str:
    """Name of a velocity or latent of a step: `rollout.3.video.latents`."""
    return f"{run}.{step}.{stream}.{what}"


def first_different_step(tensors: list[dict]) -> int | None:
    """The first step at which a compared value of a generation differs, None if none does."""
    steps = [int(t["name"].split(".")[1]) for t in tensors if t["different"]]
    return min(steps, default=None)


def _as_replay(record: Record) -> Record:
    """A value of the rollout as the replay must have it."""
    name = record.name.replace(ROLLOUT, REPLAY, 1)
    return replace(record, name=name, tensor=record.tensor.clone())


def _step_records(run: str, i: int, velocity: dict, latents: Latents) -> list[Record]:
    found = []
    for stream in STREAMS:
        for what, tensor in (("velocity", velocity[stream]), ("latents", getattr(latents, stream))):
            region = tuple((range(n),) for n in tensor.shape)
            found.append(Record(value_name(run, i, stream, what), OUTPUT, tensor, region))
    return found
