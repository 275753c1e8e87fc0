"""The hierarchy: finish inside the node first, send slices of the node's roots between nodes.

A group holds the same local ranks on every node it touches. Each local rank finishes its slice of
every maximal subtree root of its node (there are several where the nodes do not cut the leaves at
subtrees), equal local ranks of all nodes exchange these slices, and the fixed adds finish. Sending
whole partials between nodes would cost `local_size` times more for the same bits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from h3lib.parallel.collective import Collective
from h3lib.parallel.transport import Call, Cuts, Level, Reduction, Slice, even_slices


class HierarchicalCollective(Collective):
    """A group of `nodes.size` nodes with `local.size` ranks each, node-major.

    `local` joins the ranks of one node, `nodes` the equal local ranks of all nodes.
    """

    def __init__(self, local: Level, nodes: Level):
        self.local, self.nodes = local, nodes
        self.level = local
        self.size = local.size * nodes.size
        self.rank = nodes.rank * local.size + local.rank

    def _slices(self, num_elements: int, leaf_cuts: Cuts) -> list[Slice]:
        """One slice a local rank, the same on every node: the last gather stays inside the node.

        Never one-shot inside a node: that would send every slice `local.size` times between nodes.
        """
        return even_slices(num_elements, self.local.size, self.local.unit) * self.nodes.size

    def _root(self, flat: Tensor, reduction: Reduction, out: Tensor | None = None) -> Tensor:
        """The node's subtree roots of the slices handled here, then the tree over the nodes."""
        slices, size = reduction.slices, self.local.size
        wanted = [self._wanted(slices, local_rank) for local_rank in range(size)]
        of_node = replace(
            reduction, parts=wanted, dtype=flat.dtype, first=self.nodes.rank * size
        )
        node_roots = self.local.finish(flat, of_node)
        offset, at = 0, {}
        for start, stop in wanted[self.local.rank]:
            at[start, stop] = (offset, offset + stop - start)
            offset += stop - start
        equals = range(self.local.rank, self.size, size)
        parts = [[at[slices[rank]]] for rank in equals]
        of_nodes = replace(reduction, cuts=reduction.cuts[::size], parts=parts)
        return self.nodes.finish(node_roots, of_nodes, out)[0]

    def _wanted(self, slices: list[Slice], local_rank: int) -> list[Slice]:
        """Slices that the equal local ranks of all nodes finish, each once."""
        return list(dict.fromkeys(slices[local_rank :: self.local.size]))

    def _gather_slices(
        self, part: Tensor, slices: list[Slice], call: Call, out: Tensor | None = None
    ) -> Tensor:
        return self.local.gather_slices(part, slices[: self.local.size], call, out)

    def _gather(self, flat: Tensor, cuts: Cuts, call: Call) -> Tensor:
        """Between nodes first, where a rank sends its own part alone, then inside the node."""
        lengths = [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
        by_local = [lengths[r :: self.local.size] for r in range(self.local.size)]
        mine = self.nodes.gather(flat, by_local[self.local.rank], call)
        columns = self.local.gather(mine, [sum(part) for part in by_local], call)
        parts = columns.split([length for part in by_local for length in part])
        nodes = [parts[node :: self.nodes.size] for node in range(self.nodes.size)]
        return torch.cat([part for node in nodes for part in node])
