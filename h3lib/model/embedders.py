"""The first stage: rows of video, audio and text become the packed hidden rows x of one rank.

    video, audio   v = rows W^T + b in FP32, rounded once           (proj_in, audio_proj_in)
    text           refiner(bf16 rows W^T + b)                       (context_embedder, replicated)

Each rank projects the rows of its slice; the text is refined whole on every rank. A weight gradient
is a row fold over row units of the packed rows of the index set; the text has its own T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3lib.contract import ModelSize
from h3lib.model.context import BlockContext
from h3lib.model.linear import Linear, select
from h3lib.model.refiner import Refiner
from h3lib.model.streams import Stream, Streams
from h3lib.model.trace import NODE, Trace, part_trace
from h3lib.model.weights import parameters
from h3lib.parallel.shard import SeqShard

PROJECTIONS = {"video": "proj_in", "audio": "audio_proj_in"}
CONTEXT = "context_embedder"
PREFIXES = (*(f"{name}." for name in PROJECTIONS.values()), f"{CONTEXT}.", "token_refiner.")


class Embedders:
    """Everything before the first block, on one rank; `weights` by the checkpoint's names."""

    def __init__(
        self,
        size: ModelSize,
        shard: SeqShard,
        weights: dict[str, Tensor],
        backend: str = "eager",
        trace: Trace | None = None,
    ):
        self.trace = trace
        self.given = (size, shard, weights, backend)
        shapes = select(parameters(size), PREFIXES[:-1])
        part = part_trace(trace, "", shapes)
        dtype = weights[f"{CONTEXT}.weight"].dtype
        self.ctx = BlockContext(
            size, shard, select(weights, PREFIXES[:-1]), shapes, backend, part, dtype
        )
        self.linears = {name: Linear(self.ctx, of) for name, of in PROJECTIONS.items()}
        self.context = Linear(self.ctx, CONTEXT)

    def forward(self, video: Tensor, audio: Tensor, text: Tensor, streams: Streams) -> Tensor:
        """x `[S, D]` from all rows of the three index sets, each in its set's order.

        **Rounds:** the FP32 projections once, to the dtype of the residual stream.
        """
        size, shard, weights, backend = self.given
        self.streams = streams
        self.text_shard = SeqShard.canonical(len(text), shard.contract)
        self.refiner = Refiner(size, self.text_shard, weights, backend, self.trace)
        e_TD = self.refiner.forward(self.context.forward(streams.text.sorted(text)))
        if self.trace is not None:
            region = tuple((range(n),) for n in e_TD.shape)
            self.trace.add("token_refiner.out", NODE, e_TD, region)
        x_SD = e_TD.new_zeros((len(shard.slice_rows), size.hidden_size))
        streams.text.put(x_SD, e_TD[streams.text.here])
        for name, rows in (("video", video), ("audio", audio)):
            stream: Stream = getattr(streams, name)
            y = self.linears[name].forward(stream.take(rows))
            stream.put(x_SD, y.to(x_SD.dtype))
        return x_SD

    def backward(self, dx_SD: Tensor, input_gradients: bool = True) -> dict[str, Tensor]:
        """Gradients of the three inputs, each whole and in its set's order, if asked for.

        Parameters go to `take_gradients`. **Order:** `Linear`; the refiner's own. **Rounds:** as
        theirs.
        """
        found, shard = {}, self.ctx.shard
        for name, linear in self.linears.items():
            stream: Stream = getattr(self.streams, name)
            dy = stream.pick(dx_SD)
            linear.backward(dy, stream.logical_here, shard)
            if input_gradients:
                found[name] = stream.unsorted(stream.gather(linear.dx(dy)))
        text = self.streams.text
        de = self.refiner.backward(text.gather(text.pick(dx_SD)))
        self.context.backward(de, torch.arange(len(de), device=de.device), self.text_shard)
        if input_gradients:
            found["text"] = text.unsorted(self.context.dx(de))
        return found

    def take_gradients(self) -> dict[str, Tensor]:
        """As `BlockContext.take_gradients`, the refiner's too."""
        return {**self.ctx.take_gradients(), **self.refiner.take_gradients()}
