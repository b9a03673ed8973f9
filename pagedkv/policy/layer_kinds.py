"""Which layers of a configuration look back how far; every family says it in its own way."""

from __future__ import annotations

from typing import Any

from pagedkv.checks import check_int, show
from pagedkv.errors import UsageError

Window = int | None
"""Tokens that a layer looks back: None for all, 0 for a layer that keeps no KV."""

_FULL = {"full_attention", "attention", "global", "global_attention", "hybrid"}
_SLIDING = {"sliding_attention", "sliding_window", "local", "local_attention", "chunked_attention"}
# Mamba, linear attention, convolutions: a state of fixed size in place of KV.
_NO_KV = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "mlp", "moe", "-", "rwkv", "rglru"}
_EVERY_NTH_FULL = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Families whose older configurations leave out which layers slide."""


def layer_windows(fields: dict[str, Any], num_layers: int, name: str) -> list[Window]:
    """Return each layer's window.

    Raises
    ------
    UsageError
        A kind of layer is unknown, or the list has another length than the model.
    """
    window = _window(fields, name)
    kinds = fields.get("layer_types") or fields.get("layers_block_type") or fields.get("block_types")
    if isinstance(fields.get("hybrid_override_pattern"), str):  # Nemotron-H: M mamba, * attention, - MLP
        kinds = ["attention" if mark == "*" else "mamba" for mark in fields["hybrid_override_pattern"]]
    if isinstance(kinds, list) and kinds:
        if len(kinds) < num_layers and fields.get("block_types"):
            kinds = [kinds[layer % len(kinds)] for layer in range(num_layers)]
        if len(kinds) != num_layers:
            raise UsageError(f"{name}: expected layer_types of {num_layers} layers, got {len(kinds)}")
        windows = [_of_kind(kind, window, name) for kind in kinds]
    else:
        windows = _by_rule(fields, num_layers, window)
    # Gemma 3n: the last layers read the KV of earlier ones.
    borrowing = fields.get("num_kv_shared_layers") or 0
    borrowing = check_int(f"{name}: num_kv_shared_layers", borrowing, 0, num_layers)
    return windows[: num_layers - borrowing] + [0] * borrowing


def _window(fields: dict[str, Any], name: str) -> Window:
    window = fields.get("sliding_window") or fields.get("attention_chunk_size") or fields.get("window_size")
    if window is None or window == 0 or fields.get("use_sliding_window") is False:
        return None
    if not isinstance(window, int):
        raise UsageError(f"{name}: expected an integer for sliding_window, got {show(window)}")
    return check_int(f"{name}: sliding_window", window, 1, 2**31 - 1)


def _of_kind(kind: Any, window: Window, name: str) -> Window:
    if kind in _FULL:
        return None
    if kind in _SLIDING:
        return window
    if kind in _NO_KV:
        return 0
    known = ", ".join(sorted(_FULL | _SLIDING | _NO_KV))
    raise UsageError(f"{name}: expected layer_types from {known}, got {show(kind)}")


def _by_rule(fields: dict[str, Any], num_layers: int, window: Window) -> list[Window]:
    layers = range(num_layers)
    indices = fields.get("attn_layer_indices") or fields.get("full_attn_idxs")
    if isinstance(indices, list):  # Bamba, LFM2
        return [None if layer in indices else 0 for layer in layers]
    period = fields.get("attn_layer_period")
    if isinstance(period, int) and period > 1:  # Jamba
        offset = fields.get("attn_layer_offset") or 0
        return [None if layer % period == offset else 0 for layer in layers]
    every = fields.get("full_attention_interval")
    if isinstance(every, int) and every > 1:  # Qwen3-Next
        return [None if (layer + 1) % every == 0 else 0 for layer in layers]
    if window is None:
        return [None] * num_layers
    nth = fields.get("sliding_window_pattern") or _EVERY_NTH_FULL.get(str(fields.get("model_type")))
    if isinstance(nth, int) and nth > 1:
        return [None if (layer + 1) % nth == 0 else window for layer in layers]
    if fields.get("use_sliding_window") is True:  # Qwen2: the first layers look back all the way
        first = fields.get("max_window_layers") or 0
        return [None if layer < first else window for layer in layers]
    return [window] * num_layers
