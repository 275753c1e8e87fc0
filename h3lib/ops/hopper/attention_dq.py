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

from torch import Tensor

from h3lib.contract import Contract
from h3lib.ops import attention
from h3lib.ops.hopper.attention_loop import (
    Sizes,
    key_ring,
    next_slot,
    produce_keys,
    resident_pair,
    tile_place,
)
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
from h3lib.ops.hopper.launch import AgainByViews, Launch, kept_by_signature

GROUPS = gl.constexpr(2)
SLOTS = gl.constexpr(
    2
)  # K and V blocks in flight; 3 gave the same time within 2 % (H200, 2026-11-30)
OPTIONS = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": False}


@gluon.jit
def _dq_block(
    dq, minus_lse, delta, resident, keys, slot, phase, keys_left, LAST: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """One key block of the chain; the last one masks absent keys."""
    q, dout = resident.buffers
    k, v = keys.k, keys.v
    zeros = gl.zeros((64, 128), gl.float32, ACC)
    mbarrier.wait(keys.k_full.index(slot), phase)
    s = warpgroup_mma(
        q.index(GROUP), k.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    mbarrier.wait(keys.v_full.index(slot), phase)
    dp = warpgroup_mma(
        dout.index(GROUP), v.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    s = warpgroup_mma_wait(1, deps=(s,))
    p = ex2(gl.fma(s, gl.full((64, 128), SCORE_SCALE, gl.float32, ACC), minus_lse[:, None] + zeros))
    dp, p = warpgroup_mma_wait(0, deps=(dp, p))
    mbarrier.arrive(keys.v_empty.index(slot), count=1)
    ds = p * (dp - delta[:, None])
    if LAST:
        column = gl.arange(0, 128, COLUMN)
        ds = gl.where((column < keys_left)[None, :], ds, 0.0)
    ds_bf16 = gl.convert_layout(ds.to(gl.bfloat16), A_OPERAND)
    dq = warpgroup_mma(ds_bf16, k.index(slot), dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.arrive(keys.k_empty.index(slot), count=1)
    slot, phase = next_slot(slot, phase, SLOTS)
    return dq, slot, phase


@gluon.jit
def _consume_keys(dq_desc, lse, delta, resident, keys, sizes, GROUP: gl.constexpr):
    """One warpgroup: dq of 64 query rows of each tile."""
    q = resident.buffers[0]
    slot = 0
    phase = 0
    q_phase = 0
    for tile in range(gl.program_id(0), sizes.num_tiles, gl.num_programs(0)):
        head, first = tile_place(tile, sizes, GROUPS)
        row = first + GROUP * 64
        rows = row + gl.arange(0, 64, ROW)
        at = rows.to(gl.int64) * sizes.num_heads + head
        minus_lse = -gl.load(lse + at, mask=rows < sizes.num_queries, other=0.0)
        delta_rows = gl.load(delta + at, mask=rows < sizes.num_queries, other=0.0)
        mbarrier.wait(resident.full.index(GROUP), q_phase)
        q_phase = q_phase ^ 1
        dq = gl.zeros((64, 128), gl.float32, ACC)
        for _ in range(sizes.num_blocks - 1):
            dq, slot, phase = _dq_block(
                dq, minus_lse, delta_rows, resident, keys, slot, phase, 0, False, GROUP
            )
        if sizes.num_keys > 0:  # always: a straight line costs ptxas more registers
            keys_left = sizes.num_keys - (sizes.num_blocks - 1) * 128
            dq, slot, phase = _dq_block(
                dq, minus_lse, delta_rows, resident, keys, slot, phase, keys_left, True, GROUP
            )
        q.index(GROUP).store((dq * GRADIENT_SCALE).to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(dq_desc, [row, head * 128], q.index(GROUP))
        tma.store_wait(0)
        mbarrier.arrive(resident.empty.index(GROUP), count=1)


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
    resident = resident_pair(q_desc, dout_desc, GROUPS)
    keys = key_ring(k_desc, v_desc, SLOTS, GROUPS)
    sizes = Sizes(num_blocks, tiles_per_head, num_tiles, num_queries, num_keys, num_heads)
    gl.warp_specialize(
        [
            (_consume_keys, (dq_desc, lse, delta, resident, keys, sizes, 0)),
            (_consume_keys, (dq_desc, lse, delta, resident, keys, sizes, 1)),
            (produce_keys, (resident, keys, sizes, GROUPS, SLOTS)),
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
    programs = programs_for(q.device, 6 * q.numel() * len(k)) if len(q) else 0
    launch = _kept_launch(q, k, v, dout, lse, delta, contract, programs)
    dq = q.new_empty(q.shape)
    if launch is not None:
        launch.start(q, k, v, dout, lse, delta, dq)
    return dq


@kept_by_signature
def _kept_launch(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, contract: Contract,
    programs: int,
) -> AgainByViews | None:  # fmt: skip
    check_attention(contract, {"q": q, "dout": dout}, {"k": k, "v": v})
    check_statistics(q, lse=lse, delta=delta)
    check_rows("k", k)
    if not len(q):
        return None
    tensors = (q, k, v, dout, lse, delta, q.new_empty(q.shape))
    return AgainByViews(dq_launch(*tensors, programs), tensors)
