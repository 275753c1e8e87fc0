"""Bits of the peer tree on GPUs: `python -m h3lib.bench.collectives_bits --out FILE`.

Eight ranks (sharing a GPU if there are fewer), worlds of 1 to 8 of them. Every result is compared,
as integers, with a plain evaluation of the tree; a mutant that adds in rank order must differ. One
finding a check and case, summed over the ranks; `tests/parallel/test_peer_gpu.py` asserts them.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from h3lib.bench.collectives_checks import (
    CHECKS,
    HIERARCHIES,
    NUM_RANKS,
    Bench,
    check_hierarchy,
)
from h3lib.bench.findings import Finding, found
from h3lib.bench.overlap_checks import OVERLAP_CHECKS
from h3lib.bench.start import start_ranks
from h3lib.files import write_json
from h3lib.parallel.launch import die_with_launcher
from h3lib.provenance import gpu_environment


def run_checks(
    bench: Bench, sizes: list[int], after: Callable[[str, list[Finding]], None]
) -> None:
    """Every check in every world, `after` each of them; ranks outside a world wait for it."""
    plan = [
        (f"{check.__name__[6:]}, {n} ranks", n, functools.partial(check, bench, n))
        for check in (*CHECKS, *OVERLAP_CHECKS)
        for n in sizes
    ]
    for nodes, local in HIERARCHIES:
        check = functools.partial(check_hierarchy, bench, nodes, local)
        plan.append((f"hierarchy, {nodes} nodes of {local}", nodes * local, check))
    for name, size, check in plan:
        began, findings = time.monotonic(), []
        if bench.rank < size:
            for case, value, expected, equal in check():
                findings.append(found(name, case, value, expected, equal))
        total = merged(bench.world.gather_objects(findings))
        after(f"{name}: {time.monotonic() - began:.1f} s", total)


def merged(ranks: list[list[Finding]]) -> list[Finding]:
    """One finding a check and case: elements and differences of all its ranks together."""
    cases: dict[tuple[str, str], list[Finding]] = {}
    for findings in ranks:
        for finding in findings:
            cases.setdefault((finding.check, finding.case), []).append(finding)
    total = []
    for (check, case), by_rank in cases.items():
        wrong = [f.different for f in by_rank]
        different = -1 if -1 in wrong else sum(wrong)
        elements = sum(f.elements for f in by_rank)
        total.append(Finding(check, case, elements, different, by_rank[0].expected))
    return total


def rank_main(options: argparse.Namespace) -> None:
    """A rank: run the checks; rank 0 writes the report after each of them."""
    die_with_launcher()
    bench, findings = Bench(options.quick), []

    def after(line: str, total: list[Finding]) -> None:
        findings.extend(total)
        if bench.rank == 0:
            wrong = [finding for finding in total if not finding.passed]
            print(line, *wrong[:5], flush=True)
            _write(options, findings, complete=False)

    run_checks(bench, options.ranks, after)
    bench.close()
    if bench.rank == 0:
        _write(options, findings, complete=True)
        print(f"{len(findings)} findings, {sum(not f.passed for f in findings)} failed")


def _write(options: argparse.Namespace, findings: list[Finding], complete: bool) -> None:
    gpus = torch.cuda.device_count()
    content = {
        "environment": gpu_environment(options.commit),
        "gpus": gpus,
        "ranks": NUM_RANKS,
        "ranks_per_gpu": -(-NUM_RANKS // gpus),
        "transports": ["peer inside a node", "gloo between nodes"],
        "findings": [asdict(finding) | {"passed": finding.passed} for finding in findings],
        "passed": all(finding.passed for finding in findings),
        "complete": complete,
    }
    write_json(options.out, content)


def run_bits(out: Path, commit: str | None, quick: bool, ranks: list[int], timeout_s: float) -> str:
    """Start the ranks; what they printed. **Raises:** PeerError if they do not end well."""
    arguments = ["--out", str(out), "--rank", "--ranks", *map(str, ranks)]
    arguments += ["--commit", commit] if commit else []
    arguments += ["--quick"] if quick else []
    return start_ranks("h3lib.bench.collectives_bits", arguments, NUM_RANKS, timeout_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="commit that is tested, if not this checkout's")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(range(1, NUM_RANKS + 1)))
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options)
    else:
        run_bits(options.out, options.commit, options.quick, options.ranks, options.timeout)


if __name__ == "__main__":
    main()
