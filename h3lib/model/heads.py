"""The last stage: hidden rows become velocities of video and audio rows.

    a = norm_out(x) * (1 + scale[t]) + shift[t]          (a table by timestep alone: shift, scale)
    video = a W^T + b,  audio = a W^T + b  in FP32       (proj_out, audio_proj_out)

Each rank computes the heads of its own rows; the results are gathered in the order of the index
sets. A row belongs to one head at most, so its gradient has one term, rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3lib.contract import ModelSize
from h3lib.model.context import BlockContext
from h3lib.model.linear import Linear, select
from h3lib.model.modulation import AdaLN, ModulatedNorm
from h3lib.model.streams import Stream, Streams
from h3lib.model.trace import Trace, part_trace
from h3lib.model.weights import parameters
from h3lib.parallel.shard import SeqShard

HEADS = {"video": "proj_out", "audio": "audio_proj_out"}
PREFIXES = ("norm_out.", *(f"{name}." for name in HEADS.values()))


class Heads:
    """Everything after the last block, on one rank; `weights` by the checkpoint's names."""

    def __init__(
        self,
        size: ModelSize,
        shard: SeqShard,
        weights: dict[str, Tensor],
        backend: str = "eager",
        trace: Trace | None = None,
    ):
        shapes = select(parameters(size), PREFIXES)
        dtype = weights["norm_out.norm.weight"].dtype
        part = part_trace(trace, "", shapes)
        self.ctx = BlockContext(
            size, shard, select(weights, PREFIXES), shapes, backend, part, dtype
        )
        self.norm = ModulatedNorm(self.ctx, "norm_out.norm", "norm_out")
        self.adaln = AdaLN(self.ctx, "norm_out.linear", 1, 2)
        self.linears = {name: Linear(self.ctx, of) for name, of in HEADS.items()}

    def forward(self, x_SD: Tensor, temb_ME: Tensor, streams: Streams) -> dict[str, Tensor]:
        """Velocities `[n, out]` FP32 of the video and the audio rows, whole on every rank.

        **Order:** `AdaLN`, `ModulatedNorm`, then a chain a column. **Rounds:** as they do.
        """
        self.streams = streams
        shift, scale = self.adaln.forward(temb_ME).unbind(1)
        a_SD = self.norm.forward(x_SD, shift, scale, streams.timestep_rows)
        found = {}
        for name, linear in self.linears.items():
            stream: Stream = getattr(streams, name)
            found[name] = stream.unsorted(stream.gather(linear.forward(stream.pick(a_SD))))
        return found

    def backward(self, dvideo: Tensor, daudio: Tensor) -> tuple[Tensor, Tensor]:
        """dx `[S, D]` and dtemb `[M, E]` from the gradients of all velocities.

        **Order:** `Linear`, `ModulatedNorm`, `AdaLN`. **Rounds:** the FP32 dx of a linear, to the
        model's dtype, before the norm.
        """
        ctx = self.ctx
        shape = (len(ctx.shard.slice_rows), ctx.size.hidden_size)
        da = torch.zeros(shape, dtype=ctx.dtype, device=dvideo.device)
        for name, dy_all in (("video", dvideo), ("audio", daudio)):
            stream: Stream = getattr(self.streams, name)
            linear, dy = self.linears[name], stream.take(dy_all)
            linear.backward(dy, stream.logical_here, ctx.shard)
            stream.put(da, linear.dx(dy).to(da.dtype))
        dx, roots = self.norm.backward(da)
        return dx, self.adaln.backward(roots)
