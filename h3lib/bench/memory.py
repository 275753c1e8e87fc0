"""Memory of one rank's block by layout: `python -m h3lib.bench.memory --out FILE`.

    peak        allocated bytes of one forward + backward, the most at a time
    saved       what the forward leaves behind for the backward, its result aside
    gradients   of the rank's parameters, all there at the end

All above weights and inputs, of the rank that needs most, without a trace. Ranks share GPUs if
there are fewer: an allocator is a process's own, so this is no matter. Shared buffers of the peer
tree are counted apart; they do not grow with rows. `saved_parts` is the closed form of what is
saved. diffusers' eager block under autograd is measured beside the layout of one rank.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from h3lib.bench.block import CUDNN, EAGER, SDPA, Case
from h3lib.bench.collectives import start_ranks
from h3lib.bench.measure import environment
from h3lib.contract import PUBLISHED, ModelSize, model_size
from h3lib.layout import Layout, Ownership
from h3lib.model.block import Block
from h3lib.model.inputs import BlockInputs, block_inputs, block_weights
from h3lib.model.packing import job_for_rows, pack
from h3lib.model.weights import SyntheticWeights
from h3lib.ops.backend import load_backend
from h3lib.parallel.gloo import GlooWorld
from h3lib.parallel.launch import die_with_launcher
from h3lib.parallel.levels import Levels
from h3lib.parallel.mesh import build_mesh, mesh_groups
from h3lib.parallel.peer import CAPACITY_BYTES
from h3lib.parallel.place import own_place
from h3lib.parallel.shard import SeqShard
from h3lib.provenance import git_commit

LAYOUTS = (
    "tp1", "tp2", "tp4", "tp8", "tp2-sp", "tp4-sp", "tp8-sp", "cp2", "cp4", "cp8", "tp2-cp4-sp",
    "tp4-cp2-sp",
)  # fmt: skip
ROWS = (14910, 37776)
TIMEOUT_S = 300.0
BF16, FP32 = 2, 4
Bytes = dict[str, int]
Forward = Callable[[], Tensor]
Backward = Callable[[Tensor], Sequence[Tensor]]


def measured(forward: Forward, backward: Backward) -> Bytes:
    """Bytes of one forward, whose result `backward` is given; that returns parameter gradients.

    The first forward and backward are for kernels, plans and caches, and are not measured.
    """
    backward(forward())
    before = _allocated()
    torch.cuda.reset_peak_memory_stats()
    out = forward()
    saved = _allocated() - before - out.numel() * out.element_size()
    forward_peak = torch.cuda.max_memory_allocated() - before
    gradients = backward(out)
    torch.cuda.synchronize()
    return {
        "peak": torch.cuda.max_memory_allocated() - before,
        "forward_peak": forward_peak,
        "saved": saved,
        "gradients": sum(g.numel() * g.element_size() for g in gradients),
    }


def _allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def block_bytes(block: Block, given: BlockInputs) -> Bytes:
    """`measured` of one of this project's blocks."""

    def backward(_: Tensor) -> Sequence[Tensor]:
        return [*block.backward(given.dout).parameters.values()]

    return measured(lambda: block.forward(given.x, given.temb, given.rows), backward)


def diffusers_bytes(rows: int) -> Bytes:
    """`measured` of diffusers' eager block under autograd, SDPA cuDNN."""
    case = Case(rows)
    module, given = case.theirs[EAGER], case.given
    parameters = [*module.parameters()]
    leaves = [case.x, case.temb, *parameters]

    def forward() -> Tensor:
        return module(case.x, case.temb, given.rows.table_rows, case.rotary)

    def backward(out: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(out, leaves, given.dout[None])[2:]

    with sdpa_kernel(SDPA[CUDNN]):
        return measured(forward, backward)


def saved_parts(layout: Layout, rows: int, size: ModelSize | None = None) -> Bytes:
    """Closed form of what the rank with most rows saves, BF16 tensors alone, by where it is saved.

    K and V of other ranks' rows are apart: a ring that meets shards in order saves none of them.
    """
    size = size or model_size("full")
    owner, tp = Ownership.of(layout, rows, PUBLISHED), layout.tp
    shard, own = _most(owner.shard_row_cuts()), _most(owner.row_cuts())
    heads, ffn = size.inner_dim // tp, size.ffn_dim // tp
    return {
        "residual stream": BF16 * 3 * own * size.hidden_size,  # after attention, and both results
        "inputs of products": BF16 * 2 * shard * size.hidden_size,
        "heads": BF16 * 6 * shard * heads,  # q, k before the norm and after; v; out
        "feed-forward": BF16 * 3 * shard * ffn,
        "K and V of other rows": BF16 * 2 * rows * heads if layout.cp > 1 else 0,
    }


def gathered_in_backward(layout: Layout, rows: int, size: ModelSize | None = None) -> int:
    """Bytes of Q, dO, log-sum-exp and delta of all rows, which dK and dV are made from; 0 if
    nothing is gathered."""
    size = size or model_size("full")
    if layout.cp == 1:
        return 0
    width, heads = size.inner_dim // layout.tp, size.num_attention_heads // layout.tp
    return rows * (2 * BF16 * width + 2 * FP32 * heads)


def _most(cuts: tuple[int, ...]) -> int:
    return max(b - a for a, b in zip(cuts, cuts[1:], strict=False))


class Ranks:
    """One rank of the benchmark: a world whose groups are those of every layout."""

    def __init__(self, layouts: Sequence[Layout]):
        groups = dict.fromkeys(group for layout in layouts for group in mesh_groups(layout))
        self.transports = dict.fromkeys(groups, "peer")
        self.world = GlooWorld(list(groups), TIMEOUT_S)
        self.size, self.source = model_size("full"), SyntheticWeights(model_size("full"), 0, "cuda")

    def measure(self, layout: Layout, rows: int) -> dict[str, object]:
        """A line of the report; ranks that the layout does not have wait."""
        mine = None
        if self.world.rank < layout.num_ranks:
            levels = Levels(self.world, self.transports)
            owner = Ownership.of(layout, rows, PUBLISHED)
            mesh = build_mesh(layout, self.world.rank, levels)
            shard = SeqShard(owner, self.world.rank, mesh)
            weights = block_weights(self.size, self.source, shard)
            packed = pack(job_for_rows(rows)).to("cuda")
            given = block_inputs(self.size, self.source, packed, shard, seed=0)
            mine = block_bytes(Block(self.size, shard, weights, "triton"), given)
            mine["weights"] = sum(w.numel() * w.element_size() for w in weights.values())
            mine["shared_buffers"] = 2 * CAPACITY_BYTES * len(levels.opened)  # two slots a group
            levels.close()
        return {"block": "h3lib", "layout": layout.name, "rows": rows, **self._most_of(mine)}

    def measure_diffusers(self, rows: int) -> dict[str, object]:
        """Theirs, on rank 0."""
        mine = diffusers_bytes(rows) if self.world.rank == 0 else None
        return {"block": "diffusers eager", "layout": "tp1", "rows": rows, **self._most_of(mine)}

    def _most_of(self, mine: Bytes | None) -> Bytes:
        torch.cuda.empty_cache()
        ranks = [found for found in self.world.gather_objects(mine) if found is not None]
        return {name: max(found[name] for found in ranks) for name in ranks[0]}


def rank_main(options: argparse.Namespace) -> None:
    """A rank: measure; rank 0 writes the report after every line."""
    die_with_launcher()
    torch.cuda.set_device(own_place().rank % torch.cuda.device_count())
    load_backend("triton", "cuda")
    layouts = [Layout.parse(name) for name in options.layouts]
    ranks, found = Ranks(layouts), []

    def keep(line: dict[str, object], complete: bool = False) -> None:
        found.append(line)
        if ranks.world.rank:
            return
        print(line, flush=True)
        content = {
            "environment": environment() | {"commit": git_commit() or "unknown"},
            "size": ranks.size.name,
            "ranks": ranks.world.size,
            "gpus": torch.cuda.device_count(),
            "measurements": found,
            "complete": complete,
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n")

    for rows in options.rows:
        keep(ranks.measure_diffusers(rows))
    cells = [(layout, rows) for layout in layouts for rows in options.rows]
    for layout, rows in cells:
        keep(ranks.measure(layout, rows), complete=(layout, rows) == cells[-1])
    ranks.world.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    options = parser.parse_args()
    if own_place() is not None:
        rank_main(options)
        return
    most = max(Layout.parse(name).num_ranks for name in options.layouts)
    names = ["--layouts", *options.layouts, "--rows", *map(str, options.rows)]
    start_ranks("h3lib.bench.memory", ["--out", str(options.out), *names], most)


if __name__ == "__main__":
    main()
