"""`h3lib bench`: what is measured beside the libraries, and with which options.

A benchmark is imported when it is run: most need Triton, which the other commands do not. Those
that need no GPU are modules to be run, with `write_measured` for a command line.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path

from h3lib.contract import H3Error
from h3lib.files import write_json

KINDS = ("kernels", "bits", "collectives", "layouts", "overlap", "interference")
_OPTIONS = {"parts": "kernels", "layouts": "layouts", "rows": "layouts", "seconds": "layouts"}


class BenchError(H3Error, ValueError):
    """An option of a benchmark that it does not have."""


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
    parser.add_argument("--seconds", type=float, help="of layouts; none begins later")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """**Raises:** BenchError for an option that this benchmark would not look at."""
    for name, what in _OPTIONS.items():
        if getattr(options, name) is not None and options.what != what:
            raise BenchError(f"--{name}", options.what, f"with {what} alone")


def measure(options: argparse.Namespace) -> bool:
    """Run what was asked for and write `options.out`; False if bits differ that must not.

    **Raises:** H3Error for options that cannot be, PeerError if a rank fails.
    """
    module = importlib.import_module(f"h3lib.bench.{options.what}")
    given = {}
    if options.what == "layouts":
        given["layouts"] = options.layouts or module.LAYOUTS
        given["rows"] = options.rows or module.ROWS
        given["seconds"] = float("inf") if options.seconds is None else options.seconds
    elif options.what == "kernels":
        given["parts"] = options.parts or module.DEFAULT
    return getattr(module, f"bench_{options.what}")(options.out, **given) is not False


def write_measured(about: str, measure: Callable[..., object], **defaults: object) -> None:
    """Run a module that measures: `--out`, and an option for each argument of `measure`, in order.

    Each has the type of its default, and is given several values if that is a tuple.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    for name, default in defaults.items():
        many = isinstance(default, tuple)
        kind = type(default[0] if many else default)
        parser.add_argument(f"--{name}", type=kind, nargs="+" if many else None, default=default)
    options = parser.parse_args()
    write_json(options.out, measure(*(getattr(options, name) for name in defaults)))
