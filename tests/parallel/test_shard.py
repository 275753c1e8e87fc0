"""Placement and row ownership: everything is owned once, and rows travel with their metadata."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_same_bytes, generator, normal, row_unit_edges, tensor, tree_of

from h3lib.contract import SIZES, Contract, LayoutError
from h3lib.layout import CP_DEGREES, TP_DEGREES, Layout, Ownership, region_shape
from h3lib.model.block import block_parameters
from h3lib.model.weights import parameters
from h3lib.ops.tree import partial_roots
from h3lib.parallel.mesh import build_mesh, local_mesh
from h3lib.parallel.overlap import AS_SUITS, Chunks, ColumnProduct, RowProduct
from h3lib.parallel.shard import (
    COLUMN,
    GATED_COLUMN,
    REPLICATED,
    ROW,
    SeqShard,
    coshard,
    parameter_region,
    placement,
)
from h3lib.parallel.transport import ThreadWorld
from h3lib.rows import LogicalRows

SMALL = Contract(row_block=4, key_block=16)
BF16, F32 = torch.bfloat16, torch.float32
SHAPES = {name: shape for name, (shape, _) in block_parameters(SIZES["tiny"]).items()}
LAYOUTS = st.builds(
    Layout, st.sampled_from(TP_DEGREES), st.sampled_from(CP_DEGREES), st.booleans()
)


def shards(layout: Layout, num_rows: int, contract: Contract = SMALL) -> list[SeqShard]:
    """The places of all ranks, without anybody to talk to."""
    owner = Ownership.of(layout, num_rows, contract)
    return [SeqShard(owner, rank, local_mesh()) for rank in range(layout.num_ranks)]


def play(
    layout: Layout, num_rows: int, function, contract: Contract = SMALL, chunks: Chunks = AS_SUITS
) -> list:
    """function(shard) on every rank of a thread world."""
    owner, world = Ownership.of(layout, num_rows, contract), ThreadWorld(layout.num_ranks, 20)

    def mesh(rank: int):
        return build_mesh(layout, rank, world.connect, chunks)

    return world.run(lambda rank: function(SeqShard(owner, rank, mesh(rank))))


def double(rows: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return torch.mul(rows, 2, out=out)


def test_placement_of_every_parameter_of_a_block():
    expected = {
        "attn.to_q.weight": COLUMN,
        "attn.to_k.weight": COLUMN,
        "attn.to_v.weight": COLUMN,
        "attn.to_out.0.weight": ROW,
        "ff.net.0.proj.weight": GATED_COLUMN,
        "ff.net.2.weight": ROW,
        "adaln_proj.linear.weight": COLUMN,
        "adaln_proj.linear.bias": COLUMN,
        "norm1.weight": REPLICATED,
        "norm2.weight": REPLICATED,
        "attn.norm_q.weight": REPLICATED,
        "attn.norm_k.weight": REPLICATED,
    }
    assert {name: placement(name) for name in SHAPES} == expected
    for name, kind in expected.items():
        assert placement(f"transformer_blocks.49.{name}") == kind


def test_time_embedder_is_replicated():
    names = [name for name in parameters(SIZES["tiny"]) if name.startswith("time_embedder.")]
    assert len(names) == 4
    assert {placement(name) for name in names} == {REPLICATED}


@pytest.mark.parametrize(
    "name", ["attn.to_out.weight", "norm3.weight", "attn.to_q.weight.scale", "xattn.to_q.bias", ""]
)
def test_parameter_without_a_placement_is_refused(name):
    with pytest.raises(LayoutError, match=f"parameter name: received '{name}'; accepted: a param"):
        placement(name)


@pytest.mark.parametrize("tp", TP_DEGREES)
@pytest.mark.parametrize("name", SHAPES)
def test_tp_ranks_own_every_element_of_a_parameter_once(name, tp):
    shape, owner = SHAPES[name], Ownership.of(Layout(tp), 64, SMALL)
    count = torch.zeros(shape, dtype=torch.int64)
    for tp_rank in range(tp):
        region = parameter_region(name, shape, owner, tp_rank)
        index = [torch.tensor([i for part in ranges for i in part]) for ranges in region]
        count[torch.meshgrid(*index, indexing="ij")] += 1
        assert tuple(map(len, index)) == region_shape(region)
    times = tp if placement(name) == REPLICATED else 1
    assert (count == times).all()


def test_parts_are_whole_heads_units_and_both_halves_of_the_gated_weight():
    size, owner = SIZES["tiny"], Ownership.of(Layout(4), 64, SMALL)
    heads = size.attention_head_dim * size.num_attention_heads // 4

    def part(name):
        return parameter_region(name, SHAPES[name], owner, 1)

    assert part("attn.to_k.weight") == ((range(heads, 2 * heads),), (range(96),))
    assert part("attn.to_out.0.weight") == ((range(96),), (range(heads, 2 * heads),))
    assert part("ff.net.2.weight") == ((range(96),), (range(64, 128),))
    value, gate = range(64, 128), range(256 + 64, 256 + 128)
    assert part("ff.net.0.proj.weight") == ((value, gate), (range(96),))
    columns = range(432, 864)  # 18 x 96 columns in 8 units, two a rank
    assert part("adaln_proj.linear.bias") == ((columns,),)
    assert part("norm1.weight") == ((range(96),),)


@given(st.integers(1, 400), LAYOUTS)
def test_ranks_own_rows_and_units_once(num_rows, layout):
    ranks = shards(layout, num_rows)
    rows = Counter(row for shard in ranks for row in shard.shard_rows)
    assert rows == Counter(dict.fromkeys(range(num_rows), layout.tp))
    slices = Counter(row for shard in ranks for row in shard.slice_rows)
    assert slices == Counter(dict.fromkeys(range(num_rows), 1 if layout.sp else layout.tp))
    units = Counter((s.cp_rank, unit) for s in ranks for unit in s.feature_units)
    assert units == Counter((c, unit) for c in range(layout.cp) for unit in range(8))
    row_units = Counter(unit for shard in ranks for unit in shard.row_units)
    assert row_units == Counter(dict.fromkeys(range(64), 1 if layout.sp else layout.tp))


@given(st.integers(1, 400), LAYOUTS, st.sampled_from([SMALL, Contract()]))
def test_rows_of_a_rank_are_those_of_its_units(num_rows, layout, contract):
    edges = row_unit_edges(num_rows, contract.row_block, contract.key_block)
    for shard in shards(layout, num_rows, contract):
        blocks = [b for unit in shard.row_units for b in range(*edges[unit])]
        size = contract.row_block
        rows = [r for b in blocks for r in range(b * size, min((b + 1) * size, num_rows))]
        assert list(shard.slice_rows) == rows
        assert set(shard.slice_rows) <= set(shard.shard_rows)
        units = [unit for s in shard.sequence_units for unit in range(8 * s, 8 * s + 8)]
        assert set(shard.row_units) <= set(units)
        assert set(shard.row_units) == set(units) or layout.sp


def test_canonical_place_owns_everything():
    shard = SeqShard.canonical(264)
    assert (shard.feature_units, shard.sequence_units, shard.row_units) == (
        range(8),
        range(8),
        range(64),
    )
    assert shard.shard_rows == shard.slice_rows == range(264)
    assert (shard.cp_rank, shard.tp_rank, shard.contract) == (0, 0, Contract())


@pytest.mark.parametrize("cp,filled", [(2, 2), (3, 2), (4, 3), (5, 3), (6, 3), (7, 3), (8, 3)])
def test_264_rows_leave_ranks_without_rows(cp, filled):
    ranks = shards(Layout(1, cp), 264, Contract())
    assert sum(len(shard.shard_rows) > 0 for shard in ranks) == filled


def test_feature_range_is_cut_by_units():
    ranges = [shard.feature_range(48) for shard in shards(Layout(4), 8)]
    assert ranges == [range(0, 12), range(12, 24), range(24, 36), range(36, 48)]


@given(st.integers(0, 10**6), st.integers(1, 120), st.integers(0, 5), LAYOUTS)
def test_coshard_gives_each_rank_exactly_its_logical_rows_with_their_metadata(
    seed, num_rows, pad, layout
):
    order = torch.randperm(num_rows + pad, generator=generator(seed))
    keys = torch.cat((torch.arange(num_rows) * 3 - 7, torch.zeros(pad, dtype=torch.int64)))[order]
    document = torch.where(order < num_rows, 2, -1)
    rows = LogicalRows.of(torch.stack((document, keys), 1))
    values = torch.where(order < num_rows, order, -1)
    packed = normal(seed, num_rows + pad, 2, 3)
    logical = packed[torch.argsort(order)[:num_rows]]
    found = [coshard(shard, rows, values, packed) for shard in shards(layout, num_rows)]
    for shard, (numbers, part) in zip(shards(layout, num_rows), found, strict=True):
        assert numbers.tolist() == list(shard.slice_rows)
        assert_same_bytes(part, logical[shard.slice_rows.start : shard.slice_rows.stop])


@pytest.mark.parametrize(
    "name", ["tp4-cp2-sp", "tp4-cp2", "cp5", "tp8-cp8-sp", "tp4-cp6-sp-local8"]
)
@pytest.mark.parametrize("num_rows", [1, 131])
def test_rows_enter_and_leave_products_through_the_shard(name, num_rows):
    layout = Layout.parse(name)
    x = normal(0, num_rows, 3)
    leaves = normal(1, 8, num_rows, 3, dtype=F32)
    root = torch.from_numpy(tree_of(leaves.numpy()))
    every = torch.arange(num_rows)

    def main(shard):
        own = slice(shard.slice_rows.start, shard.slice_rows.stop)
        here = slice(shard.shard_rows.start, shard.shard_rows.stop)
        entered, (twice,) = shard.enter(x[own], [ColumnProduct(3, double)])
        assert_same_bytes(entered, x[here])
        assert_same_bytes(twice, 2 * x[here])
        assert_same_bytes(shard.gather_sequence(entered).value(), x)
        assert torch.equal(shard.gather_sequence(every[here]).value(), every)
        local = leaves[:, here]
        roots = partial_roots(local.__getitem__, shard.feature_units, 8)

        def make(ranges):
            return torch.cat([roots[:, r.start : r.stop] for r in ranges], dim=1)

        product = RowProduct(roots.shape[1], 3, 8, make)
        assert_same_bytes(shard.leave(product, BF16), root[own].to(BF16))
        return True

    for chunks in (AS_SUITS, Chunks(40)):
        assert all(play(layout, num_rows, main, chunks=chunks))


@pytest.mark.parametrize("name", ["tp4-cp2-sp", "tp2-cp3", "cp7", "tp4-cp6-sp-local8"])
def test_sums_over_units_are_the_tree_on_every_rank(name):
    layout = Layout.parse(name)
    leaves = {n: normal(n, n, 5, dtype=F32) for n in (8, 64)}
    roots = {n: tensor(tree_of(x.numpy())) for n, x in leaves.items()}

    def main(shard):
        def own(units, n):
            return partial_roots(leaves[n].__getitem__, units, n)

        assert_same_bytes(shard.sum_feature_units(own(shard.feature_units, 8), F32), roots[8])
        later = shard.sum_sequence_units(own(shard.sequence_units, 8), F32)
        assert_same_bytes(later.value(), roots[8])
        later = shard.sum_row_units(own(shard.row_units, 64), F32)
        assert_same_bytes(later.value(), roots[64])
        return True

    assert all(play(layout, 50, main))
