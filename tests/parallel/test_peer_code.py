"""The peer kernels compiled for sm_90: wide accesses, order of the flags, programs of the tree."""

import re

import pytest
import torch

from h3lib.ops.tree import root_nodes, tree_sum
from h3lib.parallel.transport import group_spans, num_roots

pytest.importorskip("triton")

from h3lib.bench.litmus_kernels import (  # noqa: E402
    GPU_SCOPE,
    RELAXED,
    WARPS,
    abort_kernel,
    exchange_kernel,
)
from h3lib.ops.hopper.compiled import Code, compile_offline  # noqa: E402
from h3lib.parallel.peer_kernels import ADD, SLOT, peer_kernel  # noqa: E402
from h3lib.parallel.peer_plan import (  # noqa: E402
    Shape,
    Work,
    plan,
    roots_of_ranks,
    tree_programs,
)

CUTS = (
    (0, 1, 2, 3, 4, 5, 6, 7, 8),
    (0, 2, 4, 6, 8),
    (0, 2, 5, 8),
    (0, 3, 4, 8),
    (0, 0, 5, 5, 8),
    (0, 24, 40, 64),
    (0, 8),
)


def meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype)


def run_program(program: tuple, values: dict) -> float:
    """The stack machine of `tree_kernel`, in Python."""
    stack = []
    for rank, root in program:
        if rank == ADD:
            right = stack.pop()
            stack.append((stack.pop(), right))
        else:
            stack.append(values[rank, root])
    (result,) = stack
    return result


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_programs_are_the_adds_of_the_tree_in_order(cuts):
    """Values are names and an add is a pair, so the whole shape of the sum is compared."""

    class Pair:
        def __init__(self, value):
            self.value = value

        def __add__(self, right):
            return Pair((self.value, right.value))

    for first, size in ((0, len(cuts) - 1), (1, len(cuts) - 2), (0, 1)):
        if size < 1:
            continue
        counts = [num_roots(cuts, first + r) for r in range(size)]
        names = {(r, i): f"{r}.{i}" for r, n in enumerate(counts) for i in range(n)}
        roots = [[Pair(names[r, i]) for i in range(n)] for r, n in enumerate(counts)]
        nodes = root_nodes(roots, cuts, first)
        programs = tree_programs(cuts, first, size)
        spans = group_spans(cuts, first, size)
        assert len(programs) == len(spans)
        for program, span in zip(programs, spans, strict=True):
            assert run_program(program, names) == tree_sum(nodes.get, span).value


def even(n: int, size: int) -> tuple[tuple[int, int], ...]:
    return tuple((n * r // size // 16 * 16, n * (r + 1) // size // 16 * 16) for r in range(size))


def reduction(cuts: tuple[int, ...], gather: bool, item: int = 2, n: int = 1 << 25) -> Work:
    group = cuts, 0, len(cuts) - 1
    return Work(even(n, group[2]), item, gather, roots_of_ranks(*group), tree_programs(*group))


def compiled(work: Work, rank: int, dtype: torch.dtype, aligned: bool) -> tuple[Code, dict]:
    """The kernel of a collective on one rank, and its constants."""
    shape = Shape()
    launch = plan(work, rank, shape, 256 << 10, aligned)
    runtime = len(peer_kernel.arg_names) - len(launch.constants)
    constants = dict(zip(peer_kernel.arg_names[runtime:], launch.constants, strict=True))
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[work.item]
    source, out = (torch.float32, dtype) if work.programs else (integer, integer)
    code = compile_offline(
        peer_kernel, meta(100, dtype=source), meta(100, dtype=out), meta(512), meta(8), meta(16),
        1 << 62, shape.channels, 1 << 14, len(work.slices), *launch.sizes, 0, 8, 0,
        **shape.options, **constants,
    )  # fmt: skip
    code.check(tensor_cores=False)
    return code, constants


def accesses(code: Code, kind: str) -> set[str]:
    """Widths of the global loads or stores, addresses and plans left out."""
    found = set(re.findall(rf"{kind}\.global\.((?:v\d\.)?b\d+)", code.ptx))
    return found - {"b64"}


@pytest.mark.parametrize("dtype", (torch.int16, torch.int32, torch.int64), ids=str)
def test_a_gather_moves_16_bytes_a_time_where_parts_are_aligned(dtype):
    wide = 16 // dtype.itemsize
    work = Work(even(1 << 22, 4), dtype.itemsize, gather=True)
    for aligned in (False, True):
        code, constants = compiled(work, 1, dtype, aligned)
        assert constants["WIDTH"] == (wide if aligned else 1)
        if aligned:
            vector = "v2.b64" if dtype == torch.int64 else "v4.b32"
            assert accesses(code, "ld") == accesses(code, "st") == {vector}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("gather", (False, True), ids=("scatter", "all"))
@pytest.mark.parametrize("cuts", CUTS[:3], ids=str)
def test_a_tree_loads_every_root_once_and_adds_as_often_as_it_says(cuts, gather, dtype):
    work = reduction(cuts, gather, dtype.itemsize)
    code, constants = compiled(work, len(cuts) - 2, dtype, True)
    assert accesses(code, "ld") == {"v4.b32"}
    elements = constants["TREE_BLOCK"] // constants["LANES"]
    pushes = sum(kind <= -2 for kind, _ in constants["PROGRAM"]) - 1
    assert sum(kind == SLOT for kind, _ in constants["PROGRAM"]) <= pushes
    adds = re.findall(r"add(?:\.rn)?\.f32(?:x2)?", code.ptx)
    assert len(adds) == (pushes - 1) * elements, "no fused, reordered or packed adds"
    assert "fma" not in code.ptx and "ftz" not in code.ptx


def test_the_flag_is_released_after_the_digest_and_acquired_before_it():
    """And a barrier of the program stands between data and flag, on both sides."""
    code, _ = compiled(Work(even(1 << 22, 8), 4, gather=True), 3, torch.int32, True)
    order = re.findall(r"(st\.relaxed|st\.release|ld\.acquire|ld\.relaxed)\.sys\.global", code.ptx)
    assert order[:3] == ["st.relaxed", "st.release", "ld.acquire"]
    assert order.index("ld.acquire") < len(order) - 1 - order[::-1].index("ld.relaxed")
    assert order[-1] == "st.relaxed", "the last word is the abort that is told"
    moves = r"(st\.global\.v4|bar\.sync|st\.release|ld\.acquire|ld\.global\.v4)"
    text = " ".join(re.findall(moves, code.ptx))
    assert re.search(r"st\.global\.v4 (bar\.sync )+st\.release", text)
    assert re.search(r"ld\.acquire (bar\.sync )+ld\.global\.v4", text)
    sass = re.findall(r"\b(ST|LD)[.\w]*\.STRONG\.SYS", code.sass)
    assert {"ST", "LD"} <= set(sass)
    assert "MEMBAR" in code.sass, "the release is a fence and a store"
    assert "globaltimer" in code.ptx, "the wait is bounded"


@pytest.mark.parametrize("variant", range(6))
def test_the_litmus_kernels_differ_in_what_they_break(variant):
    code = compile_offline(
        exchange_kernel, meta(8), meta(8), meta(8), 0, 2, 10, SIZE=8, VARIANT=variant,
        num_warps=WARPS,
    )  # fmt: skip
    code.check(tensor_cores=False)
    order = re.findall(r"(?:st\.release|ld\.acquire)\.\w+", code.ptx)
    if variant == RELAXED.value:
        assert order == []
    else:
        scope = "gpu" if variant == GPU_SCOPE.value else "sys"
        assert set(order) == {f"st.release.{scope}", f"ld.acquire.{scope}"}
        assert order.count(f"st.release.{scope}") == 1


def test_the_litmus_of_the_abort_tells_or_not():
    stores = []
    for variant in (0, 1):
        code = compile_offline(
            abort_kernel, meta(8), meta(8), 0, 2, 10, 10, SIZE=8, VARIANT=variant, num_warps=WARPS
        )
        code.check(tensor_cores=False)
        stores.append(code.ptx.count("st.relaxed.sys"))
    assert stores[0] == stores[1] + 1
