"""What is checked of the peer tree on GPUs, by the ranks of `bench/collectives_bits.py`.

A check is a generator of (case, value, expected, must they be equal). Expected is a plain
evaluation of the tree: leaves made from a seed, added two by two by torch, rounded once.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from h3lib.contract import subtree_roots
from h3lib.parallel import peer
from h3lib.parallel.collective import Collective, TreeCollective
from h3lib.parallel.gloo import GlooWorld
from h3lib.parallel.hierarchical import HierarchicalCollective
from h3lib.parallel.peer import PeerTree
from h3lib.parallel.peer_kernels import ADD
from h3lib.parallel.peer_sync import EPOCH

NUM_RANKS = 8
TIMEOUT_S = 60.0
BF16, F32 = torch.bfloat16, torch.float32
SIZES = (1, 7, 8, 1001, 4096, 65_543, 1 << 20)
BIG = ((2, 128 << 20), (4, 32 << 20), (8, (8 << 20) + 5))  # ranks, elements: 512 MB of FP32 roots
HIERARCHIES = ((2, 2), (2, 4), (4, 2))  # nodes, ranks of a node
Check = tuple[str, Tensor, Tensor, bool]
"""(case, value, expected, must they be equal)."""


def leaves_of(seed: int, num_leaves: int, *shape: int, integer: bool = False) -> list[Tensor]:
    """The leaves of all ranks, the same on each."""
    generator = torch.Generator("cuda").manual_seed(seed)
    make = functools.partial(torch.randn, device="cuda", generator=generator)
    if integer:
        make = functools.partial(torch.randint, -99, 100, device="cuda", generator=generator)
        return [make(shape).float() for _ in range(num_leaves)]
    return [make(shape) for _ in range(num_leaves)]


def plain_tree(leaves: list[Tensor]) -> Tensor:
    """((0 + 1) + (2 + 3)) + ..., two leaves at a time."""
    while len(leaves) > 1:
        leaves = [a + b for a, b in zip(leaves[::2], leaves[1::2], strict=True)]
    return leaves[0]


def roots_of(leaves: list[Tensor], cuts: list[int], rank: int) -> Tensor:
    """What a rank brings: the roots of the leaves it owns."""
    spans = subtree_roots(cuts[rank], cuts[rank + 1], len(leaves))
    if not spans:
        return leaves[0].new_empty(0, *leaves[0].shape)
    return torch.stack([plain_tree(leaves[span.start : span.stop]) for span in spans])


def even(total: int, parts: int) -> list[int]:
    return [total * i // parts for i in range(parts + 1)]


class Bench:
    """One rank: its world, the peer trees it has opened, and what is checked with them."""

    def __init__(self, quick: bool):
        torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
        groups = {tuple(range(n)): None for n in range(1, NUM_RANKS + 1)}
        for nodes, local in HIERARCHIES:
            ranks = range(nodes * local)
            for rank in ranks:
                first = rank - rank % local
                groups[tuple(range(first, first + local))] = None
                groups[tuple(ranks[rank % local :: local])] = None
        self.world = GlooWorld(list(groups), TIMEOUT_S)
        self.rank, self.quick = self.world.rank, quick
        self.trees: dict[tuple, PeerTree] = {}

    def tree(self, ranks: tuple[int, ...], **options) -> PeerTree:
        key = (ranks, *sorted(options.items()))
        if key not in self.trees:
            control = self.world.connect(ranks, self.rank)
            self.trees[key] = PeerTree(control, **options)
        return self.trees[key]

    def flat(self, size: int, **options) -> Collective:
        return TreeCollective(self.tree(tuple(range(size)), **options))

    def hierarchy(self, nodes: int, local: int) -> Collective:
        """A peer tree inside a node, Gloo between the nodes."""
        first = self.rank - self.rank % local
        equals = tuple(range(self.rank % local, nodes * local, local))
        return HierarchicalCollective(
            self.tree(tuple(range(first, first + local))), self.world.connect(equals, self.rank)
        )

    def close(self) -> None:
        for tree in self.trees.values():
            tree.close()
        self.world.close()


def check_all_reduce(bench: Bench, size: int) -> Iterator[Check]:
    """Every size, one-shot and two-shot, FP32 and BF16; a strided and an unaligned operand."""
    collective, cuts = bench.flat(size), even(8, size)
    for n in SIZES[:: 2 if bench.quick else 1]:
        leaves = leaves_of(n + size, 8, n)
        roots, root = roots_of(leaves, cuts, bench.rank), plain_tree(leaves)
        for dtype in (F32, BF16):
            yield f"{n} to {dtype}", collective.all_reduce(roots, cuts, dtype), root.to(dtype), True
    shifted = torch.empty(roots.numel() + 1, device="cuda")[1:].view(roots.shape).copy_(roots)
    yield "unaligned view", collective.all_reduce(shifted, cuts, BF16), root.to(BF16), True
    wide = torch.empty(*roots.shape, 2, device="cuda")
    wide[..., 1] = roots
    yield "strided view", collective.all_reduce(wide[..., 1], cuts, BF16), root.to(BF16), True
    shape, leaves = (60, 35), [leaf[:2100].view(35, 60).T for leaf in leaves]
    roots, root = roots_of(leaves, cuts, bench.rank), plain_tree(leaves)
    roots = roots.transpose(1, 2).contiguous().transpose(1, 2)
    assert root.shape == shape
    yield "transposed view", collective.all_reduce(roots, cuts, F32), root.contiguous(), True


def check_cuts(bench: Bench, size: int) -> Iterator[Check]:
    """Uneven cuts: several roots a rank, ranks without leaves, 64 row units."""
    collective = bench.flat(size)
    for leaves_count, seed in ((8, 1), (8, 2), (64, 3)):
        g = torch.Generator().manual_seed(seed + size)
        inner = torch.randint(leaves_count + 1, (size - 1,), generator=g).tolist()
        cuts = [0, *sorted(inner), leaves_count]
        leaves = leaves_of(seed, leaves_count, 5003)
        roots, root = roots_of(leaves, cuts, bench.rank), plain_tree(leaves)
        for n in (5003, 11):
            value = collective.all_reduce(roots[:, :n], cuts, BF16)
            yield f"leaves {cuts}, {n}", value, root[:n].to(BF16), True


def check_reduce_scatter(bench: Bench, size: int) -> Iterator[Check]:
    """Rows of any number a rank, none for some; odd widths."""
    collective, cuts = bench.flat(size), even(8, size)
    for rows, width in ((264, 5376), (37, 35)):
        leaves = leaves_of(rows, 8, rows, width)
        roots, root = roots_of(leaves, cuts, bench.rank), plain_tree(leaves)
        for name, row_cuts in (
            ("even", even(rows, size)),
            ("uneven", [rows * i * i // (size * size) for i in range(size + 1)]),
            ("empty", [0] * size + [rows]),
        ):
            own = slice(row_cuts[bench.rank], row_cuts[bench.rank + 1])
            for dtype in (F32, BF16):
                value = collective.reduce_scatter_rows(roots, cuts, row_cuts, dtype)
                yield f"{rows} x {width} {name} to {dtype}", value, root[own].to(dtype), True


def check_gather(bench: Bench, size: int) -> Iterator[Check]:
    """Rows and columns of every dtype, uneven and empty parts."""
    collective = bench.flat(size)
    for rows, width in ((264, 1344), (37, 3)):
        for name, cuts in (("even", even(rows, size)), ("empty", [0] * size + [rows])):
            own = slice(cuts[bench.rank], cuts[bench.rank + 1])
            for dtype in (BF16, F32, torch.int64, torch.int16):
                whole = (leaves_of(rows, 1, rows, width)[0] * 50).to(dtype)
                case = f"{rows} x {width} {name} {dtype}"
                yield f"rows {case}", collective.all_gather_rows(whole[own], cuts), whole, True
                columns = whole.T.contiguous()
                value = collective.all_gather_columns(columns[:, own], cuts)
                yield f"columns {case}", value, columns, True


def check_integers(bench: Bench, size: int) -> Iterator[Check]:
    """Integer leaves: the sum is exact in any order and known without a tree."""
    collective, cuts = bench.flat(size), even(8, size)
    leaves = leaves_of(5, 8, 20_001, integer=True)
    exact = torch.stack(leaves).double().sum(0).float()
    value = collective.all_reduce(roots_of(leaves, cuts, bench.rank), cuts, F32)
    yield "sum of integers", value, exact, True


def check_back_to_back(bench: Bench, size: int) -> Iterator[Check]:
    """Calls of changing size without waiting, some ranks late, the free slot poisoned, other
    allocations and another group in between, another stream busy."""
    collective = bench.flat(size, checked=False)
    tree, cuts = collective.transport, even(8, size)
    other = bench.tree(tuple(range(size)))
    g = torch.Generator().manual_seed(size)
    counts = torch.randint(1, 200_000, (6 if bench.quick else 16,), generator=g).tolist()
    inputs = [leaves_of(i, 8, n) for i, n in enumerate(counts)]
    mine = [roots_of(leaves, cuts, bench.rank) for leaves in inputs]
    busy, side = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    values = []
    for i, roots in enumerate(mine):
        if (i + bench.rank) % 5 == 0:
            time.sleep(0.01)
        if (i + bench.rank) % 3 == 0:
            torch.cuda._sleep(2_000_000)
        with torch.cuda.stream(side):
            busy = (busy @ busy).clamp(-1, 1)
        _poison_free_slot(tree)
        values.append(collective.all_reduce(roots, cuts, (BF16, F32)[i % 2]))
        if i % 4 == 1:
            torch.empty(1 << 22, device="cuda").fill_(float("nan"))
            other.gather(torch.ones(3, device="cuda"), [3] * size)
    tree.check()
    for i, (value, leaves) in enumerate(zip(values, inputs, strict=True)):
        yield f"call {i}, {counts[i]}", value, plain_tree(leaves).to(value.dtype), True


def _poison_free_slot(tree: PeerTree) -> None:
    """NaN into this rank's slots of the last epoch of each channel, which nobody uses any more.

    The slots of the coming epoch belong to the peers already: they may have written them.
    """
    steps = tree._steps
    start, channels = steps.buffers.addresses[steps.rank], steps.shape.channels
    pages = steps.driver.words(start, steps.head_words).view(channels, -1)
    count = 2 * channels * steps.slot_words
    slots = steps.driver.words(start + steps.head_words * 8, count).view(2, channels, -1)
    last = torch.arange(2, device="cuda")[:, None] == pages[:, EPOCH.value] % 2
    slots.masked_fill_(last[:, :, None], -1)


def check_graph(bench: Bench, size: int) -> Iterator[Check]:
    """A captured all-reduce, gather and reduce-scatter, replayed on changing inputs."""
    collective, cuts = bench.flat(size), even(8, size)
    rows = even(64, size)
    own = slice(rows[bench.rank], rows[bench.rank + 1])
    count = 3 if bench.quick else 8
    inputs = [leaves_of(i, 8, 64, 1000) for i in range(count)]
    roots = roots_of(inputs[0], cuts, bench.rank)

    def step() -> tuple[Tensor, Tensor, Tensor]:
        total = collective.all_reduce(roots, cuts, F32)
        part = collective.reduce_scatter_rows(roots, cuts, rows, BF16)
        return total, part, collective.all_gather_rows(part, rows)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total, part, gathered = step()
    for i, leaves in enumerate(inputs):
        roots.copy_(roots_of(leaves, cuts, bench.rank))
        graph.replay()
        collective.transport.check()
        root = plain_tree(leaves)
        yield f"replay {i} all-reduce", total.clone(), root, True
        yield f"replay {i} reduce-scatter", part.clone(), root[own].to(BF16), True
        yield f"replay {i} gather", gathered.clone(), root.to(BF16), True


def check_mutant(bench: Bench, size: int) -> Iterator[Check]:
    """The roots added in rank order: FP32 results differ where that is another tree."""
    if size < 4:
        return
    collective, cuts = bench.flat(size), even(8, size)
    leaves = leaves_of(9, 8, 100_000)
    roots, root = roots_of(leaves, cuts, bench.rank), plain_tree(leaves)
    original = peer.tree_programs

    def in_rank_order(cuts: tuple[int, ...], first: int, size: int) -> tuple[tuple, ...]:
        pushes = [step for step in original(cuts, first, size)[0] if step[0] != ADD]
        chain = [pushes[0]]
        for push in pushes[1:]:
            chain += [push, (ADD, 0)]
        return (tuple(chain),)

    peer.tree_programs = in_rank_order
    try:
        value = collective.all_reduce(roots, cuts, F32)
    finally:
        peer.tree_programs = original
    yield "roots in rank order", value, root, False


def check_big(bench: Bench, size: int) -> Iterator[Check]:
    """Up to 512 MB of FP32 roots a rank."""
    for ranks, n in BIG:
        if ranks != size or bench.quick:
            continue
        collective, cuts = bench.flat(size), even(size, size)
        leaves = leaves_of(n, size, n)
        value = collective.all_reduce(leaves[bench.rank][None], cuts, BF16)
        yield f"{4 * n} bytes", value, plain_tree(leaves).to(BF16), True
        del leaves, value
        torch.cuda.empty_cache()


def check_hierarchy(bench: Bench, nodes: int, local: int) -> Iterator[Check]:
    """Two levels: the peer tree inside a node, Gloo between equal ranks of the nodes."""
    size = nodes * local
    collective, g = bench.hierarchy(nodes, local), torch.Generator().manual_seed(size)
    uneven = [0, *sorted(torch.randint(9, (size - 1,), generator=g).tolist()), 8]
    for cuts in (even(8, size), uneven):
        for rows, width in ((61, 5), (264, 336)):
            leaves = leaves_of(rows, 8, rows, width)
            roots, root = roots_of(leaves, cuts, bench.rank), plain_tree(leaves)
            case = f"leaves {cuts}, {rows} x {width}"
            for dtype in (F32, BF16):
                value = collective.all_reduce(roots, cuts, dtype)
                yield f"all-reduce {case} to {dtype}", value, root.to(dtype), True
            rows_of = even(rows, size)
            own = slice(rows_of[bench.rank], rows_of[bench.rank + 1])
            value = collective.reduce_scatter_rows(roots, cuts, rows_of, BF16)
            yield f"reduce-scatter {case}", value, root[own].to(BF16), True
            yield f"gather {case}", collective.all_gather_rows(root[own], rows_of), root, True


CHECKS = (
    check_all_reduce,
    check_cuts,
    check_reduce_scatter,
    check_gather,
    check_integers,
    check_mutant,
    check_back_to_back,
    check_graph,
    check_big,
)
