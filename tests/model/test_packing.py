"""Packed rows: the golden layout, and bit equality with the released pipeline's own packing."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from released_support import released_steps

from h3lib.contract import RowsError
from h3lib.model.packing import GEOMETRIES, Job, Packed, job_for_rows, pack

LAYOUT = released_steps.MiniMaxH3PrepareLayoutStep
TIMESTEPS = released_steps.MiniMaxH3SetTimestepsStep


def released(job: Job, video_t: float, audio_t: float) -> dict[str, torch.Tensor]:
    """What the released pipeline packs for the same job."""
    text_tags = torch.ones(job.text_rows, dtype=torch.int64)
    for rows in job.vision_rows:
        text_tags[rows.start : rows.stop] = 0
    frames, height, width = job.latent_shape
    positions, tags, video, audio, text, num_video, num_audio = LAYOUT.build_packed_sequence(
        text_tags, frames, height, width, job.num_audio_latents, (1, 2, 2), 2, 2, 0, job.keyframes
    )
    timestep, timestep_indices = TIMESTEPS.build_row_timesteps(
        video, audio, num_video, num_audio, len(text), video_t, audio_t, max(video_t, 0.999), 1.0
    )
    return {
        "position_ids": positions,
        "token_tags": tags,
        "timestep": timestep,
        "timestep_indices": timestep_indices,
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
    }


def assert_same(packed: Packed, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        received = getattr(packed, name)
        assert received.dtype == tensor.dtype, name
        assert torch.equal(received, tensor), name


JOBS = st.builds(
    Job,
    width=st.integers(1, 8).map(lambda n: 32 * n),
    height=st.integers(1, 8).map(lambda n: 32 * n),
    frames=st.integers(0, 20).map(lambda n: 17 * n + 5),  # to 102 latent frames
    text_rows=st.integers(4, 90),
    keyframes=st.sampled_from([(), ("first",), ("last",), ("first", "last"), ("last", "first")]),
    vision_rows=st.sampled_from([(), (range(1, 3),), (range(0, 1), range(2, 4))]),
)
TIMES = st.one_of(st.sampled_from([0.0, 0.5, 0.999, 0.9995, 1.0]), st.floats(0.0, 1.0))


@settings(max_examples=150, deadline=None)
@given(job=JOBS, video_t=TIMES, audio_t=TIMES)
def test_small_jobs_are_packed_as_released(job, video_t, audio_t):
    assert_same(pack(job, video_t, audio_t), released(job, video_t, audio_t))


@pytest.mark.parametrize("keyframes", [(), ("first", "last")])
@pytest.mark.parametrize("name", ["288x384x5", "832x480x124", "1344x768x124"])
def test_report_shapes_are_packed_as_released(name, keyframes):
    job = Job.parse(name, keyframes=keyframes)
    assert_same(pack(job), released(job, 0.7, 0.4))


def test_last_anchor_is_summed_pairwise():
    """The sequential sum of frame times differs from the released anchor, so the order is seen."""
    job = Job.parse("32x32x345", text_rows=1, keyframes=("last",))
    t = pack(job).position_ids[:, 0]
    last_frame, anchor = t[-1], t[job.text_rows]
    assert 0 < abs(last_frame + 5 / 3 * 4 - 5 / 3 - anchor) < 1e-9


def test_golden_layout():
    job = Job(128, 64, 5, text_rows=3, vision_rows=(range(1, 2),), audio_latents=3)
    packed = pack(job, video_t=0.25, audio_t=0.75)
    assert packed.num_rows == job.num_rows == 25
    expected = {
        2: (2, 0, 0), 3: (3, 0, -6.627417), 5: (5, 0, -6.627417), 6: (3, 0, 27.313708),
        9: (3, 4.686292, -6.627417), 10: (3, 4.686292, 4.686292), 13: (3, 16, -6.627417),
        17: (4.666667, 4.686292, -6.627417), 24: (4.666667, 16, 27.313708),
    }  # fmt: skip
    for row, position in expected.items():
        assert packed.position_ids[row].tolist() == pytest.approx(position, abs=5e-7), row
    assert packed.token_tags.tolist() == [1, 0, 1] + [2] * 6 + [0] * 16
    assert packed.timestep.tolist() == [0.25, 0.75]
    assert packed.timestep_indices.tolist() == [0] * 3 + [1] * 6 + [0] * 16


@pytest.mark.parametrize(
    ("num_rows", "name", "text", "audio", "video"),
    [
        (264, "288x384x5", 32, 16, 216),
        (14_910, "832x480x124", 66, 414, 14_430),
        (37_776, "1344x768x124", 66, 414, 37_296),
    ],
)
def test_rows_of_reports(num_rows, name, text, audio, video):
    job = job_for_rows(num_rows)
    assert job.name == name and job.num_rows == num_rows
    assert (job.text_rows, job.num_audio_rows, job.num_video_rows) == (text, audio, video)


@pytest.mark.parametrize(
    ("name", "rows"),
    [("864x480x124", 15_399), ("960x544x124", 19_284), ("1344x768x107", 32_612),
     ("1344x768x243", 73_386), ("128x192x22", 242)],
)  # fmt: skip
def test_media_rows(name, rows):
    assert Job.parse(name, text_rows=1).num_rows == rows + 1
    one_keyframe = Job.parse(name, keyframes=("first",))
    assert one_keyframe.num_condition_rows == one_keyframe.rows_per_frame


@given(st.integers(1, 120_000))
def test_job_for_rows_has_exactly_these_rows(num_rows):
    job = job_for_rows(num_rows)
    assert job.num_rows == num_rows and job.text_rows >= 1
    assert (job.frames == 0) == (num_rows < 19)


def test_geometries_ascend():
    rows = [Job.parse(name).num_rows for name in GEOMETRIES]
    assert rows == sorted(set(rows))


@pytest.mark.parametrize("num_rows", [1, 7, 18, 19, 131, 264, 1097])
def test_index_sets_partition_the_rows(num_rows):
    packed = pack(job_for_rows(num_rows))
    parts = (packed.text_indices, packed.audio_indices, packed.video_indices)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(num_rows))
    assert packed.logical_keys.tolist() == [[0, row] for row in range(num_rows)]
    assert packed.position_ids.shape == (num_rows, 3)


def test_number_of_timesteps():
    keyframes = Job.parse("64x64x22", keyframes=("first",))
    assert pack(Job.parse("64x64x22"), 0.0, 0.0).timestep.tolist() == [0.0]
    assert len(pack(Job.parse("64x64x22"), 0.7, 0.4).timestep) == 2
    assert len(pack(keyframes, 0.7, 0.4).timestep) == 3
    assert len(pack(keyframes, 0.9995, 0.4).timestep) == 2
    assert len(pack(job_for_rows(5), 0.7, 0.4).timestep) == 1


def test_to_moves_every_tensor():
    moved = pack(Job.parse("64x64x5")).to("meta")
    tensors = [getattr(moved, field.name) for field in dataclasses.fields(moved)[1:]]
    assert all(tensor.device.type == "meta" for tensor in tensors)


@pytest.mark.parametrize("name", ["833x480x124", "832x480x123", "832x480", "0x0x0", "", "x", None])
def test_impossible_names_are_refused(name):
    with pytest.raises(RowsError) as error:
        Job.parse(name)
    assert "17n + 5" in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"text_rows": 0},
        {"keyframes": ("middle",)},
        {"keyframes": ("first", "first")},
        {"width": 0},
        {"width": 32.0},
        {"frames": 0},
        {"width": 0, "height": 0, "frames": 0, "keyframes": ("first",)},
        {"vision_rows": (range(60, 67),)},
        {"vision_rows": (range(0, 4, 2),)},
        {"audio_latents": -1},
    ],
)
def test_impossible_jobs_are_refused(fields):
    with pytest.raises(RowsError):
        Job(**({"width": 64, "height": 64, "frames": 5} | fields))


def test_impossible_calls_are_refused():
    for num_rows in (0, -1, 2.0, True, "264"):
        with pytest.raises(RowsError):
            job_for_rows(num_rows)
    for times in ((-0.1, 0.4), (0.7, 1.1), (float("nan"), 0.4)):
        with pytest.raises(RowsError):
            pack(job_for_rows(264), *times)
