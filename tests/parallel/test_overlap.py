"""Products in chunks beside their collectives: where rows are cut, and that nothing is early."""

from dataclasses import replace

import pytest
import torch
from block_support import play as play_block
from block_support import red
from hypothesis import given
from hypothesis import strategies as st
from support import assert_same_bytes, normal, tree_of

from h3lib.contract import OperandError
from h3lib.ops.backend import Beside
from h3lib.ops.tree import partial_roots
from h3lib.parallel.collective import TreeCollective
from h3lib.parallel.later import Later
from h3lib.parallel.overlap import (
    AS_SUITS,
    IN_TURN,
    MIN_CHUNK,
    ROW_TILE,
    Chunks,
    ColumnProduct,
    RowProduct,
    gather_products,
    reduce_product,
)
from h3lib.parallel.transport import ThreadTransport, ThreadWorld

BF16, F32 = torch.bfloat16, torch.float32
SIZE, ROWS, WIDTH = 4, 61, 8
CUTS, ROW_CUTS = [0, 2, 4, 6, 8], [0, 0, 7, 30, 61]


class LateLevel(ThreadTransport):
    """A level whose collectives run as late as they may: when one is joined, or asked for now."""

    overlaps = True

    def __init__(self, group, rank: int):
        super().__init__(group, rank)
        self.waiting: list[LateResult] = []
        self.busy = False

    def later(self, run, num_bytes: int) -> Later:
        result = LateResult(self, run)
        self.waiting.append(result)
        return result

    def exchange(self, *arguments) -> list[torch.Tensor]:
        self.finish_waiting()
        return super().exchange(*arguments)

    def finish_waiting(self) -> None:
        while self.waiting and not self.busy:
            first = self.waiting.pop(0)
            self.busy = True
            first._result = first.run()
            self.busy = False


class LateResult(Later):
    def __init__(self, level: LateLevel, run):
        super().__init__(None)
        self.level, self.run = level, run

    def join(self) -> None:
        self.level.finish_waiting()


def play(function) -> list:
    """function(collective) on every rank, with a level that is as late as it may be."""
    world = ThreadWorld(SIZE, 20)

    def main(rank: int):
        transport = world.connect(range(SIZE), rank)
        return function(TreeCollective(LateLevel(transport.group, rank)))

    return world.run(main)


def known(roots: torch.Tensor) -> RowProduct:
    def make(ranges) -> torch.Tensor:
        return torch.cat([roots[:, rows.start : rows.stop] for rows in ranges], dim=1)

    return RowProduct(*roots.shape[1:], 1, make)


@pytest.mark.parametrize("length", (1, 7, 20, 61, 100))
@pytest.mark.parametrize("row_cuts", (None, ROW_CUTS))
@pytest.mark.parametrize("cuts", (CUTS, [0, 1, 4, 7, 8]), ids=("one root", "several roots"))
def test_chunks_give_the_tree_with_the_latest_of_levels(cuts, row_cuts, length):
    leaves = normal(0, 8, ROWS, WIDTH, dtype=F32)
    root = torch.from_numpy(tree_of(leaves.numpy()))

    def main(collective):
        rank, seen = collective.rank, []
        roots = partial_roots(leaves.__getitem__, range(cuts[rank], cuts[rank + 1]), 8)
        own = slice(None) if row_cuts is None else slice(*row_cuts[rank : rank + 2])
        product, chunks = known(roots), Chunks(length)
        value = reduce_product(collective, product, cuts, BF16, row_cuts, chunks=chunks)
        assert_same_bytes(value, root[own].to(BF16))
        observed = reduce_product(
            collective, product, cuts, BF16, row_cuts, lambda *piece: seen.append(piece), chunks
        )
        assert_same_bytes(observed, value)
        for part, at in seen:
            assert_same_bytes(part, root.reshape(-1)[at : at + len(part)])
        return sum(len(part) for part, _ in seen)

    assert sum(play(main)) == ROWS * WIDTH


def test_products_of_gathered_rows_wait_for_them():
    whole = normal(1, ROWS, WIDTH)

    def main(collective):
        own = whole[ROW_CUTS[collective.rank] : ROW_CUTS[collective.rank + 1]]
        double = ColumnProduct(WIDTH, lambda x, out: torch.mul(x, 2, out=out))
        for chunks in (AS_SUITS, Chunks(20), IN_TURN):
            rows, found = gather_products(collective, own, ROW_CUTS, [double, double], chunks)
            assert_same_bytes(rows, whole)
            for product in found:
                assert_same_bytes(product, 2 * whole)
        return True

    assert all(play(main))


@pytest.mark.parametrize("layout", ("cp3", "cp7", "tp2-cp3-sp", "tp4-cp2-sp"))
@pytest.mark.parametrize("num_rows", (7, 264))
def test_every_rank_gives_the_same_sizes_to_a_level(layout, num_rows, monkeypatch):
    """Whether a collective goes beside others must not depend on how much a rank owns."""
    asked: dict[int, dict[int, list[int]]] = {}

    def later(self, run, num_bytes: int) -> Later:
        ranks = asked.setdefault(id(self.group), {})
        ranks.setdefault(self.rank, []).append(num_bytes)
        return Later(run())

    monkeypatch.setattr(ThreadTransport, "later", later)

    def change(shard, world):
        return replace(shard, mesh=replace(shard.mesh, chunks=Chunks(5)))

    assert red(play_block(layout, num_rows, change=change)) == set()
    assert asked
    for ranks in asked.values():
        assert len({tuple(sizes) for sizes in ranks.values()}) == 1


class Overlapping:
    overlaps, size = True, 2


@given(
    st.integers(0, 100_000),
    st.sampled_from((64, 5376)),
    st.sampled_from((448, 3584, 14336)),
    st.sampled_from((2, 8)),
)
def test_chunks_shrink_and_end_row_tiles(num_rows, width, depth, size):
    collective = Overlapping()
    collective.size = size
    product = RowProduct(num_rows, width, depth, None)
    weights = AS_SUITS.weights(product, collective)
    pieces = AS_SUITS.cut(range(num_rows), weights)
    assert [row for piece in pieces for row in piece] == list(range(num_rows))
    assert weights == sorted(weights, reverse=True)
    assert all(piece.stop % ROW_TILE == 0 for piece in pieces[:-1])
    assert num_rows * width >= 2 * MIN_CHUNK or len(pieces) == 1
    assert IN_TURN.weights(product, collective) == [1.0]
    collective.overlaps = False
    assert AS_SUITS.weights(product, collective) == [1.0]


@pytest.mark.parametrize("depth", (3584, 7168, 10752, 14336))
def test_a_production_product_is_cut_and_its_last_chunk_is_the_smallest(depth):
    weights = AS_SUITS.weights(RowProduct(14910, 5376, depth, None), Overlapping())
    lengths = [len(piece) for piece in AS_SUITS.cut(range(14910), weights)]
    assert len(lengths) > 1 and lengths[-1] == min(lengths) < 14910 / 4


def test_a_chunk_has_rows():
    with pytest.raises(OperandError, match="rows of a chunk: received 0"):
        Chunks(0)


def test_products_leave_multiprocessors_while_they_last_as_long():
    beside = Beside()
    assert beside.leave(1e12) == 0
    beside.hold("first", 8, 3.0)
    beside.hold("second", 16, 2.0)
    assert beside.leave(1.0) == 16
    assert beside.leave(3.0) == 16, "one more of the first, one of the second"
    assert beside.leave(0.5) == 16
    assert beside.leave(1.0) == 16
    assert beside.leave(1.0) == 0
    beside.hold("third", 4, 1.0)
    beside.release("third")
    beside.release("third")
    assert beside.leave(1.0) == 0
