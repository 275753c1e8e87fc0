"""Probes of the products: the order read back, special values, repeats under load, large offsets.

Order of a chain: 2^24, 1 and -2^24 in three different steps of one reduced axis, products with 1.
The one survives only if it is added when no 2^24 is pending, so the result tells which of the three
came last. Order of the tree: leaves of very different size, one product each, added on the CPU.
Seeded mutants (descending, split in two, neighbours four apart, arrival order) must differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from h3lib.bench import gemm_reference as reference
from h3lib.bench.findings import Finding, found, in_a_cold_process
from h3lib.bench.gemm_bits import BF16, EVERY, fold, forward, product, random
from h3lib.contract import RowUnits
from h3lib.ops.gemm import linear_dx

BIG = 2.0**24
MMA_K = 16
NUM_PROBES = 512


def check_chain_order() -> Iterator[Finding]:
    """The chain is read back: ascending steps of 16."""
    steps, generator = 24, torch.Generator().manual_seed(1)
    terms = torch.zeros(NUM_PROBES, steps)
    for row in terms:
        i, j, k = torch.randperm(steps, generator=generator)[:3].tolist()
        row[i], row[j], row[k] = BIG, 1.0, -BIG
    x = torch.zeros(NUM_PROBES, steps, MMA_K)
    x[:, :, 5] = terms
    x = x.flatten(1).to("cuda", BF16)
    orders: dict[str, Callable[[Tensor], Tensor]] = {
        "ascending": _in_turn,
        "descending": lambda t: _in_turn(t.flip(1)),
        "split in two": lambda t: _in_turn(t[:, : steps // 2]) + _in_turn(t[:, steps // 2 :]),
        "even steps, then odd": lambda t: _in_turn(torch.cat((t[:, ::2], t[:, 1::2]), 1)),
    }
    ones = torch.ones(64, x.shape[1], device="cuda", dtype=BF16)
    runs = {
        "linear_forward": lambda: forward(x, ones),
        "linear_dx": lambda: linear_dx(x, ones.T.contiguous(), backend="triton"),
    }
    for op, run in runs.items():
        value = run()[:, 0].float().cpu()
        for order, add in orders.items():
            yield found("chain order", f"{op}: {order}", value, add(terms), order == "ascending")


def _in_turn(terms: Tensor) -> Tensor:
    total = torch.zeros(len(terms))
    for column in terms.unbind(1):
        total = total + column
    return total


def _leaves() -> Tensor:
    """Eight leaves a probe, BF16 numbers of magnitudes 2^-12 to 2^24 and both signs."""
    generator = torch.Generator().manual_seed(2)
    exponent = torch.randint(-12, 25, (NUM_PROBES, 8), generator=generator)
    mantissa = torch.randint(128, 256, (NUM_PROBES, 8), generator=generator) / 128.0
    sign = torch.randint(0, 2, (NUM_PROBES, 8), generator=generator) * 2 - 1
    return (sign * torch.ldexp(mantissa, exponent)).float()


def _tree_orders() -> dict[str, Callable[[list[Tensor]], Tensor]]:
    def four_apart(v: list[Tensor]) -> Tensor:
        return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]))

    return {
        "the tree": reference.eight,
        "ascending": lambda v: _in_turn(torch.stack(v, 1)),
        "descending": lambda v: _in_turn(torch.stack(v[::-1], 1)),
        "four apart": four_apart,
        "arrival order": lambda v: reference.eight([v[i] for i in (3, 0, 6, 1, 7, 2, 5, 4)]),
        "without the pairs' pairs": lambda v: _in_turn(
            torch.stack([v[0] + v[1], v[2] + v[3], v[4] + v[5], v[6] + v[7]], 1)
        ),
    }


def check_tree_order() -> Iterator[Finding]:
    """The tree over eight units is read back, for feature units, parts and sequence units."""
    leaves = _leaves()
    values = {}
    for width in (16, 64, 512):  # without and with a lag
        a = torch.zeros(NUM_PROBES, 8, width)
        a[:, :, width // 3] = leaves
        a = a.flatten(1).to("cuda", BF16)
        b = torch.ones(a.shape[1], 64, device="cuda", dtype=BF16)
        values[f"unit tree, units of {width}"] = product([(a, b)], torch.float32)[:, 0]
        third = [(a, b), (torch.zeros_like(a), b), (torch.zeros_like(a), b)]
        values[f"three parts, units of {width}"] = product(third, torch.float32)[:, 0]
    for t in (1024, 1097, 8193):
        rows = RowUnits(t)
        dy = torch.zeros(t, NUM_PROBES)
        for unit in EVERY:
            own = rows.sequence_unit_rows(range(unit, unit + 1))
            dy[own.start + len(own) // 2] = leaves[:, unit]
        x = torch.ones(t, 64, device="cuda", dtype=BF16)
        values[f"row fold, {t} rows"] = fold(dy.to("cuda", BF16), x, rows)[:, 0]
    for case, value in values.items():
        for order, add in _tree_orders().items():
            expected = add(list(leaves.unbind(1)))
            yield found(
                "tree order", f"{case}: {order}", value.cpu(), expected, order == "the tree"
            )


def check_special_values() -> Iterator[Finding]:
    """A chain from +0 is never -0; NaN, infinities and subnormals as the reference."""
    t, k, n = 131, 1024, 256
    zeros, w = torch.full((t, k), -0.0, device="cuda", dtype=BF16), random(n, k).abs()
    plus = torch.zeros(t, n, device="cuda", dtype=BF16)
    tiny = torch.full_like(zeros, -1e-38)
    plus32 = plus.float()
    yield found("-0", "linear_forward of -0", forward(zeros, w), plus)
    yield found("-0", "linear_dx of -0", linear_dx(zeros, w.T.contiguous(), backend="triton"), plus)
    yield found("-0", "unit tree of -0", product([(zeros, w.T)], torch.float32), plus32)
    wt = torch.full((t, n), -0.0, device="cuda", dtype=BF16)
    yield found(
        "-0", "row fold of -0", fold(wt, zeros.abs(), RowUnits(t)), torch.zeros(n, k, device="cuda")
    )
    for name, x in {"subnormal": tiny, "special": _specials(t, k)}.items():
        for scale in (1.0, 2.0**-60):
            v = (w * scale).to(BF16)
            root = reference.reference_chain([(x, v.T)], [range(k)])
            case = f"{name} times {scale}"
            yield found("special values", f"linear_forward {case}", forward(x, v), root.to(BF16))
            root = reference.reference_unit_tree([(x, v.T)])
            value = product([(x, v.T)], torch.float32)
            yield found("special values", f"unit tree {case}", value, root)


def _specials(t: int, k: int) -> Tensor:
    x = random(t, k)
    special = [
        float("nan"),
        float("inf"),
        -float("inf"),
        -0.0,
        2.0**-133,
        3.3e38,
        -3.3e38,
        BIG,
        -BIG,
    ]
    for i, value in enumerate(special):
        x[i::17, (37 * i) % k :: 331] = value
    return x


def check_repeats(repeats: int = 200) -> Iterator[Finding]:
    """One digest: beside a busy stream, in a CUDA graph, in a process with a cold cache."""
    runs = _digest_runs()
    busy, load = torch.cuda.Stream(), random(4096, 4096)
    for name, run in runs.items():
        first = run().clone()
        torch.cuda.synchronize()
        different = 0
        for i in range(repeats):
            if i % 4 == 0:
                with torch.cuda.stream(busy):
                    torch.matmul(load, load)
            different += int((run().view(torch.int16) != first.view(torch.int16)).any())
        yield Finding("repeats under load", name, repeats, different)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            value = run()
        value.fill_(float("nan"))
        graph.replay()
        yield found("graph replay", name, value, first)
    theirs = in_a_cold_process("from h3lib.bench.gemm_probes import digests; print(digests())")
    yield Finding("second process, cold cache", "all", 1, int(theirs != str(digests())))


def _digest_runs() -> dict[str, Callable[[], Tensor]]:
    generator = torch.Generator("cuda").manual_seed(3)
    x, w, dy = (
        torch.randn(*s, device="cuda", dtype=BF16, generator=generator)
        for s in ((1097, 4096), (1536, 4096), (1097, 1536))
    )
    return {
        "linear_forward": lambda: forward(x, w),
        "unit_tree_product": lambda: product([(x, w.T)]),
        "row_fold_product": lambda: fold(dy, x, RowUnits(1097), BF16),
    }


def digests() -> list[int]:
    """Sum of the outputs' bytes, weighted by place, on seeded operands."""
    sums = []
    for run in _digest_runs().values():
        flat = run().view(torch.int16).flatten().long()
        sums.append(int((flat * (torch.arange(len(flat), device="cuda") % 65521 + 1)).sum()))
    return sums


def check_large_offsets() -> Iterator[Finding]:
    """Operands and results of more than 2^31 elements: the last rows, made alone, are the same."""
    x, w = random(150_001, 14336), random(64, 14336)
    yield found("large offsets", "input", forward(x, w)[-200:], forward(x[-200:], w))
    value = product([(x, w.T)], torch.float32)[-200:]
    yield found(
        "large offsets", "unit tree input", value, product([(x[-200:], w.T)], torch.float32)
    )
    del x
    x, w = random(300_001, 64), random(7168, 64)
    yield found("large offsets", "output", forward(x, w)[-200:], forward(x[-200:], w))


def check_accuracy() -> Iterator[Finding]:
    """Error against FP64 within the order's bound, and no worse than twice cuBLAS's on the same
    operands.

    An FP32 sum of n terms errs by at most n u sum |a b|; a tensor core truncates, so u = 2^-23. n
    is the additions on the longest path: steps of 16, the 16 terms inside one, three tree levels.
    """
    t, k, n = 1024, 14336, 768
    x, w, dy = random(t, k), random(n, k), random(t, n)
    chain, tree = (k // MMA_K) + MMA_K, (k // 8 // MMA_K) + MMA_K + 3
    rows = t // 8 // MMA_K + MMA_K + 3
    products = (
        ("chain", x, w.T, forward(x, w), chain),
        ("unit tree", x, w.T, product([(x, w.T)]), tree),
        ("unit tree, FP32 root", x, w.T, product([(x, w.T)], torch.float32), tree),
        ("row fold", dy.T, x, fold(dy, x, RowUnits(t), BF16), rows),
        ("row fold, FP32 root", dy.T, x, fold(dy, x, RowUnits(t)), rows),
    )
    for name, a, b, ours, additions in products:
        exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
        rounding = exact.abs() * 2.0**-8 if ours.dtype == BF16 else 0.0
        bound = additions * 2.0**-23 * size + rounding
        theirs = torch.matmul(a, b)

        def relative(value: Tensor, exact: Tensor = exact) -> float:
            return float((value.double() - exact).norm() / exact.norm())

        details = {
            "shape": [*a.shape, b.shape[1]],
            "error_over_bound": float(((ours.double() - exact).abs() / bound).max()),
            "relative_error": relative(ours),
            "cublas_relative_error": relative(theirs),
        }
        over = not details["error_over_bound"] < 1
        over += not details["relative_error"] < 2 * details["cublas_relative_error"]
        yield Finding("error against FP64", name, 1, int(over), details=details)


PROBES = (
    check_chain_order,
    check_tree_order,
    check_special_values,
    check_repeats,
    check_large_offsets,
    check_accuracy,
)
