"""Bytes that leave a node, by the shape of a two-dimensional mesh and the placement of its ranks.

    python -m h3lib.bench.mesh_traffic --out reports/model/mesh-traffic.json

Every message of a pass is listed as (source, destination, bytes) and counted; nothing is timed. A
rank (i, j) of an R x C mesh holds 1 / (R C) of the rows of Q, K, V and out (attention), or one
block of A and of B (product). Two patterns, both in steps between neighbours of a ring:

    attention   Q_i goes around mesh row i, and FP32 partials of out come back around it;
                K and V go around mesh column j
    cannon      blocks of A go around mesh rows, blocks of B around mesh columns, and a square
                mesh first skews both

Partial sums of out that cross ranks are not admissible under the contract (`h3-parallel-v1` gathers
K and V whole): this counts what other designs would send.

*Egress* of a node is what its GPUs send to other nodes; every GPU has a NIC of its own, and the
*busiest NIC* is the GPU that sends most to other nodes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

from h3lib.bench.command import write_measured
from h3lib.contract import LayoutError, model_size

GPUS_PER_NODE = 8
GPU_COUNTS = (16, 24, 32, 48, 64, 72, 96, 128, 144)
ROWS = 37776
BF16, FP32 = 2, 4
Message = tuple[int, int, int]
"""(source, destination, bytes); ranks are numbered i * C + j."""


def attention_messages(num_rows: int, num_columns: int, shard_rows: int) -> Iterator[Message]:
    """Every message of one attention forward over an R x C mesh, `full` widths."""
    width = model_size("full").inner_dim
    heads = model_size("full").num_attention_heads
    query = shard_rows * width * BF16
    partial = shard_rows * (width + heads) * FP32  # out before its division, and log-sum-exp
    yield from ring_messages(num_rows, num_columns, query + partial, 2 * query)


def cannon_messages(num_rows: int, num_columns: int, shard_rows: int) -> Iterator[Message]:
    """Every message of one square product whose blocks are as large as a shard of Q."""
    block = shard_rows * model_size("full").inner_dim * BF16
    if num_rows == num_columns:
        for i in range(num_rows):
            for j in range(num_columns):
                source = i * num_columns + j
                yield source, i * num_columns + (j - i) % num_columns, block
                yield source, (i - j) % num_rows * num_columns + j, block
    yield from ring_messages(num_rows, num_columns, block, block)


def ring_messages(
    num_rows: int, num_columns: int, row_bytes: int, column_bytes: int
) -> Iterator[Message]:
    """C - 1 steps to the left neighbour and R - 1 steps to the upper one, from every rank."""
    for i in range(num_rows):
        for j in range(num_columns):
            source = i * num_columns + j
            for _ in range(num_columns - 1):
                yield source, i * num_columns + (j - 1) % num_columns, row_bytes
            for _ in range(num_rows - 1):
                yield source, (i - 1) % num_rows * num_columns + j, column_bytes


PATTERNS: dict[str, Callable[[int, int, int], Iterator[Message]]] = {
    "attention": attention_messages,
    "cannon": cannon_messages,
}


def placements(num_rows: int, num_columns: int) -> dict[str, list[int]]:
    """The node of every rank, by the name of the placement; those that fit the mesh."""
    ranks, nodes = range(num_rows * num_columns), num_rows * num_columns // GPUS_PER_NODE
    by_column = [(r % num_columns) * num_rows + r // num_columns for r in ranks]
    shuffled = random.Random(0).sample(ranks, len(ranks))
    found = {
        "rows": [r // GPUS_PER_NODE for r in ranks],
        "columns": [r // GPUS_PER_NODE for r in by_column],
        "cyclic": [r % nodes for r in ranks],
        "random": [r // GPUS_PER_NODE for r in shuffled],
    }
    for height in (2, 4):
        width = GPUS_PER_NODE // height
        if num_rows % height == 0 and num_columns % width == 0:
            across = num_columns // width
            found[f"tiles {height}x{width}"] = [
                r // num_columns // height * across + r % num_columns // width for r in ranks
            ]
    return found


def traffic(messages: Iterator[Message], node: list[int]) -> dict:
    """Bytes sent in all, out of nodes in all, by the busiest node and by the busiest NIC."""
    by_node, by_gpu, total = Counter(), Counter(), 0
    for source, destination, num_bytes in messages:
        if source == destination:
            continue
        total += num_bytes
        if node[source] != node[destination]:
            by_node[node[source]] += num_bytes
            by_gpu[source] += num_bytes
    return {
        "total_bytes": total,
        "egress_bytes": sum(by_node.values()),
        "busiest_node_bytes": max(by_node.values(), default=0),
        "busiest_nic_bytes": max(by_gpu.values(), default=0),
    }


def mesh_shapes(num_gpus: int) -> list[tuple[int, int]]:
    """Every R x C with R C = num_gpus, flat ones first."""
    return [(r, num_gpus // r) for r in range(1, num_gpus + 1) if num_gpus % r == 0]


def count(gpu_counts: tuple[int, ...] = GPU_COUNTS, rows: int = ROWS) -> dict:
    """Every pattern, mesh and placement; the content of the report.

    **Raises:** LayoutError for a number of GPUs that is not whole nodes.
    """
    cells = []
    for num_gpus in gpu_counts:
        if num_gpus % GPUS_PER_NODE or num_gpus < 2 * GPUS_PER_NODE:
            accepted = f"multiples of {GPUS_PER_NODE} from {2 * GPUS_PER_NODE}"
            raise LayoutError("number of GPUs", num_gpus, accepted)
        shard_rows = -(-rows // num_gpus)
        for num_rows, num_columns in mesh_shapes(num_gpus):
            for place, node in placements(num_rows, num_columns).items():
                for name, pattern in PATTERNS.items():
                    found = traffic(pattern(num_rows, num_columns, shard_rows), node)
                    mesh = {"gpus": num_gpus, "mesh_rows": num_rows, "mesh_columns": num_columns}
                    cells.append({"pattern": name, **mesh, "placement": place, **found})
    return {
        "kind": "modelled: messages counted by enumeration, nothing timed",
        "rows": rows,
        "size": "full",
        "gpus_per_node": GPUS_PER_NODE,
        "cells": cells,
        "complete": True,
    }


def main() -> None:
    write_measured(__doc__, count, gpus=GPU_COUNTS, rows=ROWS)


if __name__ == "__main__":
    main()
