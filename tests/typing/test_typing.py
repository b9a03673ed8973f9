"""The types that users see."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed; it is in the group `lint`")
def test_the_public_names_have_the_types_of_the_examples(request: pytest.FixtureRequest) -> None:
    assert request.config.cache is not None
    # --strict also refuses an "ignore" that is not needed, so a wrong call that passes fails here.
    options = ["--strict", "--config-file", ROOT / "pyproject.toml", "--cache-dir"]
    cache = request.config.cache.mkdir("mypy")  # most of the time is torch's own types
    example = Path(__file__).with_name("examples.py")
    result = subprocess.run(
        [sys.executable, "-m", "mypy", *options, cache, example],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
