"""The package as a user gets it: built in isolation into an environment that has nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(*command: str | Path, cwd: Path) -> str:
    # Any PAGEDKV_* switch of the caller would change what is built.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PAGEDKV_")}
    environment["PAGEDKV_BUILD_CUDA"] = "0"  # minutes, where there is an nvcc; tests/cuda compiles it
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install from an sdist, so that a file missing in it shows, into an environment without torch."""
    folder = tmp_path_factory.mktemp("a bare environment")
    python = folder / "env/bin/python"
    venv.create(folder / "env", with_pip=True)
    build_sdist = f"import setuptools.build_meta as backend; backend.build_sdist({str(folder)!r})"
    run(sys.executable, "-c", build_sdist, cwd=ROOT)
    (sdist,) = folder.glob("pagedkv-*.tar.gz")
    run(python, "-m", "pip", "install", "--quiet", sdist, cwd=folder)
    return python


def test_the_core_works_without_torch(bare_python: Path) -> None:
    code = "import pagedkv; print(len(pagedkv.hash_blocks(range(48))), pagedkv.__file__)"
    count, _, place = run(bare_python, "-c", code, cwd=bare_python.parent).partition(" ")
    assert count == "3"
    assert str(ROOT) not in place


def test_numpy_is_the_only_dependency(bare_python: Path) -> None:
    listed = run(bare_python, "-m", "pip", "list", "--format=freeze", cwd=bare_python.parent)
    came_with_the_environment = {"pip", "setuptools", "wheel"}
    assert {line.partition("==")[0] for line in listed.split()} - came_with_the_environment == {
        "numpy",
        "pagedkv",
    }


def test_the_command_says_which_extra_is_missing(bare_python: Path) -> None:
    script = bare_python.parent / "pagedkv"
    result = subprocess.run([script, "info"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "pip install 'pagedkv[cli]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_stubs_and_the_marker_are_installed(bare_python: Path) -> None:
    code = "import pagedkv, os; print(*os.listdir(pagedkv.__path__[0]))"
    files = run(bare_python, "-c", code, cwd=bare_python.parent).split()
    assert {"py.typed", "_core.pyi"} <= set(files)
    assert sum(name.endswith(".so") for name in files) == 1
