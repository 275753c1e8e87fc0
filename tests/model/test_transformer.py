"""The model on one process: what is saved, the order of rows, the order of dtemb, refusals."""

import dataclasses
import functools

import pytest
import torch
from block_support import KEYFRAMES, TINY, packed_rows, padded, permuted
from model_support import inputs_in, ours, output_gradients, weights_in
from support import assert_same_bytes

from h3lib.contract import LayoutError, OperandError, RowsError
from h3lib.layout import Layout
from h3lib.model.packing import job_for_rows, pack
from h3lib.model.trace import GRADIENT, ModelTrace
from h3lib.model.transformer import BLOCK_INPUTS, NOTHING, Inputs, Transformer
from h3lib.parallel.shard import SeqShard

WEIGHTS = weights_in(TINY, torch.bfloat16)
PACKED = packed_rows(132)
INPUTS = inputs_in(TINY, PACKED, torch.bfloat16)
GRADIENTS = output_gradients(INPUTS)


def _same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_same_bytes(found[name], value, name)


@functools.cache
def _whole() -> dict:
    return ours(TINY, WEIGHTS, INPUTS, GRADIENTS)


def test_blocks_computed_again_give_the_same_bytes():
    _same(ours(TINY, WEIGHTS, INPUTS, GRADIENTS, saved=BLOCK_INPUTS), _whole())


def test_nothing_saved_gives_the_same_outputs_and_no_backward():
    model = Transformer(TINY, SeqShard.canonical(132), WEIGHTS)
    found = model.forward(INPUTS, NOTHING)
    _same(found, {name: _whole()[name] for name in found})
    with pytest.raises(OperandError, match="what was saved: received 'nothing'"):
        model.backward(*GRADIENTS)
    with pytest.raises(OperandError, match="what to save"):
        model.forward(INPUTS, "everything")


def test_frozen_inputs_leave_the_parameters_as_they_are():
    model = Transformer(TINY, SeqShard.canonical(132), WEIGHTS)
    model.forward(INPUTS)
    found = model.backward(*GRADIENTS, input_gradients=False)
    assert found.inputs == {}
    _same(found.parameters, {name: _whole()[name] for name in found.parameters})


def test_gradients_are_handed_out_part_by_part_and_not_kept():
    model, parts = Transformer(TINY, SeqShard.canonical(132), WEIGHTS), []
    model.forward(INPUTS, BLOCK_INPUTS)
    found = model.backward(*GRADIENTS, take=parts.append)
    assert found.parameters == {} and len(parts) == 5
    names = [sorted(part)[0].rsplit(".", 1)[0] for part in parts]
    assert names[0] == "audio_proj_out" and names[1].startswith("transformer_blocks.1")
    every = {name: value for part in parts for name, value in part.items()}
    _same(every, {name: _whole()[name] for name in WEIGHTS})


@pytest.mark.parametrize("change", ("permuted", "padded"))
def test_storage_is_not_in_the_bytes(change):
    """Rows stored in another order, or with padding between, and index sets in another order."""
    order = torch.randperm(132, generator=torch.Generator().manual_seed(1))
    packed = permuted(PACKED, order) if change == "permuted" else padded(PACKED, 40, 60)
    mixed, values = {}, {}
    for name, gradient in (("video", GRADIENTS[0]), ("audio", GRADIENTS[1]), ("text", None)):
        rows = getattr(INPUTS, name)
        mixed[name] = torch.randperm(len(rows), generator=torch.Generator().manual_seed(2))
        values[name] = rows[mixed[name]]
        values[f"d{name}"] = None if gradient is None else gradient[mixed[name]]
    indices = {f"{name}_indices": getattr(packed, f"{name}_indices")[mixed[name]] for name in mixed}
    packed = dataclasses.replace(packed, **indices)
    inputs = Inputs(values["video"], values["audio"], values["text"], packed)
    weights, shard = WEIGHTS, SeqShard.canonical(132)
    model = Transformer(TINY, shard, weights)
    out = model.forward(inputs)
    found = model.backward(values["dvideo"], values["daudio"])
    _same(found.parameters, {name: _whole()[name] for name in found.parameters})
    for name, order in mixed.items():
        assert_same_bytes(found.inputs[name], _whole()[f"d.{name}"][order], name)
        if name in out:
            assert_same_bytes(out[name], _whole()[name][order], name)


def test_text_alone_and_one_row():
    """No such request exists, but a rank may see as little: outputs are empty, not absent."""
    for num_rows in (1, 5):
        packed = pack(job_for_rows(num_rows))
        inputs = inputs_in(TINY, packed, torch.bfloat16)
        found = ours(TINY, WEIGHTS, inputs, output_gradients(inputs))
        assert found["video"].shape == (0, 96) and found["audio"].shape == (0, 32)
        assert not found["proj_in.weight"].any() and not found["proj_out.bias"].any()
        assert all(value.isfinite().all() for value in found.values())


def test_dtemb_is_added_from_the_output_norm_to_the_first_block():
    trace = ModelTrace()
    model = Transformer(TINY, SeqShard.canonical(132), WEIGHTS, trace=trace)
    model.forward(INPUTS)
    parts = {}
    for layer in (0, 1):
        block = model.blocks[layer]
        block.backward = lambda d, r=block.backward, i=layer: parts.setdefault(i, r(d))
    heads = model.heads.backward
    model.heads.backward = lambda *given: parts.setdefault("heads", heads(*given))
    model.backward(*GRADIENTS)
    total = (parts["heads"][1] + parts[1].dtemb) + parts[0].dtemb
    other = (parts[0].dtemb + parts[1].dtemb) + parts["heads"][1]
    records = {r.name: r.tensor for r in trace.records if r.kind != GRADIENT}
    assert_same_bytes(records["d.temb"], total)
    assert not torch.equal(total, other)


def test_keyframe_conditions_are_in_the_outputs():
    packed = pack(KEYFRAMES)
    inputs = inputs_in(TINY, packed, torch.bfloat16)
    shard = SeqShard.canonical(packed.num_rows)
    found = Transformer(TINY, shard, WEIGHTS).forward(inputs)
    assert len(found["video"]) == packed.job.num_condition_rows + packed.job.num_video_rows


def test_refusals():
    shard = SeqShard.canonical(132)
    with pytest.raises(OperandError, match="dtype of proj_in.weight.*float32"):
        Transformer(TINY, shard, WEIGHTS | {"proj_in.weight": WEIGHTS["proj_in.weight"].bfloat16()})
    with pytest.raises(OperandError, match="without norm_out.linear.bias"):
        Transformer(TINY, shard, {n: w for n, w in WEIGHTS.items() if n != "norm_out.linear.bias"})
    with pytest.raises(LayoutError, match="pp degree: received 3; accepted: at most .* 2"):
        Layout(pp=3).layers(2, 0)
    model = Transformer(TINY, shard, WEIGHTS)
    with pytest.raises(OperandError, match="shape of audio"):
        model.forward(dataclasses.replace(INPUTS, audio=INPUTS.audio[1:]))
    with pytest.raises(OperandError, match="rows of proj_in"):
        model.forward(dataclasses.replace(INPUTS, video=INPUTS.video[:, 1:]))
    audio = PACKED.audio_indices.clone()
    for wrong in (PACKED.video_indices[0].item(), 132, -1):
        audio[0] = wrong
        packed = dataclasses.replace(PACKED, audio_indices=audio)
        with pytest.raises(RowsError):
            model.forward(dataclasses.replace(INPUTS, packed=packed))
