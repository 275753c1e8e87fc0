"""Every kernel and the block beside the libraries: `h3lib bench kernels --out FILE.json`.

One JSON with the rows of `bench/rowwise.py`, `gemm.py`, `attention.py` and `block.py`, or of some
of them (`--parts`); `complete` is true only in the file of a run that came to its end, and `parts`
says of which. Part `tiles`, in a run of its own, times every entry of the directive tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from h3lib.bench.measure import Protocol, Row, report
from h3lib.contract import BackendError
from h3lib.files import write_json
from h3lib.ops.backend import load_backend

DEFAULT = ("rowwise", "gemm", "attention", "block")
"""The cheapest first."""
PARTS = (*DEFAULT, "tiles")


def measure_part(part: str, protocol: Protocol) -> Iterator[tuple[str, Row | dict]]:
    """Every result of a part, each with the list of the JSON that it belongs to."""
    from h3lib.bench import attention, block, gemm, rowwise

    if part == "rowwise":
        for rows in rowwise.ROWS:
            yield from (("measurements", row) for row in rowwise.measure(rows))
    elif part == "gemm":
        yield from (("measurements", row) for row in gemm.measure_all(protocol))
    elif part == "attention":
        for rows in attention.ROWS:
            yield from (("measurements", row) for row in attention.measure(rows, protocol))
    elif part == "tiles":
        yield from (("measurements", row) for row in gemm.measure_tiles(protocol))
        for rows in attention.TILE_ROWS:
            yield from (("attention", row) for row in attention.measure_tiles(rows, protocol))
    else:
        for rows in block.ROWS:
            yield from block.measure(rows, protocol)
            torch.cuda.empty_cache()


def bench_kernels(out: Path, parts: Sequence[str] = DEFAULT) -> None:
    """Measure and write `out`, after every result.

    **Raises:** BackendError for a part that does not exist, and for a GPU or Triton that the
    kernels were not tested on.
    """
    for part in parts:
        if part not in PARTS:
            raise BackendError("part of the benchmark", part, ", ".join(PARTS))
    load_backend("triton", "cuda")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    protocol, rows, others = Protocol(warm_up_ms=100.0), [], {}

    def write(complete: bool) -> None:
        content = report(rows, protocol, complete, parts=list(parts), **others)
        write_json(out, content)

    for part in parts:
        for name, found in tqdm(measure_part(part, protocol), part, unit="row", disable=None):
            kept = rows if name == "measurements" else others.setdefault(name, [])
            kept.append(found if isinstance(found, dict) else asdict(found))
            write(complete=False)
    write(complete=True)
