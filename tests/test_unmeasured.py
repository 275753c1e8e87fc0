"""Sentences about what was not measured follow the files."""

import json

from h3lib import book, unmeasured
from h3lib.contract import PUBLISHED
from h3lib.prices import NOT_TIMED, PASS, ROWS


def test_a_file_takes_its_sentence_away(tmp_path):
    before = unmeasured.unmeasured(tmp_path)
    assert before[0].startswith("No GPUs") and NOT_TIMED in before
    line = {
        "layout": "tp4", "ranks": 4, "rows": ROWS, "op": PASS, "graph": False, "status": "run",
        "against": "diffusers eager, NCCL", "ours_ms": 2.0, "theirs_ms": 1.0,
    }  # fmt: skip
    content = {"environment": {"gpu": "a GPU", "commit": "c" * 40, "date": "2026-12-01T00:00"},
               "contract": PUBLISHED.id, "complete": True, "measurements": [line]}  # fmt: skip
    (tmp_path / "layouts.json").write_text(json.dumps(content))
    for name in ("overlap.json", "interference.json", "transformer-tp2.json"):
        (tmp_path / name).write_text("{}")
    after = unmeasured.unmeasured(tmp_path)
    assert after[0].startswith("4 GPUs") and len(after) == len(before) - 4
    (timed,) = unmeasured.timed_files(tmp_path)
    assert (timed["file"], timed["commit"]) == ("layouts.json", "c" * 10)


def test_a_notebook_waits_for_its_report(tmp_path, monkeypatch):
    page = book.NOTEBOOKS / "30_interference.ipynb"
    monkeypatch.setattr(book, "ROOT", tmp_path)
    monkeypatch.setattr(book, "NEW_REPORTS", tmp_path / "build")
    assert book.lacking(page) == ["reports/h200x2/interference.json"]
    assert page not in [run.notebook for run in book.plan()]
    (tmp_path / "reports" / "h200x2").mkdir(parents=True)
    (tmp_path / "reports" / "h200x2" / "interference.json").write_text("{}")
    assert not book.lacking(page)
    assert page in [run.notebook for run in book.plan()]
