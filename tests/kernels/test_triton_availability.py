"""What is said where Triton is missing, or has nothing to run on; needs no Triton itself."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

HAS_TRITON = find_spec("triton") is not None


def run(code: str, **environ: str) -> str:
    """Run code in a Python that has not imported anything; what it says of its error, or what it prints."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TRITON_INTERPRET", "PAGEDKV_BACKEND")
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=clean | environ
    )
    return done.stdout + done.stderr.strip().rpartition("\n")[2]


def test_importing_the_package_imports_no_triton() -> None:
    code = (
        "import sys, pagedkv, pagedkv.ops, pagedkv.kernels; pagedkv.KVPages; print('triton' in sys.modules)"
    )
    assert run(code) == "False\n"


def test_without_triton_the_message_names_the_extra() -> None:
    code = "import sys; sys.modules['triton'] = None; import pagedkv.kernels as k; k.load_backend('triton')"
    said = run(code)
    assert said.startswith("pagedkv.errors.BackendUnavailableError: backend: expected triton")
    assert "pip install 'pagedkv[triton]'" in said


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: pip install 'pagedkv[triton]'")
def test_without_a_gpu_or_the_interpreter_the_reason_is_given() -> None:
    code = "from pagedkv.kernels import load_backend; load_backend('triton')"
    said = run(code, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    assert said.startswith("pagedkv.errors.BackendUnavailableError: backend: ")
    assert "torch sees no GPU, and TRITON_INTERPRET=1 was not set" in said
    assert run(code, TRITON_INTERPRET="1") == ""


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: pip install 'pagedkv[triton]'")
def test_compiled_kernels_refuse_tensors_of_the_cpu() -> None:
    code = (
        "import torch; from pagedkv.kernels import triton; x = torch.zeros(4, 8); i = torch.zeros(1).long(); "
        "triton.copy_blocks(x, i, i)"
    )
    said = run(code)
    assert said.startswith(
        "pagedkv.errors.BackendUnavailableError: backend: expected tensors on a GPU for 'triton'"
    )
