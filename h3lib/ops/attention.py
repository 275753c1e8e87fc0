"""Attention without a mask: online softmax over key blocks, ascending from row 0.

Forward, per key block, z = S c with S the chain of q.k and c = log2(e) / sqrt(H):
    m' = max(m, max z);  a = exp2(m - m');  p = exp2(z - m');  l = l a + tree(p)
    O = O a, then the chain of bf16(p).v goes on in that accumulator
    out = bf16(O / l),  L = m + log2(l)

Backward, delta = tree(dO O):  p = exp2(S c - L),  dS = p (dO.v - delta)
    dq = chain over all keys of bf16(dS).k
    dk, dv = chains over all queries of bf16(dS).q and of bf16(p).dO

No partial sum crosses a rank: K, V are gathered for the forward and dq; q, dO, L, delta for dk, dv.
Absent keys and queries have p = dS = 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from h3lib.contract import Contract, OperandError
from h3lib.ops.backend import accumulator, check_operands, check_shape, check_shapes, op
from h3lib.ops.gemm import chain
from h3lib.ops.tree import in_row_tree


def exp2(z: Tensor) -> Tensor:
    """2^z from `exp` in FP64, rounded: the library's exp2 depends on the position in the buffer."""
    return torch.exp(z.double() * math.log(2)).to(z.dtype)


def log2(x: Tensor) -> Tensor:
    """log2(x) from `log` in FP64, rounded."""
    return (torch.log(x.double()) / math.log(2)).to(x.dtype)


def _constant(value: float, dtype: torch.dtype) -> float:
    """The constant as the accumulator holds it."""
    return torch.tensor(value, dtype=torch.float64).to(dtype).item()


def _score_scale(head_dim: int, dtype: torch.dtype) -> float:
    return _constant(math.log2(math.e) / math.sqrt(head_dim), dtype)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_operands(q=q, k=k, v=v)
    check_shape("q", q, None, None, None)
    check_shape("k", k, None, *q.shape[1:])
    check_shape("v", v, *k.shape)


def _check_queries(q: Tensor, dout: Tensor, lse: Tensor, delta: Tensor) -> None:
    """What goes with a query row: dout like q; lse, delta `[T, N]` in the accumulator's dtype."""
    check_operands(q=q, dout=dout)
    check_shapes(q=q, dout=dout)
    for name, tensor in {"lse": lse, "delta": delta}.items():
        check_shape(name, tensor, *q.shape[:2])
        if tensor.dtype != accumulator(q):
            raise OperandError(f"dtype of {name}", tensor.dtype, accumulator(q))


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


@op
def attention_forward(q: Tensor, k: Tensor, v: Tensor, contract: Contract) -> tuple[Tensor, Tensor]:
    """out = softmax(q k^T / sqrt(H)) v and L, the log2-sum-exp2 of the scaled scores.

    q `[Tq, N, H]` (local: the shard's rows, the rank's heads), k, v `[T, N, H]` all rows in logical
    order; out like q, L `[Tq, N]` FP32.

    **Order:** see the top of the file. **Rounds:** p for the product with v; out once; L not.
    """
    _check(q, k, v)
    dtype = accumulator(q)
    c = _score_scale(q.shape[-1], dtype)
    q_h, k_h, v_h = _heads_first(q), _heads_first(k), _heads_first(v)
    shape = (q.shape[1], q.shape[0], 1)
    m = torch.full(shape, -math.inf, dtype=dtype, device=q.device)
    l = torch.zeros(shape, dtype=dtype, device=q.device)  # noqa: E741
    out = torch.zeros((*shape[:2], q.shape[2]), dtype=dtype, device=q.device)
    for start in range(0, len(k), contract.key_block):
        block = slice(start, min(start + contract.key_block, len(k)))
        z = chain(q_h, k_h[:, block].transpose(1, 2)) * c
        m_new = torch.maximum(m, z.amax(-1, keepdim=True))
        a, p = exp2(m - m_new), exp2(z - m_new)
        absent = contract.key_block - p.shape[-1]
        l = l * a + in_row_tree(torch.nn.functional.pad(p, (0, absent)))  # noqa: E741
        out = chain(p.to(v.dtype), v_h[:, block], into=out * a)
        m = m_new
    lse = m + log2(l)
    return _heads_first((out / l).to(q.dtype)).contiguous(), _heads_first(lse[..., 0]).contiguous()


@op
def attention_delta(dout: Tensor, out: Tensor) -> Tensor:
    """delta = sum over H of dO O on the rounded output, `[T, N]` FP32.

    **Order:** the in-row tree over H. **Rounds:** nothing but the products.
    """
    check_operands(dout=dout, out=out)
    check_shapes(dout=dout, out=out)
    dtype = accumulator(out)
    return in_row_tree(dout.to(dtype) * out.to(dtype))[..., 0]


def _p_and_ds(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor):
    """p and dS for a block of queries and keys, heads first."""
    p = exp2(chain(q, k.transpose(1, 2)) * _score_scale(q.shape[-1], lse.dtype) - lse[..., None])
    return p, p * (chain(dout, v.transpose(1, 2)) - delta[..., None])


@op
def attention_dq(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, contract: Contract
) -> Tensor:
    """dq = bf16(fl32(1 / sqrt(H)) sum_keys bf16(dS) k); q, dout `[Tq, N, H]`, k, v `[T, N, H]`.

    **Order:** one chain over all keys, ascending. **Rounds:** dS for the product; dq once.
    """
    _check(q, k, v)
    _check_queries(q, dout, lse, delta)
    q_h, k_h, v_h, do_h = map(_heads_first, (q, k, v, dout))
    lse_h, delta_h = _heads_first(lse), _heads_first(delta)
    dq = torch.zeros(q_h.shape, dtype=lse.dtype, device=q.device)
    for start in range(0, len(k), contract.key_block):
        block = slice(start, start + contract.key_block)
        _, ds = _p_and_ds(q_h, k_h[:, block], v_h[:, block], do_h, lse_h, delta_h)
        chain(ds.to(q.dtype), k_h[:, block], into=dq)
    return _heads_first(
        (dq * _constant(1 / math.sqrt(q.shape[-1]), lse.dtype)).to(q.dtype)
    ).contiguous()


@op
def attention_dkv(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, contract: Contract
) -> tuple[Tensor, Tensor]:
    """dk = bf16(fl32(1 / sqrt(H)) sum_queries bf16(dS) q), dv = bf16(sum_queries bf16(p) dO).

    k, v `[Tk, N, H]` (local: the shard's rows), q, dout `[T, N, H]`, lse, delta `[T, N]` all rows
    in logical order.

    **Order:** one chain over all queries, ascending. **Rounds:** p and dS for the products; dk and
    dv once.
    """
    _check(q, k, v)
    _check_queries(q, dout, lse, delta)
    q_h, k_h, v_h, do_h = map(_heads_first, (q, k, v, dout))
    lse_h, delta_h = _heads_first(lse), _heads_first(delta)
    dk = torch.zeros(k_h.shape, dtype=lse.dtype, device=k.device)
    dv = torch.zeros_like(dk)
    for start in range(0, len(q), contract.key_block):
        b = slice(start, start + contract.key_block)
        p, ds = _p_and_ds(q_h[:, b], k_h, v_h, do_h[:, b], lse_h[:, b], delta_h[:, b])
        chain(p.to(q.dtype).transpose(1, 2), do_h[:, b], into=dv)
        chain(ds.to(q.dtype).transpose(1, 2), q_h[:, b], into=dk)
    dk = dk * _constant(1 / math.sqrt(q.shape[-1]), lse.dtype)
    return _heads_first(dk.to(k.dtype)).contiguous(), _heads_first(dv.to(k.dtype)).contiguous()
