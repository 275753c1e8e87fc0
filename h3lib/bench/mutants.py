"""Seeded faults of a layout: what a check of a parallel run must be able to see.

A mutant changes where a rank is (its collectives) or what it shows; `h3lib.simulate.play` takes
both. The tests turn each of them red, `h3lib.bench.tolerance` counts which tolerances let it pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import Tensor

from h3lib.model.context import BlockContext
from h3lib.model.trace import OUTPUT, Record
from h3lib.parallel.collective import Collective, TreeCollective
from h3lib.parallel.control import OtherOrder
from h3lib.parallel.shard import SeqShard
from h3lib.parallel.transport import Reduction, ThreadWorld
from h3lib.simulate import Change, Records


class FaultyCollective(OtherOrder):
    """A two-shot collective with a fault in `add`."""

    def in_order(self, roots: Sequence[Tensor]) -> Tensor:
        """A chain over the ranks given."""
        total = torch.zeros_like(roots[0][0])
        for part in roots:
            total = total + part.sum(0)
        return total


class StartAtOwnRank(FaultyCollective):
    """A ring: every rank adds from itself on."""

    def add(self, roots):
        return self.in_order(roots[self.rank :] + roots[: self.rank])


class ArrivalOrder(FaultyCollective):
    """The ranks that are last in the group arrive first."""

    def add(self, roots):
        return self.in_order(roots[::-1])


class Unreduced(FaultyCollective):
    """The rank's own roots come back as if they were the sum."""

    def add(self, roots):
        return self.in_order(roots[self.rank : self.rank + 1])


class DroppedShard(FaultyCollective):
    """The second rank's part is left out."""

    def add(self, roots):
        return self.in_order([part for rank, part in enumerate(roots) if rank != 1])


class Bf16Partials(TreeCollective):
    """What crosses ranks is rounded to BF16."""

    _finish_all = Collective._finish_all

    def _root(self, flat: Tensor, reduction: Reduction, out: Tensor | None = None) -> Tensor:
        return super()._root(flat.bfloat16().float(), reduction)


def on_axes(fault: Callable, *axes: str) -> Change:
    """Put a faulty collective on these axes of the mesh of every rank."""

    def change(shard: SeqShard, world: ThreadWorld) -> SeqShard:
        layout = shard.owner.layout
        groups = {
            "tp": layout.tp_group(shard.rank),
            "cp": layout.cp_group(shard.rank),
            "rows": range(layout.num_ranks),
        }
        faulty = {a: fault(world.connect(groups[a], shard.rank)) for a in axes}
        return replace(shard, mesh=replace(shard.mesh, **faulty))

    return change


def on_output(fault: Callable[[Tensor], Tensor]) -> Records:
    """Change the output that the ranks show, where they have rows."""

    def changed(record: Record) -> Record:
        if record.kind != OUTPUT or not record.tensor.numel():
            return record
        return replace(record, tensor=fault(record.tensor))

    return lambda rank, found: [changed(record) for record in found]


@contextlib.contextmanager
def last_row_dropped() -> Iterator[None]:
    """Inside, weight gradients of the six projections leave out the last row of the job."""
    gradient = BlockContext.weight_gradient

    def drop(self, name, dy, x):
        if self.shard.shard_rows.stop == self.shard.owner.rows.num_rows and len(dy):
            dy = torch.cat((dy[:-1], torch.zeros_like(dy[-1:])))
        gradient(self, name, dy, x)

    with mock.patch.object(BlockContext, "weight_gradient", drop):
        yield


def sign_of_one(tensor: Tensor) -> Tensor:
    """The sign of the largest element is turned."""
    flat = tensor.clone().view(-1)
    flat[flat.abs().argmax()] *= -1
    return flat.view_as(tensor)


@dataclass(frozen=True)
class Mutant:
    """A fault: of a rank's place, of what it shows, or of the code while it runs."""

    change: Change = lambda shard, world: shard
    records: Records = lambda rank, found: found
    during: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


NO_FAULT = "no fault"
MUTANTS = {
    NO_FAULT: Mutant(),
    "output is zero": Mutant(records=on_output(torch.zeros_like)),
    "sign of one element": Mutant(records=on_output(sign_of_one)),
    "a shard is left out of the sum": Mutant(on_axes(DroppedShard, "tp")),
    "partials are not summed": Mutant(on_axes(Unreduced, "tp")),
    "BF16 partials": Mutant(on_axes(Bf16Partials, "tp")),
    "ranks added in another order": Mutant(on_axes(ArrivalOrder, "tp")),
    "every rank starts at itself": Mutant(on_axes(StartAtOwnRank, "tp")),
    "last row left out of dw": Mutant(during=last_row_dropped),
}
