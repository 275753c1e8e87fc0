"""The report: one JSON a run, its schema, its provenance, and what makes it valid.

A report is evidence only if it is whole: `complete: true` is its last key, every value is covered
by the ranks, and the control, where it is applicable, differs. Host names appear as node-a, node-b.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import jsonschema
import numpy
import torch

from h3lib import provenance
from h3lib.contract import PUBLISHED, H3Error, ReportError, model_size
from h3lib.files import write_json
from h3lib.layout import Layout, Ownership
from h3lib.model.generation import REPLAY, first_different_step, make_program
from h3lib.model.packing import Job, pack
from h3lib.model.program import Program
from h3lib.model.trace import GRADIENT, KINDS, OUTPUT
from h3lib.model.weights import SyntheticWeights, parameters
from h3lib.ops.backend import BACKENDS
from h3lib.parallel.control import control_axes

SCHEMA_VERSION = 1
_COUNT = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string", "minLength": 1}
_SHA256 = {"type": "string", "pattern": "^[0-9a-f]{64}$"}


def _object(required: dict, optional: dict | None = None) -> dict:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


_FIRST = _object(
    {
        "rank": _COUNT,
        "coordinate": {"type": "array", "items": _COUNT},
        "value": _TEXT,
        "canonical": _TEXT,
    }
)
_TENSOR = _object(
    {
        "name": _TEXT,
        "kind": {"enum": list(KINDS)},
        "shape": {"type": "array", "items": _COUNT},
        "dtype": {"enum": ["bfloat16", "float32", "float64"]},
        "total": _COUNT,
        "different": _COUNT,
        "covered": {"type": "boolean"},
        "first": {"anyOf": [{"type": "null"}, _FIRST]},
        "sha256": _SHA256,
    }
)
_AXIS = _object(
    {"axis": {"enum": ["tp", "cp"]}, "tensor": _TEXT, "total": _COUNT, "different": _COUNT}
)
_CONTROL = _object(
    {
        "kind": _TEXT,
        "applicable": {"type": "boolean"},
        "total": _COUNT,
        "different": _COUNT,
        "axes": {"type": "array", "items": _AXIS},
    }
)
_ENVIRONMENT = _object(
    {
        **{key: _TEXT for key in ("device_name", "python", "torch", "numpy", "machine", "date")},
        **{key: {"type": ["string", "null"]} for key in ("git_commit", "driver", "triton")},
        "git_dirty": {"type": ["boolean", "null"]},
    },
    {"cpu_capability": _TEXT},  # where a CPU computed; older reports lack it
)
PHASES = ("start", "canonical", "forward", "backward", "compare", "control", "total")
_SECONDS = {"type": "number", "minimum": 0}
REPORT_SCHEMA = _object(
    {
        "schema": {"const": SCHEMA_VERSION},
        "contract": _TEXT,
        "layout": _TEXT,
        "num_ranks": {"type": "integer", "minimum": 1},
        "local_size": {"type": "integer", "minimum": 1},
        "ranks_per_gpu": {"type": ["integer", "null"], "minimum": 1},
        "size": _TEXT,
        "rows": {"type": "integer", "minimum": 1},
        "job": {"type": "object"},
        "weights": _TEXT,
        "seed": _COUNT,
        "device": {"enum": ["cpu", "cuda"]},
        "backend": {"enum": list(BACKENDS)},
        "environment": _ENVIRONMENT,
        "digests": _object({"weights": _SHA256, "inputs": _SHA256}),
        "tensors": {"type": "array", "items": _TENSOR, "minItems": 1},
        "equal": {"type": "boolean"},
        "control": _CONTROL,
        "timings_s": _object(dict.fromkeys(PHASES, _SECONDS), {REPLAY: _SECONDS}),
        "complete": {"const": True},
    },
    {
        "transports": {"type": "array", "items": {"enum": ["gloo", "nccl", "peer"]}},
        "nodes": {"type": "array", "items": _COUNT},  # by rank, as the launcher counts them
        "canonical_reused": {"type": "boolean"},
        "blocks": {"type": "integer", "minimum": 1},
        "recompute": {"type": "boolean"},
        "chunk_rows": {"type": ["integer", "null"], "minimum": 1},  # null: as suits the transport
        "weight_digests": {"type": "object", "additionalProperties": _SHA256},
        "untraced": _object({"values": _COUNT, "total": _COUNT, "different": _COUNT}),
        "points": {"type": "integer", "minimum": 2},
        "first_different_step": {"type": ["integer", "null"]},
    },
)


def check_report(report: object) -> None:
    """**Raises:** ReportError for the first of schema, place, values, verdict, control."""
    errors = sorted(jsonschema.Draft202012Validator(REPORT_SCHEMA).iter_errors(report), key=str)
    if errors:
        error = jsonschema.exceptions.best_match(errors)
        where = "/".join(map(str, error.absolute_path)) or "report"
        raise ReportError(f"report field {where}", error.message, "the schema of h3lib.report")
    owner = _check_place(report)
    program = program_of(report)
    tensors = {(tensor["kind"], tensor["name"]): tensor for tensor in report["tensors"]}
    _check_values(report, tensors, program)
    _check_weights(report, program)
    for tensor in tensors.values():
        once = _elements(tensor["shape"])
        if not tensor["covered"] or not once <= tensor["total"] <= once * report["num_ranks"]:
            accepted = f"every element, {once} to {once * report['num_ranks']}"
            raise ReportError(f"coverage of {tensor['name']}", tensor["total"], accepted)
        if tensor["different"] > tensor["total"]:
            raise ReportError(f"count of {tensor['name']}", tensor["different"], tensor["total"])
        if (tensor["different"] > 0) != (tensor["first"] is not None):
            raise ReportError(
                f"first difference of {tensor['name']}", tensor["first"], tensor["different"]
            )
    different = sum(tensor["different"] for tensor in tensors.values())
    if report["equal"] == bool(different + _check_untraced(report, tensors)):
        raise ReportError("verdict `equal`", report["equal"], "what the tensors say")
    if "points" in report:
        first, told = first_different_step(report["tensors"]), report.get("first_different_step")
        if first != told:
            raise ReportError("first step that differs", told, f"{first} as the tensors say")
    _check_control(report["control"], control_axes(owner, program.control_keys()), tensors)


def _check_place(report: dict) -> Ownership:
    """Contract, layout, ranks, size and device are known and agree."""
    on_gpu = report["device"] == "cuda"
    if on_gpu != (report["environment"]["driver"] is not None):
        received = (report["device"], report["environment"]["driver"])
        raise ReportError("device and driver", received, "a driver on cuda, none on cpu")
    if on_gpu != (report["ranks_per_gpu"] is not None):
        received = (report["device"], report["ranks_per_gpu"])
        raise ReportError("device and ranks a GPU", received, "a count on cuda, none on cpu")
    if report["contract"] != PUBLISHED.id:
        raise ReportError("contract", report["contract"], PUBLISHED.id)
    try:
        layout = Layout.parse(report["layout"])
        model_size(report["size"])
        owner = Ownership.of(layout, report["rows"], PUBLISHED)
    except H3Error as error:
        raise ReportError("report", str(error), "a layout, size and rows that exist") from error
    ranks = (report["num_ranks"], report["local_size"])
    accepted = (layout.num_ranks, layout.local_size or layout.num_ranks)
    if ranks != accepted:
        raise ReportError(f"ranks and local size of {layout.name}", ranks, accepted)
    if len(report.get("nodes", range(layout.num_ranks))) != layout.num_ranks:
        raise ReportError(f"nodes of {layout.name}", report["nodes"], "one for each rank")
    return owner


def digest_of(parts: Iterable[str]) -> str:
    """SHA-256 over several texts, one a line."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def digest_of_weights(by_name: Mapping[str, str]) -> str:
    """SHA-256 over the digests of all weights, sorted by name."""
    return digest_of(sorted(f"{name} {sha256}" for name, sha256 in by_name.items()))


def _check_weights(report: dict, program: Program) -> None:
    """The digests of single weights, where they are given, are all there and make up the whole."""
    by_name = report.get("weight_digests")
    if by_name is None:
        return
    expected = parameters(program.size).keys()
    if by_name.keys() != expected:
        wrong = sorted(by_name.keys() ^ expected)
        raise ReportError("digests of weights", wrong, "each parameter of the model once")
    whole = digest_of_weights(by_name)
    if whole != report["digests"]["weights"]:
        raise ReportError("digest of all weights", report["digests"]["weights"], whole)


def program_of(report: dict) -> Program:
    """The program that a report says was run. **Raises:** ReportError if there is none such."""
    try:
        size, job = model_size(report["size"]), dict(report["job"])
        del job["name"]
        job |= {"keyframes": tuple(job["keyframes"]), "vision_rows": ()}
        packed = pack(Job(**job))
        blocks, points = report.get("blocks", 1), report.get("points")
        program = make_program(size, blocks, SyntheticWeights(size), packed, points=points)
        program.check_layout(Layout.parse(report["layout"]))
    except (H3Error, TypeError, KeyError) as error:
        raise ReportError("program of the report", str(error), "a job, blocks and size") from error
    if packed.num_rows != report["rows"]:
        raise ReportError("rows", report["rows"], f"{packed.num_rows} as the job has")
    return program


def _check_values(report: dict, tensors: dict, program: Program) -> None:
    """Exactly the values that the program shows, each once and in its shape."""
    expected = program.values()
    shapes = {key: tuple(tensor["shape"]) for key, tensor in tensors.items()}
    if len(tensors) != len(report["tensors"]) or shapes != expected:
        wrong = sorted(key for key in shapes | expected if shapes.get(key) != expected.get(key))
        raise ReportError("compared values", wrong or "one twice", "each value of the run once")


def _check_untraced(report: dict, tensors: dict) -> int:
    """How many elements differed without a trace: of every output and gradient, as often as with
    one; a generation has no trace."""
    untraced = report.get("untraced")
    if untraced is None:
        return 0
    kinds = () if "points" in report else (OUTPUT, GRADIENT)
    shown = [tensor["total"] for tensor in tensors.values() if tensor["kind"] in kinds]
    expected = len(shown), sum(shown)
    if (untraced["values"], untraced["total"]) != expected:
        raise ReportError("values without a trace", untraced, expected)
    return untraced["different"]


def _check_control(control: dict, expected: dict, tensors: dict) -> None:
    """The axes that the layout and the rows imply, each different, with sums that agree."""
    axes = {axis["axis"]: axis for axis in control["axes"]}
    if list(axes) != list(expected) or control["applicable"] != bool(axes):
        raise ReportError("axes of the control", list(axes), list(expected))
    for name, axis in axes.items():
        total = tensors[expected[name]]["total"]
        if (axis["tensor"], axis["total"]) != (expected[name][1], total):
            received = (axis["tensor"], axis["total"])
            raise ReportError(f"control of the {name} axis", received, (expected[name][1], total))
        if not 0 < axis["different"] <= total:
            raise ReportError(f"control of the {name} axis", axis["different"], "some that differ")
    for count in ("total", "different"):
        if control[count] != sum(axis[count] for axis in control["axes"]):
            raise ReportError(f"{count} of the control", control[count], "the sum over its axes")


def _elements(shape: list[int]) -> int:
    return int(numpy.prod(shape, dtype=numpy.int64))


def read_report(path: Path | str) -> dict:
    """A checked report. **Raises:** ReportError if it cannot be read or is not whole."""
    try:
        report = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ReportError(f"report {path}", str(error), "a complete JSON report") from error
    check_report(report)
    if list(report)[-1] != "complete":
        raise ReportError(f"last key of {path}", list(report)[-1], "complete")
    return report


def write_report(report: dict, path: Path | str) -> None:
    """Check, then `write_json`. **Raises:** ReportError for one that is not whole."""
    check_report(report)
    write_json(path, report)


def environment(device: str, machine: str) -> dict:
    """Where a run happened: commit, device, driver, versions, date; the machine by a letter; on a
    CPU also the vector instructions that torch uses."""
    capability = {"cpu_capability": torch.backends.cpu.get_cpu_capability()}
    return {
        "git_commit": provenance.git_commit(),
        "device_name": provenance.device_name(device),
        "driver": provenance.driver_version() if device == "cuda" else None,
        **provenance.setting("torch", "triton", "numpy"),
        "machine": machine,
        **(capability if device == "cpu" else {}),
    }


def fingerprint(where: dict) -> dict:
    """What must be the same on every rank for the same bits, from its `environment`."""
    same = ("git_commit", "device_name", "driver", "python", "torch", "triton", "numpy")
    return {key: where[key] for key in same} | {
        "cpu_capability": torch.backends.cpu.get_cpu_capability()
    }


def machine_names(hosts: list[str]) -> list[str]:
    """node-a, node-b, ... for host names, in the order in which they first appear."""
    order = list(dict.fromkeys(hosts))
    return [f"node-{chr(ord('a') + i) if i < 26 else i}" for i in map(order.index, hosts)]
