"""Row-wise ops of the block beside a copy: `python -m h3lib.bench.rowwise --out FILE`.

theirs is a device-to-device copy that reads and writes as many bytes together as the op reads and
writes, so that ratio is the share of the measured copy bandwidth that the op reaches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import h3lib.ops.hopper  # noqa: F401  registers back end triton
from h3lib.bench.measure import Protocol, Row, compare, num_buffer_sets, report
from h3lib.contract import model_size
from h3lib.ops import adaln, norm, rope, swiglu

ROWS = (264, 4096, 14910, 37776)
GRAPH_MAX_ROWS = 4096
SIZE = model_size("full")
D, F, N, H = SIZE.hidden_size, SIZE.ffn_dim, SIZE.num_attention_heads, SIZE.attention_head_dim
HALF = SIZE.rotary_dim // 2

# Op -> its function, the shapes of its operands of T rows, and the bytes it writes for a row.
OPS: dict[str, tuple[Callable, tuple[tuple[int, ...], ...], int]] = {
    "swiglu forward": (swiglu.swiglu_forward, ((F,),) * 2, 2 * F),
    "swiglu backward": (swiglu.swiglu_backward, ((F,),) * 3, 4 * F),
    "modulate forward": (adaln.modulate_forward, ((D,),) * 3, 2 * D),
    "modulate backward": (adaln.modulate_backward, ((D,),) * 3, 10 * D),
    "residual forward": (adaln.gated_residual_forward, ((D,),) * 3, 2 * D),
    "residual backward": (adaln.gated_residual_backward, ((D,),) * 3, 6 * D),
    "rotary forward": (rope.rotary_forward, ((N, H), (HALF,), (HALF,)), 2 * N * H),
    "rotary backward": (rope.rotary_backward, ((N, H), (HALF,), (HALF,)), 2 * N * H),
}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def cases(rows: int) -> Iterator[tuple[str, Callable[..., object], Callable[[], tuple], int]]:
    """Name, call, operands, and bytes read and written."""
    for name, (op, shapes, written) in OPS.items():

        def make(shapes: tuple = shapes) -> tuple[Tensor, ...]:
            return tuple(random(rows, *shape) for shape in shapes)

        read = sum(2 * torch.Size(shape).numel() for shape in shapes)
        yield name, op, make, rows * (read + written)
    for name, shape in (("norm", (D,)), ("head norm", (N, H))):
        width, size = shape[-1], torch.Size(shape).numel()

        def forward(x: Tensor, w: Tensor, r: Tensor, dy: Tensor, **backend: str) -> object:
            return norm.rms_norm_forward(x, w, 1e-5, **backend)

        def backward(x: Tensor, w: Tensor, r: Tensor, dy: Tensor, **backend: str) -> object:
            return norm.rms_norm_backward(dy, x, w, r, **backend)

        def make(shape: tuple = shape, width: int = width) -> tuple[Tensor, ...]:
            x, w = random(rows, *shape), random(width)
            return x, w, torch.rand((*x.shape[:-1], 1), device="cuda"), random(rows, *shape)

        yield f"{name} forward", forward, make, rows * (4 * size + 4 * size // width)
        yield f"{name} backward", backward, make, rows * (10 * size + 4 * size // width)


def measure(rows: int, protocol: Protocol) -> Iterator[Row]:
    for name, op, make, num_bytes in cases(rows):
        num_sets = num_buffer_sets(num_bytes)
        sets = [make() for _ in range(num_sets)]
        copies = [torch.randn(num_bytes // 4, device="cuda").to(torch.bfloat16) for _ in sets]
        targets = [torch.empty_like(x) for x in copies]

        def ours(i: int, op: Callable = op, sets: list = sets) -> object:
            return op(*sets[i], backend="triton")

        def theirs(i: int, copies: list = copies, targets: list = targets) -> object:
            return targets[i].copy_(copies[i])

        yield compare(name, f"{num_bytes} bytes", rows, "copy", ours, theirs, num_sets, protocol)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown", help="commit that is measured")
    args = parser.parse_args()
    torch.manual_seed(0)
    protocol, rows = Protocol(round_ms=20.0, warm_up_ms=60.0), []
    for num_rows in ROWS:
        use = protocol.under_graph() if num_rows <= GRAPH_MAX_ROWS else protocol
        for row in measure(num_rows, use):
            print(row, flush=True)
            rows.append(row)
    args.out.write_text(json.dumps(report(rows, args.commit, protocol, True), indent=1) + "\n")


if __name__ == "__main__":
    main()
