"""Bits of the row-wise kernels on one GPU; `h3lib.bench.bits` runs every check.

slices   any rows alone, rows permuted, a TP rank's columns: the bytes of the whole
eager    modulation, residual and rotary give the eager op's bytes; norm and swiglu, whose sum
         and exp are the kernel's own, are within one rounding of FP64
folds    backward passes with row folds: the eager ops' bytes for every rank's row units, runs of
         table rows and rows that change every time; another order of rows must differ
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import h3lib.ops.hopper  # noqa: F401  registers back end triton
from h3lib.bench.findings import Check, Finding
from h3lib.contract import RowUnits
from h3lib.ops import adaln, norm, rope, swiglu

ROWS = (1, 7, 64, 129, 1097)
FOLD_ROWS = (1, 264, 4097, 14910)
D, N = 5376, 56
ALL = slice(None)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)


def operands(name: str, rows: int) -> tuple[Tensor, ...]:
    """What has a row for each row."""
    if name.startswith("rotary"):
        return draw(rows, N, 128), draw(rows, 48, seed=1), draw(rows, 48, seed=2)
    count = {"modulate_forward": 1, "swiglu_backward": 3}.get(name, 2)
    given = tuple(draw(rows, D, seed=i) for i in range(count))
    return (*given, table_rows(rows)) if name in WITH_TABLE else given


def table_rows(rows: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(rows)
    return torch.randint(6, (rows,), device="cuda", generator=generator)


def modulate_forward(h: Tensor, rows: Tensor, columns: slice = ALL, **backend: str) -> Tensor:
    table = draw(6, 6, D)[..., columns].to(h.device)
    return adaln.modulate_forward(h, table[:, 0], table[:, 1], rows, **backend)


def gated_residual_forward(
    x: Tensor, y: Tensor, rows: Tensor, columns: slice = ALL, **backend: str
) -> Tensor:
    table = draw(6, 6, D)[..., columns].to(x.device)
    return adaln.gated_residual_forward(x, table[:, 2], y, rows, **backend)


OPS: dict[str, Callable] = {
    "modulate_forward": modulate_forward,
    "gated_residual_forward": gated_residual_forward,
    "rotary_forward": rope.rotary_forward,
    "rotary_backward": rope.rotary_backward,
    "swiglu_forward": swiglu.swiglu_forward,
    "swiglu_backward": swiglu.swiglu_backward,
}
WITH_TABLE = tuple(OPS)[:2]
SAME_AS_EAGER = tuple(OPS)[:4]


def _tuple(x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def norm_both(x: Tensor, w: Tensor, dy: Tensor, **backend: str) -> tuple[Tensor, ...]:
    y, r = norm.rms_norm_forward(x, w, 1e-5, **backend)
    dx = norm.rms_norm_backward(dy, x, w, r, **backend)
    return y, r, dx, norm.rms_norm_backward(dy, x, w, r, dy, **backend)


def check_slices(name: str) -> Iterator[Finding]:
    op = OPS[name]
    for rows in ROWS:
        x = operands(name, rows)
        whole = _tuple(op(*x, backend="triton"))
        finding = Finding("rows alone", f"{name} T={rows}")
        for part in (slice(0, 1), slice(rows // 3, rows // 2 + 1), slice(rows - 1, rows)):
            alone = _tuple(op(*(t[part] for t in x), backend="triton"))
            for value, all_rows in zip(alone, whole, strict=True):
                finding.compare(value, all_rows[part])
        order = torch.randperm(rows, device="cuda")
        for value, all_rows in zip(
            _tuple(op(*(t[order] for t in x), backend="triton")), whole, strict=True
        ):
            finding.compare(value, all_rows[order])
        yield finding
        if "rotary" not in name:
            finding = Finding("columns alone", f"{name} T={rows}")
            columns = slice(D // 8, D // 2)
            own = (t[:, columns] if t.ndim > 1 else t for t in x)
            given = {"columns": columns} if name in WITH_TABLE else {}
            part = _tuple(op(*own, **given, backend="triton"))
            for value, all_rows in zip(_halves(part, name), _halves(whole, name), strict=True):
                finding.compare(value, all_rows[..., columns])
            yield finding


def _halves(results: tuple[Tensor, ...], name: str) -> tuple[Tensor, ...]:
    """dvalue and dgate lie side by side."""
    return results[0].chunk(2, dim=-1) if name == "swiglu_backward" else results


def fold_results(x: tuple[Tensor, ...], rows: RowUnits, units: range, **backend: str) -> tuple:
    """Everything that the passes with row folds give, for one rank's rows."""
    da, h, r, groups, table, w, dq, k, r_heads = x
    place = (groups, rows, units)
    modulated = adaln.modulated_norm_backward(da, h, w, r, table[:, 1], *place, **backend)
    residual = adaln.gated_residual_backward(da, table[:, 2], h, *place, **backend)
    sequence = range(units.start // 8, units.stop // 8)
    if 8 * len(sequence) != len(units):
        return (*modulated, *residual)
    leaves = norm.head_norm_dw_leaves(dq, k, r_heads, rows, sequence, 8, **backend)
    return (*modulated, *residual, leaves)


WHOLE = (4, 5)  # operands without a row for each row: the table and w


def fold_operands(rows: int, runs: bool) -> list[Tensor]:
    """Full width on the GPU; `runs`: long runs of one table row, as packed jobs have."""
    groups = torch.arange(rows, device="cuda") * 6 // rows if runs else table_rows(rows)
    x, heads = draw(rows, D, seed=1), draw(rows, N, 128, seed=2)
    ones = torch.ones(D, device="cuda", dtype=torch.bfloat16)
    r = norm.rms_norm_forward(x, ones, 1e-5, backend="triton")[1]
    r_heads = norm.rms_norm_forward(heads, ones[:128], 1e-5, backend="triton")[1]
    return [
        draw(rows, D), x, r, groups, draw(6, 6, D), draw(D, seed=3),
        draw(rows, N, 128, seed=4), heads, r_heads,
    ]  # fmt: skip


def check_folds(num_rows: int) -> Iterator[Finding]:
    """Bytes of the eager ops on the same GPU, where each product and sum is one IEEE operation."""
    rows = RowUnits(num_rows)
    for runs in (True, False):
        x = fold_operands(num_rows, runs)
        kind = "runs" if runs else "mixed"
        for units in (range(64), range(0, 16), range(24, 36)):
            own = rows.row_unit_rows(units)
            part = [t if i in WHOLE else t[own.start : own.stop] for i, t in enumerate(x)]
            finding = Finding("eager bytes", f"folds T={num_rows} {kind} units {units}")
            results = fold_results(part, rows, units, backend="triton")
            for value, eager in zip(results, fold_results(part, rows, units), strict=True):
                finding.compare(value, eager)
            yield finding
    expected = "equal" if num_rows == 1 else "different"
    control = Finding("other order of rows", f"folds T={num_rows}", expected=expected)
    whole = fold_results(x, rows, range(64), backend="triton")
    order = torch.arange(num_rows - 1, -1, -1, device="cuda")
    turned = [t if i in WHOLE else t[order] for i, t in enumerate(x)]
    for value, other in zip(
        fold_results(turned, rows, range(64), backend="triton"), whole, strict=True
    ):
        if value.dtype == torch.float32:
            control.compare(value, other)
    yield control


def check_eager() -> Iterator[Finding]:
    for name in SAME_AS_EAGER:
        finding = Finding("eager bytes", name)
        x = operands(name, 129)
        x[0].view(-1)[:3] = torch.tensor([torch.inf, torch.nan, -0.0])
        results = _tuple(OPS[name](*x, backend="triton"))
        for value, eager in zip(results, _tuple(OPS[name](*(t.cpu() for t in x))), strict=True):
            finding.compare(value.cpu(), eager)
        yield finding


def check_norm() -> Iterator[Finding]:
    for rows in ROWS:
        for shape, heads in (((rows, D), 1), ((rows, N, 128), N)):
            x, dy, w = draw(*shape), draw(*shape, seed=1), draw(shape[-1], seed=2)
            whole = norm_both(x, w, dy, backend="triton")
            finding = Finding("rows alone", f"rms_norm T={rows} heads={heads}")
            for part in (slice(0, 1), slice(rows // 3, rows // 2 + 1), slice(rows - 1, rows)):
                alone = norm_both(x[part], w, dy[part], backend="triton")
                for value, all_rows in zip(alone, whole, strict=True):
                    finding.compare(value, all_rows[part])
            yield finding
            yield within_rounding("rms_norm", whole, norm_both(*(t.double() for t in (x, w, dy))))


def check_swiglu() -> Iterator[Finding]:
    x = operands("swiglu_backward", 129)
    for name, arguments in (("swiglu_forward", x[1:]), ("swiglu_backward", x)):
        ours = _tuple(OPS[name](*arguments, backend="triton"))
        exact = _tuple(OPS[name](*(t.double() for t in arguments)))
        yield within_rounding(name, ours, exact)


def within_rounding(name: str, ours: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> Finding:
    """Norm-wise error: two bf16 roundings for bf16 results, 2^-20 for FP32 ones."""
    over, details = 0, {}
    for i, (value, wanted) in enumerate(zip(ours, exact, strict=True)):
        error = ((value.double() - wanted).norm() / wanted.norm()).item()
        bound = 2.0**-8 if value.dtype == torch.bfloat16 else 2.0**-20
        details[f"result {i}"] = error
        over += not error <= bound
    return Finding("error against FP64", name, len(ours), over, details=details)


CHECKS: dict[str, Check] = {
    **{f"slices {name}": lambda name=name: check_slices(name) for name in OPS},
    "eager": check_eager,
    **{f"folds {rows}": lambda rows=rows: check_folds(rows) for rows in FOLD_ROWS},
    "norm": check_norm,
    "swiglu": check_swiglu,
}
