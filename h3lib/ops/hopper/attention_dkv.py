"""dk and dv of attention on Hopper: one accumulator chain each over all queries, ascending.

With S, dP the chains of q.k and dO.v, c = fl32(log2(e) / sqrt(128)), L base 2, delta = sum dO O:
    p = ex2(fma(S, c, -L));  dS = p (dP - delta), FP32
    dv = bf16(chain of bf16(p).dO);  dk = bf16(fl32(1 / sqrt(128)) * chain of bf16(dS).q)
Absent queries have p = dS = 0.

The products are transposed, S^T = k q^T and dP^T = v dO^T, so that p^T and dS^T come out of the
accumulators as the register operands of the chains and never touch shared memory.

Two warpgroups of 64 keys each, and one warp that feeds them through TMA.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from h3lib.contract import Contract
from h3lib.ops import attention
from h3lib.ops.hopper.attention_loop import (
    Sizes,
    barriers,
    fetch_rows,
    next_slot,
    resident_pair,
    tile_place,
)
from h3lib.ops.hopper.attention_statistics import by_head_launch
from h3lib.ops.hopper.attention_tiles import (
    A_OPERAND,
    ACC,
    GRADIENT_SCALE,
    SCORE_SCALE,
    TILE_ROWS,
    check_attention,
    check_rows,
    check_statistics,
    ex2,
    heads_map,
    statistics_map,
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
SLOTS = gl.constexpr(4)  # blocks of 64 queries in flight; 3 was 2 % slower (H200, 2026-11-30)
SCORES = gl.constexpr(  # S^T and dP^T: 64 keys x 64 queries
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
)
QUERY = gl.constexpr(gl.SliceLayout(0, SCORES.value))
OPTIONS = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": False}


class Queries(NamedTuple):
    """The ring of query blocks of 64, with -L and delta of their rows."""

    maps: object  # of q, dO and the statistics
    q: object
    dout: object
    minus_lse: object
    delta: object
    full: object
    empty: object


@gluon.jit
def _produce_queries(resident, queries, sizes):
    """One warp: for each tile K and V of every group, then q, dO, -L, delta of block 0, 1, ..."""
    q_map, dout_map, statistics_map = queries.maps
    padded = sizes.num_keys
    slot = 0
    phase = 1
    tile_phase = 1
    for tile in range(gl.program_id(0), sizes.num_tiles, gl.num_programs(0)):
        head, row = tile_place(tile, sizes, GROUPS)
        column = head * 128
        fetch_rows(resident, tile_phase, row, column, GROUPS)
        tile_phase = tile_phase ^ 1
        for block in range(sizes.num_blocks):
            at = [block * 64, column]
            first = head * padded + block * 64
            full = queries.full.index(slot)
            mbarrier.wait(queries.empty.index(slot), phase)
            mbarrier.expect(full, 2 * 64 * 128 * 2 + 2 * 64 * 4)
            tma.async_copy_global_to_shared(q_map, at, full, queries.q.index(slot))
            tma.async_copy_global_to_shared(
                statistics_map, [first], full, queries.minus_lse.index(slot)
            )
            tma.async_copy_global_to_shared(dout_map, at, full, queries.dout.index(slot))
            tma.async_copy_global_to_shared(
                statistics_map, [first + sizes.num_heads * padded], full, queries.delta.index(slot)
            )
            slot, phase = next_slot(slot, phase, SLOTS)


@gluon.jit
def _dkv_block(
    dk, dv, resident, queries, slot, phase, queries_left, LAST: gl.constexpr, GROUP: gl.constexpr
):
    """One block of 64 queries of both chains, transposed: p and dS are register operands."""
    k, v = resident.buffers
    q, dout = queries.q, queries.dout
    zeros = gl.zeros((64, 64), gl.float32, SCORES)
    mbarrier.wait(queries.full.index(slot), phase)
    s = warpgroup_mma(
        k.index(GROUP), q.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    dp = warpgroup_mma(
        v.index(GROUP), dout.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    shift = queries.minus_lse.index(slot).load(QUERY)
    s = warpgroup_mma_wait(1, deps=(s,))
    p = ex2(gl.fma(s, gl.full((64, 64), SCORE_SCALE, gl.float32, SCORES), shift[None, :] + zeros))
    if LAST:
        present = (gl.arange(0, 64, QUERY) < queries_left)[None, :]
        p = gl.where(present, p, 0.0)
    p_bf16 = gl.convert_layout(p.to(gl.bfloat16), A_OPERAND)
    delta_columns = queries.delta.index(slot).load(QUERY)
    dv = warpgroup_mma(p_bf16, dout.index(slot), dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = p * (dp - delta_columns[None, :])
    if LAST:
        ds = gl.where(present, ds, 0.0)
    ds_bf16 = gl.convert_layout(ds.to(gl.bfloat16), A_OPERAND)
    dk = warpgroup_mma(ds_bf16, q.index(slot), dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
    mbarrier.arrive(queries.empty.index(slot), count=1)
    slot, phase = next_slot(slot, phase, SLOTS)
    return dk, dv, slot, phase


@gluon.jit
def _consume_queries(dk_desc, dv_desc, resident, queries, sizes, GROUP: gl.constexpr):
    """One warpgroup: dk and dv of 64 keys of each tile."""
    k, v = resident.buffers
    slot = 0
    phase = 0
    k_phase = 0
    for tile in range(gl.program_id(0), sizes.num_tiles, gl.num_programs(0)):
        head, first = tile_place(tile, sizes, GROUPS)
        row = first + GROUP * 64
        mbarrier.wait(resident.full.index(GROUP), k_phase)
        k_phase = k_phase ^ 1
        dk = gl.zeros((64, 128), gl.float32, ACC)
        dv = gl.zeros((64, 128), gl.float32, ACC)
        for _ in range(sizes.num_blocks - 1):
            dk, dv, slot, phase = _dkv_block(
                dk, dv, resident, queries, slot, phase, 0, False, GROUP
            )
        if sizes.num_queries > 0:  # always: a straight line costs ptxas more registers
            queries_left = sizes.num_queries - (sizes.num_blocks - 1) * 64
            dk, dv, slot, phase = _dkv_block(
                dk, dv, resident, queries, slot, phase, queries_left, True, GROUP
            )
        k.index(GROUP).store((dk * GRADIENT_SCALE).to(gl.bfloat16))
        v.index(GROUP).store(dv.to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(dk_desc, [row, head * 128], k.index(GROUP))
        tma.async_copy_shared_to_global(dv_desc, [row, head * 128], v.index(GROUP))
        tma.store_wait(0)
        mbarrier.arrive(resident.empty.index(GROUP), count=1)


# fmt: off
@gluon.jit(do_not_specialize=[
    "num_blocks", "tiles_per_head", "num_tiles", "num_queries", "padded", "num_heads",
])
def attention_dkv_kernel(
    q_desc, dout_desc, k_desc, v_desc, dk_desc, dv_desc, statistics_desc,
    num_blocks, tiles_per_head, num_tiles, num_queries, padded, num_heads,
):
    # fmt: on
    """Persistent: program p takes key tiles p, p + grid, ...; heads outermost."""
    q = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 64, 128], q_desc.layout)
    dout = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 64, 128], dout_desc.layout)
    minus_lse = gl.allocate_shared_memory(gl.float32, [SLOTS, 64], statistics_desc.layout)
    delta = gl.allocate_shared_memory(gl.float32, [SLOTS, 64], statistics_desc.layout)
    full, empty = barriers(SLOTS, GROUPS)
    maps = (q_desc, dout_desc, statistics_desc)
    queries = Queries(maps, q, dout, minus_lse, delta, full, empty)
    resident = resident_pair(k_desc, v_desc, GROUPS)
    sizes = Sizes(num_blocks, tiles_per_head, num_tiles, num_queries, padded, num_heads)
    gl.warp_specialize(
        [
            (_consume_queries, (dk_desc, dv_desc, resident, queries, sizes, 0)),
            (_consume_queries, (dk_desc, dv_desc, resident, queries, sizes, 1)),
            (_produce_queries, (resident, queries, sizes)),
        ],
        [4, 1],
        [240, 24],
    )


def dkv_launch(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, by_head: Tensor, dk: Tensor, dv: Tensor, sms: int
) -> Launch:
    """dk, dv over these operands with tiles of 2 x 64 keys; by_head from `by_head_launch`."""
    num_queries, num_heads, _ = q.shape
    tiles_per_head = -(-len(k) // (GROUPS.value * TILE_ROWS))
    num_tiles = tiles_per_head * num_heads
    operands = (
        heads_map("q", q, TILE_ROWS), heads_map("dout", dout, TILE_ROWS),
        heads_map("k", k, TILE_ROWS), heads_map("v", v, TILE_ROWS),
        heads_map("dk", dk, TILE_ROWS), heads_map("dv", dv, TILE_ROWS), statistics_map(by_head),
        -(-num_queries // TILE_ROWS), tiles_per_head, num_tiles,
        num_queries, by_head.shape[2], num_heads,
    )  # fmt: skip
    return Launch(attention_dkv_kernel, operands, OPTIONS, (min(sms, num_tiles),))


@attention.attention_dkv.register("triton")
def attention_dkv(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, contract: Contract
) -> tuple[Tensor, Tensor]:
    """dk, dv like k; k, v `[Tk, N, 128]`, q, dout `[T, N, 128]` all rows, lse, delta `[T, N]`.

    BF16, lse and delta FP32. A shard without rows launches nothing.

    **Order:** one chain over all queries, ascending. **Rounds:** p, dS for the products; dk, dv
    once.
    **Raises:** OperandError, ContractError, BackendError for what the kernel cannot take.
    """
    programs = programs_for(k.device, 8 * k.numel() * len(q)) if len(k) else 0
    launches = _kept_launches(q, k, v, dout, lse, delta, contract, programs)
    dk, dv = k.new_empty(k.shape), k.new_empty(k.shape)
    if launches is not None:
        turn, launch = launches
        by_head = _by_head(q)
        turn.start(lse, delta, by_head)
        launch.start(q, k, v, dout, by_head, dk, dv)
    return dk, dv


def _by_head(q: Tensor) -> Tensor:
    """Room for -L and delta by head, rows padded to 64."""
    padded = -(-len(q) // TILE_ROWS) * TILE_ROWS
    return q.new_empty((2, q.shape[1], padded), dtype=torch.float32)


@kept_by_signature
def _kept_launches(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, contract: Contract,
    programs: int,
) -> tuple[AgainByViews, AgainByViews] | None:  # fmt: skip
    check_attention(contract, {"q": q, "dout": dout}, {"k": k, "v": v})
    check_statistics(q, lse=lse, delta=delta)
    check_rows("q", q)
    if not len(k):
        return None
    by_head, dk, dv = _by_head(q), k.new_empty(k.shape), k.new_empty(k.shape)
    turned = (lse, delta, by_head)
    tensors = (q, k, v, dout, by_head, dk, dv)
    return (
        AgainByViews(by_head_launch(*turned), turned),
        AgainByViews(dkv_launch(*tensors, programs), tensors),
    )
