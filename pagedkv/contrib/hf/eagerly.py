"""What torch.compile leaves alone: a session's bookkeeping, which is Python, and what it calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import torch
from torch.compiler import is_compiling

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function as one that a compiled graph calls and does not contain.

    Where nothing is compiled it is called as it is: torch's own mark takes longer than some of these run.
    """
    marked = cast("Callable[P, R]", torch.compiler.disable(function))  # type: ignore[no-untyped-call]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return marked(*args, **kwargs) if is_compiling() else function(*args, **kwargs)

    return call
