"""The code of a kernel, compiled for sm_90 without a GPU and read.

    Code.ptx        what Triton emits
    Code.sass       what ptxas makes of it, disassembled
    Code.registers, .spill_bytes, .stack_bytes, .warnings     ptxas's own account

`Code.check` is what every kernel of this package promises. Tests call it for every entry of every
directive table, so a compiler that changes its mind is noticed before a GPU is.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from h3lib.contract import BackendError

TARGET = GPUTarget("cuda", 90, 32)
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Code:
    """One compiled kernel."""

    ptx: str
    sass: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    warnings: tuple[str, ...]

    def count(self, mnemonic: str) -> int:
        """SASS instructions whose name begins with `mnemonic`."""
        return len(
            re.findall(rf"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?{mnemonic}\b", self.sass, re.M)
        )

    def check(self, tensor_cores: bool) -> None:
        """**Raises:** BackendError for spills, a ptxas warning (C7510, C7512: serialised wgmma), a
        float `red` or `atom`, TF32, or a matrix product without wgmma and TMA."""
        found = []
        if self.spill_bytes or self.stack_bytes:
            found.append(f"{self.spill_bytes} bytes spilled, {self.stack_bytes} bytes of stack")
        found += self.warnings
        found += re.findall(r"\b(?:red|atom)\.[\w.:]*\b(?:f16|bf16|f32|f64)\w*", self.ptx)
        found += [".tf32"] if ".tf32" in self.ptx else []
        if tensor_cores:
            needed = {"HGMMA": "wgmma", "UTMALDG": "TMA load"}
            found += [f"no {name}" for code, name in needed.items() if not self.count(code)]
            found += ["mma.sync"] if self.count("HMMA") else []
        if found:
            raise BackendError("compiled code", "; ".join(found), "none of these")


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Inside, Triton compiles for sm_90 whatever this machine has; nothing can be launched."""

    class Offline:
        def get_current_target(self) -> GPUTarget:
            return TARGET

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    before = driver._active  # None until something asks for a GPU
    driver.set_active(Offline())
    try:
        yield
    finally:
        driver.set_active(before)


def compile_offline(kernel: object, *arguments: object, **options: object) -> Code:
    """Compile a Triton or Gluon kernel for arguments on the `meta` device.

    `options` are the launch options and named arguments of the kernel, as at a launch.
    """
    with without_gpu():
        compiled = kernel.warmup(*arguments, grid=(1,), **options)
    fused = options.get("enable_fp_fusion", True)
    return _read(compiled.asm["ptx"], compiled.metadata.shared, fused)


def _read(ptx: str, shared_bytes: int, fp_fusion: bool) -> Code:
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        flags = ["-v", "--gpu-name=sm_90a", *([] if fp_fusion else ["--fmad=false"])]
        log = _run("ptxas", *flags, str(source), "-o", str(binary))
        sass = _run("cuobjdump", "-sass", str(binary))
    return Code(
        ptx=ptx,
        sass=sass,
        registers=_number(r"Used (\d+) registers", log),
        spill_bytes=_number(r"(\d+) bytes spill stores", log)
        + _number(r"(\d+) bytes spill loads", log),
        stack_bytes=_number(r"(\d+) bytes stack frame", log),
        shared_bytes=shared_bytes,
        warnings=tuple(
            line for line in log.splitlines() if "warning" in line.lower() or "C75" in line
        ),
    )


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([str(_TOOLS / tool), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise BackendError(tool, done.stderr[-2000:], "exit status 0")
    return done.stdout + done.stderr


def _number(pattern: str, log: str) -> int:
    return sum(int(found) for found in re.findall(pattern, log))
