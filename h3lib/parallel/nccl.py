"""NCCL transport: bytes between GPUs of different nodes; every rank owns a GPU.

The header goes through Gloo, as in `gloo.py`, the bytes through NCCL's all-to-all. NCCL never adds
here, and NVLink multicast, which could, stays off (`NCCL_NVLS_ENABLE=0`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from h3lib.parallel.gloo import GlooTransport, GlooWorld, pack_bytes, unpack_bytes
from h3lib.parallel.transport import Shape


class NcclTransport(GlooTransport):
    """One group whose bytes stay on the GPUs; `data` is its NCCL process group."""

    def __init__(self, world: GlooWorld, ranks: list[int], rank: int):
        super().__init__(world, ranks, rank)
        self.data = world.data_group(ranks)

    def _move(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        data, item = pack_bytes(parts, parts[0].device), parts[0].element_size()
        sizes_in = [part.numel() * item for part in parts]
        sizes_out = [torch.Size(shape).numel() * item for shape in shapes]
        received = torch.empty(sum(sizes_out), dtype=torch.uint8, device=data.device)
        work = dist.all_to_all_single(
            received, data, sizes_out, sizes_in, group=self.data, async_op=True
        )
        self._wait(work)
        return unpack_bytes(received, shapes, parts[0])

    def _wait(self, work: dist.Work) -> None:
        """Until the bytes are there. **Raises:** RuntimeError after the world's timeout."""
        deadline = time.monotonic() + self.world.timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no end after {self.world.timeout_s:g} s")
            time.sleep(0.0002)
        work.wait()


class NcclLibrary:
    """NCCL's own collectives of one group, which add in NCCL's order: for benchmarks alone.

    With `most_ctas` each of them is launched with at most so many CTAs, in a group of its own that
    every rank of the world makes alike.
    """

    def __init__(self, world: GlooWorld, ranks: list[int], most_ctas: int | None = None):
        self.group = world.data_group(ranks)
        if most_ctas is not None:
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = most_ctas
            self.group = dist.new_group(ranks, backend="nccl", pg_options=options)

    def all_reduce(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self.group)

    def start_all_reduce(self, x: Tensor) -> dist.Work:
        """Begins; the current stream waits for the end when `wait` of the result is called."""
        return dist.all_reduce(x, group=self.group, async_op=True)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        _renamed("reduce_scatter_single", "reduce_scatter_tensor")(out, x, group=self.group)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        _renamed("all_gather_single", "all_gather_into_tensor")(out, x, group=self.group)


def _renamed(new: str, old: str):
    """torch 2.13 renames two collectives that 2.11 has under the old names alone."""
    return getattr(dist, new, None) or getattr(dist, old)
