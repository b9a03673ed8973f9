"""Every kernel compiled for GPUs that are not here: registers, spills, shared memory and instructions.

This says what the compiler made, not how fast it is.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'pagedkv[triton]'")
from pagedkv.kernels import triton as backend
from pagedkv.kernels.triton.tuning import TABLE

SCRIPT = Path(__file__).parent / "triton_compiling.py"
SHARED_BYTES = {
    "sm80": 101376,
    "sm90": 232448,
    "sm100": 232448,
    "gfx942": 65536,
}  # of sm86, which sm80 stands for
TARGETS = tuple(SHARED_BYTES)


def compile_cases(*cases: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Compile in a process of its own, since Triton may interpret here; return kernels and errors."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    arguments = [sys.executable, str(SCRIPT), *map(json.dumps, cases)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environ)
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@cache
def compile_all(target: str) -> tuple[list[dict[str, Any]], str]:
    """Compile every slow case of a target one after the other; Triton takes seconds to load."""
    return compile_cases(*(case for case in slow_cases() if case["target"] == target))


def made_of(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the kernels of a slow case."""
    made, errors = compile_all(case["target"])
    found = [each for each in made if each["case"] == case]
    assert found, errors  # the first case that fails ends the process
    return found


def check_attention(made: dict[str, Any]) -> None:
    """Hold one attention kernel to its bounds."""
    target, is_float32 = made["target"], made["dtype"] == "float32"
    assert made["shared"] <= SHARED_BYTES[target]
    if target == "gfx942":
        assert made["mfma"] > 0
        assert made["stack"] == made["vgpr_spill_count"] == 0
        assert made["registers"] <= 512
        return
    # Both accumulators of `attend`, the split's and the answer's, do not fit into registers at once: the one
    # that rests is spilled, once in 512 keys. Between the keys of a split nothing is.
    # float32, each product of it three of tf32, is the exception.
    assert made["spills_in_key_loop"] <= (48 if is_float32 else 0)
    assert made["stack"] <= (640 if is_float32 or made["kernel"] == "attend" else 320)
    assert made["async_copies"] > 0
    native = {"sm80": "mma", "sm90": "wgmma", "sm100": "tcgen05"}[target]
    assert made["mma" if is_float32 and made["BLOCK_M"] < 64 else native] > 0


def check_small(made: dict[str, Any]) -> None:
    """Hold a kernel without products to its bounds."""
    assert made["stack"] == 0
    assert made["shared"] <= SHARED_BYTES[made["target"]]
    assert made["registers"] <= (512 if made["target"] == "gfx942" else 255)


@pytest.mark.parametrize("target", TARGETS)
def test_attention_in_bfloat16_uses_the_tensor_cores_and_spills_nothing_per_key(target: str) -> None:
    found, errors = compile_cases({"target": target, "dtype": "bfloat16", "head_dim": 128})
    assert [made["kernel"] for made in found] == ["compute_states", "attend"], errors
    for made in found:
        check_attention(made)


def slow_cases() -> list[dict[str, Any]]:
    return [*table_cases(), *({"target": target, "others": True} for target in TARGETS)]


def table_cases() -> list[dict[str, Any]]:
    """One case for every row of the table, and for every kind of page and option that has code of its own."""
    names = {"sm80": "sm80", "sm90": "sm90", "sm100": "sm100", "gfx": "gfx942"}
    cases = []
    for row in TABLE:
        if row.family in names:
            case = {"target": names[row.family], "head_dim": row.max_head_dim}
            case["dtype"] = {1: "float16", 2: "bfloat16", 4: "float32"}[row.element_bytes]
            if row.element_bytes == 1:
                case |= {"page_dtype": "float8_e4m3fn", "head_dim": 128}
            cases.append(case)
    for target in TARGETS:
        cases.append({"target": target, "dtype": "bfloat16", "page_dtype": "int8"})
        cases.append({"target": target, "dtype": "bfloat16", "head_dim": 80, "block_size": 48})
        cases.append({"target": target, "dtype": "float16", "head_dim": 64, "plain": False, "grouped": True})
    cases.append({"target": "sm90", "dtype": "bfloat16", "page_dtype": "float8_e4m3fn"})
    return cases


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", table_cases(), ids=lambda case: "-".join(map(str, case.values())))
def test_every_row_of_the_table_keeps_its_bounds(case: dict[str, Any]) -> None:
    found = made_of(case)
    names = [made["kernel"] for made in found]
    assert names == ["mark_grouped_splits"] * case.get("grouped", False) + ["compute_states", "attend"]
    for made in found:
        check_small(made) if made["kernel"] == "mark_grouped_splits" else check_attention(made)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
def test_the_other_kernels_compile_and_spill_nothing(target: str) -> None:
    found = made_of({"target": target, "others": True})
    assert {made["kernel"] for made in found} == {"move_blocks", "merge_states", "write_tokens"}
    for made in found:
        check_small(made)


def test_every_kernel_that_is_launched_is_compiled_here() -> None:
    folder = Path(backend.__file__).parent
    launched = {
        name
        for path in folder.glob("*.py")
        for name in re.findall(r"Launch\((?:kernels\.)?(\w+),", path.read_text())
    }
    assert launched == {
        *("mark_grouped_splits", "compute_states", "attend"),
        *("move_blocks", "merge_states", "write_tokens"),
    }
