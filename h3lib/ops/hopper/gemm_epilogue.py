"""The way out of a product on sm_90: bias, one rounding, shared memory, TMA.

The first half of eight units waits here too: three tiles are all that registers hold. With SWAP a
tile leaves transposed, and its tail by a box of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from h3lib.ops.hopper.compat import fence_async_shared, gl, gluon, tma


class Sink(NamedTuple):
    """Where results go: descriptors, and shared memory on the way; `pending` waits for eight units.

    `staging` and `pending` lie in the same memory where there are both.
    """

    out: object
    out_tail: object
    bias: object
    staging: object
    staging_tail: object
    pending: object
    pending_tail: object


@gluon.jit
def add(x, y):
    return gl.inline_asm_elementwise(
        "add.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def hold(value, sink, W: gl.constexpr, S: gl.constexpr):
    """Put the first half of eight units aside."""
    tma.store_wait(0)  # the last tile's output lies in the same memory
    sink.pending.index(W).store(value[0])
    if S.TAIL:
        sink.pending_tail.index(W).store(value[1])


@gluon.jit
def held(sink, W: gl.constexpr, S: gl.constexpr):
    if S.TAIL:
        return sink.pending.index(W).load(S.L), sink.pending_tail.index(W).load(S.LT)
    else:
        return (sink.pending.index(W).load(S.L),)


@gluon.jit
def _rounded(value, sink, column, num_columns, COLUMNS: gl.constexpr, AXIS: gl.constexpr,
             LAYOUT: gl.constexpr, BIAS: gl.constexpr):  # fmt: skip
    """Add the bias, whose columns lie along AXIS, and round once."""
    if BIAS:
        at = column + gl.arange(0, COLUMNS, gl.SliceLayout(1 - AXIS, LAYOUT))
        added = gl.load(sink.bias + at, mask=at < num_columns, other=0.0).to(gl.float32)
        value = add(value, added.expand_dims(1 - AXIS))
    return value.to(sink.out.dtype)


@gluon.jit
def store(value, sink, root, m, n, num_rows, num_columns, W: gl.constexpr, STAGING: gl.constexpr,
           BIAS: gl.constexpr, S: gl.constexpr):  # fmt: skip
    """Round into shared memory and leave the rest to the TMA."""
    box = sink.staging.index(W * STAGING)
    if S.SWAP:
        tile = _rounded(value[0], sink, m, num_columns, S.BM, 0, S.L, BIAS)
        box.reshape([S.BN, S.BM]).permute((1, 0)).store(tile)
        if S.TAIL:
            box_tail = sink.staging_tail.index(W * STAGING)
            tail = _rounded(value[1], sink, m, num_columns, S.BM, 0, S.LT, BIAS)
            box_tail.reshape([S.TAIL, S.BM]).permute((1, 0)).store(tail)
        fence_async_shared()
        tma.async_copy_shared_to_global(sink.out, [root, n, m], box)
        if S.TAIL:
            if n + S.BN < num_rows:
                tma.async_copy_shared_to_global(sink.out_tail, [root, n + S.BN, m], box_tail)
    else:
        tile = _rounded(value[0], sink, n, num_columns, S.BN, 1, S.L, BIAS)
        box.reshape([S.BM, S.BN]).store(tile)
        fence_async_shared()
        tma.async_copy_shared_to_global(sink.out, [root, m, n], box)
