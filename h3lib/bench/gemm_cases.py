"""Products of one main block at full size: operands, the op as the block calls it, the library's.

The library is `torch.matmul` on the same operands; dx of several parts: on the parts joined
beforehand, the best that it can be given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import h3lib.ops.hopper  # noqa: F401  registers back end triton
from h3lib.bench.measure import num_buffer_sets
from h3lib.contract import RowUnits, model_size
from h3lib.ops.adaln import timestep_chain_dw
from h3lib.ops.gemm import linear_dx, linear_forward, row_fold_product, unit_tree_product

NUM_UNITS = 8
MATMUL = "torch.matmul"
SIZE = model_size("full")
D, A, F, E = SIZE.hidden_size, SIZE.inner_dim, SIZE.ffn_dim, SIZE.time_embed_dim

Operands = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One product: `make(rows)` draws operands, `ours` and `theirs` multiply them."""

    op: str
    name: str
    make: Callable[[int], Operands]
    ours: Callable[..., object]
    theirs: Callable[..., object]
    against: str = MATMUL

    def sets(self, rows: int) -> list[Operands]:
        first = self.make(rows)
        num_bytes = sum(t.numel() * t.element_size() for t in first)
        return [first, *(self.make(rows) for _ in range(num_buffer_sets(num_bytes) - 1))]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def forward_case(name: str, k: int, n: int) -> Case:
    return Case(
        "linear_forward", name, lambda t: (random(t, k), random(n, k)),
        lambda x, w: linear_forward(x, w, backend="triton"), lambda x, w: torch.matmul(x, w.T),
    )  # fmt: skip


def dx_case(name: str, n: int, k: int) -> Case:
    return Case(
        "linear_dx", name, lambda t: (random(t, n), random(n, k)),
        lambda dy, w: linear_dx(dy, w, backend="triton"), torch.matmul,
    )  # fmt: skip


def tree_forward_case(name: str, k: int, n: int) -> Case:
    def ours(x: Tensor, w: Tensor) -> Tensor:
        return unit_tree_product([(x, w.T)], NUM_UNITS, torch.bfloat16, backend="triton")

    return Case("unit_tree_product", name, lambda t: (random(t, k), random(n, k)), ours,
                lambda x, w: torch.matmul(x, w.T))  # fmt: skip


def tree_dx_case(name: str, num_parts: int, width: int, n: int) -> Case:
    def make(rows: int) -> Operands:
        dy, w = random(rows, num_parts * width), random(num_parts * width, n)
        return dy, w, *(part.contiguous() for part in dy.chunk(num_parts, dim=1))

    def ours(dy: Tensor, w: Tensor, *parts: Tensor) -> Tensor:
        pairs = list(zip(parts, w.chunk(num_parts), strict=True))
        return unit_tree_product(pairs, NUM_UNITS, torch.bfloat16, backend="triton")

    return Case("unit_tree_product", name, make, ours, lambda dy, w, *parts: torch.matmul(dy, w))


def dw_case(name: str, n: int, k: int) -> Case:
    def ours(dy: Tensor, x: Tensor) -> Tensor:
        return row_fold_product(dy, x, RowUnits(len(dy)), torch.bfloat16, backend="triton")

    return Case("row_fold_product", name, lambda t: (random(t, n), random(t, k)), ours,
                lambda dy, x: torch.matmul(dy.T, x))  # fmt: skip


CASES = (
    forward_case("q, k or v forward", D, A),
    forward_case("ff-in forward", D, 2 * F),
    dx_case("to_out dx", D, A),
    dx_case("ff-down dx", D, F),
    tree_forward_case("to_out forward", A, D),
    tree_forward_case("ff-down forward", F, D),
    tree_dx_case("q, k, v dx", 3, A, D),
    tree_dx_case("ff-in dx", 2, F, D),
    dw_case("to_q, to_k or to_v dw", A, D),
    dw_case("to_out dw", D, A),
    dw_case("ff-in dw", 2 * F, D),
    dw_case("ff-down dw", D, F),
)


def timestep_cases() -> tuple[Case, ...]:
    """The AdaLN linear of one block: 520 MB of weight, a handful of timesteps as rows."""

    def ds(dm: Tensor, w: Tensor) -> Tensor:
        return unit_tree_product([(dm, w)], NUM_UNITS, torch.bfloat16, backend="triton")

    width = SIZE.adaln_dim
    return (
        forward_case("AdaLN linear forward", E, width),
        Case("unit_tree_product", "AdaLN linear ds",
             lambda m: (random(m, width), random(width, E)), ds, torch.matmul),
        Case("timestep_chain_dw", "AdaLN linear dw", lambda m: (random(m, width), random(m, E)),
             lambda dm, s: timestep_chain_dw(dm, s, backend="triton"),
             lambda dm, s: torch.matmul(dm.T.float(), s.float())),
    )  # fmt: skip


def fp32_cases() -> tuple[Case, ...]:
    """IEEE FP32 products of the embedders and heads; torch.matmul with TF32 off."""

    fp32 = torch.float32

    def case(name: str, k: int, n: int) -> Case:
        return Case("linear_forward", name,
                    lambda t: (random(t, k, dtype=fp32), random(n, k, dtype=fp32)),
                    lambda x, w: linear_forward(x, w, backend="triton"),
                    lambda x, w: torch.matmul(x, w.T), "torch.matmul FP32")  # fmt: skip

    return case("FP32 proj_in", 96, D), case("FP32 proj_out", D, 96)
