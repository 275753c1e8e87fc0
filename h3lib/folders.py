"""`h3lib checkpoint`: look at a released folder, write a synthetic one, change the key layout.

    inspect   key layout, size, tensors, bytes; every problem, one a line; SHA-256 of each tensor
    synth     synthetic values of any size as a released folder
    convert   diffusers to original key layout or back, one stored tensor at a time
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from h3lib.contract import SIZES, CheckpointError, ModelSize, model_size
from h3lib.model.checkpoint import CheckpointWeights, write_checkpoint
from h3lib.model.released import DIFFUSERS, ORIGINAL, config
from h3lib.model.weights import SyntheticWeights, WeightSource, digest


def folder_size(folder: Path | str, name: str | None = None) -> ModelSize:
    """The model size called `name`, else the one that the folder's `config.json` describes.

    **Raises:** CheckpointError if it describes none that is known.
    """
    if name is not None:
        return model_size(name)
    path = Path(folder) / "config.json"
    try:
        received = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        accepted = "config.json in the folder, or --size"
        raise CheckpointError(f"config of {folder}", str(error), accepted) from error
    for size in SIZES.values():
        for key_layout in (DIFFUSERS, ORIGINAL):
            fields = config(size, key_layout)
            if all(received.get(field) == value for field, value in fields.items()):
                return size
    widths = {key: received[key] for key in ("hidden_size", "num_layers") if key in received}
    raise CheckpointError(f"config of {folder}", widths, ", ".join(SIZES))


def inspect_folder(folder: Path | str, size: ModelSize, digests: bool = False) -> Iterator[str]:
    """Lines that describe a whole folder. **Raises:** CheckpointError with every problem."""
    source = CheckpointWeights(folder, size)
    total = sum(_num_bytes(source, name) for name in source.names)
    yield f"{source.key_layout} key layout, size {size.name}"
    yield f"{len(source.names)} parameters, {total:,} bytes, all there in their shapes and dtypes"
    for name in source.names if digests else ():
        shape, dtype = source.parameter(name)
        kind = str(dtype).removeprefix("torch.")
        yield f"{digest(source.read(name))}  {kind} {list(shape)} {name}"


def problems(error: CheckpointError) -> Iterator[str]:
    """What is wrong with a folder, one a line."""
    many = isinstance(error.received, tuple) and error.subject.startswith("checkpoint ")
    yield from error.received if many else (str(error),)


def synthesise(
    folder: Path | str, size: ModelSize, seed: int, key_layout: str, max_shard_bytes: int
) -> None:
    """Write synthetic values of `size`; one shard at a time is in memory."""
    write_checkpoint(folder, SyntheticWeights(size, seed), key_layout, max_shard_bytes)


def convert(
    source: Path | str, folder: Path | str, size: ModelSize, key_layout: str, max_shard_bytes: int
) -> None:
    """Write a released folder again in another key layout, the same values.

    **Raises:** CheckpointError with every problem of the source.
    """
    write_checkpoint(folder, CheckpointWeights(source, size), key_layout, max_shard_bytes)


def _num_bytes(source: WeightSource, name: str) -> int:
    shape, dtype = source.parameter(name)
    total = dtype.itemsize
    for width in shape:
        total *= width
    return total
