"""What torch.compile leaves alone: a session's bookkeeping, which is Python, and what it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function as one that a compiled graph calls and does not contain."""
    return cast("Callable[P, R]", torch.compiler.disable(function))  # type: ignore[no-untyped-call]
