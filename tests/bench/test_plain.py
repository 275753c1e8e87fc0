"""The price's other side must be right: diffusers' block in layouts, beside the one block.

This file is also what the ranks run: `python test_plain.py LAYOUT FOLDER`.
"""

import sys
import time
from pathlib import Path

import pytest
import torch
from block_support import TINY, packed_rows
from rank_support import Ranks

from h3lib.bench.plain import Axis, PlainBlock
from h3lib.contract import PUBLISHED
from h3lib.layout import Layout, Ownership
from h3lib.model.block import BLOCK_PREFIX, block_parameters
from h3lib.model.inputs import BlockInputs, block_inputs
from h3lib.model.weights import SyntheticWeights
from h3lib.parallel.gloo import GlooWorld
from h3lib.parallel.mesh import mesh_groups
from h3lib.parallel.nccl import NcclLibrary
from h3lib.parallel.shard import SeqShard, parameter_region

ROWS, LAYOUTS = 264, ("tp2", "tp2-sp", "cp2", "tp2-cp2-sp", "tp2-cp2")
ALONE = Axis(0, 1, None)


def _given(layout: Layout, rank: int) -> tuple[BlockInputs, dict]:
    """All rows and this rank's weights, in FP32."""
    source, packed = SyntheticWeights(TINY, 3), packed_rows(ROWS)
    given = block_inputs(TINY, source, packed, SeqShard.canonical(ROWS), 5, torch.float32)
    owner, tp_rank = Ownership.of(layout, ROWS, PUBLISHED), layout.place(rank)[1]
    weights = {
        name: source.read(
            BLOCK_PREFIX + name, parameter_region(name, shape, owner, tp_rank)
        ).float()
        for name, (shape, _) in block_parameters(TINY).items()
    }
    return given, weights


def _run(layout: Layout, rank: int, tp: Axis, cp: Axis, compiled: bool) -> dict:
    given, weights = _given(layout, rank)
    block = PlainBlock(TINY, layout, tp, cp, weights)
    call = block.caller(block.cut(given), True, compiled)
    call()
    return call()


@pytest.fixture(scope="module")
def alone() -> dict:
    return _run(Layout.parse("tp1"), 0, ALONE, ALONE, False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plain_layout_gives_what_one_block_gives(layout, alone, tmp_path):
    """FP32 sums of at most 512 terms in another order: about 1e-6 of a tensor's size."""
    parsed = Layout.parse(layout)
    ranks = Ranks(__file__, layout, parsed.num_ranks, parsed.num_ranks, tmp_path)
    try:
        _, found = ranks.wait(time.monotonic() + 240)
    finally:
        ranks.close()
    owner = Ownership.of(parsed, ROWS, PUBLISHED)
    shapes = block_parameters(TINY)
    for rank, mine in enumerate(found):
        cp_rank, tp_rank = parsed.place(rank)
        assert mine.keys() == alone.keys()
        for name, value in mine.items():
            whole = alone[name]
            if name in ("out", "dx"):
                whole = whole.chunk(parsed.cp)[cp_rank]
                whole = whole.chunk(parsed.tp)[tp_rank] if parsed.sp else whole
            elif name in shapes:
                for dim, ranges in enumerate(
                    parameter_region(name, shapes[name][0], owner, tp_rank)
                ):
                    at = torch.cat([torch.arange(part.start, part.stop) for part in ranges])
                    whole = whole.index_select(dim, at)
            assert value.shape == whole.shape, name
            error = float((value - whole).norm() / whole.norm())
            assert error < 1e-5, (name, rank, error)


def test_rows_that_cannot_be_cut_evenly_are_filled_up_with_the_last():
    layout = Layout.parse("cp5")
    given, weights = _given(layout, 0)
    last = PlainBlock(TINY, layout, ALONE, Axis(4, 5, None), weights).cut(given)
    assert last.x.shape[0] == last.rows.cos.shape[0] == last.rows.table_rows.shape[0] == 53
    assert torch.equal(last.x[-2], given.x[-1]) and torch.equal(last.x[-1], given.x[-1])
    assert torch.equal(last.dout[-2], given.dout[-1]) and not last.dout[-1].any()


def _rank_main(name: str, folder: Path) -> None:
    layout = Layout.parse(name)
    groups = mesh_groups(layout)
    world = GlooWorld(groups, 120.0, data_groups=groups, data_backend="gloo")
    tp, cp = (tuple(f(world.rank)) for f in (layout.tp_group, layout.cp_group))

    def axis(group):
        library = NcclLibrary(world, list(group)) if len(group) > 1 else None
        return Axis(group.index(world.rank), len(group), library)

    found = _run(layout, world.rank, axis(tp), axis(cp), compiled=False)
    torch.save(found, folder / f"{world.rank}.pt")
    world.close()


if __name__ == "__main__":
    _rank_main(sys.argv[1], Path(sys.argv[2]))
