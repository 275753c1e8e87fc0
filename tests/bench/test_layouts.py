"""The benchmark of layouts: who gets which GPU, what is not run, what a failure leaves behind."""

import json
import threading
import time
from pathlib import Path

import pytest

from h3lib.bench import layouts
from h3lib.contract import PeerError

pytest.importorskip("triton")


@pytest.fixture
def machine(monkeypatch):
    """Four GPUs whose ranks and lone processes write what they saw; `tp2-sp` fails."""
    seen, busy, lock = [], set(), threading.Lock()

    def run_ranks(module, arguments, num_ranks, timeout_s, log, tick, variables):
        gpus = variables["CUDA_VISIBLE_DEVICES"].split(",")
        with lock:
            assert not busy & set(gpus), "two layouts on one GPU"
            busy.update(gpus)
        time.sleep(0.05)
        name, out, *rows = arguments
        lines = [{"layout": name, "rows": int(r), "status": "run"} for r in rows]
        Path(out).write_text(json.dumps({"measurements": lines}))
        log.write_text("the last words")
        with lock:
            busy.difference_update(gpus)
            seen.append((name, gpus))
        return int(name == "tp2-sp")

    def watch(command, settings, timeout_s, log, tick):
        name, out, *rows = command[command.index("--") + 1 :]
        Path(out).write_text(json.dumps({"memory": [{"layout": name, "rows": int(rows[0])}]}))
        return 0

    monkeypatch.setattr(layouts, "run_ranks", run_ranks)
    monkeypatch.setattr(layouts, "watch", watch)
    monkeypatch.setattr(layouts, "load_backend", lambda *given: None)
    monkeypatch.setattr(layouts, "_header", lambda gpus, rows: {"gpus": gpus})
    monkeypatch.setattr(layouts.torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")
    return seen


def test_layouts_run_side_by_side_on_gpus_of_their_own(machine, tmp_path):
    names = ["tp1", "tp2", "cp2", "tp4", "cp4", "tp8"]
    layouts.bench_layouts(tmp_path / "out.json", names, [264, 14910])
    content = json.loads((tmp_path / "out.json").read_text())
    assert list(content)[-1] == "complete" and content["complete"] is True
    gpus = dict(machine)
    assert gpus.keys() == {"tp1", "tp2", "cp2", "tp4", "cp4"}
    assert sorted(gpus["tp4"]) == ["2", "3", "5", "7"] and len(gpus["tp1"]) == 1
    assert not set(gpus["tp2"]) & set(gpus["cp2"])
    shared = [line for line in content["measurements"] if line["layout"] == "tp8"]
    assert [(line["rows"], line["status"]) for line in shared] == [
        (264, layouts.NOT_RUN), (14910, layouts.NOT_RUN),
    ]  # fmt: skip
    assert {line["layout"] for line in content["memory"]} == set(names)


def test_a_layout_that_fails_is_named_and_the_others_are_kept(machine, tmp_path):
    with pytest.raises(PeerError, match="the last words"):
        layouts.bench_layouts(tmp_path / "out.json", ["tp2", "tp2-sp"], [264])
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["complete"] is False and list(content["failures"]) == ["tp2-sp"]
    assert {line["layout"] for line in content["measurements"]} == {"tp2", "tp2-sp"}


def test_no_layout_begins_when_the_time_is_up(machine, tmp_path):
    layouts.bench_layouts(tmp_path / "out.json", ["tp2", "tp4"], [264], seconds=0)
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["complete"] is True and not machine
    assert {line["status"] for line in content["measurements"]} == {layouts.NO_TIME}
