"""The row folds: bits of the eager ops under the interpreter, code for sm_90 without one.

Under the interpreter operands are FP32 (it rounds BF16 wrongly), so nothing is rounded to BF16 and
every bit of the folds is compared; on a GPU operands are BF16 and the eager op is that of the CPU.
"""

import os
import re
import subprocess
import sys

import pytest
import torch

from h3lib.contract import PUBLISHED, Contract, ContractError, OperandError, RowUnits
from h3lib.ops import adaln
from h3lib.ops.fold import row_unit_roots
from h3lib.ops.hopper import fold, rowwise_fold
from h3lib.ops.hopper.compiled import compile_offline
from h3lib.ops.hopper.launch import Launch
from h3lib.ops.norm import head_norm_dw_leaves

PROGRAM = """
import torch
from h3lib.contract import Contract, RowUnits
from h3lib.ops import adaln
from h3lib.ops.fold import row_unit_roots
from h3lib.ops.hopper import fold, rowwise_fold, rowwise_tiles
from h3lib.ops.norm import head_norm_dw_leaves

fold.check_device = rowwise_tiles.check_device = lambda **operands: None
fold.BF16 = rowwise_fold.BF16 = torch.float32  # the dtype of operands here
rowwise_fold.bf16 = lambda x: x  # nothing is rounded
torch.manual_seed(0)

def same(found, expected, what):
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32)), what

contract = Contract(row_block=4, key_block=16)
for num_rows, units in ((1, range(64)), (21, range(0, 40)), (257, range(24, 64))):
    rows = RowUnits(num_rows, contract)
    owned, what = len(rows.row_unit_rows(units)), (num_rows, units)
    terms = torch.randn(owned, 2, 20) * torch.exp(3 * torch.randn(owned, 1, 1))
    groups = torch.randint(0, 6, (owned,))
    for g, n in ((None, 1), (groups, 6)):
        ours = row_unit_roots(terms, rows, units, g, n, backend="triton")
        same([ours], [row_unit_roots(terms, rows, units, g, n)], what)
    sequence = range(units.start // 8, units.stop // 8)
    x, dy = torch.randn(owned, 6, 16), torch.randn(owned, 6, 16)
    r = torch.rand(owned, 6, 1)
    ours = head_norm_dw_leaves(dy, x, r, rows, sequence, 3, backend="triton")
    same([ours], [head_norm_dw_leaves(dy, x, r, rows, sequence, 3)], what)
    # Runs of equal table rows, and rows that change every time.
    for table_rows in (groups, torch.arange(owned) // 3 % 5)[: 1 if num_rows > 21 else 2]:
        da, x, table = torch.randn(owned, 40), torch.randn(owned, 40), torch.randn(6, 6, 40)
        w, r = torch.randn(40), torch.rand(owned, 1)
        place = (table_rows, rows, units)
        both = [adaln.modulated_norm_backward(da, x, w, r, table[:, 1], *place, **b)
                for b in ({"backend": "triton"}, {})]
        same(*both, what)
        both = [adaln.gated_residual_backward(da, table[:, 2], x, *place, **b)
                for b in ({"backend": "triton"}, {})]
        same(*both, what)
outside = torch.tensor([0, 6, -1, 0, 0, 0, 0])
place = (outside, RowUnits(7, contract), range(64))
x, gate = torch.randn(7, 8), torch.randn(6, 8)
dy, roots = adaln.gated_residual_backward(x, gate, x, *place, backend="triton")
assert dy.isnan().all(1).tolist() == [False, True, True, False, False, False, False]
print("interpreted")
"""


def test_bits_of_the_eager_op_under_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout == "interpreted\n", done.stderr[-3000:]


def _meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


BF16, F32 = torch.bfloat16, torch.float32
X, R, TABLE = _meta(9, 5376, dtype=BF16), _meta(9, 1), _meta(6, 6, 5376, dtype=BF16)[:, 1]
W, GROUPS = _meta(5376, dtype=BF16), _meta(9, dtype=torch.int64)
HEADS = _meta(9, 56, 128, dtype=BF16)


def _roots(units, slots):
    operands = (_meta(1, 5376), _meta(1, 5376), _meta(65, dtype=torch.int32), 0, 0, 1, 96, 1, 14)
    constants = (slots, fold.WORD, units, fold.ROOT_COLUMNS)
    return Launch(fold.roots_kernel, (*operands, *constants), fold.ROOT_OPTIONS, (1,))


LAUNCHES = {
    "row blocks": Launch(
        fold.row_blocks_kernel,
        (_meta(9, 5376), _meta(9), _meta(1, 1, 5376), 9, 5376, 64, 1, False, 256),
        fold.OPTIONS,
        (1,),
    ),
    "row blocks of a table": Launch(
        fold.row_blocks_kernel,
        (_meta(9, 32256), GROUPS, _meta(1, 8, 32256), 9, 32256, 64, 8, True, 32),
        fold.OPTIONS,
        (1,),
    ),
    "head blocks": fold.head_launch(HEADS, HEADS, _meta(9, 56, 1), _meta(1, 1024), 64, 8),
    "modulated norm": rowwise_fold.fold_launch(
        rowwise_fold.modulated_norm_backward_kernel,
        {"da": X, "x": X, "scale": TABLE},
        (X, X, W, R, TABLE, GROUPS, X, _meta(1, 13 * 5377)),
        6,
        64,
    ),
    "gated residual": rowwise_fold.fold_launch(
        rowwise_fold.gated_residual_backward_kernel,
        {"dx": X, "gate": TABLE, "y": X},
        (X, TABLE, X, GROUPS, X, _meta(1, 6 * 5377)),
        6,
        64,
    ),
    **{
        f"roots of {units} units{', in slots' if slots else ''}": _roots(units, slots)
        for units in (1, 8, 64)
        for slots in (False, True)
    },
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_compiled_code_has_no_atomics_and_no_spills(name):
    launch = LAUNCHES[name]
    code = compile_offline(launch.kernel, *launch.operands, **launch.options)
    code.check(tensor_cores=False)
    assert code.count("FADD") and not code.count("FFMA")
    if name in AHEAD:  # rows fetched ahead into shared memory, whole words of each thread
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*", code.ptx)
        assert sum(f", 0x{AHEAD[name]:x}," in copy for copy in copies) >= 10, copies


AHEAD = {"head blocks": 8, "modulated norm": 16, "gated residual": 16}


def test_operands_are_checked():
    rows = RowUnits(9, PUBLISHED)
    with pytest.raises(OperandError, match=r"dtype and strides of terms.*bfloat16"):
        bad = _meta(9, 4, dtype=torch.bfloat16)
        row_unit_roots(bad, rows, range(64), backend="triton")
    with pytest.raises(OperandError, match="rows of terms: received 8; accepted: 9"):
        row_unit_roots(_meta(8, 4), rows, range(64), backend="triton")
    def leaves(x, dy=None, r=None):
        dy, r = x if dy is None else dy, _meta(*x.shape[:-1], 1) if r is None else r
        return head_norm_dw_leaves(dy, x, r, rows, range(8), 3, backend="triton")

    with pytest.raises(OperandError, match=r"heads and head dim: received \(6, 24\)"):
        leaves(_meta(9, 6, 24, dtype=BF16))
    with pytest.raises(OperandError, match="rows of x: received 8; accepted: 9"):
        leaves(_meta(8, 6, 16, dtype=BF16))
    with pytest.raises(OperandError, match=r"dy: received \(torch.float32"):
        leaves(_meta(9, 6, 16, dtype=BF16), dy=_meta(9, 6, 16))
    with pytest.raises(OperandError, match="r: received"):
        leaves(_meta(9, 6, 16, dtype=BF16), r=_meta(9, 6))


MODULATED = {
    "table rows": ({"table_rows": _meta(8, dtype=torch.int64)}, "contiguity of table_rows"),
    "int32 table rows": ({"table_rows": _meta(9, dtype=torch.int32)}, "contiguity of table_rows"),
    "scale": ({"scale": _meta(6, 40, dtype=BF16)}, r"shape of scale: received \(6, 40\)"),
    "w": ({"w": _meta(40, dtype=BF16)}, "shape of w"),
    "r": ({"r": _meta(9, 2)}, "r: received"),
    "da": ({"da": X[:8]}, "shape of x"),
    "rows": ({"units": range(8)}, "rows: received 9; accepted: 0, those of the row units"),
}


@pytest.mark.parametrize("name", MODULATED)
def test_modulated_norm_backward_is_checked(name):
    changed, message = MODULATED[name]
    given = {"da": X, "x": X, "w": W, "r": R, "scale": TABLE, "table_rows": GROUPS,
             "rows": RowUnits(9, PUBLISHED), "units": range(64)}  # fmt: skip
    with pytest.raises(OperandError, match=message):
        adaln.modulated_norm_backward(**given | changed, backend="triton")


def test_a_row_block_that_is_no_power_of_two_is_refused():
    rows = RowUnits(9, Contract(row_block=3, key_block=48))
    with pytest.raises(ContractError, match="row_block: received 3"):
        adaln.gated_residual_backward(X, TABLE, X, GROUPS, rows, range(64), backend="triton")


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
