"""A rank without its peers: the same compute with communication left out, and communication alone.

    exposed   time of a pass - time of the same pass with communication left out
    hidden    time of its communication alone - exposed

A level that is left out gives results of the right shape and moves nothing, so that one process can
also be one rank of a layout whose others do not exist: its memory is that of the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from h3lib.parallel.transport import Call, Level, Reduction, Slice, group_spans

SETS = 2  # buffers of one length and dtype that are given in turn
Give = Callable[[int, torch.dtype, torch.device], Tensor]


@dataclass
class Buffers:
    """Random values that stay where they are: what a left-out collective returns while timed."""

    made: dict[tuple, list[Tensor]] = field(default_factory=dict)

    def __call__(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`[length]`; no time passes on the device after the first calls."""
        held = self.made.setdefault((length, dtype), [])
        if len(held) < SETS:
            held.append(torch.randn(length, device=device).to(dtype))
            return held[-1]
        held.append(held.pop(0))
        return held[-1]


def new_buffer(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[length]` of its own, as a collective allocates it: what a left-out one returns while memory
    is measured."""
    return torch.empty(length, dtype=dtype, device=device)


class LeftOut(Level):
    """A level of `size` ranks seen from one of them; results are of the right shape, values any.

    `overlaps`: products are cut for it as for a level whose collectives run beside them.
    """

    def __init__(self, rank: int, size: int, give: Give = new_buffer, overlaps: bool = False):
        self.rank, self.size, self.give, self.overlaps = rank, size, give, overlaps

    def gather(
        self,
        part: Tensor,
        lengths: Sequence[int],
        call: Call | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        return self.give(sum(lengths), part.dtype, part.device) if out is None else out

    def finish(self, flat: Tensor, reduction: Reduction, out: Tensor | None = None) -> Tensor:
        length = reduction.length(self.rank)
        spans = len(group_spans(reduction.cuts, reduction.first, self.size))
        whole = self.give(spans * length, reduction.dtype, flat.device) if out is None else out
        return whole.view(spans, length)


class Noted(Level):
    """A level that adds to `notes` what it is asked for, as calls that ask for it again."""

    def __init__(self, level: Level, notes: list[Callable[[], Tensor]], give: Give):
        self.level, self.notes, self.give = level, notes, give
        self.rank, self.size, self.unit = level.rank, level.size, level.unit

    def slices(self, num_elements: int, num_roots: int) -> list[Slice]:
        return self.level.slices(num_elements, num_roots)

    def gather(
        self,
        part: Tensor,
        lengths: Sequence[int],
        call: Call | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        return self._noted(self.level.gather, part, lengths, call, out=out)

    def finish(self, flat: Tensor, reduction: Reduction, out: Tensor | None = None) -> Tensor:
        return self._noted(self.level.finish, flat, reduction, out=out)

    def finish_all(self, flat: Tensor, reduction: Reduction, out: Tensor | None = None) -> Tensor:
        return self._noted(self.level.finish_all, flat, reduction, out=out)

    def _noted(self, ask: Callable[..., Tensor], operand: Tensor, *given, out: Tensor | None):
        again = self.give(operand.numel(), operand.dtype, operand.device).view(operand.shape)
        self.notes.append(lambda: ask(again, *given))
        return ask(operand, *given, out=out)
