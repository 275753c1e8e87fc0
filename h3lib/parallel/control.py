"""The control: an all-reduce that must give other bits, or the comparison could not fail.

Each rank rounds its partial to BF16 and the partials are added in BF16 in ring order, starting at
the rank that finishes the slice: what a bandwidth-optimal ring does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3lib.layout import Ownership
from h3lib.parallel.collective import TreeCollective
from h3lib.parallel.transport import Call, Cuts, Slice, num_roots

CONTROL_KIND = "bf16 all-reduce in ring order from the own rank"


def control_axes(owner: Ownership) -> dict[str, tuple[str, str]]:
    """Axes on which the control applies, and the (kind, name) of the value looked at there.

    to_out under TP; dw of ff-down under CP, unless one rank owns all rows.
    """
    cuts = owner.shard_row_cuts()
    axes = {}
    if owner.layout.tp > 1:
        axes["tp"] = ("node", "attn.out")
    if sum(a < b for a, b in zip(cuts, cuts[1:], strict=False)) > 1:
        axes["cp"] = ("gradient", "ff.net.2.weight")
    return axes


class RingControl(TreeCollective):
    """A collective with the order of a ring; only the control uses it."""

    def _root(
        self,
        flat: Tensor,
        leaf_cuts: Cuts,
        slices: list[Slice],
        dtype: torch.dtype,
        call: Call,
    ) -> Tensor:
        start, stop = slices[self.rank]
        shapes = [(num_roots(leaf_cuts, r), stop - start) for r in range(self.size)]
        roots = self.transport.exchange([flat[:, a:b] for a, b in slices], shapes, call)
        partials = [part.sum(dim=0).to(torch.bfloat16) for part in roots]
        total = partials[self.rank]
        for step in range(1, self.size):
            total = total + partials[(self.rank + step) % self.size]
        return total.to(dtype)
