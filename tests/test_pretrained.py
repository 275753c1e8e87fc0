"""H3Transformer: the model as users hold it, on one process and under torchrun."""

import json
import subprocess
import sys

import pytest
import torch
from block_support import TINY, packed_rows
from model_support import inputs_in, output_gradients
from support import assert_same_bytes, normal

from h3lib import H3Transformer
from h3lib.bench.transformer import diffusers_model
from h3lib.contract import SIZES, LayoutError, OperandError
from h3lib.model.checkpoint import write_checkpoint
from h3lib.model.transformer import ACTIVATIONS, BLOCK_INPUTS
from h3lib.model.weights import SyntheticWeights, digest
from h3lib.request import RequestError

PACKED = packed_rows(132)
INPUTS = inputs_in(TINY, PACKED, torch.bfloat16)
METADATA = {
    name: getattr(PACKED, name)
    for name in (
        "timestep", "timestep_indices", "token_tags", "position_ids", "video_indices",
        "audio_indices", "text_indices",
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("released") / "transformer"
    write_checkpoint(path, SyntheticWeights(TINY, 2), "diffusers", 300_000)
    return path


def _rows():
    return [x[None].clone().requires_grad_() for x in (INPUTS.video, INPUTS.audio, INPUTS.text)]


def _step(model) -> dict:
    rows = _rows()
    out = model(*rows, **METADATA)
    model.zero_grad()
    torch.autograd.backward(out, [gradient[None] for gradient in output_gradients(INPUTS)])
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found | {"video": out[0].detach(), "audio": out[1].detach()} | {
        f"d.{name}": x.grad for name, x in zip(("video", "audio", "text"), rows, strict=True)
    }


def test_names_are_diffusers_names_and_the_call_is_its_call(folder):
    model = H3Transformer.from_checkpoint(str(folder))
    weights = dict(model.named_parameters())
    theirs = diffusers_model(TINY, {name: w.detach().clone() for name, w in weights.items()})
    theirs.requires_grad_()
    assert theirs.state_dict().keys() == model.state_dict().keys()
    theirs.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = theirs(*_rows(), **METADATA, return_dict=False)
        for ours, other in zip(model(*_rows(), **METADATA), expected, strict=True):
            assert ours.shape == other.shape and ours.dtype == other.dtype == torch.float32
            assert float((ours - other).norm() / other.norm()) < 0.05  # BF16: see the oracle


def test_gradients_by_autograd_are_the_contracts(folder):
    every = (ACTIVATIONS, BLOCK_INPUTS)
    saved = {s: H3Transformer.from_checkpoint(str(folder), saved=s) for s in every}
    found = {name: _step(model) for name, model in saved.items()}
    for name, value in found[ACTIVATIONS].items():
        assert value is not None and value.abs().sum() > 0, name
        assert_same_bytes(found[BLOCK_INPUTS][name], value, name)


def test_frozen_parameters_and_inference(folder):
    model = H3Transformer.from_checkpoint(str(folder)).requires_grad_(False)
    rows = _rows()
    video, _ = model(*rows, **METADATA)
    video.sum().backward()
    assert rows[0].grad.abs().sum() > 0 and model.proj_in.weight.grad is None
    with torch.inference_mode():
        assert_same_bytes(model(*(x.detach() for x in rows), **METADATA)[0], video.detach())


def test_a_weight_changed_before_the_backward_is_noticed(folder):
    model = H3Transformer.from_checkpoint(str(folder))
    video, _ = model(*_rows(), **METADATA)
    with torch.no_grad():
        model.proj_out.bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        video.sum().backward()


def test_refusals(folder):
    with pytest.raises(LayoutError, match="number of ranks: received 1; accepted: 8 for tp4-cp2"):
        H3Transformer.from_checkpoint(str(folder), layout="tp4-cp2")
    with pytest.raises(OperandError, match="what to save"):
        H3Transformer.from_checkpoint(str(folder), saved="some")
    model = H3Transformer.synthetic(TINY)
    with pytest.raises(OperandError, match="shape of video rows"):
        model(INPUTS.video, INPUTS.audio[None], INPUTS.text[None], **METADATA)


SCRIPT = """
import json, sys
import torch
from h3lib import H3Transformer
from h3lib.model.weights import digest

folder, layout, device, backend, out = sys.argv[1:]
model = H3Transformer.from_checkpoint(folder, layout=layout, device=device, backend=backend)
width = model.size.text_dim
text = torch.arange(6 * width, device=device).reshape(6, width).remainder(7).sub(3).bfloat16()
latents = model.generate("64x96x5", text, points=3, seed=1)
if model.rank == 0:
    json.dump({name: digest(x) for name, x in latents.items()}, open(out, "w"))
model.close()
"""


def _digests(folder, tmp_path, layout, ranks, device="cpu", backend="eager") -> dict[str, str]:
    """Of the latents that the script generates on `ranks` processes."""
    script, out = tmp_path / "generate.py", tmp_path / f"{layout}.json"
    script.write_text(SCRIPT)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    start = torchrun if ranks > 1 else ()
    command = [sys.executable, *start, script, folder, layout, device, backend, out]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_ten_lines_under_torchrun_generate_the_same_bytes(folder, tmp_path):
    text = torch.arange(6 * 80).reshape(6, 80).remainder(7).sub(3).bfloat16()
    model = H3Transformer.from_checkpoint(str(folder))
    latents = model.generate("64x96x5", text, points=3, seed=1)
    assert latents["video"].shape == (24, 2, 6, 4) and latents["audio"].shape == (16, 32)
    expected = {name: digest(x) for name, x in latents.items()}
    assert _digests(folder, tmp_path, "tp2-sp-pp2", 4) == expected
    other = model.generate("64x96x5", text + normal(1, 6, 80) * 0.1, points=3, seed=1)
    assert digest(other["video"]) != expected["video"], "the text matters"


REFUSED = {
    "no such device": {"device": "tpu"},
    "one of several GPUs": {"device": "cuda:0"},
    "timeout": {"timeout_s": -1.0},
    "timeout that is no number": {"timeout_s": float("nan")},
}


@pytest.mark.parametrize("given", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_before_ranks_join(given):
    (value,) = given.values()
    with pytest.raises(RequestError, match=f"received {value!r}; accepted"):
        H3Transformer.synthetic(TINY, **given)


def test_a_gpu_is_not_asked_for_where_there_is_none(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RequestError, match="received 'cuda'; accepted: cpu"):
        H3Transformer.from_checkpoint(str(folder), device="cuda")


@pytest.mark.parametrize("seed", [1.5, None, True, -1, 2**63])
def test_a_seed_of_a_generation_fits_into_its_generator(seed):
    model = H3Transformer.synthetic(TINY)
    with pytest.raises(OperandError, match="seed of a generation: received"):
        model.generate("64x96x5", normal(1, 6, 80), points=2, seed=seed)


TEXTS = [None, [1, 2], torch.zeros(6, 80, dtype=torch.int64), torch.zeros(80), torch.zeros(6, 81)]


@pytest.mark.parametrize("text", TEXTS, ids=["none", "list", "integers", "a vector", "wide"])
def test_a_text_is_hidden_states_of_the_model_s_width(text):
    with pytest.raises(OperandError, match=r"text: received .*accepted: a floating-point .*80"):
        H3Transformer.synthetic(TINY).generate("64x96x5", text, points=2)


def test_a_size_is_not_a_name():
    with pytest.raises(OperandError, match="model size: received 'tiny'"):
        H3Transformer.synthetic("tiny")


@pytest.mark.gpu
def test_ten_lines_on_gpus_generate_the_same_bytes(tmp_path):
    """Ranks share GPUs where there are fewer."""
    folder = tmp_path / "transformer"
    write_checkpoint(folder, SyntheticWeights(SIZES["small"], 2), "diffusers", 300_000_000)
    given = (folder, tmp_path)
    alone = _digests(*given, "tp1", 1, "cuda", "triton")
    assert _digests(*given, "tp4-cp2-sp", 8, "cuda", "triton") == alone
    assert _digests(*given, "tp2-pp2", 4, "cuda", "triton") == alone
