"""Collectives over threads against the tree in NumPy: roots, rounding, cuts, failures on all."""

import itertools
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_same_bytes, cuts_of, f32, normal, round_bf16, special, tensor, tree_of

from h3lib.contract import OperandError, PeerError, subtree_roots
from h3lib.ops.tree import partial_roots
from h3lib.parallel.collective import LocalCollective, TreeCollective
from h3lib.parallel.control import RingControl
from h3lib.parallel.hierarchical import HierarchicalCollective
from h3lib.parallel.transport import ThreadWorld, even_slices, num_roots

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
# nodes x ranks on a node; one node and one rank a node are corners of the hierarchy
SHAPES = [*itertools.product((1, 2, 3, 4), (1, 2, 3, 4)), (2, 8), (8, 2), (6, 1)]
FLAT = list(range(1, 9))


def roots_of(leaves: torch.Tensor, cuts: list[int], rank: int) -> torch.Tensor:
    """The rank's subtree roots; none for a rank without leaves."""
    if cuts[rank] == cuts[rank + 1]:
        return leaves[:0]
    return partial_roots(leaves.__getitem__, range(cuts[rank], cuts[rank + 1]), len(leaves))


def flat(world: ThreadWorld, rank: int) -> TreeCollective:
    return TreeCollective(world.connect(range(world.size), rank))


def hierarchy(nodes: int, local: int):
    """Opens a hierarchical collective of nodes x local ranks, node-major."""

    def connect(world: ThreadWorld, rank: int) -> HierarchicalCollective:
        first = rank - rank % local
        here = world.connect(range(first, first + local), rank)
        equals = world.connect(range(rank % local, world.size, local), rank)
        return HierarchicalCollective(here, equals)

    return connect


def play(size: int, connect, function) -> list:
    """function(collective, rank) on every rank of a thread world."""
    world = ThreadWorld(size, timeout_s=20)
    return world.run(lambda rank: function(connect(world, rank), rank))


def on_every(function):
    """Run a test on flat worlds of 1 to 8 ranks and on the hierarchies."""
    cases = [pytest.param(n, flat, id=f"flat{n}") for n in FLAT]
    cases += [pytest.param(n * m, hierarchy(n, m), id=f"{n}x{m}") for n, m in SHAPES]
    return pytest.mark.parametrize("size,connect", cases)(function)


def check_sum(leaves: torch.Tensor, cuts: list[int], size: int, connect, dtype=BF16) -> None:
    """All-reduce: every rank has the rounded root, and the slices observed are the FP32 root."""
    root = np.asarray(tree_of(f32(leaves)))
    expected = tensor(root if dtype == F32 else round_bf16(root), dtype)
    seen = [[] for _ in range(size)]

    def main(collective, rank):
        assert (collective.rank, collective.size) == (rank, size)
        observe = lambda part, start: seen[rank].append((part.clone(), start))  # noqa: E731
        return collective.all_reduce(roots_of(leaves, cuts, rank), cuts, dtype, observe)

    for rank, found in enumerate(play(size, connect, main)):
        assert_same_bytes(found, expected, f"rank {rank}")
    flat_root = torch.from_numpy(root.reshape(-1))
    covered = torch.zeros(len(flat_root), dtype=torch.bool)
    for rank in range(size):
        ((part, start),) = seen[rank]
        assert_same_bytes(part, flat_root[start : start + len(part)], f"root of rank {rank}")
        covered[start : start + len(part)] = True
    assert covered.all()


@on_every
def test_all_reduce_of_uneven_leaves_is_the_tree(size, connect):
    for seed, leaves in enumerate((16, 64)):
        cuts = cuts_of(seed + size, leaves, size)
        check_sum(normal(seed, leaves, 5, 3, dtype=F32), cuts, size, connect)


@pytest.mark.parametrize("size", FLAT)
def test_all_reduce_over_the_contracts_cuts(size):
    for units in (8, 64):
        cuts = [units * r // size for r in range(size + 1)]
        check_sum(special(size, units, 11, dtype=F32), cuts, size, flat)


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(0, 9), st.sampled_from([BF16, F32]))
def test_any_cut_with_ranks_without_leaves_and_any_number_of_elements(seed, size, elements, dtype):
    leaves = special(seed, 8, elements, dtype=F32)
    check_sum(leaves, cuts_of(seed, 8, size, empty=True), size, flat, dtype)


@given(st.integers(0, 10**6), st.sampled_from(SHAPES), st.integers(0, 9))
def test_any_cut_over_a_hierarchy_with_fewer_elements_than_ranks(seed, shape, elements):
    size = shape[0] * shape[1]
    leaves = special(seed, 64, elements, dtype=F32)
    check_sum(leaves, cuts_of(seed, 64, size), size, hierarchy(*shape))


@on_every
def test_reduce_scatter_leaves_each_rank_its_rows_and_their_root(size, connect):
    leaves = normal(size, 16, 10, 3, dtype=F32)
    root = torch.from_numpy(tree_of(f32(leaves)))
    leaf_cuts, row_cuts = cuts_of(size, 16, size), cuts_of(size, 10, size, empty=True)

    def main(collective, rank):
        seen = []
        roots = roots_of(leaves, leaf_cuts, rank)
        found = collective.reduce_scatter_rows(
            roots, leaf_cuts, row_cuts, BF16, lambda part, start: seen.append((part, start))
        )
        return found, seen

    for rank, (found, seen) in enumerate(play(size, connect, main)):
        own = slice(row_cuts[rank], row_cuts[rank + 1])
        assert_same_bytes(found, root[own].to(BF16), f"rank {rank}")
        ((part, start),) = seen
        assert start == 3 * row_cuts[rank]
        assert_same_bytes(part, root[own].reshape(-1), f"root of rank {rank}")


@on_every
def test_gathers_put_uneven_and_empty_parts_in_rank_order(size, connect):
    for seed, dtype in enumerate((BF16, F32, torch.int64)):
        whole = torch.arange(12 * 6).view(12, 2, 3).to(dtype)
        cuts = cuts_of(seed + size, 12, size, empty=True)
        shifted = [5 + c for c in cuts]  # cuts need not start at 0

        def main(collective, rank, whole=whole, cuts=cuts, shifted=shifted):
            part = whole[cuts[rank] : cuts[rank + 1]]
            rows = collective.all_gather_rows(part, shifted)
            columns = collective.all_gather_columns(part.movedim(0, -1), cuts)
            return rows, columns

        for rows, columns in play(size, connect, main):
            assert_same_bytes(rows, whole)
            assert_same_bytes(columns, whole.movedim(0, -1).contiguous())
            assert columns.is_contiguous()


@pytest.mark.parametrize("connect", [flat, hierarchy(2, 2)], ids=["flat", "2x2"])
def test_operands_that_are_not_contiguous_are_reduced_and_gathered(connect):
    leaves, cuts = normal(0, 8, 6, 5, dtype=F32), [0, 2, 5, 7, 8]
    expected = torch.from_numpy(tree_of(f32(leaves)))

    def main(collective, rank):
        roots = roots_of(leaves, cuts, rank).transpose(1, 2).contiguous().transpose(1, 2)
        assert not roots.is_contiguous()
        part = roots[0, :, ::2]
        return (
            collective.all_reduce(roots, cuts, F32),
            collective.reduce_scatter_rows(roots, cuts, [0, 1, 3, 3, 6], F32),
            collective.all_gather_rows(part[rank : rank + 1], [0, 1, 2, 3, 4]),
            part[rank : rank + 1].clone(),
        )

    found = play(4, connect, main)
    for rank, (total, rows, gathered, _) in enumerate(found):
        assert_same_bytes(total, expected)
        own = slice(*[0, 1, 3, 3, 6][rank : rank + 2])
        assert_same_bytes(rows, expected[own])
        assert_same_bytes(gathered, torch.cat([part for *_, part in found]))


@on_every
def test_integer_valued_data_has_its_known_sum(size, connect):
    """Leaf i holds (i + 1) k for element k: the sum is 136 k, exact in FP32 and in BF16."""
    k = torch.arange(16.0)
    leaves, cuts = torch.arange(1.0, 17.0)[:, None] * k, cuts_of(size, 16, size)

    def main(collective, rank):
        return collective.all_reduce(roots_of(leaves, cuts, rank), cuts, F32)

    for found in play(size, connect, main):
        assert found.tolist() == (136 * k).tolist()


@pytest.mark.parametrize("connect", [flat, hierarchy(2, 2)], ids=["flat", "2x2"])
def test_probes_read_the_tree_back_across_ranks(connect):
    """2^25 + 1 and 1 - 2^25 lose the 1: it is left only where both meet before it."""
    places = list(itertools.permutations(range(8), 3))
    leaves = torch.zeros(8, len(places))
    for column, (i, j, k) in enumerate(places):
        leaves[[i, j, k], column] = torch.tensor([2.0**25, 1.0, -(2.0**25)])
    expected = []
    for i, j, k in places:
        level = (i ^ k).bit_length()
        expected.append(0.0 if j >> level == i >> level else 1.0)
    for cuts in ([0, 2, 4, 6, 8], [0, 1, 4, 7, 8], [0, 3, 5, 6, 8]):

        def main(collective, rank, cuts=cuts):
            return collective.all_reduce(roots_of(leaves, cuts, rank), cuts, F32)

        for found in play(4, connect, main):
            assert found.tolist() == expected


def test_rounding_happens_once_after_the_root():
    """Halves of a BF16 step: partials rounded first give 1, the root rounded once 1 + 2^-7."""
    leaves, cuts = torch.tensor([[1.0], [2.0**-8], [2.0**-8], [2.0**-9]]), [0, 1, 2, 3, 4]
    found = play(4, flat, lambda c, r: c.all_reduce(leaves[r : r + 1], cuts, BF16))
    assert [f.item() for f in found] == [1 + 2.0**-7] * 4
    ring = play(
        4,
        lambda world, rank: RingControl(world.connect(range(4), rank)),
        lambda c, r: c.all_reduce(leaves[r : r + 1], cuts, BF16),
    )
    assert ring[0].item() != found[0].item()


def test_fp64_roots_stay_fp64():
    leaves, cuts = normal(0, 8, 7, dtype=F64), [0, 3, 8]
    found = play(2, flat, lambda c, r: c.all_reduce(roots_of(leaves, cuts, r), cuts, F64))
    assert_same_bytes(found[0], torch.from_numpy(tree_of(leaves.numpy())))


def test_a_world_of_one_is_the_canonical_tree_without_threads():
    leaves = normal(1, 8, 4, 3, dtype=F32)
    root, seen = torch.from_numpy(tree_of(f32(leaves))), []
    local = LocalCollective()
    roots = roots_of(leaves, [0, 8], 0)
    assert (local.rank, local.size) == (0, 1)
    found = local.all_reduce(roots, [0, 8], BF16, lambda *slice: seen.append(slice))
    assert_same_bytes(found, root.to(BF16))
    assert seen[0][1] == 0
    assert_same_bytes(seen[0][0], root.reshape(-1))
    assert_same_bytes(local.reduce_scatter_rows(roots, [0, 8], [0, 4], F32), root)
    assert_same_bytes(local.all_gather_rows(root, [0, 4]), root)
    assert_same_bytes(local.all_gather_columns(root, [0, 3]), root)


def test_slices_are_even_and_cover_the_elements():
    for elements in range(0, 20):
        for slices in range(1, 9):
            parts = even_slices(elements, slices)
            assert [i for a, b in parts for i in range(a, b)] == list(range(elements))
            sizes = [b - a for a, b in parts]
            assert len(parts) == slices and max(sizes) - min(sizes) <= 1
    assert num_roots([0, 2, 5, 8], 1) == len(subtree_roots(2, 5, 8)) == 2


def errors_of(size: int, connect, function) -> list[str]:
    """What every rank raised; a rank that raised nothing is an empty string."""

    def main(collective, rank):
        try:
            function(collective, rank)
        except (PeerError, OperandError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return play(size, connect, main)


WRONG = {
    "columns": lambda c, r: c.all_reduce(torch.zeros(1, 7 + (r == 2)), [0, 1, 2, 3, 4], F32),
    "rows": lambda c, r: c.reduce_scatter_rows(
        torch.zeros(1, 8 + (r == 2), 3), [0, 1, 2, 3, 4], [0, 2, 4, 6, 8 + (r == 2)], F32
    ),
    "dtype of roots": lambda c, r: c.all_reduce(
        torch.zeros(1, 8, dtype=F64 if r == 2 else F32), [0, 1, 2, 3, 4], F32
    ),
    "dtype of the result": lambda c, r: c.all_reduce(
        torch.zeros(1, 8), [0, 1, 2, 3, 4], BF16 if r == 2 else F32
    ),
    "dtype of rows": lambda c, r: c.all_gather_rows(
        torch.zeros(1, 3, dtype=BF16 if r == 2 else F32), [0, 1, 2, 3, 4]
    ),
    "width of rows": lambda c, r: c.all_gather_rows(torch.zeros(1, 3 + (r == 2)), [0, 1, 2, 3, 4]),
    "shape of as many elements": lambda c, r: c.all_reduce(
        torch.zeros((1, 3, 8) if r == 2 else (1, 8, 3)), [0, 1, 2, 3, 4], F32
    ),
    "rows of as many elements": lambda c, r: c.all_gather_rows(
        torch.zeros((1, 3, 2) if r == 2 else (1, 2, 3)), [0, 1, 2, 3, 4]
    ),
    "columns for rows": lambda c, r: (c.all_gather_columns if r == 2 else c.all_gather_rows)(
        torch.zeros(1, 1), [0, 1, 2, 3, 4]
    ),
    "leaf cuts": lambda c, r: c.all_reduce(
        torch.zeros(1, 8), [0, 4, 6, 8, 16] if r == 3 else [0, 4, 8, 12, 16], F32
    ),
    "row cuts": lambda c, r: c.all_gather_rows(
        torch.zeros(2 if r == 2 else 1, 3), [0, 1, 2, 4, 5] if r == 2 else [0, 1, 2, 3, 4]
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("connect", [flat, hierarchy(1, 4)], ids=["flat", "1x4"])
def test_a_rank_that_disagrees_raises_on_every_rank(wrong, connect):
    errors = errors_of(4, connect, WRONG[wrong])
    assert all(error.startswith("PeerError: ") for error in errors), errors
    assert all("received" in error and "accepted" in error for error in errors)
    assert len(set(errors)) == 1  # every rank says the same


def test_the_error_names_the_ranks_and_both_shapes():
    (message, *_) = errors_of(4, flat, WRONG["width of rows"])
    accepted = "received (4, 4); accepted: (4, 3) as on rank 0 of the group"
    assert f"shape of all_gather_rows on rank 2 of the group: {accepted}" in message
    (message, *_) = errors_of(4, flat, WRONG["dtype of rows"])
    accepted = "received 'torch.bfloat16'; accepted: 'torch.float32' as on rank 0"
    assert f"dtype of all_gather_rows on rank 2 of the group: {accepted}" in message


def test_an_exchange_without_a_call_names_both_ranks():
    def exchange(collective, rank):
        parts = [torch.zeros(1 + (rank == 2 and r == 1)) for r in range(4)]
        collective.transport.exchange(parts, [(1,)] * 4)

    (message, *_) = errors_of(4, flat, exchange)
    assert "shape sent by rank 2 of the group to rank 1 of the group: received (2,);" in message


@pytest.mark.parametrize("wrong", ["width of rows", "dtype of roots"])
def test_a_rank_that_disagrees_in_a_hierarchy_ends_the_world(wrong):
    """Its node raises; the other node, waiting for it, is released."""
    began = time.monotonic()
    with pytest.raises(PeerError, match="on rank 1 of the group|on rank 0 of the group"):
        play(4, hierarchy(2, 2), WRONG[wrong])
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "call,reason",
    [
        (
            lambda c: c.all_gather_rows(torch.zeros(3, 2), [0, 4]),
            "rows of rank 0: received 3; accepted: 4: 0 to 4",
        ),
        (lambda c: c.all_gather_columns(torch.zeros(2, 3), [0, 4]), "received 3; accepted: 4"),
        (
            lambda c: c.all_reduce(torch.zeros(2, 3), [0, 8], F32),
            "subtree roots of rank 0: received 2; accepted: 1",
        ),
        (
            lambda c: c.reduce_scatter_rows(torch.zeros(0, 3, 2), [0, 8], [0, 3], F32),
            "subtree roots of rank 0: received 0; accepted: 1",
        ),
    ],
)
def test_operands_that_are_not_the_ranks_part_are_refused(call, reason):
    with pytest.raises(OperandError, match=reason):
        call(LocalCollective())


@pytest.mark.parametrize("connect", [flat, hierarchy(2, 2)], ids=["flat", "2x2"])
def test_a_rank_that_raises_releases_the_others_and_its_error_is_the_one_raised(connect):
    cuts, ended = [0, 1, 2, 3, 4], []

    def main(collective, rank):
        try:
            collective.all_gather_rows(torch.zeros(1, 2), cuts)
            collective.all_gather_rows(torch.zeros(1 + (rank == 3), 2), cuts)
        finally:
            ended.append(rank)

    began, threads = time.monotonic(), threading.active_count()
    with pytest.raises(OperandError, match="rows of rank 3: received 2; accepted: 1: 3 to 4"):
        play(4, connect, main)
    assert sorted(ended) == [0, 1, 2, 3]
    assert threading.active_count() == threads
    assert time.monotonic() - began < 10


def test_a_rank_that_never_comes_is_a_peer_error_after_the_timeout():
    world = ThreadWorld(3, timeout_s=0.2)

    def main(rank):
        if rank:
            flat(world, rank).all_gather_rows(torch.zeros(1), [0, 1, 2, 3])

    with pytest.raises(PeerError, match="peer rank: received 'failed or late'; .* in 0.2 s"):
        world.run(main)


def test_the_order_in_which_ranks_arrive_changes_no_bit():
    leaves, cuts = normal(5, 8, 40, dtype=F32), [0, 2, 3, 6, 8]
    expected = torch.from_numpy(tree_of(f32(leaves)))
    for late in range(4):

        def main(collective, rank, late=late):
            time.sleep(0.02 * (rank == late))
            return collective.all_reduce(roots_of(leaves, cuts, rank), cuts, F32)

        world = ThreadWorld(4, timeout_s=20, num_running=4)
        for found in world.run(lambda rank, world=world, main=main: main(flat(world, rank), rank)):
            assert_same_bytes(found, expected)


def test_what_a_rank_receives_is_its_own_copy():
    def main(collective, rank):
        part = torch.full((1, 2), float(rank))
        gathered = collective.all_gather_rows(part, [0, 1, 2])
        part.fill_(-1.0)
        collective.all_gather_rows(part, [0, 1, 2])
        return gathered

    for found in play(2, flat, main):
        assert found.tolist() == [[0.0, 0.0], [1.0, 1.0]]
