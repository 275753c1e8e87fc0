"""One rank of `python -m h3lib.bench.transformer --layout tp2`; each owns a GPU.

    ours     Transformer in the layout over the peer tree, the slowest rank's time
    theirs   diffusers' model on the first rank's GPU alone, the same weights, in the same turns
    bits     every velocity, and at the fewest rows every gradient of an input, of every rank
             against ours on one GPU, byte for byte
    peaks    without what the first rank holds for the other side
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from h3lib.bench.layout_ranks import RankWorld
from h3lib.bench.measure import Ranks
from h3lib.bench.transformer import (
    BACKEND,
    DEVICE,
    Case,
    diffusers_model,
    free_gradients,
    num_bytes,
    timed,
    write_report,
)
from h3lib.compare import different_elements
from h3lib.contract import PUBLISHED, ModelSize, model_size
from h3lib.layout import Layout, Ownership
from h3lib.model.inputs import rank_weights
from h3lib.model.transformer import BLOCK_INPUTS, NOTHING, Transformer
from h3lib.model.weights import SyntheticWeights, digest
from h3lib.parallel.launch import die_with_launcher
from h3lib.parallel.shard import SeqShard


class Bench:
    """One rank; the first holds the whole weights too, of its part and of theirs."""

    def __init__(self, size: ModelSize, layout: Layout):
        self.size, self.layout, self.world = size, layout, RankWorld(layout)
        source = SyntheticWeights(size, 0, DEVICE)
        self.part = rank_weights(size, source, self._place(1))
        self.whole, self.theirs = None, None
        if self.world.rank == 0:
            alone = layout.tp == 1
            self.whole = self.part if alone else rank_weights(size, source, SeqShard.canonical(1))
            self.theirs = diffusers_model(size, self.whole).requires_grad_(False).eval()
        self.weight_bytes = self.world.gather(num_bytes(self.part))

    def _place(self, rows: int) -> SeqShard:
        owner = Ownership.of(self.layout, rows, PUBLISHED)
        return SeqShard(owner, self.world.rank, self.world.mesh())

    def measure(self, rows: int, backward: bool, rounds: int, gradients: bool) -> dict:
        """One line: times and peaks of both, bits of ours."""
        case = Case(self.size, self.part, self.theirs, rows, self._place(rows))

        def ours() -> object:
            found = case.our_step() if backward else case.our_forward()
            self.world.check()
            return found

        calls = {"ours": ours, "theirs": lambda: None}
        if self.world.rank == 0:
            calls["theirs"] = case.their_step if backward else case.their_forward
        mine = timed(calls, rounds, Ranks(self.world.gather))
        if self.whole is not self.part and self.whole is not None:
            mine["ours"]["peak_bytes"] -= num_bytes(self.whole)
            mine["theirs"]["peak_bytes"] -= num_bytes(self.part)
        peaks = self.world.gather(mine["ours"]["peak_bytes"])
        line = {
            "layout": self.layout.name,
            "op": "forward + backward" if backward else "forward",
            "rows": rows,
            "ours": mine["ours"] | {"peak_bytes": max(peaks), "peak_bytes_by_rank": peaks},
            "theirs": mine["theirs"],
        }
        line["ratio"] = line["theirs"]["ms"] / line["ours"]["ms"]
        if not backward or gradients:
            line["bits"] = self._bits(case, rows, backward)
        return line

    def _bits(self, case: Case, rows: int, backward: bool) -> dict[str, object]:
        """Velocities, or gradients of the inputs, of every rank against ours on one GPU."""
        mine = _results(case, case.ours, backward)
        self.world.check()
        ranks = self.world.gather({name: digest(value) for name, value in mine.items()})
        if self.world.rank:
            return {}
        model = Transformer(self.size, SeqShard.canonical(rows), self.whole, BACKEND)
        alone = _results(case, model, backward)
        pairs = [(mine[name].reshape(-1), alone[name].reshape(-1)) for name in alone]
        digests = {name: digest(value) for name, value in alone.items()}
        return {
            "values": sorted(alone),
            "elements": sum(len(value) for value, _ in pairs),
            "different": sum(int(different_elements(*pair).sum()) for pair in pairs),
            "ranks_equal": sum(rank == digests for rank in ranks),
            "ranks": len(ranks),
            "sha256": digests,
        }


def _results(case: Case, model: Transformer, backward: bool) -> dict[str, Tensor]:
    if not backward:
        return model.forward(case.inputs, NOTHING)
    model.forward(case.inputs, BLOCK_INPUTS)
    return model.backward(*case.gradients, take=lambda gradients: None).inputs


def rank_main(
    out: Path, layout: Layout, size: ModelSize, rows: Sequence[int], rounds: int, train: bool,
    commit: str | None,
) -> None:  # fmt: skip
    """Every number of rows: forward, then forward + backward; rank 0 writes after each."""
    bench, lines = Bench(size, layout), []

    def write(complete: bool) -> None:
        if bench.world.rank == 0:
            found = {"layout": layout.name, "weight_bytes": max(bench.weight_bytes)}
            found |= {"weight_bytes_by_rank": bench.weight_bytes, "measurements": lines}
            write_report(out, size, commit, rounds, found, complete)

    for backward in (False, True) if train else (False,):
        if backward and bench.theirs is not None:
            free_gradients(bench.theirs)
        for count in rows:
            launches = 1 if backward and count > 4096 else rounds
            lines.append(bench.measure(count, backward, launches, count == min(rows)))
            write(complete=False)
            torch.cuda.empty_cache()
    write(complete=True)
    bench.world.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("options", type=json.loads)
    given = parser.parse_args()
    options = given.options
    die_with_launcher()
    layout, size = Layout.parse(options.pop("layout")), model_size(options.pop("size"))
    rank_main(given.out, layout, size, **options)


if __name__ == "__main__":
    main()
