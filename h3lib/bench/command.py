"""`h3lib bench`: what is measured beside the libraries, and with which options.

A benchmark is imported when it is run: most need Triton, which the other commands do not.
"""

from __future__ import annotations

import argparse

KINDS = ("kernels", "bits", "collectives", "layouts", "overlap")


def add_bench(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """The subcommand `bench`."""
    parser = commands.add_parser("bench", help="measure beside the libraries, on GPUs")
    parser.add_argument("what", choices=KINDS)
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=("rowwise", "gemm", "attention", "block", "tiles"),
        metavar="PART",
        help="of kernels: rowwise, gemm, attention, block, and tiles, which is left out of all",
    )
    parser.add_argument(
        "--layouts", nargs="+", metavar="LAYOUT", help="of layouts; all if left out"
    )
    parser.add_argument("--rows", nargs="+", type=int, metavar="N", help="of layouts")
    return parser


def measure(options: argparse.Namespace) -> bool:
    """Run what was asked for and write `options.out`; False if bits differ that must not.

    **Raises:** H3Error for options that cannot be, PeerError if a rank fails.
    """
    if options.what == "bits":
        from h3lib.bench.bits import bench_bits

        return bench_bits(options.out)
    if options.what == "collectives":
        from h3lib.bench.collectives import bench_collectives

        bench_collectives(options.out)
    elif options.what == "layouts":
        from h3lib.bench.layouts import LAYOUTS, ROWS, bench_layouts

        bench_layouts(options.out, options.layouts or LAYOUTS, options.rows or ROWS)
    elif options.what == "overlap":
        from h3lib.bench.overlap import bench_overlap

        bench_overlap(options.out)
    else:
        from h3lib.bench.kernels import DEFAULT, bench_kernels

        bench_kernels(options.out, options.parts or DEFAULT)
    return True
