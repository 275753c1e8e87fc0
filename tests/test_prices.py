"""A price a layout: the newest line, against the faster of theirs, from files that are whole."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from h3lib.contract import PUBLISHED, ReportError
from h3lib.prices import (
    NOT_TIMED,
    PASS,
    ROWS,
    price_figure,
    price_line,
    price_text,
    prices,
    timed_lines,
    timing_files,
)


def _line(layout="tp2", ours=50.0, theirs=40.0, against="diffusers eager, NCCL", **changes):
    return {
        "layout": layout, "ranks": 2, "rows": ROWS, "op": PASS, "graph": False, "against": against,
        "ours_ms": ours, "theirs_ms": theirs, "price": ours / theirs, "exposed_ms": 3.0,
        "hidden_ms": 1.0, "status": "run", **changes,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    def write(name, *lines, date="2026-12-01", **changes):
        content = {"environment": {"date": date}, "contract": PUBLISHED.id, "complete": True}
        content |= {"measurements": lines} | changes
        (tmp_path / name).write_text(json.dumps(content))
        return tmp_path

    return write


def test_the_faster_of_theirs_and_the_newest_run_make_the_price(folder):
    compiled = "diffusers torch.compile, NCCL"
    folder("layouts.json", _line(theirs=44.0), _line(theirs=40.0, against=compiled),
           _line(rows=264, theirs=1.0), _line(op="forward", theirs=1.0))  # fmt: skip
    place = folder("layouts-older.json", _line(ours=99.0, theirs=44.0), date="2026-11-30")
    (found,) = prices(timed_lines(timing_files(place)))
    assert (found["ours_ms"], found["theirs_ms"], found["against"]) == (50.0, 40.0, compiled)
    assert price_line(found)["price"] == "1.25"
    assert price_line(found)["against"] == "torch.compile"


def test_layouts_come_by_ranks_and_what_was_not_run_has_no_price(folder):
    not_run = {"layout": "tp8", "ranks": 8, "rows": ROWS, "status": "not run: ranks share a GPU"}
    lines = (_line("cp2"), _line("tp4"), not_run, _line("tp2"), _line("tp1"))
    found = prices(timed_lines(timing_files(folder("layouts.json", *lines))))
    assert [line["layout"] for line in found] == ["tp1", "tp2", "cp2", "tp4"]


@pytest.mark.parametrize("changes", [{"complete": False}, {"contract": "h3-parallel-v0"}])
def test_a_file_that_is_cut_short_or_of_another_contract_is_refused(folder, changes):
    place = folder("layouts.json", _line(), **changes)
    with pytest.raises(ReportError, match="layouts.json"):
        timing_files(place)


def test_the_figure_is_xml_and_names_every_price():
    root = ElementTree.fromstring(price_figure([_line(), _line("cp2", ours=30.0)]))
    words = "".join(root.itertext())
    assert "tp2" in words and "1.25" in words and "cp2" in words and "0.75" in words


def test_a_file_of_memory_alone_has_no_lines(folder):
    place = folder("layouts-memory.json", memory=[{"layout": "tp1"}])
    path = place / "layouts-memory.json"
    content = json.loads(path.read_text())
    del content["measurements"]
    path.write_text(json.dumps(content))
    (found,) = timing_files(place)
    assert found["measurements"] == [] and len(found["memory"]) == 1


def test_without_prices_the_readme_says_so():
    assert price_text([], "the table", "prices.svg") == f"{NOT_TIMED}\n"
    text = price_text([_line()], "the table", "prices.svg")
    assert "the table" in text and "](prices.svg)" in text and NOT_TIMED not in text
