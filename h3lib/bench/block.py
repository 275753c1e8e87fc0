"""The block on one GPU beside diffusers' block: `h3lib bench kernels --parts block --out FILE`.

    ours      Block on the back end `triton`, a world of one, without a trace
    theirs    diffusers' MiniMaxH3TransformerBlock, autograd, BF16, the fastest of torch's SDPA back
              ends: eager, and under torch.compile
    graph     few rows: both sides replayed as CUDA graphs; ours must give the bytes of an eager run
    memory    peak allocated bytes of one forward + backward, above weights and inputs; on both
              sides nothing else is allocated before, and gradients count

The same weights and rows. Ratio = theirs / ours, medians of interleaved rounds; above 1 is faster.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from h3lib.bench.measure import Protocol, compare, medians
from h3lib.compare import different_elements
from h3lib.contract import SIZES
from h3lib.model.block import Block
from h3lib.model.inputs import block_inputs, block_results, block_weights
from h3lib.model.packing import job_for_rows, pack
from h3lib.model.weights import SyntheticWeights
from h3lib.parallel.shard import SeqShard

ROWS = (264, 4096, 14910, 37776)
GRAPH_MAX_ROWS = 264
CUDNN, FLASH = "cuDNN", "FlashAttention"
SDPA = {CUDNN: SDPBackend.CUDNN_ATTENTION, FLASH: SDPBackend.FLASH_ATTENTION}
FLASH_MAX_ROWS = 4096  # 1.6 times cuDNN's time or more from there on (H200, 2026-11-30)
EAGER, COMPILED = "diffusers eager", "diffusers torch.compile"
PASSES = {"block forward": False, "block forward + backward": True}

Call = Callable[..., object]


class Case:
    """One number of rows: both blocks, on the same weights and inputs."""

    def __init__(self, rows: int):
        from diffusers.models.transformers.transformer_minimax_h3 import (
            MiniMaxH3TransformerBlock,
        )

        self.rows, size = rows, SIZES["full"]
        source, self.shard = SyntheticWeights(size, 0, "cuda"), SeqShard.canonical(rows)
        packed = pack(job_for_rows(rows)).to("cuda")
        self.given = block_inputs(size, source, packed, self.shard, seed=0)
        weights = block_weights(size, source, self.shard)
        self.ours = Block(size, self.shard, weights, "triton")
        with torch.device("meta"):
            theirs = MiniMaxH3TransformerBlock(
                size.hidden_size, size.num_attention_heads, size.attention_head_dim, size.ffn_dim,
                size.time_embed_dim, size.norm_eps, size.norm_eps,
            )  # fmt: skip
        theirs.load_state_dict(weights, assign=True)
        self.theirs = {EAGER: theirs.requires_grad_()}
        torch._dynamo.reset()  # a module a number of rows: no limit of recompilations is met
        self.theirs[COMPILED] = torch.compile(theirs, dynamic=False)
        given = self.given.rows
        self.rotary = tuple(torch.cat((t, t), dim=-1) for t in (given.cos, given.sin))
        self.x = self.given.x[None].clone().requires_grad_()
        self.temb = self.given.temb.clone().requires_grad_()

    def our_call(self, backward: bool) -> Call:
        """One launch of our forward, or forward + backward."""

        def call(_: int = 0) -> dict[str, Tensor]:
            return block_results(self.ours, self.given, backward)

        return call

    def their_call(self, name: str, sdpa: str, backward: bool) -> Call:
        """One launch of their forward, or forward + backward."""
        module, leaves = self.theirs[name], [self.x, self.temb, *self.theirs[EAGER].parameters()]

        def call(_: int = 0) -> object:
            with sdpa_kernel(SDPA[sdpa]), torch.set_grad_enabled(backward):
                out = module(self.x, self.temb, self.given.rows.table_rows, self.rotary)
                return torch.autograd.grad(out, leaves, self.given.dout[None]) if backward else out

        return call

    def fastest_sdpa(self, backward: bool, protocol: Protocol) -> str:
        """The SDPA back end with which their eager block is fastest."""
        if self.rows > FLASH_MAX_ROWS:
            return CUDNN
        calls = [self.their_call(EAGER, name, backward) for name in SDPA]
        times = medians(calls, 1, protocol)
        return min(zip(times, SDPA, strict=True))[1]


def peak_bytes(call: Call) -> int:
    """Peak allocated bytes of one call above what is allocated before it."""
    call()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def check_replay(case: Case, op: str, backward: bool) -> dict[str, object]:
    """Two replays of a CUDA graph over results full of NaN against an eager run, byte for byte."""
    call = case.our_call(backward)
    expected = call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    elements = different = 0
    for _ in range(2):
        for value in results.values():
            value.fill_(torch.nan)
        graph.replay()
        for name, value in results.items():
            differ = different_elements(value.reshape(-1), expected[name].reshape(-1))
            elements, different = elements + differ.numel(), different + int(differ.sum())
    return {
        "op": op, "rows": case.rows, "check": "two replays of a CUDA graph against an eager run",
        "tensors": len(results), "elements": elements, "different": different,
        "passed": elements > 0 and different == 0,
    }  # fmt: skip


def measure(rows: int, protocol: Protocol) -> Iterator[tuple[str, dict[str, object]]]:
    """Times, replays and memory at one number of rows: the list that each belongs to, and it."""
    case = Case(rows)
    for op, backward in PASSES.items():
        sdpa = case.fastest_sdpa(backward, protocol)
        ours = case.our_call(backward)
        protocols = [protocol]
        if rows <= GRAPH_MAX_ROWS:
            yield "replays", check_replay(case, op, backward)
            protocols.append(protocol.under_graph())
        for against in case.theirs:
            theirs = case.their_call(against, sdpa, backward)
            for each in protocols:
                row = compare(op, f"SDPA {sdpa}", rows, against, ours, theirs, 1, each)
                yield "measurements", asdict(row)
            if backward:
                our_peak, their_peak = peak_bytes(ours), peak_bytes(theirs)
                yield "memory", {
                    "op": op, "case": f"SDPA {sdpa}", "rows": rows, "against": against,
                    "ours_bytes": our_peak, "theirs_bytes": their_peak,
                    "ratio": their_peak / our_peak,
                }  # fmt: skip
