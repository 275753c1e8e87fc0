"""Collectives of the contract: gathers move rows and columns, reductions finish the tree.

A reduction takes each rank's *maximal subtree roots* (FP32), brings the roots of one slice of the
elements to one rank, evaluates the rest of the tree there, rounds once, and gathers the rounded
slices (all-reduce) or leaves them (reduce-scatter). The layout moves roots; it never changes a sum.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from h3lib.contract import OperandError
from h3lib.parallel.later import Later
from h3lib.parallel.transport import (
    Call,
    Cuts,
    Level,
    LocalTransport,
    Reduction,
    Slice,
    num_roots,
)

Observe = Callable[[Tensor, int], None]
"""Called with the FP32 root of a slice of the flattened result, and where the slice starts."""


def _heard(method: Callable) -> Callable:
    """A collective: its peers hear of what this rank alone refuses, or has no memory for."""

    @functools.wraps(method)
    def run(self: Collective, *arguments, **options) -> Tensor:
        with self.level.heard(method.__name__):
            return method(self, *arguments, **options)

    return run


class Collective(abc.ABC):
    """One mesh axis seen from one rank. `cuts` of n ranks has n + 1 entries: rank r owns
    [cuts[r], cuts[r + 1]). `level` is one of its levels."""

    rank: int
    size: int
    level: Level
    overlaps = False
    """As `Level.overlaps`."""

    def later(self, run: Callable[[], Tensor], num_bytes: int) -> Later:
        """As `Level.later`, of `run`, which calls this collective."""
        return Later(run())

    @_heard
    def all_gather_rows(self, x: Tensor, cuts: Cuts) -> Tensor:
        """Rows of every rank in rank order: `[T_local, ...]` to `[T, ...]`.

        **Raises:** OperandError if the rows are not this rank's; PeerError if ranks disagree.
        """
        shape = (cuts[-1] - cuts[0], *x.shape[1:])
        return self._gather_rows(x, cuts, Call("all_gather_rows", shape, str(x.dtype)))

    @_heard
    def all_gather_columns(self, x: Tensor, cuts: Cuts) -> Tensor:
        """Columns (last dim) of every rank in rank order: `[..., C_local]` to `[..., C]`."""
        call = Call(
            "all_gather_columns", (*x.shape[:-1], cuts[-1] - cuts[0]), str(x.dtype)
        )
        rows = self._gather_rows(x.movedim(-1, 0).contiguous(), cuts, call)
        return rows.movedim(0, -1).contiguous()

    def _gather_rows(self, x: Tensor, cuts: Cuts, call: Call) -> Tensor:
        start, stop = cuts[self.rank], cuts[self.rank + 1]
        if len(x) != stop - start:
            raise OperandError(
                f"rows of rank {self.rank}", len(x), f"{stop - start}: {start} to {stop}"
            )
        row = x.shape[1:].numel()
        call = replace(call, cuts=tuple(cuts))
        flat = self._gather(x.reshape(-1), [c * row for c in cuts], call)
        return flat.view(cuts[-1] - cuts[0], *x.shape[1:])

    @_heard
    def all_reduce(
        self,
        roots: Tensor,
        leaf_cuts: Cuts,
        dtype: torch.dtype,
        observe: Observe | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Sum of all leaves on every rank: roots `[R, ...]` of this rank to `[...]` in `dtype`.

        The result is made in `out` (contiguous) if that is given.

        **Order:** the tree over `leaf_cuts[-1]` leaves. **Rounds:** once, to `dtype`, after the
        root. **Raises:** OperandError if the roots are not those of this rank's leaves.
        """
        flat = self._flat(roots, leaf_cuts)
        parts = [[piece] for piece in self._slices(flat.shape[1], leaf_cuts)]
        call = _reduction_call("all_reduce", roots, leaf_cuts, dtype)
        reduction = Reduction(leaf_cuts, parts, dtype, call)
        flat_out = None if out is None else out.view(-1)
        if observe is None:
            result = self._finish_all(flat, reduction, flat_out)
        else:
            part = self._finish(flat, reduction, observe)
            result = self._gather_slices(part, reduction.slices, call, flat_out)
        return result.view(roots.shape[1:])

    @_heard
    def reduce_scatter_rows(
        self,
        roots: Tensor,
        leaf_cuts: Cuts,
        row_cuts: Cuts,
        dtype: torch.dtype,
        observe: Observe | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """This rank's rows of the sum of all leaves: roots `[R, T, ...]` to `[T_local, ...]`.

        `row_cuts` count from the first row of the roots; `out` as `all_reduce`.

        **Order:**, **Rounds:**, **Raises:** as `all_reduce`.
        """
        flat = self._flat(roots, leaf_cuts)
        row = roots.shape[2:].numel()
        parts = [[(a * row, b * row)] for a, b in zip(row_cuts, row_cuts[1:], strict=False)]
        call = _reduction_call("reduce_scatter_rows", roots, leaf_cuts, dtype)
        call = replace(call, row_cuts=tuple(row_cuts))
        part = self._finish(flat, Reduction(leaf_cuts, parts, dtype, call), observe, out)
        return part.view(-1, *roots.shape[2:])

    def _finish(
        self,
        flat: Tensor,
        reduction: Reduction,
        observe: Observe | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """This rank's slice of the sum, rounded; whoever observes it sees it before that."""
        if observe is None:
            part = self._root(flat, reduction, out)
        else:
            part = self._root(flat, replace(reduction, dtype=flat.dtype))
            observe(part, reduction.slices[self.rank][0])
            part = part.to(reduction.dtype)
        if out is None or part.data_ptr() == out.data_ptr():
            return part
        return out.view(-1).copy_(part)

    def _finish_all(self, flat: Tensor, reduction: Reduction, out: Tensor | None) -> Tensor:
        """All of the sum, rounded, on every rank, in `out` if that is given."""
        part = self._root(flat, reduction)
        return self._gather_slices(part, reduction.slices, reduction.call, out)

    def _flat(self, roots: Tensor, leaf_cuts: Cuts) -> Tensor:
        expected = num_roots(leaf_cuts, self.rank)
        if len(roots) != expected:
            raise OperandError(f"subtree roots of rank {self.rank}", len(roots), expected)
        return roots.reshape(expected, roots.shape[1:].numel())

    @abc.abstractmethod
    def _slices(self, num_elements: int, leaf_cuts: Cuts) -> list[Slice]:
        """For each rank the slice of the elements that it finishes in an all-reduce."""

    @abc.abstractmethod
    def _root(self, flat: Tensor, reduction: Reduction, out: Tensor | None = None) -> Tensor:
        """Root of this rank's slice, rounded, from roots `[R, n]` of every rank; it may be made in
        `out`."""

    @abc.abstractmethod
    def _gather_slices(
        self, part: Tensor, slices: list[Slice], call: Call, out: Tensor | None = None
    ) -> Tensor:
        """All elements from the ranks' slices, in `out` if that is given."""

    @abc.abstractmethod
    def _gather(self, flat: Tensor, cuts: Cuts, call: Call) -> Tensor:
        """Parts of every rank in rank order."""


def _reduction_call(name: str, roots: Tensor, leaf_cuts: Cuts, dtype: torch.dtype) -> Call:
    return Call(name, tuple(roots.shape[1:]), str(roots.dtype), str(dtype), tuple(leaf_cuts))


class TreeCollective(Collective):
    """One level: every rank finishes one slice (two-shot), or each of them all (one-shot)."""

    def __init__(self, transport: Level):
        self.transport = self.level = transport
        self.rank, self.size = transport.rank, transport.size
        self.overlaps = transport.overlaps

    def later(self, run: Callable[[], Tensor], num_bytes: int) -> Later:
        return self.transport.later(run, num_bytes)

    def _slices(self, num_elements: int, leaf_cuts: Cuts) -> list[Slice]:
        most = max(num_roots(leaf_cuts, rank) for rank in range(self.size))
        return self.transport.slices(num_elements, most)

    def _root(self, flat: Tensor, reduction: Reduction, out: Tensor | None = None) -> Tensor:
        return self.transport.finish(flat, reduction, out)[0]

    def _finish_all(self, flat: Tensor, reduction: Reduction, out: Tensor | None) -> Tensor:
        return self.transport.finish_all(flat, reduction, out)

    def _gather_slices(
        self, part: Tensor, slices: list[Slice], call: Call, out: Tensor | None = None
    ) -> Tensor:
        return self.transport.gather_slices(part, slices, call, out)

    def _gather(self, flat: Tensor, cuts: Cuts, call: Call) -> Tensor:
        lengths = [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
        return self.transport.gather(flat, lengths, call)


class LocalCollective(TreeCollective):
    """A world of one: what it computes is the canonical result."""

    def __init__(self):
        super().__init__(LocalTransport())
