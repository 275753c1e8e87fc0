"""Bits of the row-wise kernels on one GPU: `python -m h3lib.bench.rowwise_bits --out FILE`.

slices   any rows alone, rows permuted, a TP rank's columns: the bytes of the whole
eager    modulation, residual and rotary give the eager op's bytes; norm and swiglu, whose sum
         and exp are the kernel's own, are within one rounding of FP64
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

import h3lib.ops.hopper  # noqa: F401  registers back end triton
from h3lib.bench.attention_invariance import Finding
from h3lib.bench.measure import environment
from h3lib.ops import adaln, norm, rope, swiglu

ROWS = (1, 7, 64, 129, 1097)
D, N = 5376, 56


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)


def operands(name: str, rows: int) -> tuple[Tensor, ...]:
    if name.startswith("rotary"):
        return draw(rows, N, 128), draw(rows, 48, seed=1), draw(rows, 48, seed=2)
    count = {"swiglu_forward": 2}.get(name, 3)
    return tuple(draw(rows, D, seed=i) for i in range(count))


OPS: dict[str, Callable] = {
    "modulate_forward": adaln.modulate_forward,
    "modulate_backward": adaln.modulate_backward,
    "gated_residual_forward": adaln.gated_residual_forward,
    "gated_residual_backward": adaln.gated_residual_backward,
    "rotary_forward": rope.rotary_forward,
    "rotary_backward": rope.rotary_backward,
    "swiglu_forward": swiglu.swiglu_forward,
    "swiglu_backward": swiglu.swiglu_backward,
}
SAME_AS_EAGER = tuple(OPS)[:6]


def _tuple(x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def norm_both(x: Tensor, w: Tensor, dy: Tensor, **backend: str) -> tuple[Tensor, ...]:
    y, r = norm.rms_norm_forward(x, w, 1e-5, **backend)
    return y, r, *norm.rms_norm_backward(dy, x, w, r, **backend)


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
            part = _tuple(op(*(t[:, D // 8 : D // 2] for t in x), backend="triton"))
            for value, all_rows in zip(part, whole, strict=True):
                finding.compare(value, all_rows[..., D // 8 : D // 2])
            yield finding


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


CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    **{f"slices {name}": lambda name=name: check_slices(name) for name in OPS},
    "eager": check_eager,
    "norm": check_norm,
    "swiglu": check_swiglu,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown", help="commit that is checked")
    args = parser.parse_args()
    findings = []
    for check in CHECKS.values():
        for finding in check():
            findings.append(asdict(finding) | {"passed": finding.passed})
            print(findings[-1], flush=True)
    result = {
        "environment": environment() | {"commit": args.commit},
        "findings": findings,
        "passed": all(finding["passed"] for finding in findings),
        "complete": True,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
