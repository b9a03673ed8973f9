"""What one layer of a model keeps."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LayerKV(NamedTuple):
    """What one layer gives its cache.

    Attributes
    ----------
    layer : int
        The number that the layer gives its cache.
    num_kv_heads, key_dim, value_dim : int
    dtype : torch.dtype
    device : torch.device
    window : int or None
        Tokens that a sliding-window layer sees, its own included; None for full attention.
    kind : str
        "full", "sliding", or "other" for attention that only the model's own mask describes.
    """

    layer: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None
    kind: str
