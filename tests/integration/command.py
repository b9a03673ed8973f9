"""Running the command as a user does: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

# Runs the command with some packages hidden, as if they had never been installed.
HIDE = """
import runpy, sys
from importlib.machinery import PathFinder
class Hide(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden!r} else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Hide
runpy.run_module("pagedkv", run_name="__main__", alter_sys=True)
"""


def run(
    *arguments: str, hide: tuple[str, ...] = (), timeout_s: float = 240, **environment: str
) -> subprocess.CompletedProcess[str]:
    start = ["-c", HIDE.format(hidden=hide)] if hide else ["-m", "pagedkv"]
    return subprocess.run(
        [sys.executable, *start, *arguments],
        capture_output=True,
        encoding="utf-8",
        timeout=timeout_s,
        env={**os.environ, "COLUMNS": "120", **environment},
    )


def one_sentence(result: subprocess.CompletedProcess[str]) -> str:
    """Return the message of a refused command; check that it is all that was said."""
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("pagedkv: ")
    assert result.stderr.count("\n") == 1
    return result.stderr
