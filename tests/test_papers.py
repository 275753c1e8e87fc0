"""Containers, scripts, pins, and papers: linted where a linter is, checked against each other."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from h3lib import crate
from h3lib.cli import main
from h3lib.contract import ReportError

ROOT = Path(crate.ROOT)
ENV = ROOT / "env"


def _lint(program: str, *arguments: str | Path) -> subprocess.CompletedProcess:
    beside = Path(sys.executable).with_name(program)
    found = str(beside) if beside.exists() else shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed here")
    return subprocess.run([found, *map(str, arguments)], capture_output=True, text=True)


def test_the_dockerfile_passes_its_linter():
    done = _lint("hadolint", ENV / "Dockerfile")
    assert done.returncode == 0, done.stdout


def test_shell_scripts_pass_their_linter():
    scripts = [*sorted((ENV / "slurm").glob("*.sbatch")), ROOT / ".ci" / "run"]
    done = _lint("shellcheck", *scripts)
    assert len(scripts) == 4 and done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "schema, path",
    [
        ("vendor.citation-file-format", "CITATION.cff"),
        ("vendor.github-workflows", ".github/workflows/book.yml"),
    ],
)
def test_a_file_has_the_form_of_its_kind(schema, path, tmp_path):
    done = _lint("check-jsonschema", "--builtin-schema", schema, ROOT / path)
    assert done.returncode == 0, done.stdout


def test_a_citation_without_authors_is_refused(tmp_path):
    """The check of the check."""
    content = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    del content["authors"]
    (tmp_path / "CITATION.cff").write_text(yaml.safe_dump(content))
    schema = "vendor.citation-file-format"
    done = _lint("check-jsonschema", "--builtin-schema", schema, tmp_path / "CITATION.cff")
    assert done.returncode != 0 and "authors" in done.stdout


def _apptainer() -> tuple[dict[str, str], dict[str, str]]:
    """Header and sections of the definition."""
    head, *parts = re.split(r"^%(\w+)\n", (ENV / "apptainer.def").read_text(), flags=re.M)
    lines = [line for line in head.splitlines() if line and not line.startswith("#")]
    header = dict(line.split(": ", 1) for line in lines)
    return header, dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_apptainer_definition_parses_and_names_what_is_there():
    """Known sections once each, declared arguments, files that exist, shell that parses."""
    known = {"arguments", "files", "post", "environment", "runscript", "test", "labels", "help"}
    header, sections = _apptainer()
    base = re.search(r"^FROM (\S+)$", (ENV / "Dockerfile").read_text(), re.M)[1]
    assert header == {"Bootstrap": "docker", "From": base} and set(sections) == known
    text = (ENV / "apptainer.def").read_text()
    declared = dict(line.split("=") for line in sections["arguments"].split())
    assert set(re.findall(r"\{\{ (\w+) \}\}", text)) == set(declared)
    for pins in ("cpu", "gpu"):
        files = sections["files"].replace("{{ PINS }}", pins).split()
        assert [name for name in files[::2] if not (ROOT / name).exists()] == []
        assert [name for name in files[1::2] if not name.startswith("/h3lib/")] == []
    for name in ("post", "environment", "runscript", "test"):
        done = subprocess.run(["sh", "-n"], input=sections[name], text=True, capture_output=True)
        assert done.returncode == 0, done.stderr


def test_the_conda_environment_uses_the_pins():
    content = yaml.safe_load((ENV / "environment.yml").read_text())
    packages = [entry for entry in content["dependencies"] if isinstance(entry, str)]
    (pip,) = [entry["pip"] for entry in content["dependencies"] if isinstance(entry, dict)]
    assert "python=3.12" in packages and pip == ["-r requirements-cpu.txt"]


def _pins(name: str) -> dict[str, str]:
    lines = (ENV / f"requirements-{name}.txt").read_text().splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in lines if "==" not in line] == []
    pairs = [line.split("==") for line in lines]
    assert len({_same(package) for package, _ in pairs}) == len(pairs)
    return {_same(package): version for package, version in pairs}


def _same(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def test_cpu_and_gpu_pins_differ_where_they_must_only():
    cpu, gpu = _pins("cpu"), _pins("gpu")
    assert list(cpu) == list(gpu)
    assert {name for name in cpu if cpu[name] != gpu[name]} == {"torch", "triton", "numpy"}
    assert not set(_pins("browser")) & set(cpu)


def test_pins_are_closed():
    """What an installed pin requires is pinned too, at a version that it accepts."""
    pins, wrong = _pins("cpu") | _pins("browser"), []
    for name, version in pins.items():
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if package.version.split("+")[0] != version:
            continue  # another environment than that of `make`
        for requirement in map(Requirement, package.requires or []):
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            pinned = pins.get(_same(requirement.name))
            if pinned is None or not requirement.specifier.contains(pinned, prereleases=True):
                wrong.append(f"{name} requires {requirement}: {pinned}")
    # torch's own CUDA libraries are torch's to choose
    assert [line for line in wrong if not re.search("nvidia|cuda|nccl|triton", line)] == []


def test_papers_agree_on_version_licence_and_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    meta = json.loads((ROOT / "codemeta.json").read_text())
    assert project["version"] == citation["version"] == meta["version"]
    assert project["license"] == citation["license"] == meta["license"].rsplit("/")[-1]
    assert project["dependencies"] == meta["softwareRequirements"]
    assert citation["keywords"] == meta["keywords"]


def test_the_artifact_page_names_commands_and_files_that_exist(capsys):
    text = (ROOT / "ARTIFACT.md").read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([\w-]+)", text)) <= targets
    commands = set(re.findall(r"h3lib (\w+)", text))
    with pytest.raises(SystemExit):
        main(["--help"])
    assert commands <= set(re.findall(r"\w+", capsys.readouterr().out))
    paths = re.findall(r"`((?:env|reports|tests)/[\w./-]*)", text)
    assert paths and [path for path in paths if not list(ROOT.glob(f"{path}*"))] == []


def test_the_crate_has_every_report_and_notices_a_change(tmp_path, capsys):
    folder = tmp_path / "crate"
    assert crate.main([str(folder)]) == 0
    graph = json.loads((folder / "ro-crate-metadata.json").read_text())["@graph"]
    entities = {entity["@id"]: entity for entity in graph}
    reports = [str(path.relative_to(ROOT)) for path in (ROOT / "reports").rglob("*.json")]
    assert set(reports) < set(entities) and "conformsTo" in entities["ro-crate-metadata.json"]
    assert "values equal: 73 of 73" in entities["reports/cpu/tp4.json"]["description"]
    assert crate.check_crate(folder) == len(reports) + len(crate.PAPERS)
    path = folder / "reports" / "cpu" / "tp4.json"
    path.write_text(path.read_text().replace('"different": 0', '"different": 1', 1))
    with pytest.raises(ReportError, match="SHA-256 of reports/cpu/tp4.json"):
        crate.check_crate(folder)
    path.unlink()
    assert crate.main(["--check", str(folder)]) == 1
    assert "received 'nothing'" in capsys.readouterr().err
    with pytest.raises(ReportError, match="an RO-Crate"):
        crate.check_crate(tmp_path)


def test_a_report_that_is_not_whole_stays_out_of_the_crate():
    with pytest.raises(ReportError, match="complete"):
        crate._of_report({"measurements": []})
