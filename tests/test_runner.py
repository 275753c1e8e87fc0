"""`h3lib run` with real processes: verdicts, exit statuses, faults, and nothing left running."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from block_support import NAMED_LAYOUTS, TINY

import h3lib
from h3lib.contract import ReportError
from h3lib.model.block import BLOCK_PREFIX, block_parameters
from h3lib.model.checkpoint import write_checkpoint
from h3lib.model.inputs import TIME_EMBEDDER
from h3lib.model.weights import SyntheticWeights
from h3lib.parallel.launch import descendants
from h3lib.report import read_report

H3LIB = [sys.executable, "-m", "h3lib.cli"]
_COMPILED = shutil.ignore_patterns("__pycache__")


def _run(*arguments, out, layout="tp1", rows="65", **options):
    command = [*H3LIB, "run", "--layout", layout, "--rows", rows, "--out", str(out), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def _is_rank(pid: int) -> bool:
    """Whether a process lives and is a rank, or torchrun's process that starts the ranks."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return b"h3lib.rank" in words and state != "Z"


def _ranks_of(process: subprocess.Popen) -> set[int]:
    return {pid for pid in descendants(process.pid) if _is_rank(pid)}


def _wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError("waited in vain")


@pytest.mark.parametrize("layout", NAMED_LAYOUTS)
def test_real_processes_give_the_bytes_of_one(layout, tmp_path):
    out = tmp_path / "report.json"
    done = _run(out=out, layout=layout, rows="264")
    assert done.returncode == 0, done.stderr
    report = read_report(out)
    assert report["equal"] and report["layout"] == layout and report["rows"] == 264
    assert report["control"]["applicable"] and report["control"]["different"] > 0
    assert done.stderr == "", "quiet when not a terminal"


@pytest.mark.parametrize("layout", ("tp4-cp2-sp", "tp8-local4"))
def test_products_in_chunks_of_rows_by_real_processes(layout, tmp_path):
    out = tmp_path / "report.json"
    done = _run("--chunk-rows", "50", out=out, layout=layout, rows="264")
    assert done.returncode == 0, done.stderr
    report = read_report(out)
    assert report["equal"] and report["chunk_rows"] == 50
    assert report["control"]["applicable"] and report["control"]["different"] > 0


def test_the_model_in_stages_of_real_processes(tmp_path):
    out = tmp_path / "report.json"
    done = _run("--blocks", "all", "--recompute", out=out, layout="tp2-sp-pp2")
    assert done.returncode == 0, done.stderr
    report = read_report(out)
    assert report["blocks"] == 2 and report["recompute"] and report["equal"]
    assert {"video", "d.text", "proj_out.bias"} <= {tensor["name"] for tensor in report["tensors"]}


def test_a_generation_of_real_processes(tmp_path):
    out = tmp_path / "report.json"
    asked = ("--layout", "tp2-cp2", "--rows", "132", "--points", "3", "--out", str(out))
    command = [*H3LIB, "generate", *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = read_report(out)
    assert report["points"] == 3 and report["first_different_step"] is None
    assert len(report["tensors"]) == 16 and report["control"]["different"] > 0
    assert done.stderr == "", "quiet when not a terminal"


@pytest.mark.slow
def test_sixteen_processes(tmp_path):
    done = _run(out=tmp_path / "report.json", layout="tp8-cp2-sp-local4", rows="264")
    assert done.returncode == 0, done.stderr


def test_report_has_the_fields_that_others_read(tmp_path):
    out = tmp_path / "report.json"
    assert _run(out=out).returncode == 0
    text = out.read_text()
    report = json.loads(text)
    assert list(report)[-1] == "complete" and report["complete"] is True
    assert {t["kind"] for t in report["tensors"]} == {"output", "root", "gradient", "node"}
    assert report["environment"]["machine"] == "node-a"
    assert os.uname().nodename not in text, "no host name in a report"
    assert report["control"] == {**report["control"], "applicable": False, "total": 0}


def test_the_same_request_gives_the_same_digests(tmp_path):
    digests = []
    for name, layout in (("a", "tp1"), ("b", "cp2")):
        assert _run(out=tmp_path / name, layout=layout).returncode == 0
        report = read_report(tmp_path / name)
        digests.append({(t["kind"], t["name"]): t["sha256"] for t in report["tensors"]})
    assert digests[0] == digests[1]


@pytest.mark.parametrize("key_layout", ("diffusers", "original"))
def test_a_released_folder_gives_the_bytes_of_its_source(key_layout, tmp_path):
    names = [*TIME_EMBEDDER, *(BLOCK_PREFIX + name for name in block_parameters(TINY))]
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, SyntheticWeights(TINY, 0), key_layout, 200_000, names)
    assert _run("--weights", str(folder), out=tmp_path / "a", layout="tp2").returncode == 0
    assert _run(out=tmp_path / "b").returncode == 0
    a, b = read_report(tmp_path / "a"), read_report(tmp_path / "b")
    assert a["digests"] == b["digests"]
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-5])
    refused = _run("--weights", str(folder), out=tmp_path / "c")
    assert refused.returncode == 2 and shard.name in refused.stderr


REFUSED = {
    "tp3": (("--layout", "tp3"), "tp degree: received 3; accepted: 1, 2, 4, 8"),
    "name": (("--layout", "tp4_cp2"), "received 'tp4_cp2'"),
    "rows 0": (("--rows", "0"), "0"),
    "size": (("--size", "huge"), "received 'huge'; accepted: full, small, tiny"),
    "device": (("--device", "tpu"), "received 'tpu'; accepted: cpu, cuda"),
    "blocks": (("--blocks", "3"), "received '3'; accepted: 1 to 2 of tiny, or all"),
    "recompute": (("--recompute",), "with --blocks 2 or more"),
    "stages of one block": (("--layout", "tp1-pp2"), "pp degree: received 2; accepted: 1"),
    "weights": (("--weights", "nowhere"), "received 'nowhere'"),
    "seed": (("--weights", "synthetic:x"), "received 'synthetic:x'"),
    "chunks": (("--chunk-rows", "0"), "rows of a chunk: received 0; accepted: at least 1"),
    "local": (("--local-size", "3"), "local size: received 3"),
    "seed of too many digits": (("--weights", "synthetic:" + "9" * 19), "at most 18 digits"),
    "timeout": (("--timeout", "0"), "received 0.0"),
    "endless": (("--timeout", "inf"), "received inf"),
    "backend": (("--backend", "cublas"), "received 'cublas'; accepted: eager, triton"),
    "backend device": (("--backend", "triton"), "received 'cpu'; accepted: cuda"),
    "transport": (("--transport", "ring"), "received 'ring'; accepted: gloo, peer"),
    "peer transport": (("--transport", "peer"), "received 'peer'; accepted: gloo on device cpu"),
    "folder": (("--out", "/nonexistent/x.json"), "/nonexistent/x.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_with_the_values(case, tmp_path):
    arguments, words = REFUSED[case]
    (tmp_path / "r.json").write_text("a green report of an earlier run")
    done = _run(*arguments, out=tmp_path / "r.json")
    assert done.returncode == 2, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "r.json").exists() == ("--out" in arguments)


@pytest.mark.parametrize(
    "given, words",
    [
        (("collectives", "--rows", "264"), "--rows: received 'collectives'"),
        (("layouts", "--parts", "gemm"), "--parts: received 'layouts'; accepted: with kernels"),
        (("overlap", "--seconds", "60"), "--seconds: received 'overlap'; accepted: with layouts"),
    ],
)
def test_an_option_that_a_benchmark_would_not_look_at_is_refused(given, words, tmp_path):
    command = [*H3LIB, "bench", *given, "--out", str(tmp_path / "b.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and words in done.stderr, done.stderr


def test_rows_and_job_exclude_each_other(tmp_path):
    done = _run("--job", "64x64x5", out=tmp_path / "r.json")
    assert done.returncode == 2


def test_a_bad_job_is_refused(tmp_path):
    command = [*H3LIB, "run", "--layout", "tp1", "--job", "100x64x5", "--out", str(tmp_path / "r")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "100" in done.stderr


@pytest.mark.parametrize("blow", (signal.SIGKILL, signal.SIGSTOP), ids=("dies", "hangs"))
def test_a_rank_that_dies_or_hangs_ends_the_run(blow, tmp_path):
    """The run is long (2,000 rows), so the blow falls while ranks work; a stale report is gone."""
    out = tmp_path / "report.json"
    out.write_text("an older report")
    command = [*H3LIB, "run", "--layout", "tp2-cp2", "--rows", "2000", "--out", str(out)]
    timeout = 25 if blow == signal.SIGSTOP else 120
    process = subprocess.Popen(
        [*command, "--timeout", str(timeout)], stderr=subprocess.PIPE, text=True
    )
    ranks = _wait_for(lambda: len(found := _ranks_of(process)) == 5 and found)
    time.sleep(4)
    started = time.monotonic()
    os.kill(max(ranks), blow)  # the smallest is torchrun's own process
    _, errors = process.communicate(timeout=timeout + 60)
    assert process.returncode == 3, errors
    assert time.monotonic() - started < timeout + 10
    assert "h3lib: " in errors and "Traceback" not in errors.splitlines()[0]
    assert ("was killed by signal 9" in errors) == (blow == signal.SIGKILL), errors
    assert not out.exists()
    _wait_for(lambda: not any(map(_is_rank, ranks)), 10)


def test_killing_the_runner_leaves_no_rank(tmp_path):
    command = [*H3LIB, "run", "--layout", "tp2", "--rows", "2000", "--out", str(tmp_path / "r")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    ranks = _wait_for(lambda: len(found := _ranks_of(process)) == 3 and found)
    process.kill()
    process.wait()
    _wait_for(lambda: not any(map(_is_rank, ranks)), 20)


def _torchrun(ranks, *arguments, out):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(ranks), "-m", "h3lib.cli", "run", "--rows", "65", "--out", str(out), *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


def test_started_under_torchrun(tmp_path):
    out = tmp_path / "report.json"
    done = _torchrun(2, "--layout", "tp2", out=out)
    assert done.returncode == 0, done.stderr
    assert read_report(out)["equal"]


def test_a_world_of_another_size_is_refused(tmp_path):
    """Every rank refuses it by itself; torchrun stops the others once one has said so."""
    done = _torchrun(2, "--layout", "tp4", out=tmp_path / "r")
    assert done.returncode != 0
    assert "number of ranks: received 2; accepted: 4 for tp4" in done.stderr
    assert not (tmp_path / "r").exists()


def test_two_nodes_under_torchrun(tmp_path):
    """Two agents on one machine, as two nodes: the hierarchy crosses them."""
    out, port = tmp_path / "report.json", 29000 + os.getpid() % 1000
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
        "--master-addr", "127.0.0.1", "--master-port", str(port),
    ]  # fmt: skip
    rest = ["-m", "h3lib.cli", "run", "--layout", "tp4-local2", "--rows", "65", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen([*command, "--node-rank", str(node), *rest], env=environment)
        for node in (0, 1)
    ]
    assert [agent.wait(200) for agent in agents] == [0, 0]
    report = read_report(out)
    assert report["equal"] and report["local_size"] == 2 and report["num_ranks"] == 4


def test_verify_refuses_an_incomplete_report(tmp_path):
    out = tmp_path / "report.json"
    assert _run(out=out).returncode == 0
    report = json.loads(out.read_text())
    del report["complete"]
    (tmp_path / "partial.json").write_text(json.dumps(report))
    (tmp_path / "cut.json").write_text(out.read_text()[:-200])
    command = [*H3LIB, "verify", *map(str, (out, tmp_path / "partial.json", tmp_path / "cut.json"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    good, partial, cut = done.stdout.splitlines()
    assert "complete, equal" in good and "refused" in partial and "refused" in cut
    with pytest.raises(ReportError):
        read_report(tmp_path / "partial.json")


def test_a_benchmark_without_a_gpu_is_refused(tmp_path):
    command = [*H3LIB, "bench", "kernels", "--out", str(tmp_path / "kernels.json")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2 and "no CUDA device" in done.stderr
    assert not (tmp_path / "kernels.json").exists()


def test_layouts_lists_what_this_machine_can_run():
    done = subprocess.run([*H3LIB, "layouts"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    names = {line.split()[0] for line in done.stdout.splitlines()[1:]}
    assert set(NAMED_LAYOUTS) <= names
    assert "no: no CUDA device" in done.stdout or "share a GPU" in done.stdout


def test_canonical_values_are_kept_for_runs_of_the_same_commit(tmp_path):
    source, kept, out = tmp_path / "checkout", tmp_path / "kept", tmp_path / "report.json"
    shutil.copytree(Path(h3lib.__file__).parent, source / "h3lib", ignore=_COMPILED)
    kept.mkdir()

    def run(layout):
        return _run(
            "--canonical", str(kept), out=out, layout=layout, cwd=source,
            env={**os.environ, "PYTHONPATH": str(source)},
        )  # fmt: skip

    def git(*arguments):
        who = ("-c", "user.name=h3lib", "-c", "user.email=h3lib@example.org")
        subprocess.run(["git", *who, *arguments], cwd=source, check=True, capture_output=True)

    (source / ".gitignore").write_text("__pycache__/\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "what is measured")
    digests = []
    for layout, reused in (("tp1", False), ("tp2", True)):
        assert run(layout).returncode == 0
        report = read_report(out)
        assert report["canonical_reused"] is reused
        digests.append({(t["kind"], t["name"]): t["sha256"] for t in report["tensors"]})
    assert digests[0] == digests[1]
    (file,) = kept.iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert run("tp1").returncode == 0, "a damaged file is computed again"
    assert read_report(out)["canonical_reused"] is False
    (source / "changed").touch()
    done = run("tp1")
    assert done.returncode == 2 and "one commit without changes" in done.stderr
