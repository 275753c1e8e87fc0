"""Integers add the same in any order; the price is one absolute step for all elements."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from h3lib.bench.order_free import integers_by_ranks, tree_root
from h3lib.compare import different_elements
from h3lib.contract import CONTRACT_ID, OperandError
from h3lib.parallel import order_free
from h3lib.parallel.order_free import order_free_all_reduce, scale_of, to_integers

BF16, F32 = torch.bfloat16, torch.float32
CUTS = (0, 3, 3, 4, 8)  # rank 1 has no leaf


def leaves(*shape, scale=1.0):
    return scale * torch.randn(8, *shape, generator=torch.Generator().manual_seed(1))


def equal(a, b):
    return not different_elements(a.reshape(-1), b.reshape(-1)).any()


def _rank_main(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    own = leaves(33, 5)[CUTS[rank] : CUTS[rank + 1]]
    world = dist.group.WORLD
    found = {str(dtype): order_free_all_reduce(own, 8, dtype, world) for dtype in (F32, BF16)}
    bad = own.clone()
    bad[:1, 0] = float("nan")
    try:
        order_free_all_reduce(bad if rank == 3 else own, 8, F32, world)
    except OperandError as error:
        found["error"] = str(error)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_four_processes_get_what_one_gets(tmp_path):
    torch.multiprocessing.spawn(_rank_main, (str(tmp_path),), nprocs=4)
    for rank in range(4):
        found = torch.load(Path(tmp_path) / f"{rank}.pt")
        for dtype in (F32, BF16):
            assert equal(found[str(dtype)], order_free_all_reduce(leaves(33, 5), 8, dtype))
        assert "largest leaf" in found["error"] and "finite" in found["error"]


def test_every_order_of_the_leaves_gives_the_same_bytes_where_fp32_does_not():
    given = leaves(40)
    want = order_free_all_reduce(given, 8, F32)
    orders = list(itertools.permutations(range(8)))[::997]
    assert all(equal(order_free_all_reduce(given[list(o)], 8, F32), want) for o in orders)
    assert all(equal(integers_by_ranks(given, 8, o), want) for o in orders)
    assert any(not equal(tree_root(given[list(o)]), tree_root(given)) for o in orders)


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1.0, 3e4, 1e30, 4e36])
def test_no_leaf_overflows_and_the_error_is_half_a_step_a_leaf(scale):
    given = leaves(2000).clamp(-8, 8) * scale
    given[:, 0] = given.abs().max()  # eight equal largest leaves
    s = scale_of(given.abs().amax(), 8)
    assert to_integers(given, s).double().sum(0).abs().max() < 2**31
    exact = given.double().sum(0)
    error = (order_free_all_reduce(given, 8, F32).double() - exact).abs()
    rounding = exact.abs() * 2.0**-24 + 2.0**-150
    assert (error <= 8 * 0.5 * 2.0**-s + rounding).all()


def test_integers_are_exact():
    given = torch.randint(-(2**20), 2**20, (8, 100), generator=torch.Generator().manual_seed(2))
    assert equal(order_free_all_reduce(given.float(), 8, F32), given.sum(0).float())


def test_zeros_and_no_elements():
    assert equal(order_free_all_reduce(torch.zeros(8, 3), 8, BF16), torch.zeros(3, dtype=BF16))
    assert order_free_all_reduce(torch.zeros(8, 0), 8, BF16).shape == (0,)


def test_it_is_a_contract_of_its_own():
    assert order_free.CONTRACT_ID != CONTRACT_ID
    given = leaves(4000)
    assert not equal(order_free_all_reduce(given, 8, F32), tree_root(given))


@pytest.mark.parametrize(
    "given, num_leaves, word",
    [
        (torch.zeros(8, 2, dtype=BF16), 8, "dtype of leaves"),
        (torch.zeros(6, 2), 6, "power of two"),
        (torch.zeros(8, 2), 4, "power of two"),
        (torch.full((8, 2), float("inf")), 8, "largest leaf"),
        (torch.full((8, 2), float("nan")), 8, "largest leaf"),
    ],
)
def test_what_cannot_be_added_is_refused(given, num_leaves, word):
    with pytest.raises(OperandError, match=word):
        order_free_all_reduce(given, num_leaves, F32)
