"""Attention forward on Hopper: online softmax over key blocks of 128, ascending from row 0.

For a query row, S the chain of q.k, c = fl32(log2(e) / sqrt(128)), from m = -inf, l = 0, O = +0:
    m' = max(m, (max S) c);  a = ex2(m - m');  p = ex2(fma(S, c, -m'))
    l = fma(l, a, sum p);  O = O a, then the chain of bf16(p).v goes on in that accumulator
    out = bf16(O / l), the division to nearest;  L = m + lg2(l), base 2
Absent keys have S = -inf. m is rounded, so a is 1 where m stays: with m unscaled in its place a is
2^(rounding of m c), and 295 blocks took L off by 7e-5 (T = 37,776, H200, 2026-11-30). S c is not
rounded, so p of the largest key is within ulp(m) of 1; from |m| = 2^30 on it may overflow.
The sum of p: each of a row's four lanes q adds its 32 columns 8i + 2q, 8i + 2q + 1 in ascending
order, then lanes q and q^2, then q and q^1. A row's bits depend on its q and on k, v alone: not on
the number of groups, the grid, or the other rows of its tile.

Three warpgroups (or two) of 64 query rows each, and one warp that feeds them through TMA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3lib.contract import Contract
from h3lib.ops import attention
from h3lib.ops.hopper.attention_loop import (
    Resident,
    Sizes,
    barriers,
    key_ring,
    next_slot,
    produce_keys,
    tile_place,
)
from h3lib.ops.hopper.attention_tiles import (
    A_OPERAND,
    ACC,
    COLUMN,
    KEY_BLOCK,
    ROW,
    SCORE_SCALE,
    TILE_ROWS,
    check_attention,
    check_rows,
    divide,
    ex2,
    heads_map,
    lg2,
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

SLOTS = gl.constexpr(2)  # K and V in flight: 2 x (32 + 32) KB beside Q and out, 230 KB in all

# Groups of 64 query rows -> time of a tile (three groups = 3.0; two measured 2.32 to 2.52 at 512 to
# 14,910 queries, H200, 2026-11-30) and registers: the launch's cap, then those of a consumer and of
# the producer after the warps have traded them.
GROUPS = {
    3: (3.0, 128, 160, 32),
    2: (2.4, 168, 240, 24),
}


def groups_for(num_rows: int, num_heads: int, multiprocessors: int) -> int:
    """The tile height whose waves over the GPU take least time; no bit depends on it."""

    def time(groups: int) -> float:
        tiles = -(-num_rows // (groups * TILE_ROWS)) * num_heads
        return -(-tiles // multiprocessors) * GROUPS[groups][0]

    return min(GROUPS, key=time)


@gluon.jit
def _block(
    state, resident, keys, slot, phase, keys_left, LAST: gl.constexpr, GROUP: gl.constexpr
):
    """One key block of the online softmax; the last one masks absent keys and gives Q back."""
    o, m, l = state  # noqa: E741
    q = resident.buffers[0]
    mbarrier.wait(keys.k_full.index(slot), phase)
    zeros = gl.zeros((64, 128), gl.float32, ACC)
    k_block = keys.k.index(slot).permute((1, 0))
    s = warpgroup_mma(q.index(GROUP), k_block, zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(keys.k_empty.index(slot), count=1)
    if LAST:
        mbarrier.arrive(resident.empty.index(GROUP), count=1)
        present = gl.arange(0, 128, COLUMN) < keys_left
        s = gl.where(present[None, :], s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, axis=1) * SCORE_SCALE)
    a = ex2(m - m_new)
    o = o * a[:, None]
    scale = gl.full((64, 128), SCORE_SCALE, gl.float32, ACC)
    p = ex2(gl.fma(s, scale, zeros - m_new[:, None]))
    l = gl.fma(l, a, gl.sum(p, axis=1))  # noqa: E741
    p_bf16 = gl.convert_layout(p.to(gl.bfloat16), A_OPERAND)
    mbarrier.wait(keys.v_full.index(slot), phase)
    o = warpgroup_mma(p_bf16, keys.v.index(slot), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=(o,))
    mbarrier.arrive(keys.v_empty.index(slot), count=1)
    slot, phase = next_slot(slot, phase, SLOTS)
    return (o, m_new, l), slot, phase


@gluon.jit
def _consume(
    out_desc, lse, staging, resident, keys, sizes, GROUP: gl.constexpr, GROUPS: gl.constexpr
):
    """One warpgroup: 64 query rows of each tile."""
    slot = 0
    phase = 0
    q_phase = 0
    for tile in range(gl.program_id(0), sizes.num_tiles, gl.num_programs(0)):
        head, first = tile_place(tile, sizes, GROUPS)
        row = first + GROUP * 64
        mbarrier.wait(resident.full.index(GROUP), q_phase)
        q_phase = q_phase ^ 1
        m = gl.full((64,), float("-inf"), gl.float32, ROW)
        l = gl.zeros((64,), gl.float32, ROW)  # noqa: E741
        state = (gl.zeros((64, 128), gl.float32, ACC), m, l)
        for _ in range(sizes.num_blocks - 1):
            state, slot, phase = _block(state, resident, keys, slot, phase, 0, False, GROUP)
        if sizes.num_keys > 0:  # always: in a straight line ptxas serialises wgmma
            keys_left = sizes.num_keys - (sizes.num_blocks - 1) * 128
            state, slot, phase = _block(
                state, resident, keys, slot, phase, keys_left, True, GROUP
            )
        o, m, l = state  # noqa: E741
        o = divide(o, l)
        tma.store_wait(0)  # the staging buffer may still be leaving for the tile before
        staging.index(GROUP).store(o.to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [row, head * 128], staging.index(GROUP))
        rows = row + gl.arange(0, 64, ROW)
        at = rows.to(gl.int64) * sizes.num_heads + head
        gl.store(lse + at, m + lg2(l), mask=rows < sizes.num_queries)
    tma.store_wait(0)


# fmt: off
@gluon.jit(do_not_specialize=[
    "num_blocks", "tiles_per_head", "num_tiles", "num_queries", "num_keys", "num_heads",
])
def attention_forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse,
    num_blocks, tiles_per_head, num_tiles, num_queries, num_keys, num_heads,
    GROUPS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):
    # fmt: on
    """Persistent: program p takes tiles p, p + grid, ...; heads outermost, for K and V in L2."""
    q = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 64, 128], q_desc.layout)
    staging = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 64, 128], out_desc.layout)
    full, empty = barriers(GROUPS, 1)
    resident = Resident((q_desc,), (q,), full, empty)
    keys = key_ring(k_desc, v_desc, SLOTS, GROUPS)
    sizes = Sizes(num_blocks, tiles_per_head, num_tiles, num_queries, num_keys, num_heads)
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (_consume, (out_desc, lse, staging, resident, keys, sizes, 0, GROUPS)),
                (_consume, (out_desc, lse, staging, resident, keys, sizes, 1, GROUPS)),
                (_consume, (out_desc, lse, staging, resident, keys, sizes, 2, GROUPS)),
                (produce_keys, (resident, keys, sizes, GROUPS, SLOTS)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (out_desc, lse, staging, resident, keys, sizes, 0, GROUPS)),
                (_consume, (out_desc, lse, staging, resident, keys, sizes, 1, GROUPS)),
                (produce_keys, (resident, keys, sizes, GROUPS, SLOTS)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


def forward_launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, programs: int, groups: int
) -> Launch:
    """The forward over these operands with tiles of `groups` x 64 query rows."""
    num_queries, num_heads, _ = q.shape
    num_blocks = -(-len(k) // KEY_BLOCK)
    tiles_per_head = -(-num_queries // (groups * TILE_ROWS))
    num_tiles = tiles_per_head * num_heads
    _, cap, consumer, producer = GROUPS[groups]
    operands = (
        heads_map("q", q, TILE_ROWS), heads_map("k", k, KEY_BLOCK), heads_map("v", v, KEY_BLOCK),
        heads_map("out", out, TILE_ROWS), lse,
        num_blocks, tiles_per_head, num_tiles, num_queries, len(k), num_heads,
        groups, consumer, producer,
    )  # fmt: skip
    options = {"num_warps": 4, "maxnreg": cap, "enable_fp_fusion": False}
    return Launch(attention_forward_kernel, operands, options, (min(programs, num_tiles),))


@attention.attention_forward.register("triton")
def attention_forward(q: Tensor, k: Tensor, v: Tensor, contract: Contract) -> tuple[Tensor, Tensor]:
    """out = softmax(q k^T / sqrt(128)) v and L; q `[Tq, N, 128]`, k, v `[T, N, 128]` all rows.

    BF16; out is contiguous, L `[Tq, N]` FP32. A shard without rows launches nothing.

    **Order:** see the top of the file. **Rounds:** p for the product with v; out once; L not.
    **Raises:** OperandError, ContractError, BackendError for what the kernel cannot take.
    """
    programs = programs_for(q.device, 4 * q.numel() * len(k)) if len(q) else 0
    launch = _kept_launch(q, k, v, contract, programs)
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
    if launch is not None:
        launch.start(q, k, v, out, lse)
    return out, lse


@kept_by_signature
def _kept_launch(
    q: Tensor, k: Tensor, v: Tensor, contract: Contract, programs: int
) -> AgainByViews | None:
    check_attention(contract, {"q": q}, {"k": k, "v": v})
    check_rows("k", k)
    if not len(q):
        return None
    groups = groups_for(len(q), q.shape[1], programs)
    tensors = (q, k, v, q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32))
    return AgainByViews(forward_launch(*tensors, programs, groups), tensors)
