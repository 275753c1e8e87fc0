"""The one matrix-product kernel of sm_90: complete subtrees of chains, in Gluon.

    out[r, m, n] = round(tree over units u of root r of chain_u(a, b)[m, n] + bias[n])

* WIDTH 1 is a chain, 2, 4 and 8 are subtrees of the unit tree; out is BF16 (rounded once) or FP32.
* A unit is a run of *blocks* of BK steps; what a box reads outside of it is filled with zeros, and
  a chain from +0 is never -0.0, so the added zeros change no bit.
* Two consumer warpgroups take BM of the instruction's m side each, one warp loads by TMA. Rows lie
  on the m side, 128 a tile; with SWAP they lie on the n side, where a tile may have TAIL more than
  a power of two: 264 rows are two tiles of 136 (128 + 8), or three of 96 (64 + 32), all alike.
* An accumulator is a tuple: the tile and, with SWAP, its tail.
* Pending sums: two live in registers beside the accumulator, the first half of eight units waits in
  shared memory. `add` is pinned assembly: with a plain `+` LLVM moves the add past the next unit,
  four tiles are alive, registers spill and ptxas serialises wgmma (warning C7512).
* The second warpgroup runs LAG blocks behind, so that one drains while the other multiplies.
"""

from __future__ import annotations

from h3lib.ops.hopper.compat import (
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from h3lib.ops.hopper.gemm_epilogue import Sink, add, held, hold, store
from h3lib.ops.hopper.gemm_producer import (
    Form,
    Ring,
    advance,
    producer,
    tile_place,
    unit_blocks,
)

NUM_WARPS = 4
MAX_REGISTERS = 168  # at entry, times 12 warps; then the consumers take 240 and the producer 24


@gluon.jit
def _add_each(x, y, S: gl.constexpr):
    if S.TAIL:
        return add(x[0], y[0]), add(x[1], y[1])
    else:
        return (add(x[0], y[0]),)


@gluon.jit
def _zeros(S: gl.constexpr):
    if S.TAIL:
        return (
            gl.zeros((S.BM, S.BN), gl.float32, S.L),
            gl.zeros((S.BM, S.TAIL), gl.float32, S.LT),
        )
    else:
        return (gl.zeros((S.BM, S.BN), gl.float32, S.L),)


@gluon.jit
def _wait(acc, PENDING: gl.constexpr, S: gl.constexpr):
    """The accumulator once at most PENDING blocks' products are in flight."""
    if S.TAIL:
        tile, tail = warpgroup_mma_wait(2 * PENDING, deps=acc)
        return tile, tail
    else:
        return (warpgroup_mma_wait(PENDING, deps=acc),)


@gluon.jit
def _in_flight(acc, S: gl.constexpr):
    """An accumulator as a loop carries it."""
    if S.TAIL:
        return warpgroup_mma_init(acc[0]), warpgroup_mma_init(acc[1])
    else:
        return (warpgroup_mma_init(acc[0]),)


@gluon.jit
def _multiply(acc, ring, slot, phase, FRESH: gl.constexpr, W: gl.constexpr, S: gl.constexpr):
    """Issue the products of one block; FRESH starts a chain from +0."""
    mbarrier.wait(ring.full.index(slot), phase)
    if S.TA:
        a = ring.a.index(slot * 2 + W).reshape([S.BK, S.BM]).permute((1, 0))
    else:
        a = ring.a.index(slot * 2 + W).reshape([S.BM, S.BK])
    if S.TB:
        b = ring.b.index(slot).reshape([S.BK, S.BN])
    else:
        b = ring.b.index(slot).reshape([S.BN, S.BK]).permute((1, 0))
    tile = warpgroup_mma(a, b, acc[0], use_acc=not FRESH, is_async=True)
    if S.TAIL:
        c = ring.tail.index(slot).reshape([S.TAIL, S.BK]).permute((1, 0))
        return tile, warpgroup_mma(a, c, acc[1], use_acc=not FRESH, is_async=True)
    else:
        return (tile,)


@gluon.jit
def _continue(acc, ring, slot, phase, start, stop, W: gl.constexpr, S: gl.constexpr):
    """Blocks start..stop-1 of a chain whose block in `slot` is in flight; its last one stays so."""
    for _ in range(start, stop):
        done = slot
        slot, phase = advance(slot, phase, S.STAGES)
        acc = _multiply(acc, ring, slot, phase, False, W, S)
        acc = _in_flight(_wait(acc, 1, S), S)
        mbarrier.arrive(ring.empty.index(done), count=1)
    return acc, slot, phase


@gluon.jit
def _finish(acc, ring, slot, PENDING: gl.constexpr, S: gl.constexpr):
    """The chain's value; PENDING 1 if the next chain's first block is already in flight."""
    acc = _wait(acc, PENDING, S)
    mbarrier.arrive(ring.empty.index(slot), count=1)
    return acc


@gluon.jit
def _first_chain(ring, slot, phase, lag_phase, count, W: gl.constexpr, S: gl.constexpr):
    """The chain that opens a subtree; warpgroup 1 waits until warpgroup 0 is LAG blocks in."""
    if S.LAG > 0 and W == 1:
        mbarrier.wait(ring.lag, lag_phase)
    acc = _multiply(_zeros(S), ring, slot, phase, True, W, S)
    if S.LAG > 0 and W == 0:
        acc, slot, phase = _continue(acc, ring, slot, phase, 1, S.LAG, W, S)
        mbarrier.arrive(ring.lag, count=1)
        return _continue(acc, ring, slot, phase, S.LAG, count, W, S)
    else:
        return _continue(acc, ring, slot, phase, 1, count, W, S)


@gluon.jit
def _next_chain(acc, ring, slot, phase, W: gl.constexpr, S: gl.constexpr):
    """(value of the chain `acc`, the next one in flight, slot, phase): drains under products."""
    done = slot
    slot, phase = advance(slot, phase, S.STAGES)
    following = _multiply(_zeros(S), ring, slot, phase, True, W, S)
    return _finish(acc, ring, done, 1, S), following, slot, phase


@gluon.jit
def _subtree(ring, slot, phase, lag_phase, unit, plan, WIDTH: gl.constexpr, W: gl.constexpr,
             S: gl.constexpr):  # fmt: skip
    """The subtree over 1, 2 or 4 units, at most three tiles alive: ((0 + 1) + (2 + 3))."""
    _, count = unit_blocks(unit, plan, S.FOLD)
    acc, slot, phase = _first_chain(ring, slot, phase, lag_phase, count, W, S)
    if WIDTH > 1:
        _, count = unit_blocks(unit + 1, plan, S.FOLD)
        left, acc, slot, phase = _next_chain(acc, ring, slot, phase, W, S)
        acc, slot, phase = _continue(acc, ring, slot, phase, 1, count, W, S)
    if WIDTH > 2:
        _, count = unit_blocks(unit + 2, plan, S.FOLD)
        value, acc, slot, phase = _next_chain(acc, ring, slot, phase, W, S)
        pair = _add_each(left, value, S)
        acc, slot, phase = _continue(acc, ring, slot, phase, 1, count, W, S)
        _, count = unit_blocks(unit + 3, plan, S.FOLD)
        left, acc, slot, phase = _next_chain(acc, ring, slot, phase, W, S)
        acc, slot, phase = _continue(acc, ring, slot, phase, 1, count, W, S)
    value = _finish(acc, ring, slot, 0, S)
    slot, phase = advance(slot, phase, S.STAGES)
    if WIDTH > 1:
        value = _add_each(left, value, S)
    if WIDTH > 2:
        value = _add_each(pair, value, S)
    return value, slot, phase


@gluon.jit
def _pass_over(ring, slot, phase, unit, plan, S: gl.constexpr):
    """Hand back the blocks of a tile in which this warpgroup has nothing."""
    for u in range(S.WIDTH):
        _, count = unit_blocks(unit + u, plan, S.FOLD)
        for _ in range(count):
            mbarrier.wait(ring.full.index(slot), phase)
            mbarrier.arrive(ring.empty.index(slot), count=1)
            slot, phase = advance(slot, phase, S.STAGES)
    return slot, phase


@gluon.jit
def _tile(sink, ring, slot, phase, lag_phase, root, m, n, unit, plan, num_rows, num_columns,
          W: gl.constexpr, STAGING: gl.constexpr, BIAS: gl.constexpr, S: gl.constexpr):  # fmt: skip
    """One tile's share of this warpgroup, from its first block to its store."""
    if S.WIDTH == 8:
        value = _zeros(S)
        for h in range(2):  # a loop: half the code, and 1 to 3 % faster than two copies
            value, slot, phase = _subtree(ring, slot, phase, h, unit + 4 * h, plan, 4, W, S)
            if h == 0:
                hold(value, sink, W, S)
            else:
                value = _add_each(held(sink, W, S), value, S)
    else:
        value, slot, phase = _subtree(ring, slot, phase, lag_phase, unit, plan, S.WIDTH, W, S)
        tma.store_wait(0)
    store(value, sink, root, m, n, num_rows, num_columns, W, STAGING, BIAS, S)
    return slot, phase


@gluon.jit
def _consumer(sink, ring, grid, plan, num_rows, num_columns, W: gl.constexpr, GROUP: gl.constexpr,
              STAGING: gl.constexpr, BIAS: gl.constexpr, S: gl.constexpr):  # fmt: skip
    """BM W .. BM W + BM - 1 on the m side of every tile of this program."""
    m_extent = num_columns if S.SWAP else num_rows
    slot = 0
    phase = 0
    lag_phase = 0
    for t in range(gl.program_id(0), grid[0] * grid[1] * grid[2], gl.num_programs(0)):
        root, m, n = tile_place(t, grid, GROUP, S)
        m = m + W * S.BM
        unit = grid[3] + root * S.WIDTH
        if m >= m_extent:
            slot, phase = _pass_over(ring, slot, phase, unit, plan, S)
        else:
            slot, phase = _tile(sink, ring, slot, phase, lag_phase, root, m, n, unit, plan,
                                num_rows, num_columns, W, STAGING, BIAS, S)  # fmt: skip
        lag_phase = lag_phase ^ 1
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["roots", "row_tiles", "column_tiles", "first_unit", "plan0", "plan1",
                       "plan2", "plan3", "num_rows", "num_columns"],
    do_not_specialize_on_alignment=["bias"],
)  # fmt: skip
def gemm_kernel(
    a0, a1, a2, b0, b1, b2, tail0, tail1, tail2, out, out_tail, bias,
    roots, row_tiles, column_tiles, first_unit, plan0, plan1, plan2, plan3, num_rows, num_columns,
    WIDTH: gl.constexpr, PARTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    TAIL: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    LAG: gl.constexpr, SWAP: gl.constexpr, TA: gl.constexpr, TB: gl.constexpr, FOLD: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """One persistent program a multiprocessor; tiles by stride, so no tile depends on arrival."""
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    LT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TAIL if TAIL > 0 else 8, 16]
    )
    S: gl.constexpr = Form(WIDTH, BM, BN, TAIL, BN + TAIL, BK, STAGES, LAG, SWAP, TA, TB, FOLD, L,
                           LT)  # fmt: skip
    b_ring = gl.allocate_shared_memory(b0.dtype, [STAGES] + b0.block_shape, b0.layout)
    STAGING: gl.constexpr = 2 if WIDTH == 8 and out.dtype == gl.bfloat16 else 1
    if WIDTH == 8:
        half: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
        pending = gl.allocate_shared_memory(gl.float32, [2, BM, BN], half)
        staging = pending._reinterpret(out.dtype, [2 * STAGING] + out.block_shape, out.layout)
    else:
        staging = gl.allocate_shared_memory(out.dtype, [2] + out.block_shape, out.layout)
        pending = staging
    if TAIL:
        ring_tail = gl.allocate_shared_memory(b0.dtype, [STAGES] + tail0.block_shape, tail0.layout)
        staging_tail = gl.allocate_shared_memory(
            out.dtype, [2 * STAGING] + out_tail.block_shape, out_tail.layout
        )
        if WIDTH == 8:
            half_tail: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
            pending_tail = staging_tail._reinterpret(gl.float32, [2, BM, TAIL], half_tail)
        else:
            pending_tail = staging_tail
    else:
        ring_tail, staging_tail, pending_tail = b_ring, staging, pending
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    ring = Ring(
        gl.allocate_shared_memory(a0.dtype, [STAGES * 2] + a0.block_shape, a0.layout),
        b_ring,
        ring_tail,
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [1, 1], barrier).index(0),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(i), count=1)
        mbarrier.init(ring.empty.index(i), count=2)
    mbarrier.init(ring.lag, count=1)
    sink = Sink(out, out_tail, bias, staging, staging_tail, pending, pending_tail)
    grid = (roots, row_tiles, column_tiles, first_unit)
    plan = (plan0, plan1, plan2, plan3)
    m_extent = num_columns if SWAP else num_rows
    n_extent = num_rows if SWAP else num_columns
    gl.warp_specialize([
        (_consumer, (sink, ring, grid, plan, num_rows, num_columns, 0, GROUP, STAGING, BIAS, S)),
        (_consumer, (sink, ring, grid, plan, num_rows, num_columns, 1, GROUP, STAGING, BIAS, S)),
        (producer, ((a0, a1, a2), (b0, b1, b2), (tail0, tail1, tail2), ring, grid, plan, m_extent,
                    n_extent, PARTS, GROUP, S)),
    ], [4, 1], [240, 24])  # fmt: skip
