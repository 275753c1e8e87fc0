"""The hierarchy: finish inside the node first, send slices of the node's roots between nodes.

A group holds the same local ranks on every node it touches. Each local rank finishes its slice of
every maximal subtree root of its node (there are several where the nodes do not cut the leaves at
subtrees), equal local ranks of all nodes exchange these slices, and the fixed adds finish. Sending
whole partials between nodes would cost `local_size` times more for the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3lib.contract import subtree_roots
from h3lib.ops.tree import root_nodes, tree_sum
from h3lib.parallel.collective import Collective, Cuts, even_slices, gather_parts, num_roots
from h3lib.parallel.transport import Transport


class HierarchicalCollective(Collective):
    """A group of `nodes.size` nodes with `local.size` ranks each, node-major.

    `local` joins the ranks of one node, `nodes` the equal local ranks of all nodes.
    """

    def __init__(self, local: Transport, nodes: Transport):
        self.local, self.nodes = local, nodes
        self.size = local.size * nodes.size
        self.rank = nodes.rank * local.size + local.rank

    def _slices(self, num_elements: int) -> list[tuple[int, int]]:
        """One slice a local rank, the same on every node: the last gather stays inside the node."""
        return even_slices(num_elements, self.local.size) * self.nodes.size

    def _finish(self, flat: Tensor, leaf_cuts: Cuts, slices: list[tuple[int, int]]) -> Tensor:
        wanted = [self._wanted(slices, local_rank) for local_rank in range(self.local.size)]
        mine = wanted[self.local.rank]
        node_roots = self._node_roots(flat, leaf_cuts, wanted)
        offset, at = 0, {}
        for start, stop in mine:
            at[start, stop] = slice(offset, offset + stop - start)
            offset += stop - start
        equals = range(self.local.rank, self.size, self.local.size)
        node_cuts = leaf_cuts[:: self.local.size]
        start, stop = slices[self.rank]
        roots = self.nodes.exchange(
            [node_roots[:, at[slices[rank]]] for rank in equals],
            [(num_roots(node_cuts, node), stop - start) for node in range(self.nodes.size)],
        )
        return tree_sum(root_nodes(roots, node_cuts).get, range(node_cuts[-1]))

    def _wanted(self, slices: list[tuple[int, int]], local_rank: int) -> list[tuple[int, int]]:
        """Slices that the equal local ranks of all nodes finish, each once."""
        return list(dict.fromkeys(slices[local_rank :: self.local.size]))

    def _node_roots(
        self, flat: Tensor, leaf_cuts: Cuts, wanted: list[list[tuple[int, int]]]
    ) -> Tensor:
        """This node's maximal subtree roots of the slices that this local rank handles."""
        first = self.nodes.rank * self.local.size
        length = sum(stop - start for start, stop in wanted[self.local.rank])
        roots = self.local.exchange(
            [torch.cat([flat[:, a:b] for a, b in part], dim=1) for part in wanted],
            [(num_roots(leaf_cuts, first + r), length) for r in range(self.local.size)],
        )
        nodes = root_nodes(roots, leaf_cuts, first)
        node_leaves = leaf_cuts[first], leaf_cuts[first + self.local.size]
        return torch.stack(
            [tree_sum(nodes.get, span) for span in subtree_roots(*node_leaves, leaf_cuts[-1])]
        )

    def _gather_slices(self, part: Tensor, slices: list[tuple[int, int]]) -> Tensor:
        return gather_parts(self.local, part, [b - a for a, b in slices[: self.local.size]])

    def _gather(self, flat: Tensor, cuts: Cuts) -> Tensor:
        """Between nodes first, where a rank sends its own part alone, then inside the node."""
        lengths = [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
        by_local = [lengths[r :: self.local.size] for r in range(self.local.size)]
        mine = gather_parts(self.nodes, flat, by_local[self.local.rank])
        columns = self.local.exchange([mine] * self.local.size, [(sum(part),) for part in by_local])
        parts = [column.split(part) for column, part in zip(columns, by_local, strict=True)]
        return torch.cat([part for node in zip(*parts, strict=True) for part in node])
