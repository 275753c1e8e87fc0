"""Bits of every kernel on one GPU: `h3lib bench bits --out FILE.json`.

    gemm        `gemm_bits` (references, slices, roots, tiles) and `gemm_probes` (orders, values)
    attention   `attention_invariance` and `attention_probes`
    rowwise     `rowwise_bits`

A finding a comparison, with its part; `tests/ops/hopper` asserts the same ones. Several checks run
at a time, since most of the time goes into compiling.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from h3lib.bench import attention_invariance, attention_probes, gemm_bits, gemm_probes, rowwise_bits
from h3lib.bench.findings import Check, run_checks
from h3lib.files import write_json
from h3lib.ops.backend import load_backend
from h3lib.provenance import gpu_environment

ATTENTION_ROWS = (1, 7, 63, 64, 65, 127, 128, 129, 264, 1097, 4097)
ATTENTION_LARGE_ROWS = (14910, 37776)


def gemm_checks() -> dict[str, Check]:
    return {check.__name__[6:]: check for check in (*gemm_bits.CHECKS, *gemm_probes.PROBES)}


def attention_checks() -> dict[str, Check]:
    invariance, probes = attention_invariance, attention_probes
    named = {}
    for rows in ATTENTION_ROWS:
        named[f"slices {rows}"] = partial(invariance.check_slices, rows, 3)
        named[f"tiles {rows}"] = partial(invariance.check_tiles, rows, 3)
        if rows > 1:
            named[f"neighbours {rows}"] = partial(invariance.check_neighbours, rows, 3)
        named[f"accuracy {rows}"] = partial(probes.check_accuracy, rows, 2)
    named["division"] = probes.check_division
    named["order"] = probes.check_order
    named["values"] = probes.check_values
    named["repeats"] = partial(invariance.check_repeats, 1097, 8)
    named["strides"] = invariance.check_strides
    named["second process"] = partial(invariance.check_second_process, 1097, 3)
    for rows in ATTENTION_LARGE_ROWS:
        named[f"slices {rows}"] = partial(invariance.check_slices, rows, 9, (8,))
        named[f"tiles {rows}"] = partial(invariance.check_tiles, rows, 9)
        named[f"accuracy {rows}"] = partial(probes.check_accuracy, rows, 1)
    return named


PARTS: dict[str, dict[str, Check]] = {
    "gemm": gemm_checks(),
    "attention": attention_checks(),
    "rowwise": rowwise_bits.CHECKS,
}


def run_check(part: str, name: str) -> list[dict[str, object]]:
    """Findings of one check."""
    torch.manual_seed(0)
    results = run_checks({name: PARTS[part][name]})
    return [{"part": part} | asdict(finding) | {"passed": finding.passed} for finding in results]


def bench_bits(out: Path, jobs: int = 4) -> bool:
    """Run every check, `jobs` at a time, and write `out`; whether all passed.

    **Raises:** BackendError for a GPU or Triton that the kernels were not tested on.
    """
    load_backend("triton", "cuda")
    plan = [(part, name) for part, checks in PARTS.items() for name in checks]
    parts, names = zip(*plan, strict=True)
    context = multiprocessing.get_context("spawn")
    findings = []
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for (part, name), results in zip(plan, pool.map(run_check, parts, names), strict=True):
            failed = [finding for finding in results if not finding["passed"]]
            print(f"{part}, {name}: {len(results)} findings, {len(failed)} failed", *failed[:3])
            findings += results
    passed = all(finding["passed"] for finding in findings)
    content = {"environment": gpu_environment(), "findings": findings, "passed": passed}
    write_json(out, content | {"complete": True})
    return passed
