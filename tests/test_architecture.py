"""The house: layers import downward only, and every module can be read at one sitting."""

import ast
from pathlib import Path

import pytest

import h3lib

ROOT = Path(h3lib.__file__).parent
LAYERS = (  # each may import from its own layer and from those before it
    {"contract"},
    {"layout", "rows", "provenance", "files"},
    {"ops"},
    {"parallel"},
    {"model"},
    {"canonical", "compare", "report", "simulate", "request", "folders", "explain"}
    | {"notebook", "bench", "faults", "doctor"},
    {"rank", "pretrained"},
    {"run"},
    {
        *("cli", "book", "readme", "ledger", "claims", "prices", "unmeasured"),
        *("execute", "grid", "sweep", "crate"),
    },
)
STANDARD_LIBRARY_ONLY = {"contract", "layout"}
MODULES = sorted(ROOT.rglob("*.py"))


def _layer(name: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


def _part(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_layers_import_downward_only(path):
    part = _part(path)
    if part == "__init__":
        return
    for name in _imports(path):
        if name.startswith("h3lib."):
            assert _layer(name.split(".")[1]) <= _layer(part), f"{part} imports {name}"


@pytest.mark.parametrize("part", sorted(STANDARD_LIBRARY_ONLY))
def test_the_contract_and_layouts_need_the_standard_library_only(part):
    names = _imports(ROOT / f"{part}.py")
    assert names <= {"__future__", "dataclasses", "functools", "re", "h3lib.contract"}


def test_torch_distributed_is_used_in_parallel_only():
    users = {_part(path) for path in MODULES if "torch.distributed" in _imports(path)}
    assert users == {"parallel"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_read_at_one_sitting(path):
    source = path.read_text()
    assert len(source.splitlines()) <= 350
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno <= 120, node.name


def test_no_module_reads_the_environment_to_choose_bits():
    """Environment variables say who a rank is, never how it adds."""
    allowed = {"RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "TORCHELASTIC_ERROR_FILE"}
    allowed |= {"NCCL_NVLS_ENABLE"}
    allowed |= {f"SLURM_{word}" for word in ("PROCID", "NODEID", "STEP_NODELIST")}
    allowed |= {"SLURM_JOB_ID", "SLURM_STEP_ID"}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
                assert ast.literal_eval(node.slice) in allowed, path
