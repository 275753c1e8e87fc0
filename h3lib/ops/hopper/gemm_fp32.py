"""The FP32 chain on sm_90: one IEEE fused multiply-add a step, ascending from +0, no TF32.

    c[m, n] = fma(a[m, K-1], b[K-1, n], ... fma(a[m, 0], b[0, n], +0)) + bias[n]

A program takes a tile of c and, DEPTH steps at a time, puts both operands into shared memory, one
line for each step: a thread reads runs of 4 rows and 4 columns and multiplies them crosswise. The
next steps come from memory meanwhile. Which element a thread makes moves no bit.
"""

from __future__ import annotations

import functools

from torch import Tensor

from h3lib.contract import OperandError
from h3lib.ops.hopper.compat import TMA_ALIGNMENT_BYTES, gl, gluon
from h3lib.ops.hopper.directives import Fp32Tile, fp32_tile_for
from h3lib.ops.hopper.launch import Again, Launch, kept_by_signature

WORD = 4  # FP32 elements in 16 bytes


def chain_fp32(
    a: Tensor,
    b: Tensor,
    into: Tensor | None = None,
    bias: Tensor | None = None,
    tile: Fp32Tile | None = None,
) -> Tensor:
    """C = a @ b + bias for FP32 a `[M, K]`, b `[K, N]`; `into` is a chain to go on with, in place.

    **Order:** ascending k, one fused multiply-add a step, from +0 or from `into`; then the bias.
    **Raises:** OperandError unless a and b are contiguous in one of their dims.
    """
    out = a.new_empty((a.shape[0], b.shape[1])) if into is None else into
    if not out.numel():
        return out
    if not a.shape[1]:
        return out.zero_() if into is None else out
    tile = tile or fp32_tile_for(*out.shape)
    _launch(a, b, out, bias, tile, into is not None).start(a, b, out, bias)
    return out


@kept_by_signature
def _launch(
    a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, tile: Fp32Tile, go_on: bool
) -> Again:
    return Again(fp32_launch(a, b, out, bias, tile, go_on), 4)


def fp32_launch(
    a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, tile: Fp32Tile, go_on: bool
) -> Launch:
    """out `[M, N]` = a @ b + bias, from `out` itself if it is to `go_on`."""
    a_k_first, a_stride = _leading("a", a)
    b_columns_first, b_stride = _leading("b", b)
    b_k_first = not b_columns_first  # in memory the reduced axis is not the contiguous one
    rest = (a.shape[1], a_stride, b_stride)
    bases = (x.data_ptr() % TMA_ALIGNMENT_BYTES for x in (a, b))
    word = 1 if any(size % WORD for size in rest) or any(bases) else WORD
    constants = (
        tile.rows, tile.columns, tile.depth, *_layouts(tile, a_k_first, b_k_first), a_k_first,
        b_k_first, word, go_on, bias is not None,
    )  # fmt: skip
    operands = (a, b, out, bias, *out.shape, *(size // word for size in rest), *constants)
    grid = (-(-out.shape[0] // tile.rows), -(-out.shape[1] // tile.columns))
    return Launch(chain_fp32_kernel, operands, {"num_warps": tile.num_warps}, grid)


def _leading(name: str, x: Tensor) -> tuple[bool, int]:
    """(whether the first dim is the contiguous one, the other dim's stride)."""
    if x.stride(1) == 1 or x.shape[1] == 1:
        return False, x.stride(0)
    if x.stride(0) == 1 or x.shape[0] == 1:
        return True, x.stride(1)
    raise OperandError(f"strides of {name}", x.stride(), "one of them 1")


@functools.cache
def _layouts(tile: Fp32Tile, a_k_first: bool, b_k_first: bool) -> tuple[object, object, object]:
    """How the operands are fetched, and which elements of c a thread makes."""
    down, across = tile.warps
    each = min(4, tile.rows // (4 * down)), min(4, tile.columns // (8 * across))
    own = gl.BlockedLayout(list(each), [4, 8], [down, across], [1, 0])
    a = _fetched(tile.rows, tile.depth, tile.num_warps, a_k_first)
    return a, _fetched(tile.columns, tile.depth, tile.num_warps, b_k_first), own


def _fetched(free: int, depth: int, num_warps: int, k_first: bool) -> object:
    """[depth, free] by lines, or [free, depth] by words of 4 steps of a row, two rows a thread:
    turned on the way into shared memory, 16 lanes then write 128 bytes of one line."""
    if k_first:
        return gl.BlockedLayout([1, 1], [1, 32], [num_warps, 1], [1, 0])
    bases = [[0, 1 << i] for i in range(3, depth.bit_length() - 1)]
    bases += [[1 << i, 0] for i in range(5, free.bit_length() - 1)]
    in_warps = num_warps.bit_length() - 1
    registers = [[0, 1], [0, 2], [1, 0], *bases[in_warps:]]
    lanes = [[2, 0], [4, 0], [8, 0], [16, 0], [0, 4]]
    return gl.DistributedLinearLayout(registers, lanes, bases[:in_warps], [], [free, depth])


@gluon.jit
def _fetch(x, first, step, extent, length, stride, FREE: gl.constexpr, DEPTH: gl.constexpr,
           K_FIRST: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """DEPTH steps of FREE rows (columns) of an operand, zero outside."""
    if K_FIRST:
        k = step + gl.arange(0, DEPTH, gl.SliceLayout(1, LAYOUT))
        i = first + gl.arange(0, FREE, gl.SliceLayout(0, LAYOUT))
        at = k.to(gl.int64)[:, None] * stride + i[None, :]
        return gl.load(x + at, mask=(k < length)[:, None] & (i < extent)[None, :], other=0.0)
    else:
        i = first + gl.arange(0, FREE, gl.SliceLayout(1, LAYOUT))
        k = step + gl.arange(0, DEPTH, gl.SliceLayout(0, LAYOUT))
        at = i.to(gl.int64)[:, None] * stride + k[None, :]
        return gl.load(x + at, mask=(i < extent)[:, None] & (k < length)[None, :], other=0.0)


@gluon.jit
def _put(lines, tile, FREE: gl.constexpr, DEPTH: gl.constexpr, K_FIRST: gl.constexpr):
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    view = lines._reinterpret(gl.float32, [DEPTH, FREE], plain)
    if K_FIRST:
        view.store(tile)
    else:
        view.permute((1, 0)).store(tile)


@gluon.jit(
    do_not_specialize=["M", "N", "K", "a_stride", "b_stride"],
    do_not_specialize_on_alignment=["bias"],
)  # fmt: skip
def chain_fp32_kernel(
    a, b, c, bias, M, N, K, a_stride, b_stride, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, LA: gl.constexpr, LB: gl.constexpr, L: gl.constexpr, A_K_FIRST: gl.constexpr,
    B_K_FIRST: gl.constexpr, WORD: gl.constexpr, GO_ON: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """One tile; K and strides are counted in words of WORD elements."""
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows: gl.constexpr = gl.SliceLayout(1, L)
    columns: gl.constexpr = gl.SliceLayout(0, L)
    a_lines = gl.allocate_shared_memory(gl.float32, [BK, BM], line)
    b_lines = gl.allocate_shared_memory(gl.float32, [BK, BN], line)
    first_m = gl.program_id(0) * BM
    first_n = gl.program_id(1) * BN
    length = K * WORD
    a_step = a_stride * WORD
    b_step = b_stride * WORD
    m = first_m + gl.arange(0, BM, rows)
    n = first_n + gl.arange(0, BN, columns)
    at = c + m.to(gl.int64)[:, None] * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    acc = gl.zeros((BM, BN), gl.float32, L)
    if GO_ON:
        acc = gl.load(at, mask=inside, other=0.0)
    a_tile = _fetch(a, first_m, 0, M, length, a_step, BM, BK, A_K_FIRST, LA)
    b_tile = _fetch(b, first_n, 0, N, length, b_step, BN, BK, B_K_FIRST, LB)
    for k in range(0, length, BK):
        _put(a_lines, a_tile, BM, BK, A_K_FIRST)
        _put(b_lines, b_tile, BN, BK, B_K_FIRST)
        a_tile = _fetch(a, first_m, k + BK, M, length, a_step, BM, BK, A_K_FIRST, LA)
        b_tile = _fetch(b, first_n, k + BK, N, length, b_step, BN, BK, B_K_FIRST, LB)
        for i in gl.static_range(BK):  # a step past the last adds 0 * 0
            x, _ = gl.broadcast(a_lines.index(i).load(rows)[:, None], acc)
            y, _ = gl.broadcast(b_lines.index(i).load(columns)[None, :], acc)
            acc = gl.fma(x, y, acc)
    if BIAS:
        acc = acc + gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
    gl.store(at, acc, mask=inside)
