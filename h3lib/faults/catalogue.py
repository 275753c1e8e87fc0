"""Every fault that is injected: what is broken, when, and what the verdict must say about it.

The victim plays them in `rank.py` and `sabotage.py`. *Played* faults are those for which the
machine cannot be asked: a driver that forbids CUDA IPC, another version, another GPU model.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

COLLECTIVES = ("all_reduce", "reduce_scatter_rows", "all_gather_rows", "all_gather_columns")
GATHERS = COLLECTIVES[2:]
SIGNALS = ("killed", "stopped")
HARMLESS = ("nothing", "late within the timeout", "leaked mapping", "expandable segments")
BEFORE, DURING, AFTER, GRAPH = "before", "during", "after", "graph"
_OFTEN, _MANY_ELEMENTS = (5, 1000, 40_000), 4_000_000
_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Fault:
    """When it strikes, on which devices, and a pattern of its cause in the verdict."""

    name: str
    when: tuple[str, ...]
    cause: str = ""
    gpu_only: bool = False


FAULTS = (
    Fault("killed", (BEFORE, DURING, AFTER, GRAPH), "its process ended"),
    Fault("stopped", (BEFORE, DURING, AFTER, GRAPH), "its process is stopped"),
    Fault("late", (BEFORE, DURING, AFTER, GRAPH), "late"),
    Fault("late within the timeout", (BEFORE, DURING, AFTER, GRAPH)),
    Fault("exception", (BEFORE, AFTER, GRAPH), "ValueError: a mistake outside"),
    Fault("shape", (BEFORE, GRAPH), "shape of"),
    Fault("shape of as many elements", (BEFORE, GRAPH), "shape of"),
    Fault("dtype", (BEFORE, GRAPH), "dtype"),
    Fault("collective", (BEFORE, GRAPH), "collective on"),
    Fault("cuts", (BEFORE, GRAPH), "cuts of"),
    Fault("operand elsewhere", (BEFORE,), "device of", gpu_only=True),
    Fault("out of memory", (BEFORE,), "out of memory"),
    Fault("contract", (BEFORE,), "contract of"),
    Fault("torch", (BEFORE,), "torch of"),
    Fault("device", (BEFORE,), "device of"),
    Fault("triton", (BEFORE,), "triton of", gpu_only=True),
    Fault("buffer out of memory", (BEFORE,), "CUDA_ERROR_OUT_OF_MEMORY", gpu_only=True),
    Fault("memory without IPC", (BEFORE,), "cuIpcGetMemHandle", gpu_only=True),
    Fault("IPC not permitted", (BEFORE,), "CUDA_ERROR_NOT_PERMITTED", gpu_only=True),
    Fault("stale handle", (BEFORE,), "cuIpcOpenMemHandle", gpu_only=True),
    Fault("leaked mapping", (BEFORE,), gpu_only=True),
    Fault("expandable segments", (BEFORE,), gpu_only=True),
)
OPENINGS = ("contract", "torch", "device", "triton")
CAUSES = {fault.name: fault.cause for fault in FAULTS}


@dataclass(frozen=True)
class Injection:
    """What is broken, on whom and when; `levels` 2 is a hierarchy of two nodes; `spread` puts the
    ranks on all GPUs in turn instead of all on one."""

    number: int
    fault: str
    when: str
    victim: int
    collective: str
    calls_before: int
    num_elements: int
    levels: int
    device: str
    num_ranks: int
    timeout_s: float
    delay_s: float
    spread: bool = True

    def cuts(self, total: int) -> list[int]:
        return [total * i // self.num_ranks for i in range(self.num_ranks + 1)]

    def expects_error(self) -> bool:
        return self.fault not in HARMLESS

    def spoilt_calls(self) -> list[str]:
        """Calls that the victim makes instead; if all ranks make one, nothing is wrong with it."""
        reduces = self.collective not in GATHERS
        valid = [wrong for wrong in SPOILT if not (wrong in ("dtype", "cuts") and reduces)]
        return [wrong for wrong in valid if self.fault in (wrong, "nothing")]


SPOILT = ("shape", "shape of as many elements", "dtype", "collective", "cuts")


def draw(count: int, seed: int, device: str, num_ranks: int) -> list[Injection]:
    """`count` random injections: every fault at every time once before any comes again."""
    rng, found = random.Random(seed), []
    kinds = [
        (fault.name, when)
        for fault in FAULTS
        for when in fault.when
        if device == "cuda" or not (fault.gpu_only or when == GRAPH)
    ]
    while len(found) < count:
        rng.shuffle(kinds)
        for fault, when in kinds[: count - len(found)]:
            found.append(_draw(rng, len(found), fault, when, device, num_ranks))
    return found


def _draw(
    rng: random.Random, number: int, fault: str, when: str, device: str, num_ranks: int
) -> Injection:
    gathers = fault == "cuts" or (fault == "dtype" and when == GRAPH)
    one_level = num_ranks % 2 or when == GRAPH
    return Injection(
        number=number,
        fault=fault,
        when=when,
        victim=rng.randrange(num_ranks),
        collective=rng.choice(GATHERS if gathers else COLLECTIVES),
        calls_before=rng.randrange(4),
        num_elements=_MANY_ELEMENTS if fault == "out of memory" else rng.choice(_OFTEN),
        levels=1 if one_level or rng.random() >= 0.3 else 2,
        device=device,
        num_ranks=num_ranks,
        timeout_s=_TIMEOUT_S,
        delay_s=round(rng.uniform(0.0, 0.02), 4),
        spread=rng.random() < 0.7,
    )


def well(device: str, num_ranks: int) -> list[Injection]:
    """Injections of nothing, for every collective: after them no kernel needs to be compiled."""
    kinds = [
        (collective, num_elements, levels)
        for collective in COLLECTIVES
        for num_elements in _OFTEN
        for levels in ((1,) if num_ranks % 2 else (1, 2))
    ]
    return [
        Injection(
            number=-1 - place,
            fault="nothing",
            when=BEFORE,
            victim=0,
            collective=collective,
            calls_before=0,
            num_elements=num_elements,
            levels=levels,
            device=device,
            num_ranks=num_ranks,
            timeout_s=60.0,
            delay_s=0.0,
        )
        for place, (collective, num_elements, levels) in enumerate(kinds)
    ]
