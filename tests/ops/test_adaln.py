"""AdaLN: table rows, modulation and gate with every rounding point, chains over timesteps."""

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
    normal,
    quiet,
    round_bf16,
    row_unit_edges,
    special,
    tensor,
    tree_of,
)

from h3lib.contract import Contract, OperandError, RowUnits
from h3lib.ops.adaln import (
    adaln_input_backward,
    adaln_input_forward,
    gated_residual_backward,
    gated_residual_forward,
    modulate_forward,
    modulated_norm_backward,
    table_rows,
    timestep_chain_dw,
    timestep_chain_product,
)
from h3lib.ops.fold import row_unit_roots
from h3lib.ops.norm import norm_dw_terms, rms_norm_backward, rms_norm_forward
from h3lib.ops.swiglu import silu, silu_derivative

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
SMALL = Contract(row_block=4, key_block=16)
ROWS = torch.tensor([3, 3, 0, 1, 3, 2])  # rows of a table of 4


def one_each(num_rows):
    """Every row has a table row of its own, and a row fold of its own."""
    return torch.arange(num_rows)


def fold_place(num_rows, contract=SMALL):
    return RowUnits(num_rows, contract), range(64)


def test_table_row_is_timestep_times_three_plus_tag_and_padding_counts_as_video():
    found = table_rows(torch.tensor([0, 0, 0, 1, 2, 1]), torch.tensor([0, 1, 2, 0, 2, -1]), 3)
    assert found.tolist() == [0, 1, 2, 3, 8, 3]


@given(st.integers(0, 10**6))
def test_modulation_rounds_scale_product_and_sum(seed):
    h, table = special(seed, 6, 9), special(seed + 1, 4, 6, 9)
    shift, scale = table[:, 3], table[:, 1]
    with np.errstate(all="ignore"):
        one_plus = round_bf16(np.float32(1) + f32(scale[ROWS]))
        expected = round_bf16(round_bf16(f32(h) * one_plus) + f32(shift[ROWS]))
    assert_same_bytes(modulate_forward(h, shift, scale, ROWS), tensor(expected, BF16))


def chains_by_group(terms, groups, num_groups, contract=SMALL):
    """Row folds of FP32 terms in NumPy, each restricted to the rows of its group."""
    edges = row_unit_edges(len(terms), contract.row_block, contract.key_block)
    roots = []
    for g in range(num_groups):
        units = []
        for b0, b1 in edges:
            blocks = [
                range(i * contract.row_block, (i + 1) * contract.row_block) for i in range(b0, b1)
            ]
            chains = [
                chain_of(terms[[t for t in block if t < len(terms) and groups[t] == g]])
                for block in blocks
            ]
            sums = np.array(chains, dtype=terms.dtype).reshape(-1, *terms.shape[1:])
            units.append(chain_of(sums))
        roots.append(tree_of(units))
    return np.array(roots)


@given(st.integers(0, 10**6), st.integers(1, 40))
def test_modulated_norm_backward_rounds_h_and_dh_and_no_term(seed, num_rows):
    da, x = special(seed, num_rows, 9), special(seed + 1, num_rows, 9)
    w, scale = special(seed + 2, 9), special(seed + 3, 3, 9)
    groups = torch.randint(3, (num_rows,), generator=torch.Generator().manual_seed(seed))
    h, r = rms_norm_forward(x, w, 1e-5)
    place = fold_place(num_rows)
    dh, table, dw = modulated_norm_backward(da, x, w, r, scale, groups, *place)
    with np.errstate(all="ignore"):
        one_plus = round_bf16(np.float32(1) + f32(scale[groups]))
        dh_of = round_bf16(f32(da) * one_plus)
        terms = np.stack((f32(da), f32(da) * f32(h)), 1)
        dw_terms = dh_of * (f32(x) * r.numpy())
        table_of = chains_by_group(terms, groups, 3)
        dw_of = chains_by_group(dw_terms, torch.zeros(num_rows), 1)
    assert_same_bytes(dh, tensor(dh_of, BF16))
    assert table.dtype == dw.dtype == F32
    assert_same_bytes(table[0], torch.from_numpy(table_of))
    assert_same_bytes(dw, torch.from_numpy(dw_of))


@given(st.integers(0, 10**6))
def test_gated_residual_rounds_the_gated_branch_then_the_sum(seed):
    x, y, gate = special(seed, 6, 9), special(seed + 1, 6, 9), special(seed + 2, 4, 9)
    with np.errstate(all="ignore"):
        branch = round_bf16(f32(gate[ROWS]) * f32(y))
        expected = tensor(round_bf16(f32(x) + branch), BF16)
        dy_of, terms = round_bf16(f32(gate[ROWS]) * f32(x)), f32(x) * f32(y)
        dgate_of = chains_by_group(terms, ROWS, 4)
    assert_same_bytes(gated_residual_forward(x, gate, y, ROWS), expected)
    dy, dgate = gated_residual_backward(x, gate, y, ROWS, *fold_place(6))
    assert_same_bytes(dy, tensor(dy_of, BF16))
    assert dgate.dtype == F32
    assert_same_bytes(dgate[0], torch.from_numpy(dgate_of))


@given(st.integers(0, 10**6), st.integers(1, 150), st.integers(0, 63), st.integers(1, 64))
def test_a_rank_has_the_roots_of_its_row_units(seed, num_rows, first, count):
    """Roots over some row units are those of the same terms, folded by `row_unit_roots`."""
    units = range(first, min(first + count, 64))
    rows = RowUnits(num_rows, SMALL)
    own = rows.row_unit_rows(units)
    part = slice(own.start, own.stop)
    da, x, w = special(seed, num_rows, 5)[part], special(seed + 1, num_rows, 5)[part], normal(2, 5)
    scale, groups = normal(3, 3, 5), torch.arange(num_rows)[part] % 3
    h, r = rms_norm_forward(x, w, 1e-5)
    dh, table, dw = modulated_norm_backward(da, x, w, r, scale, groups, rows, units)
    terms = torch.stack((da.float(), da.float() * h.float()), 1)
    assert_same_bytes(table, row_unit_roots(terms, rows, units, groups, 3))
    assert_same_bytes(dw, row_unit_roots(norm_dw_terms(dh, x, r), rows, units)[:, 0])
    _, dgate = gated_residual_backward(da, scale, x, groups, rows, units)
    assert_same_bytes(dgate, row_unit_roots(da.float() * x.float(), rows, units, groups, 3))


def test_skipping_a_rounding_point_would_show():
    """h (1 + scale) + shift = (1 + 2^-7) (1 + 2^-7) + 2^-8, a tie once 2^-14 is rounded away."""
    h, scale = torch.tensor([1.0078125], dtype=BF16), torch.tensor([2.0**-7], dtype=BF16)
    shift = torch.tensor([2.0**-8], dtype=BF16)
    fused = (h.float() * (1 + scale.float()) + shift.float()).to(BF16)
    found = modulate_forward(*(t[None] for t in (h, shift, scale)), torch.zeros(1).long())
    assert found.item() == 1.015625
    assert fused.item() == 1.0234375


@given(st.integers(0, 10**6), st.integers(1, 70))
def test_rows_are_independent(seed, num_rows):
    rows = [special(seed + i, num_rows, 19) for i in range(2)]
    groups = torch.randint(4, (num_rows,), generator=torch.Generator().manual_seed(seed))
    shift, scale, w = special(seed + 2, 4, 19), special(seed + 3, 4, 19), normal(4, 19)

    def modulate(h, _, rows):
        return modulate_forward(h, shift, scale, rows)

    def modulated_norm(da, x, rows):
        r = rms_norm_forward(x, w, 1e-5)[1]
        place = fold_place(len(x))
        return modulated_norm_backward(da, x, w, r, scale, rows, *place)[0]

    def residual(x, y, rows):
        dy = gated_residual_backward(x, scale, y, rows, *fold_place(len(x)))[0]
        return gated_residual_forward(x, scale, y, rows), dy

    for function in (modulate, modulated_norm, residual):
        # Poisoned neighbours may have any table row, so theirs stay in range by the remainder.
        def call(a, b, groups, function=function):
            return function(a, b, groups.to(torch.int64) % 4)

        assert_row_invariant(call, [*rows, groups.float()], seed)


@given(st.integers(0, 10**6), st.integers(1, 40))
def test_timesteps_are_independent(seed, num_timesteps):
    temb, ds = special(seed, num_timesteps, 13, dtype=F32), special(seed + 1, num_timesteps, 13)
    assert_row_invariant(lambda temb: adaln_input_forward(temb, BF16), [temb], seed)
    assert_row_invariant(adaln_input_backward, [ds, temb], seed)


def test_silu_runs_in_fp32_on_the_fp32_embedding_and_is_rounded_once():
    temb = normal(0, 3, 500, dtype=F32, scale=3)
    s = adaln_input_forward(temb, BF16)
    assert_same_bytes(s, tensor(round_bf16(f32(silu(temb))), BF16))
    early = adaln_input_forward(temb.to(BF16).float(), BF16)  # rounds the embedding first
    assert not torch.equal(s, early)


def test_gradient_of_the_embedding_is_fp32_and_not_rounded():
    temb, ds = normal(0, 3, 50, dtype=F32), normal(1, 3, 50)
    dtemb = adaln_input_backward(ds, temb)
    assert_same_bytes(dtemb, ds.float() * silu_derivative(temb))
    assert not torch.equal(dtemb, dtemb.to(BF16).float())


@quiet
def chains_of(dm: np.ndarray, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return chain_of(dm[:, :, None] * s[:, None, :]), chain_of(dm)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("num_timesteps", [1, 2, 3, 9])
def test_weight_gradient_is_a_chain_over_timesteps(dtype, num_timesteps):
    dm, s = normal(0, num_timesteps, 6, dtype=dtype), normal(1, num_timesteps, 4, dtype=dtype)
    dw, dbias = timestep_chain_dw(dm, s)
    dw_of, dbias_of = chains_of(f32(dm), f32(s))
    assert_same_bytes(dw, torch.from_numpy(dw_of))
    assert_same_bytes(dbias, torch.from_numpy(dbias_of))


def test_weight_gradient_of_negative_zeros_is_positive_zero():
    dw, dbias = timestep_chain_dw(torch.full((2, 3), -0.0), torch.ones(2, 2))
    assert_same_bytes(dw, torch.zeros(3, 2))
    assert_same_bytes(dbias, torch.zeros(3))


def test_weight_gradient_ascends_over_timesteps():
    dm, s = torch.tensor([[2.0**25], [1.0], [-(2.0**25)]]), torch.ones(3, 1)
    assert timestep_chain_dw(dm, s)[0].item() == 0.0
    assert timestep_chain_dw(dm[[0, 2, 1]], s)[0].item() == 1.0


def test_columns_of_the_weight_gradient_are_rows_of_the_whole():
    dm, s = normal(0, 3, 48), normal(1, 3, 5)
    dw, dbias = timestep_chain_dw(dm, s)
    for a, b in ((0, 6), (6, 42), (42, 48)):
        part, part_bias = timestep_chain_dw(dm[:, a:b].contiguous(), s)
        assert_same_bytes(part, dw[a:b])
        assert_same_bytes(part_bias, dbias[a:b])


def test_rounding_where_the_chain_is_finished_gives_the_rounded_root():
    dm, s = normal(0, 3, 48), normal(1, 3, 5)
    roots = timestep_chain_dw(dm, s)
    for found, root in zip(timestep_chain_product(dm, s, BF16), roots, strict=True):
        assert_same_bytes(found, root.to(BF16))


def test_fp64_ops_equal_autograd_through_norm_and_table():
    """At most 8 products of values below 6 in FP64: error below 8 * 300 * 2^-53 < 3e-13."""
    t, d, e = 10, 7, 5
    x, y, z, dout = (normal(i, t, d, dtype=F64) for i in range(4))
    shapes = ((2, e), (9 * d, e), (9 * d,), (d,))
    temb, w, bias, weight = (normal(9 + i, *shape, dtype=F64) for i, shape in enumerate(shapes))
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 0, 0, 4, 2])
    leaves = [v.clone().requires_grad_() for v in (y, z, temb, w, bias, weight)]
    yg, zg, tembg, wg, biasg, weightg = leaves
    s = tembg * torch.sigmoid(tembg)
    shift, scale, gate = (s @ wg.T + biasg).view(6, 3, d)[rows].unbind(1)
    normed = zg * torch.rsqrt((zg * zg).mean(-1, keepdim=True) + 1e-5) * weightg
    a = normed * (1 + scale) + shift
    out = x + gate * yg
    expected = torch.autograd.grad([a, out], leaves, [dout, dout])

    s = adaln_input_forward(temb, F64)
    shift, scale, gate = (s @ w.T + bias).view(6, 3, d).unbind(1)
    h, r = rms_norm_forward(z, weight, 1e-5)
    close = {"a": (modulate_forward(h, shift, scale, rows), a.detach())}
    close["out"] = gated_residual_forward(x, gate, y, rows), out.detach()
    place = fold_place(t)
    dh, table, dw_norm = modulated_norm_backward(dout, z, weight, r, scale, rows, *place)
    dz = rms_norm_backward(dh, z, weight, r)
    dy, dgate = gated_residual_backward(dout, gate, y, rows, *place)
    dm = torch.cat((table[0], dgate[0][:, None]), 1).view(2, -1)
    dw, dbias = timestep_chain_dw(dm, s)
    dtemb = adaln_input_backward(dm @ w, temb)
    names = ("dy", "dz", "dtemb", "dw", "dbias", "dw of the norm")
    found = (dy, dz, dtemb, dw, dbias, dw_norm[0])
    close |= dict(zip(names, zip(found, expected, strict=True), strict=True))
    for name, (value, want) in close.items():
        assert value.dtype == F64
        assert (value - want).abs().max() < 3e-12, name


@pytest.mark.parametrize(
    "call,reason",
    [
        (
            lambda a, b: modulate_forward(a, a, b, one_each(2)),
            "dtype of scale: received torch.float32; .* as h",
        ),
        (
            lambda a, b: gated_residual_forward(a, b, a, one_each(2)),
            "dtype of gate: received torch.float32",
        ),
        (
            lambda a, b: gated_residual_backward(a, a, b, one_each(2), *fold_place(2)),
            "dtype of y: received torch.float32",
        ),
        (
            lambda a, b: modulate_forward(*[a.half()] * 3, one_each(2)),
            "dtype of h: received torch.float16; acc",
        ),
        (
            lambda a, b: modulate_forward(a, a, a, one_each(2) + 1),
            "table row: received 2; accepted: 0 to 1",
        ),
        (
            lambda a, b: gated_residual_forward(a, a, a, one_each(2) - 1),
            "table row: received -1; accepted: 0 to 1",
        ),
        (lambda a, b: modulate_forward(a, a, a, one_each(3)), "shape of table_rows"),
        (lambda a, b: timestep_chain_dw(a, b), "dtype of s: received torch.float32; .* as dm"),
        (
            lambda a, b: timestep_chain_dw(a, a[:1]),
            r"shape of s: received \(1, 3\); accepted: \(2, any\)",
        ),
    ],
)
def test_operands_that_do_not_fit_are_refused(call, reason):
    with pytest.raises(OperandError, match=reason):
        call(torch.zeros(2, 3, dtype=BF16), torch.zeros(2, 3))
