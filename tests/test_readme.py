"""The README's numbers come from report files."""

import json

import pytest

from h3lib import readme
from h3lib.contract import ReportError


def test_the_readme_says_what_the_reports_say():
    assert readme.main(["--check"]) == 0


def test_reports_are_told_from_other_files_and_refused_when_cut_short(tmp_path):
    assert readme.layout_reports(tmp_path) == []
    (tmp_path / "bench.json").write_text(json.dumps({"bench": "gemm"}))
    assert readme.layout_reports(tmp_path) == []
    (tmp_path / "cut.json").write_text(json.dumps({"layout": "tp2", "tensors": []}))
    with pytest.raises(ReportError, match="cut.json|report field"):
        readme.layout_reports(tmp_path)
    (tmp_path / "cut.json").write_text('{"layout": "tp2"')
    with pytest.raises(ReportError, match="cut.json"):
        readme.layout_reports(tmp_path)


def test_a_later_folder_takes_the_place_of_the_same_run():
    evidence = readme.ROOT / "reports" / "cpu"
    reports = readme.layout_reports(evidence)
    assert readme.layout_reports(evidence, evidence) == reports
    assert [report["num_ranks"] for report in reports] == [1, 2, 4, 8, 8, 8, 8]


def test_a_table_is_written_between_the_markers():
    table = readme.markdown_table([{"a": "1", "b": "2"}])
    assert table == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
    text = f"before\n{readme.START}\nold\n{readme.END}\nafter\n"
    new = readme.with_results(text, table)
    assert new == f"before\n{readme.START}\n{table}{readme.END}\nafter\n"
    assert readme.with_results(new, table) == new


def test_reports_of_the_model_are_apart():
    evidence = readme.ROOT / "reports" / "cpu"
    lines = [readme.model_line(report) for report in readme.model_reports(evidence)]
    assert {line["blocks"] for line in lines} == {"2"}
    whats = [line["what"] for line in lines]
    assert whats[-1] == "generation, 4 steps, and its replay" and "forward and backward" in whats
    assert not any(readme.is_of_model(report) for report in readme.layout_reports(evidence))
