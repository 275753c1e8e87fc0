"""Products in chunks of rows: the collective of a chunk runs beside the product of the next.

    row-parallel      roots of chunk 0 | roots of chunk 1          | roots of chunk 2 ...
                                       | all-reduce of chunk 0     | all-reduce of chunk 1 ...
    column-parallel   own rows' product | the others' rows
                      all-gather        |

A row of a product depends on no other row, so where rows are cut is no part of the bits. The first
chunks are the largest: each collective should end while the next product still runs, and only that
of the last, small chunk has nothing beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from h3lib.contract import OperandError
from h3lib.parallel.collective import Collective, Observe
from h3lib.parallel.later import Later
from h3lib.parallel.transport import Cuts

ROW_TILE = 128  # of the products: a chunk that ends inside a tile would compute it twice
MIN_CHUNK = 4 << 20  # elements: with fewer, launches cost what they hide
MAX_CHUNKS = 5
MAX_SHRINK = 4.0
PRODUCT_FLOPS, LINK_BYTES = 650e12, 330e9  # of a GPU in a second (H200, 2026-11): only for sizes


@dataclass(frozen=True)
class RowProduct:
    """A row-parallel product that is still to be made.

    `make(ranges)` gives the FP32 roots `[R, n, D]` of some of its `num_rows` rows, those of each
    range after the other; `depth` is the length of the reduced axis here.
    """

    num_rows: int
    width: int
    depth: int
    make: Callable[[Sequence[range]], Tensor]


@dataclass(frozen=True)
class ColumnProduct:
    """A column-parallel product: `make(x, out)` gives `[rows, width]` of rows x, in `out`."""

    width: int
    make: Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Chunks:
    """How the rows of a product are cut: at every `rows`-th, or as suits the level; and whether
    collectives run beside products at all."""

    rows: int | None = None
    beside: bool = True

    def __post_init__(self):
        if self.rows is not None and self.rows < 1:
            raise OperandError("rows of a chunk", self.rows, "at least 1")

    def split(self, num_rows: int, width: int, collective: Collective) -> bool:
        """Whether products of so many rows are cut at all."""
        if self.rows is not None:
            return self.rows < num_rows
        worth_it = num_rows * width >= 2 * MIN_CHUNK
        return self.beside and collective.overlaps and worth_it

    def weights(self, product: RowProduct, collective: Collective) -> list[float]:
        """How the rows are shared by the chunks, alike on every rank; one chunk is `[1.0]`."""
        if self.rows is not None:
            return [1.0] * max(1, -(-product.num_rows // self.rows))
        if not self.split(product.num_rows, product.width, collective):
            return [1.0]
        moved = 6 * (collective.size - 1) / collective.size / LINK_BYTES
        shrink = min(max(2 * product.depth / PRODUCT_FLOPS / moved, 1.0), MAX_SHRINK)
        for count in range(MAX_CHUNKS, 1, -1):
            weights = [shrink**-i for i in range(count)]
            if weights[-1] / sum(weights) * product.num_rows * product.width >= MIN_CHUNK:
                return weights
        return [1.0]

    def cut(self, rows: range, weights: Sequence[float]) -> list[range]:
        """Rows in proportion to the weights; inner cuts end row tiles."""
        tile = ROW_TILE if self.rows is None else 1
        total, cuts = sum(weights), [0]
        for i in range(1, len(weights)):
            at = round(len(rows) * sum(weights[:i]) / total / tile) * tile
            cuts.append(min(at, len(rows)))
        cuts.append(len(rows))
        return [rows[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]


AS_SUITS = Chunks()
IN_TURN = Chunks(beside=False)


def reduce_product(
    collective: Collective,
    product: RowProduct,
    leaf_cuts: Cuts,
    dtype: torch.dtype,
    row_cuts: Cuts | None = None,
    observe: Observe | None = None,
    chunks: Chunks = AS_SUITS,
) -> Tensor:
    """The sum of all leaves of a row-parallel product: all rows `[T, D]`, or with `row_cuts` this
    rank's rows.

    **Order:**, **Rounds:**, **Raises:** as `all_reduce` and `reduce_scatter_rows` of its roots.
    """
    weights, every = chunks.weights(product, collective), range(product.num_rows)
    if len(weights) == 1:
        roots = product.make([every])
        return _reduce(collective, roots, leaf_cuts, dtype, row_cuts, observe, None)
    slices = [every] if row_cuts is None else [range(*pair) for pair in pairwise(row_cuts)]
    own = 0 if row_cuts is None else collective.rank
    pieces = list(zip(*(chunks.cut(rows, weights) for rows in slices), strict=True))
    results: list[Later] = []
    out = None
    for ranges in pieces:
        roots = product.make(ranges)
        if out is None:
            out = roots.new_empty((len(slices[own]), product.width), dtype=dtype)
        cuts = [0, *accumulate(map(len, ranges))]
        shift = (ranges[own].start - cuts[own]) * product.width
        first = ranges[own].start - slices[own].start
        run = partial(
            _reduce, collective, roots, leaf_cuts, dtype, cuts if row_cuts is not None else None,
            _shifted(observe, shift), out[first : first + len(ranges[own])],
        )  # fmt: skip
        if ranges is pieces[-1]:  # nothing is left to run beside it
            run()
        else:
            results.append(collective.later(run, one_root(roots)))
    for result in results:
        result.value()
    return out


def _reduce(
    collective: Collective,
    roots: Tensor,
    leaf_cuts: Cuts,
    dtype: torch.dtype,
    row_cuts: Cuts | None,
    observe: Observe | None,
    out: Tensor | None,
) -> Tensor:
    if row_cuts is None:
        return collective.all_reduce(roots, leaf_cuts, dtype, observe, out)
    return collective.reduce_scatter_rows(roots, leaf_cuts, row_cuts, dtype, observe, out)


def one_root(roots: Tensor) -> int:
    """Bytes of one of the roots: a rank may have more than another."""
    return roots.shape[1:].numel() * roots.element_size()


def _shifted(observe: Observe | None, by: int) -> Observe | None:
    return None if observe is None else lambda root, at: observe(root, at + by)


def gather_products(
    collective: Collective,
    x: Tensor,
    row_cuts: Cuts,
    products: Sequence[ColumnProduct],
    chunks: Chunks = AS_SUITS,
) -> tuple[Tensor, list[Tensor]]:
    """The rows of every rank `[T, D]`, and column-parallel products of them `[T, N]`.

    Products of this rank's own rows are made while the others' rows come. **Order:** the
    products'. **Raises:** as `all_gather_rows`.
    """
    if not chunks.split(row_cuts[-1] - row_cuts[0], x.shape[1], collective):
        whole = collective.all_gather_rows(x, row_cuts)
        return whole, [product.make(whole, None) for product in products]
    first, *_, last = row_cuts
    num_bytes = (last - first) * x.shape[1] * x.element_size()
    coming = collective.later(partial(collective.all_gather_rows, x, row_cuts), num_bytes)
    own = range(row_cuts[collective.rank] - first, row_cuts[collective.rank + 1] - first)
    results = [x.new_empty(last - first, product.width) for product in products]

    def make(rows: Tensor, part: slice) -> None:
        if len(rows):
            for product, result in zip(products, results, strict=True):
                product.make(rows, result[part])

    make(x, slice(own.start, own.stop))
    whole = coming.value()
    for part in (slice(0, own.start), slice(own.stop, last - first)):
        make(whole[part], part)
    return whole, results
