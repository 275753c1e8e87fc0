"""The AdaLN linear's input: code without a GPU, values against FP64 on one, bad operands."""

import pytest
import torch

from h3lib.contract import OperandError
from h3lib.ops.adaln import adaln_input_backward, adaln_input_forward
from h3lib.ops.hopper import embedding
from h3lib.ops.hopper.compiled import compile_offline


def _meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


KERNELS = {
    "forward": (
        embedding.adaln_input_forward_kernel,
        (_meta(2, 2688), _meta(2, 2688, dtype=torch.bfloat16), 5376),
    ),
    "backward": (
        embedding.adaln_input_backward_kernel,
        (_meta(2, 2688, dtype=torch.bfloat16), _meta(2, 2688), _meta(2, 2688), 5376),
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_compiled_code_is_not_contracted(name):
    kernel, arguments = KERNELS[name]
    code = compile_offline(kernel, *arguments, COLUMNS=embedding.COLUMNS, **embedding.OPTIONS)
    code.check(tensor_cores=False)
    assert ".approx.ftz.f32" in code.ptx or "ex2.approx" in code.ptx
    assert "div.rn.f32" in code.ptx and "fma" not in code.ptx


def test_operands_are_checked():
    with pytest.raises(OperandError, match=r"dtype of temb.*bfloat16"):
        adaln_input_forward(_meta(2, 8, dtype=torch.bfloat16), torch.bfloat16, backend="triton")
    with pytest.raises(OperandError, match=r"shape and strides of ds: received \(\(3, 8\)"):
        adaln_input_backward(_meta(3, 8), _meta(2, 8), backend="triton")


@pytest.mark.gpu
def test_values_and_position_independence_on_a_gpu():
    """SiLU in FP32 is within a few units in the last place (2^-24 each: exp 2, add, divide)."""
    temb = 4 * torch.randn(3, 2688, generator=torch.Generator().manual_seed(0)).cuda()
    ds = torch.randn(3, 2688, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    s = adaln_input_forward(temb, torch.float32, backend="triton")
    exact = adaln_input_forward(temb.double(), torch.float64)
    assert float(((s - exact) / exact.abs().clamp(min=1e-30)).abs().max()) < 8 * 2**-24
    d = adaln_input_backward(ds, temb, backend="triton")
    exact = adaln_input_backward(ds.double(), temb.double())
    # SiLU' crosses zero, so its error is absolute: eight roundings of values up to 1.1
    assert float((d - exact).abs().max()) < 8 * 2**-24 * 1.1 * float(ds.float().abs().max())
    for row in range(3):
        one = adaln_input_backward(
            ds[row : row + 1], temb[row : row + 1].contiguous(), backend="triton"
        )
        assert torch.equal(one.view(torch.int32), d[row : row + 1].view(torch.int32))
