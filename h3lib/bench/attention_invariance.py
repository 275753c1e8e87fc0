"""What must not change a bit of attention on a GPU; `bits.py` runs it.

Every check compares bytes of out, L, delta, dq, dk, dv with those of one whole run:

    slices      query rows, key rows (what a CP shard owns), heads (what a TP rank owns)
    neighbours  other rows of the same tile overwritten; query rows and heads permuted
    tiles       every entry of the forward's table, other grids
    repeats     under a second stream's load, as a CUDA graph, in a second process with a cold cache
    strides     views more than 2^31 elements into their buffer

A finding says how many elements differed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import h3lib.ops.hopper  # noqa: F401  registers back end triton
from h3lib.bench.findings import Finding, in_a_cold_process
from h3lib.contract import NUM_SEQUENCE_UNITS, Contract, RowUnits
from h3lib.ops.attention import attention_delta, attention_dkv, attention_dq, attention_forward
from h3lib.ops.hopper import attention_forward as forward_kernel

CONTRACT = Contract()

@dataclass
class Whole:
    """q, k, v, dO `[T, N, 128]` and what the kernels make of all rows and heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def __post_init__(self):
        self.out, self.lse = attention_forward(self.q, self.k, self.v, CONTRACT, backend="triton")
        self.delta = attention_delta(self.dout, self.out, backend="triton")
        self.dq = attention_dq(*self.operands(), backend="triton")
        self.dk, self.dv = attention_dkv(*self.operands(), backend="triton")

    def operands(self) -> tuple:
        return self.q, self.k, self.v, self.dout, self.lse, self.delta, CONTRACT

    def results(self) -> tuple[Tensor, ...]:
        return self.out, self.lse, self.delta, self.dq, self.dk, self.dv

    def digest(self) -> str:
        sha = hashlib.sha256()
        for x in self.results():
            sha.update(x.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return sha.hexdigest()


def draw(rows: int, heads: int, seed: int = 0) -> Whole:
    """Random operands; q, k, v are views of one buffer, so that rows are not contiguous."""
    generator = torch.Generator("cuda").manual_seed(seed + rows)
    shape = (rows, 4, heads, 128)
    x = torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)
    return Whole(x[:, 0], x[:, 1], x[:, 2], x[:, 3].contiguous())


def query_rows(whole: Whole, rows: slice, finding: Finding, heads: slice = slice(None)) -> None:
    """Forward, delta and dq of some query rows against all keys."""
    q, dout = whole.q[rows, heads], whole.dout[rows, heads]
    k, v = whole.k[:, heads], whole.v[:, heads]
    out, lse = attention_forward(q, k, v, CONTRACT, backend="triton")
    delta = attention_delta(dout, out, backend="triton")
    dq = attention_dq(q, k, v, dout, lse, delta, CONTRACT, backend="triton")
    ours = (out, lse, delta, dq)
    for value, all_rows in zip(ours, (whole.out, whole.lse, whole.delta, whole.dq), strict=True):
        finding.compare(value, all_rows[rows, heads])


def key_rows(whole: Whole, rows: slice, finding: Finding, heads: slice = slice(None)) -> None:
    """dk and dv of some keys from all queries."""
    q, k, v, dout = (x[:, heads] for x in (whole.q, whole.k, whole.v, whole.dout))
    lse, delta = (x[:, heads].contiguous() for x in (whole.lse, whole.delta))
    dk, dv = attention_dkv(q, k[rows], v[rows], dout, lse, delta, CONTRACT, backend="triton")
    finding.compare(dk, whole.dk[rows, heads]).compare(dv, whole.dv[rows, heads])


def shards(rows: int, degree: int) -> Iterator[slice]:
    """The rows of each rank of a CP group, as the contract cuts them."""
    units = RowUnits(rows, CONTRACT)
    for rank in range(degree):
        cut = [NUM_SEQUENCE_UNITS * r // degree for r in (rank, rank + 1)]
        own = units.sequence_unit_rows(range(*cut))
        if own:
            yield slice(own.start, own.stop)


def check_slices(rows: int, heads: int, degrees: tuple[int, ...] = (2, 3, 8)) -> Iterator[Finding]:
    """Rows of CP shards, other slices, and heads of TP ranks."""
    whole = draw(rows, heads)
    for degree in degrees:
        finding = Finding("CP shards", f"T={rows} N={heads} cp={degree}")
        for part in shards(rows, degree):
            query_rows(whole, part, finding)
            key_rows(whole, part, finding)
        yield finding
    finding = Finding("odd slices", f"T={rows} N={heads}")
    for start, stop in (
        (0, 1),
        (rows // 3, rows // 3 + 1),
        (rows // 5, rows // 2 + 1),
        (rows - 1, rows),
    ):
        query_rows(whole, slice(start, stop), finding)
        key_rows(whole, slice(start, stop), finding)
    yield finding
    if heads > 1:
        finding = Finding("TP heads", f"T={rows} N={heads}")
        for part in (slice(0, 1), slice(1, heads), slice(heads // 2, heads)):
            query_rows(whole, slice(None), finding, part)
            key_rows(whole, slice(None), finding, part)
        yield finding


def check_neighbours(rows: int, heads: int) -> Iterator[Finding]:
    """One row kept, every other row of its side overwritten with huge values and NaN."""
    whole = draw(rows, heads)
    finding = Finding("neighbours mutated", f"T={rows} N={heads}")
    for kept in sorted({0, rows // 2, rows - 1}):
        others = torch.arange(rows, device="cuda") != kept
        changed = {name: getattr(whole, name).clone() for name in ("q", "k", "v", "dout")}
        for x in changed.values():
            x[others] = torch.where(torch.rand_like(x[others]) < 0.01, torch.nan, 3e38).to(x.dtype)
        q, dout = changed["q"], changed["dout"]
        out, lse = attention_forward(q, whole.k, whole.v, CONTRACT, backend="triton")
        delta = attention_delta(dout, out, backend="triton")
        dq = attention_dq(q, whole.k, whole.v, dout, lse, delta, CONTRACT, backend="triton")
        arguments = (whole.q, changed["k"], changed["v"], whole.dout, whole.lse, whole.delta)
        dk, dv = attention_dkv(*arguments, CONTRACT, backend="triton")
        for value, all_rows in zip((out, lse, delta, dq, dk, dv), whole.results(), strict=True):
            finding.compare(value[kept], all_rows[kept])
    yield finding
    order = torch.randperm(rows, device="cuda")
    finding = Finding("query rows permuted", f"T={rows} N={heads}")
    out, lse = attention_forward(whole.q[order], whole.k, whole.v, CONTRACT, backend="triton")
    finding.compare(out, whole.out[order]).compare(lse, whole.lse[order])
    statistics = (whole.lse[order], whole.delta[order])
    dq = attention_dq(
        whole.q[order], whole.k, whole.v, whole.dout[order], *statistics, CONTRACT, backend="triton"
    )
    yield finding.compare(dq, whole.dq[order])
    if rows > CONTRACT.key_block:  # below, too few sums for the control to be sure to differ
        control = Finding("control: key rows permuted", f"T={rows} N={heads}", expected="different")
        k, v = whole.k[order], whole.v[order]
        _, lse = attention_forward(whole.q, k, v, CONTRACT, backend="triton")
        yield control.compare(lse, whole.lse)


def check_tiles(rows: int, heads: int) -> Iterator[Finding]:
    """Every tile height of the table and other grids give the bytes of the table's own choice."""
    whole = draw(rows, heads)
    for groups in forward_kernel.GROUPS:
        for programs in (7, 132):
            finding = Finding(
                "directive table", f"T={rows} N={heads} groups={groups} grid={programs}"
            )
            out, lse = torch.full_like(whole.out, torch.nan), torch.full_like(whole.lse, torch.nan)
            forward_kernel.forward_launch(
                whole.q, whole.k, whole.v, out, lse, programs, groups
            ).start()
            yield finding.compare(out, whole.out).compare(lse, whole.lse)


def check_repeats(rows: int, heads: int, repeats: int = 200) -> Iterator[Finding]:
    """The same bytes while a second stream keeps the GPU busy, and from a CUDA graph."""
    whole = draw(rows, heads)
    finding = Finding(f"{repeats} repeats under load", f"T={rows} N={heads}")
    load = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    operands = (whole.q, whole.k, whole.v, whole.dout)
    for _ in range(repeats):
        with torch.cuda.stream(load):
            torch.matmul(a, a)
        for value, first in zip(Whole(*operands).results(), whole.results(), strict=True):
            finding.compare(value, first)
    yield finding
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = Whole(*operands)
    finding = Finding("CUDA graph", f"T={rows} N={heads}")
    for _ in range(3):
        graph.replay()
        for value, first in zip(captured.results(), whole.results(), strict=True):
            finding.compare(value, first)
    yield finding


def check_second_process(rows: int, heads: int) -> Iterator[Finding]:
    """A process that compiles everything again gives the same digest."""
    mine = draw(rows, heads).digest()
    module = "h3lib.bench.attention_invariance"
    theirs = in_a_cold_process(f"from {module} import draw; print(draw({rows}, {heads}).digest())")
    details = {"digest": mine, "second": theirs}
    yield Finding(
        "second process, cold cache", f"T={rows} N={heads}", 1, int(mine != theirs), details=details
    )


def check_strides() -> Iterator[Finding]:
    """The last head of the last rows of a buffer of more than 2^31 elements."""
    rows, heads = 301_000, 56
    buffer = torch.empty((rows, heads, 128), device="cuda", dtype=torch.bfloat16)
    far = buffer[:, heads - 1 :]
    far[rows - 4096 :] = torch.randn((4096, 1, 128), device="cuda").to(torch.bfloat16)
    x = far[rows - 1100 :]
    finding = Finding("offset over 2^31 elements", f"element {x.storage_offset()} on")
    near = Whole(*(x.contiguous() for _ in range(4)))
    for value, whole in zip(Whole(x, x, x, x).results(), near.results(), strict=True):
        finding.compare(value, whole)
    queries = slice(rows - 3000, rows)
    out, lse = attention_forward(far, x, x, CONTRACT, backend="triton")
    part, part_lse = attention_forward(far[queries].contiguous(), x, x, CONTRACT, backend="triton")
    yield finding.compare(out[queries], part).compare(lse[queries], part_lse)
