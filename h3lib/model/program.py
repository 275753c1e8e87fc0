"""What a run computes on each rank, by name: one block, the whole model, or a generation.

A program makes its inputs, runs on a rank's place and shows its values as records; it also says
which values it shows, in which shapes, and where a control must differ. Runs, simulations and
reports know programs alone.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from h3lib.contract import LayoutError, ModelSize
from h3lib.layout import Layout, whole
from h3lib.model.block import Block, block_parameters, block_values
from h3lib.model.inputs import (
    block_inputs,
    block_results,
    block_weights,
    model_inputs,
    output_gradients,
    rank_weights,
    trace_block,
)
from h3lib.model.packing import Packed
from h3lib.model.trace import GRADIENT, NODE, OUTPUT, Key, ModelTrace, Record
from h3lib.model.transformer import (
    ACTIVATIONS,
    BLOCK_INPUTS,
    ModelGradients,
    Transformer,
    model_values,
)
from h3lib.model.weights import WeightSource, parameters
from h3lib.parallel.shard import SeqShard, parameter_region

Step = Callable[[str], None]


def no_step(phase: str) -> None:
    """Nobody waits for the phases."""


@dataclass(frozen=True)
class Program(abc.ABC):
    """`packed` is on the device of the run, as are the tensors of `source`."""

    size: ModelSize
    source: WeightSource
    packed: Packed
    seed: int = 0
    backend: str = "eager"

    @abc.abstractmethod
    def records(self, shard: SeqShard, backward: bool = True, step: Step = no_step) -> list[Record]:
        """Every named value on one rank; `step` is called before "forward" and "backward"."""

    @abc.abstractmethod
    def untraced(self, shard: SeqShard) -> list[Record]:
        """Outputs and gradients again, without a trace: as users compute them, where a product is
        finished and rounded in its kernel. Nothing where `records` takes no trace either."""

    @abc.abstractmethod
    def values(self) -> dict[Key, tuple[int, ...]]:
        """Global shape of everything that `records` shows."""

    @abc.abstractmethod
    def control_keys(self) -> Mapping[str, Key]:
        """By mesh axis, a value that another order of the sums over that axis must change."""

    @abc.abstractmethod
    def given(self) -> tuple[Iterator[tuple[str, Tensor]], Iterator[Tensor]]:
        """All weights by name, and all inputs, for their digests."""

    def check_layout(self, layout: Layout) -> None:
        """**Raises:** LayoutError for more pipeline stages than layers."""
        layout.layers(self.size.num_layers, 0)


@dataclass(frozen=True)
class BlockProgram(Program):
    """Block 0 alone on random rows, with every node inside it."""

    def records(self, shard: SeqShard, backward: bool = True, step: Step = no_step) -> list[Record]:
        return trace_block(
            self.size, self.source, self.packed, shard, self.seed, self.backend, backward, step
        )

    def untraced(self, shard: SeqShard) -> list[Record]:
        given = block_inputs(self.size, self.source, self.packed, shard, self.seed)
        block = Block(self.size, shard, block_weights(self.size, self.source, shard), self.backend)
        return block_records(block_results(block, given), self.size, shard)

    def values(self) -> dict[Key, tuple[int, ...]]:
        return block_values(self.size, self.packed.num_rows, len(self.packed.timestep))

    def control_keys(self) -> Mapping[str, Key]:
        return {"tp": (NODE, "attn.out"), "cp": (GRADIENT, "ff.net.2.weight")}

    def given(self) -> tuple[Iterator[tuple[str, Tensor]], Iterator[Tensor]]:
        shard = SeqShard.canonical(self.packed.num_rows)
        found = block_inputs(self.size, self.source, self.packed, shard, self.seed)
        rows = found.rows
        inputs = (found.x, found.dout, found.temb, rows.table_rows, rows.cos, rows.sin)
        return iter(block_weights(self.size, self.source, shard).items()), iter(inputs)

    def check_layout(self, layout: Layout) -> None:
        if layout.pp > 1:
            raise LayoutError("pp degree", layout.pp, "1: a run of one block has no stages")


@dataclass(frozen=True)
class ModelProgram(Program):
    """The whole model on random rows: outputs, boundaries of blocks, gradients and roots of every
    parameter, gradients of the inputs.

    `recompute`: save the blocks' inputs alone and compute each block again in the backward.
    """

    recompute: bool = False

    def records(self, shard: SeqShard, backward: bool = True, step: Step = no_step) -> list[Record]:
        trace = ModelTrace()
        self._run(shard, trace, backward, step)
        return trace.records

    def untraced(self, shard: SeqShard) -> list[Record]:
        out, found = self._run(shard)
        return [
            *(Record(name, OUTPUT, v, whole(tuple(v.shape))) for name, v in out.items()),
            *(Record(f"d.{name}", GRADIENT, v, whole(tuple(v.shape)))
              for name, v in found.inputs.items()),
            *_gradients(found.parameters, parameters(self.size), shard),
        ]  # fmt: skip

    def _run(
        self,
        shard: SeqShard,
        trace: ModelTrace | None = None,
        backward: bool = True,
        step: Step = no_step,
    ) -> tuple[dict[str, Tensor], ModelGradients | None]:
        """Velocities and (if asked) gradients of one rank."""
        inputs = model_inputs(self.size, self.packed, self.seed)
        weights = rank_weights(self.size, self.source, shard)
        model = Transformer(self.size, shard, weights, self.backend, trace)
        step("forward")
        out = model.forward(inputs, BLOCK_INPUTS if self.recompute else ACTIVATIONS)
        if not backward:
            return out, None
        step("backward")
        return out, model.backward(*output_gradients(inputs, self.seed))

    def values(self) -> dict[Key, tuple[int, ...]]:
        return dict(model_values(self.size, self.packed))

    def control_keys(self) -> Mapping[str, Key]:
        last = self.size.num_layers - 1
        return {
            "tp": (NODE, "transformer_blocks.0.out"),
            "cp": (GRADIENT, f"transformer_blocks.{last}.ff.net.2.weight"),
        }

    def given(self) -> tuple[Iterator[tuple[str, Tensor]], Iterator[Tensor]]:
        inputs, packed = model_inputs(self.size, self.packed, self.seed), self.packed
        weights = ((name, self.source.read(name)) for name in parameters(self.size))
        tensors = (
            inputs.video, inputs.audio, inputs.text, *output_gradients(inputs, self.seed),
            packed.position_ids, packed.token_tags, packed.timestep, packed.timestep_indices,
        )  # fmt: skip
        return weights, iter(tensors)


def block_records(found: dict[str, Tensor], size: ModelSize, shard: SeqShard) -> list[Record]:
    """Records of what `block_results` gave on one rank."""
    found, rows = dict(found), ((shard.slice_rows,), (range(size.hidden_size),))
    dtemb = found.pop("dtemb")
    return [
        Record("out", OUTPUT, found.pop("out"), rows),
        Record("dx", GRADIENT, found.pop("dx"), rows),
        Record("dtemb", GRADIENT, dtemb, whole(tuple(dtemb.shape))),
        *_gradients(found, block_parameters(size), shard),
    ]


def _gradients(
    found: Mapping[str, Tensor], shapes: Mapping[str, tuple], shard: SeqShard
) -> list[Record]:
    """Records of a rank's parts of the gradients of parameters."""
    place = shard.owner, shard.tp_rank
    return [
        Record(name, GRADIENT, value, parameter_region(name, shapes[name][0], *place))
        for name, value in found.items()
    ]
