"""What the tests of the lower layers share: bytes, NumPy's IEEE arithmetic, special values.

The scalar definitions here add and round in NumPy, one operation at a time in a written order, so
that they share no code with the ops they judge.
"""

import functools

import numpy as np
import torch

TINIEST = 2.0**-133  # the smallest BF16 subnormal
EXACT_SPECIALS = (0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 2.0**-30)
SPECIALS = (
    *EXACT_SPECIALS,
    *(TINIEST, -TINIEST, 2.0**-127, -(2.0**-126), 3.3e38, -3.3e38, 2.0**-70, -(2.0**-70)),
)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same_bytes(value: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Equal as integers of the element's width; only the payload of a NaN is free."""
    assert (value.dtype, value.shape) == (expected.dtype, expected.shape), what
    integer = _INTEGERS[value.element_size()]
    differ = value.contiguous().view(integer) != expected.contiguous().view(integer)
    if value.is_floating_point():
        differ &= ~(value.isnan() & expected.isnan())
    at = differ.nonzero()
    if len(at):
        first = tuple(at[0].tolist())
        got, want = value[first].item(), expected[first].item()
        raise AssertionError(f"{what}: {len(at)} differ; {first}: {got!r}, expected {want!r}")


def quiet(function):
    """Overflow, underflow and NaN are results here, not events."""

    @functools.wraps(function)
    def silent(*args, **kwargs):
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return silent


def f32(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's values as FP32."""
    return tensor.detach().to(torch.float32).numpy()


@quiet
def round_bf16(x: np.ndarray) -> np.ndarray:
    """FP32 rounded to BF16, to nearest, ties to even, from the bits; still held as FP32."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32)
    return np.where(np.isnan(x), x, rounded.view(np.float32))


def tensor(x: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A torch tensor of values that `dtype` can hold."""
    result = torch.from_numpy(np.array(x)).to(dtype)
    assert_same_bytes(result.to(torch.float32), torch.from_numpy(np.array(x, dtype=np.float32)))
    return result


@quiet
def chain_of(terms, start=None) -> np.ndarray:
    """((+0 + t0) + t1) + ..., each sum rounded to the terms' dtype."""
    terms = np.asarray(terms)
    total = np.zeros(terms.shape[1:], terms.dtype) if start is None else start
    for term in terms:
        total = total + term
    return total


@quiet
def tree_of(leaves) -> np.ndarray:
    """((0+1)+(2+3)) + ((4+5)+(6+7)), for any power of two."""
    leaves = list(leaves)
    if len(leaves) == 1:
        return leaves[0]
    middle = len(leaves) // 2
    return tree_of(leaves[:middle]) + tree_of(leaves[middle:])


@quiet
def halves_of(x: np.ndarray) -> np.ndarray:
    """The in-row tree over the last dim: pad with +0, x[:p/2] + x[p/2:] until one is left."""
    width = 1
    while width < x.shape[-1]:
        width *= 2
    padded = np.zeros((*x.shape[:-1], width), x.dtype)
    padded[..., : x.shape[-1]] = x
    while width > 1:
        width //= 2
        padded = padded[..., :width] + padded[..., width : 2 * width]
    return padded[..., 0]


def block_edges(num_rows: int, row_block: int, key_block: int) -> list[tuple[int, int]]:
    """[first, last) row block of each of the 8 sequence units: contract, section 1."""
    keys, blocks, per = -(-num_rows // key_block), -(-num_rows // row_block), key_block // row_block
    cut = [min(per * (s * keys // 8), blocks) for s in range(9)]
    return list(zip(cut[:-1], cut[1:], strict=True))


def row_unit_edges(num_rows: int, row_block: int, key_block: int) -> list[tuple[int, int]]:
    """[first, last) row block of each of the 64 row units."""
    return [
        (b0 + k * (b1 - b0) // 8, b0 + (k + 1) * (b1 - b0) // 8)
        for b0, b1 in block_edges(num_rows, row_block, key_block)
        for k in range(8)
    ]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int, dtype=torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    """Random values of `dtype`, different for each seed."""
    return (torch.randn(shape, generator=generator(seed), dtype=torch.float64) * scale).to(dtype)


def special(seed: int, *shape: int, dtype=torch.bfloat16, values=SPECIALS) -> torch.Tensor:
    """Random values, about a third of them zeros of both signs, subnormals, Inf, NaN, huge.

    Products of two BF16 values near the ends of FP32's range are not exact, and a fused step (which
    the chain may be) keeps what a rounded product loses: EXACT_SPECIALS stays away from them.
    """
    g = generator(seed)
    values = torch.tensor(values, dtype=torch.float64)
    picks = values[torch.randint(len(values), shape, generator=g)]
    usual = torch.randn(shape, generator=g, dtype=torch.float64)
    return torch.where(torch.rand(shape, generator=g) < 0.3, picks, usual).to(dtype)


def cuts_of(seed: int, total: int, parts: int, empty: bool = False) -> list[int]:
    """`parts` consecutive uneven parts of range(total); some may be empty if asked for."""
    g = generator(seed)
    if empty:
        inner = torch.randint(total + 1, (parts - 1,), generator=g)
    else:
        inner = 1 + torch.randperm(total - 1, generator=g)[: parts - 1]
    return [0, *sorted(inner.tolist()), total]


def assert_row_invariant(function, rows: list[torch.Tensor], seed: int) -> None:
    """A row's bytes do not depend on which rows are beside it, on their values or on its place.

    `function` takes tensors whose first dim is rows and gives one or more of the same kind.
    """

    def call(*tensors):
        result = function(*tensors)
        return result if isinstance(result, tuple) else (result,)

    def compare(found, picked, what):
        for i, (value, expected) in enumerate(zip(found, whole, strict=True)):
            assert_same_bytes(value, expected[picked], f"{what}, result {i}")

    g, count = generator(seed), len(rows[0])
    whole = call(*rows)
    first, last = sorted(torch.randint(count + 1, (2,), generator=g).tolist())
    last = min(max(last, first + 1), count)
    first = min(first, last - 1)
    part = torch.arange(first, last)
    compare(call(*(x[first:last] for x in rows)), part, f"rows {first} to {last}")
    order = torch.randperm(count, generator=g)
    compare(call(*(x[order] for x in rows)), order, "permuted rows")
    poisoned = []
    for i, x in enumerate(rows):
        other = special(seed + 1 + i, *x.shape, dtype=x.dtype)
        other[first:last] = x[first:last]
        poisoned.append(other)
    found = tuple(value[first:last] for value in call(*poisoned))
    compare(found, part, "other neighbours")
