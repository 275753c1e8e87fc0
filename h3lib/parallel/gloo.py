"""Gloo transport: bytes between processes through the CPU, for CPU ranks and shared GPUs."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from h3lib.contract import PeerError
from h3lib.parallel.place import own_place
from h3lib.parallel.transport import Shape, Transport, check_exchange, pack_bytes, unpack_bytes


class GlooWorld:
    """The processes that torchrun or srun started, and the groups among them."""

    def __init__(self, groups: Sequence[tuple[int, ...]], timeout_s: float):
        """Join the world and make every group; all ranks pass the same `groups` in the same order.

        **Raises:** PeerError if the others do not join within `timeout_s`.
        """
        timeout, place = datetime.timedelta(seconds=timeout_s), own_place()
        try:
            dist.init_process_group(
                "gloo",
                timeout=timeout,
                init_method=place.meeting,
                rank=place.rank,
                world_size=place.num_ranks,
            )
            self._groups = {ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in groups}
        except RuntimeError as error:
            raise PeerError(
                "start of the process group",
                str(error).splitlines()[0],
                f"all ranks in {timeout_s} s",
            ) from error
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def connect(self, ranks: Sequence[int], rank: int) -> GlooTransport:
        return GlooTransport(self._groups[tuple(ranks)], list(ranks).index(rank), len(ranks))

    def gather_objects(self, value: object) -> list:
        """Every rank's value, in rank order, on every rank."""
        values = [None] * self.size
        _answered(dist.all_gather_object, values, value)
        return values

    def close(self) -> None:
        dist.destroy_process_group()


def require_same(world: GlooWorld, fingerprint: dict) -> None:
    """**Raises:** PeerError on every rank, naming the rank, if a peer differs from rank 0."""
    peers = world.gather_objects(fingerprint)
    for rank, peer in enumerate(peers):
        for key in sorted(peers[0].keys() | peer.keys()):
            here, there = peers[0].get(key), peer.get(key)
            if here != there:
                raise PeerError(f"{key} of rank {rank}", there, f"{here!r} as on rank 0")


class GlooTransport(Transport):
    """One group; an exchange is a header that every rank checks, then the bytes."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int):
        self.group, self.rank, self.size = group, rank, size

    def exchange(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        header = (
            [(tuple(part.shape), str(part.dtype)) for part in parts],
            [tuple(shape) for shape in shapes],
        )
        headers = [None] * self.size
        _answered(dist.all_gather_object, headers, header, group=self.group)
        check_exchange([sent for sent, _ in headers], [expected for _, expected in headers])
        data = pack_bytes(parts)
        item = parts[0].element_size()
        sizes_in = [part.numel() * item for part in parts]
        sizes_out = [torch.Size(shape).numel() * item for shape in shapes]
        received = torch.empty(sum(sizes_out), dtype=torch.uint8)
        _answered(dist.all_to_all_single, received, data, sizes_out, sizes_in, group=self.group)
        return unpack_bytes(received, shapes, parts[0])


def _answered(collective, *args, **kwargs) -> None:
    """Call a collective; a peer that died or is late becomes a PeerError."""
    try:
        collective(*args, **kwargs)
    except RuntimeError as error:
        cause = str(error).splitlines()[0]
        raise PeerError("peer rank", f"failed or late: {cause}", "an answer in time") from error
