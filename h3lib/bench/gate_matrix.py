"""The gate: layout x dtype x rows x seed, this project's block beside stock PyTorch's.

    python -m h3lib.bench.gate_matrix --out reports/cpu/gate-matrix.json

One process plays every rank. A cell counts the elements of the output, of every gradient and of
every FP32 (FP64) sum that differ from one process alone; for the stock block (`h3lib.bench.stock`,
autograd) those of the output and of the gradients of its input and weights, against itself on one
rank. What the gate must show is written in `reports/claims.yml`.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from h3lib.bench.stock import StockBlock
from h3lib.compare import different_elements
from h3lib.contract import model_size
from h3lib.files import write_json
from h3lib.layout import Layout
from h3lib.model.block import Block
from h3lib.model.inputs import BlockInputs, block_inputs, block_weights
from h3lib.model.packing import job_for_rows, pack
from h3lib.model.program import BlockProgram, Step, no_step
from h3lib.model.trace import Record, Trace
from h3lib.model.weights import SyntheticWeights
from h3lib.ops.backend import accumulator
from h3lib.parallel.shard import SeqShard
from h3lib.report import environment, machine_names
from h3lib.simulate import canonical_values, play

LAYOUTS = ("tp2", "tp4", "tp8", "tp8-local4", "cp3", "tp4-cp2", "tp4-cp2-sp", "tp2-cp4-sp")
DTYPES = ("bfloat16", "float32", "float64")
ROWS, SEEDS, SIZE = (65, 264), (0, 1), "tiny"


@dataclass(frozen=True)
class TypedBlock(BlockProgram):
    """Block 0 with operands and weights of one dtype."""

    dtype: torch.dtype = torch.bfloat16

    def operands(self, shard: SeqShard) -> tuple[BlockInputs, dict[str, Tensor]]:
        """Inputs and weights of a place, in the dtype."""
        given = block_inputs(self.size, self.source, self.packed, shard, self.seed, self.dtype)
        temb = given.temb.to(accumulator(given.x))
        weights = block_weights(self.size, self.source, shard)
        typed = {name: weight.to(self.dtype) for name, weight in weights.items()}
        return BlockInputs(given.x, given.dout, temb, given.rows), typed

    def records(self, shard: SeqShard, backward: bool = True, step: Step = no_step) -> list[Record]:
        trace, (given, weights) = Trace(), self.operands(shard)
        block = Block(self.size, shard, weights, self.backend, trace)
        block.forward(given.x, given.temb, given.rows)
        block.backward(given.dout)
        return trace.records


def stock_values(program: TypedBlock, tp: int, cp: int) -> list[Tensor]:
    """Output, dx and weight gradients of the stock block, each flat."""
    given, weights = program.operands(SeqShard.canonical(program.packed.num_rows))
    x = given.x.clone().requires_grad_()
    weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    temb = given.temb.to(torch.promote_types(program.dtype, torch.float32))
    out = StockBlock(program.size, weights, tp, cp).forward(
        BlockInputs(x, given.dout, temb, given.rows)
    )
    gradients = torch.autograd.grad(out, [x, *weights.values()], given.dout)
    return [value.detach().reshape(-1) for value in (out, *gradients)]


def measure(
    layouts: tuple[str, ...] = LAYOUTS,
    dtypes: tuple[str, ...] = DTYPES,
    rows: tuple[int, ...] = ROWS,
    seeds: tuple[int, ...] = SEEDS,
) -> dict:
    """The content of the report."""
    size, cells = model_size(SIZE), []
    questions = list(itertools.product(dtypes, rows, seeds))
    bar = tqdm(total=len(questions) * len(layouts), unit="cell", disable=None)
    for dtype, num_rows, seed in questions:
        packed, source = pack(job_for_rows(num_rows)), SyntheticWeights(size, seed, "cpu")
        program = TypedBlock(size, source, packed, seed, dtype=getattr(torch, dtype))
        canonical, alone = canonical_values(program), stock_values(program, 1, 1)
        for name in layouts:
            layout, found = Layout.parse(name), play(name, program, canonical)
            stock = stock_values(program, layout.tp, layout.cp)
            unlike = [
                int(different_elements(a, b).sum()) for a, b in zip(stock, alone, strict=True)
            ]
            cells.append(
                {
                    "layout": name,
                    "dtype": dtype,
                    "rows": num_rows,
                    "seed": seed,
                    "values": len(found),
                    "values_equal": sum(not t["different"] and t["covered"] for t in found),
                    "elements": sum(t["total"] for t in found),
                    "different": sum(t["different"] for t in found),
                    "stock_values": len(stock),
                    "stock_values_equal": sum(not count for count in unlike),
                    "stock_different": sum(unlike),
                }
            )
            bar.update()
    bar.close()
    return {
        "size": SIZE,
        "environment": environment("cpu", machine_names(["here"])[0]),
        "cells": cells,
        "complete": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options = parser.parse_args()
    grid = (options.layouts, options.dtypes, options.rows, options.seeds)
    write_json(options.out, measure(*map(tuple, grid)))


if __name__ == "__main__":
    main()
