"""`h3lib bench`: what is measured beside the libraries, and with which options.

A benchmark is imported when it is run: most need Triton, which the other commands do not.
"""

from __future__ import annotations

import argparse
import importlib

KINDS = ("kernels", "bits", "collectives", "layouts", "overlap", "interference")


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
    parser.add_argument("--seconds", type=float, default=float("inf"), help="none begins later")
    return parser


def measure(options: argparse.Namespace) -> bool:
    """Run what was asked for and write `options.out`; False if bits differ that must not.

    **Raises:** H3Error for options that cannot be, PeerError if a rank fails.
    """
    module = importlib.import_module(f"h3lib.bench.{options.what}")
    given = {}
    if options.what == "layouts":
        given["layouts"] = options.layouts or module.LAYOUTS
        given["rows"] = options.rows or module.ROWS
        given["seconds"] = options.seconds
    elif options.what == "kernels":
        given["parts"] = options.parts or module.DEFAULT
    return getattr(module, f"bench_{options.what}")(options.out, **given) is not False
