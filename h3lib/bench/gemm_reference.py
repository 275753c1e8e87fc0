"""An independent reference for the products: leaves by plain Triton, the tree by torch adds.

    leaf = chain over one unit, `tl.dot` on 128 x 128 x 64 blocks loaded through masks
    root = ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), each add one torch call on FP32 tensors

It shares no line with the Gluon kernel, its descriptors, or `ops/tree.py`; it is slow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h3lib.contract import RowUnits

Parts = list[tuple[Tensor, Tensor]]


@triton.jit(do_not_specialize=["M", "N", "k0", "k1"])
def reference_chain_kernel(
    a, b, c, M, N, am, ak, bk, bn, k0, k1, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """c += a[:, k0:k1] @ b[k0:k1], going on with the chain in c."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    at = c + m[:, None].to(tl.int64) * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    acc = tl.load(at, mask=inside, other=0.0)
    for k in range(k0, k1, BK):
        kk = (k + tl.arange(0, BK)).to(tl.int64)
        left = a + m[:, None].to(tl.int64) * am + kk[None, :] * ak
        right = b + n[None, :].to(tl.int64) * bn + kk[:, None] * bk
        x = tl.load(left, mask=(m < M)[:, None] & (kk < k1)[None, :], other=0.0)
        y = tl.load(right, mask=(n < N)[None, :] & (kk < k1)[:, None], other=0.0)
        acc = tl.dot(x, y, acc)
    tl.store(at, acc, mask=inside)


@triton.jit(do_not_specialize=["M", "N", "K"])
def reference_fma_kernel(a, b, c, M, N, K, am, ak, bk, bn, BLOCK: tl.constexpr):
    """FP32: one element a lane, one fused multiply-add a step."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m, n = i // N, i % N
    acc = tl.zeros((BLOCK,), tl.float32)
    for k in range(K):
        x = tl.load(a + m * am + k * ak, mask=i < M * N, other=0.0)
        y = tl.load(b + n * bn + k * bk, mask=i < M * N, other=0.0)
        acc = tl.fma(x, y, acc)
    tl.store(c + i, acc, mask=i < M * N)


def reference_chain(parts: Parts, spans: list[range]) -> Tensor:
    """One chain over a span of each part in turn, FP32 `[M, N]`."""
    c = parts[0][0].new_zeros((parts[0][0].shape[0], parts[0][1].shape[1]), dtype=torch.float32)
    grid = (triton.cdiv(c.shape[0], 128), triton.cdiv(c.shape[1], 128))
    for (a, b), span in zip(parts, spans, strict=True):
        if len(span):
            reference_chain_kernel[grid](
                a, b, c, *c.shape, *a.stride(), *b.stride(), span.start, span.stop,
                BM=128, BN=128, BK=64, num_warps=8, num_stages=3,
            )  # fmt: skip
    return c


def reference_fma(a: Tensor, b: Tensor) -> Tensor:
    """FP32 a @ b, one chain of fused multiply-adds for each element."""
    c = a.new_empty((a.shape[0], b.shape[1]))
    grid = (triton.cdiv(c.numel(), 128),)
    reference_fma_kernel[grid](a, b, c, *c.shape, a.shape[1], *a.stride(), *b.stride(), BLOCK=128)
    return c


def eight(p: list[Tensor]) -> Tensor:
    """The tree over eight leaves, written out."""
    return ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]))


def reference_unit_tree(parts: Parts) -> Tensor:
    """FP32 root `[T, N]` of sum_parts a @ b in eight units."""
    leaves = []
    for unit in range(8):
        widths = [a.shape[1] // 8 for a, _ in parts]
        leaves.append(reference_chain(parts, [range(unit * w, (unit + 1) * w) for w in widths]))
    return eight(leaves)


def reference_row_fold(dy: Tensor, x: Tensor, rows: RowUnits) -> Tensor:
    """FP32 root `[N, K]` of dy^T @ x folded over the eight sequence units."""
    spans = [rows.sequence_unit_rows(range(unit, unit + 1)) for unit in range(8)]
    return eight([reference_chain([(dy.T, x)], [span]) for span in spans])
