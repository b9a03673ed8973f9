"""The backend without a device: importing is harmless, using it says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda_shim import Shim
from paged_cases import Case, error, run

from pagedkv.errors import BackendUnavailableError, UsageError
from pagedkv.kernels.cuda import abi, calls
from pagedkv.kernels.cuda.library import CudaLibrary


def test_importing_the_backend_opens_nothing() -> None:
    code = (
        "import torch, pagedkv.kernels.cuda; assert not torch.cuda.is_initialized();"
        "print(any('pagedkv_cuda' in line for line in open('/proc/self/maps')))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == "False\n"


def test_an_install_without_the_library_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="install pagedkv where there is an nvcc"):
        CudaLibrary(tmp_path / "libpagedkv_cuda.so")


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    path = tmp_path / "libpagedkv_cuda.so"
    path.write_bytes(b"no library")
    with pytest.raises(BackendUnavailableError, match=r"expected libpagedkv_cuda\.so to load, got: "):
        CudaLibrary(path)


def test_a_library_of_other_structs_is_refused(shim: Shim, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(shim._functions._name)
    CudaLibrary(path)
    monkeypatch.setattr(abi, "numbers", lambda: [*_NUMBERS[:-1], _NUMBERS[-1] + 4])
    with pytest.raises(BackendUnavailableError, match="of this version, got another"):
        CudaLibrary(path)
    monkeypatch.setattr(abi, "numbers", lambda: _NUMBERS[:-1])
    with pytest.raises(BackendUnavailableError, match="of this version, got another"):
        CudaLibrary(path)


_NUMBERS = abi.numbers()


def test_a_device_of_another_age_is_refused(shim: Shim) -> None:
    assert shim.why_unavailable() is None
    try:
        shim.be_of_capability(7)
        assert shim.why_unavailable() == "no device of compute capability 8.0 or later"
    finally:
        shim.be_of_capability(9)


def test_sizes_without_a_kernel_are_refused(shim: Shim) -> None:
    query = torch.zeros(1, 1, 264)
    pages = torch.zeros(1, 16, 1, 264)
    one = torch.ones(1, dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    off = (1.0, True, 0, 0.0, None, None, None, None, None, None, None)
    with pytest.raises(UsageError, match="no kernel for these sizes, in paged_attention"):
        calls.paged_attention(
            shim, query, pages, pages, one[None] * 0, one, starts, query.clone(), None, *off
        )


def test_a_device_that_is_too_small_is_refused(shim: Shim) -> None:
    shim.limit_shared_memory(4096)
    query, pages = torch.zeros(1, 1, 64), torch.zeros(1, 16, 1, 64)
    one, starts = torch.ones(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    off = (1.0, True, 0, 0.0, None, None, None, None, None, None, None)
    with pytest.raises(UsageError, match="no kernel for these sizes"):
        calls.paged_attention(
            shim, query, pages, pages, one[None] * 0, one, starts, query.clone(), None, *off
        )


def test_scratch_memory_that_is_too_small_is_refused(shim: Shim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shim._functions, "pagedkv_cuda_copy_blocks_workspace_bytes", lambda _: 20)
    blocks, ids = torch.zeros(2, 16), torch.tensor([0])
    with pytest.raises(UsageError, match="the workspace is too small, in copy_blocks"):
        calls.copy_blocks(shim, blocks, ids, ids + 1)


def test_offsets_behind_the_tokens_touch_no_memory(shim: Shim) -> None:
    """Metadata that does not fit its batch: outputs of what fits, and nothing written elsewhere."""
    case = Case([(40, 1), (20, 20)])
    case.starts[2] = 10**6
    out, _ = run(shim, case)
    expected, _ = Case([(40, 1), (20, 20)]).expected()
    assert error(out[:1], expected[:1]) < 2e-6
