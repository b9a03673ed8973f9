"""The CPU kernels' threads: many callers, forked children, the end of the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cpu_cases import RUNNABLE_ISAS, attend, make_case, same_bits
from cpu_isas import _threads_as_before  # noqa: F401

from pagedkv import _core
from pagedkv.config import CPU_ISA
from pagedkv.errors import UsageError
from pagedkv.kernels import cpu

FOLDER = Path(__file__).parent

PREAMBLE = f"""
import os, sys, threading, torch
sys.path.insert(0, {str(FOLDER)!r})
from cpu_cases import attend, make_case, same_bits
torch.set_num_threads(3)
case = make_case([2100, 900], [40, 1], num_heads=8)
out, _ = attend(case)
"""


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + program],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def test_a_forked_child_makes_its_own_threads() -> None:
    # The child compares with numpy: torch's own threads don't survive a fork.
    done = run("""
child = os.fork()
if child == 0:
    attended = attend(case)[0].view(torch.uint8).numpy()
    os._exit(0 if (attended == out.view(torch.uint8).numpy()).all() else 7)
assert same_bits(attend(case)[0], out)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""")
    assert done.returncode == 0, done.stderr


def test_the_interpreter_ends_while_threads_compute() -> None:
    done = run("""
def compute():
    while True:
        attend(case)
for _ in range(3):
    threading.Thread(target=compute, daemon=True).start()
for _ in range(5):
    attend(case)
""")
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def test_callers_on_several_threads_get_what_one_gets() -> None:
    cases = [make_case([2100, 900], [40, 1], seed=seed, num_heads=8) for seed in range(4)]
    torch.set_num_threads(2)
    expected = [attend(case)[0] for case in cases]
    with ThreadPoolExecutor(4) as callers:
        results = list(callers.map(lambda i: attend(cases[i % 4])[0], range(40)))
    for i, out in enumerate(results):
        assert same_bits(out, expected[i % 4])


def test_flushing_subnormals_changes_no_bit() -> None:
    case = make_case([600], [30])
    case.key_pages.mul_(1e-30)
    case.value_pages.mul_(1e-38)
    expected = attend(case)
    torch.set_flush_denormal(True)
    try:
        torch.set_num_threads(1)
        got = attend(case)
    finally:
        torch.set_flush_denormal(False)
    for a, b in zip(got, expected, strict=True):
        assert same_bits(a, b)
    assert (expected[0].abs() < 1e-37).all()


def test_the_environment_chooses_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RUNNABLE_ISAS:
        monkeypatch.setenv("PAGEDKV_CPU_ISA", name)
        cpu.chosen_isa.cache_clear()
        assert cpu.isa_name() == name
    monkeypatch.setenv("PAGEDKV_CPU_ISA", "")
    cpu.chosen_isa.cache_clear()
    assert cpu.isa_name() in RUNNABLE_ISAS


@pytest.mark.parametrize("missing", [name for name, reason in _core.cpu_isas().items() if reason])
def test_an_instruction_set_that_is_not_here_is_refused(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDKV_CPU_ISA", missing)
    cpu.chosen_isa.cache_clear()
    try:
        message = f"PAGEDKV_CPU_ISA: expected one of .*portable.* got '{missing}'"
        with pytest.raises(UsageError, match=message):
            cpu.isa_name()
    finally:
        cpu.chosen_isa.cache_clear()


def test_every_instruction_set_can_be_asked_for() -> None:
    assert set(CPU_ISA.choices) == set(_core.cpu_isas())
