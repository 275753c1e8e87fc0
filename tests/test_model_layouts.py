"""The model in every layout gives the bytes of one process: outputs, every gradient and root."""

import dataclasses
import functools

import pytest
import torch
from block_support import KEYFRAMES, SMALL_BLOCKS, TINY, packed_rows, padded, permuted, red
from hypothesis import given, settings
from hypothesis import strategies as st

from h3lib.contract import PUBLISHED, LayoutError
from h3lib.layout import CP_DEGREES, TP_DEGREES, Layout
from h3lib.model.packing import pack
from h3lib.model.program import BlockProgram, ModelProgram
from h3lib.model.trace import NODE
from h3lib.model.weights import SyntheticWeights
from h3lib.parallel.control import RingControl
from h3lib.simulate import canonical_values, play


@functools.cache
def _program(rows=132, layers=2) -> ModelProgram:
    packed = pack(KEYFRAMES) if rows == "keyframes" else packed_rows(rows)
    size = dataclasses.replace(TINY, num_layers=layers)
    return ModelProgram(size, SyntheticWeights(size), packed)


@functools.cache
def _canonical(rows=132, layers=2, contract=PUBLISHED) -> dict:
    return canonical_values(_program(rows, layers), contract)


def _play(layout, rows=132, layers=2, contract=PUBLISHED, program=None, **mutants):
    program = program or _program(rows, layers)
    return red(play(layout, program, _canonical(rows, layers, contract), contract, **mutants))


@pytest.mark.parametrize(
    "layout", ("tp2", "tp8-local4", "tp4-cp2-sp", "cp3", "tp2-cp4-sp-local4")
)
def test_layouts(layout):
    assert _play(layout) == set()


@pytest.mark.parametrize("layout", ("tp1-pp2", "tp2-cp2-sp-pp2-local2"))
def test_two_stages(layout):
    assert _play(layout) == set()


@pytest.mark.parametrize("layout", ("tp1", "tp4-cp2-sp", "tp2-cp2-sp-pp2"))
def test_layouts_without_a_trace(layout):
    assert _play(layout, traced=False) == set()


@pytest.mark.parametrize("layout", ("tp1-pp3", "tp2-sp-pp4"))
def test_stages_of_four_layers(layout):
    """Three stages hold 1, 1 and 2 layers."""
    assert _play(layout, 33, layers=4) == set()


def test_more_stages_than_layers():
    with pytest.raises(LayoutError, match="pp degree: received 3; accepted: at most .* 2"):
        _play("tp1-pp3")
    with pytest.raises(LayoutError, match="a run of one block has no stages"):
        BlockProgram(TINY, SyntheticWeights(TINY), packed_rows(7)).check_layout(Layout(pp=2))


def test_every_named_value_is_compared():
    found = {key: tuple(value.shape) for key, value in _canonical().items()}
    assert found == _program().values()


@pytest.mark.parametrize("layout", ("tp2-cp2-sp", "cp2-pp2"))
def test_blocks_computed_again(layout):
    """Saved activations alone, the blocks' inputs in the layout."""
    assert _play(layout, program=dataclasses.replace(_program(), recompute=True)) == set()


@pytest.mark.parametrize("layout", ("tp4-cp2-sp", pytest.param("cp5", marks=pytest.mark.slow)))
def test_small_blocks_put_two_row_blocks_into_a_row_unit(layout):
    assert _play(layout, 257, contract=SMALL_BLOCKS) == set()


@pytest.mark.parametrize("layout", ("tp2-cp3-sp", "tp4-cp2-pp2"))
def test_keyframes_and_three_timesteps(layout):
    assert _play(layout, "keyframes", contract=SMALL_BLOCKS) == set()


@pytest.mark.parametrize("rows", (1, 7, 20))
def test_fewer_rows_than_ranks_and_no_video(rows):
    assert _play("tp2-cp4-sp", rows) == set()


@pytest.mark.parametrize("store", ("permuted", "padded"))
def test_rows_stored_otherwise(store):
    order = torch.randperm(132, generator=torch.Generator().manual_seed(3))
    packed = packed_rows(132)
    packed = permuted(packed, order) if store == "permuted" else padded(packed, 50, 60)
    assert _play("tp2-cp2-sp", program=dataclasses.replace(_program(), packed=packed)) == set()


@settings(max_examples=3)
@given(
    st.sampled_from(TP_DEGREES[:3]), st.sampled_from(CP_DEGREES[:5]), st.booleans(),
    st.integers(1, 2), st.integers(19, 70),
)  # fmt: skip
def test_any_layout_at_any_number_of_rows(tp, cp, sp, pp, rows):
    assert _play(Layout(tp, cp, sp, pp=pp), rows, contract=SMALL_BLOCKS) == set()


def _with(shard, **axes):
    return dataclasses.replace(shard, mesh=dataclasses.replace(shard.mesh, **axes))


def test_the_control_keys_see_another_order():
    """A ring on one axis changes the value that the control looks at."""
    keys = _program().control_keys()
    for axis, layout in (("tp", "tp4"), ("cp", "cp2")):
        group = tuple(range(4 if axis == "tp" else 2))

        def ring(shard, world, axis=axis, group=group):
            return _with(shard, **{axis: RingControl(world.connect(group, shard.rank))})

        rows = 132 if axis == "tp" else 264
        assert keys[axis] in _play(layout, rows, change=ring)


class _RoundedPipeline:
    """A pipeline that hands gradients on in BF16."""

    def __init__(self, pipeline):
        self.pipeline = pipeline

    def __getattr__(self, name):
        return getattr(self.pipeline, name)

    def send_back(self, x):
        self.pipeline.send_back(x.bfloat16().to(x.dtype))


def test_a_rounded_hand_off_is_seen():
    def rounded(shard, world):
        return _with(shard, pp=_RoundedPipeline(shard.mesh.pp))

    found = _play("tp1-pp2", change=rounded)
    assert (NODE, "d.temb") in found


def test_a_rank_of_a_stage_that_shows_nothing_is_seen():
    def hide(rank, records):
        return records if rank != 3 else [r for r in records if not r.name.endswith("norm1.weight")]

    found = _play("tp2-pp2", records=hide)
    assert {name for _, name in found} == {"transformer_blocks.1.norm1.weight"}
