"""Fails with the reason where the core has not been built; what needs the core is imported after this."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

if find_spec("pagedkv._core") is None:
    raise ImportError(
        f"pagedkv: expected the compiled core, got none in {Path(__file__).parent}. Is this the source, "
        "which hides the installed package because Python was started beside it? Start it elsewhere, or "
        "build the core in place: pip install -e ."
    )
