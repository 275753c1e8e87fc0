"""The attention kernels' compiled code, read without a GPU; the plain ones also interpreted."""

import dataclasses
import os
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="triton is pinned in the GPU requirements")

from h3lib.contract import BackendError
from h3lib.ops.hopper import attention_dkv, attention_dq, attention_forward, attention_statistics
from h3lib.ops.hopper.compiled import compile_offline

T, N = 14910, 56
HGMMA_OF_A_STEP = {"forward": 16, "dq": 24, "dkv": 24}  # 64 x 128 x 128 products: 8 steps of 16
WAITS_OF_A_STEP = {"forward": 2, "dq": 3, "dkv": 3}


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def launch(name):
    q, k, v, dout = (meta(T, N, 128) for _ in range(4))
    lse, delta, by_head = (meta(*s, dtype=torch.float32) for s in ((T, N), (T, N), (2, N, 14912)))
    if name.startswith("forward"):
        groups = int(name.split()[1])
        return attention_forward.forward_launch(q, k, v, meta(T, N, 128), lse, 132, groups)
    like_q, like_k = meta(T, N, 128), meta(T, N, 128)
    return {
        "dq": lambda: attention_dq.dq_launch(q, k, v, dout, lse, delta, like_q, 132),
        "dkv": lambda: attention_dkv.dkv_launch(q, k, v, dout, by_head, like_k, like_k, 132),
        "delta": lambda: attention_statistics.delta_launch(dout, q, delta),
        "by_head": lambda: attention_statistics.by_head_launch(lse, delta, by_head),
    }[name]()


def loops(sass):
    """Instructions of every innermost loop that holds a matrix product.

    A loop ends in a conditional jump back; unconditional ones return from a barrier's slow path.
    """
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", sass)]
    spans = []
    for at, text in code:
        jump = re.match(r"@!?U?P\d BRA\b.*?0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < at:
            body = [t for a, t in code if int(jump[1], 16) <= a <= at]
            if any("HGMMA" in t for t in body):
                spans.append((int(jump[1], 16), at, body))
    inside = lambda a, b: b[0] <= a[0] and a[1] <= b[1] and a != b  # noqa: E731
    return [span[2] for span in spans if not any(inside(other, span) for other in spans)]


@pytest.mark.parametrize("name", ["forward 3", "forward 2", "dq", "dkv"])
def test_wgmma_and_tma_with_no_spill_in_a_main_loop(name):
    kind = name.split()[0]
    plan = launch(name)
    code = compile_offline(plan.kernel, *plan.operands, **plan.options)
    # A few words are kept on the stack from one tile to the next, once in some 100 key blocks.
    assert code.spill_bytes <= 256
    dataclasses.replace(code, spill_bytes=0, stack_bytes=0).check(tensor_cores=True)
    assert code.shared_bytes <= 227 * 1024
    assert not re.search(r"\bRED|\bATOM", code.sass)
    # Nothing was serialised: one wait for a whole product, in the loop and in its masked last step.
    assert code.count("HGMMA") * WAITS_OF_A_STEP[kind] == (
        code.count("WARPGROUP.DEPBAR") * HGMMA_OF_A_STEP[kind]
    )
    found = loops(code.sass)
    assert len(found) == (3 if name == "forward 3" else 2)  # one a warpgroup
    for body in found:
        assert sum("HGMMA" in text for text in body) == HGMMA_OF_A_STEP[kind]
        assert not [text for text in body if re.search(r"\b(STL|LDL|CALL)\b", text)]
    assert "ex2.approx.ftz.f32" in code.ptx
    assert ("div.rn.f32" in code.ptx) == (kind == "forward")


def test_the_reading_is_not_blind():
    """With 128 registers for a consumer instead of 160 wgmma is serialised: that is noticed."""
    plan = launch("forward 3")
    operands = (*plan.operands[:-2], 128, 32)
    code = compile_offline(plan.kernel, *operands, **plan.options)
    with pytest.raises(BackendError, match="C7512"):
        dataclasses.replace(code, spill_bytes=0, stack_bytes=0).check(tensor_cores=True)


@pytest.mark.parametrize("name", ["delta", "by_head"])
def test_plain_kernels_keep_every_operation(name):
    plan = launch(name)
    code = compile_offline(plan.kernel, *plan.operands, **plan.options)
    code.check(tensor_cores=False)
    assert "fma" not in code.ptx and not code.count("FFMA") and not code.count("HMMA")


PROGRAM = """
import torch
from h3lib.ops.attention import attention_delta
from h3lib.ops.hopper.attention_statistics import by_head_kernel, delta_kernel

torch.manual_seed(0)
for rows, heads in ((1, 1), (7, 3), (70, 5)):
    dout, out = (torch.randint(-8, 9, (rows, heads, 128)).float() for _ in range(2))
    delta = torch.full((rows, heads), 7.0)
    pairs, stride = rows * heads, heads * 128 // 8
    delta_kernel[(-(-pairs // 32),)](dout, out, delta, pairs, heads, stride, stride, 32)
    # Small integers: every order of exact sums gives the same bytes.
    assert torch.equal(delta, attention_delta(dout, out)), (rows, heads)
    lse, padded = torch.randn(rows, heads), -(-rows // 64) * 64
    by_head = torch.full((2, heads, padded), 7.0)
    by_head_kernel[(padded // 64,)](lse, delta, by_head, rows, heads, padded, 8)
    assert torch.equal(by_head[:, :, :rows], torch.stack((-lse.T, delta.T))), (rows, heads)
    assert not by_head[:, :, rows:].any()
print("interpreted")
"""


def test_plain_kernels_under_the_interpreter():
    """In its own process: the interpreter is chosen when a kernel is defined. FP32, since it is
    wrong on BF16."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and done.stdout == "interpreted\n", done.stderr[-3000:]
