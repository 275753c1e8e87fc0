"""Open, use and close groups again and again: `python -m h3lib.faults.rounds --out FILE`.

What a process holds (open files, threads, GPU memory) after the last round must be what it held
after the tenth; every round must give the same bytes. On CPU a round is a whole world, on GPUs a
peer tree in one world.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
from pathlib import Path

import torch

from h3lib.contract import PeerError
from h3lib.files import write_json
from h3lib.parallel.collective import TreeCollective
from h3lib.parallel.gloo import GlooWorld
from h3lib.parallel.launch import die_with_launcher, run_ranks
from h3lib.report import environment

NUM_RANKS = 2
TIMEOUT_S = 60.0
_SETTLED = 10  # rounds after which nothing new may be held


def held(device: str) -> dict[str, int]:
    """What this process holds; GPU memory is that of the whole GPU."""
    found = {
        "open_files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found["gpu_bytes"] = total - free
    return found


def play(count: int, device: str) -> dict[str, object]:
    """One rank: `count` rounds; what was held after the tenth and the last."""
    ranks, digests, after = tuple(range(NUM_RANKS)), set(), []
    world = GlooWorld([ranks], TIMEOUT_S)
    for round_index in range(count):
        if device == "cpu" and round_index:
            world = GlooWorld([ranks], TIMEOUT_S)
        level = control = world.connect(ranks, world.rank)
        if device == "cuda":
            from h3lib.parallel.peer import PeerTree  # needs Triton

            level = PeerTree(control, 32 << 20)
        part = torch.arange(1000.0, device=device) * (1 + world.rank)
        total = TreeCollective(level).all_reduce(part[None], [0, 4, 8], torch.float32)
        digests.add(hashlib.sha256(total.cpu().numpy().tobytes()).hexdigest())
        if device == "cuda":
            level.close()
        else:
            world.close()
        if round_index in (_SETTLED - 1, count - 1):
            if device == "cuda":
                control.gather_objects(None)  # all have closed
            after.append(held(device))
            if device == "cuda":
                control.gather_objects(None)  # all have looked
    world.close()
    return {"settled": after[0], "end": after[-1], "digests": len(digests)}


def rank_main(count: int, device: str, folder: Path) -> None:
    die_with_launcher()
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    write_json(folder / f"found-{rank}", play(count, device))


def run_rounds(count: int, device: str, timeout_s: float = 600.0) -> list[dict[str, object]]:
    """What each rank found. **Raises:** PeerError if a rank fails."""
    if count <= _SETTLED:
        raise PeerError("rounds", count, f"more than {_SETTLED}")
    with tempfile.TemporaryDirectory(prefix="h3lib-rounds-") as name:
        folder = Path(name)
        arguments = ["--count", str(count), "--device", device, "--rank", name]
        module, log = "h3lib.faults.rounds", folder / "log"
        status = run_ranks(module, arguments, NUM_RANKS, timeout_s, log, lambda: None)
        if status:
            said = log.read_text(errors="replace")[-3000:]
            raise PeerError("ranks", f"exit status {status}: {said}", "0")
        return [json.loads((folder / f"found-{rank}").read_text()) for rank in range(NUM_RANKS)]


def leaks(found: list[dict]) -> list[str]:
    """What more is held at the end than after the tenth round, and bytes that changed."""
    wrong = [
        f"rank {rank}: {key} {there['settled'][key]} to {there['end'][key]}"
        for rank, there in enumerate(found)
        for key in there["end"]
        if there["end"][key] > there["settled"][key]
    ]
    return wrong + [f"rank {r}: other bytes" for r, f in enumerate(found) if f["digests"] != 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.count, options.device, options.rank)
        return
    found = run_rounds(options.count, options.device)
    content = {
        "environment": environment(options.device, "node-a"),
        "rounds": options.count,
        "ranks": found,
        "leaks": leaks(found),
        "complete": True,
    }
    if options.out:
        write_json(options.out, content)
    print(f"{options.count} rounds, {options.device}: {content['leaks'] or 'nothing left'}")


if __name__ == "__main__":
    main()
