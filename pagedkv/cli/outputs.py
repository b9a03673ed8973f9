"""Files that a command writes, checked before there is anything to write."""

from __future__ import annotations

from pathlib import Path

from pagedkv.checks import show
from pagedkv.errors import UsageError


def check_output(option: str, path: Path | None) -> None:
    """Refuse a path that can't become a file; None is no file and passes.

    Raises
    ------
    UsageError
    """
    if path is not None and (not path.parent.is_dir() or path.is_dir()):
        raise UsageError(f"{option}: expected a file in a folder that exists, got {show(str(path))}")
