"""The one matrix-product kernel of sm_90: complete subtrees of chains, in Gluon.

    out[r, m, n] = round(tree over units u of root r of chain_u(a, b)[m, n] + bias[n])

* WIDTH 1 is a chain, 2, 4 and 8 are subtrees of the unit tree; out is BF16 (rounded once) or FP32.
* A unit is a run of *blocks* of BK steps; what a box reads outside of it is filled with zeros, and
  a chain from +0 is never -0.0, so the added zeros change no bit.
* A tile is 128 x BN. Two consumer warpgroups take 64 rows each, one warp loads by TMA.
* Pending sums: two live in registers beside the accumulator, the first half of eight units waits in
  shared memory. `_add` is pinned assembly: with a plain `+` LLVM moves the add past the next unit,
  four tiles are alive, registers spill and ptxas serialises wgmma (warning C7512).
* The second warpgroup runs LAG blocks behind, so that one drains while the other multiplies.
"""

from __future__ import annotations

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
from h3lib.ops.hopper.gemm_producer import (
    Form,
    Ring,
    advance,
    producer,
    tile_place,
    unit_blocks,
)

GROUP_ROWS = 64  # rows of one consumer warpgroup: wgmma's own m
TILE_ROWS = 128
NUM_WARPS = 4
MAX_REGISTERS = 168  # at entry, times 12 warps; then the consumers take 240 and the producer 24


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
        slot, phase = advance(slot, phase, S.STAGES)
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
    """The chain that opens a subtree; warpgroup 1 waits until warpgroup 0 is LAG blocks in."""
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
    """(value of the chain `acc`, the next one in flight, slot, phase): drains under products."""
    done = slot
    slot, phase = advance(slot, phase, S.STAGES)
    following = _start(ring, slot, phase, W, S)
    return _finish(acc, ring, done, 1), following, slot, phase


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
        pair = _add(left, value)
        acc, slot, phase = _continue(acc, ring, slot, phase, 1, count, W, S)
        _, count = unit_blocks(unit + 3, plan, S.FOLD)
        left, acc, slot, phase = _next_chain(acc, ring, slot, phase, W, S)
        acc, slot, phase = _continue(acc, ring, slot, phase, 1, count, W, S)
    value = _finish(acc, ring, slot, 0)
    slot, phase = advance(slot, phase, S.STAGES)
    if WIDTH > 1:
        value = _add(left, value)
    if WIDTH > 2:
        value = _add(pair, value)
    return value, slot, phase


@gluon.jit
def _pass_over(ring, slot, phase, unit, plan, S: gl.constexpr):
    """Hand back the blocks of a tile in which this warpgroup has no rows."""
    for u in range(S.WIDTH):
        _, count = unit_blocks(unit + u, plan, S.FOLD)
        for _ in range(count):
            mbarrier.wait(ring.full.index(slot), phase)
            mbarrier.arrive(ring.empty.index(slot), count=1)
            slot, phase = advance(slot, phase, S.STAGES)
    return slot, phase


@gluon.jit
def _store(value, out, bias, staging, root, row, column, num_columns, W: gl.constexpr,
           STAGING: gl.constexpr, BIAS: gl.constexpr, S: gl.constexpr):  # fmt: skip
    """Add the bias, round once, and leave the rest to the TMA."""
    if BIAS:
        at = column + gl.arange(0, S.BN, gl.SliceLayout(0, S.L))
        added = gl.load(bias + at, mask=at < num_columns, other=0.0).to(gl.float32)
        value = _add(value, added[None, :])
    box = staging.index(W * STAGING)
    box.reshape([64, S.BN]).store(value.to(out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [root, row, column], box)


@gluon.jit
def _consumer(out, bias, ring, staging, pending, grid, plan, num_rows, num_columns, W: gl.constexpr,
              GROUP: gl.constexpr, STAGING: gl.constexpr, BIAS: gl.constexpr, S: gl.constexpr):
    """Rows 64 W .. 64 W + 63 of every tile of this program."""
    slot = 0
    phase = 0
    lag_phase = 0
    for t in range(gl.program_id(0), grid[0] * grid[1] * grid[2], gl.num_programs(0)):
        root, row, column = tile_place(t, grid, GROUP)
        row = row * 128 + W * 64
        unit = grid[3] + root * S.WIDTH
        if row >= num_rows:
            slot, phase = _pass_over(ring, slot, phase, unit, plan, S)
        elif S.WIDTH == 8:
            value = gl.zeros((64, S.BN), gl.float32, S.L)
            for h in range(2):  # a loop: half the code, and 1 to 3 % faster than two copies
                value, slot, phase = _subtree(ring, slot, phase, h, unit + 4 * h, plan, 4, W, S)
                if h == 0:
                    tma.store_wait(0)  # the last tile's output lies in the same memory
                    pending.index(W).store(value)
                else:
                    value = _add(pending.index(W).load(S.L), value)
            _store(value, out, bias, staging, root, row, column * S.BN, num_columns, W, STAGING,
                   BIAS, S)  # fmt: skip
        else:
            value, slot, phase = _subtree(ring, slot, phase, lag_phase, unit, plan, S.WIDTH, W, S)
            tma.store_wait(0)
            _store(value, out, bias, staging, root, row, column * S.BN, num_columns, W, STAGING,
                   BIAS, S)  # fmt: skip
        lag_phase = lag_phase ^ 1
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["roots", "row_tiles", "column_tiles", "first_unit", "plan0", "plan1",
                       "plan2", "plan3", "num_rows", "num_columns"],
    do_not_specialize_on_alignment=["bias"],
)  # fmt: skip
def gemm_kernel(
    a0, a1, a2, b0, b1, b2, out, bias, roots, row_tiles, column_tiles, first_unit,
    plan0, plan1, plan2, plan3, num_rows, num_columns,
    WIDTH: gl.constexpr, PARTS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, LAG: gl.constexpr, TA: gl.constexpr,
    TB: gl.constexpr, FOLD: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
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
        (_consumer, (out, bias, ring, staging, pending, grid, plan, num_rows, num_columns, 0, GROUP,
                     STAGING, BIAS, S)),
        (_consumer, (out, bias, ring, staging, pending, grid, plan, num_rows, num_columns, 1, GROUP,
                     STAGING, BIAS, S)),
        (producer, ((a0, a1, a2), (b0, b1, b2), ring, grid, plan, num_rows, PARTS, GROUP, S)),
    ], [4, 1], [240, 24])  # fmt: skip
