"""The pipeline axis: activations to the next stage, gradients back, results to every stage.

Bytes are moved and nothing is added, so the number of stages is not in the bits. One request is one
sequence: its stages run one after the other, and the axis spreads layers over memory, not time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from h3lib.parallel.collective import Collective, LocalCollective
from h3lib.parallel.transport import Call, Level, Shape


@dataclass(frozen=True)
class Pipeline:
    """One rank's place among the stages; `before` and `after` connect it with its neighbours."""

    stage: int = 0
    num_stages: int = 1
    before: Level | None = None
    after: Level | None = None
    every: Collective = field(default_factory=LocalCollective)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def send_forward(self, x: Tensor) -> None:
        """To the next stage, which waits in `receive_forward`."""
        self.after.gather(x.reshape(-1), [x.numel(), 0], _hand_off(x.shape, x))

    def receive_forward(self, shape: Shape, like: Tensor) -> Tensor:
        """From the stage before, in the dtype and on the device of `like`."""
        call = _hand_off(shape, like)
        return self.before.gather(like.new_empty(0), [math.prod(shape), 0], call).view(shape)

    def send_back(self, x: Tensor) -> None:
        """To the stage before, which waits in `receive_back`."""
        self.before.gather(x.reshape(-1), [0, x.numel()], _hand_off(x.shape, x))

    def receive_back(self, shape: Shape, like: Tensor) -> Tensor:
        """From the next stage, in the dtype and on the device of `like`."""
        call = _hand_off(shape, like)
        return self.after.gather(like.new_empty(0), [0, math.prod(shape)], call).view(shape)

    def from_stage(self, stage: int, x: Tensor | None, shape: Shape, like: Tensor) -> Tensor:
        """`x` of one stage on every stage; the others pass None."""
        if self.num_stages == 1:
            return x
        cuts = [0] * (stage + 1) + [shape[0]] * (self.num_stages - stage)
        if x is None:
            x = torch.empty((0, *shape[1:]), dtype=like.dtype, device=like.device)
        return self.every.all_gather_rows(x, cuts)


def _hand_off(shape: Shape, like: Tensor) -> Call:
    """What both stages must agree on: a transposed shape has as many elements."""
    return Call("hand-off between stages", tuple(shape), str(like.dtype))
