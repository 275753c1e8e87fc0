"""One number of rows of `h3lib bench layouts`: both blocks on one rank, and what is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from h3lib.bench.block import peak_bytes
from h3lib.bench.layout_ranks import Call, RankWorld
from h3lib.bench.left_out import Buffers
from h3lib.bench.measure import Protocol
from h3lib.bench.plain import PlainBlock
from h3lib.compare import compare_record, count
from h3lib.contract import PUBLISHED, SIZES
from h3lib.layout import Ownership
from h3lib.model.block import Block
from h3lib.model.inputs import block_inputs, block_results, block_weights
from h3lib.model.packing import job_for_rows, pack
from h3lib.model.program import block_records
from h3lib.model.weights import SyntheticWeights
from h3lib.parallel.mesh import Mesh
from h3lib.parallel.shard import SeqShard

SIZE = SIZES["full"]
PROTOCOL = Protocol(rounds=5, round_ms=25.0, warm_up_ms=100.0)
FEW_ROWS = 264  # also replayed as CUDA graphs; FlashAttention, which is faster there, for theirs
CUDNN, FLASH = "cuDNN", "FlashAttention"
SDPA = {CUDNN: SDPBackend.CUDNN_ATTENTION, FLASH: SDPBackend.FLASH_ATTENTION}
EAGER, COMPILED = "diffusers eager, NCCL", "diffusers torch.compile, NCCL"
PASSES = {"forward": False, "forward + backward": True}


class Case:
    """A rank's part of one number of rows."""

    def __init__(self, world: RankWorld, rows: int):
        self.world, self.rows, self.layout = world, rows, world.layout
        self.owner = Ownership.of(world.layout, rows, PUBLISHED)
        self.source = SyntheticWeights(SIZE, 0, "cuda")
        self.packed = pack(job_for_rows(rows)).to("cuda")
        self.shard = SeqShard(self.owner, world.rank, world.mesh())
        self.weights = block_weights(SIZE, self.source, self.shard)
        self.given = block_inputs(SIZE, self.source, self.packed, self.shard, 0)
        self.sdpa = FLASH if rows <= FEW_ROWS else CUDNN
        self.buffers = Buffers()
        torch._dynamo.reset()  # a module a number of rows: no limit of recompilations is met
        plain = PlainBlock(SIZE, self.layout, *world.axes(), self.weights)
        whole = block_inputs(SIZE, self.source, self.packed, SeqShard.canonical(rows), 0)
        self.plain_given = plain.cut(whole)
        self.plain = plain
        self.named = {"layout": self.layout.name, "ranks": self.layout.num_ranks, "rows": rows}
        self.their_rows = plain.padded_rows(rows)

    def our_call(self, backward: bool, mesh: Mesh | None = None) -> Call:
        """One launch of our forward, or forward + backward; over another mesh than the layout's."""
        shard = self.shard if mesh is None else replace(self.shard, mesh=mesh)
        return partial(
            block_results, Block(SIZE, shard, self.weights, "triton"), self.given, backward
        )

    def their_call(
        self, backward: bool, compiled: bool = False, block: PlainBlock | None = None
    ) -> Call:
        """One launch of theirs."""
        run = (block or self.plain).caller(self.plain_given, backward, compiled)

        def call() -> dict[str, Tensor]:
            with sdpa_kernel(SDPA[self.sdpa]):
                return run()

        return call

    def measure(self, compiled: bool) -> Iterator[tuple[str, dict]]:
        """Everything, each with the list of the JSON that it belongs to."""
        yield "bits", self.bits(graph=False)
        yield "memory", self.memory()
        yield "agreement", self.agreement()
        for op, backward in PASSES.items():
            calls = self._calls(backward)
            if compiled:
                calls[COMPILED] = self.their_call(backward, compiled=True)
            yield from self._lines(op, calls, PROTOCOL)
            if self.rows <= FEW_ROWS:
                yield from self._lines(op, calls, PROTOCOL.under_graph())
        if self.rows <= FEW_ROWS:
            yield "bits", self.bits(graph=True)

    def _calls(self, backward: bool) -> dict[str, Call]:
        """What takes turns."""
        both = {"ours": self.our_call(backward), EAGER: self.their_call(backward)}
        if self.layout.num_ranks == 1:
            return both
        notes: list[Call] = []
        self.our_call(backward, self.world.noted_mesh(notes, self.buffers))()
        left_out = PlainBlock(SIZE, self.layout, *self.world.axes(self.buffers), self.weights)
        return both | {
            "left out": self.our_call(backward, self.world.left_out_mesh(self.buffers)),
            "alone": lambda: [again() for again in notes],
            "theirs left out": self.their_call(backward, block=left_out),
        }

    def _lines(
        self, op: str, calls: dict[str, Call], protocol: Protocol
    ) -> Iterator[tuple[str, dict]]:
        line = {**self.named, "their_rows": self.their_rows, "op": op, "graph": protocol.graph}
        line["sdpa"] = self.sdpa
        if protocol.graph:
            calls = {name: call for name, call in calls.items() if name != COMPILED}
        ms, reason = self.world.times(calls, protocol)
        if reason:
            yield "measurements", line | {"status": f"not run: {reason}"}
            return
        exposed, alone = ms["ours"] - ms.get("left out", ms["ours"]), ms.get("alone", 0.0)
        ours = {"ours_ms": ms["ours"], "exposed_ms": exposed, "alone_ms": alone,
                "hidden_ms": alone - exposed}  # fmt: skip
        for against in (EAGER, COMPILED):
            if against in ms:
                theirs = {"against": against, "theirs_ms": ms[against]}
                if against == EAGER:
                    theirs["theirs_exposed_ms"] = ms[EAGER] - ms.get("theirs left out", ms[EAGER])
                price = {"price": ms["ours"] / ms[against], "ratio": ms[against] / ms["ours"]}
                yield "measurements", line | ours | theirs | price | {"status": "run"}

    def bits(self, graph: bool) -> dict[str, object]:
        """What the untraced block gives here, or the replay of its CUDA graph over results full of
        NaN, against one process alone, byte for byte."""
        canonical = SeqShard.canonical(self.rows)
        weights = block_weights(SIZE, self.source, canonical)
        given = block_inputs(SIZE, self.source, self.packed, canonical, 0)
        block = Block(SIZE, canonical, weights, "triton")
        expected = block_results(block, given)
        mine = block_records(self._results(graph), SIZE, self.shard)
        differences = [compare_record(record, expected[record.name]) for record in mine]
        found = count(self.world.gather(differences))
        elements, different = found["total"], found["different"]
        return {
            **self.named, "graph": graph, "tensors": len(mine), "elements": elements,
            "different": different, "passed": elements > 0 and different == 0,
        }  # fmt: skip

    def _results(self, graph: bool) -> dict[str, Tensor]:
        run = self.our_call(True)
        results = run()
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured, capture_error_mode="thread_local"):
                results = run()
            for value in results.values():
                value.fill_(torch.nan)
            self.world.gather(None)
            captured.replay()
        self.world.check()
        return results

    def agreement(self) -> dict[str, object]:
        """|ours - theirs| / |theirs| of the output, dx, and the gradient that is farthest apart:
        two BF16 computations of one function."""
        ours, theirs = self.our_call(True)(), self.their_call(True)()
        self.world.check()
        apart = {}
        for name, value in theirs.items():
            mine = ours[name]
            if name in ("out", "dx"):
                mine, value = self._own_rows(mine, value)
            apart[name] = float((mine.float() - value.float()).norm() / value.float().norm())
        apart = {name: max(rank[name] for rank in self.world.gather(apart)) for name in apart}
        worst = max(apart, key=apart.get)
        return {**self.named, "out": apart["out"], "dx": apart["dx"],
                "worst": worst, "worst_value": apart[worst]}  # fmt: skip

    def _own_rows(self, ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
        """The rows that this rank has of theirs, which are cut evenly, without their padding."""
        cuts, layout = self.owner.row_cuts(), self.layout
        whole = ours if len(cuts) == 2 else self.shard.mesh.rows.all_gather_rows(ours, cuts)
        place = self.shard.cp_rank * layout.tp + self.shard.tp_rank if layout.sp else None
        first = len(theirs) * (self.shard.cp_rank if place is None else place)
        mine = whole[first : first + len(theirs)]
        return mine, theirs[: len(mine)]

    def memory(self) -> dict[str, object]:
        """Peaks of a forward and backward, of the rank with the highest."""
        ours, theirs = peak_bytes(self.our_call(True)), peak_bytes(self.their_call(True))
        self.world.check()
        ours, theirs = map(max, zip(*self.world.gather((ours, theirs)), strict=True))
        return {
            **self.named, "peak_bytes": ours, "theirs_peak_bytes": theirs,
            "measured": "in the layout",
        }  # fmt: skip
