"""Gloo between real processes: bytes, empty parts, disagreement, a peer that dies or is late.

This file is also what the ranks run: `python test_gloo.py WORLD FOLDER`.
"""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_support import Ranks

from h3lib.contract import PeerError
from h3lib.ops.tree import partial_roots
from h3lib.parallel.collective import TreeCollective
from h3lib.parallel.gloo import GlooWorld, require_same
from h3lib.parallel.hierarchical import HierarchicalCollective
from h3lib.parallel.nccl import NcclTransport
from h3lib.parallel.place import own_place
from h3lib.parallel.transport import ThreadWorld

BF16, F32 = torch.bfloat16, torch.float32
DTYPES = (BF16, F32, torch.float64, torch.int64, torch.bool)
WHOLE = (0, 1, 2, 3)
GROUPS = [WHOLE, (0, 1), (2, 3), (0, 2), (1, 3), (1, 2, 3)]
LEAF_CUTS, ROW_CUTS = [0, 2, 5, 7, 8], [0, 0, 3, 3, 7]
SAME = {"contract": "h3-parallel-v1", "torch": "2"}


def numbers(source: int, destination: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """What `source` sends to `destination`."""
    first = 100 * source + 10 * destination
    return torch.arange(first, first + 2 * rows).view(rows, 2).to(dtype)


def leaves() -> torch.Tensor:
    return torch.randn(8, 7, 3, generator=torch.Generator().manual_seed(1))


def exchange_numbers(connect, dtype) -> list[torch.Tensor]:
    """Uneven parts, most of them empty for some peers; a part may be a view."""
    transport = connect(WHOLE)
    rank = transport.rank
    rows = [[(s * r) % 3 for s in range(4)] for r in range(4)]
    parts = [numbers(rank, r, rows[r][rank], dtype).T.contiguous().T for r in range(4)]
    return transport.exchange(parts, [(n, 2) for n in rows[rank]])


def sums(connect, rank: int) -> dict[str, torch.Tensor]:
    """Every reduction and gather, flat and as two nodes of two."""
    pair, equals = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
    collectives = {
        "flat": TreeCollective(connect(WHOLE)),
        "2x2": HierarchicalCollective(connect(pair), connect(equals)),
    }
    roots = partial_roots(leaves().__getitem__, range(*LEAF_CUTS[rank : rank + 2]), 8)
    found, own = {}, slice(*ROW_CUTS[rank : rank + 2])
    for name, collective in collectives.items():
        found |= {
            f"{name} sum": collective.all_reduce(roots, LEAF_CUTS, BF16),
            f"{name} rows": collective.reduce_scatter_rows(roots, LEAF_CUTS, ROW_CUTS, F32),
            f"{name} gather": collective.all_gather_rows(leaves()[0][own], ROW_CUTS),
            f"{name} columns": collective.all_gather_columns(leaves()[0][own].T, ROW_CUTS),
        }
    return found


def error_of(function, *args) -> str:
    try:
        function(*args)
    except PeerError as error:
        return str(error)
    return ""


def wrong_shape(transport) -> None:
    parts = [torch.zeros(1 + (transport.rank == 2 and r == 1)) for r in range(4)]
    transport.exchange(parts, [(1,)] * 4)


def wrong_dtype(transport) -> None:
    parts = [torch.zeros(1, dtype=BF16 if transport.rank == 2 else F32)] * 4
    transport.exchange(parts, [(1,)] * 4)


def wrong_columns(transport) -> None:
    """As many elements on every rank, in another shape on one."""
    shape = (2, 3, 4) if transport.rank == 2 else (2, 4, 3)
    TreeCollective(transport).all_gather_rows(torch.zeros(shape), [0, 2, 4, 6, 8])


def disagree(function) -> tuple[str, str, list[int]]:
    """The error of a disagreement, of the next use of that world, and what a new world gives."""
    world = GlooWorld(GROUPS, 40.0)
    transport = world.connect(WHOLE, world.rank)
    first = error_of(function, transport)
    second = error_of(transport.exchange, [torch.zeros(1)] * 4, [(1,)] * 4)
    world.close()
    world = GlooWorld(GROUPS, 40.0)
    parts = world.connect(WHOLE, world.rank).exchange([torch.tensor([world.rank])] * 4, [(1,)] * 4)
    world.close()
    return first, second, [part.item() for part in parts]


def agree(world: GlooWorld, folder: Path) -> dict:
    """The world of four: all that works, then disagreements, each in a world of its own."""
    rank = world.rank

    def connect(ranks):
        return world.connect(ranks, rank)

    found = {
        "place": own_place().rank,
        "ranks": (world.rank, world.size),
        "empty": connect(WHOLE).exchange([torch.zeros(0, 3)] * 4, [(0, 3)] * 4),
        "same": error_of(require_same, world, dict(SAME)),
        "other": error_of(require_same, world, SAME | ({"torch": "1"} if rank == 2 else {})),
        "objects": world.gather_objects({"rank": rank}),
    }
    for dtype in DTYPES:
        found[str(dtype)] = exchange_numbers(connect, dtype)
    found |= sums(connect, rank)
    if rank:
        three = connect((1, 2, 3))
        found["three"] = three.rank, three.exchange([torch.tensor([rank])] * 3, [(1,)] * 3)
    world.close()
    for function in (wrong_shape, wrong_dtype, wrong_columns):
        found[function.__name__] = disagree(function)
    return found | by_data_group(rank)


def by_data_group(rank: int) -> dict:
    """The transport of NCCL, its bytes moved by a second Gloo group: no GPU is needed for that."""
    world = GlooWorld([WHOLE], 40.0, data_groups=[WHOLE], data_backend="gloo")

    def connect(ranks):
        return NcclTransport(world, list(ranks), rank)

    collective = TreeCollective(connect(WHOLE))
    roots = partial_roots(leaves().__getitem__, range(*LEAF_CUTS[rank : rank + 2]), 8)
    found = {f"data {dtype}": exchange_numbers(connect, dtype) for dtype in DTYPES}
    found["data sum"] = collective.all_reduce(roots, LEAF_CUTS, BF16)
    found["data error"] = error_of(wrong_shape, connect(WHOLE))
    world.close()
    return found


def killed(world: GlooWorld, folder: Path) -> dict:
    """Rank 1 is killed between two exchanges."""
    transport, ranks = world.connect((0, 1, 2), world.rank), 3
    transport.exchange([torch.zeros(1)] * ranks, [(1,)] * ranks)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    error = error_of(transport.exchange, [torch.zeros(1)] * ranks, [(1,)] * ranks)
    return {"error": error, "waited_s": time.monotonic() - began}


def late(world: GlooWorld, folder: Path) -> dict:
    """Rank 1 does not come until rank 0 has given up."""
    if world.rank == 1:
        while not (folder / "0.pt").exists():
            time.sleep(0.1)
        return {}
    began = time.monotonic()
    transport = world.connect((0, 1), world.rank)
    error = error_of(transport.exchange, [torch.zeros(1)] * 2, [(1,)] * 2)
    return {"error": error, "waited_s": time.monotonic() - began}


def alone() -> dict:
    """One of two ranks: the other is never started."""
    began = time.monotonic()
    return {"error": error_of(GlooWorld, [], 1.5), "waited_s": time.monotonic() - began}


WORLDS = {"agree": (4, GROUPS, 40.0), "killed": (3, [(0, 1, 2)], 40.0), "late": (2, [(0, 1)], 3.0)}


def rank_main(name: str, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if name == "alone":
        found = alone()
    else:
        size, groups, timeout_s = WORLDS[name]
        ready = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        ready.add("ready", 1)
        while ready.add("ready", 0) < size:  # the time to start Python is not part of a timeout
            time.sleep(0.05)
        world = GlooWorld(groups, timeout_s, start_timeout_s=60.0)
        found = {"agree": agree, "killed": killed, "late": late}[name](world, folder)
    torch.save(found, folder / f"{rank}.tmp")
    os.replace(folder / f"{rank}.tmp", folder / f"{rank}.pt")
    os._exit(0)  # do not wait for peers that are gone


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> dict[str, tuple[list[int], list]]:
    """All worlds at once: starting Python takes longest."""
    folder = tmp_path_factory.mktemp("gloo")
    sizes = {name: size for name, (size, *_) in WORLDS.items()}
    running = {name: Ranks(__file__, name, n, n, folder) for name, n in sizes.items()}
    running["alone"] = Ranks(__file__, "alone", 1, 2, folder)
    deadline = time.monotonic() + 100
    try:
        return {name: ranks.wait(deadline) for name, ranks in running.items()}
    finally:
        for ranks in running.values():
            ranks.close()


@pytest.fixture(scope="module")
def agreed(worlds) -> list[dict]:
    statuses, found = worlds["agree"]
    assert statuses == [0, 0, 0, 0]
    return found


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*raw)


def test_ranks_know_their_place(agreed):
    assert [found["ranks"] for found in agreed] == [(rank, 4) for rank in range(4)]
    assert [found["place"] for found in agreed] == [0, 1, 2, 3]
    assert own_place() is None
    assert all(found["objects"] == [{"rank": r} for r in range(4)] for found in agreed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_any_size_arrive_unchanged_from_every_rank_in_order(agreed, dtype):
    for rank, found in enumerate(agreed):
        for source, part in enumerate(found[str(dtype)]):
            rows = (source * rank) % 3
            assert same_bytes(part, numbers(source, rank, rows, dtype)), (source, rank)


def test_bytes_that_go_through_another_group_are_the_same(agreed):
    for found in agreed:
        assert same_bytes(found["data sum"], agreed[0]["flat sum"])
        assert found["data error"] == DISAGREEMENTS["wrong_shape"]
        for dtype in DTYPES:
            for part, expected in zip(found[f"data {dtype}"], found[str(dtype)], strict=True):
                assert same_bytes(part, expected)


def test_an_exchange_of_nothing_returns(agreed):
    for found in agreed:
        assert [part.shape for part in found["empty"]] == [(0, 3)] * 4


def test_a_group_of_three_counts_its_own_ranks(agreed):
    for rank in (1, 2, 3):
        place, parts = agreed[rank]["three"]
        assert place == rank - 1
        assert [part.item() for part in parts] == [1, 2, 3]


def test_processes_and_threads_give_the_same_bytes(agreed):
    world = ThreadWorld(4, timeout_s=20)
    expected = world.run(lambda rank: sums(lambda ranks: world.connect(ranks, rank), rank))
    for found, want in zip(agreed, expected, strict=True):
        assert len(want) == 8
        for name, value in want.items():
            assert same_bytes(found[name], value), name


def test_flat_and_hierarchical_give_the_same_bytes(agreed):
    for found in agreed:
        for name in ("sum", "rows", "gather", "columns"):
            assert same_bytes(found[f"flat {name}"], found[f"2x2 {name}"])
        assert same_bytes(found["flat sum"], agreed[0]["flat sum"])


DISAGREEMENTS = {
    "wrong_shape": "shape sent by rank 2 to rank 1: received (2,); accepted: (1,)",
    "wrong_dtype": "dtypes of one exchange: received ['torch.bfloat16', 'torch.float32']; "
    "accepted: one dtype on every rank",
    "wrong_columns": "shape of all_gather_rows on rank 2: received (8, 3, 4); "
    "accepted: (8, 4, 3) as on rank 0",
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_a_disagreement_is_the_same_error_on_every_rank_and_ends_the_world(agreed, name):
    for found in agreed:
        first, second, parts = found[name]
        assert first == DISAGREEMENTS[name]
        used = f"a use after: {first}"
        assert second == f"process group: received {used!r}; accepted: a new process group"
        assert parts == [0, 1, 2, 3]


def test_a_peer_that_differs_is_named_on_every_rank(agreed):
    for found in agreed:
        assert found["same"] == ""
        assert found["other"] == "torch of rank 2: received '1'; accepted: '2' as on rank 0"


def test_a_killed_peer_is_named_before_the_timeout(worlds):
    statuses, found = worlds["killed"]
    assert statuses == [0, -signal.SIGKILL, 0]
    assert found[1] is None
    for rank in (0, 2):
        assert found[rank]["error"] == (
            "rank 1 in an exchange: received 'its process ended'; accepted: an answer in 40 s"
        )
        assert found[rank]["waited_s"] < 30


def test_a_peer_that_does_not_come_is_named_after_the_timeout(worlds):
    statuses, found = worlds["late"]
    assert statuses == [0, 0]
    assert found[0]["error"] == (
        "rank 1 in an exchange: received 'late: it did not come'; accepted: an answer in 3 s"
    )
    assert 3 <= found[0]["waited_s"] < 3 + 5


def test_a_world_that_is_not_complete_raises_after_the_timeout(worlds):
    statuses, found = worlds["alone"]
    assert statuses == [0]
    assert found[0]["error"].startswith("start of the process group: received ")
    assert found[0]["error"].endswith("accepted: all ranks in 1.5 s")
    assert found[0]["waited_s"] < 30


if __name__ == "__main__":
    rank_main(sys.argv[1], Path(sys.argv[2]))
