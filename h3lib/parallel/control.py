"""The control: an all-reduce that must give other bits, or the comparison could not fail.

Each rank rounds its partial to BF16 and the partials are added in BF16 in ring order, starting at
the rank that finishes the slice: what a bandwidth-optimal ring does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from h3lib.layout import Ownership
from h3lib.parallel.collective import Collective, TreeCollective
from h3lib.parallel.transport import Call, Cuts, Slice, num_roots

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


class RingControl(TreeCollective):
    """A collective with the order of a ring; only the control uses it."""

    _finish_all = Collective._finish_all  # by way of `_root`

    def _root(
        self,
        flat: Tensor,
        leaf_cuts: Cuts,
        slices: list[Slice],
        dtype: torch.dtype,
        call: Call,
        out: Tensor | None = None,
    ) -> Tensor:
        start, stop = slices[self.rank]
        shapes = [(num_roots(leaf_cuts, r), stop - start) for r in range(self.size)]
        roots = self.transport.exchange([flat[:, a:b] for a, b in slices], shapes, call)
        partials = [part.sum(dim=0).to(torch.bfloat16) for part in roots]
        total = partials[self.rank]
        for step in range(1, self.size):
            total = total + partials[(self.rank + step) % self.size]
        return total.to(dtype)
