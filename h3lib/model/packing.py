"""Real jobs to packed rows: positions, tags, timesteps and index sets of one request.

A job of width x height pixels and 17n + 5 frames becomes rows in the order

    [ text L | keyframe conditions C | target audio A | target video V ]

    LF = 5n + 2 latent frames,  R = (width/32) * (height/32) rows a latent frame
    V = LF * R,   C = R a keyframe,   A = 2 * round(frames/24 * 40), all left, then all right

Positions are (t, h, w). Text row i sits at (i, 0, 0) and the media clock starts at L: one unit an
audio latent, 5/3 units a frame, where latent frames span 1, 4, 4, 4, 4 frames in turn. The spatial
axes are centred and scaled by 32 / sqrt(area), the right end excluded.

Source: diffusers 0.42.1, `modular_pipelines/minimax_h3`, which the tests compare bit for bit.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from h3lib.contract import RowsError

VIDEO_TAG, TEXT_TAG, AUDIO_TAG = 0, 1, 2
KEYFRAMES = ("first", "last")
CONDITION_T = 0.999  # a keyframe is held at this timestep, or at the video's if that is later

_PIXELS_PER_ROW = 32
_PIXELS_PER_LATENT = 16
_AUDIO_CHANNELS = 2
_FRAME_SPAN = 5.0 / 3.0
_FRAMES_PER_LATENT = (1, 4, 4, 4, 4)
_NAME = re.compile(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)")
_SHAPES = "width and height multiples of 32, frames 17n + 5, e.g. 832x480x124"

# What `job_for_rows` chooses from, by media rows: 18, 24, 40, 64, 112, 232 (5 frames), 410, 830
# (22), 1570, 2770 (39), 5084, 8824 (73), 14844, 19284, 27054, 37710 (124), 73386 (243), 103966
# (345). 288x384x5, 832x480x124 and 1344x768x124 are the shapes that reports are made with.
GEOMETRIES = (
    "32x32x5", "64x64x5", "128x96x5", "192x128x5", "256x192x5", "288x384x5",
    "256x192x22", "384x288x22", "480x256x39", "640x352x39", "640x352x73", "832x480x73",
    "832x480x124", "960x544x124", "1152x640x124", "1344x768x124", "1344x768x243", "1344x768x345",
)  # fmt: skip


def _check_count(subject: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RowsError(subject, value, f"an integer of at least {least}")


@dataclass(frozen=True)
class Job:
    """One request: target geometry, prompt length and keyframes; 0x0x0 is text alone (tests only).

    `keyframes`: "first" and "last" in packed order, each at most once. `vision_rows`: ranges of
    text rows that belong to a keyframe's vision block in the prompt; they carry the video tag.
    `audio_latents`: latents a channel, taken from `frames` when None (tests only otherwise).

    **Raises:** RowsError for a job that the released model cannot pack.
    """

    width: int
    height: int
    frames: int
    text_rows: int = 66  # with 832x480x124 and 1344x768x124: 14,910 and 37,776 rows
    keyframes: tuple[str, ...] = ()
    vision_rows: tuple[range, ...] = ()
    audio_latents: int | None = None

    def __post_init__(self):
        _check_count("number of text rows", self.text_rows, 1)
        shape = (self.width, self.height, self.frames)
        if shape != (0, 0, 0):
            for size in shape:
                _check_count("size of a job", size, 1)
            if self.width % 32 or self.height % 32 or self.frames % 17 != 5:
                raise RowsError("size of a job", shape, _SHAPES)
        if self.audio_latents is not None:
            _check_count("number of audio latents", self.audio_latents, 0)
        known = all(keyframe in KEYFRAMES for keyframe in self.keyframes)
        if not known or len(set(self.keyframes)) < len(self.keyframes):
            raise RowsError("keyframes", self.keyframes, "'first' and 'last', each at most once")
        if self.keyframes and not self.frames:
            raise RowsError("keyframes", self.keyframes, "none, for a job of text alone")
        for rows in self.vision_rows:
            if rows.step != 1 or not 0 <= rows.start <= rows.stop <= self.text_rows:
                accepted = f"a range inside the {self.text_rows} text rows"
                raise RowsError("vision rows", rows, accepted)

    @classmethod
    def parse(cls, name: str, **others) -> Job:
        """The job called `name`, e.g. `832x480x124`; `others` are the remaining fields.

        **Raises:** RowsError if the name is not width x height x frames of a possible job.
        """
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise RowsError("job", name, _SHAPES)
        return cls(*map(int, match.groups()), **others)

    @property
    def name(self) -> str:
        return f"{self.width}x{self.height}x{self.frames}"

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(frames, height, width) of the target's video latents, before the 1 x 2 x 2 patch."""
        frames = self.frames // 17 * 5 + 2 if self.frames else 0
        return frames, self.height // _PIXELS_PER_LATENT, self.width // _PIXELS_PER_LATENT

    @property
    def rows_per_frame(self) -> int:
        return (self.height // _PIXELS_PER_ROW) * (self.width // _PIXELS_PER_ROW)

    @property
    def num_condition_rows(self) -> int:
        return len(self.keyframes) * self.rows_per_frame

    @property
    def num_audio_latents(self) -> int:
        """Audio latents a channel: 40 a second, 24 frames a second."""
        return round(self.frames / 24 * 40) if self.audio_latents is None else self.audio_latents

    @property
    def num_audio_rows(self) -> int:
        return _AUDIO_CHANNELS * self.num_audio_latents

    @property
    def num_video_rows(self) -> int:
        """Target video rows, without the keyframe conditions."""
        return self.latent_shape[0] * self.rows_per_frame

    @property
    def num_rows(self) -> int:
        return self.text_rows + self.num_condition_rows + self.num_audio_rows + self.num_video_rows


def job_for_rows(num_rows: int) -> Job:
    """A job of exactly `num_rows` rows: the largest of `GEOMETRIES` that fits, the rest is text.

    264 = 32 text + 16 audio + 216 video; 14,910 and 37,776 have 66 text rows. At least one row is
    text; below 19 rows every row is (for tests only: no such request exists).

    **Raises:** RowsError unless `num_rows` is an integer of at least 1.
    """
    _check_count("number of rows", num_rows, 1)
    for name in reversed(GEOMETRIES):
        job = Job.parse(name, text_rows=1)
        if job.num_rows <= num_rows:
            return replace(job, text_rows=num_rows - job.num_rows + 1)
    return Job(0, 0, 0, text_rows=num_rows)


@dataclass(frozen=True, eq=False)
class Packed:
    """The metadata of one packed request, T rows and M distinct timesteps.

    position_ids float64 [T, 3]; token_tags int64 [T]; timestep FP32 [M], ascending;
    timestep_indices int64 [T]; logical_keys int64 [T, 2] = (document 0, row); video_indices
    (conditions, then target), audio_indices and text_indices int64, together 0..T-1.
    """

    job: Job
    position_ids: Tensor
    token_tags: Tensor
    timestep: Tensor
    timestep_indices: Tensor
    logical_keys: Tensor
    video_indices: Tensor
    audio_indices: Tensor
    text_indices: Tensor

    @property
    def num_rows(self) -> int:
        return self.position_ids.shape[0]

    def to(self, device: torch.device | str) -> Packed:
        """The same rows with every tensor on `device`."""
        names = (field.name for field in fields(self) if field.name != "job")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def pack(job: Job, video_t: float = 0.7, audio_t: float = 0.4) -> Packed:
    """The packed rows of `job` at video timestep `video_t` and audio timestep `audio_t`.

    A timestep is in [0, 1], 1 is clean. Text rows are at `video_t`, keyframe conditions at
    max(video_t, 0.999).

    **Rounds:** timesteps once, to FP32; equal FP32 timesteps share an index.
    **Raises:** RowsError for a timestep outside [0, 1].
    """
    for subject, t in (("video timestep", video_t), ("audio timestep", audio_t)):
        if not 0.0 <= t <= 1.0:
            raise RowsError(subject, t, "0 to 1")
    num_rows = job.num_rows
    conditions, audio, video = _media_rows(job)
    row = torch.arange(num_rows)

    token_tags = torch.full((num_rows,), VIDEO_TAG, dtype=torch.int64)
    token_tags[: job.text_rows] = TEXT_TAG
    for rows in job.vision_rows:
        token_tags[rows.start : rows.stop] = VIDEO_TAG
    token_tags[audio] = AUDIO_TAG

    row_t = torch.full((num_rows,), video_t, dtype=torch.float32)
    row_t[conditions] = max(video_t, CONDITION_T)
    row_t[audio] = audio_t
    timestep, timestep_indices = torch.unique(row_t, sorted=True, return_inverse=True)

    return Packed(
        job=job,
        position_ids=torch.from_numpy(_positions(job)),
        token_tags=token_tags,
        timestep=timestep,
        timestep_indices=timestep_indices,
        logical_keys=torch.stack([torch.zeros_like(row), row], dim=1),
        video_indices=torch.cat([row[conditions], row[video]]),
        audio_indices=row[audio],
        text_indices=row[: job.text_rows],
    )


def _media_rows(job: Job) -> tuple[slice, slice, slice]:
    """Where conditions, target audio and target video lie."""
    audio = job.text_rows + job.num_condition_rows
    video = audio + job.num_audio_rows
    return slice(job.text_rows, audio), slice(audio, video), slice(video, job.num_rows)


def _positions(job: Job) -> np.ndarray:
    """float64 [T, 3]: (t, h, w) of every row.

    **Order:** frame times are summed in ascending order, the anchor of a last keyframe by numpy's
    pairwise sum: the released pipeline does both, and they differ in the last bit from 16 latent
    frames on.
    """
    positions = np.zeros((job.num_rows, 3))
    positions[: job.text_rows, 0] = np.arange(job.text_rows)
    if not job.frames:
        return positions
    conditions, audio, video = _media_rows(job)
    origin = float(job.text_rows)
    num_frames, height, width = job.latent_shape
    area_root = math.sqrt(height * width)
    h_axis, w_axis = _spatial_axis(height, area_root), _spatial_axis(width, area_root)
    grid = np.stack(np.meshgrid(h_axis, w_axis, indexing="ij"), axis=-1).reshape(-1, 2)
    spans = np.array([_FRAME_SPAN * _FRAMES_PER_LATENT[j % 5] for j in range(num_frames)])

    anchors = {"first": origin, "last": origin + float(spans.sum()) - _FRAME_SPAN}
    anchor_t = np.array([anchors[keyframe] for keyframe in job.keyframes])
    positions[conditions, 0] = np.repeat(anchor_t, job.rows_per_frame)
    positions[conditions, 1:] = np.tile(grid, (len(job.keyframes), 1))

    # Stereo is told apart by the two ends of the width axis.
    positions[audio, 0] = np.tile(origin + np.arange(job.num_audio_latents), _AUDIO_CHANNELS)
    positions[audio, 2] = np.repeat(w_axis[[0, -1]], job.num_audio_latents)

    frame_t = origin + np.concatenate([[0.0], np.cumsum(spans[:-1])])
    positions[video, 0] = np.repeat(frame_t, job.rows_per_frame)
    positions[video, 1:] = np.tile(grid, (num_frames, 1))
    return positions


def _spatial_axis(size: int, area_root: float) -> np.ndarray:
    """size/2 coordinates of an axis of `size` latents; numpy's linspace is part of the bits."""
    ratio = size / area_root
    left = (1.0 - ratio) / 2.0
    return np.linspace(left, left + ratio, size // 2, endpoint=False) * 32
