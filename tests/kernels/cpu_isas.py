"""Runs the tests of a file once for each instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cpu_cases import RUNNABLE_ISAS

from pagedkv.kernels import cpu


@pytest.fixture(params=RUNNABLE_ISAS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDKV_CPU_ISA", request.param)
        cpu.chosen_isa.cache_clear()
        yield request.param
    cpu.chosen_isa.cache_clear()


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
