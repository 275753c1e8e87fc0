"""The command line: `h3lib run`, `generate`, `checkpoint`, `sweep`, `explain`, `doctor`, ..."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path

from h3lib.bench.command import add_bench, check_options, measure
from h3lib.contract import (
    SIZES,
    BackendError,
    CheckpointError,
    H3Error,
    ReportError,
    model_size,
)
from h3lib.doctor import PROBLEM, examine, verdicts
from h3lib.explain import explain
from h3lib.files import write_json
from h3lib.folders import convert, folder_size, inspect_folder, problems, synthesise
from h3lib.model.released import FILE_STEM
from h3lib.parallel.launch import LAUNCHERS
from h3lib.rank import DIFFERENT, EQUAL, FAILED, REFUSED
from h3lib.report import read_report
from h3lib.request import DEVICES, Request, require_cuda
from h3lib.run import run

INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="h3lib", description="Bitwise parallelism for MiniMax-H3."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands)
    _add_generate(commands)
    layouts = commands.add_parser(
        "layouts", help="list the layouts that this machine can run, and why not the rest"
    )
    layouts.set_defaults(main=_layouts)
    explain = commands.add_parser(
        "explain", help="per op: the kernel of each back end on this machine, its order, and why"
    )
    explain.add_argument("--op", help="one op in full, e.g. linear_forward")
    explain.set_defaults(main=_explain)
    doctor = commands.add_parser(
        "doctor", help="examine this machine; exit status 1 if something would break a run"
    )
    doctor.add_argument("--out", type=Path, metavar="FILE.json", help="all of it, as JSON")
    doctor.set_defaults(main=_doctor)
    _add_sweep(commands)
    verify = commands.add_parser("verify", help="check reports; refuse incomplete ones")
    verify.add_argument("files", nargs="+", metavar="FILE.json")
    verify.set_defaults(main=_verify)
    _add_checkpoint(commands)
    bench = add_bench(commands)
    bench.add_argument("--out", required=True, type=Path, metavar="FILE.json")
    bench.set_defaults(main=_bench)
    _add_faults(commands)
    options = parser.parse_args(arguments)
    try:
        sys.exit(options.main(options))
    except KeyboardInterrupt:
        print("h3lib: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception:  # Python's own status for this is 1, which says that some bytes differ
        traceback.print_exc()
        sys.exit(FAILED)


def _add_run(commands) -> None:
    parser = commands.add_parser(
        "run",
        help="run a block or the model in a layout, compare every rank with one process alone",
        description="Exit status: 0 all bytes equal, 1 some differ, 2 unsupported or invalid "
        "request, 3 a rank failed or timed out, 130 interrupted.",
    )
    _add_request(parser, blocks="1")
    parser.add_argument(
        "--recompute",
        action="store_true",
        help="save the inputs of the blocks alone, compute each again in the backward",
    )
    parser.set_defaults(main=_run)


def _add_generate(commands) -> None:
    parser = commands.add_parser(
        "generate",
        help="run a generation in a layout, compare every step on every rank, and its replay",
        description="Every velocity and latent of the rollout, and of each step replayed as "
        "training computes it, against one process alone. Exit status as of `run`.",
    )
    _add_request(parser, blocks="all")
    parser.add_argument(
        "--points", type=int, default=5, metavar="N", help="grid points; N - 1 steps (default 5)"
    )
    parser.set_defaults(main=_run)


def _explain(options: argparse.Namespace) -> int:
    try:
        for line in explain(options.op):
            print(line)
    except BackendError as error:
        print(f"h3lib: {error}", file=sys.stderr)
        return REFUSED
    return EQUAL


def _add_checkpoint(commands) -> None:
    parser = commands.add_parser(
        "checkpoint", help="inspect, write or convert a released checkpoint folder"
    )
    actions = parser.add_subparsers(dest="action", required=True)
    inspect = actions.add_parser("inspect", help="what a folder holds, or what is wrong")
    inspect.add_argument("folder")
    inspect.add_argument("--digests", action="store_true", help="SHA-256 of each parameter")
    synth = actions.add_parser("synth", help="write synthetic values as a released folder")
    synth.add_argument("folder")
    synth.add_argument("--seed", type=int, default=0)
    convert = actions.add_parser("convert", help="write a folder again in another key layout")
    convert.add_argument("source")
    convert.add_argument("folder")
    for action in (inspect, synth, convert):
        named = {"required": True} if action is synth else {"help": "instead of config.json's"}
        action.add_argument("--size", choices=tuple(SIZES), **named)
    for action in (synth, convert):
        action.add_argument("--key-layout", choices=tuple(FILE_STEM), required=True)
        action.add_argument("--max-shard-bytes", type=int, default=5 * 10**9, metavar="N")
    parser.set_defaults(main=_checkpoint)


def _checkpoint(options: argparse.Namespace) -> int:
    try:
        if options.action == "synth":
            size = model_size(options.size)
            given = (options.seed, options.key_layout, options.max_shard_bytes)
            synthesise(options.folder, size, *given)
        elif options.action == "convert":
            size = folder_size(options.source, options.size)
            given = (size, options.key_layout, options.max_shard_bytes)
            convert(options.source, options.folder, *given)
        else:
            size = folder_size(options.folder, options.size)
            for line in inspect_folder(options.folder, size, options.digests):
                print(line)
    except CheckpointError as error:
        for problem in problems(error):
            print(f"h3lib: {problem}", file=sys.stderr)
        return REFUSED
    return EQUAL


def _add_request(parser: argparse.ArgumentParser, blocks: str) -> None:
    """What a run in a layout is asked for."""
    parser.add_argument("--layout", required=True, help="e.g. tp4-cp2-sp or tp8-local4")
    parser.add_argument("--size", default="tiny", help=", ".join(SIZES))
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--rows", type=int, help="a packed job of this many rows")
    what.add_argument("--job", help="WIDTHxHEIGHTxFRAMES, e.g. 832x480x124")
    parser.add_argument("--device", default="cpu", help=", ".join(DEVICES))
    parser.add_argument(
        "--weights", default="synthetic", help="synthetic[:SEED] or a released checkpoint folder"
    )
    parser.add_argument(
        "--blocks",
        default=blocks,
        metavar="N",
        help="whole model with its first N blocks, or all; `run --blocks 1`: block 0 alone",
    )
    parser.add_argument(
        "--local-size",
        type=int,
        help="ranks of a node, to exercise the hierarchy inside one machine",
    )
    parser.add_argument("--timeout", type=float, default=600.0, dest="timeout_s", metavar="S")
    parser.add_argument(
        "--backend", default="eager", help="eager, the contract's order in plain PyTorch; or triton"
    )
    parser.add_argument(
        "--canonical",
        metavar="FOLDER",
        help="keep the canonical values there, and take them from there if an earlier run of the "
        "same commit, inputs, device and software left them (the report says which)",
    )
    parser.add_argument(
        "--transport",
        help="peer, kernels that read the other ranks' memory (default on cuda); or gloo",
    )
    rows = "rows of a product that are summed at a time, beside the next ones' product"
    parser.add_argument("--chunk-rows", type=int, metavar="N", help=rows)
    parser.add_argument(
        "--launcher",
        default="local",
        help=f"{' or '.join(LAUNCHERS)}: ranks on this machine, or on the nodes of this Slurm job",
    )
    parser.add_argument("--out", required=True, metavar="FILE.json")


def _add_faults(commands) -> None:
    parser = commands.add_parser(
        "faults",
        help="break collectives on purpose; 0 if every survivor raised the right error in time",
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", default="cpu", choices=DEVICES)
    parser.add_argument(
        "--jobs",
        type=int,
        default=0,
        metavar="N",
        help="injections at a time; as many as the processors carry if left out",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.json")
    parser.set_defaults(main=_faults)


def _faults(options: argparse.Namespace) -> int:
    from h3lib.faults.injection import run_faults

    if not _writable(options.out):
        return REFUSED
    try:
        if options.device == "cuda":
            require_cuda()
        return run_faults(
            options.count, options.seed, options.out, options.device, options.ranks, options.jobs
        )
    except H3Error as error:
        print(f"h3lib: {error}", file=sys.stderr)
        return REFUSED


def _add_sweep(commands) -> None:
    parser = commands.add_parser(
        "sweep",
        help="run a grid of layouts, rows and seeds, each cell an executed notebook",
        description="Cells that are finished are skipped: same notebook, parameters, package and "
        "environment. Exit status: 0 all equal, 1 some differ, else 3 some failed, else 2 some "
        "unsupported, 130 interrupted.",
    )
    parser.add_argument("file", type=Path, metavar="FILE.yaml", help="e.g. env/slurm/grid.yaml")
    parser.add_argument("--cell", type=int, help="only this cell, counted from 0: a job array")
    parser.add_argument("--jobs", type=int, help="at most so many cells at once")
    parser.add_argument("--count", action="store_true", help="print the number of cells and end")
    parser.set_defaults(main=_sweep)


def _run(options: argparse.Namespace) -> int:
    fields = dict(vars(options))
    launcher = [fields.pop(key) for key in ("command", "main", "launcher")][-1]
    return run(Request(**fields), launcher)


def _bench(options: argparse.Namespace) -> int:
    if not _writable(options.out):
        return REFUSED
    try:
        check_options(options)
        require_cuda()
        return EQUAL if measure(options) else DIFFERENT
    except H3Error as error:
        print(f"h3lib: {error}", file=sys.stderr)
        return REFUSED


def _verify(options: argparse.Namespace) -> int:
    status = EQUAL
    for path in options.files:
        try:
            report = read_report(path)
        except ReportError as error:
            print(f"{path}: refused: {error}")
            status = REFUSED
        else:
            verdict = "equal" if report["equal"] else "DIFFERENT"
            print(f"{path}: complete, {verdict}, {report['layout']}, {report['rows']} rows")
            status = status or (EQUAL if report["equal"] else 1)
    return status


def _layouts(options: argparse.Namespace) -> int:
    print(f"{'layout':<20}{'ranks':>6}  cpu                            cuda")
    for verdict in verdicts():
        print(f"{verdict.layout:<20}{verdict.ranks:>6}  {verdict.cpu:<30} {verdict.cuda}")
    return EQUAL


def _writable(path: Path) -> bool:
    """Whether a file can be written there; asked before the work, not after it."""
    place = path.parent
    fine = place.is_dir() and os.access(place, os.W_OK) and not path.is_dir()
    if not fine:
        accepted = "a file name in a folder that can be written"
        print(f"h3lib: output file: received {str(path)!r}; accepted: {accepted}", file=sys.stderr)
    return fine


def _doctor(options: argparse.Namespace) -> int:
    if options.out and not _writable(options.out):
        return REFUSED
    found = examine()
    if options.out:
        write_json(options.out, found)
    for check in found["checks"]:
        why = f"  ({check['why']})" if check["why"] else ""
        print(f"{check['verdict']:<9}{check['name']:<22}{check['found']}{why}")
    layouts = found["layouts"]
    cpu, cuda = (sum(verdict[kind].startswith("yes") for verdict in layouts) for kind in DEVICES)
    print(f"layouts: of {len(layouts)}, {cpu} run on the CPU, {cuda} on GPUs; see h3lib layouts")
    print(f"environment {found['digest']}")
    return int(any(check["verdict"] == PROBLEM for check in found["checks"]))


def _sweep(options: argparse.Namespace) -> int:
    from h3lib.sweep import sweep  # needs papermill and rich, which run does not

    return sweep(options.file, options.cell, options.jobs, options.count)


if __name__ == "__main__":
    main()
