"""Bits of products in chunks on GPUs, beside their collectives; part of `collectives_bits.py`.

A product is a slow copy of known roots: the stream sleeps before it writes, so a collective that
does not wait for its chunk reads what the last product left there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from h3lib.bench.collectives_checks import BF16, F32, Bench, Check, even, leaves_of, plain_tree
from h3lib.bench.collectives_checks import roots_of as roots_of_rank
from h3lib.parallel import peer
from h3lib.parallel.overlap import (
    Chunks,
    ColumnProduct,
    RowProduct,
    gather_products,
    reduce_product,
)

ROWS, WIDTH = 700, 336
SLEEP_CYCLES = 300_000
peer.LANE_BYTES = 0  # operands of any size go beside what follows


def slow_copy(roots: Tensor) -> RowProduct:
    """A product whose roots are known."""

    def make(ranges: Sequence[range]) -> Tensor:
        torch.cuda._sleep(SLEEP_CYCLES)
        return torch.cat([roots[:, rows.start : rows.stop] for rows in ranges], dim=1)

    return RowProduct(roots.shape[1], roots.shape[2], 1, make)


def check_products_in_chunks(bench: Bench, size: int) -> Iterator[Check]:
    """Row-parallel products: chunks of many lengths, all rows and each rank's, observed roots."""
    collective, cuts = bench.flat(size), even(8, size)
    leaves = leaves_of(size, 8, ROWS, WIDTH)
    root = plain_tree(leaves)
    product = slow_copy(roots_of_rank(leaves, cuts, bench.rank))
    uneven = [ROWS * i * i // (size * size) for i in range(size + 1)]
    for row_cuts in (None, even(ROWS, size), uneven, [0] * size + [ROWS]):
        own = slice(None) if row_cuts is None else slice(*row_cuts[bench.rank : bench.rank + 2])
        for rows in (1000, 350, 128, 97):
            case = f"{rows} of {ROWS} rows, cut at {row_cuts}"
            value = reduce_product(collective, product, cuts, BF16, row_cuts, chunks=Chunks(rows))
            yield case, value, root[own].to(BF16), True
        seen = torch.full((ROWS * WIDTH,), torch.nan, device="cuda")

        def observe(part: Tensor, at: int, seen: Tensor = seen) -> None:
            seen[at : at + len(part)] = part

        reduce_product(collective, product, cuts, BF16, row_cuts, observe, Chunks(97))
        torch.cuda.synchronize()
        here = ~seen.isnan()
        yield f"observed, cut at {row_cuts}", seen[here], root.reshape(-1)[here], True


def check_products_back_to_back(bench: Bench, size: int) -> Iterator[Check]:
    """Products without waiting in between, some ranks late: places are written again and again."""
    collective, cuts = bench.flat(size, checked=False), even(8, size)
    rows = even(ROWS, size)
    own, values = slice(rows[bench.rank], rows[bench.rank + 1]), []
    inputs = [leaves_of(i, 8, ROWS, WIDTH) for i in range(4 if bench.quick else 10)]
    mine = [roots_of_rank(leaves, cuts, bench.rank) for leaves in inputs]
    for i, roots in enumerate(mine):
        if (i + bench.rank) % 3 == 0:
            time.sleep(0.01)
            torch.cuda._sleep(5_000_000)
        row_cuts = rows if i % 2 else None
        product = slow_copy(roots)
        values.append(
            reduce_product(collective, product, cuts, BF16, row_cuts, chunks=Chunks(64 + 50 * i))
        )
    collective.transport.check()
    for i, (value, leaves) in enumerate(zip(values, inputs, strict=True)):
        root = plain_tree(leaves).to(BF16)
        yield f"product {i}", value, root[own] if i % 2 else root, True


def check_products_after_gather(bench: Bench, size: int) -> Iterator[Check]:
    """Column-parallel products of gathered rows, own rows first; the sum of doubles is exact."""
    collective = bench.flat(size)
    whole = leaves_of(3, 1, ROWS, WIDTH)[0].to(BF16)
    double = ColumnProduct(WIDTH, lambda x, out: torch.mul(x, 2, out=out))
    for name, cuts in (("even", even(ROWS, size)), ("last", [0] * size + [ROWS])):
        own = slice(cuts[bench.rank], cuts[bench.rank + 1])
        products, chunks = [double, double], Chunks(100)
        rows, (twice, again) = gather_products(collective, whole[own], cuts, products, chunks)
        yield f"rows, {name}", rows, whole, True
        yield f"product, {name}", twice, 2 * whole, True
        yield f"second product, {name}", again, 2 * whole, True


def check_products_in_graph(bench: Bench, size: int) -> Iterator[Check]:
    """Captured products beside their collectives, replayed on changing inputs."""
    collective, cuts, rows = bench.flat(size), even(8, size), even(ROWS, size)
    own = slice(rows[bench.rank], rows[bench.rank + 1])
    inputs = [leaves_of(i, 8, ROWS, WIDTH) for i in range(3 if bench.quick else 6)]
    roots = roots_of_rank(inputs[0], cuts, bench.rank)
    product = slow_copy(roots)

    def step() -> tuple[Tensor, Tensor]:
        part = reduce_product(collective, product, cuts, BF16, rows, chunks=Chunks(200))
        total = reduce_product(collective, product, cuts, F32, chunks=Chunks(300))
        return part, total

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        part, total = step()
    for i, leaves in enumerate(inputs):
        roots.copy_(roots_of_rank(leaves, cuts, bench.rank))
        graph.replay()
        graph.replay()
        collective.transport.check()
        root = plain_tree(leaves)
        yield f"replay {i}, rows", part.clone(), root[own].to(BF16), True
        yield f"replay {i}, all", total.clone(), root, True


OVERLAP_CHECKS = (
    check_products_in_chunks,
    check_products_back_to_back,
    check_products_after_gather,
    check_products_in_graph,
)
