"""The golden numbers: a small configuration whose every value follows from an integer hash.

Printed to six decimals by an independent implementation; FP32 everywhere unless said, two heads and
so two units. A single value may be off by 1e-3 (other orders of FP32 sums), a sum of n values by n
times their share of that; 30 single mistakes each move some number by at least 0.46. The numbers of
the generator are in `test_weights.py`, the positions in `test_packing.py`, block 0 alone in
`test_block_oracle.py`.
"""

import functools

import torch
from block_support import GOLDEN
from model_support import output_gradients

from h3lib.contract import Contract
from h3lib.model.packing import Job, pack
from h3lib.model.trace import NODE, ModelTrace
from h3lib.model.transformer import Inputs, Transformer
from h3lib.model.weights import parameter_values, parameters, uniform
from h3lib.parallel.shard import SeqShard

NAMES = sorted(parameters(GOLDEN))
JOB = Job(128, 64, 5, text_rows=3, vision_rows=(range(1, 2),), audio_latents=3)
PACKED = pack(JOB, 0.25, 0.75)
SHARD = SeqShard.canonical(25, Contract(num_units=2))


def _rows(key: int, count: int, width: int) -> torch.Tensor:
    return (1.7 * uniform(key, torch.arange(count * width))).float().view(count, width)


@functools.cache
def _run(mixed: bool) -> tuple[dict, dict]:
    """Outputs by name, and nodes, in FP32 or in the checkpoint's mixed precision."""
    weights = {}
    for number, name in enumerate(NAMES):
        whole = parameters(GOLDEN)[name]._replace(dtype=torch.float32)
        value = parameter_values(name, whole, number)
        weights[name] = value.to(parameters(GOLDEN)[name].dtype) if mixed else value
    text = _rows(1002, 3, 8)
    inputs = Inputs(
        _rows(1000, 16, 16), _rows(1001, 6, 6), text.bfloat16() if mixed else text, PACKED
    )
    trace = ModelTrace()
    model = Transformer(GOLDEN, SHARD, weights, trace=trace)
    found = model.forward(inputs)
    model.backward(*output_gradients(inputs))
    return found, {record.name: record.tensor for record in trace.records if record.kind == NODE}


def _close(values: torch.Tensor, expected: tuple[float, ...], tolerance: float = 1e-3) -> None:
    assert torch.allclose(values, torch.tensor(expected), rtol=0, atol=tolerance), values


def test_the_job():
    assert PACKED.num_rows == 25 and PACKED.token_tags[:3].tolist() == [1, 0, 1]
    assert PACKED.timestep.tolist() == [0.25, 0.75]
    assert PACKED.timestep_indices[PACKED.audio_indices].unique().tolist() == [1]


def test_timestep_embedding():
    temb = _run(False)[1]["temb"]
    _close(temb[0, :4], (-1.000731, -0.117690, 2.389904, -4.593349))
    _close(temb[1, :4], (-0.730883, 0.358033, 2.516946, -5.163151))


def test_refined_text():
    refined = _run(False)[1]["token_refiner.out"]
    _close(refined[0, :4], (0.423948, 1.176265, 0.456494, 0.543354))
    assert abs(float(refined.double().sum()) - 29.85679) < 1e-3  # 72 values
    assert abs(float(refined.double().abs().sum()) - 61.50899) < 1e-3


def test_video_velocity():
    video = _run(False)[0]["video"]
    _close(video[0, :4], (2.179219, -2.729290, -11.964855, -6.733301))
    _close(video[15, 12:], (-2.657732, -1.222188, -0.710968, 4.417630))
    assert abs(float(video.double().sum()) + 443.84491) < 3e-3  # 256 values
    assert abs(float(video.double().abs().sum()) - 1028.14408) < 3e-3


def test_audio_velocity():
    audio = _run(False)[0]["audio"]
    _close(audio[0, :4], (2.510343, -5.183077, 1.980927, 1.571854))
    _close(audio[5, 2:], (2.603902, 1.921885, 0.162098, 1.055597))
    assert abs(float(audio.double().sum()) - 14.73097) < 1e-3  # 36 values
    assert abs(float(audio.double().abs().sum()) - 80.71468) < 1e-3


def test_mixed_precision():
    """The numbers are one BF16 computation, ours another with the same rounding points. BF16 moves
    the outputs by up to 0.18 (video) and 0.08 (audio) from FP32; two computations that round alike
    but sum in other orders differ where a sum is next to a tie, so by a part of it."""
    found = _run(True)[0]
    _close(found["video"][0, :4], (2.205046, -2.694779, -11.871475, -6.714526), 0.18)
    _close(found["audio"][0, :4], (2.483686, -5.187032, 1.961080, 1.523354), 0.08)
    exact = _run(False)[0]
    for name, most in (("video", 0.25), ("audio", 0.11)):
        assert 0 < float((found[name] - exact[name]).abs().max()) < most
