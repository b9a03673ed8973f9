"""Which releases of transformers the adapter works with."""

from __future__ import annotations

import re

from pagedkv.errors import BackendUnavailableError

OLDEST = "4.47"
NEWEST = "5.24"
"""Both ends are tested. Later ones with the same major number are let through."""


def check_transformers() -> str:
    """Return the installed version of transformers.

    Raises
    ------
    BackendUnavailableError
        When none is installed, or one outside of the range.
    """
    expected = f"transformers >= {OLDEST}, < {int(NEWEST.partition('.')[0]) + 1}"
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        message = f"pagedkv.contrib.hf: expected {expected}, got none installed; pip install 'pagedkv[hf]'"
        raise BackendUnavailableError(message) from error
    version = installed()
    if not numbers(OLDEST) <= numbers(version) < (numbers(NEWEST)[0] + 1,):
        raise BackendUnavailableError(f"pagedkv.contrib.hf: expected {expected}, got {version}")
    return version


def installed() -> str:
    """Return the installed version."""
    import transformers

    return str(transformers.__version__)


def is_at_least(version: str) -> bool:
    """Whether the installed release is this one or a later one."""
    return numbers(installed()) >= numbers(version)


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (4, 57) of "4.57.0.dev0"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
