"""What the compiler makes of Triton kernels for GPUs that are not here.

A *cases module* names launches; each is an ordinary call of a kernel's Python launcher on `meta`
tensors, at the sizes that a model has:

    def forward() -> None:
        hidden = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
        linear_logprobs.forward(hidden, ...)

    CASES = {"head forward bf16": forward}

`compile_cases` runs them in a child process (without TRITON_INTERPRET) in which launching compiles
for the architecture asked for instead of running. So the table is about exactly what a real call
launches: same options, same specialisation of every argument (a meta tensor's address is 0, which
counts as aligned to 16 bytes). Each distinct kernel binary gives one Report.

    reports = compile_cases("tests.kernels.aot_linear_logprobs", 90)

Architectures: 80 (A100), 90 (H100, H200), 100 (B200). About two seconds a kernel and architecture;
Triton's own cache keeps them.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
ARCHITECTURES = (80, 90, 100)
# Bytes of shared memory that one thread block may have (CUDA programming guide, table of compute
# capabilities).
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# The instruction that feeds the matrix units of each architecture at full rate.
MATRIX = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
PROCESSORS = {80: 108, 90: 132, 100: 148}


@dataclass(frozen=True)
class Report:
    """One compiled kernel."""

    case: str
    kernel: str
    arch: int
    constants: str  # "BM=128 BN=256 ...", what the launcher fixed at compile time
    num_warps: int
    num_stages: int
    registers: int  # of a thread; 255 is the most there is
    spills: int  # LDL + STL: reads and writes of registers that did not fit
    shared: int  # bytes of a thread block
    matrix: int  # matrix instructions of MATRIX[arch]
    matrix_old: int  # HMMA where the architecture has a better one
    async_loads: int  # 16-byte LDGSTS and tensor-map (UTMALDG) loads, past the registers
    wide_loads: int  # 16-byte LDG
    scalar_loads: int  # LDG of 4 bytes or fewer


@cache
def compile_cases(module: str, arch: int) -> tuple[Report, ...]:
    """Reports of all cases of a module, by name, for one architecture."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'kernels'}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.aot", module, str(arch)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{module} for sm_{arch}:\n{done.stderr[-4000:]}"
    return tuple(Report(**row) for row in json.loads(done.stdout.splitlines()[-1]))


def check(report: Report, *, registers: int = 255, matrix: bool = False) -> None:
    """What every shipped configuration keeps: no spill, shared memory that fits, wide loads.

    registers: ceiling. matrix: the kernel lives off its dots: it must use the architecture's own
    matrix instruction and asynchronous loads.
    """
    assert report.spills == 0, report
    assert report.registers <= registers, report
    assert report.shared <= SHARED_LIMIT[report.arch], report
    if matrix:
        assert report.matrix > 0 and report.matrix_old == 0, report
        assert report.async_loads > 0, report


# -- in the child ----------------------------------------------------------------------------------


def main(module: str, arch: int) -> None:
    compiled = record(arch)
    reports = []
    for name, launch in importlib.import_module(module).CASES.items():
        compiled.clear()
        launch()
        assert compiled, f"{name} launched nothing"
        reports += [_report(name, arch, *entry) for entry in compiled.values()]
    print(json.dumps([dataclasses.asdict(report) for report in reports]))


def record(arch: int) -> dict[Any, tuple[str, str, Any]]:
    """From here on launching compiles for sm_<arch> and notes it in the result."""
    import triton
    from triton.runtime.jit import JITFunction

    triton.runtime.driver.set_active(_driver(arch))
    compiled: dict[Any, tuple[str, str, Any]] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        given = dict(zip(self.arg_names, args, strict=False)) | options
        fixed = {p.name: given[p.name] for p in self.params if p.is_constexpr and p.name in given}
        constants = " ".join(f"{k}={v}" for k, v in fixed.items())
        compiled[kernel.hash] = (self.__name__, constants, kernel)
        return kernel

    JITFunction.run = compile_only
    return compiled


def _driver(arch: int) -> Any:
    """Stands where Triton asks for a GPU."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):
        utils = property(lambda self: self)

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("meta")

        def get_benchmarker(self) -> Any:
            return lambda call, quantiles=None, **_: (call(), [1.0, 1.0, 1.0])[1]

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

        def get_device_properties(self, device: int = 0) -> dict[str, int]:
            return {
                "max_shared_mem": SHARED_LIMIT[arch],
                "multiprocessor_count": PROCESSORS[arch],
                "warpSize": 32,
                "max_num_regs": 65536,
            }

    return Driver()


def _report(case: str, arch: int, name: str, constants: str, kernel: Any) -> Report:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", file.name)
        code = _output(tools / "nvdisasm", "--print-code", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage

    def count(pattern: str) -> int:
        return len(re.findall(rf"\b{pattern}", code))

    best = MATRIX[arch]
    return Report(
        case=case,
        kernel=name,
        arch=arch,
        constants=constants,
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        registers=int(registers[1]),
        spills=count(r"LDL\b") + count(r"STL\b"),
        shared=kernel.metadata.shared,
        matrix=count(rf"{best}\b"),
        matrix_old=0 if best == "HMMA" else count(r"HMMA\b"),
        async_loads=count(r"LDGSTS\S*\.128\b") + count(r"UTMALDG\b"),
        wide_loads=count(r"LDG\.\S*\.128\b"),
        scalar_loads=count(r"LDG\b") - count(r"LDG\.\S*\.(?:64|128)\b"),
    )


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
