"""The plain Triton kernels under Triton's interpreter, tiny, against the eager ops.

The interpreter is chosen when a kernel is defined, so it runs in a process of its own. It is wrong
on BF16 products, so operands are FP32 here.
"""

import os
import subprocess
import sys

PROGRAM = """
import torch
from h3lib.ops.adaln import timestep_chain_dw
from h3lib.ops.hopper.gemm_fold import timestep_chain_kernel
from h3lib.ops.hopper.gemm_tree import finish_kernel
from h3lib.ops.tree import tree_sum

torch.manual_seed(0)
for m, c, e in ((1, 40, 33), (3, 65, 20)):
    dm, s = torch.randn(m, c), torch.randn(m, e)
    dw, dbias = torch.full((c, e), 7.0), torch.full((c,), 7.0)
    grid = (-(-c // 16), -(-e // 32))
    timestep_chain_kernel[grid](dm, s, dw, dbias, m, c, e, BC=16, BE=32)
    expected = timestep_chain_dw(dm, s)
    assert torch.equal(dw, expected[0]) and torch.equal(dbias, expected[1]), (m, c, e)

for count in (2, 4, 8):
    nodes, out = torch.randn(count, 7, 11), torch.full((7, 11), 7.0)
    finish_kernel[(2,)](nodes, out, 77, NODES=count, BLOCK=64)
    expected = tree_sum(lambda span: nodes[span[0]] if len(span) == 1 else None, range(count))
    assert torch.equal(out, expected), count
print("interpreted")
"""


def test_plain_kernels_under_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and done.stdout == "interpreted\n", done.stderr[-3000:]
