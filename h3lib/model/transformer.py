"""MiniMax-H3 whole, forward and backward, on one rank of any layout.

    x       = proj_in(video), audio_proj_in(audio), refiner(context_embedder(text)), as packed rows
    temb    = time_embedder(sinusoids of the distinct timesteps)
    x       = block_i(x, temb)                        i = 0 .. num_layers - 1
    v       = proj_out, audio_proj_out of norm_out(x, temb): a velocity for every video, audio row

The embedders belong to the first pipeline stage, the heads to the last; a stage holds contiguous
blocks, and temb is made on every stage. Forward: activations go on from stage to stage, velocities
to all. Backward: dx and dtemb go back; the blocks' dtemb are added in FP32 from the last block to
the first, the output norm's first of all, so that the number of stages is not in the sum.

What is saved for the backward: every activation, or each block's input alone, from which the block
is computed again: the same bytes, since a block's bytes depend on its inputs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from h3lib.contract import ModelSize, OperandError
from h3lib.layout import Layout
from h3lib.model.block import Block
from h3lib.model.embedders import PREFIXES as EMBEDDERS
from h3lib.model.embedders import Embedders
from h3lib.model.heads import PREFIXES as HEADS
from h3lib.model.heads import Heads
from h3lib.model.linear import select
from h3lib.model.packing import Packed
from h3lib.model.streams import Streams
from h3lib.model.trace import GRADIENT, NODE, OUTPUT, Trace, part_trace
from h3lib.model.weights import Parameter, parameters, under
from h3lib.ops.backend import accumulator
from h3lib.ops.timestep import (
    timestep_embedding_backward,
    timestep_embedding_forward,
    timestep_features,
)
from h3lib.parallel.shard import SeqShard

TIME_EMBEDDER = "time_embedder."
ACTIVATIONS, BLOCK_INPUTS, NOTHING = "activations", "block inputs", "nothing"
SAVED = (ACTIVATIONS, BLOCK_INPUTS, NOTHING)


@dataclass(frozen=True)
class Inputs:
    """One request: rows of the three index sets, whole and in the sets' order, and its metadata.

    video `[Nv, 96]`, audio `[Na, 32]` FP32, text `[L, text_dim]` BF16; `packed` holds the timesteps
    `[M]` and what each packed row is. Every rank has them; they are small beside the activations.
    """

    video: Tensor
    audio: Tensor
    text: Tensor
    packed: Packed


@dataclass
class ModelGradients:
    """Gradients by checkpoint name, the rank's parts; of the inputs, whole and on every rank."""

    parameters: dict[str, Tensor]
    inputs: dict[str, Tensor] = field(default_factory=dict)


def stage_parameters(size: ModelSize, layout: Layout, stage: int) -> dict[str, Parameter]:
    """Parameters that the ranks of a pipeline stage hold, in module order."""
    prefixes = [f"transformer_blocks.{i}." for i in layout.layers(size.num_layers, stage)]
    prefixes += [TIME_EMBEDDER]
    prefixes += EMBEDDERS if stage == 0 else ()
    prefixes += HEADS if stage == layout.pp - 1 else ()
    return select(parameters(size), tuple(prefixes))


class Transformer:
    """The model on one rank; `weights` are this rank's parts of `stage_parameters`, by name.

    Weights stored in FP32 are FP32 (FP64 in the oracle), all others of one dtype.

    **Raises:** LayoutError for more stages than layers, OperandError for weights that do not fit.
    """

    def __init__(
        self,
        size: ModelSize,
        shard: SeqShard,
        weights: dict[str, Tensor],
        backend: str = "eager",
        trace: Trace | None = None,
    ):
        self.size, self.shard, self.backend, self.trace = size, shard, backend, trace
        self.weights, self.pipeline = weights, shard.mesh.pp
        self.layers = shard.owner.layout.layers(size.num_layers, shard.stage)
        held = stage_parameters(size, shard.owner.layout, shard.stage)
        if held.keys() - weights.keys():
            missing = sorted(held.keys() - weights.keys())
            raise OperandError("weights", f"without {missing[0]}", f"the {len(held)} of the stage")
        first = self.layers.start
        self.dtype = weights[f"transformer_blocks.{first}.norm1.weight"].dtype
        for name, (_, dtype) in held.items():
            want = accumulator(torch.empty(0, dtype=self.dtype))
            want = want if dtype == torch.float32 else self.dtype
            if weights[name].dtype != want:
                raise OperandError(f"dtype of {name}", weights[name].dtype, want)
        self.block_weights = {
            layer: under(f"transformer_blocks.{layer}.", weights) for layer in self.layers
        }
        given = (size, shard, weights, backend, trace)
        self.embedders = Embedders(*given) if self.pipeline.is_first else None
        self.heads = Heads(*given) if self.pipeline.is_last else None

    def forward(self, inputs: Inputs, saved: str = ACTIVATIONS) -> dict[str, Tensor]:
        """Velocities FP32 of "video" `[Nv, 96]` and "audio" `[Na, 32]`, whole on every rank.

        **Order:** embedders, blocks, heads; each its own. **Rounds:** where they do, and the
        embedded rows to the blocks' dtype.

        **Raises:** RowsError for index sets that are not the active rows, OperandError for inputs
        that do not fit them.
        """
        if saved not in SAVED:
            raise OperandError("what to save", saved, ", ".join(SAVED))
        self.saved, packed, shard = saved, inputs.packed, self.shard
        for name in ("video", "audio", "text"):
            rows, count = getattr(inputs, name), len(getattr(packed, f"{name}_indices"))
            if rows.ndim != 2 or len(rows) != count:
                raise OperandError(f"shape of {name}", tuple(rows.shape), f"({count}, width)")
        streams = Streams.of(shard, packed, self.size, self.dtype)
        self.streams, temb = streams, self._time_embedding(packed.timestep)
        if self.embedders:
            x = self.embedders.forward(inputs.video, inputs.audio, inputs.text, streams)
            self._slice_node("embedded", x)
        else:
            shape = (len(shard.slice_rows), self.size.hidden_size)
            x = self.pipeline.receive_forward(shape, torch.empty_like(temb, dtype=self.dtype))
        x = self._blocks_forward(x, temb)
        if not self.heads:
            self.pipeline.send_forward(x)
        found = self.heads.forward(x, temb, streams) if self.heads else {}
        return self._results(found, temb, OUTPUT, "", self.pipeline.num_stages - 1)

    def backward(
        self,
        dvideo: Tensor,
        daudio: Tensor,
        input_gradients: bool = True,
        take: Callable[[dict[str, Tensor]], None] | None = None,
    ) -> ModelGradients:
        """Gradients of everything from those of the velocities (whole), after `forward`.

        `take` receives the parameters' gradients part by part, as they are finished: heads, blocks
        from last to first, embedders; then none is kept (66 GB for `full` in a world of one).

        **Order:** contract, section 2. **Raises:** OperandError if nothing was saved.
        """
        if self.saved == NOTHING:
            raise OperandError("what was saved", NOTHING, f"{ACTIVATIONS}, {BLOCK_INPUTS}")
        gradients: dict[str, Tensor] = {}
        take = take or gradients.update
        if self.heads:
            dx, dtemb = self.heads.backward(dvideo, daudio)
            take(self.heads.ctx.take_gradients())
        else:
            shape = (len(self.shard.slice_rows), self.size.hidden_size)
            dx = self.pipeline.receive_back(shape, torch.empty_like(self.temb, dtype=self.dtype))
            dtemb = self.pipeline.receive_back(tuple(self.temb.shape), self.temb)
        for layer in reversed(self.layers):
            found = self._saved_block(layer).backward(dx)
            dx, dtemb = found.dx, dtemb + found.dtemb
            prefix = f"transformer_blocks.{layer}."
            take({prefix + name: value for name, value in found.parameters.items()})
            self._slice_node(f"d.{prefix}in", dx)
        if not self.embedders:
            self.pipeline.send_back(dx)
            self.pipeline.send_back(dtemb)
        else:
            self._node("d.temb", dtemb)
            take(self._time_embedding_backward(dtemb))
        given = self.embedders.backward(dx, input_gradients) if self.embedders else {}
        take(self.embedders.take_gradients() if self.embedders else {})
        if input_gradients:
            given = self._results(given, self.temb, GRADIENT, "d.", 0)
        return ModelGradients(gradients, given)

    def _time_embedding(self, timestep: Tensor) -> Tensor:
        w = under(f"{TIME_EMBEDDER}linear_", self.weights)
        features = timestep_features(timestep, self.size.freq_dim)
        self.features = features.to(w["1.weight"].dtype)
        given = (w["1.weight"], w["1.bias"], w["2.weight"], w["2.bias"])
        self.temb, self.inner = timestep_embedding_forward(
            self.features, *given, backend=self.backend
        )
        return self._node("temb", self.temb)

    def _time_embedding_backward(self, dtemb: Tensor) -> dict[str, Tensor]:
        """dw and dbias of the time embedder. **Order:** chains over timesteps, ascending."""
        w2 = self.weights[f"{TIME_EMBEDDER}linear_2.weight"]
        found = timestep_embedding_backward(
            dtemb, self.features, self.inner, w2, backend=self.backend
        )
        for name, value in found.items():
            self._node(TIME_EMBEDDER + name, value, GRADIENT)
        return {TIME_EMBEDDER + name: value for name, value in found.items()}

    def _blocks_forward(self, x: Tensor, temb: Tensor) -> Tensor:
        self.blocks: dict[int, Block] = {}
        self.inputs: dict[int, Tensor] = {}
        for layer in self.layers:
            block = self._block(layer)
            if self.saved == ACTIVATIONS:
                self.blocks[layer] = block
            elif self.saved == BLOCK_INPUTS:
                self.inputs[layer] = x
            x = block.forward(x, temb, self.streams.rows)
            self._slice_node(f"transformer_blocks.{layer}.out", x)
        return x

    def _block(self, layer: int) -> Block:
        weights = self.block_weights[layer]
        part = part_trace(self.trace, f"transformer_blocks.{layer}.", weights)
        return Block(self.size, self.shard, weights, self.backend, part)

    def _saved_block(self, layer: int) -> Block:
        """The block after its forward, kept or computed again; handed out once, then forgotten."""
        if self.saved == ACTIVATIONS:
            return self.blocks.pop(layer)
        block = self._block(layer)
        block.forward(self.inputs.pop(layer), self.temb, self.streams.rows)
        return block

    def _results(
        self, found: dict[str, Tensor], like: Tensor, kind: str, prefix: str, stage: int
    ) -> dict[str, Tensor]:
        """Tensors by stream that one stage has, on every stage."""
        shapes = {"video": self.size.video_dim, "audio": self.size.audio_in_channels}
        if kind == GRADIENT:
            shapes["text"] = self.size.text_dim
        results = {}
        for name, width in shapes.items():
            shape = (len(getattr(self.streams, name).order), width)
            low = like if name != "text" else torch.empty_like(like, dtype=self.dtype)
            value = self.pipeline.from_stage(stage, found.get(name), shape, low)
            results[name] = self._node(prefix + name, value, kind)
        return results

    def _node(self, name: str, tensor: Tensor, kind: str = NODE) -> Tensor:
        """Name a value that is whole on every rank."""
        if self.trace is not None:
            self.trace.add(name, kind, tensor, tuple((range(n),) for n in tensor.shape))
        return tensor

    def _slice_node(self, name: str, x_SD: Tensor) -> None:
        if self.trace is not None:
            region = ((self.shard.slice_rows,), (range(x_SD.shape[1]),))
            self.trace.add(name, NODE, x_SD, region)


def model_values(size: ModelSize, packed: Packed) -> Iterator[tuple[tuple[str, str], tuple]]:
    """(kind, name) and global shape of everything that a traced model shows."""
    rows, timesteps = packed.num_rows, len(packed.timestep)
    widths = {"video": size.video_dim, "audio": size.audio_in_channels, "text": size.text_dim}
    for name, width in widths.items():
        shape = (len(getattr(packed, f"{name}_indices")), width)
        yield (GRADIENT, f"d.{name}"), shape
        if name != "text":
            yield (OUTPUT, name), shape
    yield (NODE, "token_refiner.out"), (len(packed.text_indices), size.hidden_size)
    yield (NODE, "embedded"), (rows, size.hidden_size)
    for name in ("temb", "d.temb"):
        yield (NODE, name), (timesteps, size.time_embed_dim)
    for layer in range(size.num_layers):
        for name in (f"transformer_blocks.{layer}.out", f"d.transformer_blocks.{layer}.in"):
            yield (NODE, name), (rows, size.hidden_size)
    for name, (shape, dtype) in parameters(size).items():
        yield (GRADIENT, name), shape
        if dtype != torch.float32:
            yield ("root", name), shape
