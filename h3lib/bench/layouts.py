"""The untraced block in layouts whose ranks own a GPU each: `h3lib bench layouts --out FILE.json`.

    ours      Block over the peer tree, back end `triton`, calls checked at the end of a round
    theirs    diffusers' block under plain TP, SP or CP over NCCL (`bench/plain.py`), eager, and at
              `COMPILED_ROWS` under torch.compile; autograd, the same weights and rows
    price     ours / theirs, medians of interleaved rounds in one run, the slowest rank's

The bytes of what is timed are compared with one process alone. Where ranks would share a GPU
nothing is timed: the rows say "not run". Memory does not depend on sharing, and is there for all:
first of one rank of each layout without its peers, side by side, which also compiles the kernels.
Layouts then run side by side too, as far as each rank finds a GPU of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from h3lib.contract import PUBLISHED, PeerError
from h3lib.files import write_json
from h3lib.layout import Layout
from h3lib.ops.backend import load_backend
from h3lib.parallel.launch import die_with_launcher, run_ranks, watch
from h3lib.provenance import gpu_environment

LAYOUTS = (
    "tp1", "tp2", "tp2-sp", "cp2", "tp4", "tp4-sp", "tp2-cp2", "tp2-cp2-sp", "cp4", "tp8", "tp8-sp",
    "tp4-cp2", "tp4-cp2-sp", "cp8",
)  # fmt: skip
ROWS = (14910, 37776, 4096, 264)  # in this order: the few rows' graphs come last
COMPILED_ROWS = (14910,)
NOT_RUN, NO_TIME = "not run: ranks share a GPU", "not run: no time was left"
TIMEOUT_S = 150.0
ALONE_ON_A_GPU = 8  # ranks whose memory is measured at once: 10 GB each at 37,776 rows
LISTS = ("measurements", "memory", "bits", "agreement")
Found = dict[str, list[dict]]


class Gpus:
    """The GPUs of this machine; whoever takes some has them alone."""

    def __init__(self, count: int):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else map(str, range(count))
        self.count, self.free, self.changed = count, list(names)[:count], threading.Condition()

    @contextmanager
    def take(self, number: int) -> Iterator[dict[str, str]]:
        """The environment of a process that sees so many GPUs, and no other process does."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.free) >= number)
            taken = [self.free.pop(0) for _ in range(number)]
        try:
            yield {"CUDA_VISIBLE_DEVICES": ",".join(taken)}
        finally:
            with self.changed:
                self.free += taken
                self.changed.notify_all()


def bench_layouts(
    out: Path,
    layouts: Sequence[str] = LAYOUTS,
    rows: Sequence[int] = ROWS,
    seconds: float = math.inf,
) -> None:
    """Measure memory of every layout, time those that fit the GPUs; write `out` after each.

    No layout begins after `seconds`. **Raises:** PeerError if ranks fail, after the other layouts;
    LayoutError for a name.
    """
    load_backend("triton", "cuda")
    deadline = time.monotonic() + seconds
    gpus, parsed = Gpus(torch.cuda.device_count()), [Layout.parse(name) for name in layouts]
    found: Found = {name: [] for name in LISTS}
    failures: dict[str, str] = {}
    header, writing = _header(gpus.count, rows), threading.Lock()

    def add(name: str, lines: Found, failure: str | None) -> None:
        with writing:
            for key, more in lines.items():
                found[key] += more
            if failure:
                failures[name] = failure
            write(complete=False)

    def write(complete: bool) -> None:
        content = header | found | {"failures": failures, "complete": complete}
        write_json(out, content)

    _side_by_side(
        parsed,
        lambda layout, i: add(f"{layout.name} alone", *_alone(layout, rows, i)),
        ALONE_ON_A_GPU * gpus.count,
    )
    for layout in parsed:
        if layout.num_ranks > gpus.count:
            add(layout.name, _not_run(layout, rows, NOT_RUN), None)

    def run(layout: Layout, _: int) -> None:
        with gpus.take(layout.num_ranks) as seen:
            if time.monotonic() > deadline:
                add(layout.name, _not_run(layout, rows, NO_TIME), None)
            else:
                add(layout.name, *_timed(layout, rows, seen))

    fit = [layout for layout in parsed if layout.num_ranks <= gpus.count]
    _side_by_side([layout for layout in fit if layout.num_ranks < gpus.count], run)
    _side_by_side([layout for layout in fit if layout.num_ranks == gpus.count], run)
    write(complete=not failures)
    if failures:
        raise PeerError("layouts", failures, "ranks that end")


def _side_by_side(
    layouts: Sequence[Layout], run: Callable[[Layout, int], None], at_once: int = len(LAYOUTS)
) -> None:
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, layouts, range(len(layouts))))


def _header(gpus: int, rows: Sequence[int]) -> dict[str, object]:
    from h3lib.bench.layout_case import PROTOCOL
    from h3lib.parallel.peer import CAPACITY_BYTES

    return {
        "environment": gpu_environment(),
        "contract": PUBLISHED.id,
        "size": "full",
        "gpus": gpus,
        "rows": sorted(rows),
        "nvls": "off",
        "capacity_bytes": CAPACITY_BYTES,
        "protocol": asdict(PROTOCOL),
    }


def _not_run(layout: Layout, rows: Sequence[int], why: str) -> Found:
    line = {"layout": layout.name, "ranks": layout.num_ranks, "status": why}
    return {"measurements": [line | {"rows": count} for count in sorted(rows)]}


def _timed(
    layout: Layout, rows: Sequence[int], seen: dict[str, str]
) -> tuple[Found, str | None]:
    """What the ranks of one layout found, as far as they came, and why not farther."""

    def run(folder: Path, arguments: list[str], log: Path) -> int:
        module = "h3lib.bench.layouts"
        return run_ranks(module, arguments, layout.num_ranks, TIMEOUT_S, log, lambda: None, seen)

    return _in_folder(layout, rows, run)


def _alone(layout: Layout, rows: Sequence[int], index: int) -> tuple[Found, str | None]:
    """Memory of one rank of the layout, on a GPU that others may use at the same time."""
    count = torch.cuda.device_count()
    device = str(index % count)
    compiled = [str(r) for r in rows if r in COMPILED_ROWS and layout.num_ranks <= count]

    def run(folder: Path, arguments: list[str], log: Path) -> int:
        command = [sys.executable, "-m", "h3lib.bench.layout_alone", "--device", device]
        command += ["--compiled", *compiled, "--", *arguments]
        settings = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        return watch(command, settings, TIMEOUT_S, log, lambda: None)

    return _in_folder(layout, rows, run)


def _in_folder(
    layout: Layout, rows: Sequence[int], run: Callable[[Path, list[str], Path], int]
) -> tuple[Found, str | None]:
    with tempfile.TemporaryDirectory(prefix="h3lib-bench-") as name:
        folder, failure = Path(name), None
        log, file = folder / "log", folder / "found.json"
        try:
            status = run(folder, [layout.name, str(file), *map(str, rows)], log)
            if status:
                failure = f"exit status {status}: {log.read_text(errors='replace')[-3000:]}"
        except PeerError as error:
            failure = f"{error}: {log.read_text(errors='replace')[-3000:]}"
        return json.loads(file.read_text()) if file.exists() else {}, failure


def rank_main(layout: Layout, out: Path, rows: Sequence[int]) -> None:
    """A rank: measure; rank 0 writes what was found so far after each line."""
    from h3lib.bench.layout_case import Case
    from h3lib.bench.layout_ranks import RankWorld

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    found: Found = {name: [] for name in LISTS}
    world = RankWorld(layout)
    for count in rows:
        case = Case(world, count)
        for name, line in case.measure(compiled=count in COMPILED_ROWS):
            found[name].append(line)
            if world.rank == 0:
                write_json(out, found)
        del case
        torch.cuda.empty_cache()
    world.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layout", type=Layout.parse)
    parser.add_argument("out", type=Path)
    parser.add_argument("rows", type=int, nargs="+")
    options = parser.parse_args()
    die_with_launcher()
    rank_main(options.layout, options.out, options.rows)


if __name__ == "__main__":
    main()
