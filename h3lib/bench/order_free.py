"""The order-free all-reduce beside the tree: bits, error, bytes.

    python -m h3lib.bench.order_free --out reports/cpu/order-free.json

Leaves are those of the two row-parallel products of a block (to_out and ff-down), eight feature
units of random rows; the same with one output channel a thousand times larger, as models have them.
Ranks own 1, 2, 4 or 8 units each and add in several orders. Nothing is timed here: that needs
a GPU for each rank.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import torch
from torch import Tensor

from h3lib.bench.command import write_measured
from h3lib.compare import different_elements
from h3lib.contract import PUBLISHED, ModelSize, model_size
from h3lib.model.weights import digest, synthetic_rows
from h3lib.ops.gemm import chain
from h3lib.ops.tree import tree_sum
from h3lib.parallel.order_free import (
    CONTRACT_ID,
    from_integers,
    order_free_all_reduce,
    scale_of,
    to_integers,
)
from h3lib.report import environment, machine_names

ROWS, SIZE, NUM_ORDERS = 65, "small", 24
WORLDS = (1, 2, 4, 8)


def unit_leaves(product: str, size: ModelSize, rows: int, outlier: float = 1.0) -> Tensor:
    """FP32 leaves `[8, rows, hidden]` of a row-parallel product of random operands.

    `outlier` multiplies the weights of output channel 0.
    """
    width = {"to_out": size.inner_dim, "ff-down": size.ffn_dim}[product]
    numbers = torch.arange(max(rows, size.hidden_size))
    x = synthetic_rows(f"{product} x", 0, numbers[:rows], width, torch.bfloat16)
    w = synthetic_rows(f"{product} w", 0, numbers[: size.hidden_size], width, torch.bfloat16)
    w[0] *= outlier
    units = PUBLISHED.num_units
    xs, ws = (t.view(len(t), units, width // units).transpose(0, 1) for t in (x, w))
    return chain(xs, ws.transpose(1, 2))


def tree_root(leaves: Tensor) -> Tensor:
    """FP32 root of the published tree."""
    return tree_sum(lambda s: leaves[s.start] if len(s) == 1 else None, range(len(leaves)))


def integers_by_ranks(leaves: Tensor, world: int, order: tuple[int, ...]) -> Tensor:
    """What ranks that own 8 / world units each give, their integers added in `order`."""
    scale = scale_of(leaves.abs().amax(), len(leaves))
    parts = to_integers(leaves, scale).chunk(world)
    total = torch.zeros_like(parts[0][0])
    for rank in order:
        total = total + parts[rank].sum(0, dtype=torch.int32)
    return from_integers(total, scale)


def floats_by_ranks(leaves: Tensor, world: int, order: tuple[int, ...]) -> Tensor:
    """The same with FP32 partials: an ordinary all-reduce."""
    parts = leaves.chunk(world)
    total = torch.zeros_like(parts[0][0])
    for rank in order:
        total = total + parts[rank].sum(0)
    return total


def orders(world: int) -> list[tuple[int, ...]]:
    """All orders of few ranks, a seeded choice of many."""
    if world <= 4:
        return list(itertools.permutations(range(world)))
    ranks = random.Random(0)
    return [tuple(ranks.sample(range(world), world)) for _ in range(NUM_ORDERS)]


def distinct(leaves: Tensor, by_ranks: Callable[[Tensor, int, tuple], Tensor]) -> dict[str, int]:
    """How many different FP32 results the orders give, by number of ranks, and over all."""
    found = {w: {digest(by_ranks(leaves, w, o)) for o in orders(w)} for w in WORLDS}
    return {**{str(w): len(d) for w, d in found.items()}, "all": len(set.union(*found.values()))}


def errors(leaves: Tensor, root: Tensor) -> dict[str, float]:
    """||root - exact|| / ||exact|| in FP64, before and after rounding to BF16, and the largest
    error of an element in parts of the exact element."""
    exact = leaves.double().sum(0)

    def relative(value: Tensor) -> float:
        return float((value.double() - exact).norm() / exact.norm())

    parts = ((root.double() - exact) / exact).abs()
    return {
        "fp32": relative(root),
        "bf16": relative(root.bfloat16()),
        "largest_element": float(parts[exact != 0].max()),
    }


def bytes_sent(world: int) -> dict[str, float]:
    """Bytes that a rank sends for one element of the result, two-shot: reduce-scatter, gather."""
    share = (world - 1) / world
    return {
        "tree, FP32 roots, BF16 result": share * (4 + 2),
        "order-free, int32": share * (4 + 4),
        "order-free, int32, BF16 result": share * (4 + 2),
    }


def measure(rows: int = ROWS, size_name: str = SIZE) -> dict:
    """The content of the report."""
    size, cases = model_size(size_name), []
    for product, outlier in itertools.product(("to_out", "ff-down"), (1.0, 1000.0)):
        leaves = unit_leaves(product, size, rows, outlier)
        free = order_free_all_reduce(leaves, len(leaves), torch.float32)
        tree = tree_root(leaves)
        unlike = different_elements(free.bfloat16().view(-1), tree.bfloat16().view(-1))
        cases.append(
            {
                "product": product,
                "outlier": outlier,
                "elements": tree.numel(),
                "distinct_order_free": distinct(leaves, integers_by_ranks),
                "distinct_fp32": distinct(leaves, floats_by_ranks),
                "orders": {str(world): len(orders(world)) for world in WORLDS},
                "error_order_free": errors(leaves, free),
                "error_tree": errors(leaves, tree),
                "bf16_unlike_tree": int(unlike.sum()),
                "sha256": digest(free),
            }
        )
    return {
        "contract": CONTRACT_ID,
        "size": size_name,
        "rows": rows,
        "environment": environment("cpu", machine_names(["here"])[0]),
        "cases": cases,
        "bytes_per_element": {str(world): bytes_sent(world) for world in WORLDS},
        "time": "not run: needs a GPU for each rank",
        "complete": True,
    }


def main() -> None:
    write_measured(__doc__, measure, rows=ROWS, size=SIZE)


if __name__ == "__main__":
    main()
