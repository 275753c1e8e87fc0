"""From operands to one launch of `gemm_kernel`: views by unit, descriptors, grid.

    Operand   a matrix as [unit, outer, inner], contiguous in `inner`
              rows x reduced axis     [U, rows, width]    `k_last`
              reduced axis x columns  [U, width, columns]  `k_first`

A box never leaves its unit: what it asks for outside is filled with zeros by the TMA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from h3lib.contract import OperandError
from h3lib.ops.hopper.compat import TensorDescriptor, map_on, programs_for, tensor_map
from h3lib.ops.hopper.directives import Tile
from h3lib.ops.hopper.gemm_kernel import MAX_REGISTERS, NUM_WARPS, gemm_kernel

MAX_PARTS = 3
MAX_WIDTH = 8
OUT = -1  # the place of the result


@dataclass(frozen=True)
class Operand:
    """One matrix as the kernel reads it."""

    name: str
    base: Tensor
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    k_first: bool
    place: int  # among the tensors of a launch

    def descriptor(self, free: int, depth: int) -> TensorDescriptor:
        """Boxes of `free` rows (columns) times `depth` steps."""
        box = (1, depth, free) if self.k_first else (1, free, depth)
        return tensor_map(self.name, self.base, self.shape, self.strides, box)


def k_last(name: str, x: Tensor, units: int = 1, place: int = 0) -> Operand:
    """x `[rows, K]`, K contiguous, cut into units."""
    width, outer, inner = x.shape[1] // units, *_strides(x)
    strides = (width if units > 1 else outer, outer, inner)
    return Operand(name, x, (units, x.shape[0], width), strides, False, place)


def k_first(name: str, x: Tensor, units: int = 1, place: int = 0) -> Operand:
    """x `[K, columns]`, columns contiguous, K cut into units."""
    width, outer, inner = x.shape[0] // units, *_strides(x)
    strides = (width * outer, outer, inner)
    return Operand(name, x, (units, width, x.shape[1]), strides, True, place)


def right_operand(name: str, b: Tensor, units: int = 1, place: int = 1) -> Operand:
    """b `[K, N]` of a product a @ b: a weight as it is stored, or a transposed view of one."""
    if b.stride(0) == 1 and b.stride(1) >= b.shape[0]:
        return k_last(name, b.transpose(0, 1), units, place)
    return k_first(name, b, units, place)


def _strides(x: Tensor) -> tuple[int, int]:
    """Strides of a matrix; of a dim with one element the stride says nothing."""
    inner = 1 if x.shape[1] == 1 else x.stride(1)
    return (x.shape[1] if x.shape[0] == 1 else x.stride(0)), inner


def check_matrix_dtype(**operands: Tensor) -> None:
    """**Raises:** OperandError for a dtype that the back end has no product for."""
    for name, tensor in operands.items():
        if tensor.dtype not in (torch.bfloat16, torch.float32):
            accepted = "torch.bfloat16, torch.float32, for back end triton"
            raise OperandError(f"dtype of {name}", tensor.dtype, accepted)


@dataclass(frozen=True)
class Launch:
    """One launch of the kernel, ready to run or to be compiled: `options` hold its constants, in
    the kernel's own order, and what Triton wants to know; `dtypes` those of the result and bias.

    `places` says for each descriptor which of the launch's tensors it reads.
    """

    maps: tuple[TensorDescriptor | None, ...]
    places: tuple[int | None, ...]
    bias: Tensor | None
    sizes: tuple[int, ...]
    options: dict[str, object]
    tiles: int
    flops: float
    device: torch.device
    dtypes: tuple[torch.dtype | None, ...]

    @property
    def arguments(self) -> tuple[object, ...]:
        return (*self.maps, self.bias, *self.sizes)

    def on(self, tensors: Sequence[Tensor], out: Tensor, bias: Tensor | None = None) -> Launch:
        """The same launch on other tensors of the same signature."""
        maps = tuple(
            view and map_on(view, out if place == OUT else tensors[place])
            for view, place in zip(self.maps, self.places, strict=True)
        )
        return replace(self, maps=maps, bias=bias)

    def template(self) -> Launch:
        """To be kept: without tensors."""
        none = torch.empty(0, device="meta", dtype=torch.bfloat16)
        return self.on([none] * (2 * MAX_PARTS), none)

    def run(self) -> None:
        """Launch; the compiled form is looked up here, since Triton's own look-up reads every
        descriptor again (50 of 190 us on the host at each launch, H200, 2026-11)."""
        *constants, _, _ = self.options.values()
        form = (torch.cuda.current_device(), *constants, *self.dtypes)
        programs = min(programs_for(self.device, self.flops), self.tiles)
        compiled = _COMPILED.get(form)
        if compiled is None:
            _COMPILED[form] = gemm_kernel[(programs,)](*self.arguments, **self.options)
        else:
            compiled[(programs, 1, 1)](*self.arguments, *constants)


_COMPILED: dict[tuple[object, ...], object] = {}


def prepare(
    out: Tensor,
    a: Sequence[Operand],
    b: Sequence[Operand],
    tile: Tile,
    width: int,
    plan: Sequence[int],
    first_unit: int = 0,
    fold: bool = False,
    bias: Tensor | None = None,
) -> Launch:
    """out `[R, M, N]`: for each root the subtree over `width` units, from `first_unit` on.

    **Order:** chains over the plan's blocks, `width` of them in the unit tree, then the bias.
    **Rounds:** once, to out's dtype.
    """
    roots, rows, columns = out.shape
    if tile.swapped:
        a, b = b, a
    strides = (out.stride(0) if roots > 1 else columns, columns, 1)

    def result(box_rows: int, box_columns: int) -> TensorDescriptor:
        return tensor_map("result", out, out.shape, strides, (1, box_rows, box_columns))

    none = [None] * (MAX_PARTS - len(a))
    maps = [x.descriptor(tile.m, tile.depth) for x in a] + none
    maps += [x.descriptor(tile.n, tile.depth) for x in b] + none
    places = [x.place for x in a] + none + 2 * ([x.place for x in b] + none) + [OUT, OUT]
    if tile.tail:
        maps += [x.descriptor(tile.tail, tile.depth) for x in b] + none
        maps += [result(tile.n, tile.m), result(tile.tail, tile.m)]
    else:
        maps += [None] * MAX_PARTS + [result(tile.m, tile.n), None]
    tiles = (roots, -(-rows // tile.rows), -(-columns // tile.columns))
    plan = (*plan, *[0] * (4 - len(plan)))
    options = {
        "WIDTH": width, "PARTS": len(a), "BM": tile.m, "BN": tile.n, "TAIL": tile.tail,
        "BK": tile.depth, "STAGES": tile.stages, "GROUP": tile.group, "LAG": tile.lag,
        "SWAP": tile.swapped, "TA": a[0].k_first,
        "TB": b[0].k_first, "FOLD": fold, "BIAS": bias is not None, "num_warps": NUM_WARPS,
        "maxnreg": MAX_REGISTERS,
    }  # fmt: skip
    depth = sum(x.base.shape[0 if x.k_first else 1] for x in a)
    sizes = (*tiles, first_unit, *plan, rows, columns)
    dtypes = (out.dtype, None if bias is None else bias.dtype)
    return Launch(
        tuple(maps), tuple(places), bias, sizes, options, math.prod(tiles),
        2 * rows * columns * depth, out.device, dtypes,
    )  # fmt: skip
