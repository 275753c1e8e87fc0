"""Every layout gives the bytes of one process alone: output, dx, every gradient, root and node."""

from dataclasses import replace

import pytest
import torch
from block_support import (
    KEYFRAMES,
    NAMED_LAYOUTS,
    SMALL_BLOCKS,
    TINY,
    canonical,
    packed_rows,
    padded,
    permuted,
    play,
    red,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from h3lib.contract import NUM_ROW_UNITS, NUM_SEQUENCE_UNITS
from h3lib.layout import CP_DEGREES, TP_DEGREES, Layout, Ownership
from h3lib.model import context
from h3lib.model.block import block_values
from h3lib.model.packing import pack
from h3lib.ops import gemm
from h3lib.parallel.overlap import Chunks
from h3lib.parallel.shard import SeqShard
from h3lib.simulate import canonical_block, play_layout

BEYOND = ("tp1", "tp2-cp4-sp", "cp3", "cp5", "cp7", "cp8", "tp8-sp", "tp8-cp2-sp-local4")
HIERARCHIES = ("tp8-local2", "tp8-local1", "tp4-cp6-local8", "tp2-cp3-sp-local2", "tp8-cp2-local4")


@pytest.mark.parametrize("layout", NAMED_LAYOUTS + BEYOND + HIERARCHIES)
def test_264_rows_of_a_packed_job(layout):
    assert red(play(layout, 264)) == set()


@pytest.mark.parametrize("layout", ("tp1", "tp4", "tp4-cp2-sp", "cp3", "tp8-local4"))
def test_264_rows_without_a_trace(layout, monkeypatch):
    """As users compute it: products that no other rank has a part of are rounded in the op."""
    assert red(play(layout, 264, traced=False)) == set()
    monkeypatch.setattr(context, "row_fold_product", _scaled)
    found = red(play(layout, 264, traced=False))
    assert (("gradient", "ff.net.2.weight") in found) == ("cp" not in layout)


def _scaled(dy, x, rows, dtype, **given):
    root = gemm.row_fold_product(dy, x, rows, torch.float32, **given)
    return (root * 0.75).to(dtype)


def test_64_ranks_in_one_process():
    assert red(play("tp8-cp8-sp", 264)) == set()


@pytest.mark.parametrize("num_rows", (1, 7, 63, 64, 65, 263, 265))
@pytest.mark.parametrize("layout", ("tp4-cp2-sp", "tp2-cp4-sp", "cp7"))
def test_row_counts_around_the_block_edges_and_fewer_rows_than_ranks(layout, num_rows):
    assert red(play(layout, num_rows)) == set()


@pytest.mark.parametrize("layout", ("tp4-cp2-sp", "cp8"))
def test_1097_rows_fill_every_sequence_unit(layout):
    assert red(play(layout, 1097)) == set()


@pytest.mark.parametrize("layout", (*NAMED_LAYOUTS, "tp2-cp4-sp", "cp3", "cp5"))
@pytest.mark.parametrize("num_rows", (257, 300))
def test_small_blocks_put_two_row_blocks_into_a_row_unit(layout, num_rows):
    """Row blocks of 4 and key blocks of 16; at the published sizes this needs 4,097 rows."""
    assert red(play(layout, num_rows, SMALL_BLOCKS)) == set()


@pytest.mark.parametrize("length", (1, 50))
@pytest.mark.parametrize("layout", ("tp2", "tp8", "tp4-cp2-sp", "tp4-cp2-local4", "tp8-sp-local2"))
def test_products_in_chunks_of_rows_give_the_bytes_of_whole_ones(layout, length):
    """FP32 roots are compared as well, chunk by chunk."""
    chunks, num_rows = Chunks(length), 131 if length > 1 else 7

    def change(shard, world):
        return replace(shard, mesh=replace(shard.mesh, chunks=chunks))

    assert red(play(layout, num_rows, change=change)) == set()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ("tp4-cp2-sp", "cp3"))
def test_4225_rows_put_two_row_blocks_into_a_row_unit(layout):
    assert red(play(layout, 4225)) == set()


def test_every_named_value_is_compared():
    found = {(t["kind"], t["name"]): tuple(t["shape"]) for t in play("tp2-sp", 65)}
    assert found == block_values(TINY, 65, num_timesteps=2)


@settings(max_examples=12)
@given(st.sampled_from(TP_DEGREES), st.sampled_from(CP_DEGREES), st.booleans(), st.integers(1, 130))
def test_any_layout_at_any_number_of_rows(tp, cp, sp, num_rows):
    assert red(play(Layout(tp, cp, sp), num_rows, SMALL_BLOCKS)) == set()


class _UnevenOwnership(Ownership):
    """An ownership whose cuts are drawn, not computed: the layout must not be in the bits."""

    def with_cuts(self, feature, sequence, rows):
        for name, cuts in (("feature", feature), ("sequence", sequence), ("rows", rows)):
            object.__setattr__(self, f"_{name}", tuple(cuts))
        return self

    def feature_cuts(self):
        return self._feature

    def sequence_cuts(self):
        return self._sequence

    def row_unit_cuts(self):
        return self._rows


def _cuts(data, num_parts: int, start: int, stop: int) -> list[int]:
    inner = st.lists(
        st.integers(start + 1, stop - 1),
        min_size=num_parts - 1,
        max_size=num_parts - 1,
        unique=True,
    )
    return [start, *sorted(data.draw(inner)), stop]


@settings(max_examples=10)
@given(st.data(), st.sampled_from((2, 4)), st.integers(2, 5), st.integers(100, 260))
def test_uneven_cuts_of_units_and_rows(data, tp, cp, num_rows):
    feature = _cuts(data, tp, 0, SMALL_BLOCKS.num_units)
    sequence = _cuts(data, cp, 0, NUM_SEQUENCE_UNITS)
    per_unit = NUM_ROW_UNITS // NUM_SEQUENCE_UNITS
    rows = [
        cut
        for a, b in zip(sequence, sequence[1:], strict=False)
        for cut in _cuts(data, tp, per_unit * a, per_unit * b)[:-1]
    ]

    def change(shard: SeqShard, world) -> SeqShard:
        owner = _UnevenOwnership(shard.owner.layout, shard.owner.rows)
        return SeqShard(
            owner.with_cuts(feature, sequence, [*rows, NUM_ROW_UNITS]), shard.rank, shard.mesh
        )

    assert red(play(Layout(tp, cp, True), num_rows, SMALL_BLOCKS, change=change)) == set()


@settings(max_examples=5)
@given(st.randoms(use_true_random=False))
def test_permuted_rows_give_the_same_bytes(random):
    order = list(range(264))
    random.shuffle(order)
    stored = permuted(packed_rows(264), torch.tensor(order))
    assert red(play_layout("tp4-cp2-sp", TINY, stored, canonical(264))) == set()


@settings(max_examples=6)
@given(st.integers(0, 264), st.integers(1, 70))
@example(at=264, count=56)  # to a multiple of 64, as padded pipelines do
def test_padding_rows_give_the_same_bytes(at, count):
    stored = padded(packed_rows(264), at, count)
    assert red(play_layout("tp2-cp2-sp", TINY, stored, canonical(264))) == set()


@pytest.mark.parametrize("layout", ("tp4-cp2-sp", "tp2-cp3"))
def test_keyframe_rows_with_three_timesteps(layout):
    packed = pack(KEYFRAMES)
    assert len(packed.timestep) == 3
    expected = canonical_block(TINY, packed, SMALL_BLOCKS)
    assert red(play_layout(layout, TINY, packed, expected, SMALL_BLOCKS)) == set()


def test_two_timesteps_are_both_in_the_job():
    packed = packed_rows(264)
    assert len(packed.timestep) == 2
    assert packed.timestep_indices.unique().tolist() == [0, 1]


def test_repeated_runs_give_the_same_bytes():
    again = canonical_block(TINY, packed_rows(264))
    assert all(torch.equal(again[key], value) for key, value in canonical(264).items())
