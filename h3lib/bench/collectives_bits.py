"""Bits of the peer tree on GPUs: `python -m h3lib.bench.collectives_bits --out FILE`.

Eight ranks (sharing a GPU if there are fewer), worlds of 1 to 8 of them. Every result is compared,
as integers, with a plain evaluation of the tree: leaves made here from a seed, added two by two by
torch, rounded once. A mutant that adds in rank order must differ. One finding a check and case,
summed over the ranks; `tests/parallel/test_peer_gpu.py` asserts the same findings.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from h3lib.bench.gemm_bits import Finding
from h3lib.bench.measure import environment
from h3lib.compare import different_elements
from h3lib.contract import PeerError, subtree_roots
from h3lib.parallel import peer
from h3lib.parallel.collective import Collective, TreeCollective
from h3lib.parallel.gloo import GlooWorld
from h3lib.parallel.hierarchical import HierarchicalCollective
from h3lib.parallel.launch import die_with_launcher, run_ranks
from h3lib.parallel.peer import PeerTree
from h3lib.parallel.peer_kernels import ADD
from h3lib.parallel.peer_sync import EPOCH, PAGE_WORDS

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
    """NaN into the slot of the coming epoch, which no peer reads any more."""
    steps = tree._steps
    start = steps.buffers.addresses[steps.rank] + PAGE_WORDS.value * 8
    words = steps.driver.words(start, 2 * steps.slot_words).view(2, -1)
    coming = (steps.page[EPOCH.value] + 1) % 2
    mask = (torch.arange(2, device="cuda") == coming)[:, None]
    words[:, : 1 << 16].masked_fill_(mask, -1)


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
            chain += [push, (ADD, 0, 0)]
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


def run_checks(
    bench: Bench, sizes: list[int], after: Callable[[str, list[Finding]], None]
) -> None:
    """Every check in every world, `after` each of them; ranks outside a world wait for it."""
    plan = [
        (f"{check.__name__[6:]}, {n} ranks", n, functools.partial(check, bench, n))
        for check in CHECKS
        for n in sizes
    ]
    for nodes, local in HIERARCHIES:
        check = functools.partial(check_hierarchy, bench, nodes, local)
        plan.append((f"hierarchy, {nodes} nodes of {local}", nodes * local, check))
    for name, size, check in plan:
        began, findings = time.monotonic(), []
        if bench.rank < size:
            for case, value, expected, equal in check():
                shaped = (value.dtype, value.shape) == (expected.dtype, expected.shape)
                different = int(different_elements(value, expected).sum()) if shaped else -1
                findings.append(Finding(name, case, value.numel(), different, equal))
        found = merged(bench.world.gather_objects(findings))
        after(f"{name}: {time.monotonic() - began:.1f} s", found)


def merged(ranks: list[list[Finding]]) -> list[Finding]:
    """One finding a check and case: elements and differences of all its ranks together."""
    cases: dict[tuple[str, str], list[Finding]] = {}
    for findings in ranks:
        for finding in findings:
            cases.setdefault((finding.check, finding.case), []).append(finding)
    total = []
    for (check, case), found in cases.items():
        wrong = [f.different for f in found]
        different = -1 if -1 in wrong else sum(wrong)
        elements, equal = sum(f.elements for f in found), found[0].expected_equal
        total.append(Finding(check, case, elements, different, equal))
    return total


def rank_main(options: argparse.Namespace) -> None:
    """A rank: run the checks; rank 0 writes the report after each of them."""
    die_with_launcher()
    bench, findings = Bench(options.quick), []

    def after(line: str, found: list[Finding]) -> None:
        findings.extend(found)
        if bench.rank == 0:
            wrong = [finding for finding in found if not finding.passed]
            print(line, *wrong[:5], flush=True)
            _write(options, findings, complete=False)

    run_checks(bench, options.ranks, after)
    bench.close()
    if bench.rank == 0:
        _write(options, findings, complete=True)
        print(f"{len(findings)} findings, {sum(not f.passed for f in findings)} failed")


def _write(options: argparse.Namespace, findings: list[Finding], complete: bool) -> None:
    gpus = torch.cuda.device_count()
    content = {
        "environment": environment() | {"commit": options.commit},
        "gpus": gpus,
        "ranks": NUM_RANKS,
        "ranks_per_gpu": -(-NUM_RANKS // gpus),
        "transports": ["peer inside a node", "gloo between nodes"],
        "findings": [asdict(finding) | {"passed": finding.passed} for finding in findings],
        "passed": all(finding.passed for finding in findings),
        "complete": complete,
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n")


def run_bits(out: Path, commit: str, quick: bool, ranks: list[int], timeout_s: float) -> str:
    """Start the ranks; what they printed. **Raises:** PeerError if they do not end well."""
    arguments = ["--out", str(out), "--commit", commit, "--rank", "--ranks", *map(str, ranks)]
    arguments += ["--quick"] if quick else []
    with tempfile.TemporaryDirectory(prefix="h3lib-bits-") as folder:
        log, module = Path(folder, "log"), "h3lib.bench.collectives_bits"
        shown = 0

        def tick() -> None:
            nonlocal shown
            text = log.read_text(errors="replace")
            print(text[shown:], end="", flush=True)
            shown = len(text)

        status = run_ranks(module, arguments, NUM_RANKS, timeout_s, log, tick)
        tick()
        if status:
            raise PeerError("ranks of the bits benchmark", f"exit status {status}", "0")
        return log.read_text(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True, help="commit that is tested")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(range(1, NUM_RANKS + 1)))
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options)
    else:
        run_bits(options.out, options.commit, options.quick, options.ranks, options.timeout)


if __name__ == "__main__":
    main()
