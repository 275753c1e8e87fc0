"""What the ranks of a group must agree on before a byte moves: the call, and what each sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from h3lib.contract import PeerError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """What every rank of a group must have asked for alike; `shape` and `cuts` are global."""

    name: str
    shape: Shape = ()
    dtype: str = ""
    result: str = ""
    cuts: tuple[int, ...] = ()
    row_cuts: tuple[int, ...] = ()


def most_common(values: Sequence[object]) -> int:
    """Place of the value that most have; the first of several."""
    return max(range(len(values)), key=lambda place: (values.count(values[place]), -place))


def check_calls(calls: Sequence[Call | None], ranks: Sequence[int] | None = None) -> None:
    """**Raises:** PeerError for the first rank whose call is not that of most of the group.

    `ranks` are the global ranks of the group, for the message. Every rank evaluates the same list,
    so every rank raises the same error.
    """
    usual, names = most_common(calls), _names(ranks, len(calls))
    expected, of_usual = calls[usual], names[usual]
    wanted = expected and expected.name
    for rank, call in zip(names, calls, strict=True):
        if call == expected:
            continue
        name = call and call.name
        if name != wanted:
            raise PeerError(f"collective on {rank}", name, f"{wanted!r} as on {of_usual}")
        for field in fields(Call):
            here, there = getattr(expected, field.name), getattr(call, field.name)
            if here != there:
                subject = f"{field.name} of {name} on {rank}"
                raise PeerError(subject, there, f"{here!r} as on {of_usual}")


def check_exchange(
    sent: list[list[tuple]], expected: list[list[Shape]], ranks: Sequence[int] | None = None
) -> None:
    """**Raises:** PeerError for the first (source, destination) whose tensors do not agree.

    `sent[s][d]` is (shape, dtype) of what s sends to d; `expected[d][s]` the shape d expects.
    Every rank evaluates the same tables, so every rank raises the same error.
    """
    names = _names(ranks, len(sent))
    dtypes = {entry[1] for row in sent for entry in row}
    if len(dtypes) > 1:
        raise PeerError("dtypes of one exchange", sorted(dtypes), "one dtype on every rank")
    for source, row in enumerate(sent):
        for destination, (shape, _) in enumerate(row):
            want = tuple(expected[destination][source])
            if shape != want:
                subject = f"shape sent by {names[source]} to {names[destination]}"
                raise PeerError(subject, shape, want)


def _names(ranks: Sequence[int] | None, size: int) -> list[str]:
    if ranks is None:
        return [f"rank {place} of the group" for place in range(size)]
    return [f"rank {rank}" for rank in ranks]
