"""Released checkpoints: sharded safetensors with an index, written and read a slice at a time.

A folder holds `<stem>-0000i-of-0000N.safetensors`, `<stem>.safetensors.index.json` and
`config.json`; the stem is `diffusion_pytorch_model` or `model`, by key layout. A file is an 8-byte
little-endian length, a JSON header of dtypes, shapes and offsets, then the bytes of the tensors.

Everything that is read later is checked when a folder is opened, from headers alone, and all that
is wrong is named at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from h3lib.contract import CheckpointError, ModelSize
from h3lib.files import write_json
from h3lib.layout import Region, region_shape
from h3lib.model.released import (
    DIFFUSERS,
    FILE_STEM,
    ROPE_KEY,
    Stored,
    config,
    detect_key_layout,
    rope_inv_freq,
    stored_key,
    stored_rows,
    stored_tensors,
)
from h3lib.model.weights import WeightSource, checked_region

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
_ACCEPTED = "a released folder, diffusers or original key layout, with every shard that is needed"


def write_checkpoint(
    folder: Path | str,
    source: WeightSource,
    layout: str = DIFFUSERS,
    max_shard_bytes: int = 5 * 10**9,
    names: Iterable[str] | None = None,
) -> None:
    """Write `source`, or its parameters `names`, as a released checkpoint in an empty folder.

    At most one shard is in memory. The index is written last: a folder without one is unfinished.

    **Raises:** CheckpointError if the folder is not empty, the key layout is unknown, a shard can
    hold nothing, or `names` takes a part of a stored tensor (to_q without to_k).
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = next(folder.iterdir(), None)
    except OSError as error:  # a file has the name, or a part of the path cannot be written
        raise CheckpointError("checkpoint folder", str(error), "an empty folder") from error
    if held is not None:
        raise CheckpointError("checkpoint folder", str(folder), "an empty folder")
    if max_shard_bytes < 1:
        raise CheckpointError("shard size", max_shard_bytes, "at least 1 byte")
    stored = stored_tensors(source.size, layout, names)
    held = set(source.names if names is None else names)
    for key, entry in stored.items():
        if not held.issuperset(entry.names):
            raise CheckpointError(f"names of {key}", sorted(held & set(entry.names)), entry.names)

    shards = _plan(stored, max_shard_bytes)
    weight_map = {}
    bar = tqdm(shards, desc=f"write {folder.name}", unit="shard", disable=None, delay=2)
    for number, keys in enumerate(bar, 1):
        file = f"{FILE_STEM[layout]}-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {key: _assemble(source, key, stored[key], layout) for key in keys}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(keys, file)
    class_name = "MiniMaxH3Transformer3DModel" if layout == DIFFUSERS else "MiniMaxH3DiTModel"
    named = {"_class_name": class_name, **config(source.size, layout)}
    write_json(folder / "config.json", named, indent=2)
    total = sum(_num_bytes(entry) for entry in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / f"{FILE_STEM[layout]}.safetensors.index.json", index, indent=2)


def _num_bytes(entry: Stored) -> int:
    return math.prod(entry.shape) * entry.dtype.itemsize


def _plan(stored: dict[str, Stored], max_shard_bytes: int) -> list[list[str]]:
    """Keys of each shard: filled in order; a tensor larger than a shard has one to itself."""
    shards: list[list[str]] = []
    room = 0
    for key, entry in stored.items():
        num_bytes = _num_bytes(entry)
        if not shards or num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(key)
        room -= num_bytes
    return shards


def _assemble(source: WeightSource, key: str, entry: Stored, key_layout: str) -> Tensor:
    """One stored tensor, on the CPU, from the parameters whose rows it holds."""
    if key == ROPE_KEY:
        return rope_inv_freq(source.size)
    out = torch.empty(entry.shape, dtype=entry.dtype)
    for name in entry.names:
        values, start = source.read(name), 0
        for run in stored_rows(name, key_layout, source.size, range(len(values))):
            out[run.start : run.stop] = values[start : start + len(run)]
            start += len(run)
    return out


class CheckpointWeights(WeightSource):
    """A released folder as a source of parameters; only the slices asked for are read.

    With `names`, only the shards that hold those need be there: block 0 needs no more than shard 1
    of the original layout. `config.json` is compared with `size` if it is there.

    **Raises:** CheckpointError that lists all that is wrong: index or shard missing or truncated,
    tensor missing, of another shape or dtype, a pruned re-export, an unknown key layout.
    """

    def __init__(
        self,
        folder: Path | str,
        size: ModelSize,
        names: Iterable[str] | None = None,
        device: torch.device | str = "cpu",
    ):
        super().__init__(size, names)
        self.folder, self.device = Path(folder), torch.device(device)
        problems: list[str] = []
        self.key_layout, self._files = _inspect(self.folder, size, self.names, problems)
        if problems:
            raise CheckpointError(f"checkpoint {self.folder}", tuple(problems), _ACCEPTED)

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """The part `region` of the parameter `name`; nothing else is read from the file."""
        shape, dtype = self.parameter(name)
        region = checked_region(name, shape, region)
        out = torch.empty(region_shape(region), dtype=dtype)
        key = stored_key(name, self.key_layout)
        with safe_open(self.folder / self._files[key], framework="pt") as file:
            stored, start = file.get_slice(key), 0
            for rows in region[0]:
                for run in stored_rows(name, self.key_layout, self.size, rows):
                    _copy(out[start : start + len(run)], stored, run, region[1:])
                    start += len(run)
        return out.to(self.device)


def _copy(out: Tensor, stored, rows: range, columns: Region) -> None:
    """Copy stored `rows` and, of a matrix, the column ranges of `columns` into `out`."""
    if not rows:
        return
    if not columns:
        out.copy_(stored[rows.start : rows.stop])
        return
    start = 0
    for part in columns[0]:
        if part:
            values = stored[rows.start : rows.stop, part.start : part.stop]
            out[:, start : start + len(part)] = values
            start += len(part)


def _inspect(
    folder: Path, size: ModelSize, names: Iterable[str], problems: list[str]
) -> tuple[str, dict[str, str]]:
    """The key layout, and the shard of every stored tensor needed; adds to `problems`."""
    weight_map = _read_index(folder, problems)
    if problems:
        return "", {}
    _check_pruned(weight_map, names, problems)
    key_layout = detect_key_layout(weight_map)
    if key_layout is None:
        problems.append(f"unknown key layout: the index names {sorted(weight_map)[:3]} and others")
        return "", {}
    _check_config(folder / "config.json", config(size, key_layout), problems)
    needed = stored_tensors(size, key_layout, names)
    by_file: dict[str, dict[str, Stored]] = {}
    for key, entry in needed.items():
        if key in weight_map:
            by_file.setdefault(weight_map[key], {})[key] = entry
        else:
            problems.append(f"missing tensor {key}: not in the index")
    for file, entries in sorted(by_file.items()):
        _check_shard(folder / file, entries, problems)
    return key_layout, {key: weight_map[key] for key in needed if key in weight_map}


def _read_index(folder: Path, problems: list[str]) -> dict[str, str]:
    """The weight map of the only index in the folder."""
    paths = [folder / f"{stem}.safetensors.index.json" for stem in FILE_STEM.values()]
    found = [path for path in paths if path.is_file()]
    if len(found) != 1:
        what = "two indexes" if found else "missing index"
        problems.append(f"{what}: {' or '.join(path.name for path in paths)}")
        return {}
    try:
        weight_map = dict(json.loads(found[0].read_bytes())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        problems.append(f"unreadable index {found[0].name}: {error!r}")
        return {}
    for file in sorted({repr(file) for file in weight_map.values() if not _is_name(file)}):
        problems.append(f"shard {file} in {found[0].name}: not a file name in the folder")
    return weight_map


def _is_name(file: object) -> bool:
    return isinstance(file, str) and Path(file).name == file


def _check_pruned(weight_map: dict[str, str], names: Iterable[str], problems: list[str]) -> None:
    """Re-exports that put a small curve table in place of the time embedder are another model."""
    tables = [key for key in sorted(weight_map) if key.startswith("adaln_")]
    stem = "time_embedder."
    lost = any(name.startswith(stem) for name in names) and not any(
        key.startswith(stem) for key in weight_map
    )
    if tables or lost:
        found = ", ".join(tables) or "nothing"
        problems.append(f"pruned re-export: {found} in place of the time embedder")


def _check_config(path: Path, expected: dict[str, object], problems: list[str]) -> None:
    """Every field that the file has must be that of the model size."""
    if not path.is_file():
        return
    try:
        received = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        problems.append(f"unreadable {path.name}: {error!r}")
        return
    for field, value in expected.items():
        if received.get(field, value) != value:
            problems.append(f"{path.name}: {field} is {received[field]}, expected {value}")


def _check_shard(path: Path, entries: dict[str, Stored], problems: list[str]) -> None:
    """The shard is whole and holds `entries` with their shapes and dtypes."""
    if not path.is_file():
        first, *others = entries
        problems.append(
            f"missing shard {path.name}, needed for {first}"
            + (f" and {len(others)} others" if others else "")
        )
        return
    try:
        header = _read_header(path)
    except ValueError as error:
        problems.append(f"shard {path.name}: {error}")
        return
    for key, entry in entries.items():
        if key not in header:
            problems.append(f"missing tensor {key}: not in shard {path.name}")
            continue
        shape, dtype = tuple(header[key]["shape"]), header[key]["dtype"]
        where, expected = f"{key} in {path.name}", _DTYPES[entry.dtype]
        if shape != entry.shape:
            problems.append(f"mis-shaped tensor {where}: {shape}, expected {entry.shape}")
        if dtype != expected:
            problems.append(f"wrong dtype of tensor {where}: {dtype}, expected {expected}")


def _read_header(path: Path) -> dict[str, dict]:
    """Dtype, shape and offsets of every tensor of a safetensors file.

    **Raises:** ValueError if the file does not hold exactly what its header describes.
    """
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if num_bytes < 8 + length:
            raise ValueError(f"truncated: {num_bytes} bytes, the header alone takes {8 + length}")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = [(e["dtype"], e["shape"], e["data_offsets"]) for e in header.values()]
            for dtype, shape, (start, stop) in entries:
                numbers = [*shape, start, stop]
                if type(dtype) is not str or not all(type(n) is int for n in numbers):
                    raise TypeError(f"dtype {dtype!r}, shape {shape!r}, offsets {[start, stop]!r}")
            end = max((offsets[1] for _, _, offsets in entries), default=0)
        except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"unreadable header: {error!r}") from error
    at = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        size = math.prod(entry["shape"]) * _ITEM_BYTES.get(entry["dtype"], 0)
        if start != at or (size and stop - start != size):
            expected = [at, at + size]
            raise ValueError(f"offsets of {name} are {[start, stop]}, its place is {expected}")
        at = stop
    if num_bytes != 8 + length + end:
        what = "truncated" if num_bytes < 8 + length + end else "too long"
        raise ValueError(f"{what}: {num_bytes} bytes, the header describes {8 + length + end}")
    return header
