"""Transports move bytes between the ranks of one group.

One primitive is enough: `exchange`, an all-to-all of parts of any size. It never adds. A level of a
collective needs two things: `gather`, an exchange alone, and `finish`, an exchange followed by the
adds of `ops/tree.py`. Kernels that read peers (`peer.py`) do both without an exchange.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from h3lib.contract import PeerError, subtree_roots
from h3lib.ops.tree import root_nodes, tree_sum
from h3lib.parallel.agreement import Call, Shape, check_calls, check_exchange
from h3lib.parallel.later import Later

Cuts = Sequence[int]
Slice = tuple[int, int]


@dataclass(frozen=True)
class Reduction:
    """A sum as every rank of a group asks for it.

    Rank r owns the leaves `[cuts[first + r], cuts[first + r + 1])` and finishes the slices
    `parts[r]` of the elements; roots are rounded to `dtype`. `call` says on whose behalf.
    """

    cuts: Cuts
    parts: Sequence[Sequence[Slice]]
    dtype: torch.dtype
    call: Call | None = None
    first: int = 0

    @property
    def slices(self) -> list[Slice]:
        """The slices of ranks that finish one each."""
        return [piece for (piece,) in self.parts]

    def length(self, rank: int) -> int:
        """Elements that a rank finishes."""
        return sum(stop - start for start, stop in self.parts[rank])


class Level(abc.ABC):
    """The ranks of one group at one level of the hierarchy, seen from one of them."""

    rank: int
    size: int
    unit = 1
    """Elements: slices begin at multiples."""
    overlaps = False
    """Whether collectives of `later` run beside what is launched after them."""

    def later(self, run: Callable[[], Tensor], num_bytes: int) -> Later:
        """`run`, which calls collectives of this level, beside what follows if the level can and
        `num_bytes`, the same on every rank, are worth it; other collectives of the level come
        after it, as ever."""
        return Later(run())

    def slices(self, num_elements: int, num_roots: int) -> list[Slice]:
        """For each rank the slice of the elements that it finishes in an all-reduce."""
        return even_slices(num_elements, self.size, self.unit)

    def heard(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Where this rank may run out of memory or refuse an operand: peers in other processes hear
        of it. **Raises:** PeerError for the memory, OperandError as it was."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def gather(
        self,
        part: Tensor,
        lengths: Sequence[int],
        call: Call | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The parts `[lengths[r]]` of every rank, one after the other, in `out` if that is given.

        **Raises:** as `finish`."""

    @abc.abstractmethod
    def finish(self, flat: Tensor, reduction: Reduction, out: Tensor | None = None) -> Tensor:
        """The group's maximal subtree roots, of this rank's elements: `[R, n]` to `[S, n_local]`.

        `flat` holds this rank's subtree roots; `out` is contiguous memory for the result.

        **Order:** the tree over `cuts[-1]` leaves. **Rounds:** once, to `dtype`. **Raises:**
        PeerError on every rank if calls differ, or a peer fails or does not answer in time.
        """

    def finish_all(self, flat: Tensor, reduction: Reduction, out: Tensor | None = None) -> Tensor:
        """The root over all leaves on every rank of a group that owns them all: `[R, n]` to `[n]`.

        Rank r finishes its one slice, then they are gathered, unless each has finished everything.
        `out` as `finish`.

        **Order:**, **Rounds:**, **Raises:** as `finish`.
        """
        part = self.finish(flat, reduction)[0]
        return self.gather_slices(part, reduction.slices, reduction.call, out)

    def gather_slices(
        self,
        part: Tensor,
        slices: Sequence[Slice],
        call: Call | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """All elements from the slices of the ranks; nothing moves if each has them all."""
        if self.size > 1 and len(set(slices)) == 1:
            return part if out is None else out.copy_(part)
        return self.gather(part, [stop - start for start, stop in slices], call, out)


class Transport(Level):
    """A level that moves bytes by `exchange`; `rank` and `size` count inside the group."""

    @abc.abstractmethod
    def exchange(
        self, parts: Sequence[Tensor], shapes: Sequence[Shape], call: Call | None = None
    ) -> list[Tensor]:
        """Send `parts[r]` to rank r; receive from each rank r, in order, a tensor of `shapes[r]`.

        All parts have one dtype and device; parts may be empty.

        **Order:** none, nothing is added. **Raises:** PeerError on every rank if calls differ, what
        one rank sends is not what its peer expects, or a peer fails or does not answer in time.
        """

    def gather(
        self,
        part: Tensor,
        lengths: Sequence[int],
        call: Call | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        shapes = [(length,) for length in lengths]
        return torch.cat(self.exchange([part] * self.size, shapes, call), out=out)

    def finish(self, flat: Tensor, reduction: Reduction, out: Tensor | None = None) -> Tensor:
        cuts, first = reduction.cuts, reduction.first
        length = reduction.length(self.rank)
        roots = self.exchange(
            [torch.cat([flat[:, a:b] for a, b in part], dim=1) for part in reduction.parts],
            [(num_roots(cuts, first + r), length) for r in range(self.size)],
            reduction.call,
        )
        nodes = root_nodes(roots, cuts, first)
        spans = group_spans(cuts, first, self.size)
        if not spans:  # a node without leaves
            return flat.new_empty(0, length, dtype=reduction.dtype)
        result = torch.stack([tree_sum(nodes.get, span) for span in spans]).to(reduction.dtype)
        return result if out is None else out.view_as(result).copy_(result)


class LocalTransport(Transport):
    """A group of one."""

    rank, size = 0, 1

    def exchange(
        self, parts: Sequence[Tensor], shapes: Sequence[Shape], call: Call | None = None
    ) -> list[Tensor]:
        check_exchange([[(tuple(parts[0].shape), str(parts[0].dtype))]], [[tuple(shapes[0])]])
        return list(parts)


def num_roots(cuts: Cuts, owner: int) -> int:
    """How many maximal subtree roots the owner's leaves have."""
    return _num_roots(cuts[owner], cuts[owner + 1], cuts[-1])


@functools.lru_cache(4096)
def _num_roots(start: int, stop: int, num_leaves: int) -> int:
    return len(subtree_roots(start, stop, num_leaves))


def group_spans(cuts: Cuts, first: int, size: int) -> tuple[range, ...]:
    """Maximal subtree roots of the leaves of `size` owners from `first` on, taken together."""
    return subtree_roots(cuts[first], cuts[first + size], cuts[-1])


def even_slices(num_elements: int, num_slices: int, unit: int = 1) -> list[Slice]:
    """The elements cut into nearly equal slices, in order; inner cuts are multiples of `unit`."""
    units = -(-num_elements // unit)
    cuts = [min(units * i // num_slices * unit, num_elements) for i in range(num_slices + 1)]
    return list(zip(cuts[:-1], cuts[1:], strict=True))


class ThreadWorld:
    """Many ranks in one process: each rank is a thread, one of `num_running` computes at a time.

    For tests and notebooks: 64 ranks run in seconds, and every byte goes the way it would go
    between processes. A rank that raises breaks the others' waits.
    """

    def __init__(self, size: int, timeout_s: float = 120.0, num_running: int = 1):
        self.size, self.timeout_s = size, timeout_s
        self.turn = threading.Semaphore(num_running)
        self._groups: dict[tuple[int, ...], _ThreadGroup] = {}
        self._lock = threading.Lock()
        self._failed = False

    def connect(self, ranks: Sequence[int], rank: int) -> ThreadTransport:
        """The group of the global `ranks`, seen from the global `rank`."""
        with self._lock:
            group = self._groups.setdefault(tuple(ranks), _ThreadGroup(self, len(ranks)))
            if self._failed:
                group.barrier.abort()
        return ThreadTransport(group, list(ranks).index(rank))

    def run(self, function: Callable[[int], object]) -> list:
        """`function(rank)` for every rank; the results in rank order.

        **Raises:** the first error that a rank raised of its own.
        """
        results, errors = [None] * self.size, {}

        def rank_main(rank: int) -> None:
            with self.turn:
                try:
                    results[rank] = function(rank)
                except BaseException as error:  # noqa: BLE001 - handed to the caller below
                    errors[rank] = error
                    self.abort()

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            own = [e for e in errors.values() if not isinstance(e, _PeerAborted)]
            raise (own or list(errors.values()))[0]
        return results

    def abort(self) -> None:
        with self._lock:
            self._failed = True
            for group in self._groups.values():
                group.barrier.abort()


class _PeerAborted(PeerError):
    """Another rank of the thread world failed first."""


class _ThreadGroup:
    def __init__(self, world: ThreadWorld, size: int):
        self.world, self.size = world, size
        self.barrier = threading.Barrier(size)
        self.posted: list[object] = [None] * size

    def wait(self) -> None:
        self.world.turn.release()
        try:
            self.barrier.wait(self.world.timeout_s)
        except threading.BrokenBarrierError:
            raise _PeerAborted(
                "peer rank", "failed or late", f"an answer in {self.world.timeout_s} s"
            ) from None
        finally:
            self.world.turn.acquire()


class ThreadTransport(Transport):
    """One thread's view of a group of a `ThreadWorld`."""

    def __init__(self, group: _ThreadGroup, rank: int):
        self.group, self.rank, self.size = group, rank, group.size

    def gather_objects(self, value: object) -> list:
        """Every rank's value, in rank order, on every rank."""
        self.group.posted[self.rank] = value
        self.group.wait()
        posted = list(self.group.posted)
        self.group.wait()
        return posted

    def exchange(
        self, parts: Sequence[Tensor], shapes: Sequence[Shape], call: Call | None = None
    ) -> list[Tensor]:
        posted = self.gather_objects(
            ([part.clone() for part in parts], [tuple(shape) for shape in shapes], call)
        )
        check_calls([call for *_, call in posted])
        sent = [[(tuple(part.shape), str(part.dtype)) for part in row] for row, *_ in posted]
        check_exchange(sent, [expected for _, expected, _ in posted])
        return [row[self.rank] for row, *_ in posted]
