"""The closed form of what a block saves is what its parts hold after a forward."""

import pytest
import torch

from h3lib.bench.memory import BF16, FP32, gathered_in_backward, saved_parts
from h3lib.contract import PUBLISHED, SIZES
from h3lib.layout import Layout, Ownership
from h3lib.model.block import Block
from h3lib.model.inputs import block_inputs, block_weights
from h3lib.model.packing import job_for_rows, pack
from h3lib.model.weights import SyntheticWeights
from h3lib.parallel.mesh import build_mesh
from h3lib.parallel.shard import SeqShard
from h3lib.parallel.transport import ThreadWorld

TINY, ROWS = SIZES["tiny"], 1024  # every rank has equally many rows


def _held(part: object, seen: dict[int, torch.Tensor]) -> None:
    """Tensors that a part of the block and its parts hold, once each."""
    for name, value in vars(part).items():
        if name == "ctx":
            continue
        for item in value.values() if isinstance(value, dict) else (value,):
            if isinstance(item, torch.Tensor):
                seen[item.untyped_storage().data_ptr()] = item
            elif type(item).__module__.startswith("h3lib.model."):
                _held(item, seen)


def _saved_bytes(layout: Layout) -> int:
    """Of rank 0: BF16 tensors with a row for each row of its shard, its slice or all."""
    packed = pack(job_for_rows(ROWS))
    world, owner = ThreadWorld(layout.num_ranks), Ownership.of(layout, ROWS, PUBLISHED)

    def rank_main(rank: int) -> int:
        shard = SeqShard(owner, rank, build_mesh(layout, rank, world.connect))
        source, seen = SyntheticWeights(TINY, 0), {}
        given = block_inputs(TINY, source, packed, shard, 0)
        block = Block(TINY, shard, block_weights(TINY, source, shard))
        block.forward(given.x, given.temb, given.rows)
        _held(block, seen)
        for known in (given.x, given.rows.cos, given.rows.sin, given.rows.table_rows):
            seen.pop(known.untyped_storage().data_ptr(), None)
        rows = {len(shard.shard_rows), len(shard.slice_rows), ROWS}
        return sum(
            tensor.untyped_storage().nbytes()
            for tensor in seen.values()
            if tensor.dtype == torch.bfloat16 and len(tensor) in rows
        )

    return world.run(rank_main)[0]


@pytest.mark.parametrize("name", ["tp1", "tp2", "tp2-sp", "cp2", "tp4-cp2-sp"])
def test_what_is_saved_has_a_closed_form(name):
    layout = Layout.parse(name)
    assert _saved_bytes(layout) == sum(saved_parts(layout, ROWS, TINY).values())


def test_what_is_saved_of_one_rank_by_hand():
    d, a, f = TINY.hidden_size, TINY.inner_dim, TINY.ffn_dim
    assert sum(saved_parts(Layout(), 100, TINY).values()) == 100 * BF16 * (5 * d + 6 * a + 3 * f)


def test_only_context_parallelism_gathers():
    assert gathered_in_backward(Layout.parse("tp8-sp"), 100) == 0
    assert saved_parts(Layout.parse("tp8-sp"), 1024)["K and V gathered"] == 0
    heads, width = TINY.num_attention_heads, TINY.inner_dim
    found = gathered_in_backward(Layout.parse("cp4"), 100, TINY)
    assert found == 100 * 2 * (BF16 * width + FP32 * heads)
