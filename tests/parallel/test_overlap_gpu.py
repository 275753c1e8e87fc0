"""A rank that dies among the chunks of a product, on GPUs that four ranks share.

This file is also what the ranks run: `python test_overlap_gpu.py WORLD FOLDER`.
"""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from rank_support import Ranks

from h3lib.contract import PeerError
from h3lib.parallel.collective import TreeCollective
from h3lib.parallel.gloo import GlooWorld
from h3lib.parallel.overlap import Chunks, RowProduct, reduce_product

pytestmark = pytest.mark.gpu

SIZE, VICTIM, ROWS, WIDTH, TIMEOUT_S = 4, 2, 600, 1344, 6.0
CUTS = [0, 2, 4, 6, 8]


def killed_in_a_chunk(rank: int) -> tuple[str, float, str]:
    """Products until one fails; a checked result is the exact sum of integers or an error."""
    from h3lib.parallel import peer

    peer.LANE_BYTES = 0
    torch.cuda.set_device(rank % torch.cuda.device_count())
    whole = tuple(range(SIZE))
    world = GlooWorld([whole], TIMEOUT_S, start_timeout_s=60)
    tree = peer.PeerTree(world.connect(whole, rank))
    roots = torch.full((1, ROWS, WIDTH), rank + 1.0, device="cuda")
    made = 0

    def make(ranges) -> torch.Tensor:
        nonlocal made
        made += 1
        if rank == VICTIM and made == 14:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.cuda._sleep(200_000)
        return torch.cat([roots[:, rows.start : rows.stop] for rows in ranges], dim=1)

    product, error, began = RowProduct(ROWS, WIDTH, 1, make), "", time.monotonic()
    try:
        for _ in range(10):
            began = time.monotonic()
            total = reduce_product(
                TreeCollective(tree), product, CUTS, torch.float32, chunks=Chunks(100)
            )
            assert (total == 10.0).all()
    except PeerError as found:
        error = str(found)
    waited, again = time.monotonic() - began, ""
    try:
        reduce_product(TreeCollective(tree), product, CUTS, torch.float32, chunks=Chunks(100))
    except PeerError as found:
        again = str(found)
    tree.close()
    world.close()
    return error, waited, again


def test_a_rank_that_is_killed_among_chunks_is_named_by_all(tmp_path):
    ranks = Ranks(__file__, "killed", SIZE, SIZE, tmp_path)
    try:
        statuses, found = ranks.wait(time.monotonic() + 120)
    finally:
        ranks.close()
    assert [status for rank, status in enumerate(statuses) if rank != VICTIM] == [0] * (SIZE - 1)
    assert statuses[VICTIM] == -signal.SIGKILL
    for error, waited, again in (of for of in found if of is not None):
        assert error.startswith(f"rank {VICTIM} in ") and "its process ended" in error
        assert waited < TIMEOUT_S + 5
        assert "a use after" in again
    assert sum(of is not None for of in found) == SIZE - 1


if __name__ == "__main__":
    place = int(os.environ["RANK"])
    torch.save(killed_in_a_chunk(place), Path(sys.argv[2]) / f"{place}.pt")
    os._exit(0)
