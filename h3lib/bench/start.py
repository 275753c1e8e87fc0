"""The ranks of a benchmark, started on this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path

from h3lib.contract import PeerError
from h3lib.parallel.launch import run_ranks


def start_ranks(module: str, arguments: list[str], ranks: int, timeout_s: float = 1200.0) -> str:
    """A benchmark on `ranks` ranks of this machine; what they say is shown as they say it, and
    returned.

    **Raises:** PeerError if a rank fails.
    """
    with tempfile.TemporaryDirectory(prefix="h3lib-bench-") as folder:
        log, shown = Path(folder, "log"), 0

        def tick() -> None:
            nonlocal shown
            text = log.read_text(errors="replace")
            print(text[shown:], end="", flush=True)
            shown = len(text)

        variables = {"NCCL_NVLS_ENABLE": "0"}
        status = run_ranks(module, arguments, ranks, timeout_s, log, tick, variables)
        tick()
        if status:
            tail = log.read_text(errors="replace")[-3000:]
            raise PeerError("ranks of the benchmark", f"exit status {status}: {tail}", "0")
        return log.read_text(errors="replace")
