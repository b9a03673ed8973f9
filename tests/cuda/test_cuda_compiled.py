"""What nvcc makes of csrc/cuda: code for every generation that spills next to nothing and loads anywhere."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from cuda_shim import ROOT

from pagedkv.kernels.cuda.library import CudaLibrary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ARCHS = ("80", "90a", "100")
MAX_REGISTERS = 255
MAX_SPILL_BYTES = 128
"""Of a thread, stores and loads apart. The widest instances have no register to spare."""
MAX_SPILL_BYTES_OF_WIDEST_ON_SM_100 = 640
"""Tensor-core products at head_dim 256: ptxas 13.0 does worse there than for sm_80 and sm_90a."""


class Kernel(NamedTuple):
    name: str
    arch: str
    registers: int
    spill_stores: int
    spill_loads: int


class Build(NamedTuple):
    library: Path
    kernels: list[Kernel]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from build_support.cuda import FLAGS, find_nvcc, gencode_flags

        nvcc = find_nvcc()
        if nvcc is None:
            pytest.skip("needs nvcc in CUDA_HOME, CUDA_PATH or PATH")
        folder = tmp_path_factory.mktemp("cuda")
        command = [nvcc, *FLAGS, "-Xptxas=-v", "-Werror=all-warnings", *gencode_flags(list(ARCHS))]

        def compile_one(source: Path) -> str:
            target = folder / f"{source.stem}.o"
            done = subprocess.run(
                [*command, "-c", source, "-o", target], cwd=ROOT, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            return done.stderr

        with ThreadPoolExecutor(2) as workers:
            reports = list(workers.map(compile_one, sorted((ROOT / "csrc/cuda").glob("*.cu"))))
        library = folder / "libpagedkv_cuda.so"
        link = [nvcc, "-cudart=static", "-shared", *gencode_flags(list(ARCHS)), *folder.glob("*.o")]
        subprocess.run([*link, "-o", library], check=True)
        yield Build(library, [kernel for report in reports for kernel in read_report(report)])


def read_report(report: str) -> list[Kernel]:
    pattern = re.compile(
        r"Compiling entry function '(\w+)' for 'sm_(\w+)'.*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        re.S,
    )
    return [
        Kernel(name, arch, int(registers), int(stores), int(loads))
        for name, arch, stores, loads, registers in pattern.findall(report)
    ]


def test_every_kernel_is_compiled_for_every_generation(compiled: Build) -> None:
    by_arch = {arch: {k.name for k in compiled.kernels if k.arch == arch} for arch in ARCHS}
    assert by_arch["80"] == by_arch["90a"] == by_arch["100"]
    attend = [name for name in by_arch["80"] if "6attendI" in name]
    assert len(attend) == 3 * 5 * 2  # types, head_dims, widths of a tile


def test_registers_and_spills_stay_in_bounds(compiled: Build) -> None:
    for kernel in compiled.kernels:
        assert kernel.registers <= MAX_REGISTERS
        is_widest = kernel.arch == "100" and "TensorCore" in kernel.name and "Li256E" in kernel.name
        limit = MAX_SPILL_BYTES_OF_WIDEST_ON_SM_100 if is_widest else MAX_SPILL_BYTES
        assert max(kernel.spill_stores, kernel.spill_loads) <= limit, kernel


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_products_run_on_tensor_cores(name: str, compiled: Build, tmp_path: Path) -> None:
    from build_support.cuda import FLAGS, find_nvcc

    ptx = tmp_path / "attend.ptx"
    source = ROOT / f"csrc/cuda/attend_{name}.cu"
    flags = [flag for flag in FLAGS if not flag.startswith("-Xcompiler")]
    subprocess.run([find_nvcc(), *flags, "-arch=compute_80", "-ptx", source, "-o", ptx], cwd=ROOT, check=True)
    text = ptx.read_text()
    short = {"bfloat16": "bf16", "float16": "f16"}[name]
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32" in text
    assert "ldmatrix.sync.aligned.m8n8.x4.trans" in text
    assert "cp.async.cg.shared.global" in text
    assert "ld.local" not in text  # every array lies in registers


def test_the_library_loads_without_a_driver_and_needs_little(compiled: Build) -> None:
    library = CudaLibrary(compiled.library)
    reason = library.why_unavailable()
    if reason is not None:
        assert "driver" in reason or "device" in reason
    headers = subprocess.run(["readelf", "-d", compiled.library], capture_output=True, text=True, check=True)
    needed = set(re.findall(r"NEEDED.*\[(.*?)\]", headers.stdout))
    assert not [name for name in needed if "cuda" in name or "torch" in name or "python" in name]
