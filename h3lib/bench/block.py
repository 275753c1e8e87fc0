"""The block on one GPU beside diffusers' block: `python -m h3lib.bench.block --out FILE`.

    ours     Block on the back end `triton`, a world of one, without a trace
    theirs   diffusers' MiniMaxH3TransformerBlock, eager, autograd, BF16, the fastest of torch's
             SDPA back ends; and the same under torch.compile
    memory   peak allocated bytes of one forward + backward, above weights and inputs

The same weights and rows. Ratio = theirs / ours, medians of interleaved rounds; above 1 is faster.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from h3lib.bench.measure import Protocol, Row, compare, medians, report
from h3lib.contract import SIZES
from h3lib.model.block import Block
from h3lib.model.inputs import block_inputs, block_weights
from h3lib.model.packing import job_for_rows, pack
from h3lib.model.weights import SyntheticWeights
from h3lib.parallel.shard import SeqShard

ROWS = (264, 4096, 14910, 37776)
SDPA = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "FlashAttention": SDPBackend.FLASH_ATTENTION,
}


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
        self.theirs = theirs.requires_grad_()
        given = self.given.rows
        self.rotary = tuple(torch.cat((t, t), dim=-1) for t in (given.cos, given.sin))
        self.x = self.given.x[None].clone().requires_grad_()
        self.temb = self.given.temb.clone().requires_grad_()

    def our_forward(self, _: int = 0) -> None:
        self.ours.forward(self.given.x, self.given.temb, self.given.rows)

    def our_step(self, _: int = 0) -> None:
        self.our_forward()
        self.ours.backward(self.given.dout)

    def their_call(self, module: Callable, backend: SDPBackend, backward: bool):
        """One launch of their forward, or forward + backward with fresh gradients."""

        def call(_: int = 0) -> None:
            with sdpa_kernel(backend), torch.set_grad_enabled(backward):
                out = module(self.x, self.temb, self.given.rows.table_rows, self.rotary)
            if backward:
                for tensor in (self.x, self.temb, *self.theirs.parameters()):
                    tensor.grad = None
                out.backward(self.given.dout[None])

        return call


def peak_bytes(call: Callable[[int], None]) -> int:
    """Peak allocated bytes of one call above what is allocated before it."""
    call(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(0)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(rows: int, protocol: Protocol, compiled: bool) -> list[Row | dict]:
    """Forward, forward + backward and memory at one number of rows."""
    case, found = Case(rows), []
    modules = {"diffusers eager": case.theirs}
    if compiled:
        modules["diffusers torch.compile"] = torch.compile(case.theirs)
    for op, backward in (("block forward", False), ("block forward + backward", True)):
        ours = case.our_step if backward else case.our_forward
        theirs = {name: case.their_call(case.theirs, b, backward) for name, b in SDPA.items()}
        times = medians(list(theirs.values()), 1, protocol)
        fastest = min(zip(times, theirs, strict=True))[1]
        for against, module in modules.items():
            call = case.their_call(module, SDPA[fastest], backward)
            found.append(compare(op, fastest, rows, against, ours, call, 1, protocol))
            print(found[-1], flush=True)
        found.append(
            {
                "op": f"{op}, peak memory",
                "case": fastest,
                "rows": rows,
                "against": "diffusers eager",
                "ours_bytes": peak_bytes(ours),
                "theirs_bytes": peak_bytes(theirs[fastest]),
            }
        )
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True, help="commit that is measured")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--compile", action="store_true", help="also beside torch.compile")
    options = parser.parse_args()
    protocol, found = Protocol(), []
    for rows in options.rows:
        found += measure(rows, protocol, options.compile)
        torch.cuda.empty_cache()
        content = report(found, options.commit, protocol, complete=rows == options.rows[-1])
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
