"""A sweep: what is run, what is kept, and what becomes of a cell that does not finish."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from h3lib import grid, sweep
from h3lib.execute import FAULTS, NotebookError, _fault, parse_parameters, run_notebook
from h3lib.grid import GridError, read_grid
from h3lib.parallel.launch import descendants
from h3lib.report import read_report, write_report
from h3lib.sweep import is_finished

EVIDENCE = sweep.ROOT / "reports" / "cpu" / "tp1.json"
PARAMETERS = """layout: str = "tp1"
rows: int = 264
seed: int = 0
device: str = "cpu"
fault: str = "none"
source: str = ""
out: str = \"\""""
FAULT = """import os, shutil, signal, sys, time
shutil.copyfile(source, out)  # a whole report is there before anything goes wrong
if fault == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if fault == "late":
    time.sleep(600)
if fault == "left":
    sys.exit(0)
if fault == "memory":
    bytearray(1 << 60)
if fault == "disk":
    open("/dev/full", "w").write("x" * 100_000)
if fault == "silent":
    os.unlink(out)
if fault == "loud":
    print("x" * 1_000_000)
assert fault != "unequal", "elements differ" """


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Cells and reports of these tests stay out of the book."""
    monkeypatch.setattr(grid, "SWEEPS", tmp_path / "sweeps")
    monkeypatch.setattr(sweep, "NEW_REPORTS", tmp_path / "reports")
    monkeypatch.setattr(grid, "fingerprint_digest", lambda: "of this test")
    return tmp_path


def _notebook(path, parameters=PARAMETERS, source=FAULT):
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [
        nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}),
        *map(nbformat.v4.new_code_cell, (source, "print('the end')")),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    return path


def _grid(folder, faults, source=EVIDENCE, name="grid.yaml", timeout_s=60):
    _notebook(folder / "faults.ipynb")
    text = f"notebook: faults.ipynb\ngrid:\n  fault: [{', '.join(faults)}]\n"
    text += f"fixed: {{source: '{source}'}}\ntimeout_s: {timeout_s}\n"
    (folder / name).write_text(text)
    return folder / name


def _published(folder):
    return sorted(path.name for path in (folder / "reports").rglob("*"))


def test_each_fault_is_named_keeps_its_notebook_and_gives_the_book_nothing(folder, capsys):
    """The whole, equal report that every one of these cells leaves does not count."""
    named = {
        "killed": "kernel killed", "late": "timeout", "left": "left early",
        "memory": "out of memory", "disk": "disk full", "silent": "no report",
    }  # fmt: skip
    path = _grid(folder, ["none", *named], timeout_s=5)
    assert sweep.sweep(path) == 3
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and lines[0].startswith("equal ")
    for line, (fault, name) in zip(lines[1:], named.items(), strict=True):
        assert line.startswith("failed ") and f"fault={fault} " in line and f"  {name}: " in line
        assert name in FAULTS
    good, *failed = read_grid(path)
    assert all(nbformat.read(cell.executed, as_version=4).cells for cell in failed)
    assert not any(map(is_finished, failed)) and is_finished(good)
    assert _published(folder) == [f"{good.key}.json", "sweeps"]


def test_finished_is_told_by_content_not_by_name(folder, monkeypatch, capsys):
    path = _grid(folder, ["none"])
    assert sweep.sweep(path) == 0
    (cell,) = read_grid(path)
    renamed = _grid(folder, ["none"], name="another name.yaml", timeout_s=61)
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "run_notebook", lambda *a: pytest.fail("run again"))
        sweep._published(cell).unlink()
        assert sweep.sweep(renamed) == 0
    assert "  kept  " in capsys.readouterr().out
    assert _published(folder) == [f"{cell.key}.json", "sweeps"], "published again from what is kept"
    whole = {path: path.read_bytes() for path in (cell.report, cell.executed)}
    for path, content in whole.items():
        path.write_bytes(content + b" ")
        assert not is_finished(cell), f"{path.name} is another"
        path.write_bytes(content)
    assert is_finished(cell)
    monkeypatch.setattr(grid, "fingerprint_digest", lambda: "of another machine")
    (moved,) = read_grid(renamed)
    assert moved.key != cell.key and not is_finished(moved)
    _notebook(folder / "faults.ipynb", source=FAULT + "\n# changed")
    assert read_grid(renamed)[0].key != moved.key


def test_a_different_result_is_told_from_a_failure(folder, capsys):
    report = read_report(EVIDENCE)
    tensor = report["tensors"][0]
    first = {"rank": 0, "coordinate": [0, 0], "value": "1.0", "canonical": "2.0"}
    tensor.update(different=1, first=first)
    report["equal"] = False
    write_report(report, folder / "different.json")
    path = _grid(folder, ["unequal"], folder / "different.json")
    assert sweep.sweep(path) == 1
    assert capsys.readouterr().out.startswith("different ")
    assert not _published(folder) and sweep.read_grid(path)[0].executed.exists()


def test_a_report_of_another_run_is_not_the_cells(folder, capsys):
    assert sweep.sweep(_grid(folder, ["none"], EVIDENCE.with_name("tp2.json"))) == 3
    assert "no report: layout of the report: received 'tp2'" in capsys.readouterr().out


def test_a_full_disk_under_the_cells(folder, monkeypatch, capsys):
    small = folder / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        monkeypatch.setattr(grid, "SWEEPS", small)
        assert sweep.sweep(_grid(folder, ["loud"])) == 3
        assert "  disk full: " in capsys.readouterr().out
        assert not _published(folder)
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.slow
def test_an_interrupt_ends_the_cells_and_leaves_nothing_running(folder):
    path = _grid(folder, ["late"], timeout_s=600)
    program = "import sys; from pathlib import Path; from h3lib import cli, grid, sweep; "
    program += "_, grid.SWEEPS, sweep.NEW_REPORTS, file = map(Path, sys.argv); "
    program += "cli.main(['sweep', str(file)])"
    places = [folder / "sweeps", folder / "reports", path]
    command = [sys.executable, "-c", program, *map(str, places)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while not list(folder.glob("sweeps/*/report.json")):  # the cell's first lines have run
        assert time.monotonic() < deadline
        time.sleep(0.2)
    children = descendants(started.pid)
    started.send_signal(signal.SIGINT)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == 130 and "interrupted" in errors, errors
    assert len(children) >= 2 and not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert not _published(folder) and list(folder.glob("sweeps/*/notebook.ipynb"))


def _limit():
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))


@pytest.mark.parametrize("rows", [2_000_000_000, pytest.param(60_000_000, marks=pytest.mark.slow)])
def test_a_run_without_memory(rows, tmp_path):
    """The real notebook in 6 GiB: the first is too large for `h3lib run`, the second for a rank."""
    (tmp_path / "grid.yaml").write_text(f"grid: {{layout: [tp1]}}\nfixed: {{rows: {rows}}}\n")
    program = "import sys; from pathlib import Path; from h3lib import grid, sweep; "
    program += "_, grid.SWEEPS, sweep.NEW_REPORTS, file = map(Path, sys.argv); "
    program += "sys.exit(sweep.sweep(file))"
    places = [tmp_path / name for name in ("sweeps", "reports", "grid.yaml")]
    command = [sys.executable, "-c", program, *map(str, places)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, preexec_fn=_limit)
    (failed,) = done.stdout.splitlines()
    assert failed.startswith("failed ") and "  out of memory: " in failed, failed
    assert done.returncode == 3 and not places[1].exists()


@pytest.mark.parametrize(
    "parameters, word",
    [("layout: [tp3]", "tp degree: received 3"), ("layout: [tp2], device: [tpu]", "'tpu'")],
)
@pytest.mark.slow
def test_what_the_notebook_refuses_is_unsupported(parameters, word, folder, capsys):
    (folder / "grid.yaml").write_text(f"grid: {{{parameters}}}")
    assert sweep.sweep(folder / "grid.yaml") == 2
    line = capsys.readouterr().out
    assert line.startswith("unsupported ") and "  refused: " in line and word in line


def test_a_killed_rank_is_named():
    evalue = "h3lib run: received 'status 3: h3lib: rank 1 was killed by signal 9, as Linux does"
    error = nbformat.v4.new_output("error", ename="RunFailed", evalue=evalue, traceback=[])
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", outputs=[error])])
    assert _fault(1, book, "") == "rank killed"
    for name, fault in (("RunFailed", "rank failed"), ("RunRefused", "refused")):
        book.cells[0].outputs[0].update(ename=name, evalue="h3lib run: received 'status ...'")
        assert _fault(1, book, "") == fault
    assert _fault(138, book, "") == "kernel killed"


TYPED = {
    "a": "0123456", "b": "12e4567", "c": "1_000", "d": "true", "e": "none", "f": "null", "g": "1",
    "h": "a folder/with spaces/it's \"one\"\\.json", "i": "", "j": "ünï ✓ {layout}", "k": "~",
    "l": "2026-11-30", "m": "- x: [1]", "n": "# x",
}  # fmt: skip


def test_texts_arrive_as_they_were_typed(tmp_path):
    declared = "".join(f'{name}: str = "?"\n' for name in TYPED)
    declared += "whole: int = 0\nshare: float = 0.5\nflag: bool = False\n"
    names = ", ".join(TYPED)
    source = f"import json; print(json.dumps([{names}, whole, share, flag, str(type(flag))]))"
    path = _notebook(tmp_path / "typed.ipynb", declared, source)
    values = parse_parameters(path, {**TYPED, "whole": "-7", "share": "1e-3", "flag": "true"})
    book = run_notebook(path, tmp_path / "out.ipynb", values, 60)
    printed = json.loads(book.cells[-2].outputs[0].text)
    assert printed == [*TYPED.values(), -7, 0.001, True, "<class 'bool'>"]


@pytest.mark.parametrize("text", ["0123456", "1_000", "12e4567", "true", "none", "1.0", " 1", "+1"])
def test_what_is_no_integer_is_refused(text, tmp_path):
    path = _notebook(tmp_path / "typed.ipynb", "whole: int = 0", "")
    values = parse_parameters(path, {"whole": text})
    assert values == {"whole": text}
    with pytest.raises(NotebookError, match="whole of typed.ipynb"):
        run_notebook(path, tmp_path / "out.ipynb", values, 60)


@pytest.mark.parametrize("text", ["12e4567", "nan", "inf", ".5", "0x1", "1_0.0", "true"])
def test_what_is_no_finite_number_stays_a_text(text, tmp_path):
    path = _notebook(tmp_path / "typed.ipynb", "share: float = 0.5\nflag: bool = False", "")
    assert parse_parameters(path, {"share": text}) == {"share": text}
    assert parse_parameters(path, {"flag": "True"}) == {"flag": "True"}


def test_a_grid_reads_values_as_parameters_not_as_yaml(folder):
    _notebook(folder / "faults.ipynb")
    text = "notebook: faults.ipynb\ngrid: {fault: [0123, 1_000, no, null, 1e3], rows: [7, 8]}\n"
    (folder / "grid.yaml").write_text(text)
    cells = read_grid(folder / "grid.yaml")
    assert [c.parameters["fault"] for c in cells[::2]] == ["0123", "1_000", "no", "null", "1e3"]
    assert [c.parameters["rows"] for c in cells[:2]] == [7, 8]
    assert len({c.key for c in cells}) == 10


@pytest.mark.parametrize(
    "text, word",
    [
        ("grid: {layuot: [tp1]}", "layuot"),
        ("grid: {layout: [tp1], rows: ['007']}", "'007'"),
        ("grid: {layout: [tp1, tp1]}", "different values"),
        ("grid: {layout: tp1}", "a list"),
        ("grid: {layout: []}", "a list"),
        ("grid: {}", "a list"),
        ("cells: {layout: [tp1]}", "cells"),
        ("grid: {layout: [tp1]}\nfixed: {layout: tp2}", "names not in grid"),
        ("grid: {layout: [tp1]}\nfixed: {out: x.json}", "each cell has its own"),
        ("grid: {layout: [tp1]}\ntimeout_s: soon", "soon"),
        ("grid: {layout: [tp1]}\nnotebook: nowhere.ipynb", "nowhere.ipynb"),
        ("grid: [", "a YAML file"),
        ("[]", "grid"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_before_anything_runs(text, word, folder, capsys):
    (folder / "grid.yaml").write_text(text)
    with pytest.raises((GridError, NotebookError), match=word.replace("[", r"\[")):
        read_grid(folder / "grid.yaml")
    assert sweep.sweep(folder / "grid.yaml") == 2
    assert word in capsys.readouterr().err and not (folder / "sweeps").exists()


def test_the_committed_grid_and_its_size(capsys):
    path = Path(sweep.ROOT) / "env" / "slurm" / "grid.yaml"
    cells = read_grid(path)
    assert sweep.sweep(path, count=True) == 0
    assert capsys.readouterr().out == f"{len(cells)}\n" and len(cells) == 12
    assert {cell.ranks for cell in cells} == {2, 8}
    assert sweep.sweep(path, only=12) == 2
