"""The ends of the model on back end `triton`: the order of the eager op, interpreted."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is pinned in the GPU requirements")

PROGRAM = """
import torch
from h3lib.contract import Contract, RowUnits
from h3lib.ops.gemm import chain
from h3lib.ops.hopper import gemm_chain, gemm_fold, row_product
from h3lib.ops.row_product import row_unit_product_roots
from h3lib.ops.timestep import timestep_embedding_backward, timestep_embedding_forward

for module in (gemm_chain, gemm_fold):
    module.check_device = lambda **operands: None
# The FP32 chain is Gluon, which is not interpreted; its bits are compared on a GPU.
gemm_chain.chain_fp32 = lambda a, b, bias=None: chain(a, b) + (0 if bias is None else bias)
torch.manual_seed(0)
contract = Contract(row_block=4, key_block=16)
for num_rows, units in ((1, range(64)), (300, range(24, 64))):
    rows = RowUnits(num_rows, contract)
    owned = rows.row_unit_rows(units)
    at = torch.arange(owned.start, owned.stop)[torch.rand(len(owned)) < 0.6]
    dy, x = torch.randn(len(at), 40), torch.randn(len(at), 24)
    ours = row_unit_product_roots(dy, x, at, rows, units, backend="triton")
    assert torch.equal(ours, row_unit_product_roots(dy, x, at, rows, units)), num_rows

shapes = ((2, 8), (40, 8), (40,), (24, 40), (24,))
given = [torch.randn(shape) for shape in shapes]
ours, eager = (timestep_embedding_forward(*given, backend=b) for b in ("triton", "eager"))
dtemb = torch.randn(2, 24)
gradients = [
    timestep_embedding_backward(dtemb, given[0], inner, given[3], backend=b)
    for b, inner in (("triton", ours[1]), ("eager", eager[1]))
]
pairs = [*zip(ours, eager), *((gradients[0][name], gradients[1][name]) for name in gradients[1])]
assert len(pairs) == 6
for a, b in pairs:  # a fused step rounds once where the eager one rounds twice: 2 K roundings
    assert float((a - b).norm() / b.norm()) < 40 * 2.0**-23, "another sum"
print("interpreted")
"""


def test_bits_of_the_eager_op_under_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout == "interpreted\n", done.stderr[-3000:]
