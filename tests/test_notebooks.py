"""The notebooks run on tiny values, and the driver lets nothing pass that did not finish."""

import json
import subprocess
import sys

import nbformat
import pytest
import reports_support
import yaml

from h3lib import book
from h3lib.book import NOTEBOOKS, NotebookError, Run, execute, parse_parameters
from h3lib.contract import LayoutError
from h3lib.execute import check_finished
from h3lib.notebook import ParameterError, check_parameters
from h3lib.readme import every_layout_report

ONE, TREE, ROWS, BLOCK, LAYOUT, RESULTS, KERNELS = sorted(NOTEBOOKS.glob("0[1-7]_*.ipynb"))


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Pages and work in progress of these tests stay out of the book."""
    monkeypatch.setattr(book, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(book, "WORK", tmp_path / "work")
    return tmp_path


def _pages(folder):
    return [path.name for path in (folder / "runs").glob("*")]


def _notebook(path, *sources):
    cells = [
        nbformat.v4.new_markdown_cell("# Title"),
        nbformat.v4.new_code_cell("rows: int = 1", metadata={"tags": ["parameters"]}),
        *map(nbformat.v4.new_code_cell, sources),
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    return path


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_valid_has_no_outputs_and_one_cell_of_parameters(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in code) == 1
    assert notebook.cells[0].source.startswith("# ")
    images = [cell for cell in code if "plt.show()" in cell.source]
    assert all(cell.metadata["mystnb"]["image"]["alt"] for cell in images)


def test_the_book_has_a_page_for_every_planned_run():
    toc = yaml.safe_load((book.ROOT / "book" / "_toc.yml").read_text())
    files = {chapter["file"] for part in toc["parts"] for chapter in part["chapters"]}
    pages = {name.removeprefix("runs/") for name in files if name.startswith("runs/")}
    committed = {path.stem for path in book.committed_pages()}
    assert pages == {run.name for run in book.plan()} | committed


@pytest.mark.parametrize("path", book.committed_pages(), ids=lambda path: path.stem)
def test_a_committed_page_finished_and_shows_a_committed_report(path, folders):
    page = nbformat.read(path, as_version=4)
    check_finished(path.stem, page)
    asked = page.metadata["papermill"]["parameters"]
    if not asked:  # of the machine alone
        assert path.stem.startswith("00_environment_") and "NVIDIA H200" in path.read_text()
        return
    reports = [
        report
        for report in every_layout_report(path.parents[1] / "layouts")
        if all(report[name] == value for name, value in asked.items())
    ]
    text = path.read_text()
    totals = [sum(tensor["total"] for tensor in report["tensors"]) for report in reports]
    assert any(f"all {total:,} elements equal" in text for total in totals)
    book.RUNS.mkdir()
    book.copy_pages()
    assert (book.RUNS / path.name).exists()


@pytest.mark.parametrize(
    "path, parameters",
    [
        (ONE, {"rows": 7}),
        (TREE, {"rows": 7, "seed": 3}),
        (ROWS, {"rows": 65}),
        (BLOCK, {"rows": 7}),
        (LAYOUT, {"layout": "tp2", "rows": 7}),
    ],
    ids=lambda value: getattr(value, "stem", None),
)
def test_a_notebook_runs_on_tiny_values(path, parameters, folders):
    page = execute(Run(path, "page", parameters, "My title"))
    notebook = nbformat.read(page, as_version=4)
    assert notebook.cells[0].source.startswith("# My title\n")
    injected = [c for c in notebook.cells if "injected-parameters" in c.metadata.get("tags", [])]
    assert len(injected) == 1 and "hide-input" in injected[0].metadata["tags"]
    streams = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    assert not [out for out in streams if out.get("name") == "stderr"]


def test_the_results_page_shows_the_reports_of_a_folder(folders):
    evidence = folders / "evidence"
    evidence.mkdir()
    command = [sys.executable, "-m", "h3lib.cli", "run", "--layout", "cp2", "--rows", "129"]
    out = str(evidence / "cp2.json")
    subprocess.run([*command, "--out", out], check=True, capture_output=True)
    page = execute(Run(RESULTS, "page", {"evidence": str(evidence)}))
    assert "1 of 1 reports equal" in page.read_text()


def test_the_kernels_page_shows_the_committed_files(folders):
    text = execute(Run(KERNELS, "page")).read_text()
    bits = json.loads((book.ROOT / "reports" / "h200" / "kernels-bits.json").read_text())
    num_findings = len(bits["findings"])
    assert f"{num_findings} of {num_findings} findings passed" in text
    assert '"name": "stderr"' not in text


def test_the_model_page_shows_the_committed_files(folders):
    text = execute(Run(NOTEBOOKS / "08_model.ipynb", "page")).read_text()
    assert "generation, 4 steps, and its replay" in text
    assert '"name": "stderr"' not in text


@pytest.mark.parametrize("name", ["23_node_cost", "25_ring_overlap", "32_when_a_rank_fails"])
def test_a_page_of_links_or_faults_shows_the_committed_files(name, folders):
    text = execute(Run(NOTEBOOKS / f"{name}.ipynb", "page")).read_text()
    assert "{admonition} Answer" in text
    assert '"name": "stderr"' not in text


@pytest.mark.parametrize(
    "name, parameter, words",
    [
        ("06_results", "timings", ["9 cases", "1.20", "tp8: not run: one reason"]),
        ("08_model", "timings", ["8,642 elements, every rank"]),
        ("23_node_cost", "timings", ["measured (tp1, tp2, cp2)"]),
        ("30_interference", "measured", ["1.50 times as long with the peer tree"]),
    ],
)
def test_a_page_shows_reports_of_several_gpus(name, parameter, words, folders):
    for stem in ("layouts", "overlap", "interference"):
        content = getattr(reports_support, stem)()
        (folders / f"{stem}.json").write_text(json.dumps(content))
    (folders / "transformer-tp2.json").write_text(json.dumps(reports_support.transformer()))
    value = folders / "interference.json" if parameter == "measured" else folders
    text = execute(Run(NOTEBOOKS / f"{name}.ipynb", "page", {parameter: str(value)})).read_text()
    assert all(word in text for word in words)
    assert "**Not measured:**" not in _outputs(text) and '"name": "stderr"' not in text


def test_pages_say_that_layouts_were_not_timed(folders):
    (folders / "nothing").mkdir()
    for name in ("06_results", "08_model"):
        parameters = {"timings": str(folders / "nothing")}
        text = execute(Run(NOTEBOOKS / f"{name}.ipynb", "page", parameters)).read_text()
        assert "**Not measured:**" in _outputs(text) and '"name": "stderr"' not in text


def _outputs(text):
    cells = json.loads(text)["cells"]
    return json.dumps([cell["outputs"] for cell in cells if cell["cell_type"] == "code"])


def test_the_kernels_page_refuses_a_file_of_a_run_that_did_not_end(folders):
    kernels = folders / "kernels"
    kernels.mkdir()
    for path in (book.ROOT / "reports" / "h200").glob("*.json"):
        content = json.loads(path.read_text())
        content["complete"] = path.stem != "kernels"
        (kernels / path.name).write_text(json.dumps(content))
    with pytest.raises(NotebookError, match="complete of kernels.json"):
        execute(Run(KERNELS, "page", {"kernels": str(kernels)}))
    assert not _pages(folders)


@pytest.mark.parametrize(
    "parameters, word",
    [
        ({"layuot": "tp4"}, "layuot"),
        ({"rows": "264"}, "rows"),
        ({"rows": True}, "rows"),
        ({"rows": 1.0}, "rows"),
        ({"layout": 4}, "layout"),
    ],
)
def test_parameters_are_refused_before_anything_runs(parameters, word, folders, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("something ran"))
    with pytest.raises(NotebookError, match=word):
        execute(Run(LAYOUT, "page", parameters))
    assert not _pages(folders)


def test_a_command_line_keeps_what_it_was_given():
    texts = {"layout": "4", "rows": "0123", "seed": "7", "report": "12e4567", "other": "1"}
    values = parse_parameters(LAYOUT, texts)
    assert values == {**texts, "seed": 7}, "0123 is no integer: it is refused, not changed"


@pytest.mark.parametrize(
    "name, value",
    [
        ("rows", 0),
        ("rows", True),
        ("rows", 1.0),
        ("seed", -1),
        ("layout", "tp3"),
        ("layout", 4),
        ("device", "tpu"),
        ("size", "huge"),
        ("report", "no/such/report.json"),
        ("evidence", "no/such/folder"),
        ("kernels", "no/such/folder"),
        ("kernels", ""),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_the_notebook(name, value):
    with pytest.raises(
        (ParameterError, LayoutError), match=name if value != "tp3" else "tp degree"
    ):
        check_parameters(**{name: value})


def test_a_value_that_cannot_be_stops_the_run(folders):
    with pytest.raises(NotebookError, match="tp degree"):
        execute(Run(LAYOUT, "page", {"layout": "tp3"}))
    assert not _pages(folders)


def test_a_misspelt_parameter_stops_a_notebook_that_papermill_runs_by_itself(folders):
    command = [sys.executable, "-m", "papermill", str(ONE), str(folders / "out.ipynb")]
    done = subprocess.run(
        [*command, "-p", "rwos", "7", "--no-progress-bar"], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "ParameterError" in done.stderr and "rwos" in done.stderr


@pytest.mark.parametrize(
    "source",
    [
        "raise ValueError('broken')",
        "import sys; sys.exit(0)",
        "import sys; sys.exit(3)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_a_run_that_did_not_finish_leaves_no_page(source, folders):
    path = _notebook(folders / "broken.ipynb", source, "print('the end')")
    folders.joinpath("runs").mkdir()
    folders.joinpath("runs", "page.ipynb").write_text("of an earlier run")
    with pytest.raises(NotebookError, match="page"):
        execute(Run(path, "page"))
    assert not _pages(folders)


def test_a_report_cut_short_is_not_shown(folders):
    report = folders / "report.json"
    report.write_text(json.dumps({"layout": "tp4-cp2-sp", "equal": True}))
    with pytest.raises(NotebookError, match="ReportError"):
        execute(Run(LAYOUT, "page", {"report": str(report)}))
    assert not _pages(folders)


def test_a_notebook_that_is_not_there_is_named(folders, capsys):
    assert book.main(["run", "notebooks/99_nowhere.ipynb", "page", "-p", "rows", "8"]) == 1
    words = "notebook: received 'notebooks/99_nowhere.ipynb'; accepted: the path of a notebook"
    assert words in capsys.readouterr().err


def test_the_command_line_says_why_and_fails(folders, capsys):
    assert book.main(["run", str(ONE), "page", "-p", "rwos", "7"]) == 1
    assert "rwos" in capsys.readouterr().err
