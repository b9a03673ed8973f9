from __future__ import annotations

import pytest

from pagedkv import config
from pagedkv.errors import UsageError


@pytest.mark.parametrize("name", config.BACKEND.choices)
def test_a_backend_is_read_by_its_name(name: str) -> None:
    assert config.read_backend({"PAGEDKV_BACKEND": name}) == name


@pytest.mark.parametrize("environ", [{}, {"PAGEDKV_BACKEND": ""}])
def test_an_unset_or_empty_variable_leaves_the_choice_to_us(environ: dict[str, str]) -> None:
    assert config.read_backend(environ) is None


@pytest.mark.parametrize("value", ["Reference", "cpu ", "1", "tensorrt"])
def test_a_bad_value_is_refused_by_name(value: str) -> None:
    with pytest.raises(UsageError) as caught:
        config.read_backend({"PAGEDKV_BACKEND": value})
    message = str(caught.value)
    assert "PAGEDKV_BACKEND: expected one of reference, cpu, triton, cuda" in message
    assert f"got {value!r}" in message


@pytest.mark.parametrize("name", config.CPU_ISA.choices)
def test_an_instruction_set_is_read_by_its_name(name: str) -> None:
    assert config.read_cpu_isa({"PAGEDKV_CPU_ISA": name}) == name


@pytest.mark.parametrize("value", ["AVX2", "avx-512", "avx512 ", "sse", "0"])
def test_an_unknown_instruction_set_is_refused_by_name(value: str) -> None:
    with pytest.raises(UsageError) as caught:
        config.read_cpu_isa({"PAGEDKV_CPU_ISA": value})
    message = str(caught.value)
    assert "PAGEDKV_CPU_ISA: expected one of portable, neon, avx2, avx512, avx512_bf16, amx" in message
    assert f"got {value!r}, in the environment" in message


def test_the_process_environment_is_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_BACKEND", "reference")
    assert config.read_backend() == "reference"
    monkeypatch.delenv("PAGEDKV_BACKEND")
    assert config.read_backend() is None


def test_the_table_is_complete_and_has_no_name_twice() -> None:
    names = [variable.name for variable in config.VARIABLES]
    assert len(set(names)) == len(names)
    assert all(variable.meaning and variable.expected and variable.default for variable in config.VARIABLES)
    assert config.BACKEND in config.VARIABLES
