"""The sampler against diffusers' scheduler, byte for byte, and its inputs against its pipeline."""

import pytest
import torch
from block_support import KEYFRAMES, TINY
from diffusers.schedulers.scheduling_minimax_h3 import MiniMaxH3Scheduler
from released_support import released_steps
from support import assert_same_bytes, normal

from h3lib.contract import OperandError, RowsError
from h3lib.model.packing import Job, pack
from h3lib.model.sampler import (
    AUDIO_SHIFT,
    VIDEO_SHIFT,
    Latents,
    Sampler,
    Schedule,
    first_latents,
    patchify,
    unpatchify,
)

patchify_video_latents = released_steps.patchify_video_latents
JOB = Job.parse("64x96x5", text_rows=4)


@pytest.mark.parametrize("shift", (VIDEO_SHIFT, AUDIO_SHIFT))
@pytest.mark.parametrize("num_points", (2, 5, 9, 50))
def test_schedule_and_steps(num_points, shift):
    theirs = MiniMaxH3Scheduler(shift=shift)
    theirs.set_timesteps(num_points)
    ours = Schedule.of(num_points, shift)
    assert_same_bytes(ours.sigmas, theirs.sigmas)
    assert_same_bytes(ours.timesteps, theirs.timesteps)
    x = normal(1, 33, 96, dtype=torch.float32)
    for i, t in enumerate(theirs.timesteps):
        v = normal(2 + i, 33, 96, dtype=torch.float32)
        expected = theirs.step(v, t, x, return_dict=False)[0]
        assert_same_bytes(ours.step(x, v, i), expected, f"step {i}")
        x = expected


def test_one_minus_t_is_not_the_sigma_of_the_grid():
    schedule = Schedule.of(50, VIDEO_SHIFT)
    assert not torch.equal(1 - schedule.timesteps, schedule.sigmas[:-1])


def test_rows_of_latents():
    latents = normal(5, TINY.in_channels, *JOB.latent_shape, dtype=torch.float32)
    rows = patchify(latents, TINY)
    assert_same_bytes(rows, patchify_video_latents(latents[None], TINY.patch_size))
    assert_same_bytes(unpatchify(rows, JOB, TINY), latents)


def test_order_of_the_noise():
    clean = tuple(
        normal(k, TINY.in_channels, 1, *KEYFRAMES.latent_shape[1:], dtype=torch.float32)
        for k in (1, 2)
    )
    found = first_latents(KEYFRAMES, TINY, 7, clean)
    generator = torch.Generator().manual_seed(7)
    scheduler, rows = MiniMaxH3Scheduler(), []
    for latents in clean:
        noise = torch.randn(latents.shape, generator=generator)
        noised = scheduler.scale_noise(latents, 0.999, noise)
        rows.append(patchify_video_latents(noised[None], TINY.patch_size))
    video = torch.randn((1, TINY.in_channels, *KEYFRAMES.latent_shape), generator=generator)
    rows.append(patchify_video_latents(video, TINY.patch_size))
    assert_same_bytes(found.video, torch.cat(rows))
    audio = torch.randn((KEYFRAMES.num_audio_rows, TINY.audio_in_channels), generator=generator)
    assert_same_bytes(found.audio, audio)
    with pytest.raises(RowsError, match="number of conditions: received 0; accepted: 2"):
        first_latents(KEYFRAMES, TINY, 7)


def test_conditions_keep_their_bytes_and_one_timestep_starts():
    sampler, packed = Sampler.of(KEYFRAMES, 4), pack(KEYFRAMES)
    clean = (torch.zeros(TINY.in_channels, 1, *KEYFRAMES.latent_shape[1:]),) * 2
    start, seen = first_latents(KEYFRAMES, TINY, 0, clean), []

    def model(inputs):
        seen.append(inputs.packed.timestep.tolist())
        return {"video": torch.ones_like(inputs.video), "audio": torch.ones_like(inputs.audio)}

    *_, (_, last) = sampler.rollout(model, start, torch.zeros(9, 80), packed)
    first = KEYFRAMES.num_condition_rows
    assert_same_bytes(last.video[:first], start.video[:first])
    assert not torch.equal(last.video[first:], start.video[first:])
    assert [len(timesteps) for timesteps in seen] == [2, 3, 3], "t = 0 for video and audio alike"


def test_a_constant_velocity_arrives():
    """x0 = x + (1 - t) v is kept by every step if v points at it: the last step is x0 itself."""
    sampler, target = Sampler.of(JOB, 9), normal(3, 12, 96, dtype=torch.float32)
    start = first_latents(JOB, TINY, 1)

    def model(inputs):
        t = inputs.packed.timestep[inputs.packed.timestep_indices]
        video_t = t[inputs.packed.video_indices][:, None]
        return {"video": (target - inputs.video) / (1 - video_t), "audio": inputs.audio}

    *_, (_, last) = sampler.rollout(model, start, torch.zeros(4, 80), pack(JOB))
    assert torch.allclose(last.video, target, atol=1e-5)


def test_refusals():
    with pytest.raises(RowsError, match="grid points of the sampler: received 1"):
        Schedule.of(1, 3.0)
    half = torch.zeros(2, 3, dtype=torch.bfloat16)
    with pytest.raises(OperandError, match="dtype of latents and velocity"):
        Schedule.of(3, 3.0).step(half, half, 0)
    packed, sampler = pack(JOB), Sampler.of(JOB, 3)
    with pytest.raises(RowsError, match="rows of a generation"):
        next(sampler.rollout(None, Latents(half, half), half, pack(Job.parse("64x64x5"))))
    assert sampler.packed(0, packed).timestep.tolist() == [0.0]
