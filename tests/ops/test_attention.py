"""Attention against NumPy in the contract's order; slices of queries, keys and heads; FP64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import (
    assert_row_invariant,
    assert_same_bytes,
    f32,
    halves_of,
    normal,
    quiet,
    round_bf16,
    special,
    tensor,
)

from h3lib.contract import Contract, OperandError
from h3lib.ops.attention import (
    attention_delta,
    attention_dkv,
    attention_dq,
    attention_forward,
    exp2,
    log2,
)

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
SMALL, PUBLISHED = Contract(row_block=4, key_block=16), Contract()
LENGTHS = [1, 7, 63, 64, 65, 127, 128, 129, 264]
HEADS, WIDTH = 2, 10  # neither a width of 4^n, where 1/sqrt is a power of two, nor a power of two

exp2_of = np.vectorize(lambda z: np.float32(math.exp(z * math.log(2))), otypes=[np.float32])
log2_of = np.vectorize(lambda x: np.float32(math.log(x) / math.log(2)), otypes=[np.float32])


def inputs(seed: int, queries: int, keys: int, heads=HEADS, width=WIDTH, dtype=BF16):
    rows = (queries, keys, keys, queries)
    return [normal(seed + i, n, heads, width, dtype=dtype) for i, n in enumerate(rows)]


def chain_last(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[N, M, K], [N, L, K] to [N, M, L]: chain over K ascending from +0."""
    total = np.zeros((a.shape[0], a.shape[1], b.shape[1]), np.float32)
    for i in range(a.shape[2]):
        total = total + a[:, :, None, i] * b[:, None, :, i]
    return total


def constants(width: int) -> tuple[np.float32, np.float32]:
    return np.float32(math.log2(math.e) / math.sqrt(width)), np.float32(1 / math.sqrt(width))


def heads_first(x: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(f32(x).swapaxes(0, 1))


@quiet
def forward_of(q, k, v, key_block: int) -> tuple[np.ndarray, np.ndarray]:
    """Online softmax, key blocks ascending, absent keys as z = -inf; out before its rounding."""
    q, k, v = map(heads_first, (q, k, v))
    c, _ = constants(q.shape[2])
    m = np.full((*q.shape[:2], 1), -np.inf, np.float32)
    total, out = np.zeros_like(m), np.zeros_like(q)
    for start in range(0, k.shape[1], key_block):
        keys, values = k[:, start : start + key_block], v[:, start : start + key_block]
        z = np.full((*q.shape[:2], key_block), -np.inf, np.float32)
        z[..., : keys.shape[1]] = chain_last(q, keys) * c
        new = np.maximum(m, z.max(-1, keepdims=True))
        a, p = exp2_of(m - new), exp2_of(z - new)
        total = total * a + halves_of(p)[..., None]
        out = out * a
        for i in range(keys.shape[1]):
            out = out + round_bf16(p[..., i, None]) * values[:, None, i]
        m = new
    return (out / total).swapaxes(0, 1), (m + log2_of(total))[..., 0].swapaxes(0, 1)


@quiet
def backward_of(q, k, v, dout, lse, delta):
    """dq, dk, dv before their rounding: one chain over all keys, one over all queries."""
    q, k, v, dout = map(heads_first, (q, k, v, dout))
    c, scale = constants(q.shape[2])
    lse, delta = (f32(x).swapaxes(0, 1)[..., None] for x in (lse, delta))
    p = exp2_of(chain_last(q, k) * c - lse)
    ds = round_bf16(p * (chain_last(dout, v) - delta))
    p = round_bf16(p)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for j in range(k.shape[1]):
        dq = dq + ds[:, :, j, None] * k[:, None, j]
    for i in range(q.shape[1]):
        dk = dk + ds[:, i, :, None] * q[:, i, None]
        dv = dv + p[:, i, :, None] * dout[:, i, None]
    return tuple(x.swapaxes(0, 1) for x in (dq * scale, dk * scale, dv))


def forward_backward(q, k, v, dout, contract):
    out, lse = attention_forward(q, k, v, contract)
    delta = attention_delta(dout, out)
    dq = attention_dq(q, k, v, dout, lse, delta, contract)
    return out, lse, delta, dq, *attention_dkv(q, k, v, dout, lse, delta, contract)


@pytest.mark.parametrize("contract", [SMALL, PUBLISHED], ids=lambda c: c.id)
@pytest.mark.parametrize("length", LENGTHS)
def test_forward_and_backward_are_the_published_order(length, contract):
    q, k, v, dout = inputs(length, length, length)
    out, lse, delta, dq, dk, dv = forward_backward(q, k, v, dout, contract)
    out_of, lse_of = forward_of(q, k, v, contract.key_block)
    assert lse.dtype == delta.dtype == F32
    assert_same_bytes(out, tensor(round_bf16(out_of), BF16), "out")
    assert_same_bytes(lse, tensor(lse_of), "lse")
    assert_same_bytes(delta, torch.from_numpy(halves_of(f32(dout) * f32(out))), "delta")
    expected = backward_of(q, k, v, dout, lse, delta)
    for name, found, want in zip(("dq", "dk", "dv"), (dq, dk, dv), expected, strict=True):
        assert_same_bytes(found, tensor(round_bf16(want), BF16), name)


def test_fp32_operands_round_products_and_keep_p():
    q, k, v, _ = inputs(5, 9, 40, dtype=F32)
    out, lse = attention_forward(q, k, v, SMALL)
    assert out.dtype == F32
    scores = chain_last(heads_first(q), heads_first(k)) * constants(WIDTH)[0]
    p = np.exp2(scores.astype(np.float64) - heads_first(lse[..., None]))
    want = np.einsum("nqk,nkh->qnh", p, heads_first(v).astype(np.float64))
    # 40 roundings of values below 4 at 2^-24 each; rounding p to BF16 would err by 2^-9
    assert np.abs(f32(out) - want).max() < 40 * 4 * 2.0**-24


@pytest.mark.parametrize("offset", [-3.0, 2.0, 30.0])
def test_large_score_offsets_rescale_and_stay_in_order(offset):
    """Keys that grow along the rows move the maximum in every block; the offset is far from 0."""
    q, k, v, dout = inputs(1, 20, 70)
    ramp = torch.linspace(0, offset, 70)[:, None, None]
    k = (k.float() + ramp * torch.sign(q.float().mean(0))).to(BF16)
    out, lse = attention_forward(q, k, v, SMALL)
    out_of, lse_of = forward_of(q, k, v, 16)
    assert_same_bytes(out, tensor(round_bf16(out_of), BF16))
    assert_same_bytes(lse, tensor(lse_of))
    assert out.isfinite().all()


def test_scores_in_the_hundreds_leave_the_largest_key():
    q = torch.full((1, 1, 4), 30.0, dtype=BF16)
    k = torch.zeros(40, 1, 4, dtype=BF16)
    k[33] = 30.0  # z = 1800 log2(e)
    v = normal(0, 40, 1, 4)
    out, lse = attention_forward(q, k, v, SMALL)
    assert_same_bytes(out[0], v[33])
    assert lse.item() == pytest.approx(1800 * math.log2(math.e), rel=1e-6)


def test_absent_keys_count_as_minus_infinity_and_not_as_zero_scores():
    """All scores are -100 c: a zero-filled absent key would have p = 1 and take everything."""
    q, k = torch.full((1, 1, 4), 5.0, dtype=BF16), torch.full((17, 1, 4), -5.0, dtype=BF16)
    v, dout = normal(0, 17, 1, 4), normal(1, 1, 1, 4)
    for contract in (SMALL, PUBLISHED):
        out, lse, delta, dq, dk, dv = forward_backward(q, k, v, dout, contract)
        mean = v.double().mean(0)
        assert (out[0].double() - mean).abs().max() < 2.0**-8 * v.abs().max()
        assert lse.item() == pytest.approx(-50 * math.log2(math.e) + math.log2(17), rel=1e-6)
        assert dv.isfinite().all() and (dv[:, 0] - dout[0].float() / 17).abs().max() < 2.0**-8


@pytest.mark.parametrize("length", [1, 17, 65, 129])
def test_one_key_more_changes_the_sum_only_by_that_key(length):
    """Blocks before the last are the same: the accumulator goes on, it does not start again."""
    q, k, v, _ = inputs(3, 5, length + 1)
    for keys in (length, length + 1):
        out, lse = attention_forward(q, k[:keys], v[:keys], SMALL)
        out_of, lse_of = forward_of(q, k[:keys], v[:keys], 16)
        assert_same_bytes(out, tensor(round_bf16(out_of), BF16))
        assert_same_bytes(lse, tensor(lse_of))


@given(st.integers(0, 10**6), st.integers(1, 150), st.sampled_from([SMALL, PUBLISHED]))
def test_query_slices_and_key_slices_equal_the_whole(seed, length, contract):
    q, k, v, dout = inputs(seed, length, length)
    out, lse, delta, dq, dk, dv = forward_backward(q, k, v, dout, contract)
    first = seed % length
    own = slice(first, first + 1 + seed % 40)
    part = attention_forward(q[own], k, v, contract)
    assert_same_bytes(part[0], out[own])
    assert_same_bytes(part[1], lse[own])
    assert_same_bytes(attention_delta(dout[own], out[own]), delta[own])
    found = attention_dq(q[own], k, v, dout[own], lse[own], delta[own], contract)
    assert_same_bytes(found, dq[own])
    found = attention_dkv(q, k[own], v[own], dout, lse, delta, contract)
    assert_same_bytes(found[0], dk[own])
    assert_same_bytes(found[1], dv[own])


@given(st.integers(0, 10**6), st.integers(1, 40))
def test_query_rows_and_key_rows_are_independent_of_their_neighbours(seed, length):
    _, k, v, _ = inputs(seed, 1, 33)
    q, dout = special(seed, length, HEADS, WIDTH), special(seed + 1, length, HEADS, WIDTH)
    lse, delta = (special(seed + i, length, HEADS, dtype=F32) for i in (2, 3))
    assert_row_invariant(lambda q: attention_forward(q, k, v, SMALL), [q], seed)
    assert_row_invariant(
        lambda *rows: attention_dq(rows[0], k, v, *rows[1:], SMALL), [q, dout, lse, delta], seed
    )
    assert_row_invariant(attention_delta, [dout, q], seed)
    queries = normal(seed, 33, HEADS, WIDTH), *(normal(seed + 9, 33, HEADS, dtype=F32),) * 2
    assert_row_invariant(
        lambda k, v: attention_dkv(queries[0], k, v, queries[0], *queries[1:], SMALL),
        [q, dout],
        seed,
    )


def test_head_slices_equal_the_whole():
    q, k, v, dout = inputs(2, 70, 70, heads=6)
    whole = forward_backward(q, k, v, dout, SMALL)
    for a, b in ((0, 1), (1, 4), (4, 6)):
        own = (x[:, a:b].contiguous() for x in (q, k, v, dout))
        for found, expected in zip(forward_backward(*own, SMALL), whole, strict=True):
            assert_same_bytes(found, expected[:, a:b])


@pytest.mark.parametrize("length", [40, 129])
def test_the_key_block_is_part_of_the_forward_and_not_of_the_backward_chains(length):
    q, k, v, dout = inputs(4, length, length)
    out, lse = attention_forward(q, k, v, SMALL)
    delta = attention_delta(dout, out)
    assert not torch.equal(lse, attention_forward(q, k, v, PUBLISHED)[1])
    arguments = q, k, v, dout, lse, delta
    assert_same_bytes(attention_dq(*arguments, SMALL), attention_dq(*arguments, PUBLISHED))
    for a, b in zip(
        attention_dkv(*arguments, SMALL), attention_dkv(*arguments, PUBLISHED), strict=True
    ):
        assert_same_bytes(a, b)


def test_keys_stored_in_another_order_are_another_sum():
    q, k, v, _ = inputs(6, 30, 100, dtype=F32)
    _, lse = attention_forward(q, k, v, SMALL)
    assert not torch.equal(lse, attention_forward(q, k.flip(0), v.flip(0), SMALL)[1])


def test_a_rank_without_rows_gets_empty_results():
    q, k, v, dout = inputs(0, 5, 5)
    none = q[:0]
    out, lse, delta, *_ = forward_backward(q, k, v, dout, SMALL)
    found, no_lse = attention_forward(none, k, v, SMALL)
    assert found.shape == (0, HEADS, WIDTH) and no_lse.shape == (0, HEADS)
    assert attention_delta(none, none).shape == (0, HEADS)
    assert attention_dq(none, k, v, none, no_lse, no_lse, SMALL).shape == (0, HEADS, WIDTH)
    for found in attention_dkv(q, none, none, dout, lse, delta, SMALL):
        assert found.shape == (0, HEADS, WIDTH)


def test_nan_in_one_key_reaches_every_query_and_in_one_query_only_that_query():
    q, k, v, _ = inputs(7, 20, 40)
    poisoned = k.clone()
    poisoned[3, 0, 0] = math.nan
    out, lse = attention_forward(q, poisoned, v, SMALL)
    assert out[:, 0].isnan().all() and lse[:, 0].isnan().all()
    assert_same_bytes(out[:, 1], attention_forward(q, k, v, SMALL)[0][:, 1])
    poisoned = q.clone()
    poisoned[3, 0, 0] = math.nan
    found, _ = attention_forward(poisoned, k, v, SMALL)
    assert found[3, 0].isnan().all()
    assert found.isnan().any(-1).sum() == 1


def test_exp2_and_log2_do_not_depend_on_the_place_in_the_buffer():
    z = normal(0, 3000, dtype=F32, scale=40)
    values, logs = exp2(z), log2(z.abs())
    assert_same_bytes(values, torch.from_numpy(exp2_of(z.numpy())))
    assert_same_bytes(logs, torch.from_numpy(log2_of(np.abs(z.numpy()))))
    for start in range(200):
        part = slice(start, start + 1 + start % 19)
        assert_same_bytes(exp2(z[part]), values[part])
        assert_same_bytes(log2(z[part].abs()), logs[part])
    ends = torch.tensor([-math.inf, 0.0, -200.0, math.inf, math.nan])
    assert_same_bytes(exp2(ends), torch.tensor([0.0, 1.0, 0.0, math.inf, math.nan]))


@pytest.mark.parametrize("contract", [SMALL, PUBLISHED], ids=lambda c: c.id)
def test_fp64_attention_and_its_gradients_equal_autograd(contract):
    """70 keys, values below 5, scores below 30: both sides err below 70 * 30 * 25 * 2^-53 < 1e-11.

    The constants are FP64 too, and exp2(x log2 e) differs from exp(x) by |x| 2^-52.
    """
    q, k, v, dout = inputs(0, 70, 70, dtype=F64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("qnh,knh->nqk", *leaves[:2]) / math.sqrt(WIDTH)
    expected = torch.einsum("nqk,knh->qnh", scores.softmax(-1), leaves[2])
    gradients = torch.autograd.grad(expected, leaves, dout)
    lse_of = scores.logsumexp(-1).T / math.log(2)
    out, lse, _, dq, dk, dv = forward_backward(q, k, v, dout, contract)
    assert out.dtype == lse.dtype == dq.dtype == F64
    for value, want in ((out, expected), (lse, lse_of), *zip((dq, dk, dv), gradients, strict=True)):
        assert (value - want.detach()).abs().max() < 1e-11


def test_results_are_contiguous():
    for result in forward_backward(*inputs(0, 20, 20), SMALL):
        assert result.is_contiguous()


@pytest.mark.parametrize(
    "call,reason",
    [
        (lambda q, k, v: attention_forward(q.half(), k, v, SMALL), "dtype of q: .*float16; acc"),
        (lambda q, k, v: attention_forward(q, k.float(), v, SMALL), "dtype of k: .*float32; .* q"),
        (lambda q, k, v: attention_forward(q, k[:, :1], v, SMALL), r"k: received \(5, 1, 4\).*2"),
        (lambda q, k, v: attention_forward(q, k, v[:4], SMALL), r"v: received \(4, 2, 4\).*\(5, 2"),
        (lambda q, k, v: attention_delta(q, k.float()), "dtype of out: .*float32; .*dout"),
        (
            lambda q, k, v: attention_dkv(q, k, v[:4], q, q, q, SMALL),
            r"shape of v: received \(4, 2, 4\); accepted: \(5, 2, 4\)",
        ),
        (
            lambda q, k, v: attention_dq(q, k, v.double(), q, q, q, SMALL),
            "dtype of v: received torch.float64; accepted: torch.bfloat16 as q",
        ),
    ],
)
def test_operands_that_do_not_fit_are_refused(call, reason):
    with pytest.raises(OperandError, match=reason):
        call(*(torch.zeros(n, 2, 4, dtype=BF16) for n in (3, 5, 5)))
