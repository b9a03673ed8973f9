"""The reference model runner: a small engine that shows how `PagedKVCache` is used.

Reading order: `engine` (one step), `scheduler` (who runs), `model` (what a model asks of the cache),
`request`, `sampling`; then `loader` and what it calls, for files and text.

Names are loaded on first use, so importing this package needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pagedkv.errors import BackendUnavailableError

if TYPE_CHECKING:
    from pagedkv.runner.config import ModelConfig
    from pagedkv.runner.engine import Engine
    from pagedkv.runner.loader import LoadedModel, load_model
    from pagedkv.runner.model import Model
    from pagedkv.runner.request import Request, RequestState
    from pagedkv.runner.sampling import SamplingParams
    from pagedkv.runner.tokenizer import Tokenizer

__all__ = [
    "Engine",
    "LoadedModel",
    "Model",
    "ModelConfig",
    "Request",
    "RequestState",
    "SamplingParams",
    "Tokenizer",
    "load_model",
]

_MODULES = {
    "Engine": "engine",
    "LoadedModel": "loader",
    "Model": "model",
    "ModelConfig": "config",
    "Request": "request",
    "RequestState": "request",
    "SamplingParams": "sampling",
    "Tokenizer": "tokenizer",
    "load_model": "loader",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("pagedkv"):
            raise
        raise BackendUnavailableError(
            f"{error.name}: expected to be installed (pip install 'pagedkv[runner]'), got no such module, "
            f"in pagedkv.runner.{name}"
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
