"""Partial sums that cross nodes in fewer bytes: error, and whether the result knows the layout.

    python -m h3lib.bench.compression --out reports/cpu/compression.json

Leaves are those of `h3lib.bench.order_free`: the row-parallel products of a block, eight feature
units. Each is written in a format and read back, in one of two places:

    node   what a node sends to another: its maximal subtree roots. A node keeps its own in FP32, so
           which values are rounded depends on the layout, and nodes differ among themselves
    unit   every leaf, in every layout, also where it does not leave the GPU

Block formats have one power-of-two scale for 128 elements in a row of the result, an exponent of
one byte. Bytes are those of one root of one element; an error is null where a value overflowed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from h3lib.bench.command import write_measured
from h3lib.bench.order_free import errors, unit_leaves
from h3lib.compare import different_elements
from h3lib.contract import model_size, subtree_roots
from h3lib.layout import Layout
from h3lib.model.weights import digest
from h3lib.ops.tree import partial_roots, root_nodes, tree_sum
from h3lib.report import environment, machine_names

ROWS, SIZE, BLOCK = 65, "small", 128
LAYOUTS = ("tp2", "tp8", "tp4-local2", "tp8-local4", "tp8-local2")


def block_scaled(bits: int) -> Callable[[Tensor], Tensor]:
    """Signed integers of `bits` bits, a power-of-two scale for each block of `BLOCK` elements."""
    largest = 2 ** (bits - 1) - 1

    def rounded(x: Tensor) -> Tensor:
        blocks = x.double().unflatten(-1, (-1, BLOCK))
        top = blocks.abs().amax(-1, keepdim=True)
        step = torch.exp2(torch.ceil(torch.log2(top.clamp_min(2.0**-140) / largest)))
        return (torch.round(blocks / step).clamp(-largest, largest) * step).flatten(-2).float()

    return rounded


FORMATS: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "FP32": (4, lambda x: x),
    "BF16": (2, lambda x: x.bfloat16().float()),
    "FP16": (2, lambda x: x.half().float()),
    "int16 blocks": (2 + 1 / BLOCK, block_scaled(16)),
    "int8 blocks": (1 + 1 / BLOCK, block_scaled(8)),
}


def node_cuts(layout: Layout, num_units: int) -> list[int]:
    """Unit cuts of the nodes of one tensor-parallel group."""
    units_a_node = num_units * (layout.local_size or layout.tp) // layout.tp
    return list(range(0, num_units + 1, units_a_node))


def at_nodes(leaves: Tensor, layout: Layout, rounded: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The FP32 root on each node: its own subtree roots as they are, the others' through the
    format."""
    cuts = node_cuts(layout, len(leaves))
    spans = list(itertools.pairwise(cuts))
    roots = [partial_roots(leaves.__getitem__, range(*span), len(leaves)) for span in spans]
    return [
        tree_sum(
            root_nodes([r if i == node else rounded(r) for i, r in enumerate(roots)], cuts).get,
            range(len(leaves)),
        )
        for node in range(len(spans))
    ]


def at_units(leaves: Tensor, layout: Layout, rounded: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The FP32 root on each node when every leaf goes through the format, own ones too."""
    return at_nodes(rounded(leaves), layout, lambda x: x)


def measure(rows: int = ROWS, size_name: str = SIZE) -> dict:
    """The content of the report."""
    size, cases = model_size(size_name), []
    for product, outlier in itertools.product(("to_out", "ff-down"), (1.0, 1000.0)):
        leaves = unit_leaves(product, size, rows, outlier)
        for name, (num_bytes, rounded) in FORMATS.items():
            for where, at in (("node", at_nodes), ("unit", at_units)):
                found = {n: at(leaves, Layout.parse(n), rounded) for n in LAYOUTS}
                results = [root for roots in found.values() for root in roots]
                first = results[0].bfloat16().reshape(-1)
                unlike = [different_elements(r.bfloat16().reshape(-1), first) for r in results]
                finite = all(bool(root.isfinite().all()) for root in results)
                worst = max((errors(leaves, r) for r in results), key=lambda e: e["fp32"])
                cases.append(
                    {
                        "product": product,
                        "outlier": outlier,
                        "format": name,
                        "where": where,
                        "bytes": num_bytes,
                        "distinct": len({digest(root) for root in results}),
                        "distinct_by_layout": {
                            n: len({digest(root) for root in roots}) for n, roots in found.items()
                        },
                        "bf16_unlike": int(torch.stack(unlike).any(0).sum()),
                        "elements": first.numel(),
                        "error": worst if finite else None,
                    }
                )
    return {
        "size": size_name,
        "rows": rows,
        "layouts": {name: roots_sent(Layout.parse(name)) for name in LAYOUTS},
        "environment": environment("cpu", machine_names(["here"])[0]),
        "cases": cases,
        "complete": True,
    }


def roots_sent(layout: Layout, num_units: int = 8) -> dict[str, int]:
    """Roots of one element that the nodes of a group send to each other, in both places."""
    cuts = node_cuts(layout, num_units)
    spans = list(itertools.pairwise(cuts))
    others = len(spans) - 1
    roots = sum(len(subtree_roots(*span, num_units)) for span in spans)
    return {"node": others * roots, "unit": others * num_units}


def main() -> None:
    write_measured(__doc__, measure, rows=ROWS, size=SIZE)


if __name__ == "__main__":
    main()
