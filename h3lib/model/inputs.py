"""What one rank feeds its block or its model: weights, rows of a packed job, gradients.

Values are keyed by (name, row, column), so every rank makes exactly its part and no rank ever
needs the whole. The gradient of the output is random: a sum's gradient (all ones) hides orders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from h3lib.contract import ModelSize
from h3lib.layout import Region
from h3lib.model.block import BLOCK_PREFIX, Block, block_parameters
from h3lib.model.context import Rows
from h3lib.model.packing import Packed
from h3lib.model.trace import Record, Trace
from h3lib.model.transformer import Inputs, stage_parameters
from h3lib.model.weights import WeightSource, synthetic_rows
from h3lib.ops.adaln import table_rows
from h3lib.ops.rope import rope_table
from h3lib.ops.timestep import timestep_embedding_forward, timestep_features
from h3lib.parallel.shard import SeqShard, coshard, parameter_region
from h3lib.rows import LogicalRows

TIME_EMBEDDER = tuple(
    f"time_embedder.linear_{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")
)


@dataclass(frozen=True)
class BlockInputs:
    """x, dout `[S, D]` of the slice's rows, temb `[M, E]` FP32, and the rows' metadata."""

    x: Tensor
    dout: Tensor
    temb: Tensor
    rows: Rows


def block_weights(size: ModelSize, source: WeightSource, shard: SeqShard) -> dict[str, Tensor]:
    """This rank's part of every parameter of block 0, by its name inside the block."""

    def part(name: str, shape: tuple[int, ...]) -> Region:
        return parameter_region(name, shape, shard.owner, shard.tp_rank)

    return {
        name: source.read(BLOCK_PREFIX + name, part(name, shape))
        for name, (shape, _) in block_parameters(size).items()
    }


def rank_weights(size: ModelSize, source: WeightSource, shard: SeqShard) -> dict[str, Tensor]:
    """This rank's part of every parameter of its pipeline stage, read slice by slice.

    At no time is there more than the rank's share and one slice that is being read.
    """
    owner, layout = shard.owner, shard.owner.layout
    held = stage_parameters(size, layout, shard.stage)
    name_of_rank = f"weights of rank {shard.rank}"
    bar = tqdm(held.items(), desc=name_of_rank, unit="tensor", disable=None, delay=2, leave=False)
    return {
        name: source.read(name, parameter_region(name, shape, owner, shard.tp_rank))
        for name, (shape, _) in bar
    }


def model_inputs(size: ModelSize, packed: Packed, seed: int) -> Inputs:
    """Random rows of every index set, keyed by their place in the set."""

    def rows(label: str, width: int, dtype: torch.dtype) -> Tensor:
        indices = getattr(packed, f"{label}_indices")
        numbers = torch.arange(len(indices), device=indices.device)
        return synthetic_rows(label, seed, numbers, width, dtype)

    video = rows("video", size.video_dim, torch.float32)
    audio = rows("audio", size.audio_in_channels, torch.float32)
    return Inputs(video, audio, rows("text", size.text_dim, torch.bfloat16), packed)


def output_gradients(inputs: Inputs, seed: int) -> tuple[Tensor, Tensor]:
    """Random gradients of the velocities of video and audio."""

    def like(label: str, x: Tensor) -> Tensor:
        numbers = torch.arange(len(x), device=x.device)
        return synthetic_rows(label, seed, numbers, x.shape[1], torch.float32)

    return like("dvideo", inputs.video), like("daudio", inputs.audio)


def time_embedding(size: ModelSize, source: WeightSource, timestep: Tensor) -> Tensor:
    """temb `[M, E]` FP32 of the job's timesteps, replicated on every rank."""
    features = timestep_features(timestep, size.freq_dim)
    return timestep_embedding_forward(features, *(source.read(name) for name in TIME_EMBEDDER))[0]


def block_inputs(
    size: ModelSize,
    source: WeightSource,
    packed: Packed,
    shard: SeqShard,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
) -> BlockInputs:
    """This rank's inputs of block 0 for a packed job whose tensors are on the rank's device.

    A row's values are keyed by its logical number, so a permuted or padded job has the same rows.
    """
    rows = LogicalRows.of(packed.logical_keys)
    table = table_rows(packed.timestep_indices, packed.token_tags, len(packed.timestep))
    numbers = torch.arange(rows.num_rows, device=table.device)
    part = numbers[shard.slice_rows.start : shard.slice_rows.stop]
    x, dout = (
        synthetic_rows(label, seed, part, size.hidden_size, dtype) for label in ("x", "dout")
    )
    cos, sin = rope_table(rows.gather(packed.position_ids), size, dtype)
    own = slice(shard.shard_rows.start, shard.shard_rows.stop)
    metadata = Rows(coshard(shard, rows, table)[0], cos[own], sin[own])
    return BlockInputs(x, dout, time_embedding(size, source, packed.timestep), metadata)


def block_results(
    block: Block,
    given: BlockInputs,
    backward: bool = True,
    step: Callable[[str], None] = lambda phase: None,
) -> dict[str, Tensor]:
    """One forward and (if asked) backward of a block: "out", "dx", "dtemb", and the gradient of
    each parameter by its name. `step` is called before each phase, "forward" and "backward"."""
    step("forward")
    out = block.forward(given.x, given.temb, given.rows)
    if not backward:
        return {"out": out}
    step("backward")
    found = block.backward(given.dout)
    return {"out": out, "dx": found.dx, "dtemb": found.dtemb, **found.parameters}


def trace_block(
    size: ModelSize,
    source: WeightSource,
    packed: Packed,
    shard: SeqShard,
    seed: int,
    backend: str = "eager",
    backward: bool = True,
    step: Callable[[str], None] = lambda phase: None,
) -> list[Record]:
    """Every named value of block 0 on one rank; `backward` and `step` as `block_results`."""
    trace = Trace()
    given = block_inputs(size, source, packed, shard, seed)
    block = Block(size, shard, block_weights(size, source, shard), backend, trace)
    block_results(block, given, backward, step)
    return trace.records
