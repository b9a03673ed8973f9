"""Every environment variable that pagedkv reads, in one table.

A bad value is refused, never ignored. Nothing is read at import: a reader looks when it is called.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, NamedTuple, cast

from pagedkv.errors import UsageError

Backend = Literal["reference", "cpu", "triton", "cuda"]


class Variable(NamedTuple):
    """One environment variable: its name, what it means, what it may be and what unset stands for."""

    name: str
    meaning: str
    expected: str
    default: str
    is_build_switch: bool = False
    choices: tuple[str, ...] = ()


BACKEND = Variable(
    "PAGEDKV_BACKEND",
    "which implementation of the tensor operations to use",
    "one of reference, cpu, triton, cuda",
    "the best one for the device",
    choices=("reference", "cpu", "triton", "cuda"),
)

CPU_ISA = Variable(
    "PAGEDKV_CPU_ISA",
    "which instruction set the CPU kernels use",
    "one of portable, neon, avx2, avx512, avx512_bf16, amx",
    "the fastest that the processor has",
    choices=("portable", "neon", "avx2", "avx512", "avx512_bf16", "amx"),
)

# setup.py reads the build switches; they are listed here so that the table is whole.
VARIABLES = (
    BACKEND,
    CPU_ISA,
    Variable(
        "PAGEDKV_BUILD_CUDA",
        "whether to compile the CUDA library; 1 makes the install fail when it can't be built",
        "0 or 1",
        "1 if an nvcc is found, but a failure does not fail the install",
        is_build_switch=True,
    ),
    Variable(
        "PAGEDKV_CUDA_ARCHS",
        "GPU architectures to compile for",
        "a list such as 80,90a,100+PTX",
        "those of the visible GPUs, else 80,90+PTX",
        is_build_switch=True,
    ),
    Variable(
        "PAGEDKV_SANITIZE",
        "sanitizers to compile the core with",
        "a comma list of address, leak, thread, undefined",
        "none",
        is_build_switch=True,
    ),
    Variable(
        "PAGEDKV_DEBUG_BUILD",
        "compile the core without optimisation, with debug symbols and assertions",
        "0 or 1",
        "0",
        is_build_switch=True,
    ),
)


def read_backend(environ: Mapping[str, str] = os.environ) -> Backend | None:
    """Read PAGEDKV_BACKEND.

    Returns
    -------
    str or None
        The backend asked for; None when the variable is unset or empty.

    Raises
    ------
    UsageError
        The value is no backend's name.
    """
    return cast("Backend | None", _read_choice(BACKEND, environ))


def read_cpu_isa(environ: Mapping[str, str] = os.environ) -> str | None:
    """Read PAGEDKV_CPU_ISA.

    Returns
    -------
    str or None
        The instruction set asked for; None when the variable is unset or empty.

    Raises
    ------
    UsageError
        The value is no instruction set's name.
    """
    return _read_choice(CPU_ISA, environ)


def _read_choice(variable: Variable, environ: Mapping[str, str]) -> str | None:
    value = environ.get(variable.name, "")
    if value and value not in variable.choices:
        raise UsageError(f"{variable.name}: expected {variable.expected}, got {value!r}, in the environment")
    return value or None
