"""The canonical values of a block: what one process alone computes, by (kind, name)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from h3lib.contract import ReportError
from h3lib.layout import region_shape
from h3lib.model.trace import Key, Record


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


def save_canonical(tensors: Mapping[Key, Tensor], path: str) -> None:
    """Write canonical values to one safetensors file."""
    save_file({"/".join(key): tensor.cpu() for key, tensor in tensors.items()}, path)


class CanonicalFile(Mapping):
    """The canonical values that `save_canonical` wrote, read one at a time."""

    def __init__(self, path: str):
        self.file = safe_open(path, framework="pt")

    def __iter__(self) -> Iterator[Key]:
        return (tuple(name.split("/", 1)) for name in self.file.keys())  # noqa: SIM118

    def __len__(self) -> int:
        return len(self.file.keys())

    def __getitem__(self, key: Key) -> Tensor:
        return self.file.get_tensor("/".join(key))
