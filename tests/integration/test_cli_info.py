"""`pagedkv info`, and what holds for every command."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
from command import one_sentence, run

import pagedkv


def test_info_json_tells_what_a_bug_report_needs() -> None:
    result = run("info", "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    facts = json.loads(result.stdout)
    assert facts["pagedkv"] == pagedkv.__version__
    assert facts["python"] == platform.python_version()
    assert facts["packages"]["numpy"] is not None
    assert facts["sha256"]["in_use"] not in facts["sha256"]["not_available"]
    assert facts["backends"]["reference"] is None
    assert all(reason is None or reason for reason in facts["backends"].values())


def test_info_shows_a_table_with_the_same_facts() -> None:
    result = run("info")
    assert result.returncode == 0, result.stderr
    for word in (pagedkv.__version__, platform.python_version(), "numpy", "SHA-256", "backend reference"):
        assert word in result.stdout


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs /proc/cpuinfo to compare with")
def test_the_sha256_path_in_use_agrees_with_the_processor() -> None:
    facts = json.loads(run("info", "--json").stdout)
    has_sha = bool({"sha_ni", "sha2"}.intersection(facts["cpu"]["features"]))
    assert (facts["sha256"]["in_use"] != "portable") == has_sha


def test_without_torch_info_still_answers_and_names_the_extra() -> None:
    result = run("info", "--json", hide=("torch",))
    assert result.returncode == 0, result.stderr
    assert "pip install 'pagedkv[torch]'" in json.loads(result.stdout)["backends"]["reference"]


@pytest.mark.parametrize("package", ["typer", "rich"])
@pytest.mark.parametrize("arguments", [(), ("info",), ("--help",)])
def test_without_the_cli_extra_one_sentence_names_it(package: str, arguments: tuple[str, ...]) -> None:
    message = one_sentence(run(*arguments, hide=(package,)))
    assert "pip install 'pagedkv[cli]'" in message


def test_a_bad_variable_is_one_sentence_and_no_traceback() -> None:
    message = one_sentence(run("info", PAGEDKV_BACKEND="tensorrt"))
    assert "PAGEDKV_BACKEND: expected one of reference, cpu, triton, cuda, got 'tensorrt'" in message


def test_version_and_help_answer() -> None:
    assert run("--version").stdout == f"pagedkv {pagedkv.__version__}\n"
    for arguments in ((), ("--help",), ("-h",)):
        result = run(*arguments)
        assert "info" in result.stdout + result.stderr
        assert "Traceback" not in result.stderr
    assert "--json" in run("info", "--help").stdout


def test_an_unknown_command_is_refused_with_exit_code_2() -> None:
    result = run("fly")
    assert result.returncode == 2
    assert "fly" in result.stderr
    assert "Traceback" not in result.stderr
