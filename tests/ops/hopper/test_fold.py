"""The row folds: bits of the eager op under the interpreter, code for sm_90 without one."""

import os
import subprocess
import sys

import pytest
import torch

from h3lib.contract import PUBLISHED, OperandError, RowUnits
from h3lib.ops.fold import row_unit_roots
from h3lib.ops.hopper import fold
from h3lib.ops.hopper.compiled import compile_offline
from h3lib.ops.norm import head_norm_dw_leaves

PROGRAM = """
import torch
from h3lib.contract import Contract, RowUnits
from h3lib.ops.fold import row_unit_roots
from h3lib.ops.hopper import compat, fold
from h3lib.ops.norm import head_norm_dw_leaves

fold.check_device = lambda **operands: None
torch.manual_seed(0)
contract = Contract(row_block=4, key_block=16)
for num_rows, units in ((1, range(64)), (7, range(0, 40)), (257, range(64)), (300, range(24, 64))):
    rows = RowUnits(num_rows, contract)
    owned = len(rows.row_unit_rows(units))
    terms = torch.randn(owned, 2, 20) * torch.exp(3 * torch.randn(owned, 1, 1))
    groups = torch.randint(0, 6, (owned,))
    for g, n in ((None, 1), (groups, 6)):
        ours = row_unit_roots(terms, rows, units, g, n, backend="triton")
        assert torch.equal(ours, row_unit_roots(terms, rows, units, g, n)), (num_rows, units, n)
    sequence = range(units.start // 8, units.stop // 8)
    terms = torch.randn(owned, 6, 16)
    ours = head_norm_dw_leaves(terms, rows, sequence, 3, backend="triton")
    assert torch.equal(ours, head_norm_dw_leaves(terms, rows, sequence, 3)), (num_rows, units)
print("interpreted")
"""


def test_bits_of_the_eager_op_under_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout == "interpreted\n", done.stderr[-3000:]


def _meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


KERNELS = {
    "row blocks": (
        fold.row_blocks_kernel,
        (_meta(9, 5376), _meta(9), _meta(1, 1, 5376), 9, 5376),
        {"ROW_BLOCK": 64, "GROUPS": 1, "GROUPED": False, "COLUMNS": 256},
    ),
    "row blocks of a table": (
        fold.row_blocks_kernel,
        (_meta(9, 32256), _meta(9, dtype=torch.int64), _meta(1, 8, 32256), 9, 32256),
        {"ROW_BLOCK": 64, "GROUPS": 8, "GROUPED": True, "COLUMNS": 32},
    ),
    "head blocks": (
        fold.head_blocks_kernel,
        (_meta(9, 56, 128), _meta(1, 8, 128), 9, 56, 7),
        {"ROW_BLOCK": 64, "HEAD_DIM": 128},
    ),
    "row units": (
        fold.row_units_kernel,
        (_meta(9, 5376), _meta(65, dtype=torch.int32), _meta(64, 5376), 5376),
        {"COLUMNS": 256},
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_compiled_code_has_no_atomics_and_no_spills(name):
    kernel, arguments, options = KERNELS[name]
    code = compile_offline(kernel, *arguments, **options, **fold.OPTIONS)
    code.check(tensor_cores=False)
    assert code.count("FADD") and not code.count("FFMA")


def test_operands_are_checked():
    rows = RowUnits(9, PUBLISHED)
    with pytest.raises(OperandError, match=r"dtype and strides of terms.*bfloat16"):
        bad = _meta(9, 4, dtype=torch.bfloat16)
        row_unit_roots(bad, rows, range(64), backend="triton")
    with pytest.raises(OperandError, match="rows of terms: received 8; accepted: 9"):
        row_unit_roots(_meta(8, 4), rows, range(64), backend="triton")
    with pytest.raises(OperandError, match=r"heads and head dim: received \(6, 24\)"):
        head_norm_dw_leaves(_meta(9, 6, 24), rows, range(8), 3, backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", (1, 63, 264, 4097, 14910))
def test_bits_of_the_eager_op_on_a_gpu(num_rows):
    """Every step is one IEEE add in the eager order, so the bytes equal the CPU's too."""
    generator = torch.Generator().manual_seed(num_rows)
    rows = RowUnits(num_rows)
    terms = torch.randn(num_rows, 6, 96, generator=generator)
    groups = torch.randint(0, 6, (num_rows,), generator=generator)
    expected = row_unit_roots(terms, rows, range(64), groups, 6)
    ours = row_unit_roots(terms.cuda(), rows, range(64), groups.cuda(), 6, backend="triton")
    assert torch.equal(ours.cpu().view(torch.int32), expected.view(torch.int32))
    terms = torch.randn(num_rows, 56, 128, generator=generator)
    expected = head_norm_dw_leaves(terms, rows, range(8), 8)
    ours = head_norm_dw_leaves(terms.cuda(), rows, range(8), 8, backend="triton")
    assert torch.equal(ours.cpu().view(torch.int32), expected.view(torch.int32))
