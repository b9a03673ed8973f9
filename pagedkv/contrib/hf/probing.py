"""What a model's layers keep: asked of the model itself, which knows better than its configuration."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

from pagedkv.contrib.hf.base import CacheWithLayers
from pagedkv.contrib.hf.forward import heard_keys
from pagedkv.contrib.hf.layer import LayerKV
from pagedkv.contrib.hf.registering import NAME, not_looked_up
from pagedkv.contrib.hf.windows import layer_windows
from pagedkv.errors import UsageError

CACHE_NAMES = ("cache", "past_key_values")
"""What models call the argument, the newer name first."""


class _Listener(CacheWithLayers):
    """A cache that keeps nothing and notes what it is given."""

    def __init__(self, num_layers: int) -> None:
        super().__init__([], 0)
        self.num_layers = num_layers
        self.heard: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.heard[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        return (len(query_length) if isinstance(query_length, torch.Tensor) else query_length), 0


def probe_layers(model: Any) -> tuple[int, list[LayerKV]]:
    """Run one token through the model and return how many layers its cache has, and what each keeps.

    Layers that keep nothing, since they read the K and V of another, are not in the list.

    Raises
    ------
    UsageError
        For a model whose state is not K and V of each token: with an encoder, or recurrent, or with an index.
    """
    windows = layer_windows(model)
    heard = _run_one_token(model, len(windows))
    layers = []
    for layer, (key, value) in sorted(heard.items()):
        kind, window = windows[layer] if layer < len(windows) else ("full", None)
        _, num_kv_heads, _, key_dim = key.shape
        layers.append(
            LayerKV(layer, num_kv_heads, key_dim, value.shape[3], key.dtype, key.device, window, kind)
        )
    return max(len(windows), layers[-1].layer + 1), layers


def hands_on_keys(model: Any) -> bool:
    """Say whether every layer gives attention the K that its cache returned, as it is.

    Some keep a compressed form instead. The model's attention has to be ours.

    Raises
    ------
    UsageError
        When the model's layers don't call the attention that its configuration names.
    """
    keys: list[torch.Tensor] = []
    token = heard_keys.set(keys)
    try:
        heard = _run_one_token(model, 0)
    finally:
        heard_keys.reset(token)
    if not keys:
        raise not_looked_up(type(model).__name__)
    given = {id(key) for key in keys}
    return all(id(key) in given for key, _ in heard.values())


def _run_one_token(model: Any, num_layers: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    listener = _Listener(num_layers)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device)
    try:
        with torch.no_grad():
            model(token, use_cache=True, **{cache_argument(model): listener})
    except (AttributeError, KeyError) as error:
        # Some look for a mask that ours does without, or for their own word for each kind of attention.
        if model.config._attn_implementation != NAME or getattr(model, "_supports_attention_backend", False):
            raise
        raise not_looked_up(type(model).__name__) from error
    if not listener.heard:
        raise UsageError(
            f"model: expected one that gives its cache K and V, got {type(model).__name__}, which gave none"
        )
    return listener.heard


def takes_cache(module: Any) -> bool:
    """Whether a part of a model is a model itself, which is handed the cache."""
    parameters = signature(module.forward).parameters
    return hasattr(module, "get_input_embeddings") and any(name in parameters for name in CACHE_NAMES)


def cache_argument(model: Any) -> str:
    """Return what the model's forward calls its cache."""
    parameters = signature(model.forward).parameters
    for name in CACHE_NAMES:
        if name in parameters:
            return name
    raise UsageError(f"model: expected a decoder with a cache, got {type(model).__name__}, which takes none")
