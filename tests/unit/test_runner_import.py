"""The runner's names are there without torch; using one says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagedkv import runner


def run_without(module: str, code: str) -> str:
    """Run `code` in a process in which `module` can't be imported; return what it prints."""
    block = f"import sys; sys.modules[{module!r}] = None\n"
    command = [sys.executable, "-W", "error", "-c", block + code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_importing_the_runner_imports_no_torch() -> None:
    assert run_without("torch", "import pagedkv.runner; print('Engine' in dir(pagedkv.runner))") == "True"


@pytest.mark.parametrize(
    ("missing", "name"), [("torch", "Engine"), ("tokenizers", "Tokenizer"), ("gguf", "load_model")]
)
def test_missing_package_is_named_with_the_extra_that_brings_it(missing: str, name: str) -> None:
    for other in ("torch", "tokenizers"):  # imported before the others
        if other != missing:
            pytest.importorskip(other)
    code = f"""
import pagedkv
try:
    from pagedkv.runner import {name}
except pagedkv.BackendUnavailableError as error:
    print(error)
"""
    message = run_without(missing, code)
    assert message.startswith(f"{missing}: expected to be installed (pip install 'pagedkv[runner]'), got")


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Enginge'"):
        runner.Enginge  # noqa: B018


def test_every_public_name_has_a_module() -> None:
    pytest.importorskip("torch")
    for name in runner.__all__:
        assert getattr(runner, name).__module__.startswith("pagedkv.runner.")
