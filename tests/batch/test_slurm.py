"""A real Slurm: two nodes on this machine, ranks by srun and by torchrun, notebooks, an array."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_cluster import Cluster

from h3lib.book import ROOT
from h3lib.report import read_report

pytestmark = pytest.mark.slurm
H3LIB = (sys.executable, "-m", "h3lib.cli")
TWO_BY_TWO = ("--nodes", "2", "--ntasks-per-node", "2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Its folder holds a copy of the repository in `root`, so that pages and reports go there."""
    folder = tmp_path_factory.mktemp("slurm")
    root = folder / "root"
    for name in ("h3lib", "notebooks", "env", "reports"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    with Cluster(folder) as started:
        started.environment |= {"PYTHONPATH": str(root), "PYTHON": sys.executable}
        started.folder = root
        yield started
        left = started.run("squeue", "-h").stdout
    assert not left, f"jobs at the end: {left}"


def _job(cluster, script, *arguments, options=(), **settings):
    """Run a batch script to its end: its exit status, its output."""
    log = cluster.folder / "job.out"
    command = ["sbatch", "--wait", f"--output={log}", *options, f"env/slurm/{script}", *arguments]
    done = cluster.run(*command, timeout_s=400, **settings)
    return done.returncode, log.read_text() if log.exists() else done.stderr


def test_srun_starts_the_ranks_of_a_flat_layout_on_two_nodes(cluster):
    out = cluster.folder / "tp4.json"
    arguments = ("run", "--layout", "tp4", "--rows", "264", "--out", str(out))
    done = cluster.run("srun", *TWO_BY_TWO, *H3LIB, *arguments, timeout_s=300)
    assert done.returncode == 0, done.stderr
    report = read_report(out)
    assert report["equal"] and report["nodes"] == [0, 0, 1, 1]
    assert report["control"]["different"] > 0
    assert done.stdout.count("values equal on 4 ranks") == 1


@pytest.mark.slow
def test_a_notebook_starts_the_hierarchy_on_two_nodes(cluster):
    """papermill on the first node; its `h3lib run` is a step over both."""
    arguments = ("tp4-local2", "-p", "rows", "264")
    status, text = _job(cluster, "one_layout.sbatch", *arguments, options=TWO_BY_TWO)
    assert status == 0, text
    (page,) = (cluster.folder / "book" / "runs").glob("05_one_layout_tp4-local2_*.ipynb")
    assert "elements equal" in page.read_text()
    (report,) = (cluster.folder / "build" / "notebooks").glob("tp4-local2_*.json")
    found = read_report(report)
    assert found["equal"] and found["nodes"] == [0, 0, 1, 1] and found["local_size"] == 2


@pytest.mark.slow
def test_a_node_too_small_for_a_local_group_is_refused(cluster):
    arguments = ("--layout", "tp4-local4", "--rows", "65", "--out", str(cluster.folder / "x.json"))
    done = cluster.run("srun", *TWO_BY_TWO, *H3LIB, "run", *arguments, timeout_s=300)
    assert done.returncode == 2, done.stderr
    assert "nodes of tp4-local4: received [0, 0, 1, 1]" in done.stderr
    assert not (cluster.folder / "x.json").exists()


def _ranks(cluster) -> list[int]:
    """Ranks of this cluster's steps: they have its configuration in their environment."""
    mark, found = f"SLURM_CONF={cluster.environment['SLURM_CONF']}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            settings = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"h3lib.rank" in words and mark in settings and words[0].endswith(b"python"):
            found.append(int(process.name))
    return found


@pytest.mark.slow
def test_a_killed_rank_of_a_step_is_named(cluster):
    arguments = ("--layout", "tp2", "--rows", "9000", "--launcher", "srun")
    command = ("salloc", *TWO_BY_TWO, *H3LIB, "run", *arguments, "--out", "killed.json")
    started = subprocess.Popen(
        command, cwd=cluster.folder, env=cluster.environment, text=True, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 100
    while len(ranks := _ranks(cluster)) < 2:
        assert time.monotonic() < deadline and started.poll() is None, "no ranks"
        time.sleep(0.2)
    time.sleep(15)
    os.kill(max(ranks), signal.SIGKILL)
    _, errors = started.communicate(timeout=200)
    assert started.returncode == 3 and "was killed by signal 9" in errors, errors
    assert not (cluster.folder / "killed.json").exists() and not _ranks(cluster)


@pytest.mark.slow
def test_a_step_that_is_late_is_ended(cluster):
    arguments = ("--layout", "tp2", "--rows", "9000", "--timeout", "8", "--launcher", "srun")
    command = ("run", *arguments, "--out", str(cluster.folder / "late.json"))
    done = cluster.run("salloc", *TWO_BY_TWO, *H3LIB, *command, timeout_s=300)
    assert done.returncode == 3, done.stderr
    assert "no end after 8 s" in done.stderr and not (cluster.folder / "late.json").exists()
    deadline = time.monotonic() + 60
    while cluster.run("squeue", "-h", "--steps").stdout:
        assert time.monotonic() < deadline, "a step is left"
        time.sleep(0.5)


@pytest.mark.slow
def test_one_torchrun_a_node_and_the_notebook_of_its_report(cluster):
    status, text = _job(
        cluster, "torchrun.sbatch", "tp4-local2", "--rows", "264",
        options=("--nodes", "2"), RANKS_PER_NODE="2",
    )  # fmt: skip
    assert status == 0, text
    (report,) = (cluster.folder / "build" / "notebooks").glob("torchrun_*.json")
    assert read_report(report)["nodes"] == [0, 0, 1, 1] and "complete, equal" in text


@pytest.mark.slow
def test_a_sweep_as_a_job_array(cluster):
    """Three cells, three array tasks; what they did is kept for the sweep that lists them."""
    grid = cluster.folder / "grid.yaml"
    grid.write_text("grid: {layout: [tp2, tp4-local2, tp3]}\nfixed: {rows: 65, launcher: srun}\n")
    options = ("--array", "0-2", "--output", str(cluster.folder / "cell-%a.out"))
    command = ("sbatch", "--wait", *TWO_BY_TWO, *options, "env/slurm/sweep.sbatch", str(grid))
    done = cluster.run(*command, timeout_s=500)
    lines = [(cluster.folder / f"cell-{i}.out").read_text() for i in range(3)]
    assert done.returncode == 2, lines
    for line, state in zip(lines, ("equal", "equal", "unsupported"), strict=True):
        assert line.splitlines()[-1].startswith(state)
    (cluster.folder / "two.yaml").write_text(grid.read_text().replace(", tp3", ""))
    again = cluster.run(*H3LIB, "sweep", str(cluster.folder / "two.yaml"), timeout_s=100)
    assert again.returncode == 0 and again.stdout.count("  kept  ") == 2, again.stdout
    reports = [json.loads(p.read_text()) for p in cluster.folder.glob("build/reports/sweeps/*")]
    assert sorted((r["layout"], r["nodes"]) for r in reports) == [
        ("tp2", [0, 1]), ("tp4-local2", [0, 0, 1, 1]),
    ]  # fmt: skip
