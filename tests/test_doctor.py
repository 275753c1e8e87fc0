"""The doctor: a fingerprint that is stable, checks that can fail, an exchange that is real."""

import json

import nbformat
import pytest
import torch

from h3lib import book, doctor
from h3lib.book import NOTEBOOKS, Run, execute
from h3lib.cli import main
from h3lib.doctor import OK, PROBLEM, WARNING, exchange_memory, fingerprint, fingerprint_digest


@pytest.fixture
def fresh():
    """The fingerprint is taken once a process; these tests take another."""
    fingerprint.cache_clear()
    yield
    fingerprint.cache_clear()


def test_the_digest_is_that_of_another_process_and_stands_under_every_table(tmp_path, monkeypatch):
    monkeypatch.setattr(book, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(book, "WORK", tmp_path / "work")
    page = execute(Run(NOTEBOOKS / "00_environment.ipynb", "page"))
    outputs = [o for c in nbformat.read(page, 4).cells for o in c.get("outputs", [])]
    texts = [output.get("data", {}).get("text/html", "") for output in outputs]
    tables = [text for text in texts if "<table" in text]
    assert len(tables) == 2
    assert all(f"environment {fingerprint_digest()}</p>" in table for table in tables)


def test_a_setting_that_can_change_something_changes_the_digest(fresh, monkeypatch):
    before = fingerprint_digest()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    fingerprint.cache_clear()
    assert fingerprint_digest() != before
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    fingerprint.cache_clear()
    assert fingerprint_digest() == before


def test_an_allocator_that_breaks_ipc_of_tensors_is_a_warning(fresh, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--out", str(tmp_path / "d.json")])
    found = json.loads((tmp_path / "d.json").read_text())["checks"]
    assert "allocator" in [check["name"] for check in found if check["verdict"] == WARNING]
    printed = capsys.readouterr().out
    assert "warning  allocator" in printed and "no IPC handle" in printed
    assert ended.value.code == (1 if any(check["verdict"] == PROBLEM for check in found) else 0)


def test_verdicts_of_single_checks():
    assert doctor._allocator_check("expandable_segments:False").verdict == OK
    assert doctor._tf32_check("matmul on, cudnn off").verdict == WARNING
    assert doctor._driver_check(["H200"], 0).verdict == PROBLEM
    assert doctor._driver_check([], 0).verdict == doctor.ABSENT


@pytest.mark.parametrize("name, gpus", [("no driver", []), ("no torch with CUDA", ["H200"])])
def test_every_layout_has_a_verdict_and_a_reason(name, gpus, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there are CUDA devices here")
    monkeypatch.setattr(doctor, "fingerprint", lambda: {"gpus": gpus})
    verdicts = {verdict.layout: verdict for verdict in doctor.verdicts()}
    assert len(verdicts) == len(doctor.known_layouts()) and "tp8-local4" in verdicts
    for verdict in verdicts.values():
        assert verdict.cpu == "yes" or verdict.cpu.startswith("no: memory for ")
        assert verdict.cuda.startswith("no: no CUDA device")
    assert ("that torch can use" in verdicts["tp1"].cuda) == bool(gpus)


def test_gpus_are_shared_in_words(monkeypatch):
    monkeypatch.setattr(doctor, "_capability_check", lambda: doctor.Check("", "8.0", WARNING))
    assert doctor._on_gpus(8, 2) == "yes: 4 ranks share a GPU, back end eager only"
    monkeypatch.setattr(doctor, "_capability_check", lambda: doctor.Check("", "9.0", OK))
    assert doctor._on_gpus(2, 2) == "yes"


def test_memory_is_exchanged_between_two_processes():
    assert exchange_memory("cpu") is None


@pytest.mark.slow
def test_an_exchange_that_changes_a_copy_is_noticed(monkeypatch):
    monkeypatch.setattr(doctor, "_negate", _say_yes)
    assert exchange_memory("cpu") == "the other process changed a copy"


def _say_yes(there, back):
    there.get()
    back.put(None)


@pytest.mark.gpu
def test_memory_of_a_gpu_is_exchanged_between_two_processes():
    assert exchange_memory("cuda:0") is None


def test_topology_is_the_table_without_its_legend(monkeypatch):
    lines = ["GPU0 GPU1 CPU Affinity", "GPU0 X NV18 0-31", "GPU1 NV18 X 0-31"]
    monkeypatch.setattr(doctor, "_smi", lambda *_: [*lines, "Legend:", "X = Self"])
    assert doctor._topology() == lines
    monkeypatch.setattr(doctor, "_smi", lambda *_: [])
    assert doctor._topology() == []
