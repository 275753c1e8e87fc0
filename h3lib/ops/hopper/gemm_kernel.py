"""The one matrix-product kernel of sm_90: complete subtrees of chains, in Gluon.

    out[r, m, n] = round(tree over the units r*WIDTH .. r*WIDTH + WIDTH-1 of chain_u(a, b)[m, n] + bias[n])

* WIDTH 1 is a chain, 2, 4 and 8 are subtrees of the unit tree; out is BF16 (rounded once) or FP32.
* A unit is a run of *blocks* of BK steps; what a box reads outside of it is filled with zeros, and a
  chain from +0 is never -0.0, so the added zeros change no bit.
* A tile is 128 x BN. Two consumer warpgroups take 64 rows each, one warp loads by TMA.
* Pending sums: two live in registers beside the accumulator, the first half of eight units waits in
  shared memory. `_add` is pinned assembly: with a plain `+` LLVM moves the add past the next unit,
  four tiles are alive, registers spill and ptxas serialises wgmma (warning C7512).
* The second warpgroup runs LAG blocks behind, so that one drains while the other multiplies.
"""

from __future__ import annotations

from typing import NamedTuple

from h3lib.ops.hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

GROUP_ROWS = 64  # rows of one consumer warpgroup: wgmma's own m
TILE_ROWS = 128
NUM_WARPS = 4
MAX_REGISTERS = 168  # at entry, times 12 warps; then the consumers take 240 and the producer 24


class Form(NamedTuple):
    """What is fixed when the kernel is compiled; TA, TB: the operand's reduced axis comes first."""

    WIDTH: int
    BN: int
    BK: int
    STAGES: int
    LAG: int
    TA: bool
    TB: bool
    FOLD: bool
    L: object  # layout of an accumulator


class Ring(NamedTuple):
    """Blocks on their way from the producer to the consumers, and the barriers that hand them over."""

    a: object  # slot 2 i + w holds block i of the rows of warpgroup w
    b: object
    full: object
    empty: object
    lag: object


@gluon.jit
def _tile(t, grid, GROUP: gl.constexpr):
    """(root, row tile, column tile) of tile t: GROUP row tiles share a column tile in L2."""
    root = t // (grid[1] * grid[2])
    t = t - root * grid[1] * grid[2]
    first = t // (GROUP * grid[2]) * GROUP
    size = gl.minimum(grid[1] - first, GROUP)
    t = t - first * grid[2]
    return root, first + t % size, t // size


@gluon.jit
def _unit_blocks(unit, plan, FOLD: gl.constexpr):
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
def _advance(slot, phase, STAGES: gl.constexpr):
    wrapped = (slot + 1 == STAGES).to(gl.int32)
    return (slot + 1) * (1 - wrapped), phase ^ wrapped


@gluon.jit
def _load(a, b, ring, slot, phase, unit, row, column, k, both, S: gl.constexpr):
    """One block of both operands. The lower 64 rows are not asked for where there are none: a box
    wholly outside is slow (65 us against 50 us at 264 rows, H200, 2026-11)."""
    bar = ring.full.index(slot)
    mbarrier.wait(ring.empty.index(slot), phase)
    mbarrier.expect(bar, (128 + S.BN) * S.BK * 2, pred=both)
    mbarrier.expect(bar, (64 + S.BN) * S.BK * 2, pred=both == 0)
    upper = ring.a.index(slot * 2)
    lower = ring.a.index(slot * 2 + 1)
    if S.TA:
        tma.async_copy_global_to_shared(a, [unit, k, row], bar, upper)
        tma.async_copy_global_to_shared(a, [unit, k, row + 64], bar, lower, pred=both)
    else:
        tma.async_copy_global_to_shared(a, [unit, row, k], bar, upper)
        tma.async_copy_global_to_shared(a, [unit, row + 64, k], bar, lower, pred=both)
    if S.TB:
        tma.async_copy_global_to_shared(b, [unit, k, column], bar, ring.b.index(slot))
    else:
        tma.async_copy_global_to_shared(b, [unit, column, k], bar, ring.b.index(slot))


@gluon.jit
def _producer(a, b, ring, grid, plan, num_rows, PARTS: gl.constexpr, GROUP: gl.constexpr, S: gl.constexpr):
    """Every block of every tile of this program, in the order in which the consumers take them."""
    slot = 0
    phase = 1
    for t in range(gl.program_id(0), grid[0] * grid[1] * grid[2], gl.num_programs(0)):
        root, row, column = _tile(t, grid, GROUP)
        row = row * 128
        column = column * S.BN
        both = row + 64 < num_rows
        for i in range(S.WIDTH):
            unit = grid[3] + root * S.WIDTH + i
            if S.FOLD:
                first, count = _unit_blocks(unit, plan, True)
                for k in range(first, first + count):
                    _load(a[0], b[0], ring, slot, phase, 0, row, column, k * S.BK, both, S)
                    slot, phase = _advance(slot, phase, S.STAGES)
            else:
                for part in gl.static_range(PARTS):
                    for k in range(plan[part]):
                        _load(a[part], b[part], ring, slot, phase, unit, row, column, k * S.BK, both, S)
                        slot, phase = _advance(slot, phase, S.STAGES)


@gluon.jit
def _add(x, y):
    return gl.inline_asm_elementwise(
        "add.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _multiply(acc, ring, slot, phase, FRESH: gl.constexpr, W: gl.constexpr, S: gl.constexpr):
    """Issue the products of one block; FRESH starts a chain from +0."""
    mbarrier.wait(ring.full.index(slot), phase)
    if S.TA:
        a = ring.a.index(slot * 2 + W).reshape([S.BK, 64]).permute((1, 0))
    else:
        a = ring.a.index(slot * 2 + W).reshape([64, S.BK])
    if S.TB:
        b = ring.b.index(slot).reshape([S.BK, S.BN])
    else:
        b = ring.b.index(slot).reshape([S.BN, S.BK]).permute((1, 0))
    return warpgroup_mma(a, b, acc, use_acc=not FRESH, is_async=True)


@gluon.jit
def _start(ring, slot, phase, W: gl.constexpr, S: gl.constexpr):
    acc = gl.zeros((64, S.BN), gl.float32, S.L)
    return _multiply(acc, ring, slot, phase, True, W, S)


@gluon.jit
def _continue(acc, ring, slot, phase, start, stop, W: gl.constexpr, S: gl.constexpr):
    """Blocks start..stop-1 of a chain whose block in `slot` is in flight; its last one stays so."""
    for _ in range(start, stop):
        done = slot
        slot, phase = _advance(slot, phase, S.STAGES)
        acc = _multiply(acc, ring, slot, phase, False, W, S)
        acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
        mbarrier.arrive(ring.empty.index(done), count=1)
    return acc, slot, phase


@gluon.jit
def _finish(acc, ring, slot, PENDING: gl.constexpr):
    """The chain's value; PENDING 1 if the next chain's first block is already in flight."""
    acc = warpgroup_mma_wait(PENDING, deps=(acc,))
    mbarrier.arrive(ring.empty.index(slot), count=1)
    return acc


@gluon.jit
def _first_chain(ring, slot, phase, lag_phase, count, W: gl.constexpr, S: gl.constexpr):
    """The chain that opens a subtree; the second warpgroup waits until the first is LAG blocks in."""
    if S.LAG > 0 and W == 1:
        mbarrier.wait(ring.lag, lag_phase)
    acc = _start(ring, slot, phase, W, S)
    if S.LAG > 0 and W == 0:
        acc, slot, phase = _continue(acc, ring, slot, phase, 1, S.LAG, W, S)
        mbarrier.arrive(ring.lag, count=1)
        return _continue(acc, ring, slot, phase, S.LAG, count, W, S)
    else:
        return _continue(acc, ring, slot, phase, 1, count, W, S)


@gluon.jit
def _next_chain(acc, ring, slot, phase, W: gl.constexpr, S: gl.constexpr):
    """(value of the chain `acc`, the next chain in flight, slot, phase): drains under new products."""
    done = slot
    slot, phase = _advance(slot, phase, S.STAGES)
    following = _start(ring, slot, phase, W, S)
    return _finish(acc, ring, done, 1), following, slot, phase


@gluon.jit
def _subtree(ring, slot, phase, lag_phase, unit, plan, WIDTH: gl.constexpr, W: gl.constexpr, S: gl.constexpr):
    """The subtree over 1, 2 or 4 units, at most three tiles alive: ((0 + 1) + (2 + 3))."""
    _, count = _unit_blocks(unit, plan, S.FOLD)
    acc, slot, phase = _first_chain(ring, slot, phase, lag_phase, count, W, S)
    if WIDTH > 1:
        _, count = _unit_blocks(unit + 1, plan, S.FOLD)
        left, acc, slot, phase = _next_chain(acc, ring, slot, phase, W, S)
        acc, slot, phase = _continue(acc, ring, slot, phase, 1, count, W, S)
    if WIDTH > 2:
        _, count = _unit_blocks(unit + 2, plan, S.FOLD)
        value, acc, slot, phase = _next_chain(acc, ring, slot, phase, W, S)
        pair = _add(left, value)
        acc, slot, phase = _continue(acc, ring, slot, phase, 1, count, W, S)
        _, count = _unit_blocks(unit + 3, plan, S.FOLD)
        left, acc, slot, phase = _next_chain(acc, ring, slot, phase, W, S)
        acc, slot, phase = _continue(acc, ring, slot, phase, 1, count, W, S)
    value = _finish(acc, ring, slot, 0)
    slot, phase = _advance(slot, phase, S.STAGES)
    if WIDTH > 1:
        value = _add(left, value)
    if WIDTH > 2:
        value = _add(pair, value)
    return value, slot, phase


@gluon.jit
def _consumer(out, bias, ring, staging, pending, grid, plan, num_columns, W: gl.constexpr,
              GROUP: gl.constexpr, STAGING: gl.constexpr, BIAS: gl.constexpr, S: gl.constexpr):
    """Rows 64 W .. 64 W + 63 of every tile of this program."""
    slot = 0
    phase = 0
    lag_phase = 0
    for t in range(gl.program_id(0), grid[0] * grid[1] * grid[2], gl.num_programs(0)):
        root, row, column = _tile(t, grid, GROUP)
        unit = grid[3] + root * S.WIDTH
        if S.WIDTH == 8:
            value = gl.zeros((64, S.BN), gl.float32, S.L)
            for h in range(2):  # a loop: half the code, and 1 to 3 % faster than two copies
                value, slot, phase = _subtree(ring, slot, phase, h, unit + 4 * h, plan, 4, W, S)
                if h == 0:
                    tma.store_wait(0)  # the last tile's output lies in the same memory
                    pending.index(W).store(value)
                else:
                    value = _add(pending.index(W).load(S.L), value)
        else:
            value, slot, phase = _subtree(ring, slot, phase, lag_phase, unit, plan, S.WIDTH, W, S)
            lag_phase = lag_phase ^ 1
            tma.store_wait(0)
        if BIAS:
            at = column * S.BN + gl.arange(0, S.BN, gl.SliceLayout(0, S.L))
            added = gl.load(bias + at, mask=at < num_columns, other=0.0).to(gl.float32)
            value = _add(value, added[None, :])
        box = staging.index(W * STAGING)
        box.reshape([64, S.BN]).store(value.to(out.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [root, row * 128 + W * 64, column * S.BN], box)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["roots", "row_tiles", "column_tiles", "first_unit", "plan0", "plan1",
                              "plan2", "plan3", "num_rows", "num_columns"],
           do_not_specialize_on_alignment=["bias"])  # fmt: skip
def gemm_kernel(a0, a1, a2, b0, b1, b2, out, bias, roots, row_tiles, column_tiles, first_unit, plan0,
                plan1, plan2, plan3, num_rows, num_columns, WIDTH: gl.constexpr, PARTS: gl.constexpr,
                BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
                LAG: gl.constexpr, TA: gl.constexpr, TB: gl.constexpr, FOLD: gl.constexpr,
                BIAS: gl.constexpr):  # fmt: skip
    """One persistent program a multiprocessor; tiles by stride, so no tile depends on arrival."""
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    S: gl.constexpr = Form(WIDTH, BN, BK, STAGES, LAG, TA, TB, FOLD, L)
    STAGING: gl.constexpr = 2 if WIDTH == 8 and out.dtype == gl.bfloat16 else 1
    if WIDTH == 8:
        half: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
        pending = gl.allocate_shared_memory(gl.float32, [2, 64, BN], half)
        staging = pending._reinterpret(out.dtype, [2 * STAGING, 1, 64, BN], out.layout)
    else:
        staging = gl.allocate_shared_memory(out.dtype, [2, 1, 64, BN], out.layout)
        pending = staging
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    ring = Ring(
        gl.allocate_shared_memory(a0.dtype, [STAGES * 2] + a0.block_shape, a0.layout),
        gl.allocate_shared_memory(b0.dtype, [STAGES] + b0.block_shape, b0.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [1, 1], barrier).index(0),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(i), count=1)
        mbarrier.init(ring.empty.index(i), count=2)
    mbarrier.init(ring.lag, count=1)
    grid = (roots, row_tiles, column_tiles, first_unit)
    plan = (plan0, plan1, plan2, plan3)
    gl.warp_specialize([
        (_consumer, (out, bias, ring, staging, pending, grid, plan, num_columns, 0, GROUP, STAGING, BIAS, S)),
        (_consumer, (out, bias, ring, staging, pending, grid, plan, num_columns, 1, GROUP, STAGING, BIAS, S)),
        (_producer, ((a0, a1, a2), (b0, b1, b2), ring, grid, plan, num_rows, PARTS, GROUP, S)),
    ], [4, 1], [240, 24])
