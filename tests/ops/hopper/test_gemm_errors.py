"""What the products refuse, and the fused products' definitions."""

import pytest
import torch

from h3lib.contract import BackendError, Contract, OperandError, RowsError, RowUnits
from h3lib.ops import gemm
from h3lib.ops.adaln import timestep_chain_dw
from h3lib.ops.hopper import compat

BF16 = torch.bfloat16
ROWS = RowUnits(64)


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


CALLS = {
    "dtype FP64": (
        lambda: gemm.linear_forward(
            meta(4, 64, dtype=torch.float64), meta(64, 64, dtype=torch.float64), backend="triton"
        ),
        "dtype of x: received torch.float64",
    ),
    "dtype FP16": (
        lambda: gemm.linear_forward(
            meta(4, 64, dtype=torch.float16), meta(64, 64, dtype=torch.float16), backend="triton"
        ),
        "dtype of x: received torch.float16",
    ),
    "mixed dtypes": (
        lambda: gemm.linear_forward(
            meta(4, 64), meta(64, 64, dtype=torch.float32), backend="triton"
        ),
        "dtype of w",
    ),
    "device": (
        lambda: gemm.linear_forward(
            torch.ones(4, 64, dtype=BF16), torch.ones(8, 64, dtype=BF16), backend="triton"
        ),
        "device of x: received 'cpu'; accepted: cuda",
    ),
    "shape": (lambda: gemm.linear_dx(meta(4, 64), meta(32, 64), backend="triton"), "shape of w"),
    "stride": (
        lambda: gemm.linear_forward(meta(4, 128)[:, ::2], meta(64, 64), backend="triton"),
        "stride of the last dim of x: received 2",
    ),
    "alignment": (
        lambda: gemm.linear_forward(meta(4, 60), meta(64, 60), backend="triton"),
        "stride of x in bytes: received 120",
    ),
    "odd columns": (
        lambda: gemm.linear_forward(meta(4, 64), meta(63, 64), backend="triton"),
        "stride of result in bytes: received 126",
    ),
    "no reduced axis": (
        lambda: gemm.linear_forward(meta(4, 0), meta(8, 0), backend="triton"),
        "reduced axis: received 0",
    ),
    "bias dtype": (
        lambda: gemm.linear_forward(
            meta(4, 64), meta(64, 64), meta(64, dtype=torch.float64), backend="triton"
        ),
        "dtype of bias",
    ),
    "unit width": (
        lambda: gemm.unit_tree_product([(meta(4, 64), meta(64, 64))], 8, BF16, backend="triton"),
        "width of a unit: received 8",
    ),
    "units": (
        lambda: gemm.unit_tree_roots(
            [(meta(4, 100), meta(100, 64))], range(8), 8, backend="triton"
        ),
        "reduced axis: received 100",
    ),
    "four parts": (
        lambda: gemm.unit_tree_product(
            [(meta(4, 128), meta(128, 64))] * 4, 8, BF16, backend="triton"
        ),
        "number of parts: received 4",
    ),
    "sixteen units": (
        lambda: gemm.unit_tree_product([(meta(4, 256), meta(256, 64))], 16, BF16, backend="triton"),
        "units in one root: received 16",
    ),
    "product dtype": (
        lambda: gemm.unit_tree_product(
            [(meta(4, 128), meta(128, 64))], 8, torch.float16, backend="triton"
        ),
        "dtype of the product",
    ),
    "parts stored unlike": (
        lambda: gemm.unit_tree_product(
            [(meta(400, 128), meta(128, 64)), (meta(400, 128), meta(64, 128).T)],
            8,
            BF16,
            backend="triton",
        ),
        "strides of b",
    ),
    "fold rows": (
        lambda: gemm.row_fold_product(meta(60, 64), meta(64, 64), ROWS, BF16, backend="triton"),
        "shape of dy",
    ),
    "no timestep": (
        lambda: timestep_chain_dw(meta(0, 64), meta(0, 64), backend="triton"),
        "number of timesteps: received 0",
    ),
    "timestep strides": (
        lambda: timestep_chain_dw(meta(2, 64)[:, ::2], meta(2, 64), backend="triton"),
        "strides of dm",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_refused_with_the_value_received(name):
    call, message = CALLS[name]
    with pytest.raises(OperandError) as error:
        call()
    assert message in str(error.value)


def test_no_rows_are_refused():
    with pytest.raises(RowsError, match="number of active rows: received 0"):
        gemm.row_fold_product(meta(0, 64), meta(0, 64), RowUnits(0), BF16, backend="triton")


def test_key_blocks_that_no_matrix_instruction_divides():
    rows = RowUnits(64, Contract(key_block=24, row_block=8, mma_k=8))
    with pytest.raises(BackendError, match="unit starts of row_fold"):
        gemm.row_fold_product(meta(64, 64), meta(64, 64), rows, BF16, backend="triton")


def test_a_rank_without_rows_launches_nothing():
    assert gemm.linear_forward(meta(0, 64), meta(32, 64), backend="triton").shape == (0, 32)
    assert gemm.unit_tree_product(
        [(meta(0, 128), meta(128, 32))], 8, BF16, backend="triton"
    ).shape == (0, 32)
    roots = gemm.row_fold_roots(
        meta(0, 64), meta(0, 32), RowUnits(1), range(0, 4), backend="triton"
    )
    assert roots.shape == (1, 64, 32) and roots.dtype == torch.float32


def test_untested_triton_is_refused():
    with pytest.raises(
        BackendError, match="Triton version: received '3.5.1'; accepted: 3.6.0, 3.7.1"
    ):
        compat.require_triton("3.5.1")


@pytest.mark.parametrize("found", [(8, 0), (8, 9), (10, 0)])
def test_another_architecture_is_refused(monkeypatch, found):
    monkeypatch.setattr(compat, "_capability", lambda index: found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    class OnGpu:
        device = torch.device("cuda", 0)

    with pytest.raises(BackendError, match=f"received '{found[0]}.{found[1]}'; accepted: sm_90"):
        compat.check_device(x=OnGpu())


def test_another_than_the_current_device_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)

    class OnGpu:
        device = torch.device("cuda", 0)

    with pytest.raises(OperandError, match="received 'cuda:0'; accepted: cuda:1, the current"):
        compat.check_device(x=OnGpu())


def test_products_are_the_rounded_roots():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(BF16)

    parts = [(draw(5, 32), draw(32, 6)), (draw(5, 16), draw(16, 6))]
    roots = gemm.unit_tree_roots(parts, range(8), 8)
    assert torch.equal(gemm.unit_tree_product(parts, 8, BF16), roots[0].to(BF16))
    assert torch.equal(gemm.unit_tree_product(parts, 8, torch.float32), roots[0])
    dy, x = draw(300, 5), draw(300, 4)
    roots = gemm.row_fold_roots(dy, x, RowUnits(300), range(8))
    assert torch.equal(gemm.row_fold_product(dy, x, RowUnits(300), BF16), roots[0].to(BF16))
