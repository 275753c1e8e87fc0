"""The producer of a product on sm_90: which blocks a tile needs, and their way into shared memory.

    tile     one of [roots, row tiles, column tiles], taken by stride: program p makes p, p + P, ...
    unit     one slice of the reduced axis, a run of blocks of BK steps
    ring     STAGES blocks of both operands, handed over by two barriers each: full and empty

One warp asks the TMA for blocks in exactly the order in which the consumers take them. A box that
leaves its unit is filled with zeros there.
"""

from __future__ import annotations

from typing import NamedTuple

from h3lib.ops.hopper.compat import gl, gluon, mbarrier, tma


class Form(NamedTuple):
    """What is fixed when the kernel is compiled; TA, TB: the operand's reduced axis comes first.

    A tile is 2 BM on the instruction's m side and STEP on its n side, where BN or BN + TAIL are
    multiplied. SWAP says that columns of the result lie on the m side and its rows on the n side.
    """

    WIDTH: int
    BM: int
    BN: int
    TAIL: int
    STEP: int
    BK: int
    STAGES: int
    LAG: int
    SWAP: bool
    TA: bool
    TB: bool
    FOLD: bool
    L: object  # layout of an accumulator
    LT: object  # layout of its tail


class Ring(NamedTuple):
    """Blocks on their way from producer to consumers, and the barriers that hand them over."""

    a: object  # slot 2 i + w holds block i of the m side of warpgroup w
    b: object
    tail: object  # TAIL more of the n side
    full: object
    empty: object
    lag: object


@gluon.jit
def tile_place(t, grid, GROUP: gl.constexpr, S: gl.constexpr):
    """(root, first on the m side, first on the n side) of tile t: GROUP row tiles share a column
    tile in L2.

    Row tiles turn by one with every column, so that a short last one is shared by all programs: 132
    is a multiple of 3, and without the turn a third of them could have nothing else.
    """
    root = t // (grid[1] * grid[2])
    t = t - root * grid[1] * grid[2]
    first = t // (GROUP * grid[2]) * GROUP
    size = gl.minimum(grid[1] - first, GROUP)
    t = t - first * grid[2]
    column = t // size
    row = first + (t + column) % size
    if S.SWAP:
        return root, column * (2 * S.BM), row * S.STEP
    else:
        return root, row * (2 * S.BM), column * S.STEP


@gluon.jit
def unit_blocks(unit, plan, FOLD: gl.constexpr):
    """(first block, number of blocks) of a unit.

    Feature unit: plan holds the blocks of each part. Sequence unit: plan = (key blocks, blocks a
    key block, first block here, all blocks); an empty one is a block of zeros past the last row.
    """
    if FOLD:
        first = gl.minimum(unit * plan[0] // 8 * plan[1], plan[3])
        stop = gl.minimum((unit + 1) * plan[0] // 8 * plan[1], plan[3])
        empty = (stop == first).to(gl.int32)
        return first + empty * (plan[3] - first) - plan[2], stop - first + empty
    else:
        return 0, plan[0] + plan[1] + plan[2]


@gluon.jit
def advance(slot, phase, STAGES: gl.constexpr):
    wrapped = (slot + 1 == STAGES).to(gl.int32)
    return (slot + 1) * (1 - wrapped), phase ^ wrapped


@gluon.jit
def _expect(bar, both, tail, S: gl.constexpr):
    """Bytes of one block: one or `both` halves of the m side, the n side with or without a tail."""
    half: gl.constexpr = S.BM * S.BK * 2
    whole: gl.constexpr = 2 * half
    rest: gl.constexpr = S.BN * S.BK * 2
    if S.TAIL:
        other: gl.constexpr = (S.BN + S.TAIL) * S.BK * 2
        mbarrier.expect(bar, whole + other, pred=both & tail)
        mbarrier.expect(bar, half + other, pred=(both == 0) & tail)
        mbarrier.expect(bar, whole + rest, pred=both & (tail == 0))
        mbarrier.expect(bar, half + rest, pred=(both == 0) & (tail == 0))
    else:
        mbarrier.expect(bar, whole + rest, pred=both)
        mbarrier.expect(bar, half + rest, pred=both == 0)


@gluon.jit
def _load(a, b, b_tail, ring, slot, phase, unit, m, n, k, both, tail, S: gl.constexpr):
    """One block of both operands. The second half of the m side, and the tail, are not asked for
    where there are none: a box wholly outside is slow (65 us against 50 us at 264 rows, H200,
    2026-11)."""
    bar = ring.full.index(slot)
    mbarrier.wait(ring.empty.index(slot), phase)
    _expect(bar, both, tail, S)
    upper = ring.a.index(slot * 2)
    lower = ring.a.index(slot * 2 + 1)
    if S.TA:
        tma.async_copy_global_to_shared(a, [unit, k, m], bar, upper)
        tma.async_copy_global_to_shared(a, [unit, k, m + S.BM], bar, lower, pred=both)
    else:
        tma.async_copy_global_to_shared(a, [unit, m, k], bar, upper)
        tma.async_copy_global_to_shared(a, [unit, m + S.BM, k], bar, lower, pred=both)
    if S.TB:
        tma.async_copy_global_to_shared(b, [unit, k, n], bar, ring.b.index(slot))
    else:
        tma.async_copy_global_to_shared(b, [unit, n, k], bar, ring.b.index(slot))
        if S.TAIL:
            tma.async_copy_global_to_shared(
                b_tail, [unit, n + S.BN, k], bar, ring.tail.index(slot), pred=tail
            )


@gluon.jit
def producer(a, b, b_tail, ring, grid, plan, m_extent, n_extent, PARTS: gl.constexpr,
             GROUP: gl.constexpr, S: gl.constexpr):  # fmt: skip
    """Every block of every tile of this program, in the order in which the consumers take them."""
    slot = 0
    phase = 1
    for t in range(gl.program_id(0), grid[0] * grid[1] * grid[2], gl.num_programs(0)):
        root, m, n = tile_place(t, grid, GROUP, S)
        both = m + S.BM < m_extent
        tail = n + S.BN < n_extent
        for u in range(S.WIDTH):
            unit = grid[3] + root * S.WIDTH + u
            if S.FOLD:
                first, count = unit_blocks(unit, plan, True)
                for i in range(first, first + count):
                    k = i * S.BK
                    _load(a[0], b[0], b_tail[0], ring, slot, phase, 0, m, n, k, both, tail, S)
                    slot, phase = advance(slot, phase, S.STAGES)
            else:
                for part in gl.static_range(PARTS):
                    for i in range(plan[part]):
                        k = i * S.BK
                        _load(a[part], b[part], b_tail[part], ring, slot, phase, unit, m, n, k,
                              both, tail, S)  # fmt: skip
                        slot, phase = advance(slot, phase, S.STAGES)
