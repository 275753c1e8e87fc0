"""The rectified-flow sampler: two schedules, Euler steps, and the noise that a request starts from.

    base = linspace(1, 0, N)     sigma = s base / (1 + (s - 1) base)     t = 1 - sigma
    x0   = x + (1 - t) v         x_next = r x + (1 - r) x0,   r = sigma_next / sigma

FP32 throughout, one operation at a time; s = 12 for video and 3 for audio. N grid points make N - 1
steps. 1 - t comes from the timestep and r from the grid: they differ in the last bits. The model is
guidance-distilled: one forward a step. Keyframe rows keep what they were noised to.

Source: diffusers 0.42.1 `schedulers/scheduling_minimax_h3.py`, compared byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from h3lib.contract import ModelSize, OperandError, RowsError
from h3lib.model.packing import CONDITION_T, Job, Packed, pack
from h3lib.model.transformer import Inputs

VIDEO_SHIFT, AUDIO_SHIFT = 12.0, 3.0
Velocity = Callable[[Inputs], dict[str, Tensor]]
"""The model: velocities of all video and audio rows of a request."""


@dataclass(frozen=True)
class Schedule:
    """sigmas FP32 `[n + 1]` from 1 down to 0, timesteps `[n]` of the n steps; on the CPU."""

    sigmas: Tensor

    @classmethod
    def of(cls, num_points: int, shift: float) -> Schedule:
        """**Raises:** RowsError for fewer than two grid points."""
        if not isinstance(num_points, int) or num_points < 2:
            raise RowsError("grid points of the sampler", num_points, "an integer of at least 2")
        base = torch.linspace(1.0, 0.0, num_points, dtype=torch.float32)
        return cls(torch.unique_consecutive(shift * base / (1 + (shift - 1) * base)))

    @property
    def timesteps(self) -> Tensor:
        return 1.0 - self.sigmas[:-1]

    @property
    def num_steps(self) -> int:
        return len(self.sigmas) - 1

    def step(self, x: Tensor, v: Tensor, i: int) -> Tensor:
        """x_next = r x + (1 - r) (x + (1 - t) v) from the velocity v `[n, width]` FP32 at step i.

        **Order:** as written, each product rounded before its sum. **Rounds:** FP32 throughout.
        """
        if x.dtype != torch.float32 or v.dtype != torch.float32:
            raise OperandError("dtype of latents and velocity", (x.dtype, v.dtype), torch.float32)
        sigma_of_t = (1 - self.timesteps[i]).to(x.device)
        ratio = (self.sigmas[i + 1] / self.sigmas[i]).to(x.device)
        x0 = x + sigma_of_t * v
        return ratio * x + (1.0 - ratio) * x0


@dataclass(frozen=True)
class Latents:
    """All video rows (conditions first, then the target) and all audio rows, FP32."""

    video: Tensor
    audio: Tensor

    def to(self, device: torch.device | str) -> Latents:
        return Latents(self.video.to(device), self.audio.to(device))


def patchify(latents: Tensor, size: ModelSize) -> Tensor:
    """Video latents `[channels, frames, height, width]` as rows: frame, patch row, patch column;
    column = channel, then place in the patch."""
    (frames, height, width), channels = size.patch_size, latents.shape[0]
    grid = [n // p for n, p in zip(latents.shape[1:], size.patch_size, strict=True)]
    shape = (channels, grid[0], frames, grid[1], height, grid[2], width)
    return latents.reshape(shape).permute(1, 3, 5, 0, 2, 4, 6).reshape(-1, size.video_dim)


def unpatchify(rows: Tensor, job: Job, size: ModelSize) -> Tensor:
    """The inverse for the target's rows of a job."""
    (frames, height, width), shape = size.patch_size, job.latent_shape
    grid = [n // p for n, p in zip(shape, size.patch_size, strict=True)]
    split = rows.reshape(*grid, size.in_channels, frames, height, width)
    return split.permute(3, 0, 4, 1, 5, 2, 6).reshape(size.in_channels, *shape)


def first_latents(
    job: Job, size: ModelSize, seed: int, conditions: tuple[Tensor, ...] = ()
) -> Latents:
    """What a request starts from: noised keyframes, then noise.

    `conditions`: clean latents `[channels, 1, height, width]` of each keyframe of the job. One CPU
    generator draws, in this order: noise of each condition, of the video as latents, of the audio
    as rows.

    **Raises:** RowsError for another number of conditions than keyframes, OperandError for a seed
    that is no integer of 0 to 2^63 - 1.
    """
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise OperandError("seed of a generation", seed, "an integer of 0 to 2^63 - 1")
    if len(conditions) != len(job.keyframes):
        raise RowsError("number of conditions", len(conditions), len(job.keyframes))
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    t = torch.tensor(CONDITION_T, dtype=torch.float32)
    noised = [t * clean.cpu() + (1.0 - t) * normal(*clean.shape) for clean in conditions]
    video = normal(size.in_channels, *job.latent_shape)
    rows = [patchify(latents, size) for latents in (*noised, video)]
    return Latents(torch.cat(rows), normal(job.num_audio_rows, size.audio_in_channels))


@dataclass(frozen=True)
class Sampler:
    """Both schedules of one request."""

    job: Job
    video: Schedule
    audio: Schedule

    @classmethod
    def of(cls, job: Job, num_points: int) -> Sampler:
        """**Raises:** RowsError for a grid whose two schedules differ in length."""
        video, audio = Schedule.of(num_points, VIDEO_SHIFT), Schedule.of(num_points, AUDIO_SHIFT)
        if video.num_steps != audio.num_steps:
            received = (video.num_steps, audio.num_steps)
            raise RowsError("steps of video and audio", received, "the same number")
        return cls(job, video, audio)

    @property
    def sigmas(self) -> tuple[Tensor, Tensor]:
        """Both grids, video first."""
        return self.video.sigmas, self.audio.sigmas

    def packed(self, i: int, stored: Packed) -> Packed:
        """`stored` with the timesteps of step i; both start at t = 0, where they are one."""
        at = pack(self.job, float(self.video.timesteps[i]), float(self.audio.timesteps[i]))
        if not torch.equal(stored.logical_keys.cpu(), at.logical_keys):
            raise RowsError("rows of a generation", "stored in another order", "as they are packed")
        device = stored.token_tags.device
        times = (at.timestep.to(device), at.timestep_indices.to(device))
        return replace(stored, timestep=times[0], timestep_indices=times[1])

    def step(self, latents: Latents, velocity: dict[str, Tensor], i: int) -> Latents:
        """The next latents; the rows of keyframe conditions stay as they are."""
        first = self.job.num_condition_rows
        target = self.video.step(latents.video[first:], velocity["video"][first:], i)
        video = torch.cat((latents.video[:first], target))
        return Latents(video, self.audio.step(latents.audio, velocity["audio"], i))

    def rollout(
        self, model: Velocity, latents: Latents, text: Tensor, packed: Packed
    ) -> Iterator[tuple[dict[str, Tensor], Latents]]:
        """Velocity and next latents of every step; `text` `[L, text_dim]`."""
        for i in range(self.video.num_steps):
            inputs = Inputs(latents.video, latents.audio, text, self.packed(i, packed))
            velocity = model(inputs)
            latents = self.step(latents, velocity, i)
            yield velocity, latents
