from __future__ import annotations

import os
from pathlib import Path

import pytest
from cuda_shim import ROOT, Shim, build, find_compiler


@pytest.fixture(scope="session")
def built_shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    # A mutation run, and one under sanitizers, bring their own.
    if given := os.environ.get("PAGEDKV_TEST_SHIM"):
        return Shim(Path(given))
    if find_compiler() is None:
        pytest.skip("needs a C++ compiler")
    path = tmp_path_factory.mktemp("shim") / "libpagedkv_cuda_shim.so"
    build(path, cache=ROOT / "build/cuda-shim")
    return Shim(path)


@pytest.fixture
def shim(built_shim: Shim) -> Shim:
    built_shim.seed(0)
    built_shim.limit_shared_memory(227 * 1024)
    return built_shim
