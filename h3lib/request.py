"""A run request: what `h3lib run` was asked for, checked before any rank starts."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from h3lib.contract import PUBLISHED, H3Error, ModelSize, RowsError, model_size
from h3lib.layout import Layout, Ownership
from h3lib.model.block import BLOCK_PREFIX, block_parameters
from h3lib.model.checkpoint import CheckpointWeights
from h3lib.model.inputs import TIME_EMBEDDER
from h3lib.model.packing import Job, job_for_rows
from h3lib.model.weights import SyntheticWeights, WeightSource
from h3lib.ops.backend import load_backend
from h3lib.parallel.levels import TRANSPORTS

DEVICES = ("cpu", "cuda")
MAX_TIMEOUT_S = 30 * 24 * 3600.0


class RequestError(H3Error, ValueError):
    """A run that this machine or this version cannot do."""


def require_cuda() -> None:
    """**Raises:** RequestError without a CUDA device."""
    if not torch.cuda.is_available():
        raise RequestError("device", "cuda", "cpu: no CUDA device is available here")


@dataclass(frozen=True)
class Request:
    """One block in one layout; exactly one of `rows` and `job` is given."""

    layout: str
    size: str
    out: str
    rows: int | None = None
    job: str | None = None
    device: str = "cpu"
    weights: str = "synthetic"
    blocks: int = 1
    local_size: int | None = None
    timeout_s: float = 600.0
    backend: str = "eager"
    transport: str | None = None

    def check(self) -> None:
        """**Raises:** an H3Error for the first thing that cannot be done."""
        if self.blocks != 1:
            raise RequestError("blocks", self.blocks, "1: this version runs one block")
        if self.device not in DEVICES:
            raise RequestError("device", self.device, ", ".join(DEVICES))
        if self.device == "cuda":
            require_cuda()
        load_backend(self.backend, self.device)
        if self.chosen_transport not in TRANSPORTS:
            raise RequestError("transport", self.transport, ", ".join(TRANSPORTS))
        if self.chosen_transport == "peer" and self.device != "cuda":
            raise RequestError("transport", "peer", f"gloo on device {self.device}")
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            accepted = f"more than 0, at most {MAX_TIMEOUT_S:g}"
            raise RequestError("timeout in seconds", self.timeout_s, accepted)
        self.model_size.check(PUBLISHED, self.device)
        Ownership.of(self.parsed_layout, self.parsed_job.num_rows, PUBLISHED)
        self.source("cpu")

    def remove_old_report(self) -> None:
        """A report of an earlier run goes first: what is there afterwards is of this run.

        **Raises:** RequestError if the place cannot be written.
        """
        folder, path = Path(self.out).parent, Path(self.out)
        if not folder.is_dir() or path.is_dir() or not os.access(folder, os.W_OK):
            raise RequestError(
                "output file", self.out, "a file name in a folder that can be written"
            )
        path.unlink(missing_ok=True)

    @property
    def chosen_transport(self) -> str:
        """What was asked for; by default `peer` between GPUs, `gloo` between CPUs."""
        return self.transport or ("peer" if self.device == "cuda" else "gloo")

    @cached_property
    def parsed_layout(self) -> Layout:
        layout = Layout.parse(self.layout)
        if self.local_size is None:
            return layout
        if layout.local_size not in (None, self.local_size):
            raise RequestError(
                "local size", self.local_size, f"{layout.local_size} as in {self.layout}"
            )
        return Layout(layout.tp, layout.cp, layout.sp, self.local_size)

    @cached_property
    def model_size(self) -> ModelSize:
        return model_size(self.size)

    @cached_property
    def parsed_job(self) -> Job:
        if (self.rows is None) == (self.job is None):
            raise RowsError("rows and job", (self.rows, self.job), "one of the two")
        return Job.parse(self.job) if self.rows is None else job_for_rows(self.rows)

    @cached_property
    def seed(self) -> int:
        """Seed of the synthetic weights and of the rows; 0 for a checkpoint folder."""
        match = re.fullmatch(r"synthetic(?::(\d+))?", self.weights)
        return int(match[1] or 0) if match else 0

    @property
    def is_synthetic(self) -> bool:
        return re.fullmatch(r"synthetic(:\d+)?", self.weights) is not None

    def source(self, device: str) -> WeightSource:
        """Where the weights come from. **Raises:** CheckpointError listing every problem."""
        if self.is_synthetic:
            return SyntheticWeights(self.model_size, self.seed, device)
        if not Path(self.weights).is_dir():
            raise RequestError(
                "weights", self.weights, "synthetic, synthetic:SEED or a checkpoint folder"
            )
        names = [
            *TIME_EMBEDDER,
            *(BLOCK_PREFIX + name for name in block_parameters(self.model_size)),
        ]
        return CheckpointWeights(self.weights, self.model_size, names, device)
