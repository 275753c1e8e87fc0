"""A run request: what `h3lib run` was asked for, checked before any rank starts."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from h3lib.contract import PUBLISHED, H3Error, ModelSize, RowsError, model_size
from h3lib.layout import Layout, Ownership
from h3lib.model.block import BLOCK_PREFIX, block_parameters
from h3lib.model.checkpoint import CheckpointWeights
from h3lib.model.generation import make_program
from h3lib.model.inputs import TIME_EMBEDDER
from h3lib.model.packing import Job, job_for_rows, pack
from h3lib.model.program import Program
from h3lib.model.weights import SyntheticWeights, WeightSource, parameters
from h3lib.ops.backend import load_backend
from h3lib.parallel.levels import TRANSPORTS
from h3lib.parallel.overlap import Chunks
from h3lib.provenance import git_commit, git_dirty

DEVICES = ("cpu", "cuda")
MAX_TIMEOUT_S = 30 * 24 * 3600.0
_SYNTHETIC = re.compile(r"synthetic(?::([0-9]{1,18}))?")  # a seed that fits into 64 bits


class RequestError(H3Error, ValueError):
    """A run that this machine or this version cannot do."""


def check_place(device: str, timeout_s: float) -> None:
    """**Raises:** RequestError for a device that is not here, or a timeout that cannot be."""
    if device not in DEVICES:
        raise RequestError("device", device, ", ".join(DEVICES))
    if device == "cuda":
        require_cuda()
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        accepted = f"more than 0, at most {MAX_TIMEOUT_S:g}"
        raise RequestError("timeout in seconds", timeout_s, accepted)


def require_cuda() -> None:
    """**Raises:** RequestError without a CUDA device."""
    if not torch.cuda.is_available():
        raise RequestError("device", "cuda", "cpu: no CUDA device is available here")


@dataclass(frozen=True)
class Request:
    """One program in one layout; exactly one of `rows` and `job` is given.

    `blocks` 1 is block 0 alone with its nodes; N more is the whole model with its first N blocks,
    "all" with all of them. `recompute`: save the blocks' inputs alone, in the layout's own run.
    With `points`, a generation of that many grid points by the model with its first N blocks.
    `chunk_rows`: the rows of a row-parallel product that are summed at a time.
    """

    layout: str
    size: str
    out: str
    rows: int | None = None
    job: str | None = None
    device: str = "cpu"
    weights: str = "synthetic"
    blocks: int | str = 1
    recompute: bool = False
    points: int | None = None
    local_size: int | None = None
    timeout_s: float = 600.0
    backend: str = "eager"
    canonical: str | None = None
    transport: str | None = None
    chunk_rows: int | None = None

    def check(self) -> None:
        """**Raises:** an H3Error for the first thing that cannot be done."""
        _ = self.num_blocks
        if self.recompute and (self.num_blocks == 1 or self.points is not None):
            accepted = "with --blocks 2 or more, and not in a generation"
            raise RequestError("recompute", self.recompute, accepted)
        check_place(self.device, self.timeout_s)
        load_backend(self.backend, self.device)
        if self.chosen_transport not in TRANSPORTS:
            raise RequestError("transport", self.transport, ", ".join(TRANSPORTS))
        if self.chosen_transport == "peer" and self.device != "cuda":
            raise RequestError("transport", "peer", f"gloo on device {self.device}")
        if self.chosen_transport == "peer" and importlib.util.find_spec("triton") is None:
            raise RequestError("transport", "peer", "gloo: Triton is not installed")
        _ = Chunks(self.chunk_rows)
        if self.canonical is not None:
            self._check_canonical(Path(self.canonical))
        self.model_size.check(PUBLISHED, self.device)
        Ownership.of(self.parsed_layout, self.parsed_job.num_rows, PUBLISHED)
        self.program("cpu").check_layout(self.parsed_layout)

    def _check_canonical(self, folder: Path) -> None:
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise RequestError("canonical folder", self.canonical, "a folder that can be written")
        if git_commit() is None or git_dirty():
            accepted = "code of one commit without changes, which names what was computed"
            raise RequestError("canonical folder", self.canonical, accepted)

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
        return replace(layout, local_size=self.local_size)

    @cached_property
    def model_size(self) -> ModelSize:
        return model_size(self.size)

    @cached_property
    def num_blocks(self) -> int:
        """**Raises:** RequestError for what is not a number of blocks that the model has."""
        layers = self.model_size.num_layers
        if self.blocks == "all":
            return layers
        if re.fullmatch(r"[1-9]\d{0,3}", str(self.blocks)) and int(self.blocks) <= layers:
            return int(self.blocks)
        raise RequestError("blocks", self.blocks, f"1 to {layers} of {self.size}, or all")

    def program(self, device: str, canonical: bool = False) -> Program:
        """What every rank computes, or what one process alone does.

        **Raises:** CheckpointError listing every problem.
        """
        packed, source = pack(self.parsed_job).to(device), self.source(device)
        given = (source, packed, self.seed, self.backend, self.recompute, self.points, canonical)
        return make_program(self.model_size, self.num_blocks, *given)

    @cached_property
    def parsed_job(self) -> Job:
        if (self.rows is None) == (self.job is None):
            raise RowsError("rows and job", (self.rows, self.job), "one of the two")
        return Job.parse(self.job) if self.rows is None else job_for_rows(self.rows)

    @cached_property
    def seed(self) -> int:
        """Seed of the synthetic weights and of the rows; 0 for a checkpoint folder."""
        match = _SYNTHETIC.fullmatch(self.weights)
        return int(match[1] or 0) if match else 0

    @property
    def is_synthetic(self) -> bool:
        return _SYNTHETIC.fullmatch(self.weights) is not None

    def source(self, device: str) -> WeightSource:
        """Where the weights come from. **Raises:** CheckpointError listing every problem."""
        if self.is_synthetic:
            return SyntheticWeights(self.model_size, self.seed, device)
        if not Path(self.weights).is_dir():
            accepted = "synthetic, synthetic:SEED (at most 18 digits) or a checkpoint folder"
            raise RequestError("weights", self.weights, accepted)
        if self.num_blocks == 1 and self.points is None:
            block = block_parameters(self.model_size)
            names = [*TIME_EMBEDDER, *(BLOCK_PREFIX + name for name in block)]
        else:
            names = parameters(replace(self.model_size, num_layers=self.num_blocks))
        return CheckpointWeights(self.weights, self.model_size, names, device)
