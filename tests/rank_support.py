"""Worlds of real processes for the tests; a test file is also the program of its ranks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import h3lib
from h3lib.parallel.gloo import rank_environment, serve_store


class Ranks:
    """The processes of one world; the store by which they find each other is served from here."""

    def __init__(
        self, program: str, name: str, started: int, size: int, folder: Path, **environment: str
    ):
        self.folder = folder / name
        self.folder.mkdir()
        here, package = Path(__file__), Path(h3lib.__file__)
        self.store = serve_store()
        environment = {
            **os.environ,
            **environment,
            "PYTHONPATH": os.pathsep.join(map(str, (here.parent, package.parents[1]))),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, program, name, str(self.folder)]
        self.processes = [
            subprocess.Popen(
                command,
                env=environment | rank_environment(self.store, rank, size),
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(started)
        ]

    def wait(self, deadline: float) -> tuple[list[int], list]:
        """Exit statuses, and what each rank found (None if it did not say)."""
        for rank, process in enumerate(self.processes):
            try:
                _, errors = process.communicate(timeout=max(1, deadline - time.monotonic()))
            finally:
                process.kill()
            assert process.returncode in (0, -signal.SIGKILL), f"rank {rank}: {errors}"
        files = [self.folder / f"{rank}.pt" for rank in range(len(self.processes))]
        found = [torch.load(f, weights_only=False) if f.exists() else None for f in files]
        return [process.returncode for process in self.processes], found

    def close(self) -> None:
        """End what still runs."""
        for process in self.processes:
            process.kill()
            process.communicate()
