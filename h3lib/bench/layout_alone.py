"""Memory of one rank of a layout without its peers, both sides, in a process of its own.

It also compiles what the ranks of the layout will ask for, so that they find it done.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.nn.attention import sdpa_kernel

from h3lib.bench.block import peak_bytes
from h3lib.bench.layout_case import CUDNN, FEW_ROWS, FLASH, SDPA, SIZE
from h3lib.bench.plain import LeftOutAxis, PlainBlock
from h3lib.bench.rank_memory import rank_memory
from h3lib.contract import PUBLISHED
from h3lib.files import write_json
from h3lib.layout import Layout, Ownership
from h3lib.model.inputs import block_inputs, block_weights
from h3lib.model.packing import job_for_rows, pack
from h3lib.model.weights import SyntheticWeights
from h3lib.parallel.mesh import local_mesh
from h3lib.parallel.shard import SeqShard


def their_memory(layout: Layout, rows: int, rank: int, compiled: bool) -> dict[str, int]:
    """Peak of a forward and backward of their eager block on one rank, as `rank_memory`."""
    source, packed = SyntheticWeights(SIZE, 0, "cuda"), pack(job_for_rows(rows)).to("cuda")
    owner = Ownership.of(layout, rows, PUBLISHED)
    weights = block_weights(SIZE, source, SeqShard(owner, rank, local_mesh()))
    cp_rank, tp_rank = layout.place(rank)
    tp, cp = LeftOutAxis(tp_rank, layout.tp, None), LeftOutAxis(cp_rank, layout.cp, None)
    block = PlainBlock(SIZE, layout, tp, cp, weights)
    given = block.cut(block_inputs(SIZE, source, packed, SeqShard.canonical(rows), 0))
    with sdpa_kernel(SDPA[FLASH if rows <= FEW_ROWS else CUDNN]):
        peak = peak_bytes(block.caller(given, backward=True))
        for backward in (False, True) if compiled else ():
            block.caller(given, backward, compiled=True)()
    return {"theirs_peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layout", type=Layout.parse)
    parser.add_argument("out", type=Path)
    parser.add_argument("rows", type=int, nargs="+")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--compiled", type=int, nargs="*", default=())
    options = parser.parse_args()
    torch.cuda.set_device(options.device)
    lines = []
    for rows in options.rows:
        found = rank_memory(options.layout.name, rows)
        torch.cuda.empty_cache()
        torch._dynamo.reset()
        rank, compiled = found["rank"], rows in options.compiled
        found |= their_memory(options.layout, rows, rank, compiled)
        torch.cuda.empty_cache()
        lines.append(found | {"measured": "one rank alone"})
        write_json(options.out, {"memory": lines})


if __name__ == "__main__":
    main()
