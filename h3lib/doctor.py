"""What this machine is and can do: the fingerprint under every table, checks, a verdict a layout.

`fingerprint` asks nvidia-smi and the libraries, never CUDA itself: a notebook may call it. The
checks of `examine` use the GPUs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
from dataclasses import asdict, dataclass

import torch
import torch.multiprocessing

from h3lib.contract import LayoutError
from h3lib.layout import CP_DEGREES, TP_DEGREES, Layout
from h3lib.provenance import device_name, versions

OK, WARNING, PROBLEM, ABSENT = "ok", "warning", "problem", "not here"
_GPU_FIELDS = ("name", "driver_version", "compute_cap", "memory.total")
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_RANK_BYTES = 400 * 2**20  # one CPU rank of size tiny, resident, torch 2.13
_EXCHANGE_S = 120.0


@dataclass(frozen=True)
class Check:
    """One question about this machine, what was found, and why that matters if it is not ok."""

    name: str
    found: str
    verdict: str
    why: str = ""


@dataclass(frozen=True)
class Verdict:
    """Whether ranks of a layout run here, on the CPU and on GPUs: `yes` or `no`, and why."""

    layout: str
    ranks: int
    cpu: str
    cuda: str


@functools.cache
def fingerprint() -> dict[str, object]:
    """All that may change a bit or a time here and does not change while the machine is up."""
    return {
        **versions("python", "torch", "triton", "numpy"),
        "cuda": torch.version.cuda,
        "nccl": _nccl(),
        "cpu": device_name("cpu"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpus": _smi(f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"),
        "topology": _topology(),
        "allocator": _allocator(),
        "tf32": _tf32(),
    }


def fingerprint_digest() -> str:
    """The first 12 hexadecimal digits of the SHA-256 of the fingerprint."""
    return hashlib.sha256(json.dumps(fingerprint(), sort_keys=True).encode()).hexdigest()[:12]


def _smi(*arguments: str) -> list[str]:
    """Lines that nvidia-smi prints, without colours; none where there is no driver."""
    try:
        command = ["nvidia-smi", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout) if done.returncode == 0 else ""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def _topology() -> list[str]:
    """The table of nvidia-smi, without the legend under it."""
    lines = _smi("topo", "-m")
    return lines[: lines.index("Legend:")] if "Legend:" in lines else lines


def _nccl() -> str | None:
    if not torch.backends.cuda.is_built():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _allocator() -> str:
    return ",".join(filter(None, map(os.environ.get, _ALLOCATOR)))


def _tf32() -> str:
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    return "matmul {}, cudnn {}".format(*("on" if on else "off" for on in flags))


def examine() -> dict[str, object]:
    """The fingerprint and its digest, all checks, a verdict for each layout."""
    return {
        "digest": fingerprint_digest(),
        "fingerprint": fingerprint(),
        "checks": [asdict(check) for check in checks()],
        "layouts": [asdict(verdict) for verdict in verdicts()],
    }


def checks() -> list[Check]:
    """Every check that this machine can have; on one without a GPU, most are `not here`."""
    known, devices = fingerprint(), _num_devices()
    found = [Check("processor", f"{known['cpu']}, {known['cpu_capability']}", OK)]
    found += [
        Check(name, known[name] or "none", OK if known[name] else ABSENT)
        for name in ("python", "torch", "numpy", "triton", "cuda", "nccl")
    ]
    found.append(_driver_check(known["gpus"], devices))
    found += [_allocator_check(known["allocator"]), _tf32_check(known["tf32"])]
    if not devices:
        absent = ("compute capability", "free memory", "topology", "P2P", "IPC")
        return found + [Check(name, "no CUDA device", ABSENT) for name in absent]
    found.append(_capability_check())
    for device in range(devices):
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(device))
        verdict, why = (OK, "") if free > 0.9 * total else (WARNING, "others use this GPU")
        text = f"{free:.1f} of {total:.1f} GiB"
        found.append(Check(f"free memory, GPU {device}", text, verdict, why))
    found.append(Check("topology", "; ".join(known["topology"]) or "unknown", OK))
    pairs = [(a, b) for a in range(devices) for b in range(devices) if a < b]
    return found + [_p2p_check(*pair) for pair in pairs] + _ipc_checks(devices)


def _num_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _driver_check(gpus: list[str], devices: int) -> Check:
    if gpus and not devices:
        why = "there are GPUs that this torch cannot use: another driver, or a torch without CUDA"
        return Check("driver", "; ".join(gpus), PROBLEM, why)
    return Check("driver", "; ".join(gpus) or "none", OK if gpus else ABSENT)


def _allocator_check(settings: str) -> Check:
    if re.search(r"expandable_segments\s*:\s*true", settings, re.I):
        why = "torch's tensors have no IPC handle then; the peer tree takes its memory itself"
        return Check("allocator", settings, WARNING, why)
    return Check("allocator", settings or "as torch has it", OK)


def _tf32_check(flags: str) -> Check:
    if "matmul on" in flags:
        why = "FP32 products outside the contract's operations lose 13 bits: turn matmul TF32 off"
        return Check("TF32", flags, WARNING, why)
    return Check("TF32", flags, OK)


def _capability_check() -> Check:
    found = sorted({torch.cuda.get_device_capability(i) for i in range(_num_devices())})
    text = ", ".join(f"{major}.{minor}" for major, minor in found)
    if found != [(9, 0)]:
        return Check("compute capability", text, WARNING, "back end triton needs 9.0; eager runs")
    return Check("compute capability", text, OK)


def _p2p_check(a: int, b: int) -> Check:
    if torch.cuda.can_device_access_peer(a, b) and torch.cuda.can_device_access_peer(b, a):
        return Check(f"P2P, GPU {a} and {b}", "yes", OK)
    why = "neither reads the other's memory, so the peer tree cannot: --transport gloo"
    return Check(f"P2P, GPU {a} and {b}", "no", PROBLEM, why)


def _ipc_checks(devices: int) -> list[Check]:
    found = []
    for device in range(devices):
        error = exchange_memory(f"cuda:{device}")
        verdict, why = (OK, "") if error is None else (PROBLEM, error)
        text = "no" if error else "exported, changed by another process, read back"
        found.append(Check(f"IPC, GPU {device}", text, verdict, why))
    return found


def exchange_memory(device: str) -> str | None:
    """Export memory to a second process, which changes it in place; why that failed, or None."""
    context = torch.multiprocessing.get_context("spawn")
    there, back = context.SimpleQueue(), context.SimpleQueue()
    mine = torch.arange(1024, dtype=torch.int32, device=device)
    if device == "cpu":
        mine.share_memory_()
    other = context.Process(target=_negate, args=(there, back), daemon=True)
    try:
        other.start()
        there.put(mine)
        other.join(_EXCHANGE_S)
    except Exception as error:  # whatever the driver or the allocator says is the finding
        return f"export: {type(error).__name__}: {str(error).splitlines()[0]}"
    finally:
        if other.pid is not None and other.is_alive():
            other.kill()
    if other.exitcode != 0 or back.empty():
        return f"the other process ended with {other.exitcode}"
    said = back.get()
    if said is None and not torch.equal(mine.cpu(), -torch.arange(1024, dtype=torch.int32)):
        return "the other process changed a copy"
    return said


def _negate(there, back) -> None:
    """The second process: import, change in place, say what went wrong."""
    try:
        theirs = there.get()
        theirs.neg_()
        if theirs.is_cuda:
            torch.cuda.synchronize(theirs.device)
        del theirs
    except Exception as error:
        back.put(f"import: {type(error).__name__}: {str(error).splitlines()[0]}")
    else:
        back.put(None)


def verdicts() -> list[Verdict]:
    """Each layout that can exist, by number of ranks."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    room, gpus = max(1, memory // _RANK_BYTES), _num_devices()
    return [
        Verdict(
            layout.name,
            layout.num_ranks,
            "yes" if layout.num_ranks <= room else f"no: memory for {room} ranks",
            _on_gpus(layout.num_ranks, gpus),
        )
        for layout in known_layouts()
    ]


def _on_gpus(ranks: int, gpus: int) -> str:
    if not gpus:
        hidden = "no CUDA device that torch can use" if fingerprint()["gpus"] else "no CUDA device"
        return f"no: {hidden}"
    shared = -(-ranks // gpus)
    notes = [f"{shared} ranks share a GPU"] * (shared > 1)
    notes += ["back end eager only"] * (_capability_check().verdict != OK)
    return ": ".join(["yes", *([", ".join(notes)] if notes else [])])


def known_layouts() -> list[Layout]:
    """All degrees, with and without SP, on nodes of 2, 4 or 8 ranks where there are several."""
    found = []
    for cp in CP_DEGREES:
        for tp in TP_DEGREES:
            for sp in (False, True) if tp > 1 else (False,):
                found.append(Layout(tp, cp, sp))
                for local in (2, 4, 8):
                    try:
                        layout = Layout(tp, cp, sp, local)
                    except LayoutError:
                        continue
                    if layout.num_nodes > 1:
                        found.append(layout)
    return sorted(found, key=lambda layout: layout.num_ranks)
