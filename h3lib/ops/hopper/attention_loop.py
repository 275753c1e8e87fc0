"""The way into shared memory, the same for the three attention kernels.

    tile      GROUPS x 64 rows of one head, one warpgroup each; program p takes tiles p, p + grid,
              ...; heads outermost, so that the other side of a head stays in L2
    resident  what stays for a tile, 64 rows of each operand for each group: q (forward), q and dO
              (dq), k and v (dk, dv)
    ring      blocks of the other side on their way

One warp asks the TMA for all of it, in the order in which the consumers take it. What is handed
over has two barriers, full and empty.
"""

from __future__ import annotations

from typing import NamedTuple

from h3lib.ops.hopper.compat import gl, gluon, mbarrier, tma


class Sizes(NamedTuple):
    """Of one launch; a block is 128 keys or 64 queries of the streamed side."""

    num_blocks: int
    tiles_per_head: int
    num_tiles: int
    num_queries: int
    num_keys: int  # dk, dv: queries padded to 64
    num_heads: int


class Resident(NamedTuple):
    """Rows of a tile: maps and buffers `[GROUPS, 64, 128]` of each operand, barriers a group."""

    maps: object
    buffers: object
    full: object
    empty: object


class Keys(NamedTuple):
    """The ring of key blocks of 128: K and V are full and empty apart."""

    k_map: object
    v_map: object
    k: object
    v: object
    k_full: object
    k_empty: object
    v_full: object
    v_empty: object


@gluon.jit
def barriers(SLOTS: gl.constexpr, READERS: gl.constexpr):
    """(full, empty) of SLOTS places that READERS warpgroups read."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], layout)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], layout)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return full, empty


@gluon.jit
def key_ring(k_map, v_map, SLOTS: gl.constexpr, GROUPS: gl.constexpr):
    k = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 128, 128], k_map.layout)
    v = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 128, 128], v_map.layout)
    k_full, k_empty = barriers(SLOTS, GROUPS)
    v_full, v_empty = barriers(SLOTS, GROUPS)
    return Keys(k_map, v_map, k, v, k_full, k_empty, v_full, v_empty)


@gluon.jit
def resident_pair(a_map, b_map, GROUPS: gl.constexpr):
    """Two operands that stay for a tile."""
    a = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 64, 128], a_map.layout)
    b = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 64, 128], b_map.layout)
    full, empty = barriers(GROUPS, 1)
    return Resident((a_map, b_map), (a, b), full, empty)


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """The ring's next slot; its parity turns at each wrap."""
    wrapped = (slot + 1 == SLOTS).to(gl.int32)
    return (slot + 1) * (1 - wrapped), phase ^ wrapped


@gluon.jit
def tile_place(tile, sizes, GROUPS: gl.constexpr):
    """(head, first row) of a tile."""
    head = tile // sizes.tiles_per_head
    return head, (tile - head * sizes.tiles_per_head) * (GROUPS * 64)


@gluon.jit
def fetch_rows(resident, phase, row, column, GROUPS: gl.constexpr):
    """Every group's rows of a tile, as soon as the group has let go of those before."""
    for group in gl.static_range(GROUPS):
        full = resident.full.index(group)
        mbarrier.wait(resident.empty.index(group), phase)
        mbarrier.expect(full, len(resident.maps) * 64 * 128 * 2)
        for i in gl.static_range(len(resident.maps)):
            tma.async_copy_global_to_shared(
                resident.maps[i], [row + group * 64, column], full, resident.buffers[i].index(group)
            )


@gluon.jit
def produce_keys(resident, keys, sizes, GROUPS: gl.constexpr, SLOTS: gl.constexpr):
    """One warp: for each tile the resident rows of every group, then K and V of block 0, 1, ..."""
    slot = 0
    phase = 1
    tile_phase = 1
    for tile in range(gl.program_id(0), sizes.num_tiles, gl.num_programs(0)):
        head, first = tile_place(tile, sizes, GROUPS)
        column = head * 128
        fetch_rows(resident, tile_phase, first, column, GROUPS)
        tile_phase = tile_phase ^ 1
        for block in range(sizes.num_blocks):
            row = block * 128
            mbarrier.wait(keys.k_empty.index(slot), phase)
            mbarrier.expect(keys.k_full.index(slot), 128 * 128 * 2)
            tma.async_copy_global_to_shared(
                keys.k_map, [row, column], keys.k_full.index(slot), keys.k.index(slot)
            )
            mbarrier.wait(keys.v_empty.index(slot), phase)
            mbarrier.expect(keys.v_full.index(slot), 128 * 128 * 2)
            tma.async_copy_global_to_shared(
                keys.v_map, [row, column], keys.v_full.index(slot), keys.v.index(slot)
            )
            slot, phase = next_slot(slot, phase, SLOTS)
