"""The peer tree between real processes under Triton's interpreter: bits, failures, opening.

This file is also what the ranks run: `python test_peer_interpreter.py WORLD FOLDER`.
"""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from rank_support import Ranks

from h3lib.contract import OperandError, PeerError
from h3lib.ops.tree import partial_roots
from h3lib.parallel.collective import TreeCollective
from h3lib.parallel.gloo import GlooWorld
from h3lib.parallel.hierarchical import HierarchicalCollective
from h3lib.parallel.overlap import Chunks, RowProduct, reduce_product
from h3lib.parallel.transport import ThreadWorld

triton = pytest.importorskip("triton")

BF16, F32 = torch.bfloat16, torch.float32
SIZE, WHOLE = 4, (0, 1, 2, 3)
GROUPS = [WHOLE, (0, 1), (2, 3), (0, 2), (1, 3), (1, 2, 3)]
CUTS = {  # several roots a rank, a rank without leaves, one root each
    "uneven": [0, 2, 5, 7, 8],
    "empty": [0, 0, 3, 8, 8],
    "empty node": [0, 0, 0, 3, 8],
    "units": [0, 2, 4, 6, 8],
    "row units": [0, 24, 48, 56, 64],
}
TIMEOUT_S, PATIENT_S = 6.0, 90.0  # a busy machine must not look like a late rank
CAPACITIES = (1 << 20, 2048)


def leaves_of(seed: int, num_leaves: int, *shape: int) -> torch.Tensor:
    return torch.randn(num_leaves, *shape, generator=torch.Generator().manual_seed(seed))


def roots_of(leaves: torch.Tensor, cuts: list[int], rank: int) -> torch.Tensor:
    if cuts[rank] == cuts[rank + 1]:
        return leaves[:0]
    return partial_roots(leaves.__getitem__, range(*cuts[rank : rank + 2]), len(leaves))


def everything(open_level, rank: int) -> dict[str, torch.Tensor]:
    """Every collective, flat and as two nodes of two, in odd and even sizes.

    FP32 results: the interpreter does not round to BF16 as the hardware does.
    """
    pair, equals = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
    collectives = {
        "flat": TreeCollective(open_level(WHOLE)),
        "2x2": HierarchicalCollective(open_level(pair), open_level(equals)),
    }
    found = {}
    for name, collective in collectives.items():
        for label, cuts in CUTS.items():
            if name == "2x2" and label not in ("uneven", "empty node"):
                continue
            for shape in ((0,), (1,), (61, 5)):
                roots = roots_of(leaves_of(len(shape), cuts[-1], *shape), cuts, rank)
                roots = roots.transpose(1, -1).contiguous().transpose(1, -1)
                seen = []
                result = collective.all_reduce(
                    roots, cuts, F32, lambda root, at, seen=seen: seen.append((root, at))
                )
                key = f"{name} {label} {shape}"
                found[key] = result
                ((root, at),) = seen
                flat = result.reshape(-1)[at : at + len(root)]
                found[f"{key} observed"] = (root.view(torch.int32) == flat.view(torch.int32)).all()
        rows, cuts = [0, 0, 7, 8, 61], CUTS["uneven"]
        roots = roots_of(leaves_of(3, 8, 61, 5), cuts, rank)
        found[f"{name} rows"] = collective.reduce_scatter_rows(roots, cuts, rows, F32)
        roots = roots_of(leaves_of(5, 8, 61, 8), cuts, rank)
        for row_cuts in (None, rows):
            found[f"{name} product {row_cuts}"] = in_chunks(collective, roots, cuts, row_cuts)
        for dtype in (BF16, torch.int64, torch.bool):
            whole = (leaves_of(4, 61, 6) * 100).to(dtype)
            part = whole[rows[rank] : rows[rank + 1]]
            found[f"{name} gather {dtype}"] = collective.all_gather_rows(part, rows)
            columns = part.movedim(0, -1)
            found[f"{name} columns {dtype}"] = collective.all_gather_columns(columns, rows)
    return found


def in_chunks(collective, roots, cuts, row_cuts) -> torch.Tensor:
    def make(ranges) -> torch.Tensor:
        return torch.cat([roots[:, rows.start : rows.stop] for rows in ranges], dim=1)

    product = RowProduct(*roots.shape[1:], 1, make)
    return reduce_product(collective, product, cuts, F32, row_cuts, chunks=Chunks(25))


def error_of(function, *args) -> str:
    try:
        function(*args)
    except (PeerError, OperandError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Peers:
    """A Gloo world and the peer trees opened in it."""

    def __init__(
        self,
        folder: Path,
        fail: str = "",
        capacity_bytes: int = 1 << 20,
        timeout_s: float = PATIENT_S,
    ):
        from peer_support import FileDriver

        self.world, self.trees = GlooWorld(GROUPS, timeout_s, start_timeout_s=PATIENT_S), []
        self.capacity_bytes, self.driver = capacity_bytes, FileDriver(folder, fail)

    def open(self, ranks=WHOLE):
        from h3lib.parallel.peer import PeerTree
        from h3lib.parallel.peer_plan import Shape

        control = self.world.connect(ranks, self.world.rank)
        shape = Shape(channels=3, pieces=2, grain_bytes=64)
        tree = PeerTree(control, self.capacity_bytes, driver=self.driver, shape=shape)
        self.trees.append(tree)
        return tree

    def close(self) -> int:
        """How many buffers are still mapped afterwards."""
        for tree in self.trees:
            tree.close()
        self.world.close()
        return len(self.driver.maps)


def bits(folder: Path, rank: int) -> dict:
    """One-shot, then two-shot with room for a few elements at a time."""
    from h3lib.bench.collectives import link_bytes
    from h3lib.parallel import peer

    found = {}
    for capacity, one_shot_bytes in zip(CAPACITIES, (1 << 20, 0), strict=True):
        peer.ONE_SHOT_BYTES = one_shot_bytes
        peers = Peers(folder, capacity_bytes=capacity)
        values = everything(peers.open, rank)
        tree, cuts = peers.open(), CUTS["uneven"]
        roots = roots_of(leaves_of(1, 8, 101), cuts, rank)
        TreeCollective(tree).all_reduce(roots, cuts, BF16)
        found[f"{capacity} links"] = tree.bytes_sent, link_bytes(tree, cuts, 101)[rank]
        found |= {f"{capacity} {key}": value for key, value in values.items()}
        found[f"{capacity} left"] = peers.close()
    return found


def refused_driver(folder: Path, rank: int, function: str) -> tuple:
    peers = Peers(folder, fail=function if rank == 2 else "")
    return error_of(peers.open), peers.close()


def differs(folder: Path, rank: int, **options) -> tuple:
    peers = Peers(folder, **(options if rank == 2 else {}))
    return error_of(peers.open), peers.close()


def after(folder: Path, rank: int, function) -> tuple:
    """The error of a faulty call, of the call after it, and what is left mapped."""
    peers = Peers(folder, timeout_s=TIMEOUT_S)
    collective = TreeCollective(peers.open())
    part = torch.arange(3.0) + rank
    collective.all_gather_rows(part, [0, 3, 6, 9, 12])
    began = time.monotonic()
    first = error_of(function, collective, rank)
    waited = time.monotonic() - began
    second = error_of(collective.all_gather_rows, part, [0, 3, 6, 9, 12])
    return first, second, waited, peers.close()


def other_shape(collective, rank: int) -> None:
    shape = (1, 3, 4) if rank == 2 else (1, 4, 3)
    collective.all_gather_rows(torch.zeros(shape), [0, 1, 2, 3, 4])


def other_call(collective, rank: int) -> None:
    gather = collective.all_gather_columns if rank == 2 else collective.all_gather_rows
    gather(torch.zeros(1, 1), [0, 1, 2, 3, 4])


def other_dtype(collective, rank: int) -> None:
    roots = torch.zeros(1, 4, dtype=torch.float64 if rank == 2 else F32)
    collective.all_reduce(roots, [0, 2, 4, 6, 8], F32)


def late(collective, rank: int) -> None:
    time.sleep((TIMEOUT_S + 1) * (rank == 2))
    collective.all_gather_rows(torch.zeros(1), [0, 1, 2, 3, 4])


def somewhat_late(collective, rank: int) -> None:
    time.sleep(1.0 * (rank == 2))
    result = collective.all_gather_rows(torch.tensor([float(rank)]), [0, 1, 2, 3, 4])
    assert result.tolist() == [0.0, 1.0, 2.0, 3.0]


def killed(collective, rank: int) -> None:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    collective.all_gather_rows(torch.zeros(1), [0, 1, 2, 3, 4])


WORLDS = {
    "bits": bits,
    "allocate": lambda folder, rank: refused_driver(folder, rank, "allocate"),
    "export": lambda folder, rank: refused_driver(folder, rank, "export"),
    "open": lambda folder, rank: refused_driver(folder, rank, "open"),
    "capacity": lambda folder, rank: differs(folder, rank, capacity_bytes=4096),
    **{
        function.__name__: lambda folder, rank, function=function: after(folder, rank, function)
        for function in (other_shape, other_call, other_dtype, late, somewhat_late, killed)
    },
}


def rank_main(folder: Path) -> None:
    """All worlds one after the other in the same processes; the last one kills a rank."""
    from peer_support import without_ptx

    from h3lib.parallel import peer_memory

    without_ptx()
    peer_memory.PATIENCE_S = PATIENT_S  # on a busy machine, and for waits that nothing cuts short
    torch.set_num_threads(1)
    rank, found = int(os.environ["RANK"]), {}
    for name, world in WORLDS.items():
        found[name] = world(folder, rank)
        torch.save(found, folder / f"{rank}.tmp")
        os.replace(folder / f"{rank}.tmp", folder / f"{rank}.pt")
    os._exit(0)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("peer")
    started = Ranks(__file__, "world", SIZE, SIZE, folder, TRITON_INTERPRET="1")
    try:
        statuses, found = started.wait(time.monotonic() + 280)
    finally:
        started.close()
    assert statuses == [0, 0, -signal.SIGKILL, 0]
    return found


def survivors(ranks: list[dict], name: str) -> list[tuple]:
    return [found[name] for found in ranks if name in found]


def test_bits_are_those_of_threads_in_every_size_and_piece(ranks):
    world = ThreadWorld(SIZE, timeout_s=60)
    expected = world.run(lambda rank: everything(lambda group: world.connect(group, rank), rank))
    for found, want in zip(ranks, expected, strict=True):
        for capacity in CAPACITIES:
            assert found["bits"][f"{capacity} left"] == 0
            for key, value in want.items():
                got = found["bits"][f"{capacity} {key}"]
                assert (got.dtype, got.shape) == (value.dtype, value.shape), key
                same = [t.contiguous().reshape(-1).view(torch.uint8) for t in (got, value)]
                assert torch.equal(*same), key
                assert "observed" not in key or got


def test_bytes_sent_to_every_peer_are_those_of_the_closed_form(ranks):
    """R is 1, 2, 2, 1. One-shot: 4 R n to each peer; two-shot: 4 R |its slice| + 2 |own slice|."""
    roots, slices = (1, 2, 2, 1), (24, 24, 24, 29)
    for rank, found in enumerate(ranks):
        one_shot, two_shot = (found["bits"][f"{capacity} links"] for capacity in CAPACITIES)
        expected = [4 * roots[rank] * 101] * SIZE
        expected[rank] = 0
        assert one_shot[0] == one_shot[1] == expected
        expected = [4 * roots[rank] * slices[peer] + 2 * slices[rank] for peer in range(SIZE)]
        expected[rank] = 0
        assert two_shot[0] == two_shot[1] == expected


@pytest.mark.parametrize("function", ("allocate", "export", "open"))
def test_memory_that_cannot_be_shared_is_one_error_on_every_rank(ranks, function):
    what = "shared memory of rank 2"
    if function == "open":
        what = "memory of rank 0 mapped by rank 2"
    for error, left in survivors(ranks, function):
        assert error == (
            f"PeerError: {what}: received "
            f"'{function}: CUDA_ERROR_NOT_SUPPORTED'; accepted: CUDA_SUCCESS"
        )
        assert left == 0


def test_ranks_that_differ_are_refused_at_the_door(ranks):
    for error, left in survivors(ranks, "capacity"):
        accepted = "received 4096; accepted: 1048576 as on rank 0"
        assert error == f"PeerError: capacity of rank 2: {accepted}"
        assert left == 0


CALLS = {
    "other_shape": "PeerError: shape of all_gather_rows on rank 2: "
    "received (4, 3, 4); accepted: (4, 4, 3) as on rank 0",
    "other_call": "PeerError: collective on rank 2: received 'all_gather_columns'; "
    "accepted: 'all_gather_rows' as on rank 0",
    "late": "PeerError: rank 2 in all_gather_rows: received 'late",
}


@pytest.mark.parametrize("name", CALLS)
def test_a_faulty_call_is_one_error_on_every_rank_and_ends_the_group(ranks, name):
    assert len(survivors(ranks, name)) == SIZE
    for first, second, waited, left in survivors(ranks, name):
        assert first.startswith(CALLS[name])
        assert second.startswith("PeerError: process group: received")
        assert waited < TIMEOUT_S + 5
        assert left == 0


def test_an_operand_that_one_rank_refuses_is_heard_of_by_the_others(ranks):
    for rank, (first, second, waited, left) in enumerate(survivors(ranks, "other_dtype")):
        refused = "dtypes of roots and result: received (torch.float64, torch.float32)"
        assert refused in first
        assert first.startswith("OperandError" if rank == 2 else "PeerError: rank 2 in all_reduce")
        assert second.startswith("PeerError: process group: received")
        assert waited < TIMEOUT_S + 5
        assert left == 0


def test_a_rank_that_is_late_within_the_timeout_changes_nothing(ranks):
    for first, second, _, left in survivors(ranks, "somewhat_late"):
        assert (first, second, left) == ("", "", 0)


def test_a_killed_rank_is_named(ranks):
    found = survivors(ranks, "killed")
    assert len(found) == 3
    for first, second, waited, _ in found:
        assert first == (
            "PeerError: rank 2 in all_gather_rows: received 'its process ended'; "
            "accepted: an answer in 6 s"
        )
        assert second.startswith("PeerError: process group: received")
        assert waited < TIMEOUT_S + 5


if __name__ == "__main__":
    rank_main(Path(sys.argv[2]))
