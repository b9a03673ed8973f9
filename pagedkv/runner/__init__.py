"""The reference model runner: a small engine that shows how `PagedKVCache` is used.

Reading order: `engine` (one step), `scheduler` (who runs), `job` and `sample_job` (what runs), `model` (what
a model asks of the cache), `request`, `sampling`; then `beam_job`, `waiting` and `policies`; then `loader`
and what it calls, for files and text.

Names are loaded on first use, so importing this package needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pagedkv.errors import BackendUnavailableError

if TYPE_CHECKING:
    from pagedkv.runner.completion import Completion
    from pagedkv.runner.config import ModelConfig
    from pagedkv.runner.engine import Engine
    from pagedkv.runner.loader import LoadedModel, load_model
    from pagedkv.runner.logprobs import TokenLogprobs
    from pagedkv.runner.metrics import EngineCollector, EngineMetrics, RequestStats
    from pagedkv.runner.model import Model
    from pagedkv.runner.policies import QueuePolicy
    from pagedkv.runner.request import Request, RequestState
    from pagedkv.runner.sampling import SamplingParams
    from pagedkv.runner.streaming import TextIterator
    from pagedkv.runner.tokenizer import Tokenizer

__all__ = [
    "Completion",
    "Engine",
    "EngineCollector",
    "EngineMetrics",
    "LoadedModel",
    "Model",
    "ModelConfig",
    "QueuePolicy",
    "Request",
    "RequestState",
    "RequestStats",
    "SamplingParams",
    "TextIterator",
    "TokenLogprobs",
    "Tokenizer",
    "load_model",
]

_MODULES = {
    "Completion": "completion",
    "Engine": "engine",
    "EngineCollector": "metrics",
    "EngineMetrics": "metrics",
    "LoadedModel": "loader",
    "Model": "model",
    "ModelConfig": "config",
    "QueuePolicy": "policies",
    "Request": "request",
    "RequestState": "request",
    "RequestStats": "metrics",
    "SamplingParams": "sampling",
    "TextIterator": "streaming",
    "TokenLogprobs": "logprobs",
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
