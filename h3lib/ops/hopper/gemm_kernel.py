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


@gluon.jit
def _tile(t, row_tiles, column_tiles, GROUP: gl.constexpr):
    """(root, row tile, column tile) of tile t: GROUP row tiles share a column tile in L2."""
    per_root = row_tiles * column_tiles
    root = t // per_root
    t = t - root * per_root
    first = t // (GROUP * column_tiles) * GROUP
    size = gl.minimum(row_tiles - first, GROUP)
    t = t - first * column_tiles
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
def _load(a, b, a_ring, b_ring, full, empty, slot, phase, unit, row, column, k, both,
          BN: gl.constexpr, BK: gl.constexpr, TA: gl.constexpr, TB: gl.constexpr):
    """One block of both operands. The lower 64 rows are not asked for where there are none: a box
    wholly outside is slow (65 us against 50 us at 264 rows, H200, 2026-11)."""
    bar = full.index(slot)
    mbarrier.wait(empty.index(slot), phase)
    mbarrier.expect(bar, (128 + BN) * BK * 2, pred=both)
    mbarrier.expect(bar, (64 + BN) * BK * 2, pred=both == 0)
    if TA:
        tma.async_copy_global_to_shared(a, [unit, k, row], bar, a_ring.index(slot * 2))
        tma.async_copy_global_to_shared(a, [unit, k, row + 64], bar, a_ring.index(slot * 2 + 1), pred=both)
    else:
        tma.async_copy_global_to_shared(a, [unit, row, k], bar, a_ring.index(slot * 2))
        tma.async_copy_global_to_shared(a, [unit, row + 64, k], bar, a_ring.index(slot * 2 + 1), pred=both)
    if TB:
        tma.async_copy_global_to_shared(b, [unit, k, column], bar, b_ring.index(slot))
    else:
        tma.async_copy_global_to_shared(b, [unit, column, k], bar, b_ring.index(slot))


@gluon.jit
def _producer(a, b, a_ring, b_ring, full, empty, grid, plan, num_rows,
              WIDTH: gl.constexpr, PARTS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
              STAGES: gl.constexpr, GROUP: gl.constexpr, TA: gl.constexpr, TB: gl.constexpr,
              FOLD: gl.constexpr):
    slot = 0
    phase = 1
    for t in range(gl.program_id(0), grid[0] * grid[1] * grid[2], gl.num_programs(0)):
        root, row, column = _tile(t, grid[1], grid[2], GROUP)
        row = row * 128
        column = column * BN
        both = row + 64 < num_rows
        for i in range(WIDTH):
            unit = grid[3] + root * WIDTH + i
            if FOLD:
                first, count = _unit_blocks(unit, plan, FOLD)
                for k in range(count):
                    _load(a[0], b[0], a_ring, b_ring, full, empty, slot, phase, 0, row, column,
                          (first + k) * BK, both, BN, BK, TA, TB)
                    slot, phase = _advance(slot, phase, STAGES)
            else:
                for part in gl.static_range(PARTS):
                    for k in range(plan[part]):
                        _load(a[part], b[part], a_ring, b_ring, full, empty, slot, phase, unit, row,
                              column, k * BK, both, BN, BK, TA, TB)
                        slot, phase = _advance(slot, phase, STAGES)


@gluon.jit
def _add(x, y):
    return gl.inline_asm_elementwise(
        "add.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _multiply(acc, a_ring, b_ring, full, slot, phase, FRESH: gl.constexpr, W: gl.constexpr,
              BN: gl.constexpr, BK: gl.constexpr, TA: gl.constexpr, TB: gl.constexpr):
    """Issue the products of one block; FRESH starts a chain."""
    mbarrier.wait(full.index(slot), phase)
    if TA:
        a = a_ring.index(slot * 2 + W).reshape([BK, 64]).permute((1, 0))
    else:
        a = a_ring.index(slot * 2 + W).reshape([64, BK])
    if TB:
        b = b_ring.index(slot).reshape([BK, BN])
    else:
        b = b_ring.index(slot).reshape([BN, BK]).permute((1, 0))
    return warpgroup_mma(a, b, acc, use_acc=not FRESH, is_async=True)


@gluon.jit
def _start(a_ring, b_ring, full, slot, phase, W: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
           TA: gl.constexpr, TB: gl.constexpr, L: gl.constexpr):
    acc = gl.zeros((64, BN), gl.float32, L)
    return _multiply(acc, a_ring, b_ring, full, slot, phase, True, W, BN, BK, TA, TB)


@gluon.jit
def _continue(acc, a_ring, b_ring, full, empty, slot, phase, start, stop, W: gl.constexpr,
              BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, TA: gl.constexpr,
              TB: gl.constexpr):
    """Blocks start..stop-1 of a chain whose block in `slot` is in flight; its last one stays so."""
    for _ in range(start, stop):
        done = slot
        slot, phase = _advance(slot, phase, STAGES)
        acc = _multiply(acc, a_ring, b_ring, full, slot, phase, False, W, BN, BK, TA, TB)
        acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
        mbarrier.arrive(empty.index(done), count=1)
    return acc, slot, phase


@gluon.jit
def _finish(acc, empty, slot, PENDING: gl.constexpr):
    """The chain's value; PENDING 1 if the next chain's first block is already in flight."""
    acc = warpgroup_mma_wait(PENDING, deps=(acc,))
    mbarrier.arrive(empty.index(slot), count=1)
    return acc


@gluon.jit
def _first_chain(a_ring, b_ring, full, empty, lag, slot, phase, lag_phase, count, W: gl.constexpr,
                 BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
                 TA: gl.constexpr, TB: gl.constexpr, L: gl.constexpr):
    """The chain that opens a subtree; the second warpgroup waits until the first is LAG blocks in."""
    if LAG > 0 and W == 1:
        mbarrier.wait(lag, lag_phase)
    acc = _start(a_ring, b_ring, full, slot, phase, W, BN, BK, TA, TB, L)
    if LAG > 0 and W == 0:
        acc, slot, phase = _continue(acc, a_ring, b_ring, full, empty, slot, phase, 1, LAG, W, BN,
                                     BK, STAGES, TA, TB)
        mbarrier.arrive(lag, count=1)
        return _continue(acc, a_ring, b_ring, full, empty, slot, phase, LAG, count, W, BN, BK,
                         STAGES, TA, TB)
    else:
        return _continue(acc, a_ring, b_ring, full, empty, slot, phase, 1, count, W, BN, BK, STAGES,
                         TA, TB)


@gluon.jit
def _next_chain(acc, a_ring, b_ring, full, empty, slot, phase, count, W: gl.constexpr,
                BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, TA: gl.constexpr,
                TB: gl.constexpr, L: gl.constexpr):
    """(value of the chain `acc`, the next chain in flight, slot, phase): drains under new products."""
    done = slot
    slot, phase = _advance(slot, phase, STAGES)
    following = _start(a_ring, b_ring, full, slot, phase, W, BN, BK, TA, TB, L)
    return _finish(acc, empty, done, 1), following, slot, phase


@gluon.jit
def _subtree(a_ring, b_ring, full, empty, lag, slot, phase, lag_phase, unit, plan,
             WIDTH: gl.constexpr, W: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
             STAGES: gl.constexpr, LAG: gl.constexpr, TA: gl.constexpr, TB: gl.constexpr,
             FOLD: gl.constexpr, L: gl.constexpr):
    """The subtree over 1, 2 or 4 units, at most three tiles alive: ((0 + 1) + (2 + 3))."""
    _, count = _unit_blocks(unit, plan, FOLD)
    acc, slot, phase = _first_chain(a_ring, b_ring, full, empty, lag, slot, phase, lag_phase, count,
                                    W, BN, BK, STAGES, LAG, TA, TB, L)
    if WIDTH > 1:
        _, count = _unit_blocks(unit + 1, plan, FOLD)
        left, acc, slot, phase = _next_chain(acc, a_ring, b_ring, full, empty, slot, phase, count, W,
                                             BN, BK, STAGES, TA, TB, L)
        acc, slot, phase = _continue(acc, a_ring, b_ring, full, empty, slot, phase, 1, count, W, BN,
                                     BK, STAGES, TA, TB)
    if WIDTH > 2:
        _, count = _unit_blocks(unit + 2, plan, FOLD)
        value, acc, slot, phase = _next_chain(acc, a_ring, b_ring, full, empty, slot, phase, count, W,
                                              BN, BK, STAGES, TA, TB, L)
        pair = _add(left, value)
        acc, slot, phase = _continue(acc, a_ring, b_ring, full, empty, slot, phase, 1, count, W, BN,
                                     BK, STAGES, TA, TB)
        _, count = _unit_blocks(unit + 3, plan, FOLD)
        left, acc, slot, phase = _next_chain(acc, a_ring, b_ring, full, empty, slot, phase, count, W,
                                             BN, BK, STAGES, TA, TB, L)
        acc, slot, phase = _continue(acc, a_ring, b_ring, full, empty, slot, phase, 1, count, W, BN,
                                     BK, STAGES, TA, TB)
    value = _finish(acc, empty, slot, 0)
    slot, phase = _advance(slot, phase, STAGES)
    if WIDTH > 1:
        value = _add(left, value)
    if WIDTH > 2:
        value = _add(pair, value)
    return value, slot, phase


@gluon.jit
def _half(h, pending, a_ring, b_ring, full, empty, lag, slot, phase, unit, plan, W: gl.constexpr,
          BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
          TA: gl.constexpr, TB: gl.constexpr, FOLD: gl.constexpr, L: gl.constexpr):
    """Half h of eight units: the first is left in `pending`, the second returned added to it."""
    value, slot, phase = _subtree(a_ring, b_ring, full, empty, lag, slot, phase, h, unit + 4 * h, plan,
                                  4, W, BN, BK, STAGES, LAG, TA, TB, FOLD, L)
    if h == 0:
        tma.store_wait(0)  # the last tile's output lies in the same memory
        pending.index(W).store(value)
    else:
        value = _add(pending.index(W).load(L), value)
    return value, slot, phase


@gluon.jit
def _consumer(out, bias, a_ring, b_ring, staging, pending, full, empty, lag, grid, plan, num_columns,
              WIDTH: gl.constexpr, W: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
              STAGES: gl.constexpr, GROUP: gl.constexpr, LAG: gl.constexpr,
              TA: gl.constexpr, TB: gl.constexpr, FOLD: gl.constexpr, STAGING: gl.constexpr,
              BIAS: gl.constexpr):
    """Rows 64 W .. 64 W + 63 of every tile."""
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    slot = 0
    phase = 0
    lag_phase = 0
    for t in range(gl.program_id(0), grid[0] * grid[1] * grid[2], gl.num_programs(0)):
        root, row, column = _tile(t, grid[1], grid[2], GROUP)
        unit = grid[3] + root * WIDTH
        if WIDTH == 8:
            value = gl.zeros((64, BN), gl.float32, L)
            for h in range(2):  # a loop: half the code, and 1 to 3 % faster than two copies
                value, slot, phase = _half(h, pending, a_ring, b_ring, full, empty, lag, slot, phase,
                                           unit, plan, W, BN, BK, STAGES, LAG, TA, TB, FOLD, L)
        else:
            value, slot, phase = _subtree(a_ring, b_ring, full, empty, lag, slot, phase, lag_phase,
                                          unit, plan, WIDTH, W, BN, BK, STAGES, LAG, TA, TB, FOLD, L)
            lag_phase = lag_phase ^ 1
        if BIAS:
            at = column * BN + gl.arange(0, BN, gl.SliceLayout(0, L))
            b = gl.load(bias + at, mask=at < num_columns, other=0.0).to(gl.float32)
            value = _add(value, b[None, :])
        if WIDTH != 8:
            tma.store_wait(0)
        box = staging.index(W * STAGING)
        box.reshape([64, BN]).store(value.to(out.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [root, row * 128 + W * 64, column * BN], box)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["roots", "row_tiles", "column_tiles", "first_unit", "plan0", "plan1",
                              "plan2", "plan3", "num_rows", "num_columns"],
           do_not_specialize_on_alignment=["bias"])
def gemm_kernel(a0, a1, a2, b0, b1, b2, out, bias, roots, row_tiles, column_tiles, first_unit, plan0,
                plan1, plan2, plan3, num_rows, num_columns, WIDTH: gl.constexpr, PARTS: gl.constexpr,
                BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
                LAG: gl.constexpr, TA: gl.constexpr, TB: gl.constexpr,
                FOLD: gl.constexpr, BIAS: gl.constexpr):
    """One persistent program a multiprocessor; tiles by stride, so no tile depends on arrival."""
    a_ring = gl.allocate_shared_memory(a0.dtype, [STAGES * 2] + a0.block_shape, a0.layout)
    b_ring = gl.allocate_shared_memory(b0.dtype, [STAGES] + b0.block_shape, b0.layout)
    STAGING: gl.constexpr = 2 if WIDTH == 8 and out.dtype == gl.bfloat16 else 1
    if WIDTH == 8:
        pending = gl.allocate_shared_memory(gl.float32, [2, 64, BN], gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
        staging = pending._reinterpret(out.dtype, [2 * STAGING, 1, 64, BN], out.layout)
    else:
        staging = gl.allocate_shared_memory(out.dtype, [2, 1, 64, BN], out.layout)
        pending = staging
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    lags = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    lag = lags.index(0)
    mbarrier.init(lag, count=1)
    grid = (roots, row_tiles, column_tiles, first_unit)
    plan = (plan0, plan1, plan2, plan3)
    gl.warp_specialize([
        (_consumer, (out, bias, a_ring, b_ring, staging, pending, full, empty, lag, grid, plan,
                     num_columns, WIDTH, 0, BN, BK, STAGES, GROUP, LAG, TA, TB, FOLD, STAGING,
                     BIAS)),
        (_consumer, (out, bias, a_ring, b_ring, staging, pending, full, empty, lag, grid, plan,
                     num_columns, WIDTH, 1, BN, BK, STAGES, GROUP, LAG, TA, TB, FOLD, STAGING,
                     BIAS)),
        (_producer, ((a0, a1, a2), (b0, b1, b2), a_ring, b_ring, full, empty, grid, plan, num_rows,
                     WIDTH, PARTS, BN, BK, STAGES, GROUP, TA, TB, FOLD)),
    ], [4, 1], [240, 24])
