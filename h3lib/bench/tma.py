"""One product, loaded in two ways: by pointers (`cp.async`) and by the bulk copy engine (TMA).

    python -m h3lib.bench.tma --out reports/h200/tma.json

The same plain Triton kernel, the same tiles, the same ascending chain; only the loads differ, so
the bytes must be equal. Beside them the product that this project uses (Gluon, a warp of its own
for TMA) and cuBLAS. Few rows are timed as CUDA graphs, all with rotated random operands.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from h3lib.bench.measure import Protocol, medians, num_buffer_sets, report
from h3lib.compare import different_elements
from h3lib.contract import SIZES
from h3lib.files import write_json
from h3lib.ops.backend import load_backend
from h3lib.ops.gemm import linear_forward
from h3lib.ops.hopper.compat import num_multiprocessors
from h3lib.ops.hopper.compiled import Code, compile_offline

ROWS = (1, 31, 264, 4096, 37776)
GRAPH_ROWS = 264
TILE_COLUMNS, TILE_DEPTH, GROUP, WARPS, STAGES = 128, 64, 8, 4, 4
WAYS = ("pointers", "TMA", "h3lib", "cuBLAS")
INSTRUCTIONS = {
    "TMA load": "UTMALDG",
    "asynchronous copy": "LDGSTS",
    "load": "LDG",
    "tensor core": "HGMMA",
    "integer multiply-add": "IMAD",
}


@triton.jit
def chain_kernel(
    a, b, c, a_map, b_map, num_rows, num_columns, depth,
    USE_TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """c = a @ b^T, a `[M, K]`, b `[N, K]` BF16; one chain over K in ascending order."""
    tiles_m, tiles_n = tl.cdiv(num_rows, BM), tl.cdiv(num_columns, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        first = tile // (GROUP * tiles_n) * GROUP
        height = min(tiles_m - first, GROUP)
        row = (first + tile % height) * BM
        column = tile % (GROUP * tiles_n) // height * BN
        rows, columns = row + tl.arange(0, BM), column + tl.arange(0, BN)
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, depth, BK):
            if USE_TMA:
                left = a_map.load([row, k])
                right = b_map.load([column, k])
            else:
                ks = k + tl.arange(0, BK)
                inside = rows[:, None] < num_rows
                left = tl.load(a + rows[:, None].to(tl.int64) * depth + ks, inside, 0.0)
                right = tl.load(b + columns[:, None].to(tl.int64) * depth + ks)
            total = tl.dot(left, right.T, total)
        offsets = rows[:, None].to(tl.int64) * num_columns + columns[None, :]
        tl.store(c + offsets, total.to(tl.bfloat16), mask=rows[:, None] < num_rows)


def tile_rows(rows: int) -> int:
    """The tile's height; it is not part of the bits."""
    return 64 if rows <= 64 else 128


def arguments(x: Tensor, w: Tensor, y: Tensor) -> tuple:
    """Arguments of `chain_kernel`: whole tiles of columns and of depth are required."""
    height = tile_rows(len(x))
    maps = (
        TensorDescriptor.from_tensor(x, [height, TILE_DEPTH]),
        TensorDescriptor.from_tensor(w, [TILE_COLUMNS, TILE_DEPTH]),
    )
    return x, w, y, *maps, len(x), len(w), x.shape[1]


def options(rows: int, use_tma: bool) -> dict:
    """Constants and launch options of `chain_kernel`."""
    return {
        "USE_TMA": use_tma, "BM": tile_rows(rows), "BN": TILE_COLUMNS, "BK": TILE_DEPTH,
        "GROUP": GROUP, "num_warps": WARPS, "num_stages": STAGES,
    }  # fmt: skip


def compiled(rows: int, use_tma: bool) -> Code:
    """The kernel's code for sm_90, without a GPU."""
    x, w, y = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((rows, 5376), (7168, 5376), (rows, 7168))
    )
    return compile_offline(chain_kernel, *arguments(x, w, y), **options(rows, use_tma))


def code_lines() -> list[dict]:
    """What the compiled kernels contain, by tile height and way of loading."""
    lines = []
    for rows in (64, 128):
        for use_tma in (False, True):
            code = compiled(rows, use_tma)
            lines.append(
                {
                    "way": "TMA" if use_tma else "pointers",
                    "tile_rows": rows,
                    "registers": code.registers,
                    "spill_bytes": code.spill_bytes,
                    "shared_bytes": code.shared_bytes,
                    **{name: code.count(sass) for name, sass in INSTRUCTIONS.items()},
                }
            )
    return lines


@dataclass(frozen=True)
class Product:
    """A column-parallel or replicated product of the block at one number of rows."""

    name: str
    rows: int
    num_columns: int
    depth: int

    def calls(self) -> tuple[list, int, int]:
        """The ways of computing it on rotated operands, how many sets, and how many bytes of the
        results are unlike those with pointers."""
        item = 2 * (self.rows * self.depth + self.num_columns * self.depth)
        sets = num_buffer_sets(item)
        random = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, device="cuda", dtype=torch.bfloat16)

        xs = [normal(self.rows, self.depth) for _ in range(sets)]
        ws = [normal(self.num_columns, self.depth) for _ in range(sets)]
        ys = [x.new_empty(self.rows, self.num_columns) for x in xs]
        given = [arguments(*operands) for operands in zip(xs, ws, ys, strict=True)]
        tiles = -(-self.rows // tile_rows(self.rows)) * (self.num_columns // TILE_COLUMNS)
        grid = (min(num_multiprocessors(xs[0].device), tiles),)

        def triton_call(use_tma: bool):
            constants = options(self.rows, use_tma)
            return lambda i: chain_kernel[grid](*given[i], **constants)

        def result(call) -> Tensor:
            ys[0].fill_(float("nan"))
            found = call(0)
            return (ys[0] if not isinstance(found, Tensor) else found).clone().view(-1)

        calls = [
            triton_call(False),
            triton_call(True),
            lambda i: linear_forward(xs[i], ws[i], backend="triton"),
            lambda i: torch.matmul(xs[i], ws[i].T),
        ]
        pointers, tma, ours, library = map(result, calls)
        different = {
            "TMA": int(different_elements(tma, pointers).sum()),
            "h3lib": int(different_elements(ours, pointers).sum()),
            "cuBLAS": int(different_elements(library, pointers).sum()),
        }
        return calls, sets, different


def products() -> list[Product]:
    size = SIZES["full"]
    shapes = {"q": (size.inner_dim, size.hidden_size), "ff-down": (size.hidden_size, size.ffn_dim)}
    return [Product(name, rows, *shape) for rows in ROWS for name, shape in shapes.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    load_backend("triton", "cuda")
    found, code = [], code_lines()
    for product in products():
        calls, sets, different = product.calls()
        protocol = Protocol(graph=product.rows <= GRAPH_ROWS)
        times = medians(calls, sets, protocol)
        found.append(
            {
                "case": product.name,
                "rows": product.rows,
                "graph": protocol.graph,
                "elements": product.rows * product.num_columns,
                "us": dict(zip(WAYS, times, strict=True)),
                "different_from_pointers": different,
            }
        )
        print(found[-1], flush=True)
        content = report(found, Protocol(), len(found) == len(products()), code=code)
        write_json(given.out, content)


if __name__ == "__main__":
    main()
