"""Bits of the attention kernels on one GPU: `python -m h3lib.bench.attention_bits --out FILE`.

    attention_invariance   slices, heads, neighbours, tiles, repeats, strides: bytes of the whole
    attention_probes       the order of additions, special values, the error against FP64

A check that raises is a finding that failed; `complete` is written last.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from h3lib.bench import attention_invariance as invariance
from h3lib.bench import attention_probes as probes
from h3lib.bench.attention_invariance import draw
from h3lib.bench.findings import Check, write_findings

ROWS = (1, 7, 63, 64, 65, 127, 128, 129, 264, 1097, 4097)
LARGE_ROWS = (14910, 37776)


def checks() -> dict[str, Check]:
    """Every check by its name."""
    named = {}
    for rows in ROWS:
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
    for rows in LARGE_ROWS:
        named[f"slices {rows}"] = partial(invariance.check_slices, rows, 9, (8,))
        named[f"tiles {rows}"] = partial(invariance.check_tiles, rows, 9)
        named[f"accuracy {rows}"] = partial(probes.check_accuracy, rows, 1)
    return named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="unknown", help="commit that is checked")
    parser.add_argument(
        "--digest", type=int, nargs=2, help="print the digest of this T and N, no more"
    )
    args = parser.parse_args()
    if args.digest:
        print(draw(*args.digest).digest())
        return
    write_findings(checks(), args.commit, args.out)


if __name__ == "__main__":
    main()
