"""RMSNorm against NumPy in the contract's order; head norms: rows outer, heads inner, the trees."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import (
    assert_row_invariant,
    assert_same_bytes,
    chain_of,
    f32,
    halves_of,
    normal,
    quiet,
    round_bf16,
    row_unit_edges,
    special,
    tensor,
    tree_of,
)

from h3lib.contract import Contract, OperandError, RowUnits
from h3lib.ops.norm import (
    head_norm_dw_leaves,
    norm_dw_terms,
    rms_norm_backward,
    rms_norm_forward,
)

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
EPS = 1e-5
SMALL = Contract(row_block=4, key_block=16)


@quiet
def forward_of(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(x r) w before its rounding, and r; every operation rounded to FP32."""
    mean = halves_of(x * x)[..., None] / np.float32(x.shape[-1])
    r = np.float32(1) / np.sqrt(mean + np.float32(EPS))
    return x * r * w, r


@quiet
def backward_of(dy, x, w, r) -> tuple[np.ndarray, np.ndarray]:
    xhat, g = x * r, dy * w
    c = halves_of(g * xhat)[..., None] / np.float32(x.shape[-1])
    return r * (g - xhat * c), dy * xhat


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(5, 1), (3, 24), (4, 96), (6, 4, 32), (2, 100)])
def test_norm_and_its_backward_round_once_after_fp32_arithmetic(dtype, shape):
    x, dy, w = (normal(i, *s, dtype=dtype) for i, s in ((0, shape), (1, shape), (2, shape[-1:])))
    y, r = rms_norm_forward(x, w, EPS)
    dx, terms = rms_norm_backward(dy, x, w, r), norm_dw_terms(dy, x, r)
    y_of, r_of = forward_of(f32(x), f32(w))
    dx_of, terms_of = backward_of(f32(dy), f32(x), f32(w), r_of)
    rounded = round_bf16 if dtype == BF16 else np.asarray
    assert_same_bytes(r, torch.from_numpy(r_of))
    assert_same_bytes(y, tensor(rounded(y_of), dtype))
    assert_same_bytes(dx, tensor(rounded(dx_of), dtype))
    assert_same_bytes(terms, torch.from_numpy(terms_of))


def test_terms_of_the_weight_gradient_are_not_rounded_to_bf16():
    x, w, dy = normal(0, 8, 32), normal(1, 32), normal(2, 8, 32)
    _, r = rms_norm_forward(x, w, EPS)
    terms = norm_dw_terms(dy, x, r)
    assert terms.dtype == F32
    assert not torch.equal(terms, terms.to(BF16).float())


def test_another_gradient_is_added_after_rounding_and_the_sum_is_rounded():
    x, w, dy, dx0 = normal(0, 30, 32), normal(1, 32), normal(2, 30, 32), normal(3, 30, 32)
    _, r = rms_norm_forward(x, w, EPS)
    dx = rms_norm_backward(dy, x, w, r)
    found = rms_norm_backward(dy, x, w, r, dx0)
    assert_same_bytes(found, tensor(round_bf16(f32(dx0) + f32(dx)), BF16))
    unrounded = torch.from_numpy(backward_of(f32(dy), f32(x), f32(w), r.numpy())[0])
    assert not torch.equal(found, (dx0.float() + unrounded).to(BF16))


def test_norm_of_zeros_and_of_subnormals_is_finite():
    x = torch.zeros(2, 8, dtype=BF16)
    x[1] = 2.0**-130
    y, r = rms_norm_forward(x, torch.ones(8, dtype=BF16), EPS)
    expected = np.float32(1) / np.sqrt(np.float32(EPS))
    assert r.flatten().tolist() == [expected, expected]
    assert_same_bytes(y[0], torch.zeros(8, dtype=BF16))
    assert (y[1] > 0).all()


@given(st.integers(0, 10**6), st.integers(1, 70), st.sampled_from([(7,), (24,), (3, 8)]))
def test_rows_are_independent(seed, num_rows, width):
    w = normal(9, width[-1])
    x, dy = special(seed, num_rows, *width), special(seed + 1, num_rows, *width)

    def both(x, dy):
        y, r = rms_norm_forward(x, w, EPS)
        return y, r, rms_norm_backward(dy, x, w, r), norm_dw_terms(dy, x, r)

    assert_row_invariant(both, [x, dy], seed)


def test_head_slices_of_a_head_norm_are_heads_of_the_whole():
    x, w = normal(0, 9, 16, 32), normal(1, 32)
    y, r = rms_norm_forward(x, w, EPS)
    for a, b in ((0, 2), (2, 10), (15, 16)):
        part, part_r = rms_norm_forward(x[:, a:b], w, EPS)
        assert_same_bytes(part, y[:, a:b])
        assert_same_bytes(part_r, r[:, a:b])


def test_fp64_norm_and_its_gradients_equal_autograd():
    """Values below 10, r below 2 on 24 terms: both sides err below 100 * 100 * 2^-53 < 2e-12."""
    x, dy, w = (normal(i, *s, dtype=F64) for i, s in ((0, (6, 24)), (1, (6, 24)), (2, (24,))))
    xg, wg = x.clone().requires_grad_(), w.clone().requires_grad_()
    expected = xg / torch.sqrt((xg * xg).mean(-1, keepdim=True) + EPS) * wg
    dx_of, dw_of = torch.autograd.grad(expected, (xg, wg), dy)
    y, r = rms_norm_forward(x, w, EPS)
    dx, terms = rms_norm_backward(dy, x, w, r), norm_dw_terms(dy, x, r)
    assert y.dtype == dx.dtype == terms.dtype == F64
    for value, want in ((y, expected.detach()), (dx, dx_of), (terms.sum(0), dw_of)):
        assert (value - want).abs().max() < 2e-12


@quiet
def leaves_of(terms: np.ndarray, contract: Contract, num_feature_units: int) -> np.ndarray:
    """[8 sequence units, feature units, H] by the published order."""
    size, heads = contract.row_block, terms.shape[1] // num_feature_units
    edges = row_unit_edges(len(terms), size, contract.key_block)
    result = []
    for s in range(8):
        by_feature = []
        for j in range(num_feature_units):
            zero, row_units = np.zeros_like(terms[0, 0]), []
            for b0, b1 in edges[8 * s : 8 * s + 8]:
                total = zero
                for block in range(b0, b1):
                    own = terms[block * size : (block + 1) * size, j * heads : (j + 1) * heads]
                    total = total + chain_of(own.reshape(-1, own.shape[-1]))  # rows outer
                row_units.append(total)
            by_feature.append(tree_of(row_units))
        result.append(by_feature)
    return np.array(result)


@pytest.mark.parametrize("contract", [SMALL, Contract()], ids=lambda c: c.id)
@pytest.mark.parametrize("num_rows", [1, 5, 64, 65, 264, 530])
def test_head_norm_leaves_are_chains_over_rows_then_heads(num_rows, contract):
    dy, x = (normal(num_rows + i, num_rows, 8, 3) for i in range(2))
    r = rms_norm_forward(x, torch.ones(3, dtype=BF16), EPS)[1]
    leaves = head_norm_dw_leaves(dy, x, r, RowUnits(num_rows, contract), range(8), 4)
    assert leaves.dtype == F32
    terms = f32(dy) * (f32(x) * r.numpy())
    assert_same_bytes(leaves, torch.from_numpy(leaves_of(terms, contract, 4)))


def leaves_of_terms(terms: torch.Tensor, *place) -> torch.Tensor:
    """Leaves whose terms are dy itself: x and r are one."""
    ones = torch.ones_like(terms)
    return head_norm_dw_leaves(terms, ones, ones[..., :1], *place)


def test_heads_outer_would_read_differently():
    """One unit of two heads, rows 0 and 1: BIG + 1 and 1 - BIG lose the 1."""
    big = 2.0**25
    terms = torch.zeros(2, 2, 1)
    terms[0, 0], terms[0, 1], terms[1, 0] = big, 1.0, -big  # heads outer: big - big + 1
    assert leaves_of_terms(terms, RowUnits(2, SMALL), range(8), 1).sum() == 0.0
    terms[0, 0], terms[0, 1], terms[1, 0] = big, -big, 1.0  # heads outer: big + 1 - big
    assert leaves_of_terms(terms, RowUnits(2, SMALL), range(8), 1).sum() == 1.0


@given(st.integers(0, 10**6), st.integers(1, 150), st.integers(0, 7), st.integers(1, 8))
def test_a_rank_has_the_leaves_of_its_rows_and_heads(seed, num_rows, first, count):
    last = min(first + count, 8)
    terms, rows = special(seed, num_rows, 8, 2, dtype=F32), RowUnits(num_rows, SMALL)
    whole = leaves_of_terms(terms, rows, range(8), 4)
    own = rows.sequence_unit_rows(range(first, last))
    part = terms[own.start : own.stop, 2:6]
    found = leaves_of_terms(part, rows, range(first, last), 2)
    assert_same_bytes(found, whole[first:last, 1:3])


def test_leaves_of_negative_zero_terms_and_of_no_rows_are_positive_zero():
    rows = RowUnits(5, SMALL)
    leaves = leaves_of_terms(torch.full((5, 4, 2), -0.0), rows, range(8), 2)
    assert_same_bytes(leaves, torch.zeros(8, 2, 2))
    none = leaves_of_terms(torch.zeros(0, 4, 2), rows, range(0, 3), 2)
    assert_same_bytes(none, torch.zeros(3, 2, 2))


@pytest.mark.parametrize(
    "x,w,reason",
    [
        (torch.zeros(2, 8), torch.zeros(7), r"shape of w: received \(7,\); accepted: \(8\)"),
        (torch.zeros(2, 8), torch.zeros(8, dtype=BF16), "dtype of w: received torch.bfloat16; .*x"),
        (torch.zeros(2, 8).half(), torch.zeros(8).half(), "dtype of x: received torch.float16"),
    ],
)
def test_operands_that_do_not_fit_are_refused(x, w, reason):
    with pytest.raises(OperandError, match=reason):
        rms_norm_forward(x, w, EPS)
