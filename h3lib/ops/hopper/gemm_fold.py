"""Weight gradients on sm_90: products whose reduced axis is rows.

    row fold         dw = the tree over sequence units of chains over their rows of dy^T x
    timestep chain   dw = ((+0 + dm[0] s[0]) + dm[1] s[1]) + ..., a handful of rows, memory bound

A sequence unit is any run of key blocks, the last one cut short, perhaps none: the kernel takes
the runs from the number of key blocks, and TMA fills the missing rows with zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h3lib.contract import NUM_SEQUENCE_UNITS, OperandError, RowUnits, subtree_roots
from h3lib.ops.adaln import timestep_chain_dw
from h3lib.ops.backend import check_operands, check_shape
from h3lib.ops.gemm import row_fold_product, row_fold_roots
from h3lib.ops.hopper.compat import check_device
from h3lib.ops.hopper.directives import MAX_DEPTH, Tile, tile_for
from h3lib.ops.hopper.gemm_fp32 import chain_fp32
from h3lib.ops.hopper.gemm_launch import Launch, check_matrix_dtype, k_first, prepare
from h3lib.ops.hopper.launch import kept_by_signature
from h3lib.ops.tree import partial_roots

TIMESTEP_TILE = {"BC": 32, "BE": 256, "num_warps": 4}


@row_fold_roots.register("triton")
def row_fold_roots_hopper(dy: Tensor, x: Tensor, rows: RowUnits, units: range) -> Tensor:
    """Roots of dw = dy^T @ x over the sequence units here; `[R, N, K]` FP32.

    dy `[T_local, N]`, x `[T_local, K]`, rows in logical order. **Order:** chain over the rows of
    each sequence unit, then the unit tree. **Rounds:** nothing. **Raises:** OperandError for a
    dtype other than BF16 or FP32, a key block that is not a multiple of 16, operands off the GPU
    or unreadable by TMA.
    """
    _check(dy, x, rows, units)
    roots = subtree_roots(units.start, units.stop, NUM_SEQUENCE_UNITS)
    if dy.dtype == torch.float32:
        return _roots_fp32(dy, x, rows, units)
    out = dy.new_empty((len(roots), dy.shape[1], x.shape[1]), dtype=torch.float32)
    for index, root in enumerate(roots):
        _subtree(out[index], dy, x, rows, units, root)
    return out


@row_fold_product.register("triton")
def row_fold_product_hopper(dy: Tensor, x: Tensor, rows: RowUnits, dtype: torch.dtype) -> Tensor:
    """dw = dy^T @ x with all rows here; `[N, K]` in `dtype`.

    **Order:** as `row_fold_roots_hopper`. **Rounds:** once, after the root. **Raises:** as there.
    """
    launch = _product_launch(dy, x, rows, dtype)
    if dy.dtype == torch.float32:
        return _roots_fp32(dy, x, rows, range(NUM_SEQUENCE_UNITS))[0].to(dtype)
    out = dy.new_empty((dy.shape[1], x.shape[1]), dtype=dtype)
    if launch is not None:
        launch.on((dy, x), out).run()
    return out


@kept_by_signature
def _product_launch(dy: Tensor, x: Tensor, rows: RowUnits, dtype: torch.dtype) -> Launch | None:
    """None in FP32 and for an empty result."""
    every = range(NUM_SEQUENCE_UNITS)
    _check(dy, x, rows, every)
    if dtype not in (torch.bfloat16, torch.float32):
        raise OperandError("dtype of the product", dtype, "torch.bfloat16, torch.float32")
    out = dy.new_empty((dy.shape[1], x.shape[1]), dtype=dtype)
    if dy.dtype == torch.float32 or not out.numel():
        return None
    return _launch(out, dy, x, rows, every, every).template()


def _check(dy: Tensor, x: Tensor, rows: RowUnits, units: range) -> None:
    check_operands(dy=dy, x=x)
    check_matrix_dtype(dy=dy, x=x)
    check_device(dy=dy, x=x)
    owned = len(rows.sequence_unit_rows(units))
    check_shape("dy", dy, owned, None)
    check_shape("x", x, owned, None)


def _subtree(out: Tensor, dy: Tensor, x: Tensor, rows: RowUnits, units: range, root: range) -> None:
    """out `[N, K]` = the subtree `root` of the sequence units; no rows at all make +0."""
    if not out.numel():
        return
    if not len(rows.sequence_unit_rows(root)):
        out.zero_()
        return
    _launch(out, dy, x, rows, units, root).run()


def _launch(
    out: Tensor, dy: Tensor, x: Tensor, rows: RowUnits, units: range, root: range
) -> Launch:
    shortest = min(len(rows.sequence_unit_rows(range(u, u + 1))) for u in root)
    tile = tile_for("row_fold", *out.shape, shortest // MAX_DEPTH, rows.contract.key_block)
    return fold_launch(out[None], dy, x, rows, units, root, tile)


def fold_launch(
    out: Tensor, dy: Tensor, x: Tensor, rows: RowUnits, units: range, root: range, tile: Tile
) -> Launch:
    """out `[1, N, K]` = the subtree `root`; dy and x hold the rows of `units`; BF16 operands."""
    per_key_block = rows.contract.key_block // tile.depth
    first = rows.num_key_blocks * units.start // NUM_SEQUENCE_UNITS * per_key_block
    joined = _joined_units(rows.num_key_blocks, len(root))
    plan = (rows.num_key_blocks * joined, per_key_block, first, -(-rows.num_rows // tile.depth))
    a, b = [k_first("dy", dy)], [k_first("x", x, place=1)]
    return prepare(out, a, b, tile, len(root) // joined, plan, root.start // joined, fold=True)


def _joined_units(num_key_blocks: int, width: int) -> int:
    """How many neighbouring units can be taken as one without changing a sum: 1, 2, 4 or 8.

    With at most 8/j key blocks, j neighbours aligned to j hold at most one between them, and a node
    with one existing child is that child. At 264 rows four chains are made in place of eight.
    """
    joined = 1
    while 2 * joined <= width and 2 * joined * num_key_blocks <= NUM_SEQUENCE_UNITS:
        joined *= 2
    return joined


def _roots_fp32(dy: Tensor, x: Tensor, rows: RowUnits, units: range) -> Tensor:
    origin = rows.sequence_unit_rows(units).start

    def leaf(unit: int) -> Tensor:
        r = rows.sequence_unit_rows(range(unit, unit + 1))
        part = slice(r.start - origin, r.stop - origin) if r else slice(0)
        return chain_fp32(dy[part].transpose(0, 1), x[part])

    return partial_roots(leaf, units, NUM_SEQUENCE_UNITS)


@timestep_chain_dw.register("triton")
def timestep_chain_dw_hopper(dm: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """dw = sum_i dm[i]^T s[i] `[C, E]` and dbias = sum_i dm[i] `[C]`, FP32.

    dm `[M, C]`, s `[M, E]`. **Order:** chain over timesteps, ascending, from +0: the product
    rounded, then added. **Rounds:** nothing else. **Raises:** OperandError for a dtype other than
    BF16 or FP32, no timestep, or operands that are not contiguous or off the GPU.
    """
    check_operands(dm=dm, s=s)
    check_matrix_dtype(dm=dm, s=s)
    check_device(dm=dm, s=s)
    check_shape("dm", dm, None, None)
    check_shape("s", s, len(dm), None)
    if not len(dm):
        raise OperandError("number of timesteps", 0, "at least 1")
    for name, tensor in (("dm", dm), ("s", s)):
        if not tensor.is_contiguous():
            raise OperandError(f"strides of {name}", tensor.stride(), "contiguous")
    columns, width = dm.shape[1], s.shape[1]
    dw = dm.new_empty((columns, width), dtype=torch.float32)
    dbias = dm.new_empty(columns, dtype=torch.float32)
    grid = (triton.cdiv(columns, TIMESTEP_TILE["BC"]), triton.cdiv(width, TIMESTEP_TILE["BE"]))
    timestep_chain_kernel[grid](
        dm, s, dw, dbias, len(dm), columns, width, **TIMESTEP_TILE, enable_fp_fusion=False
    )
    return dw, dbias


@triton.jit(do_not_specialize=["M", "C"])
def timestep_chain_kernel(dm, s, dw, dbias, M, C, E, BC: tl.constexpr, BE: tl.constexpr):
    """One [BC, BE] tile of dw; the programs of the first column make dbias too."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    acc = tl.zeros((BC, BE), tl.float32)
    total = tl.zeros((BC,), tl.float32)
    for i in range(M):
        d = tl.load(dm + i * C.to(tl.int64) + c, mask=c < C, other=0.0).to(tl.float32)
        x = tl.load(s + i * E + e, mask=e < E, other=0.0).to(tl.float32)
        acc = acc + d[:, None] * x[None, :]
        total = total + d
    inside = (c < C)[:, None] & (e < E)[None, :]
    tl.store(dw + c.to(tl.int64)[:, None] * E + e[None, :], acc, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(dbias + c, total, mask=c < C)
