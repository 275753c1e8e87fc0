"""Memory of one rank of a layout, without the others: `rank_memory("tp4-cp2-sp", 14910)`.

Nothing of what a rank allocates depends on the values that its peers send, nor on whether they
share its GPU, so a rank with its communication left out has the memory of the rank in its layout.
What the peer tree shares is outside: two slots of `CAPACITY_BYTES` for each group of a rank.
"""

from __future__ import annotations

import gc

import torch

from h3lib.bench.left_out import LeftOut
from h3lib.contract import PUBLISHED, model_size
from h3lib.layout import Layout, Ownership
from h3lib.model.block import Block
from h3lib.model.inputs import block_inputs, block_weights
from h3lib.model.packing import job_for_rows, pack
from h3lib.model.weights import SyntheticWeights
from h3lib.parallel.mesh import build_mesh
from h3lib.parallel.shard import SeqShard


def rank_memory(
    layout: str, rows: int, size: str = "full", rank: int | None = None, backend: str = "triton"
) -> dict[str, object]:
    """Bytes of one untraced forward and backward of a block on one rank, on the current GPU.

    `rank`: by default the one with the most rows. weight_bytes: its parameters; input_bytes: x,
    dout, temb and metadata of its rows; saved_bytes: what is held between forward and backward,
    the output with it; peak_bytes: the most that is allocated, gradients with it. The last two are
    above weights and inputs.
    """
    parsed = Layout.parse(layout)
    owner = Ownership.of(parsed, rows, PUBLISHED)
    if rank is None:
        places = range(parsed.num_ranks)
        rank = max(places, key=lambda r: len(_shard(owner, r).shard_rows))
    shard = _shard(owner, rank)
    start = _allocated()
    source = SyntheticWeights(model_size(size), 0, "cuda")
    weights = block_weights(model_size(size), source, shard)
    with_weights = _allocated()
    packed = pack(job_for_rows(rows)).to("cuda")
    given = block_inputs(model_size(size), source, packed, shard, 0)
    del packed
    block = Block(model_size(size), shard, weights, backend)
    before = _allocated()
    for _ in range(2):  # the first launch also makes tables that stay
        held = []  # output and gradients count
        first = _allocated()
        torch.cuda.reset_peak_memory_stats()
        held.append(block.forward(given.x, given.temb, given.rows))
        saved = _allocated() - first
        held.append(block.backward(given.dout))
        peak = torch.cuda.max_memory_allocated() - first
    return {
        "layout": parsed.name, "rows": rows, "size": size, "rank": rank,
        "weight_bytes": with_weights - start, "input_bytes": before - with_weights,
        "saved_bytes": saved, "peak_bytes": peak,
    }  # fmt: skip


def _shard(owner: Ownership, rank: int) -> SeqShard:
    def connect(group: tuple[int, ...], rank: int) -> LeftOut:
        return LeftOut(group.index(rank), len(group), overlaps=True)

    return SeqShard(owner, rank, build_mesh(owner.layout, rank, connect))


def _allocated() -> int:
    torch.cuda.synchronize()
    gc.collect()
    return torch.cuda.memory_allocated()
