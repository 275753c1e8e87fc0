"""Bits of the products on a GPU: references, ragged shapes, slices, roots of ranks, tiles.

`h3lib.bench.bits` runs every check; `tests/ops/hopper/test_gemm_gpu.py` asserts the same findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import h3lib.ops.hopper  # noqa: F401  registers back end triton
from h3lib.bench import gemm_reference as reference
from h3lib.bench.findings import Finding, found
from h3lib.contract import NUM_SEQUENCE_UNITS, Contract, RowUnits
from h3lib.ops.adaln import timestep_chain_dw
from h3lib.ops.gemm import (
    linear_dx,
    linear_forward,
    row_fold_product,
    row_fold_roots,
    unit_tree_product,
    unit_tree_roots,
)
from h3lib.ops.hopper import directives
from h3lib.ops.hopper.gemm_chain import chain_launch
from h3lib.ops.hopper.gemm_fold import fold_launch
from h3lib.ops.hopper.gemm_fp32 import chain_fp32
from h3lib.ops.hopper.gemm_tree import subtree_launch
from h3lib.ops.tree import root_nodes, tree_sum

BF16 = torch.bfloat16
EVERY = range(8)
ROWS = (1, 2, 7, 63, 65, 131, 264, 513, 1097, 4225, 8193)
SMALL_CONTRACTS = (Contract(key_block=16, row_block=4), Contract(key_block=32, row_block=8))
D, A, F = 1536, 2048, 4096  # widths of size `small`


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def forward(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear_forward(x, w, bias, backend="triton")


def product(parts: list, dtype: torch.dtype = BF16) -> Tensor:
    return unit_tree_product(parts, 8, dtype, backend="triton")


def fold(dy: Tensor, x: Tensor, rows: RowUnits, dtype: torch.dtype = torch.float32) -> Tensor:
    return row_fold_product(dy, x, rows, dtype, backend="triton")


def tree_parts(t: int, num_parts: int) -> list[tuple[Tensor, Tensor]]:
    """ff-down (a transposed weight) for one part, dx of value and gate or of q, k, v for more."""
    if num_parts == 1:
        return [(random(t, F), random(D, F).T)]
    width = A if num_parts == 3 else F
    return [(random(t, width), random(width, D)) for _ in range(num_parts)]


def check_reference() -> Iterator[Finding]:
    """Every op at odd row counts against leaves by plain Triton and torch adds."""
    w, bias = random(A, D), random(A)
    for t in ROWS:
        x, dy = random(t, D), random(t, A)
        root = reference.reference_chain([(x, w.T)], [range(D)])
        yield found("reference", f"linear_forward {t} rows", forward(x, w), root.to(BF16))
        biased = (root + bias.float()).to(BF16)
        yield found("reference", f"linear_forward with bias {t} rows", forward(x, w, bias), biased)
        root = reference.reference_chain([(dy, w)], [range(A)])
        dx = linear_dx(dy, w, backend="triton")
        yield found("reference", f"linear_dx {t} rows", dx, root.to(BF16))
        for n in (1, 2, 3):
            parts = tree_parts(t, n)
            root = reference.reference_unit_tree(parts)
            case = f"unit tree of {n} parts {t} rows"
            yield found("reference", f"{case}, FP32 root", product(parts, torch.float32), root)
            yield found("reference", f"{case}, BF16", product(parts), root.to(BF16))
        for contract in (Contract(), *SMALL_CONTRACTS):
            rows = RowUnits(t, contract)
            root = reference.reference_row_fold(dy, x, rows)
            case = f"row fold {t} rows, {contract.id}"
            yield found("reference", f"{case}, FP32 root", fold(dy, x, rows), root)
            yield found("reference", f"{case}, BF16", fold(dy, x, rows, BF16), root.to(BF16))


def check_ragged_columns() -> Iterator[Finding]:
    """Widths that no tile divides, with rows on the instruction's n side and on its m side."""
    for t in (131, 264, 520):
        for n in (40, 72, 200, 1160):
            x, w, bias = random(t, D), random(n, D), random(n)
            root = reference.reference_chain([(x, w.T)], [range(D)])
            case = f"{t} rows, {n} columns"
            yield found("ragged columns", f"linear_forward {case}", forward(x, w), root.to(BF16))
            biased = (root + bias.float()).to(BF16)
            yield found("ragged columns", f"bias {case}", forward(x, w, bias), biased)
            dx = linear_dx(x, w.T.contiguous(), backend="triton")
            yield found("ragged columns", f"linear_dx {case}", dx, root.to(BF16))
            parts = [(random(t, F), random(n, F).T)]
            root = reference.reference_unit_tree(parts)
            value = product(parts, torch.float32)
            yield found("ragged columns", f"unit tree {case}, FP32 root", value, root)
            yield found("ragged columns", f"unit tree {case}, BF16", product(parts), root.to(BF16))


def check_fp32() -> Iterator[Finding]:
    """IEEE FP32: chains of fused multiply-adds; the timestep chain against the eager definition."""
    for t, k, n in ((1, 96, 256), (131, 96, 160), (264, 257, 96), (65, 384, 48)):
        x, w, dy = (random(*s, dtype=torch.float32) for s in ((t, k), (n, k), (t, n)))
        expected = reference.reference_fma(x, w.T)
        yield found("fp32", f"linear_forward {t}x{k}x{n}", forward(x, w), expected)
        dx = linear_dx(dy, w, backend="triton")
        yield found("fp32", f"linear_dx {t}x{n}x{k}", dx, reference.reference_fma(dy, w))
        for tile in directives.fp32_tiles():
            case = f"linear_forward {t}x{k}x{n}, {tile}"
            yield found("fp32", case, chain_fp32(x, w.T, tile=tile), expected)
    parts = [(random(65, 128, dtype=torch.float32), random(128, 96, dtype=torch.float32))]
    (a, b), w = parts[0], 16
    leaves = [reference.reference_fma(a[:, u * w : u * w + w], b[u * w : u * w + w]) for u in EVERY]
    expected = reference.eight(leaves)
    yield found("fp32", "unit tree", product(parts, torch.float32), expected)
    rows = RowUnits(1097)
    dy, x = random(1097, 96, dtype=torch.float32), random(1097, 200, dtype=torch.float32)
    spans = [rows.sequence_unit_rows(range(unit, unit + 1)) for unit in EVERY]
    leaves = [reference.reference_fma(dy[r.start : r.stop].T, x[r.start : r.stop]) for r in spans]
    yield found("fp32", "row fold", fold(dy, x, rows), reference.eight(leaves))
    for dtype in (BF16, torch.float32):
        for m in (1, 2, 5):
            dm, s = random(m, 1000, dtype=dtype), random(m, 672, dtype=dtype)
            value = timestep_chain_dw(dm, s, backend="triton")
            for name, v, e in zip(("dw", "dbias"), value, timestep_chain_dw(dm, s), strict=True):
                yield found("fp32", f"timestep_chain_dw {name}, {m} rows, {dtype}", v, e)


def check_rows() -> Iterator[Finding]:
    """A row's bytes do not depend on which rows are beside it, where it lies, or what they hold."""
    t = 1097
    w, [(a, b)] = random(A, D), tree_parts(t, 1)
    x = random(t, D)
    order = torch.randperm(t, device="cuda")
    ops: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
        "linear_forward": (lambda r: forward(r, w), x),
        "linear_dx": (lambda r: linear_dx(r, w.T.contiguous(), backend="triton"), x),
        "unit_tree_product": (lambda r: product([(r, b)]), a),
        "unit_tree_product FP32": (lambda r: product([(r, b)], torch.float32), a),
    }
    for name, (run, rows) in ops.items():
        whole = run(rows)
        for start, stop in ((0, 1), (1, 8), (5, 133), (100, 364), (64, 577), (1000, 1097)):
            part = run(rows[start:stop])
            yield found("row slice", f"{name} [{start}, {stop})", part, whole[start:stop])
        yield found("permuted rows", name, run(rows[order]), whole[order])
        changed = rows.clone()
        changed[::2] = float("nan")
        changed[1::4] = 3e38
        yield found("neighbours mutated", name, run(changed)[3::4], whole[3::4])


def check_tensor_parallel() -> Iterator[Finding]:
    """Column slices equal the slice of the whole; roots of every TP degree finish to the whole."""
    for t in (7, 131, 1097):
        x, w, dy, v = random(t, D), random(A, D), random(t, D), random(D, A)
        whole, dx = forward(x, w), linear_dx(dy, v, backend="triton")
        for tp in (2, 4, 8):
            for rank in range(tp):
                cut = slice(A * rank // tp, A * (rank + 1) // tp)
                case = f"tp{tp} rank {rank}, {t} rows"
                yield found("tp slice", f"linear_forward {case}", forward(x, w[cut]), whole[:, cut])
                part = linear_dx(dy, v[:, cut], backend="triton")
                yield found("tp slice", f"linear_dx {case}", part, dx[:, cut])
        for n in (1, 2, 3):
            parts = tree_parts(t, n)
            whole = product(parts, torch.float32)
            yield found("rounding", f"{n} parts {t} rows", product(parts), whole.to(BF16))
            for tp in (1, 2, 4, 8):
                yield found(
                    "tp roots", f"{n} parts, tp{tp}, {t} rows", _finish_tp(parts, tp), whole
                )


def _finish_tp(parts: list, tp: int) -> Tensor:
    cuts, roots = [8 * r // tp for r in range(tp + 1)], []
    for rank in range(tp):
        units = range(cuts[rank], cuts[rank + 1])
        here = [
            slice(a.shape[1] * units.start // 8, a.shape[1] * units.stop // 8) for a, _ in parts
        ]
        local = [(a[:, s].contiguous(), b[s]) for (a, b), s in zip(parts, here, strict=True)]
        roots.append(unit_tree_roots(local, units, 8, backend="triton"))
    return tree_sum(root_nodes(roots, cuts).get, EVERY)


def check_context_parallel() -> Iterator[Finding]:
    """Row-fold roots of every CP degree finish to the whole, ranks without rows included."""
    for contract in (Contract(), SMALL_CONTRACTS[0]):
        for t in (1, 131, 264, 1097, 8193):
            rows, dy, x = RowUnits(t, contract), random(t, 256), random(t, 384)
            whole = fold(dy, x, rows)
            for cp in range(1, 9):
                cuts = [NUM_SEQUENCE_UNITS * c // cp for c in range(cp + 1)]
                roots = []
                for c in range(cp):
                    units = range(cuts[c], cuts[c + 1])
                    own = rows.sequence_unit_rows(units)
                    own = slice(own.start, own.stop) if own else slice(0)
                    part = row_fold_roots(dy[own], x[own], rows, units, backend="triton")
                    roots.append(part)
                value = tree_sum(root_nodes(roots, cuts).get, EVERY)
                yield found("cp roots", f"cp{cp}, {t} rows, {contract.id}", value, whole)


def check_directives() -> Iterator[Finding]:
    """Every entry of every table gives the bytes of the first, with whole and with ragged tiles."""
    for t in (264, 4225):
        # Units of 8 blocks, of features and at 4225 of rows: enough for every lag.
        x, w, v, dy = random(t, D), random(A, D), random(D, A), random(t, A)
        parts, rows = tree_parts(t, 1), RowUnits(t)
        shortest = min(len(rows.sequence_unit_rows(range(u, u + 1))) for u in EVERY)
        runs: dict[str, tuple[tuple[int, int], int, Callable[..., object]]] = {
            "linear_forward": (
                (t, A), D, lambda out, tile, x=x, w=w: chain_launch(out, x, w.T, tile)
            ),
            "linear_dx": ((t, A), D, lambda out, tile, x=x, v=v: chain_launch(out, x, v, tile)),
            "unit_tree": (
                (t, D), F // 8,
                lambda out, tile, parts=parts: subtree_launch(out[0], parts, EVERY, EVERY, tile),
            ),
            "row_fold": (
                (A, D), shortest,
                lambda out, tile, dy=dy, x=x, rows=rows: fold_launch(
                    out, dy, x, rows, EVERY, EVERY, tile
                ),
            ),
        }  # fmt: skip
        for op, (shape, unit, prepare) in runs.items():
            values = []
            for tile in directives.tiles(op):
                if not tile.runs(unit // directives.MAX_DEPTH, directives.MAX_DEPTH):
                    continue
                out = torch.full((1, *shape), float("nan"), device="cuda", dtype=BF16)
                prepare(out, tile).run()
                values.append(out)
                yield found("directive", f"{op} {t} rows, {tile}", out, values[0])


CHECKS = (
    check_reference,
    check_ragged_columns,
    check_fp32,
    check_rows,
    check_tensor_parallel,
    check_context_parallel,
    check_directives,
)
