"""Gloo transport: bytes between processes through the CPU, for CPU ranks and shared GPUs."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from h3lib.contract import OperandError, PeerError
from h3lib.parallel.agreement import Call, Shape, check_calls, check_exchange, most_common
from h3lib.parallel.membership import Hold, Members, Place, Verdicts
from h3lib.parallel.place import own_place
from h3lib.parallel.transport import Transport

_generation = itertools.count()
_NO_MEMORY = ("out of memory", "memory for its parts")


class GlooWorld:
    """The processes that torchrun or srun started, and the groups among them.

    After a failure a world refuses further use; close it and join a new one, with all ranks.
    """

    def __init__(
        self,
        groups: Sequence[tuple[int, ...]],
        timeout_s: float,
        name: str = "",
        data_groups: Sequence[tuple[int, ...]] = (),
        data_backend: str = "nccl",
        start_timeout_s: float | None = None,
    ):
        """Join the world and make every group; all ranks pass the same `groups` in the same order.

        The ranks of `data_groups` can also move bytes by `data_backend`. The start and gathers of
        all ranks may take `start_timeout_s`, `timeout_s` if it is not given.

        Worlds of one set of processes need different names; by default they are counted.

        **Raises:** PeerError if the others do not join within `timeout_s`.
        """
        name = name or f"world-{next(_generation)}"
        self.timeout_s, self.error = timeout_s, None
        timeout, place = datetime.timedelta(seconds=timeout_s), own_place()
        start_timeout_s = start_timeout_s or timeout_s
        start = datetime.timedelta(seconds=start_timeout_s)
        try:
            store, self.rank, self.size = next(
                rendezvous(place.meeting, place.rank, place.num_ranks, timeout=start)
            )
            store = dist.PrefixStore(f"h3lib/{name}", store)
            store.set_timeout(start)
            dist.init_process_group(
                "gloo", store=store, rank=self.rank, world_size=self.size, timeout=start
            )
            self._groups = {ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in groups}
            self._data_groups = {}
            self.open_data(data_groups, data_backend)
            places = [None] * self.size
            dist.all_gather_object(places, Place.here())
        except RuntimeError as error:
            if dist.is_initialized():
                dist.destroy_process_group()
            raise PeerError(
                "start of the process group",
                str(error).splitlines()[0],
                f"all ranks in {start_timeout_s:g} s",
            ) from error
        self.members, self._store, self._shared = Members(places), store, Counter()
        self._verdicts = Verdicts(store, self.members, self.rank, timeout_s)

    def open_data(self, groups: Sequence[tuple[int, ...]], backend: str = "nccl") -> None:
        """Groups whose ranks can also move bytes by `backend`; collective over all ranks."""
        os.environ["NCCL_NVLS_ENABLE"] = "0"  # no multicast over NVLink
        patience_s = self.timeout_s + 60  # a verdict comes before its abort
        for ranks in groups:
            self._data_groups[ranks] = dist.new_group(
                list(ranks), timeout=datetime.timedelta(seconds=patience_s), backend=backend
            )

    def connect(self, ranks: Sequence[int], rank: int) -> GlooTransport:
        return GlooTransport(self, list(ranks), rank)

    def group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        return self._groups[tuple(ranks)]

    def data_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        return self._data_groups[tuple(ranks)]

    def gather_objects(self, value: object) -> list:
        """Every rank's value, in rank order, on every rank."""
        values = [None] * self.size
        self.guarded(
            "a gather of all ranks",
            list(range(self.size)),
            lambda: dist.all_gather_object(values, value),
        )
        return values

    def guarded(self, what: str, ranks: list[int], collective: Callable[[], object]) -> None:
        """Run a collective of `ranks`. **Raises:** PeerError with the one verdict on its failure;
        from then on, on every use of this world."""
        if self.error is not None:
            raise self.error_after()
        entered = time.monotonic()
        try:
            collective()
        except PeerError as error:  # the ranks disagree: those outside must hear of it
            raise self.fail(error) from None
        except (RuntimeError, MemoryError) as error:
            if _is_memory(error):
                raise self.fail_here(what, *_NO_MEMORY) from error
            cause = str(error).splitlines()[0]
            raise self.settle(what, ranks, entered, cause) from error

    def fail(self, error: PeerError) -> PeerError:
        """Refuse further use because of `error`; the error that all ranks settle on."""
        if self.error is None:
            self.error = self._verdicts.publish(error)
        return self.error

    def settle(
        self,
        what: str,
        ranks: list[int],
        entered: float,
        cause: str,
        missing: list[int] | None = None,
    ) -> PeerError:
        """The same, when some rank of the collective is to blame (`Verdicts.settle`)."""
        return self.fail(self._verdicts.settle(what, ranks, entered, cause, missing))

    def fail_here(self, what: str, received: str, accepted: str) -> PeerError:
        """The same, because of what this rank alone could not do in `what`."""
        return self.fail(PeerError(f"rank {self.rank} in {what}", received, accepted))

    def hold(self, ranks: Sequence[int]) -> Hold:
        """Of something that `ranks` share from now on; they all ask for it, in the same order."""
        ranks = tuple(ranks)
        self._shared[ranks] += 1
        name = f"let go/{'-'.join(map(str, ranks))}/{self._shared[ranks]}"
        peers = [rank for rank in ranks if rank != self.rank]
        return Hold(self._store, self.members, self.rank, peers, name)

    def fail_alone(self, error: BaseException) -> None:
        """This rank ends by an error of its own: the others hear of it before they wait for it."""
        received = f"{type(error).__name__}: {str(error)[:500]}"
        self.fail(PeerError(f"rank {self.rank}", received, "no error"))

    def has_verdict(self) -> bool:
        """Whether some rank has settled on a failure."""
        return self._verdicts.published()

    def error_after(self) -> PeerError:
        return PeerError("process group", f"a use after: {self.error}", "a new process group")

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _is_memory(error: Exception) -> bool:
    """Whether this process lacks memory; PyTorch's CPU allocator has no error class for that."""
    lacking = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, lacking) or "can't allocate memory" in str(error)


def require_same(world: GlooWorld, fingerprint: dict) -> None:
    """**Raises:** PeerError on every rank, naming the rank, if a peer differs from the others."""
    check_same(world.gather_objects(fingerprint))


def check_same(fingerprints: list[dict], ranks: Sequence[int] | None = None) -> None:
    """**Raises:** PeerError for the first of `ranks` that differs from most, by the first key."""
    ranks = ranks or range(len(fingerprints))
    for key in sorted({key for peer in fingerprints for key in peer}):
        found = [peer.get(key) for peer in fingerprints]
        usual = most_common(found)
        for rank, there in zip(ranks, found, strict=True):
            if there != found[usual]:
                accepted = f"{found[usual]!r} as on rank {ranks[usual]}"
                raise PeerError(f"{key} of rank {rank}", there, accepted)


class GlooTransport(Transport):
    """One group; an exchange is a header that every rank checks, then the bytes."""

    def __init__(self, world: GlooWorld, ranks: list[int], rank: int):
        self.world, self.ranks, self.group = world, ranks, world.group(ranks)
        self.rank, self.size = ranks.index(rank), len(ranks)

    def gather_objects(self, value: object, what: str = "a gather") -> list:
        """Every rank's value, in the group's order, on every rank."""
        values = [None] * self.size
        self.world.guarded(
            what, self.ranks, lambda: dist.all_gather_object(values, value, group=self.group)
        )
        return values

    def hold(self) -> Hold:
        """Of something that this group shares from now on; collective."""
        return self.world.hold(self.ranks)

    @contextlib.contextmanager
    def heard(self, what: str) -> Iterator[None]:
        try:
            yield
        except OperandError as error:
            self.world.fail_here(what, str(error), "an operand of the group's call")
            raise
        except (RuntimeError, MemoryError) as error:
            if not _is_memory(error):
                raise
            raise self.world.fail_here(what, *_NO_MEMORY) from error

    def exchange(
        self, parts: Sequence[Tensor], shapes: Sequence[Shape], call: Call | None = None
    ) -> list[Tensor]:
        received = []
        what = "an exchange" if call is None else call.name
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise PeerError(f"{what} inside a CUDA graph", "a transport of the host", "peer")
        self.world.guarded(
            what, self.ranks, lambda: received.extend(self._exchange(parts, shapes, call))
        )
        return received

    def _exchange(
        self, parts: Sequence[Tensor], shapes: Sequence[Shape], call: Call | None
    ) -> list[Tensor]:
        header = (
            [(tuple(part.shape), str(part.dtype)) for part in parts],
            [tuple(shape) for shape in shapes],
            call,
        )
        headers = [None] * self.size
        dist.all_gather_object(headers, header, group=self.group)
        check_calls([call for *_, call in headers], self.ranks)
        sent, expected = [sent for sent, *_ in headers], [shapes for _, shapes, _ in headers]
        check_exchange(sent, expected, self.ranks)
        return self._move(parts, shapes)

    def _move(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        data = pack_bytes(parts)
        item = parts[0].element_size()
        sizes_in = [part.numel() * item for part in parts]
        sizes_out = [torch.Size(shape).numel() * item for shape in shapes]
        received = torch.empty(sum(sizes_out), dtype=torch.uint8)
        dist.all_to_all_single(received, data, sizes_out, sizes_in, group=self.group)
        return unpack_bytes(received, shapes, parts[0])


def serve_store() -> dist.Store:
    """A store, served from this process, by which ranks that it starts find each other."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def rank_environment(store: dist.Store, rank: int, size: int) -> dict[str, str]:
    """What a rank must find in its environment to join by a store of `serve_store`."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def launched() -> bool:
    """Whether this process is a rank that torchrun or srun started."""
    return own_place() is not None


def world_size() -> int:
    """How many ranks the launcher started."""
    return own_place().num_ranks


def pack_bytes(parts: Sequence[Tensor], device: torch.device | str = "cpu") -> Tensor:
    """The parts' bytes, one after the other, on the device."""
    flat = [part.contiguous().reshape(-1).view(torch.uint8) for part in parts]
    return torch.cat([part.to(device) for part in flat])


def unpack_bytes(data: Tensor, shapes: Sequence[Shape], like: Tensor) -> list[Tensor]:
    """The inverse of `pack_bytes`, on the device and in the dtype of `like`."""
    sizes = [math.prod(shape) * like.element_size() for shape in shapes]
    pieces = data.split(sizes)
    return [
        # a copy starts on its own allocation, aligned for any dtype
        piece.clone().view(like.dtype).reshape(shape).to(like.device)
        for piece, shape in zip(pieces, shapes, strict=True)
    ]
