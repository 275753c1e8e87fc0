"""Who this process is among the ranks of a run: what torchrun or srun put into its environment."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from h3lib.contract import LayoutError, PeerError
from h3lib.layout import Layout

_FIRST_PORT, _NUM_PORTS = 15000, 15000  # below the ports that Linux gives to outgoing connections


@dataclass(frozen=True)
class RankPlace:
    """Rank of `num_ranks` on a `node`, counted from 0; the ranks meet at the URL `meeting`."""

    rank: int
    num_ranks: int
    node: int
    meeting: str
    launcher: str


def own_place(alone: bool = False) -> RankPlace | None:
    """The place of this process; None if it was not started as a rank.

    torchrun's word comes first, for srun may have started torchrun. A Slurm step of one task is no
    rank but a program that starts ranks, such as a notebook; `alone` says that it is a rank.

    **Raises:** PeerError if Slurm does not say where the first rank is.
    """
    known = os.environ
    if "RANK" in known and "WORLD_SIZE" in known:
        node, num_ranks = int(known.get("GROUP_RANK", 0)), int(known["WORLD_SIZE"])
        return RankPlace(int(known["RANK"]), num_ranks, node, "env://", "torchrun")
    num_tasks = int(known.get("SLURM_STEP_NUM_TASKS", 1))
    if "SLURM_STEP_ID" not in known or (num_tasks == 1 and not alone):
        return None
    rank, node = int(known["SLURM_PROCID"]), int(known["SLURM_NODEID"])
    return RankPlace(rank, num_tasks, node, _meeting(), "srun")


def check_nodes(layout: Layout, nodes: Sequence[int], transport: str) -> None:
    """The ranks that the layout puts on one node are on one; a node may hold several such.

    `nodes[rank]` as the launcher counts them. **Raises:** LayoutError on every rank.
    """
    local_size = layout.local_size or (layout.num_ranks if transport == "peer" else 1)
    for first in range(0, layout.num_ranks, local_size):
        together = list(nodes[first : first + local_size])
        if len(set(together)) > 1:
            accepted = f"one node for ranks {first} to {first + len(together) - 1}"
            accepted += "" if layout.local_size else "; over several, a layout with -localN"
            raise LayoutError(f"nodes of {layout.name}", together, accepted)


def _meeting() -> str:
    """tcp://ADDRESS:PORT of the first node; MASTER_ADDR and MASTER_PORT come first where set."""
    known = os.environ
    address, port = known.get("MASTER_ADDR"), known.get("MASTER_PORT")
    if address is None:
        first = _scontrol("show", "hostnames", known["SLURM_STEP_NODELIST"]).split()[0]
        found = re.search(r"\bNodeAddr=(\S+)", _scontrol("--oneliner", "show", "node", first))
        if found is None:
            raise PeerError(f"address of node {first}", None, "NodeAddr, or MASTER_ADDR set")
        address = found[1]
    if port is None:
        step = 7919 * int(known["SLURM_JOB_ID"]) + int(known["SLURM_STEP_ID"])
        port = str(_FIRST_PORT + step % _NUM_PORTS)
    return f"tcp://{address}:{port}"


def _scontrol(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["scontrol", *arguments], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        accepted = "the first node's address, or MASTER_ADDR set"
        raise PeerError("answer of scontrol", str(error), accepted) from error
    return done.stdout
