"""A report that was tampered with is refused: every field that carries the verdict is checked."""

import copy
import json
from pathlib import Path

import pytest

from h3lib.contract import ReportError
from h3lib.report import check_report, read_report, write_report

EVIDENCE = Path(__file__).parents[1] / "reports" / "cpu" / "tp4-cp2-sp.json"


@pytest.fixture
def report():
    return read_report(EVIDENCE)


def _drop(kind, name):
    def change(report):
        report["tensors"] = [t for t in report["tensors"] if (t["kind"], t["name"]) != (kind, name)]

    return change


def _set(*path, to):
    def change(report):
        at = report
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = to

    return change


def _gut(report):
    kinds = {t["kind"]: t for t in report["tensors"]}
    report["tensors"] = list(kinds.values())


def _no_control(report):
    report["control"].update(applicable=False, total=0, different=0, axes=[])


TAMPERED = {
    "a root dropped": _drop("root", "attn.out"),
    "one value of each kind": _gut,
    "a value twice": lambda report: report["tensors"].append(report["tensors"][0]),
    "no control": _no_control,
    "one axis of the control": lambda report: report["control"]["axes"].pop(),
    "a control that does not differ": _set("control", "axes", 0, "different", to=0),
    "a control's sum": _set("control", "different", to=10**12),
    "an unknown layout": _set("layout", to="banana"),
    "another layout": _set("layout", to="tp8-cp8-sp"),
    "fewer ranks": _set("num_ranks", to=1),
    "other rows": _set("rows", to=7),
    "an unknown size": _set("size", to="huge"),
    "another contract": _set("contract", to="foo"),
    "an empty value": _set("tensors", 0, "shape", to=[0]),
    "a value not covered": _set("tensors", 0, "covered", to=False),
    "a hidden difference": _set("tensors", 0, "different", to=3),
    "another verdict": _set("equal", to=False),
    "not complete": _set("complete", to=False),
    "an unknown field": _set("note", to="x"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_report_is_refused(report, name):
    changed = copy.deepcopy(report)
    TAMPERED[name](changed)
    with pytest.raises(ReportError):
        check_report(changed)


def test_nothing_is_written_where_a_report_is_not_whole(report, tmp_path):
    path = tmp_path / "report.json"
    with pytest.raises(ReportError):
        write_report({**report, "complete": False}, path)
    assert list(tmp_path.iterdir()) == []
    write_report(report, path)
    assert read_report(path) == report and list(tmp_path.iterdir()) == [path]


def test_complete_must_come_last(report, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"complete": True, **report}))
    with pytest.raises(ReportError, match="last key"):
        read_report(path)


@pytest.mark.parametrize("change", ({}, {"different": 1}, {"total": -1}, {"values": -1}))
def test_what_ran_without_a_trace_is_part_of_the_verdict(report, change):
    shown = [t["total"] for t in report["tensors"] if t["kind"] in ("output", "gradient")]
    untraced = {"values": len(shown), "total": sum(shown), "different": 0}
    report["untraced"] = {key: n + change.get(key, 0) for key, n in untraced.items()}
    if not change:
        return check_report(report)
    with pytest.raises(ReportError):
        check_report(report)


MODEL = EVIDENCE.parent / "model"
TAMPERED_MODEL = {
    "fewer blocks": ("run-tp4-cp2-sp", _set("blocks", to=1)),
    "a block too many": ("run-tp4-cp2-sp", _set("blocks", to=3)),
    "a value of the second block dropped": (
        "run-tp4-cp2-sp",
        _drop("gradient", "transformer_blocks.1.attn.to_q.weight"),
    ),
    "another weight": ("run-tp4-cp2-sp", _set("weight_digests", "proj_in.bias", to="0" * 64)),
    "a weight dropped": ("run-tp4-cp2-sp", lambda r: r["weight_digests"].pop("proj_in.bias")),
    "more stages": ("run-tp2-cp2-sp-pp2", _set("layout", to="tp2-cp2-sp-pp4")),
    "more stages than blocks": ("run-tp2-cp2-sp-pp2", _set("layout", to="tp1-pp8")),
    "fewer steps": ("generate-tp4-cp2-sp", _set("points", to=4)),
    "a step that differs": ("generate-tp4-cp2-sp", _set("first_different_step", to=2)),
    "a generation called a pass": ("generate-tp4-cp2-sp", lambda r: r.pop("points")),
}


@pytest.mark.parametrize("name, change", TAMPERED_MODEL.values(), ids=TAMPERED_MODEL)
def test_a_tampered_report_of_the_model_is_refused(name, change):
    report = read_report(MODEL / f"{name}.json")
    change(report)
    with pytest.raises(ReportError):
        check_report(report)
