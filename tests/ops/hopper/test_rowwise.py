"""The row-wise kernels: their code, the plain ones interpreted, what they refuse, bits on a GPU."""

import os
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="triton is pinned in the GPU requirements")

import h3lib.ops.hopper  # noqa: F401  registers back end triton
from h3lib.contract import OperandError
from h3lib.ops import adaln, norm, rope, swiglu
from h3lib.ops.hopper import rowwise, rowwise_norm
from h3lib.ops.hopper.compiled import compile_offline

BF16, F32 = torch.bfloat16, torch.float32
T, D, N = 1000, 5376, 56


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


X, Y, W, R = meta(T, D), meta(T, D), meta(D), meta(T, 1, dtype=F32)
TABLE, TABLE_ROWS = meta(6, 6, D)[:, 1], meta(T, dtype=torch.int64)


def elementwise(kernel, names, out):
    return rowwise.elementwise_launch(kernel, {n: X for n in names.split()}, (out,))


def table(kernel, **operands):
    return rowwise.table_launch(kernel, operands, TABLE_ROWS, 6, Y)


def rms(width, backward):
    x, w, r = meta(T, width), meta(width), meta(T, 1, dtype=F32)
    if backward:
        kernel = rowwise_norm.rms_norm_backward_kernel
        return rowwise_norm.norm_launch(kernel, (x, x, w, r, x, x), x, backward == "added")
    return rowwise_norm.norm_launch(rowwise_norm.rms_norm_forward_kernel, (x, w, x, r), x, 1e-5)


def rotary(backward):
    x, table = meta(T, N, 128), meta(T, 48)
    return rowwise_norm.rotary_launch(x, table, table, x, backward)


LAUNCHES = {
    "swiglu forward": lambda: elementwise(rowwise.swiglu_forward_kernel, "value gate", Y),
    "swiglu backward": lambda: elementwise(
        rowwise.swiglu_backward_kernel, "dy value gate", meta(T, 2 * D)
    ),
    "modulate": lambda: table(rowwise.modulate_forward_kernel, h=X, shift=TABLE, scale=TABLE),
    "residual": lambda: table(rowwise.gated_residual_forward_kernel, x=X, gate=TABLE, y=X),
    **{
        f"norm {width} {direction or 'forward'}": lambda width=width, d=direction: rms(width, d)
        for width in (128, 5376)
        for direction in ("", "backward", "added")
    },
    "rotary": lambda: rotary(False),
    "rotary backward": lambda: rotary(True),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_one_operation_per_written_operation_and_wide_accesses(name):
    launch = LAUNCHES[name]()
    code = compile_offline(launch.kernel, *launch.operands, **launch.options)
    code.check(tensor_cores=False)
    assert not re.search(r"\bfma\.", code.ptx)
    loads = re.findall(r"ld\.global\S*", code.ptx)
    narrow = [load for load in loads if not re.search(r"\.v[24]\.b(?:32|64)", load)]
    # r, cos, sin, the row of the table and the weight of a head are small; everything else is 8 or
    # 16 bytes a thread.
    assert len(narrow) <= (5 if "128" in name else 2)


PROGRAM = """
import torch
from h3lib.ops import adaln, norm, rope, swiglu
from h3lib.ops.hopper import rowwise as e, rowwise_norm as n

# Small integers and halves: exact in every order and in BF16, which the interpreter rounds wrongly.
torch.manual_seed(0)
def draw(*shape): return torch.randint(-4, 5, shape).float()
T, C = 3, 40
a, b, c = draw(T, C), draw(T, C), draw(T, C)
table, rows = draw(4, 6, C), torch.tensor([3, 0, 3])
y, two = torch.full((T, C), 7.0), torch.full((T, 2 * C), 7.0)
grid, strides = (T, 2), (C // 8, C // 8, C // 8, C // 8)
one, six = C // 8, 6 * C // 8
shift, scale, gate = table[:, 0], table[:, 1], table[:, 2]
e.modulate_forward_kernel[grid](a, shift, scale, rows, y, 4, one, one, six, six, 32)
assert torch.equal(y, adaln.modulate_forward(a, shift, scale, rows))
e.gated_residual_forward_kernel[grid](a, gate, c, rows, y, 4, one, one, six, one, 32)
assert torch.equal(y, adaln.gated_residual_forward(a, gate, c, rows))
outside = torch.tensor([3, 4, -1])
e.gated_residual_forward_kernel[grid](a, gate, c, outside, y, 4, one, one, six, one, 32)
assert y.isnan().all(1).tolist() == [False, True, True]
zero = torch.zeros(T, C)
e.swiglu_forward_kernel[grid](a, zero, y, *strides[:3], 32)
assert torch.equal(y, swiglu.swiglu_forward(a, zero))
e.swiglu_backward_kernel[grid](a, b, zero, two, *strides, 32)
assert torch.equal(two, swiglu.swiglu_backward(a, b, zero))
x, w = torch.randint(0, 2, (T, C)).float() * 2 - 1, draw(C)
y, r = torch.full((T, C), 7.0), torch.full((T, 1), 7.0)
n.rms_norm_forward_kernel[(2,)](x, w, y, r, T, 0.0, C, 64, 2)
assert all(map(torch.equal, (y, r), norm.rms_norm_forward(x, w, 0.0)))
w = torch.full((C,), 40.0)  # the mean of g xhat is then an integer
n.rms_norm_backward_kernel[(2,)](a, x, w, r, x, y, T, False, C, 64, 2)
assert torch.equal(y, norm.rms_norm_backward(a, x, w, r))
n.rms_norm_backward_kernel[(2,)](a, x, w, r, b, y, T, True, C, 64, 2)
assert torch.equal(y, norm.rms_norm_backward(a, x, w, r, b))
q, cos, sin, out = draw(T, 3, 32), draw(T, 8), draw(T, 8), torch.full((T, 3, 32), 7.0)
for backward, op in ((False, rope.rotary_forward), (True, rope.rotary_backward)):
    n.rotary_kernel[(T, 2)](q, cos, sin, out, 3, 12, 1, backward, 8, 32, 16, 2)
    assert torch.equal(out, op(q, cos, sin))
print("interpreted")
"""


def test_kernels_under_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and done.stdout == "interpreted\n", done.stderr[-3000:]


X4, W4, ROWS4 = meta(4, 64), meta(64), meta(4, dtype=torch.int64)
HOPPER = {"backend": "triton"}
CALLS = {
    "dtype": (lambda: swiglu.swiglu_forward(meta(4, 64, dtype=F32), X4, **HOPPER),
              "dtype of value: received torch.float32"),
    "device": (lambda: swiglu.swiglu_forward(torch.ones(4, 64).bfloat16(), X4, **HOPPER),
               "device of value: received 'cpu'"),
    "shape": (lambda: adaln.modulate_forward(X4, meta(5, 64), X4, ROWS4, **HOPPER),
              "shape of scale"),
    "width": (lambda: adaln.modulate_forward(*[meta(4, 60)] * 3, ROWS4, **HOPPER), "shape of h"),
    "stride": (lambda: adaln.gated_residual_forward(meta(4, 128)[:, ::2], X4, X4, ROWS4, **HOPPER),
               "strides of x: received (128, 2)"),
    "row stride": (lambda: adaln.gated_residual_forward(meta(4, 68)[:, :64], X4, X4, ROWS4,
                                                        **HOPPER),
                   "strides of x: received (68, 1)"),
    "width of the table": (lambda: adaln.modulate_forward(X4, *[meta(4, 56)] * 2, ROWS4, **HOPPER),
                           r"shape of shift: received (4, 56); accepted: (any, 64)"),
    "table rows": (lambda: adaln.modulate_forward(X4, X4, X4, ROWS4[:3], **HOPPER),
                   "contiguity of table_rows"),
    "dx0": (lambda: norm.rms_norm_backward(X4, X4, W4, meta(4, 1, dtype=F32), meta(3, 64),
                                           **HOPPER), "shape of dx0"),
    "norm weight": (lambda: norm.rms_norm_forward(X4, meta(32), 1e-5, **HOPPER), "shape of w"),
    "norm strides": (lambda: norm.rms_norm_forward(meta(4, 128)[:, :64], meta(64), 1e-5,
                                                   **HOPPER), "strides of x"),
    "norm width": (lambda: norm.rms_norm_forward(meta(4, 9000), meta(9000), 1e-5, **HOPPER),
                   "width of a row: received 9000"),
    "norm r": (lambda: norm.rms_norm_backward(X4, X4, meta(64), meta(4, 1), **HOPPER), "r: rec"),
    "rotary table": (lambda: rope.rotary_forward(meta(4, 2, 128), meta(3, 48), meta(3, 48),
                                                 **HOPPER), "shape of cos: received (3, 48)"),
    "rotary channels": (lambda: rope.rotary_forward(meta(4, 2, 128), meta(4, 12), meta(4, 12),
                                                    **HOPPER), "rotated and head channels"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_refused_with_the_value_received(name):
    call, message = CALLS[name]
    with pytest.raises(OperandError) as error:
        call()
    assert message in str(error.value)


def test_a_rank_without_rows_launches_nothing():
    x, rows = meta(0, 64), meta(0, dtype=torch.int64)
    assert adaln.modulate_forward(x, X4, X4, rows, backend="triton").shape == (0, 64)
    assert norm.rms_norm_forward(x, meta(64), 1e-5, backend="triton")[1].shape == (0, 1)
    assert swiglu.swiglu_backward(x, x, x, backend="triton").shape == (0, 128)
    assert (
        rope.rotary_forward(meta(0, 2, 32), meta(0, 8), meta(0, 8), backend="triton").shape[0] == 0
    )

