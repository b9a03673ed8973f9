"""The kernels on the host under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_shim import ROOT, SANITIZE, build, find_compiler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def preload() -> str:
    """Python is not linked with the sanitizers' libraries, which have to be there before it starts."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    found = []
    for name in ("libasan.so", "libubsan.so", "libstdc++.so"):
        answer = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True)
        found.append(answer.stdout.strip())
    if not all(Path(path).is_absolute() for path in found):
        pytest.skip(f"needs {compiler[-1]}'s sanitizer libraries")
    return " ".join(found)


@pytest.fixture(scope="module")
def environment(preload: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("sanitized") / "libpagedkv_cuda_shim.so"
    build(path, flags=SANITIZE, cache=ROOT / "build/cuda-shim")
    options = "detect_leaks=0:detect_stack_use_after_return=0:alloc_dealloc_mismatch=0"
    return {**os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": options, "PAGEDKV_TEST_SHIM": str(path)}


def test_the_tests_find_nothing(environment: dict[str, str]) -> None:
    tests = [f"tests/cuda/test_cuda_{name}.py" for name in ("attention", "blocks", "merging", "write_kv")]
    # 16 GiB of address space and a scratch buffer of 256 MiB are no news to a sanitizer, only slow.
    left_out = "not beyond_two_to_the_31 and not waves"
    command = [sys.executable, "-m", "pytest", "-xqs", "-p", "no:cacheprovider", "-k", left_out, *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]


def test_a_page_outside_of_the_memory_would_be_found(environment: dict[str, str]) -> None:
    code = """
import torch
from cuda_shim import Shim
from paged_cases import Case, run
import os, pathlib
case = Case([(40, 1)])
case.keys = case.keys[:1]  # fewer pages than the call says there are
shim = Shim(pathlib.Path(os.environ["PAGEDKV_TEST_SHIM"]))
whole = list(case.arguments(torch.zeros_like(case.query), None))
whole[1] = case.keys.clone().expand(1, -1, -1, -1).as_strided((4, 16, 2, 32), case.keys.stride())
shim.paged_attention(*whole)
"""
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/cuda")))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": folders},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr or "out of bounds" in done.stderr
