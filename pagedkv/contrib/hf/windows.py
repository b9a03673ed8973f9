"""Which layers of a model have a sliding window, and which models keep something else than K and V."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicCache

from pagedkv.contrib.hf.releases import ASKS_FOR_MASKS, CUTS_WINDOWS, MASKS_SINCE, WINDOWS_SINCE
from pagedkv.contrib.hf.versions import installed
from pagedkv.errors import UsageError

Kind = tuple[str, int | None]
"""Kind and window of a layer, as in LayerKV."""


def layer_windows(model: Any) -> list[Kind]:
    """Return kind and window of each layer, as transformers' own cache would have them."""
    config, name = model.config, type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(
            f"model: expected a decoder, got {name}, an encoder-decoder: what its layers keep depends "
            "on the encoder's input and not only on the tokens, so that tokens can't find it"
        )
    if getattr(model, "_is_stateful", False):
        raise UsageError(_keeps_state(name, "recurrent layers"))
    if not getattr(model, "_supports_cache_class", True):
        raise UsageError(
            f"model: expected one that takes a Cache, got {name}, which in transformers {installed()} keeps "
            "tuples of tensors; take a later release"
        )
    text = config.get_text_config(decoder=True)
    if not ASKS_FOR_MASKS and getattr(text, "cache_implementation", None) == "hybrid":
        raise UsageError(
            f"model: expected transformers >= {MASKS_SINCE} for {name}, got {installed()}, whose masks for "
            "sliding windows fit its own HybridCache only, and not the rest of a prompt"
        )
    if not CUTS_WINDOWS and (getattr(text, "num_kv_shared_layers", 0) or 0) > 0:
        raise UsageError(
            f"model: expected transformers >= {WINDOWS_SINCE} for {name}, got {installed()}, whose layers "
            "that share K and V take them out of a cache's own tensors"
        )
    kinds: list[Kind] = [("full", None)] * text.num_hidden_layers
    if CUTS_WINDOWS:
        kinds = _kinds_of_cache(text, name)
    for i, layer_type in enumerate((getattr(text, "layer_types", None) or [])[: len(kinds)]):
        if layer_type == "chunked_attention":  # which sees a chunk, and not the last tokens
            kinds[i] = "other", kinds[i][1]
    return kinds


def narrowest_window(config: Any, windows: list[int | None]) -> int | None:
    """Return the fewest tokens that a layer sees, of those with a sliding window; None where none has one."""
    known = [window for window in windows if window is not None]
    if not CUTS_WINDOWS and (window := getattr(config, "sliding_window", None)) is not None:
        known.append(int(window))
    return min(known, default=None)


def _kinds_of_cache(config: Any, name: str) -> list[Kind]:
    kinds: list[Kind] = []
    for layer in DynamicCache(config=config).layers:
        layer_kind = type(layer).__name__
        if layer_kind == "DynamicLayer":
            kinds.append(("full", None))
        elif layer_kind == "DynamicSlidingWindowLayer":
            kinds.append(("sliding", int(layer.sliding_window)))
        elif layer_kind == "DummyLayer":
            kinds.append(("none", None))
        else:
            raise UsageError(_keeps_state(name, f"layers ({layer_kind})"))
    return kinds


def _keeps_state(name: str, what: str) -> str:
    return (
        f"model: expected layers of attention, got {name}, whose {what} keep a state and not K and V of each "
        "token: there is nothing to cut a prefix from"
    )
