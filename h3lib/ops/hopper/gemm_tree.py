"""The unit tree on sm_90: products whose reduced axis is cut into feature units.

    roots     FP32, one complete subtree of 1, 2, 4 or 8 units each, for a rank that owns some units
    product   all units here: the root is rounded in the epilogue, no FP32 leaves the chip

dx of q, k, v (value, gate) is one chain a unit over block j of each part in turn. Where few rows
leave multiprocessors without work, a program makes a smaller subtree and a second kernel the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from h3lib.contract import OperandError, subtree_roots
from h3lib.ops.backend import check_operands, check_shape
from h3lib.ops.gemm import check_roots, unit_tree_product, unit_tree_roots
from h3lib.ops.hopper.compat import check_device
from h3lib.ops.hopper.directives import MAX_DEPTH, Tile, tile_for
from h3lib.ops.hopper.gemm_fp32 import chain_fp32
from h3lib.ops.hopper.gemm_launch import (
    MAX_PARTS,
    MAX_WIDTH,
    Launch,
    check_matrix_dtype,
    k_last,
    prepare,
    right_operand,
)
from h3lib.ops.hopper.launch import kept_by_signature
from h3lib.ops.tree import partial_roots

MMA_K = 16
FINISH = {"BLOCK": 1024, "num_warps": 4, "enable_fp_fusion": False}

Parts = list[tuple[Tensor, Tensor]]


@unit_tree_roots.register("triton")
def unit_tree_roots_hopper(
    parts: Parts, units: range, num_units: int, out: Tensor | None = None
) -> Tensor:
    """Roots of sum_parts a @ b over the units here; `[R, T, N]` FP32, in `out` if that is given.

    **Order:** leaf j = one chain over block j of the first part, then of the next; leaves in the
    unit tree. **Rounds:** nothing. **Raises:** OperandError for a dtype other than BF16 or FP32, a
    unit that is not a multiple of 16 wide, more than 3 parts, an `out` of another shape or dtype,
    operands off the GPU or unreadable by TMA.
    """
    rows, columns = _check(parts, units)
    roots = subtree_roots(units.start, units.stop, num_units)
    shape = (len(roots), rows, columns)
    if out is not None:
        check_roots(out, shape, torch.float32)
    if parts[0][0].dtype == torch.float32:
        found = _roots_fp32(parts, units, num_units)
        return found if out is None else out.copy_(found)
    if out is None:
        out = parts[0][0].new_empty(shape, dtype=torch.float32)
    if out.numel():
        for index, root in enumerate(roots):
            _subtree(out[index], parts, units, root)
    return out


@unit_tree_product.register("triton")
def unit_tree_product_hopper(parts: Parts, num_units: int, dtype: torch.dtype) -> Tensor:
    """sum_parts a @ b with all units here; `[T, N]` in `dtype`.

    **Order:** as `unit_tree_roots_hopper`. **Rounds:** once, after the root. **Raises:** as there.
    """
    tensors = [tensor for part in parts for tensor in part]
    launch, every = _product_launch(*tensors, num_units, dtype), range(num_units)
    if parts[0][0].dtype == torch.float32:
        return _roots_fp32(parts, every, num_units)[0].to(dtype)
    out = parts[0][0].new_empty((len(parts[0][0]), parts[0][1].shape[1]), dtype=dtype)
    if launch is not None:
        launch.on(tensors, out).run()
    elif out.numel():
        _subtree(out, parts, every, every)
    return out


@kept_by_signature
def _product_launch(*operands: object) -> Launch | None:
    """Of (a, b, a, b, ..., number of units, dtype); None if it is not one launch in BF16."""
    *tensors, num_units, dtype = operands
    parts, every = list(zip(tensors[::2], tensors[1::2], strict=True)), range(num_units)
    rows, columns = _check(parts, every)
    if dtype not in (torch.bfloat16, torch.float32):
        raise OperandError("dtype of the product", dtype, "torch.bfloat16, torch.float32")
    if tensors[0].dtype == torch.float32 or not rows * columns:
        return None
    out = tensors[0].new_empty((rows, columns), dtype=dtype)
    launch = subtree_launch(out, parts, every, every, _tile(out, parts, every, every))
    return launch.template() if isinstance(launch, Launch) else None


def _check(parts: Parts, units: range) -> tuple[int, int]:
    """(T, N) of the product."""
    if not 1 <= len(parts) <= MAX_PARTS:
        raise OperandError("number of parts", len(parts), f"1 to {MAX_PARTS}, for back end triton")
    if not len(units):
        raise OperandError("units here", units, "at least one")
    named = {
        f"{name}{i}": t for i, part in enumerate(parts) for name, t in zip("ab", part, strict=True)
    }
    check_operands(**named)
    check_matrix_dtype(**named)
    check_device(**named)
    rows, columns = parts[0][0].shape[0], parts[0][1].shape[1]
    for a, b in parts:
        check_shape("a", a, rows, None)
        check_shape("b", b, a.shape[1], columns)
        width, rest = divmod(a.shape[1], len(units))
        if rest:
            raise OperandError(
                "reduced axis", a.shape[1], f"a multiple of the {len(units)} units here"
            )
        if a.dtype == torch.bfloat16 and (width == 0 or width % MMA_K):
            raise OperandError(
                "width of a unit", width, f"a multiple of {MMA_K}, for back end triton"
            )
    return rows, columns


def _subtree(out: Tensor, parts: Parts, units: range, root: range) -> None:
    """out `[T, N]` = the subtree `root` of the units here."""
    subtree_launch(out, parts, units, root, _tile(out, parts, units, root)).run()


def _tile(out: Tensor, parts: Parts, units: range, root: range) -> Tile:
    if len(root) > MAX_WIDTH:
        raise OperandError(
            "units in one root", len(root), f"at most {MAX_WIDTH}, for back end triton"
        )
    blocks = sum(part.shape[1] // len(units) // MAX_DEPTH for part, _ in parts)
    return tile_for("unit_tree", *out.shape, blocks)


@dataclass(frozen=True)
class SplitLaunch:
    """Smaller subtrees `[R, T, N]` FP32, and the tree over them."""

    nodes: Tensor
    out: Tensor
    launch: Launch

    def run(self) -> None:
        self.launch.run()
        grid = (triton.cdiv(self.out.numel(), FINISH["BLOCK"]),)
        finish_kernel[grid](
            self.nodes, self.out, self.out.numel(), NODES=len(self.nodes), **FINISH
        )


def subtree_launch(
    out: Tensor, parts: Parts, units: range, root: range, tile: Tile
) -> Launch | SplitLaunch:
    """out `[T, N]` contiguous = the subtree `root`, at most `tile.units` units to a program."""
    width = min(len(root), tile.units)
    if width == len(root):
        return tree_launch(out[None], parts, units, root.start, width, tile)
    nodes = out.new_empty((len(root) // width, *out.shape), dtype=torch.float32)
    return SplitLaunch(nodes, out, tree_launch(nodes, parts, units, root.start, width, tile))


@triton.jit
def _node(nodes, at, inside, count, i: tl.constexpr):
    return tl.load(nodes + i * count.to(tl.int64) + at, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["count"])
def finish_kernel(nodes, out, count, NODES: tl.constexpr, BLOCK: tl.constexpr):
    """out = the balanced tree over 2, 4 or 8 nodes of `count` elements, rounded to out's dtype."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    left = _node(nodes, at, inside, count, 0) + _node(nodes, at, inside, count, 1)
    if NODES > 2:
        left += _node(nodes, at, inside, count, 2) + _node(nodes, at, inside, count, 3)
    if NODES > 4:
        right = _node(nodes, at, inside, count, 4) + _node(nodes, at, inside, count, 5)
        right += _node(nodes, at, inside, count, 6) + _node(nodes, at, inside, count, 7)
        left += right
    tl.store(out + at, left.to(out.dtype.element_ty), mask=inside)


def tree_launch(
    out: Tensor, parts: Parts, units: range, first: int, width: int, tile: Tile
) -> Launch:
    """out `[R, T, N]`: R subtrees of `width` units from unit `first` on; BF16 operands."""
    num = len(units)
    a = [k_last(f"a{i}", a, num, 2 * i) for i, (a, _) in enumerate(parts)]
    b = [right_operand(f"b{i}", b, num, 2 * i + 1) for i, (_, b) in enumerate(parts)]
    if len({operand.k_first for operand in b}) > 1:
        raise OperandError(
            "strides of b", [tuple(b.stride()) for _, b in parts], "the same dim contiguous"
        )
    plan = [-(-part.shape[1] // num // tile.depth) for part, _ in parts]
    return prepare(out, a, b, tile, width, plan, first - units.start)


def _roots_fp32(parts: Parts, units: range, num_units: int) -> Tensor:
    def leaf(unit: int) -> Tensor:
        total = None
        for a, b in parts:
            width = a.shape[1] // len(units)
            block = slice((unit - units.start) * width, (unit - units.start + 1) * width)
            total = chain_fp32(a[:, block], b[block], into=total)
        return total

    return partial_roots(leaf, units, num_units)
