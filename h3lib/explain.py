"""`h3lib explain`: per op the kernel of each back end on this machine, the order, and the reason.

Nothing is chosen at run time: a run names its back end, and this prints what that name means here.
The order and the rounding are the op's own docstring, so they cannot part from the code.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator

import torch

import h3lib.ops
from h3lib.contract import BackendError
from h3lib.ops.backend import BACKENDS, Op, load_backend

_SECTION = r"\*\*{}:\*\*(.*?)(?=\*\*[A-Z]|\n\s*\n|\Z)"
_IN_FILE = re.compile(r"top of the file")
POINTWISE = "as written: no sum over rows, units or ranks"


def ops() -> dict[str, Op]:
    """Every op by name, in the order of the modules that define them."""
    found = {}
    for module in pkgutil.iter_modules(h3lib.ops.__path__):
        if not module.ispkg:
            members = vars(importlib.import_module(f"h3lib.ops.{module.name}"))
            found |= {
                name: value
                for name, value in members.items()
                if isinstance(value, Op) and value.__module__ == f"h3lib.ops.{module.name}"
            }
    return found


def reasons() -> dict[str, str]:
    """For each back end why it can, or cannot, run here; kernels that load are registered."""
    found = {}
    for backend in BACKENDS:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            load_backend(backend, "cuda" if backend != "eager" else device)
        except BackendError as error:
            found[backend] = f"not here: {error}"
            continue
        if backend == "eager":
            found[backend] = f"runs on {device}: the definition, in plain PyTorch"
        elif device == "cpu":
            found[backend] = "not here: no CUDA device (its kernels load)"
        else:
            found[backend] = _on_this_gpu()
    return found


def _on_this_gpu() -> str:
    from h3lib.ops.hopper.compat import CAPABILITY

    have, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    if have != CAPABILITY:
        return f"not here: {name} is sm_{have[0]}{have[1]}, the kernels are for sm_90"
    return f"runs on {name}: `--backend triton --device cuda`"


def section(op: Op, title: str) -> str | None:
    """A titled part of the op's docstring, on one line."""
    match = re.search(_SECTION.format(title), op.__doc__ or "", re.DOTALL)
    return " ".join(match[1].split()) if match else None


def order(op: Op) -> str:
    """In which order the op adds; the module's docstring where the op refers to it."""
    text = section(op, "Order")
    if text is None:
        return POINTWISE
    if _IN_FILE.search(text):
        module = importlib.import_module(op.__module__)
        return " ".join((module.__doc__ or "").split("\n", 1)[0].split())
    return text


def kernel(op: Op, backend: str) -> str:
    """Where the back end's implementation of the op is, or that it has none."""
    if backend not in op.implementations:
        return "none"
    function = op.implementations[backend]
    return f"{function.__module__.removeprefix('h3lib.ops.')}.{function.__name__}"


def explain(name: str | None = None) -> Iterator[str]:
    """The lines of `h3lib explain`. **Raises:** BackendError for an op that does not exist."""
    every, why = ops(), reasons()
    if name is not None and name not in every:
        raise BackendError("op", name, ", ".join(every))
    for backend, reason in why.items():
        yield f"back end {backend}: {reason}"
    for op_name, op in every.items() if name is None else [(name, every[name])]:
        yield ""
        yield f"{op_name}: {(op.__doc__ or '').strip().splitlines()[0]}"
        for backend in why:
            yield f"    {backend:<7} {kernel(op, backend)}"
        yield f"    order   {order(op)}"
        yield f"    rounds  {section(op, 'Rounds') or 'what the equation says'}"
