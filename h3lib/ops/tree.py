"""The tree: the one place where partial sums are added.

Leaves 0..n-1 (n a power of two) are added in the balanced tree

    ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))

by IEEE adds of the accumulator, the lower index on the left. A rank reduces the leaves it owns to
its maximal subtree roots; whoever holds the roots of all ranks evaluates the rest. The result is
rounded once, after the root.

A leaf is a chain from +0 and is never -0.0, so an absent leaf and a leaf of +0 give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from h3lib.contract import OperandError, subtree_roots


def tree_sum(node: Callable[[range], Tensor | None], span: range) -> Tensor | None:
    """Value of the subtree over `span` = left + right, down to the nodes that `node` knows.

    `node(span)` gives a leaf or an already finished subtree, None where it has none.

    **Order:** the balanced tree, lower index on the left; a node with one child is that child.
    """
    value = node(span)
    if value is not None or len(span) == 1:
        return value
    middle = span.start + len(span) // 2
    left = tree_sum(node, range(span.start, middle))
    right = tree_sum(node, range(middle, span.stop))
    if left is None or right is None:
        return right if left is None else left
    return left + right


def partial_roots(leaf: Callable[[int], Tensor], owned: range, num_leaves: int) -> Tensor:
    """Maximal subtree roots of the owned leaves, `[R, ...]`, ascending; `leaf(i)` makes leaf i.

    Leaves are made one at a time, so at most log2(n) unfinished sums are alive.

    **Order:** `tree_sum` in each root. **Rounds:** nothing.
    """
    return torch.stack(
        [
            tree_sum(lambda span: leaf(span.start) if len(span) == 1 else None, root)
            for root in subtree_roots(owned.start, owned.stop, num_leaves)
        ]
    )


def stacked_roots(leaves: Tensor, owned: range, num_leaves: int) -> Tensor:
    """`partial_roots` of leaves `[len(owned), ...]`, stacked: a level of the tree at a time."""

    def root(span: range) -> Tensor:
        nodes = leaves[span.start - owned.start : span.stop - owned.start]
        while len(nodes) > 1:
            nodes = nodes[0::2] + nodes[1::2]
        return nodes[0]

    return torch.stack([root(s) for s in subtree_roots(owned.start, owned.stop, num_leaves)])


def root_nodes(roots: Sequence[Tensor], cuts: Sequence[int], first: int = 0) -> dict[range, Tensor]:
    """Nodes of the tree from the maximal subtree roots of owners `first`, `first + 1`, ...

    `roots[i]` is `[R_i, ...]` for the leaves `[cuts[first + i], cuts[first + i + 1])`; the last cut
    is the number of leaves. `tree_sum(nodes.get, span)` finishes them.

    **Raises:** OperandError if an owner's roots are not those of its leaves.
    """
    nodes = {}
    for owner, values in enumerate(roots, start=first):
        spans = subtree_roots(cuts[owner], cuts[owner + 1], cuts[-1])
        if len(values) != len(spans):
            raise OperandError(
                f"subtree roots of owner {owner}", len(values), f"{len(spans)}: {spans}"
            )
        nodes.update(zip(spans, values, strict=True))
    return nodes


def in_row_tree(x: Tensor) -> Tensor:
    """Sum over the last dim, keeping it with size 1: pad with +0 to a power of two, add halves.

    **Order:** `x[:p/2] + x[p/2:]` until one is left; it depends on the width alone.
    """
    width = 1 << (x.shape[-1] - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    while x.shape[-1] > 1:
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x
