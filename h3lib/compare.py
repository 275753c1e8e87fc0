"""Bitwise comparison: elements are compared as integers of their width, never with a tolerance.

-0.0 differs from +0.0. Where both sides are NaN the payload is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from h3lib.contract import ReportError
from h3lib.layout import Region, region_shape
from h3lib.model.trace import Key, Record

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def take(tensor: Tensor, region: Region) -> Tensor:
    """The part of a tensor that a region names."""
    for dim, ranges in enumerate(region):
        parts = [tensor.narrow(dim, r.start, len(r)) for r in ranges]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return tensor


def different_elements(value: Tensor, canonical: Tensor) -> Tensor:
    """Where the bytes differ, `[n]` bool, of two flat tensors of one dtype and length.

    **Raises:** ReportError if they are not comparable.
    """
    if value.dtype != canonical.dtype or value.shape != canonical.shape:
        received = (str(value.dtype), tuple(value.shape))
        raise ReportError(
            "compared tensors", received, (str(canonical.dtype), tuple(canonical.shape))
        )
    integer = _INTEGERS[value.element_size()]
    differ = value.contiguous().view(integer) != canonical.contiguous().view(integer)
    return differ & ~(value.isnan() & canonical.isnan())


@dataclass(frozen=True)
class Difference:
    """How one rank's piece of a value compares with the canonical one; `first` is the first
    different element: its coordinate in the canonical tensor and both values."""

    name: str
    kind: str
    total: int
    different: int
    first: dict | None
    region: Region
    start: int | None

    @property
    def key(self) -> Key:
        return self.kind, self.name


def compare_record(record: Record, canonical: Tensor) -> Difference:
    """Compare one rank's record with the canonical tensor of that name, on the record's device."""
    expected = take(canonical, record.region).reshape(-1)
    value = record.tensor.reshape(-1)
    if record.start is not None:
        expected = expected[record.start : record.start + len(value)]
    expected = expected.to(value.device)
    differ = different_elements(value, expected)
    count, first = int(differ.sum()), None
    if count:
        at = int(differ.nonzero()[0])
        first = {
            "coordinate": _coordinate(at + (record.start or 0), record.region),
            "value": repr(value[at].item()),
            "canonical": repr(expected[at].item()),
        }
    return Difference(
        record.name, record.kind, len(value), count, first, record.region, record.start
    )


def _coordinate(flat: int, region: Region) -> list[int]:
    coordinate = []
    for size, ranges in zip(reversed(region_shape(region)), reversed(region), strict=True):
        flat, index = divmod(flat, size)
        for part in ranges:
            if index < len(part):
                coordinate.append(part[index])
                break
            index -= len(part)
    return coordinate[::-1]


def summarise(
    canonical: Mapping[Key, Tensor],
    digests: Mapping[Key, str],
    ranks: list[list[Difference]],
    num_stages: int = 1,
) -> list[dict]:
    """One entry a compared value, over all ranks: the `tensors` of a report.

    `digests` are the SHA-256 of the canonical values. `covered` says that every rank of the stages
    that have the value shows its piece, and that the pieces together are the whole.

    **Raises:** ReportError for a value that is not canonical, or that a rank shows twice.
    """
    by_key: dict[Key, list[tuple[int, Difference]]] = {key: [] for key in canonical}
    for rank, differences in enumerate(ranks):
        keys = [difference.key for difference in differences]
        pieces = [(d.key, d.start) for d in differences if d.total or d.start is None]
        if len(set(pieces)) != len(pieces) or not set(keys) <= by_key.keys():
            raise ReportError(f"values of rank {rank}", keys, "each canonical value once")
        for difference in differences:
            by_key[difference.key].append((rank, difference))
    return [
        {**_summary(key, canonical[key], found, len(ranks) // num_stages), "sha256": digests[key]}
        for key, found in by_key.items()
    ]


def count(ranks: list[list[Difference]]) -> dict[str, int]:
    """How many values all ranks showed, their elements, and how many of these differ."""
    found = [difference for differences in ranks for difference in differences]
    return {
        "values": len({difference.key for difference in found}),
        "total": sum(difference.total for difference in found),
        "different": sum(difference.different for difference in found),
    }


def _summary(key: Key, tensor: Tensor, found: list[tuple[int, Difference]], stage: int) -> dict:
    first = next(({"rank": rank, **d.first} for rank, d in found if d.first), None)
    pieces = {(d.region, d.start, d.total) for _, d in found}
    return {
        "name": key[1],
        "kind": key[0],
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "total": sum(d.total for _, d in found),
        "different": sum(d.different for _, d in found),
        "covered": _whole_stages(list(dict.fromkeys(rank for rank, _ in found)), stage)
        and _covered(tuple(tensor.shape), pieces),
        "first": first,
    }


def _whole_stages(ranks: list[int], stage: int) -> bool:
    """Whether the ranks, ascending, are all of some stages of `stage` ranks each, one at least."""
    stages = {rank // stage for rank in ranks}
    return ranks == [s * stage + r for s in sorted(stages) for r in range(stage)] != []


def _covered(shape: tuple[int, ...], pieces: set[tuple[Region, int | None, int]]) -> bool:
    """Whether the regions whose pieces are all there make up the whole."""
    parts: dict[Region, list[tuple[int, int]]] = {}
    for region, start, num_elements in pieces:
        first = start or 0
        parts.setdefault(region, []).append((first, first + num_elements))
    shown = [r for r, found in parts.items() if _reach(found) == math.prod(region_shape(r))]
    edges = [
        sorted({0, size, *(e for r in shown for p in r[dim] for e in (p.start, p.stop))})
        for dim, size in enumerate(shape)
    ]
    seen = torch.zeros([len(cuts) - 1 for cuts in edges], dtype=torch.bool)
    for region in shown:
        cells = [
            torch.tensor([i for i, edge in enumerate(cuts[:-1]) if any(edge in p for p in ranges)])
            for cuts, ranges in zip(edges, region, strict=True)
        ]
        seen[torch.meshgrid(*(c.long() for c in cells), indexing="ij")] = True
    return bool(seen.all())


def _reach(parts: list[tuple[int, int]]) -> int:
    """How far the intervals reach from 0 without a gap."""
    reach = 0
    for start, stop in sorted(parts):
        if start > reach:
            break
        reach = max(reach, stop)
    return reach
