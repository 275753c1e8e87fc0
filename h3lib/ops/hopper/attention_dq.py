"""dq of attention on Hopper: one accumulator chain over all keys, ascending from row 0.

With S, dP the chains of q.k and dO.v, c = fl32(log2(e) / sqrt(128)), L base 2, delta = sum dO O:
    p = ex2(fma(S, c, -L));  dS = p (dP - delta), FP32
    dq = bf16(fl32(1 / sqrt(128)) * chain of bf16(dS).k)
Absent keys have dS = 0.

The backward is two kernels, this and `attention_dkv.py`. S and dP are computed twice, so seven
products against the five of a fused kernel; but there dq is a sum over programs, which put in order
gave 0.87-0.89 of cuDNN, against 0.95-0.97 (H200, 2026-11-30). Only gathered rows cross ranks.

Two warpgroups of 64 query rows each, and one warp that feeds them through TMA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3lib.contract import Contract
from h3lib.ops import attention
from h3lib.ops.hopper.attention_tiles import (
    A_OPERAND,
    ACC,
    COLUMN,
    GRADIENT_SCALE,
    KEY_BLOCK,
    ROW,
    SCORE_SCALE,
    TILE_ROWS,
    check_attention,
    check_rows,
    check_statistics,
    ex2,
    heads_map,
    next_slot,
)
from h3lib.ops.hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    programs_for,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from h3lib.ops.hopper.launch import Launch

GROUPS = gl.constexpr(2)
SLOTS = gl.constexpr(
    2
)  # K and V blocks in flight; 3 gave the same time within 2 % (H200, 2026-11-30)
OPTIONS = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": False}


@gluon.jit
def _produce_keys(q_desc, dout_desc, k_desc, v_desc, shared, sizes):
    """One warp: for each tile q and dO of every group, then K and V of block 0, 1, ..."""
    q, dout, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = shared
    num_blocks, tiles_per_head, num_tiles, num_queries, num_keys, num_heads = sizes
    slot = 0
    phase = 1
    q_phase = 1
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        head = tile // tiles_per_head
        row = (tile - head * tiles_per_head) * (GROUPS * 64)
        column = head * 128
        for group in gl.static_range(GROUPS):
            mbarrier.wait(q_empty.index(group), q_phase)
            mbarrier.expect(q_full.index(group), 2 * 64 * 128 * 2)
            tma.async_copy_global_to_shared(
                q_desc, [row + group * 64, column], q_full.index(group), q.index(group)
            )
            tma.async_copy_global_to_shared(
                dout_desc, [row + group * 64, column], q_full.index(group), dout.index(group)
            )
        q_phase = q_phase ^ 1
        for block in range(num_blocks):
            mbarrier.wait(k_empty.index(slot), phase)
            mbarrier.expect(k_full.index(slot), 128 * 128 * 2)
            tma.async_copy_global_to_shared(
                k_desc, [block * 128, column], k_full.index(slot), k.index(slot)
            )
            mbarrier.wait(v_empty.index(slot), phase)
            mbarrier.expect(v_full.index(slot), 128 * 128 * 2)
            tma.async_copy_global_to_shared(
                v_desc, [block * 128, column], v_full.index(slot), v.index(slot)
            )
            slot, phase = next_slot(slot, phase, SLOTS)


@gluon.jit
def _dq_block(
    dq, minus_lse, delta, shared, slot, phase, keys_left, LAST: gl.constexpr, GROUP: gl.constexpr
):
    """One key block of the chain; the last one masks absent keys."""
    q, dout, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = shared
    zeros = gl.zeros((64, 128), gl.float32, ACC)
    mbarrier.wait(k_full.index(slot), phase)
    s = warpgroup_mma(
        q.index(GROUP), k.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    mbarrier.wait(v_full.index(slot), phase)
    dp = warpgroup_mma(
        dout.index(GROUP), v.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    s = warpgroup_mma_wait(1, deps=(s,))
    p = ex2(gl.fma(s, gl.full((64, 128), SCORE_SCALE, gl.float32, ACC), minus_lse[:, None] + zeros))
    dp, p = warpgroup_mma_wait(0, deps=(dp, p))
    mbarrier.arrive(v_empty.index(slot), count=1)
    ds = p * (dp - delta[:, None])
    if LAST:
        column = gl.arange(0, 128, COLUMN)
        ds = gl.where((column < keys_left)[None, :], ds, 0.0)
    ds_bf16 = gl.convert_layout(ds.to(gl.bfloat16), A_OPERAND)
    dq = warpgroup_mma(ds_bf16, k.index(slot), dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.arrive(k_empty.index(slot), count=1)
    slot, phase = next_slot(slot, phase, SLOTS)
    return dq, slot, phase


@gluon.jit
def _consume_keys(dq_desc, lse, delta, shared, sizes, GROUP: gl.constexpr):
    """One warpgroup: dq of 64 query rows of each tile."""
    q, dout, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty = shared
    num_blocks, tiles_per_head, num_tiles, num_queries, num_keys, num_heads = sizes
    slot = 0
    phase = 0
    q_phase = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        head = tile // tiles_per_head
        row = (tile - head * tiles_per_head) * (GROUPS * 64) + GROUP * 64
        rows = row + gl.arange(0, 64, ROW)
        at = rows.to(gl.int64) * num_heads + head
        minus_lse = -gl.load(lse + at, mask=rows < num_queries, other=0.0)
        delta_rows = gl.load(delta + at, mask=rows < num_queries, other=0.0)
        mbarrier.wait(q_full.index(GROUP), q_phase)
        q_phase = q_phase ^ 1
        dq = gl.zeros((64, 128), gl.float32, ACC)
        for _ in range(num_blocks - 1):
            dq, slot, phase = _dq_block(
                dq, minus_lse, delta_rows, shared, slot, phase, 0, False, GROUP
            )
        if num_keys > 0:  # always: a straight line to the last block costs ptxas more registers
            keys_left = num_keys - (num_blocks - 1) * 128
            dq, slot, phase = _dq_block(
                dq, minus_lse, delta_rows, shared, slot, phase, keys_left, True, GROUP
            )
        q.index(GROUP).store((dq * GRADIENT_SCALE).to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(dq_desc, [row, head * 128], q.index(GROUP))
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(GROUP), count=1)


# fmt: off
@gluon.jit(do_not_specialize=[
    "num_blocks", "tiles_per_head", "num_tiles", "num_queries", "num_keys", "num_heads",
])
def attention_dq_kernel(
    q_desc, dout_desc, k_desc, v_desc, dq_desc, lse, delta,
    num_blocks, tiles_per_head, num_tiles, num_queries, num_keys, num_heads,
):
    # fmt: on
    """Persistent: program p takes tiles p, p + grid, ...; heads outermost, for K, V in L2."""
    q = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 64, 128], q_desc.layout)
    dout = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 64, 128], dout_desc.layout)
    k = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 128, 128], k_desc.layout)
    v = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 128, 128], v_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    for i in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    shared = (q, dout, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (num_blocks, tiles_per_head, num_tiles, num_queries, num_keys, num_heads)
    gl.warp_specialize(
        [
            (_consume_keys, (dq_desc, lse, delta, shared, sizes, 0)),
            (_consume_keys, (dq_desc, lse, delta, shared, sizes, 1)),
            (_produce_keys, (q_desc, dout_desc, k_desc, v_desc, shared, sizes)),
        ],
        [4, 1],
        [240, 24],
    )


def dq_launch(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, sms: int
) -> Launch:
    """dq over these operands with tiles of 2 x 64 query rows."""
    num_queries, num_heads, _ = q.shape
    tiles_per_head = -(-num_queries // (GROUPS.value * TILE_ROWS))
    num_tiles = tiles_per_head * num_heads
    operands = (
        heads_map("q", q, TILE_ROWS), heads_map("dout", dout, TILE_ROWS),
        heads_map("k", k, KEY_BLOCK), heads_map("v", v, KEY_BLOCK),
        heads_map("dq", dq, TILE_ROWS), lse, delta,
        -(-len(k) // KEY_BLOCK), tiles_per_head, num_tiles, num_queries, len(k), num_heads,
    )  # fmt: skip
    return Launch(attention_dq_kernel, operands, OPTIONS, (min(sms, num_tiles),))


@attention.attention_dq.register("triton")
def attention_dq(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, contract: Contract
) -> Tensor:
    """dq like q; q, dout `[Tq, N, 128]`, k, v `[T, N, 128]` all rows, lse, delta `[Tq, N]`.

    BF16, lse and delta FP32. A shard without rows launches nothing.

    **Order:** one chain over all keys, ascending. **Rounds:** dS for the product; dq once.
    **Raises:** OperandError, ContractError, BackendError for what the kernel cannot take.
    """
    check_attention(contract, {"q": q, "dout": dout}, {"k": k, "v": v})
    check_statistics(q, lse=lse, delta=delta)
    check_rows("k", k)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if len(q):
        programs = programs_for(q.device, 6 * q.numel() * len(k))
        dq_launch(q, k, v, dout, lse, delta, dq, programs).start()
    return dq
