"""What the attention kernels refuse, what they launch for a shard without rows, and their table."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is pinned in the GPU requirements")

import h3lib.ops.hopper  # noqa: F401  registers back end triton
from h3lib.contract import Contract, ContractError, OperandError
from h3lib.ops.attention import attention_delta, attention_dkv, attention_dq, attention_forward
from h3lib.ops.hopper.attention_forward import GROUPS, groups_for

BF16, F32 = torch.bfloat16, torch.float32
PUBLISHED = Contract()


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def forward(q=None, k=None, v=None, contract=PUBLISHED):
    operands = [meta(5, 2, 128) if x is None else x for x in (q, k, v)]
    return attention_forward(*operands, contract, backend="triton")


def backward(op, rows=5, keys=5, **changed):
    x = {"q": meta(rows, 2, 128), "k": meta(keys, 2, 128), "v": meta(keys, 2, 128)}
    x |= {
        "dout": meta(rows, 2, 128),
        "lse": meta(rows, 2, dtype=F32),
        "delta": meta(rows, 2, dtype=F32),
    }
    return op(*(x | changed).values(), PUBLISHED, backend="triton")


CALLS = {
    "dtype": (lambda: forward(q=meta(5, 2, 128, dtype=F32)), "dtype of q: received torch.float32"),
    "dtype of v": (lambda: forward(v=meta(5, 2, 128, dtype=torch.float16)), "dtype of v"),
    "device": (lambda: forward(*(torch.ones(5, 2, 128, dtype=BF16) for _ in range(3))),
               "device of q: received 'cpu'; accepted: cuda"),
    "head dim": (lambda: forward(*(meta(5, 2, 64) for _ in range(3))), "received (5, 2, 64)"),
    "ranks": (lambda: forward(q=meta(5, 256)), "shape of q: received (5, 256)"),
    "heads": (lambda: forward(k=meta(5, 3, 128), v=meta(5, 3, 128)), "heads of k: received 3"),
    "rows of v": (lambda: forward(v=meta(6, 2, 128)), "rows of v: received 6; accepted: 5 as k"),
    "no keys": (lambda: forward(k=meta(0, 2, 128), v=meta(0, 2, 128)), "rows of k: received 0"),
    "head stride": (lambda: forward(q=meta(5, 2, 256)[..., :128]), "strides of q"),
    "last stride": (lambda: forward(q=meta(5, 2, 256)[..., ::2]), "strides of q"),
    "row stride": (lambda: forward(q=meta(5, 260)[:, :256].unflatten(1, (2, 128))),
                   "stride of q in bytes: received 520"),
    "dout": (lambda: backward(attention_dq, dout=meta(4, 2, 128)), "rows of dout: received 4"),
    "lse dtype": (lambda: backward(attention_dq, lse=meta(5, 2)), "lse: received"),
    "delta rows": (lambda: backward(attention_dkv, delta=meta(4, 2, dtype=F32)), "delta: received"),
    "lse strides": (lambda: backward(attention_dkv, lse=meta(2, 5, dtype=F32).T), "strides of lse"),
    "no queries": (lambda: backward(attention_dkv, rows=0), "rows of q: received 0"),
    "no keys for dq": (lambda: backward(attention_dq, keys=0), "rows of k: received 0"),
    "delta operands": (lambda: attention_delta(meta(5, 2, 128), meta(5, 2, 128, dtype=F32),
                                               backend="triton"), "dtype of out"),
    "delta stride": (lambda: attention_delta(
        meta(5, 260)[:, :256].unflatten(1, (2, 128)), meta(5, 2, 128), backend="triton"),
        "stride of dout: received 260"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_refused_with_the_value_received(name):
    call, message = CALLS[name]
    with pytest.raises(OperandError) as error:
        call()
    assert message in str(error.value)


@pytest.mark.parametrize("op", [attention_dq, attention_dkv])
def test_another_key_block_is_another_contract(op):
    with pytest.raises(ContractError, match="key_block: received 64; accepted: 128"):
        forward(contract=Contract(key_block=64))


def test_a_shard_without_rows_launches_nothing():
    out, lse = forward(q=meta(0, 2, 128))
    assert out.shape == (0, 2, 128) and lse.shape == (0, 2) and lse.dtype == F32
    assert backward(attention_dq, rows=0).shape == (0, 2, 128)
    dk, dv = backward(attention_dkv, keys=0)
    assert dk.shape == dv.shape == (0, 2, 128)
    assert attention_delta(meta(0, 2, 128), meta(0, 2, 128), backend="triton").shape == (0, 2)


def test_the_table_takes_the_height_with_the_shortest_waves():
    assert groups_for(14910, 56, 132) == 3
    for rows in (1, 64, 129, 264, 1864, 4096, 37776):
        chosen = groups_for(rows, 56, 132)
        waves = {g: -(-(-(-rows // (64 * g)) * 56) // 132) * GROUPS[g][0] for g in GROUPS}
        assert waves[chosen] == min(waves.values())
