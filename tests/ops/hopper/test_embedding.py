"""The AdaLN linear's input: code without a GPU, values against FP64 on one, bad operands."""

import re

import pytest
import torch

from h3lib.contract import OperandError
from h3lib.ops.adaln import (
    adaln_input_backward,
    adaln_input_forward,
    timestep_chain_product,
)
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


BF16 = torch.bfloat16


def test_the_weight_gradient_is_rounded_to_nearest_as_it_is_stored():
    dm, s, dw = (_meta(*shape, dtype=BF16) for shape in ((2, 96), (2, 64), (96, 64)))
    tile = embedding.PRODUCT_TILE
    operands = (dm, s, dw, _meta(96, dtype=BF16), 2, 96, 64, tile["BC"], tile["BE"])
    options = {"num_warps": tile["num_warps"], "enable_fp_fusion": False}
    code = compile_offline(embedding.timestep_chain_kernel, *operands, **options)
    code.check(tensor_cores=False)
    assert re.search(r"cvt\.rn\.bf16(x2)?\.f32", code.ptx)
    assert not re.search(r"cvt\.(rz|rm|rp)", code.ptx) and "fma" not in code.ptx


PRODUCTS = {
    "dtype of the product": (lambda: (_meta(2, 8, dtype=BF16), _meta(2, 4, dtype=BF16), torch.half),
                             "dtype of the product: received torch.float16"),
    "FP32": (lambda: (_meta(2, 8), _meta(2, 4), BF16), r"of dm: received \(torch.float32"),
    "no timestep": (lambda: (_meta(0, 8, dtype=BF16), _meta(0, 4, dtype=BF16), BF16), "rows and"),
    "rows": (lambda: (_meta(2, 8, dtype=BF16), _meta(3, 4, dtype=BF16), BF16), "shape of s"),
    "strides": (lambda: (_meta(2, 8, dtype=BF16)[:, ::2], _meta(2, 4, dtype=BF16), BF16), "of dm"),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_operands_of_the_weight_gradient_are_checked(name):
    make, message = PRODUCTS[name]
    with pytest.raises(OperandError, match=message):
        timestep_chain_product(*make(), backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("num_timesteps", (1, 2, 3))
def test_the_weight_gradient_is_the_rounded_chain_on_a_gpu(num_timesteps):
    generator = torch.Generator().manual_seed(num_timesteps)
    dm = torch.randn(num_timesteps, 1000, generator=generator).bfloat16()
    s = torch.randn(num_timesteps, 2688, generator=generator).bfloat16()
    found = timestep_chain_product(dm.cuda(), s.cuda(), BF16, backend="triton")
    for value, expected in zip(found, timestep_chain_product(dm, s, BF16), strict=True):
        assert torch.equal(value.cpu().view(torch.int16), expected.view(torch.int16))


@pytest.mark.gpu
def test_values_and_position_independence_on_a_gpu():
    """SiLU in FP32 is within a few units in the last place, of 2^-24 each: ex2 4, the addition, the
    division; and x log2(e), rounded before ex2, is off by |x| of them."""
    temb = 4 * torch.randn(3, 2688, generator=torch.Generator().manual_seed(0)).cuda()
    ds = torch.randn(3, 2688, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    s = adaln_input_forward(temb, torch.float32, backend="triton")
    exact = adaln_input_forward(temb.double(), torch.float64)
    assert ((s - exact).abs() <= (8 + 2 * temb.abs()) * 2**-24 * exact.abs()).all()
    d = adaln_input_backward(ds, temb, backend="triton")
    exact = adaln_input_backward(ds.double(), temb.double())
    # SiLU' crosses zero, so its error is absolute: eight roundings of values up to 1.1
    assert float((d - exact).abs().max()) < 8 * 2**-24 * 1.1 * float(ds.float().abs().max())
    for row in range(3):
        one = adaln_input_backward(
            ds[row : row + 1], temb[row : row + 1].contiguous(), backend="triton"
        )
        assert torch.equal(one.view(torch.int32), d[row : row + 1].view(torch.int32))
