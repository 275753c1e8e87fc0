"""The control: an all-reduce that must give other bits, or the comparison could not fail.

Each rank rounds its partial to BF16 and the partials are added in BF16 in ring order, starting at
the rank that finishes the slice: what a bandwidth-optimal ring does.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping

import torch
from torch import Tensor

from h3lib.layout import Ownership
from h3lib.parallel.collective import Collective, TreeCollective
from h3lib.parallel.transport import Reduction, num_roots

Key = tuple[str, str]
CONTROL_KIND = "bf16 all-reduce in ring order from the own rank"


def control_axes(owner: Ownership, keys: Mapping[str, Key]) -> dict[str, Key]:
    """Axes on which the control applies, and the (kind, name) of the value looked at there.

    `keys` are those of the program, by axis: under TP; under CP, unless one rank owns all rows.
    """
    cuts = owner.shard_row_cuts()
    applies = {
        "tp": owner.layout.tp > 1,
        "cp": sum(a < b for a, b in zip(cuts, cuts[1:], strict=False)) > 1,
    }
    return {axis: key for axis, key in keys.items() if applies[axis]}


class OtherOrder(TreeCollective):
    """A two-shot collective that brings the roots where the tree's go, but sums them by `add`."""

    _finish_all = Collective._finish_all  # by way of `_root`

    def _root(self, flat: Tensor, reduction: Reduction, out: Tensor | None = None) -> Tensor:
        start, stop = reduction.slices[self.rank]
        shapes = [(num_roots(reduction.cuts, r), stop - start) for r in range(self.size)]
        parts = [flat[:, a:b] for a, b in reduction.slices]
        return self.add(self.transport.exchange(parts, shapes, reduction.call)).to(reduction.dtype)

    @abc.abstractmethod
    def add(self, roots: list[Tensor]) -> Tensor:
        """The sum of all ranks' roots, in rank order, not in the order of the contract."""


class RingControl(OtherOrder):
    """A collective with the order of a ring; only the control uses it."""

    def add(self, roots: list[Tensor]) -> Tensor:
        partials = [part.sum(dim=0).to(torch.bfloat16) for part in roots]
        total = partials[self.rank]
        for step in range(1, self.size):
            total = total + partials[(self.rank + step) % self.size]
        return total
