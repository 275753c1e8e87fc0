"""Every kernel and the block beside the libraries: `h3lib bench kernels --out FILE.json`.

One JSON with the rows of `bench/gemm.py`, `attention.py`, `rowwise.py` and `block.py`, in this
order; `complete` is true only in the file of a run that ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from h3lib.bench.measure import Protocol, Row, report
from h3lib.ops.backend import load_backend
from h3lib.report import git_commit


def measure_all(protocol: Protocol) -> Iterator[Row | dict]:
    """Every measurement, the cheapest first."""
    from h3lib.bench import attention, block, gemm, rowwise

    short = Protocol(round_ms=20.0, warm_up_ms=60.0)
    for rows in rowwise.ROWS:
        graph = rows <= rowwise.GRAPH_MAX_ROWS
        yield from rowwise.measure(rows, short.under_graph() if graph else short)
    yield from gemm.measure_all(protocol)
    for rows in attention.ROWS:
        yield from attention.measure(rows, protocol)
    for rows in block.ROWS:
        yield from block.measure(rows, protocol, compiled=True)


def bench_kernels(out: Path) -> None:
    """Measure and write `out`, after every row.

    **Raises:** BackendError for a GPU or Triton that the kernels were not tested on.
    """
    load_backend("triton", "cuda")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    protocol, rows = Protocol(), []

    def write(complete: bool) -> None:
        content = report(rows, git_commit() or "unknown", protocol, complete)
        out.write_text(json.dumps(content, indent=1) + "\n")

    for row in tqdm(measure_all(protocol), desc="kernels", unit="row", disable=None, delay=2):
        rows.append(row)
        write(complete=False)
    write(complete=True)
