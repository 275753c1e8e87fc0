"""How coarse is FP8 for the block's products, and does its result know the layout?

    python -m h3lib.bench.fp8 --out reports/h200/fp8.json       (one Hopper GPU)

Operands are those of the block's own forward at size `full`, BF16, as they are and with one channel
a hundred times larger. Errors are ||y - exact|| / ||exact|| against the FP64 product of the BF16
operands. FP8 is e4m3; scales are amax / 448, FP32:

    tensor    one for x, one for w
    blocks    1 x 128 for x, 128 x 128 for w; a partial of 128 is scaled and added in FP32

Hopper adds FP8 products in fewer bits than FP32. `PRECISE` and `EXACT` are how many terms may be
added there before their sum goes to an FP32 register, `SHORT` lets all of them; the number is part
of the bits, so it is pinned.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from h3lib.bench.measure import Protocol, report
from h3lib.bench.stock import StockBlock
from h3lib.compare import different_elements
from h3lib.contract import PUBLISHED, SIZES
from h3lib.files import write_json
from h3lib.model.inputs import BlockInputs, block_inputs, block_weights, trace_block
from h3lib.model.packing import job_for_rows, pack
from h3lib.model.weights import SyntheticWeights
from h3lib.ops.tree import partial_roots, tree_sum
from h3lib.parallel.shard import SeqShard

ROWS, BLOCK, LARGEST, OUTLIER = 264, 128, 448.0, 100.0
SHORT, PRECISE, EXACT = None, 128, 32
PRODUCTS = {  # name: (node that is x, weight, whether it is row-parallel)
    "q": ("attn.in", "attn.to_q.weight", False),
    "to_out": ("attn.heads", "attn.to_out.0.weight", True),
    "ff-in": ("ff.in", "ff.net.0.proj.weight", False),
    "ff-down": ("ff.swiglu", "ff.net.2.weight", True),
}
TPS = (1, 2, 4, 8)


@triton.jit
def fp8_kernel(
    a, b, c, a_scale, b_scale, num_rows, num_columns, depth,
    BLOCKS: tl.constexpr, IMPRECISE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """c = scaled a @ b^T in FP32; a `[M, K]`, b `[N, K]` e4m3, scales of tensors or of blocks."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = rows[:, None] < num_rows
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, depth, BK):
        ks = k + tl.arange(0, BK)
        left = tl.load(a + rows[:, None] * depth + ks[None, :], inside, 0.0)
        right = tl.load(b + columns[:, None] * depth + ks[None, :])
        if BLOCKS:
            blocks = depth // BK
            s_a = tl.load(a_scale + rows * blocks + k // BK, rows < num_rows, 0.0)
            s_b = tl.load(b_scale + (tl.program_id(1) * BN // BK) * blocks + k // BK)
            part = tl.dot(left, right.T, max_num_imprecise_acc=IMPRECISE)
            total += part * (s_a * s_b)[:, None]
        else:
            total = tl.dot(left, right.T, total, max_num_imprecise_acc=IMPRECISE)
    if not BLOCKS:
        total = total * (tl.load(a_scale) * tl.load(b_scale))
    offsets = rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    tl.store(c + offsets, total, inside)


def quantised(x: Tensor, height: int | None, width: int | None) -> tuple[Tensor, Tensor]:
    """x `[M, K]` as e4m3 and its scales, one for each height x width block (None: the whole)."""
    height, width = height or len(x), width or x.shape[1]
    blocks = x.float().unflatten(1, (-1, width)).unflatten(0, (-1, height))
    scale = blocks.abs().amax((1, 3), keepdim=True) / LARGEST
    scale = torch.where(scale > 0, scale, 1.0)
    eight = (blocks / scale).to(torch.float8_e4m3fn)
    return eight.view(x.shape), scale.view(len(x) // height, -1)


def fp8_product(x: Tensor, w: Tensor, blocks: bool, imprecise: int | None) -> Tensor:
    """x @ w^T through FP8, FP32 `[M, N]`."""
    x8, x_scale = quantised(x, *((1, BLOCK) if blocks else (None, None)))
    w8, w_scale = quantised(w, *((BLOCK, BLOCK) if blocks else (None, None)))
    return launch(x8, w8, x_scale, w_scale, blocks, imprecise)


def launch(
    x8: Tensor, w8: Tensor, x_scale: Tensor, w_scale: Tensor, blocks: bool, imprecise: int | None
) -> Tensor:
    """`fp8_kernel` on operands that are FP8 already."""
    out = torch.empty((len(x8), len(w8)), dtype=torch.float32, device=x8.device)
    grid = (triton.cdiv(len(x8), 64), len(w8) // BLOCK)
    fp8_kernel[grid](
        x8, w8, out, x_scale, w_scale, len(x8), len(w8), x8.shape[1],
        BLOCKS=blocks, IMPRECISE=imprecise, BM=64, BN=BLOCK, BK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def bf16_accumulated(x: Tensor, w: Tensor, step: int = 16) -> Tensor:
    """x @ w^T with the running sum rounded to BF16 after each `step` terms."""
    total = torch.zeros((len(x), len(w)), dtype=torch.bfloat16, device=x.device)
    pairs = zip(x.split(step, 1), w.split(step, 1), strict=True)
    for a, b in pairs:
        total = (total.float() + a.float() @ b.float().T).bfloat16()
    return total.float()


LADDER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "FP32": lambda x, w: x.float() @ w.float().T,
    "BF16": lambda x, w: (x @ w.T).float(),
    "BF16, accumulated in BF16": bf16_accumulated,
    "FP8 tensor": lambda x, w: fp8_product(x, w, False, EXACT),
    "FP8 tensor, short accumulator": lambda x, w: fp8_product(x, w, False, SHORT),
    "FP8 blocks": lambda x, w: fp8_product(x, w, True, PRECISE),
}


def relative(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


def local_scales(x: Tensor, w: Tensor, tp: int) -> Tensor:
    """A row-parallel product whose ranks scale what they hold: FP32 partials in rank order."""
    owned = zip(x.chunk(tp, 1), w.chunk(tp, 1), strict=True)
    return sum(fp8_product(a.contiguous(), b.contiguous(), False, EXACT) for a, b in owned)


def unit_scales(x: Tensor, w: Tensor, tp: int, blocks: bool) -> Tensor:
    """The same with scales at unit edges (or of blocks, which end there): the unit tree."""
    units = PUBLISHED.num_units
    xs, ws = (t.chunk(units, 1) for t in (x, w))

    def leaf(unit: int) -> Tensor:
        return fp8_product(xs[unit].contiguous(), ws[unit].contiguous(), blocks, PRECISE)

    spans = [range(r * units // tp, (r + 1) * units // tp) for r in range(tp)]
    roots = {span: partial_roots(leaf, span, units)[0] for span in spans}
    return tree_sum(roots.get, range(units))


INVARIANCE = {
    "FP8 tensor, scales of the rank": local_scales,
    "FP8 tensor, scales of a unit": lambda x, w, tp: unit_scales(x, w, tp, False),
    "FP8 blocks": lambda x, w, tp: unit_scales(x, w, tp, True),
}


def measure_product(name: str, x: Tensor, w: Tensor, row_parallel: bool, outlier: float) -> dict:
    """Errors of the ladder; for a row-parallel product the elements that tp changes."""
    exact = x.double() @ w.double().T
    found = {
        "product": name,
        "outlier": outlier,
        "shape": [len(x), len(w), x.shape[1]],
        "error": {step: relative(product(x, w), exact) for step, product in LADDER.items()},
        "bf16_rounding": relative(exact.bfloat16(), exact),
    }
    if row_parallel:
        found["different_by_tp"] = {
            scheme: {str(tp): unlike(product(x, w, tp), product(x, w, 1)) for tp in TPS}
            for scheme, product in INVARIANCE.items()
        }
        found["elements"] = exact.numel()
    return found


def unlike(a: Tensor, b: Tensor) -> int:
    """BF16 elements that differ."""
    return int(different_elements(a.bfloat16().view(-1), b.bfloat16().view(-1)).sum())


def measure_rows(name: str, x: Tensor, w: Tensor) -> dict:
    """Elements that change when two ranks hold the rows and scale what they hold."""
    half = len(x) // 2
    schemes = {"FP8 tensor, scales of the rank": False, "FP8 blocks": True}

    def cut(blocks: bool) -> Tensor:
        return torch.cat([fp8_product(part, w, blocks, PRECISE) for part in (x[:half], x[half:])])

    return {
        "product": name,
        "elements": len(x) * len(w),
        "different_by_cp2": {
            scheme: unlike(cut(blocks), fp8_product(x, w, blocks, PRECISE))
            for scheme, blocks in schemes.items()
        },
    }


def measure_block(weights: dict[str, Tensor], given: BlockInputs) -> dict:
    """Error of the block's output when every product of attention and feed-forward is one step."""
    size = SIZES["full"]
    double = {name: w.double() for name, w in weights.items()}
    rows = given.rows
    rows = type(rows)(rows.table_rows, rows.cos.double(), rows.sin.double())
    exact_inputs = BlockInputs(given.x.double(), given.dout, given.temb.double(), rows)
    exact = StockBlock(size, double).forward(exact_inputs)

    def output(product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        block = StockBlock(size, weights, linear=lambda x, w: product(x, w).bfloat16())
        return block.forward(given)

    return {step: relative(output(product), exact) for step, product in LADDER.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=ROWS)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    size, rows = SIZES["full"], options.rows
    source, shard = SyntheticWeights(size, 0, "cuda"), SeqShard.canonical(rows)
    packed = pack(job_for_rows(rows)).to("cuda")
    records = trace_block(size, source, packed, shard, 0, "triton", backward=False)
    nodes = {record.name: record.tensor for record in records if record.kind == "node"}
    weights = block_weights(size, source, shard)
    products, by_rows = [], []
    for name, (node, weight, row_parallel) in PRODUCTS.items():
        x, w = nodes[node].reshape(rows, -1), weights[weight]
        for outlier in (1.0, OUTLIER):
            given = x.clone()
            given[:, 1] *= outlier
            products.append(measure_product(name, given, w, row_parallel, outlier))
            print(products[-1], flush=True)
        by_rows.append(measure_rows(name, x, w))
    block = measure_block(weights, block_inputs(size, source, packed, shard, 0))
    found = {"products": products, "by_rows": by_rows, "block": block}
    write_json(options.out, report([], Protocol(), True, rows=rows, **found))


if __name__ == "__main__":
    main()
