"""Digests of earlier runs are kept, and a run that contradicts one is caught."""

import json
import shutil

import pytest

from h3lib import ledger
from h3lib.contract import ReportError
from h3lib.readme import every_layout_report

CPU = ledger.ROOT / "reports" / "cpu"


@pytest.fixture
def report():
    return json.loads((CPU / "tp4.json").read_text())


@pytest.fixture
def own_ledger(tmp_path, monkeypatch):
    """A ledger of a copy of the committed reports."""
    shutil.copytree(CPU, tmp_path / "reports" / "cpu")
    monkeypatch.setattr(ledger, "ROOT", tmp_path)
    monkeypatch.setattr(ledger, "LEDGER", tmp_path / "reports" / "ledger.csv")
    return tmp_path / "reports" / "ledger.csv"


def test_the_committed_ledger_has_every_committed_report_and_no_contradiction():
    assert ledger.main(["--check"]) == 0
    assert len(ledger.read_ledger(ledger.LEDGER)) >= 73 * len(list(every_layout_report(CPU)))


def test_an_entry_is_missed_then_added_once(own_ledger):
    assert ledger.main(["--check"]) == 1
    assert ledger.main([]) == 0
    text = own_ledger.read_text()
    assert ledger.main(["--check"]) == 0
    assert ledger.main([]) == 0 and own_ledger.read_text() == text


def test_a_replaced_report_stays_in_the_ledger(own_ledger, report):
    ledger.main([])
    report["environment"]["date"] = "2027-01-01T00:00:00+00:00"
    path = own_ledger.parent / "cpu" / "tp4.json"
    path.write_text(json.dumps(report))
    before = len(ledger.read_ledger(own_ledger))
    assert ledger.main(["--check"]) == 1
    assert ledger.main([]) == 0
    assert len(ledger.read_ledger(own_ledger)) == before + len(report["tensors"])


@pytest.mark.parametrize("field", ["layout", "date", "commit"])
def test_a_digest_of_another_run_of_the_same_question_must_agree(own_ledger, report, field, capsys):
    ledger.main([])
    text = own_ledger.read_text()
    where = report if field == "layout" else report["environment"]
    where["git_commit" if field == "commit" else field] = "tp2" if field == "layout" else "1" * 40
    if field == "layout":
        report["num_ranks"] = report["local_size"] = 2
    report["tensors"][5]["sha256"] = "0" * 64
    (own_ledger.parent / "cpu" / "again.json").write_text(json.dumps(report))
    found = ledger.contradictions(
        [*ledger.read_ledger(own_ledger), *ledger.entries(report)]
    )
    assert [(after["tensor"], after["sha256"]) for _, after in found] == [
        (report["tensors"][5]["name"], "0" * ledger.DIGITS)
    ]
    if field != "layout":  # a report of tp4 under the name of tp2 is refused before
        assert ledger.main([]) == 1 and ledger.main(["--check"]) == 1
        assert report["tensors"][5]["name"] in capsys.readouterr().out
        assert own_ledger.read_text() == text


@pytest.mark.parametrize("key", ["torch", "triton", "device_name", "cpu_capability"])
def test_other_software_or_hardware_may_answer_otherwise(report, key):
    other = json.loads(json.dumps(report))
    other["environment"][key] = "another"
    other["tensors"][5]["sha256"] = "0" * 64
    assert not ledger.contradictions([*ledger.entries(report), *ledger.entries(other)])


def test_a_run_that_differs_adds_nothing(report):
    report["equal"] = False
    assert ledger.entries(report) == []


@pytest.mark.parametrize("damage", ["header", "short", "digest"])
def test_a_damaged_ledger_is_refused(own_ledger, damage):
    ledger.main([])
    lines = own_ledger.read_text().splitlines()
    if damage == "header":
        lines[0] = lines[0].replace("layout", "lay-out")
    elif damage == "short":
        lines[3] = lines[3].rsplit(",", 2)[0]
    else:
        lines[3] = lines[3][:-1]
    own_ledger.write_text("\n".join(lines) + "\n")
    with pytest.raises(ReportError, match="ledger.csv"):
        ledger.main(["--check"])
