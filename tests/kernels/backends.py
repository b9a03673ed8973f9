"""The backends that tests on CPU tensors run on: every one that there is."""

from __future__ import annotations

from typing import Any

import pytest

from pagedkv.config import Backend
from pagedkv.ops import why_unavailable


def _param(name: Backend, *marks: Any) -> Any:
    reason = why_unavailable(name)
    return pytest.param(name, marks=[*marks, pytest.mark.skipif(reason is not None, reason=str(reason))])


EXACT = [_param("reference"), _param("cpu")]
"""Quick ones, which also check the values in tables."""
# Triton's interpreter takes seconds where the others take milliseconds.
ALL = [*EXACT, _param("triton", pytest.mark.slow)]

on_every_backend = pytest.mark.parametrize("backend", ALL)
