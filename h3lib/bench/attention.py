"""Attention at full size beside torch's SDPA: `h3lib bench kernels --parts attention --out FILE`.

    forward             attention_forward              SDPA forward, each back end
    backward            delta, dq, dkv (all launches)  SDPA backward, each back end
    forward + backward  both                           both, at few rows, also as a CUDA graph
    tiles               2 groups of 64 query rows      3 groups, whole and as a CP shard's queries

56 heads x 128, BF16. Ours reads and writes `[T, N, 128]`; the library gets `[1, N, T, 128]`
contiguous, the layout it is fastest with. Operands are random and rotated, see `measure.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import h3lib.ops.hopper  # noqa: F401  registers back end triton
from h3lib.bench.measure import Protocol, Row, compare, num_buffer_sets
from h3lib.contract import Contract, model_size
from h3lib.ops.attention import attention_delta, attention_dkv, attention_dq, attention_forward
from h3lib.ops.hopper.attention_forward import forward_launch
from h3lib.ops.hopper.compat import num_multiprocessors

ROWS = (264, 4096, 14910, 37776)
GRAPH_MAX_ROWS = 264
TILE_ROWS = (4096, 14910)
FLASH_MAX_ROWS = 14910  # 1.6 times cuDNN's time or more from 4,096 rows on (H200, 2026-11-30)
SIZE = model_size("full")
HEADS, HEAD_DIM = SIZE.num_attention_heads, SIZE.attention_head_dim
LIBRARIES = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
CONTRACT = Contract()


class Ours:
    """q, k, v, dO `[T, N, 128]` of one set, and what the forward leaves for the backward."""

    def __init__(self, rows: int):
        shape = (rows, HEADS, HEAD_DIM)
        draw = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        self.q, self.k, self.v, self.dout = draw
        self.forward()

    def forward(self) -> None:
        self.out, self.lse = attention_forward(self.q, self.k, self.v, CONTRACT, backend="triton")

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        delta = attention_delta(self.dout, self.out, backend="triton")
        operands = (self.q, self.k, self.v, self.dout, self.lse, delta, CONTRACT)
        return attention_dq(*operands, backend="triton"), *attention_dkv(
            *operands, backend="triton"
        )

    def both(self) -> None:
        self.forward()
        self.backward()


class Theirs:
    """The same numbers in the library's layout."""

    def __init__(self, ours: Ours, library: SDPBackend):
        self.library = library
        qkv = (ours.q, ours.k, ours.v)
        self.leaves = [x.transpose(0, 1).contiguous()[None].requires_grad_() for x in qkv]
        self.dout = ours.dout.transpose(0, 1).contiguous()[None]
        self.out = self.attend(self.leaves)

    def attend(self, leaves: list[Tensor]) -> Tensor:
        with sdpa_kernel(self.library):
            return scaled_dot_product_attention(*leaves)

    def forward(self) -> None:
        with torch.no_grad():
            self.attend(self.leaves)

    def backward(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.out, self.leaves, self.dout, retain_graph=True)

    def both(self) -> None:
        """Fresh leaves: a leaf belongs to the stream that made it, and a graph has its own."""
        leaves = [x.detach().requires_grad_() for x in self.leaves]
        torch.autograd.grad(self.attend(leaves), leaves, self.dout)


def measure(rows: int, protocol: Protocol) -> Iterator[Row]:
    """Every row of the table at this T; a graph where eager launches cost more than they run."""
    num_sets = num_buffer_sets(4 * rows * HEADS * HEAD_DIM * 2)
    ours = [Ours(rows) for _ in range(num_sets)]
    for name, library in LIBRARIES.items():
        if name == "flash" and rows > FLASH_MAX_ROWS:
            continue
        theirs = [Theirs(x, library) for x in ours]

        def row(op: str, protocol: Protocol, theirs: list = theirs, name: str = name) -> Row:
            def on(sets: list) -> Callable[[int], object]:
                return lambda i: getattr(sets[i], op)()

            case = {"both": "forward + backward"}.get(op, op)
            against = f"SDPA {name}"
            return compare(
                f"attention {case}", f"{HEADS} heads x {HEAD_DIM}", rows, against,
                on(ours), on(theirs), num_sets, protocol,
            )  # fmt: skip

        yield row("forward", protocol)
        yield row("backward", protocol)
        if rows <= GRAPH_MAX_ROWS:
            yield row("both", protocol)
            yield row("forward", protocol.under_graph())
            yield row("both", protocol.under_graph())


def measure_tiles(rows: int, protocol: Protocol) -> Iterator[Row]:
    """What the forward's other tile height costs, for all queries and for a CP shard's."""
    num_sets = num_buffer_sets(4 * rows * HEADS * HEAD_DIM * 2)
    sets = [Ours(rows) for _ in range(num_sets)]
    for degree in (1, 4, 8):
        queries = -(-rows // degree)

        def on(groups: int, queries: int = queries) -> Callable[[int], object]:
            def run(i: int) -> None:
                x, part = sets[i], slice(0, queries)
                operands = (x.q[part], x.k, x.v, x.out[part], x.lse[part])
                forward_launch(*operands, num_multiprocessors(x.q.device), groups).start()

            return run

        case = f"{queries} queries, 2 groups"
        yield compare(
            "attention forward tile", case, rows, "3 groups", on(2), on(3), num_sets, protocol
        )

