"""Row-wise ops of the block beside a copy: `h3lib bench kernels --parts rowwise --out FILE`.

theirs is a device-to-device copy that reads and writes as many bytes together as the op reads and
writes, so that ratio is the share of the measured copy bandwidth that the op reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import h3lib.ops.hopper  # noqa: F401  registers back end triton
from h3lib.bench.measure import Protocol, Row, compare, num_buffer_sets
from h3lib.contract import RowUnits, model_size
from h3lib.ops import adaln, norm, rope, swiglu

ROWS = (264, 4096, 14910, 37776)
GRAPH_MAX_ROWS = 4096
PROTOCOL = Protocol(round_ms=20.0, warm_up_ms=60.0)
SIZE = model_size("full")
D, F, N, H = SIZE.hidden_size, SIZE.ffn_dim, SIZE.num_attention_heads, SIZE.attention_head_dim
A, HALF = N * H, SIZE.rotary_dim // 2
TRITON = {"backend": "triton"}

EVERY = range(64)
TABLE_ROWS = 6


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def table_rows(rows: int) -> Tensor:
    """Runs of one table row, as packed jobs have."""
    return torch.arange(rows, device="cuda") * TABLE_ROWS // rows


class Case(NamedTuple):
    """One op: its call on one operand set, how to make a set, bytes read and written for a row."""

    name: str
    call: Callable[..., object]
    make: Callable[[], tuple]
    row_bytes: int


def cases(rows: int) -> list[Case]:
    """Every row-wise op on T rows; the table and the sums of row blocks are not counted."""
    units, of_table = RowUnits(rows), table_rows(rows)

    def drawn(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: tuple(random(rows, *shape) for shape in shapes)

    def with_table(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: (*drawn(*shapes)(), random(TABLE_ROWS, 6, D))

    def with_norm(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
        def make() -> tuple[Tensor, ...]:
            x, *others = drawn(*shapes)()
            r = torch.rand((*x.shape[:-1], 1), device="cuda")
            return (x, *others, random(x.shape[-1]), r, random(TABLE_ROWS, 6, D))

        return make

    def modulate(h, table):
        return adaln.modulate_forward(h, table[:, 0], table[:, 1], of_table, **TRITON)

    def modulated_norm(da, x, w, r, table):
        place = of_table, units, EVERY
        return adaln.modulated_norm_backward(da, x, w, r, table[:, 1], *place, **TRITON)

    def residual(x, y, table):
        return adaln.gated_residual_forward(x, table[:, 2], y, of_table, **TRITON)

    def residual_backward(dx, y, table):
        place = of_table, units, EVERY
        return adaln.gated_residual_backward(dx, table[:, 2], y, *place, **TRITON)

    def norm_forward(x, w, r, table):
        return norm.rms_norm_forward(x, w, 1e-5, **TRITON)

    def norm_added(x, dy, dx0, w, r, table):
        return norm.rms_norm_backward(dy, x, w, r, dx0, **TRITON)

    def norm_backward(x, dy, w, r, table):
        return norm.rms_norm_backward(dy, x, w, r, **TRITON)

    def head_weight(x, dy, w, r, table):
        return norm.head_norm_dw_leaves(dy, x, r, units, range(8), 8, **TRITON)

    def on_triton(op: Callable) -> Callable:
        return lambda *operands: op(*operands, **TRITON)

    hidden, heads, ffn = (D,), (N, H), (F,)
    rotary = drawn(heads, (HALF,), (HALF,))
    rotary_bytes = 4 * A + 4 * HALF
    return [
        Case("swiglu forward", on_triton(swiglu.swiglu_forward), drawn(ffn, ffn), 6 * F),
        Case("swiglu backward", on_triton(swiglu.swiglu_backward), drawn(ffn, ffn, ffn), 10 * F),
        Case("modulate forward", modulate, with_table(hidden), 4 * D),
        Case("modulated norm backward", modulated_norm, with_norm(hidden, hidden), 6 * D + 4),
        Case("residual forward", residual, with_table(hidden, hidden), 6 * D),
        Case("residual backward", residual_backward, with_table(hidden, hidden), 6 * D),
        Case("rotary forward", on_triton(rope.rotary_forward), rotary, rotary_bytes),
        Case("rotary backward", on_triton(rope.rotary_backward), rotary, rotary_bytes),
        Case("norm forward", norm_forward, with_norm(hidden), 4 * D + 4),
        Case("norm backward, added", norm_added, with_norm(hidden, hidden, hidden), 8 * D + 4),
        Case("head norm forward", norm_forward, with_norm(heads), 4 * A + 4 * N),
        Case("head norm backward", norm_backward, with_norm(heads, heads), 6 * A + 4 * N),
        Case("head norm weight", head_weight, with_norm(heads, heads), 4 * A + 4 * N),
    ]


def measure(rows: int) -> Iterator[Row]:
    """Every op; a graph where eager launches cost more than they run."""
    protocol = PROTOCOL.under_graph() if rows <= GRAPH_MAX_ROWS else PROTOCOL
    for case in cases(rows):
        num_bytes = rows * case.row_bytes
        num_sets = num_buffer_sets(num_bytes)
        sets = [case.make() for _ in range(num_sets)]
        copies = [torch.randn(num_bytes // 4, device="cuda").to(torch.bfloat16) for _ in sets]
        targets = [torch.empty_like(x) for x in copies]

        def ours(i: int, call: Callable = case.call, sets: list = sets) -> object:
            return call(*sets[i])

        def theirs(i: int, copies: list = copies, targets: list = targets) -> object:
            return targets[i].copy_(copies[i])

        what = f"{num_bytes} bytes"
        yield compare(case.name, what, rows, "copy", ours, theirs, num_sets, protocol)

