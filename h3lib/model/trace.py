"""Trace: named values of one block on one rank, with the part of the canonical value they are.

The block names every value that it computes (`NODES`), every FP32 root before its rounding
(`ROOTS`), its output and its gradients. A trace keeps them for comparison; without one, nothing is
kept and the arithmetic is the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from h3lib.contract import OperandError
from h3lib.layout import Region, region_shape

OUTPUT, ROOT, GRADIENT, NODE = "output", "root", "gradient", "node"
KINDS = (OUTPUT, ROOT, GRADIENT, NODE)

NODES = {
    # name: shape, as D, A, F, N columns of all rows, E or m of all timesteps, or the AdaLN table
    **dict.fromkeys(("adaln.s", "d.adaln.s"), "E"),
    "adaln.m": "m",
    "d.adaln.m": "table",
    **dict.fromkeys(
        ("norm1.out", "attn.in", "attn.out", "residual1", "norm2.out", "ff.in", "ff.out"), "D"
    ),
    **dict.fromkeys(
        ("d.ff.out", "d.ff.in", "d.norm2.out", "d.residual1", "d.attn.out", "d.attn.in"), "D"
    ),
    "d.norm1.out": "D",
    **dict.fromkeys(("attn.q", "attn.k", "attn.v", "attn.q_norm", "attn.k_norm"), "A"),
    **dict.fromkeys(("attn.q_rope", "attn.k_rope", "attn.heads", "d.attn.heads"), "A"),
    **dict.fromkeys(("d.attn.q_rope", "d.attn.k_rope", "d.attn.q", "d.attn.k", "d.attn.v"), "A"),
    **dict.fromkeys(("attn.lse", "attn.delta"), "N"),
    **dict.fromkeys(("ff.value", "ff.gate", "ff.swiglu"), "F"),
    **dict.fromkeys(("d.ff.value", "d.ff.gate", "d.ff.swiglu"), "F"),
}
NODE_ROOTS = ("attn.out", "ff.out", "d.ff.in", "d.attn.in", "d.adaln.m", "d.adaln.s")


Key = tuple[str, str]
"""(kind, name) of a value."""


@dataclass(frozen=True)
class Record:
    """One rank's piece of a named value.

    `region` is the part of the canonical tensor that the rank's tensor is. A root is finished in
    slices: `start` then says where the piece starts in the flattened region.
    """

    name: str
    kind: str
    tensor: Tensor
    region: Region
    start: int | None = None

    def __post_init__(self):
        shape = region_shape(self.region)
        if self.start is None and tuple(self.tensor.shape) != shape:
            raise OperandError(f"shape of {self.kind} {self.name}", tuple(self.tensor.shape), shape)


@dataclass
class Trace:
    """Collects records in the order in which the block makes them."""

    records: list[Record] = field(default_factory=list)

    def add(self, name: str, kind: str, tensor: Tensor, region: Region) -> None:
        if kind == NODE and name not in NODES:
            raise OperandError("name of a node", name, ", ".join(NODES))
        self.records.append(Record(name, kind, tensor.detach(), region))

    def root(self, name: str, region: Region):
        """Observer of a collective that keeps the FP32 root of the slice finished here."""

        def observe(root: Tensor, start: int) -> None:
            self.records.append(Record(name, ROOT, root.detach(), region, start))

        return observe


class ModelTrace(Trace):
    """Collects what a whole model shows: outputs, boundaries of its parts, and of its parameters
    gradients and FP32 roots. The nodes inside a block are left to the trace of one block."""

    def add(self, name: str, kind: str, tensor: Tensor, region: Region) -> None:
        self.records.append(Record(name, kind, tensor.detach(), region))


@dataclass
class PartTrace(Trace):
    """What one part of a model shows in a `ModelTrace`: its parameters `names`, under `prefix`."""

    prefix: str = ""
    names: frozenset[str] = frozenset()

    def add(self, name: str, kind: str, tensor: Tensor, region: Region) -> None:
        if name in self.names:
            self.records.append(Record(self.prefix + name, kind, tensor.detach(), region))

    def root(self, name: str, region: Region):
        return super().root(self.prefix + name, region) if name in self.names else None


def part_trace(trace: Trace | None, prefix: str, names: Iterable[str]) -> PartTrace | None:
    """The trace of a part whose records go to `trace`; None without one."""
    return None if trace is None else PartTrace(trace.records, prefix, frozenset(names))
