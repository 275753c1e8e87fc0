"""Collectives of the contract: gathers move rows and columns, reductions finish the tree.

A reduction takes each rank's *maximal subtree roots* (FP32), brings the roots of one slice of the
elements to one rank, evaluates the rest of the tree there, rounds once, and gathers the rounded
slices (all-reduce) or leaves them (reduce-scatter). The layout moves roots; it never changes a sum.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from h3lib.contract import OperandError, subtree_roots
from h3lib.ops.tree import root_nodes, tree_sum
from h3lib.parallel.transport import LocalTransport, Transport

Cuts = Sequence[int]
Observe = Callable[[Tensor, int], None]
"""Called with the FP32 root of a slice of the flattened result, and where the slice starts."""


class Collective(abc.ABC):
    """One mesh axis seen from one rank. `cuts` of n ranks has n + 1 entries: rank r owns
    [cuts[r], cuts[r + 1])."""

    rank: int
    size: int

    def all_gather_rows(self, x: Tensor, cuts: Cuts) -> Tensor:
        """Rows of every rank in rank order: `[T_local, ...]` to `[T, ...]`."""
        start, stop = cuts[self.rank], cuts[self.rank + 1]
        if len(x) != stop - start:
            raise OperandError(
                f"rows of rank {self.rank}", len(x), f"{stop - start}: {start} to {stop}"
            )
        row = x.shape[1:].numel()
        flat = self._gather(x.reshape(-1), [c * row for c in cuts])
        return flat.view(cuts[-1] - cuts[0], *x.shape[1:])

    def all_gather_columns(self, x: Tensor, cuts: Cuts) -> Tensor:
        """Columns (last dim) of every rank in rank order: `[..., C_local]` to `[..., C]`."""
        return self.all_gather_rows(x.movedim(-1, 0).contiguous(), cuts).movedim(0, -1).contiguous()

    def all_reduce(
        self, roots: Tensor, leaf_cuts: Cuts, dtype: torch.dtype, observe: Observe | None = None
    ) -> Tensor:
        """Sum of all leaves on every rank: roots `[R, ...]` of this rank to `[...]` in `dtype`.

        **Order:** the tree over `leaf_cuts[-1]` leaves. **Rounds:** once, to `dtype`, after the
        root. **Raises:** OperandError if the roots are not those of this rank's leaves.
        """
        flat = self._flat(roots, leaf_cuts)
        cuts = self._slices(flat.shape[1])
        root = self._finish(flat, leaf_cuts, cuts)
        if observe is not None:
            observe(root, cuts[self.rank][0])
        return self._gather_slices(root.to(dtype), cuts).view(roots.shape[1:])

    def reduce_scatter_rows(
        self,
        roots: Tensor,
        leaf_cuts: Cuts,
        row_cuts: Cuts,
        dtype: torch.dtype,
        observe: Observe | None = None,
    ) -> Tensor:
        """This rank's rows of the sum of all leaves: roots `[R, T, ...]` to `[T_local, ...]`.

        `row_cuts` count from the first row of the roots. **Order:**, **Rounds:**, **Raises:** as
        `all_reduce`.
        """
        flat = self._flat(roots, leaf_cuts)
        row = roots.shape[2:].numel()
        cuts = [(a * row, b * row) for a, b in zip(row_cuts, row_cuts[1:], strict=False)]
        root = self._finish(flat, leaf_cuts, cuts)
        if observe is not None:
            observe(root, cuts[self.rank][0])
        return root.to(dtype).view(-1, *roots.shape[2:])

    def _flat(self, roots: Tensor, leaf_cuts: Cuts) -> Tensor:
        expected = num_roots(leaf_cuts, self.rank)
        if len(roots) != expected:
            raise OperandError(f"subtree roots of rank {self.rank}", len(roots), expected)
        return roots.reshape(expected, roots.shape[1:].numel())

    @abc.abstractmethod
    def _slices(self, num_elements: int) -> list[tuple[int, int]]:
        """For each rank the slice of the elements that it finishes in an all-reduce."""

    @abc.abstractmethod
    def _finish(self, flat: Tensor, leaf_cuts: Cuts, slices: list[tuple[int, int]]) -> Tensor:
        """FP32 root of this rank's slice, from roots `[R, n]` of every rank."""

    @abc.abstractmethod
    def _gather_slices(self, part: Tensor, slices: list[tuple[int, int]]) -> Tensor:
        """All elements from the ranks' slices."""

    @abc.abstractmethod
    def _gather(self, flat: Tensor, cuts: Cuts) -> Tensor:
        """Parts of every rank in rank order."""


class TreeCollective(Collective):
    """Two-shot over one transport: every rank finishes one slice."""

    def __init__(self, transport: Transport):
        self.transport, self.rank, self.size = transport, transport.rank, transport.size

    def _slices(self, num_elements: int) -> list[tuple[int, int]]:
        return even_slices(num_elements, self.size)

    def _finish(self, flat: Tensor, leaf_cuts: Cuts, slices: list[tuple[int, int]]) -> Tensor:
        roots = self._roots_of_slice(flat, leaf_cuts, slices)
        return tree_sum(root_nodes(roots, leaf_cuts).get, range(leaf_cuts[-1]))

    def _roots_of_slice(
        self, flat: Tensor, leaf_cuts: Cuts, slices: list[tuple[int, int]]
    ) -> list[Tensor]:
        """Every rank's roots of the slice that is finished here, in rank order."""
        start, stop = slices[self.rank]
        shapes = [(num_roots(leaf_cuts, r), stop - start) for r in range(self.size)]
        return self.transport.exchange([flat[:, a:b] for a, b in slices], shapes)

    def _gather_slices(self, part: Tensor, slices: list[tuple[int, int]]) -> Tensor:
        return gather_parts(self.transport, part, [b - a for a, b in slices])

    def _gather(self, flat: Tensor, cuts: Cuts) -> Tensor:
        return gather_parts(
            self.transport, flat, [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
        )


class LocalCollective(TreeCollective):
    """A world of one: what it computes is the canonical result."""

    def __init__(self):
        super().__init__(LocalTransport())


def num_roots(leaf_cuts: Cuts, owner: int) -> int:
    """How many maximal subtree roots the owner's leaves have."""
    return len(subtree_roots(leaf_cuts[owner], leaf_cuts[owner + 1], leaf_cuts[-1]))


def even_slices(num_elements: int, num_slices: int) -> list[tuple[int, int]]:
    """The elements cut into nearly equal slices, in order."""
    return [
        (num_elements * i // num_slices, num_elements * (i + 1) // num_slices)
        for i in range(num_slices)
    ]


def gather_parts(transport: Transport, part: Tensor, lengths: Sequence[int]) -> Tensor:
    """The parts of every rank of a transport, one after the other."""
    return torch.cat(transport.exchange([part] * transport.size, [(length,) for length in lengths]))
