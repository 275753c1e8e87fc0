"""The canonical values of a block: what one process alone computes, by (kind, name)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from h3lib.contract import ReportError
from h3lib.layout import region_shape
from h3lib.model.trace import Key, Record
from h3lib.model.weights import digests


def canonical_tensors(records: Iterable[Record]) -> dict[Key, Tensor]:
    """The canonical values by (kind, name), each in its global shape.

    **Raises:** ReportError if one name is recorded twice.
    """
    tensors: dict[Key, Tensor] = {}
    for record in records:
        key = record.kind, record.name
        if key in tensors:
            raise ReportError("records of one name", key, "one record a name")
        tensors[key] = record.tensor.reshape(region_shape(record.region)).contiguous()
    return tensors


def canonical_file(
    folder: Path, question: Mapping[str, object], compute: Callable[[], Iterable[Record]]
) -> tuple[Path, bool]:
    """The file in `folder` that answers `question`, and whether it was there already.

    The question is everything that the canonical values depend on; it names the file. A file that
    is damaged is computed again.
    """
    text = json.dumps(question, sort_keys=True, default=str)
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    path = folder / f"canonical-{name}.safetensors"
    if path.exists() and _is_whole(path):
        return path, True
    save_canonical(canonical_tensors(compute()), path)
    return path, False


def _is_whole(path: Path) -> bool:
    """Whether every value of a kept file has the SHA-256 that is written beside it."""
    try:
        file = CanonicalFile(path)
        return digests((key, file[key]) for key in file) == file.digests
    except (SafetensorError, KeyError, OSError):
        return False


def save_canonical(tensors: Mapping[Key, Tensor], path: str | Path) -> None:
    """Write canonical values and their SHA-256 to one safetensors file: whole or not there."""
    values = {"/".join(key): tensor.cpu() for key, tensor in tensors.items()}
    unfinished = f"{path}.{os.getpid()}"
    try:
        save_file(values, unfinished, digests(values.items()))
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)


class CanonicalFile(Mapping):
    """The canonical values that `save_canonical` wrote, read one at a time."""

    def __init__(self, path: str | Path):
        self.file = safe_open(path, framework="pt")
        self.digests = {_key(name): sha256 for name, sha256 in self.file.metadata().items()}

    def __iter__(self) -> Iterator[Key]:
        return map(_key, self.file.keys())

    def __len__(self) -> int:
        return len(self.file.keys())

    def __getitem__(self, key: Key) -> Tensor:
        return self.file.get_tensor("/".join(key))


def _key(name: str) -> Key:
    return tuple(name.split("/", 1))
