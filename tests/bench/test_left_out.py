"""A rank without its peers computes the same shapes; what it leaves out can be asked for alone."""

import pytest
import torch
from block_support import TINY, packed_rows

from h3lib.bench.layouts import LAYOUTS
from h3lib.bench.left_out import SETS, Buffers, LeftOut, Noted, new_buffer
from h3lib.bench.plain import LeftOutAxis
from h3lib.contract import PUBLISHED
from h3lib.layout import Layout, Ownership, region_shape
from h3lib.model.block import Block
from h3lib.model.inputs import block_inputs, block_weights
from h3lib.model.weights import SyntheticWeights
from h3lib.parallel.mesh import build_mesh
from h3lib.parallel.shard import SeqShard, parameter_region
from h3lib.parallel.transport import ThreadWorld

ROWS = 264


def _results(layout: Layout, rank: int, connect) -> dict[str, torch.Tensor]:
    """Output and gradients of one rank's untraced block."""
    owner = Ownership.of(layout, ROWS, PUBLISHED)
    shard = SeqShard(owner, rank, build_mesh(layout, rank, connect))
    source, packed = SyntheticWeights(TINY, 0), packed_rows(ROWS)
    given = block_inputs(TINY, source, packed, shard, 0)
    block = Block(TINY, shard, block_weights(TINY, source, shard))
    out = block.forward(given.x, given.temb, given.rows)
    found = block.backward(given.dout)
    return {"out": out, "dx": found.dx, "dtemb": found.dtemb, **found.parameters}


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_one_rank_alone_has_the_shapes_of_the_rank_in_its_layout(name, overlaps, monkeypatch):
    monkeypatch.setattr("h3lib.parallel.overlap.MIN_CHUNK", 1 << 10)  # elements; tiny has few
    layout = Layout.parse(name)
    rank = layout.num_ranks - 1

    def connect(group, r):
        return LeftOut(group.index(r), len(group), overlaps=overlaps)

    found = _results(layout, rank, connect)
    owner, tp_rank = Ownership.of(layout, ROWS, PUBLISHED), layout.place(rank)[1]
    whole = _results(Layout(), 0, lambda group, r: LeftOut(0, 1))
    rows = owner.slice_row_cuts(layout.cp - 1)[-2:] if layout.sp else owner.shard_row_cuts()[-2:]
    for name, value in found.items():
        shape = tuple(whole[name].shape)
        if name in ("out", "dx"):
            assert value.shape == (rows[1] - rows[0], shape[1])
        elif name == "dtemb":
            assert value.shape == shape
        else:
            assert value.shape == region_shape(parameter_region(name, shape, owner, tp_rank))


def test_notes_ask_again_for_what_was_asked_for_and_change_no_byte():
    layout = Layout.parse("tp2-cp2-sp")

    def rank_main(rank: int) -> tuple[dict, dict, int]:
        notes = []
        plain = _results(layout, rank, world.connect)
        noted = _results(
            layout, rank, lambda group, r: Noted(world.connect(group, r), notes, Buffers())
        )
        for again in notes:
            again()
        return plain, noted, len(notes)

    world = ThreadWorld(layout.num_ranks)
    for plain, noted, count in world.run(rank_main):
        assert count > 10
        for name, value in plain.items():
            assert torch.equal(value.view(torch.uint8), noted[name].view(torch.uint8)), name


def test_buffers_are_given_in_turn_and_stay():
    give = Buffers()
    cpu = torch.device("cpu")
    given = [give(5, torch.bfloat16, cpu) for _ in range(2 * SETS)]
    assert given[0].data_ptr() != given[1].data_ptr()
    assert [x.data_ptr() for x in given[:SETS]] == [x.data_ptr() for x in given[SETS:]]
    assert give(5, torch.float32, cpu).dtype == torch.float32


def test_a_left_out_axis_moves_and_adds_nothing():
    axis, x = LeftOutAxis(1, 2, None, new_buffer), torch.arange(6.0).view(2, 3)
    assert axis.sum(x) is x and axis.gather(x).shape == (4, 3)
    assert torch.equal(axis.scatter_sum(x), x[1:])
