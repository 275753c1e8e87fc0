"""The peer tree: collectives of one node by kernels that write into the other ranks' memory.

    gather      every rank pushes its part to its peers
    finish      every rank pushes its roots to the ranks that finish them, and evaluates the tree on
                its slice
    finish_all  a finish and a gather (two-shot), or for few elements a finish of everything by
                every rank (one-shot)

Each is one kernel (`peer_kernels.py`), which goes through its elements chunk by chunk. Bits are
those of `collective.py` over any transport.

NVLink multicast (multimem, NVLS) is not used: it adds in the switch, in an order of its own.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import triton
from torch import Tensor

from h3lib.contract import CONTRACT_ID, OperandError, PeerError
from h3lib.ops.hopper.compat import require_triton
from h3lib.parallel.agreement import check_calls
from h3lib.parallel.gloo import GlooTransport, check_same
from h3lib.parallel.later import Later
from h3lib.parallel.peer_kernels import UNIT
from h3lib.parallel.peer_lane import LANE_BYTES, LANE_CHANNELS, Lane
from h3lib.parallel.peer_memory import CudaDriver, Driver
from h3lib.parallel.peer_plan import Shape, Work, roots_of_ranks, tree_programs
from h3lib.parallel.peer_steps import PeerSteps, capturing
from h3lib.parallel.peer_sync import MAX_PEERS, MISSING
from h3lib.parallel.transport import (
    Call,
    Level,
    Reduction,
    Slice,
)

CAPACITY_BYTES = 64 << 20  # of a slot of all channels; there are two
ONE_SHOT_BYTES = 1 << 20  # that one rank receives
_TOLD = 3  # kind of a status: a verdict was read in the store
_WATCH_S = 0.2


class PeerTree(Level):
    """One group of ranks of one node.

    With `checked` a call returns when its result is complete, and raises if it cannot be. Without,
    a failed call returns NaN, as do the calls after it, until `check` raises. Inside a CUDA graph
    calls are never checked: call `check` after a replay. Collectives of a group are taken in
    stream order; a call on another stream waits for the last one, a graph's replay is ordered by
    its caller.
    """

    unit = UNIT

    def __init__(
        self,
        control: GlooTransport,
        capacity_bytes: int = CAPACITY_BYTES,
        timeout_s: float | None = None,
        driver: Driver | None = None,
        checked: bool = True,
        shape: Shape | None = None,
    ):
        """Collective over `control`. **Raises:** PeerError on every rank if contract, software, GPU
        or sizes differ, the ranks are not of one node, or memory cannot be shared."""
        self.control, self.world, self.checked = control, control.world, checked
        self.rank, self.size = control.rank, control.size
        self.timeout_s = control.world.timeout_s if timeout_s is None else timeout_s
        self._stream, self._steps, self._calls = None, None, {}
        self.shape = shape or Shape()
        self._lane: Lane | None = None
        if self.size > MAX_PEERS.value:
            raise PeerError("ranks of a peer group", self.size, f"at most {MAX_PEERS.value}")
        try:
            check_same(control.gather_objects(self._fingerprint(capacity_bytes)), control.ranks)
            require_triton(triton.__version__)  # the same on every rank, so all refuse it
            self._steps = PeerSteps(
                control, capacity_bytes, self.timeout_s, driver or CudaDriver(), self.shape
            )
        except PeerError as error:
            raise self.world.fail(error) from None
        self.overlaps = self._steps.device.type == "cuda"

    def _fingerprint(self, capacity_bytes: int) -> dict[str, object]:
        return {
            "contract": CONTRACT_ID,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "host": self.world.members.hosts[self.world.rank],
            "capacity": capacity_bytes,
            "timeout": self.timeout_s,
            "shape": self.shape,
        }

    def close(self) -> None:
        """Unmap and free. Collective while the world is well, so that nobody frees what a peer has
        mapped; after a failure as `SharedBuffers.release`. Graphs of this group end with it.

        **Raises:** PeerError if a peer, or this GPU, fails now; the memory is let go all the same.
        """
        if self._steps is None:
            return
        steps, self._steps = self._steps, None
        well = self.world.error is None
        try:
            steps.synchronize()
        except RuntimeError as error:  # of CUDA
            self.world.fail_here("the end of a group", str(error).splitlines()[0], "no CUDA error")
        steps.buffers.release()
        if well and self.world.error is not None:
            raise self.world.error

    def heard(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self.control.heard(what)

    @property
    def bytes_sent(self) -> list[int]:
        """Bytes that this rank has written into the memory of each rank of the group."""
        return list(self._open_steps().bytes_sent)

    def slices(self, num_elements: int, num_roots: int) -> list[Slice]:
        """One-shot where that reads little: every rank then finishes everything."""
        if 4 * num_elements * num_roots * (self.size - 1) <= ONE_SHOT_BYTES:
            return [(0, num_elements)] * self.size
        return super().slices(num_elements, num_roots)

    def later(self, run: Callable[[], Tensor], num_bytes: int) -> Later:
        """As `Level.later`, on a stream of its own; `checked` calls are checked by `value`."""
        small = num_bytes < LANE_BYTES and not (self._lane and self._lane.busy)
        if small or not self.overlaps:
            return Later(run())
        self._lane, steps = self._lane or Lane(self._settle), self._open_steps()
        steps.channels = min(LANE_CHANNELS, self.shape.channels)
        try:
            return self._lane.later(run, lambda: sum(steps.bytes_sent))
        finally:
            steps.channels = self.shape.channels

    def _settle(self) -> None:
        if self.checked and not capturing():
            self.check("a collective beside products")

    def gather(
        self,
        part: Tensor,
        lengths: Sequence[int],
        call: Call | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        call = call or Call("gather", (sum(lengths),), str(part.dtype), cuts=tuple(lengths))

        def run(steps: PeerSteps) -> Tensor:
            source = self._operand(part, call)
            if len(source) != lengths[self.rank]:
                raise OperandError(f"part of rank {self.rank}", len(source), lengths[self.rank])
            ends = list(itertools.accumulate(lengths, initial=0))
            whole = part.new_empty(ends[-1]) if out is None else out
            slices = tuple(zip(ends, ends[1:], strict=False))
            work = Work(slices, part.element_size(), gather=True)
            steps.gather(work, source, whole, self._named(call, work))
            return whole

        return self._guarded(call, run)

    def finish(self, flat: Tensor, reduction: Reduction, out: Tensor | None = None) -> Tensor:
        """As `Level.finish`. **Order:** programs that `ops/tree.py` writes down. **Raises:**
        OperandError also for roots that are not FP32."""
        call = _call("finish", flat, reduction)

        def run(steps: PeerSteps) -> Tensor:
            """One launch for each of the slices that a rank finishes; a rank may have fewer."""
            source, work = self._roots(flat, reduction, call)
            own = [stop - start for start, stop in reduction.parts[self.rank]]
            shape = len(work.programs), sum(own)
            found = flat.new_empty(shape, dtype=reduction.dtype) if out is None else out.view(shape)
            if not work.programs:  # a node without leaves, as every rank of it knows
                return found
            for k in range(max(map(len, reduction.parts))):
                slices = tuple(part[k] if k < len(part) else (0, 0) for part in reduction.parts)
                step = replace(work, slices=slices)
                steps.reduce(step, source, found, sum(own[:k]), self._named(call, step))
            return found

        return self._guarded(call, run)

    def finish_all(self, flat: Tensor, reduction: Reduction, out: Tensor | None = None) -> Tensor:
        """As `Level.finish_all`, the gather of one chunk beside the finish of the next."""
        call, slices = _call("finish_all", flat, reduction), tuple(reduction.slices)

        def run(steps: PeerSteps) -> Tensor:
            source, work = self._roots(flat, reduction, call)
            two_shot = self.size > 1 and len(set(slices)) > 1
            work = replace(work, slices=slices, gather=two_shot)
            length, dtype = flat.shape[1], reduction.dtype
            total = flat.new_empty(length, dtype=dtype) if out is None else out
            steps.reduce(work, source, total[None], slices[self.rank][0], self._named(call, work))
            return total

        return self._guarded(call, run)

    def _roots(self, flat: Tensor, reduction: Reduction, call: Call) -> tuple[Tensor, Work]:
        """The roots in order, and the work but for its slices."""
        dtype = reduction.dtype
        if flat.dtype != torch.float32 or dtype not in (torch.float32, torch.bfloat16):
            accepted = "FP32 roots, FP32 or BF16 result"
            raise OperandError("dtypes of roots and result", (flat.dtype, dtype), accepted)
        group = tuple(reduction.cuts), reduction.first, self.size
        work = Work((), dtype.itemsize, False, roots_of_ranks(*group), tree_programs(*group))
        return self._operand(flat, call).view(flat.shape), work

    def _named(self, call: Call, work: Work) -> int:
        """The digest of a call, by which its name is found again if it fails."""
        digest = _digest(call, work, self._open_steps().channels)
        self._calls[digest] = call
        return digest

    def check(self, what: str = "a collective") -> None:
        """Wait for everything asked for. **Raises:** PeerError if a call failed."""
        self._check(self._open_steps(), Call(what))

    def _open_steps(self) -> PeerSteps:
        if self.world.error is not None:
            raise self.world.error_after()
        if self._steps is None:
            raise PeerError("peer group", "closed", "an open one")
        return self._steps

    def _guarded(self, call: Call, run: Callable[[PeerSteps], Tensor]) -> Tensor:
        """A collective to its checked end; what this rank alone refuses, its peers hear of."""
        steps = self._open_steps()
        with self.heard(call.name):
            result = run(steps)
        home = self._lane and self._lane.home
        if home is not None:  # checked when its value is asked for
            result.record_stream(home)
        elif self.checked and not capturing():
            self._check(steps, call)
        return result

    def _operand(self, tensor: Tensor, call: Call) -> Tensor:
        """The elements of an operand in order; a call on another stream waits for the last."""
        device = self._steps.device
        if tensor.device != device:
            raise OperandError(f"device of {call.name}", str(tensor.device), str(device))
        if self._lane is not None and self._lane.home is None:
            self._lane.join_all()
        if device.type == "cuda" and not capturing():
            stream = torch.cuda.current_stream()
            if self._stream is not None and stream != self._stream:
                stream.wait_stream(self._stream)
            self._stream = stream
        return tensor.reshape(-1).contiguous()  # one column of a matrix is a view with a stride

    def _check(self, steps: PeerSteps, call: Call) -> None:
        entered = time.monotonic()
        try:
            self._watch(steps)
            kind, named = steps.status
        except RuntimeError as error:  # of CUDA: this rank is the one that failed
            cause = str(error).splitlines()[0]
            raise self.world.fail_here(call.name, cause, "no CUDA error") from error
        if kind == MISSING.value:
            missing = [self.control.ranks[place] for place in named]
            raise self.world.settle(call.name, self.control.ranks, entered, "no answer", missing)
        if kind:
            raise self.world.fail(self._failure(steps, call, kind, named))

    def _watch(self, steps: PeerSteps) -> None:
        """Wait for the stream; not for a peer whose process has ended, or after a verdict."""
        if steps.device.type != "cuda":
            return
        done = torch.cuda.Event()
        done.record()
        started = watched = time.monotonic()
        while not done.query():
            now = time.monotonic()
            if now - watched > _WATCH_S:
                watched = now
                gone = [place for place, rank in enumerate(self.control.ranks) if self._ended(rank)]
                if gone or self.world.has_verdict():
                    steps.give_up(MISSING.value if gone else _TOLD, gone)
            time.sleep(0 if now - started < 0.002 else 0.0002)

    def _ended(self, rank: int) -> bool:
        return rank != self.world.rank and self.world.members.ended(rank)

    def _failure(self, steps: PeerSteps, call: Call, kind: int, named: list[int]) -> PeerError:
        """What the kernels' status means, as far as this rank can tell. In a graph, the call that
        failed is the one whose digest was announced last."""
        if kind == _TOLD:
            return PeerError(f"peers in {call.name}", "a failure", "an answer")
        try:
            mine = self._calls.get(steps.announced, call)
            check_calls(self.control.gather_objects(mine), self.control.ranks)
        except PeerError as error:
            return error
        ranks = [self.control.ranks[place] for place in named]
        return PeerError(f"ranks {ranks} in {call.name}", "another collective", call.name)


def _call(name: str, flat: Tensor, reduction: Reduction) -> Call:
    """On whose behalf; without a call, that of the level itself."""
    if reduction.call is not None:
        return reduction.call
    cuts = tuple(reduction.cuts)
    return Call(name, (flat.shape[1],), str(flat.dtype), str(reduction.dtype), cuts)


@functools.lru_cache(4096)
def _digest(call: Call, work: Work, channels: int) -> int:
    """62 bits of a call and its launch, with bit 62 set: always a 64-bit argument, never 0."""
    digest = hashlib.sha256(repr((call, work, channels)).encode()).digest()
    return int.from_bytes(digest[:8], "little") & ((1 << 62) - 1) | 1 << 62
