"""The build switches: read from the environment, checked, refused in one sentence."""

from __future__ import annotations

import os

SANITIZERS = ("address", "leak", "thread", "undefined")


class BuildError(SystemExit):
    """Ends the build with one sentence instead of a traceback."""


def read_flag(name: str) -> bool | None:
    """Read a switch that is 0 or 1; None when it is unset or empty."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise BuildError(f"{name}: expected 0 or 1, got {value!r}")
    return value == "1" if value else None


def read_sanitizers() -> list[str]:
    """Read PAGEDKV_SANITIZE, such as `address,undefined`; empty when it is unset."""
    text = os.environ.get("PAGEDKV_SANITIZE", "")
    names = sorted({name for name in text.replace(" ", "").split(",") if name})
    if set(names) - set(SANITIZERS) or ("thread" in names and {"address", "leak"} & set(names)):
        expected = f"a comma list of {', '.join(SANITIZERS)} (thread not with address or leak)"
        raise BuildError(f"PAGEDKV_SANITIZE: expected {expected}, got {text!r}")
    return names
