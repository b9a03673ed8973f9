"""What a cache's layers tell transformers: whether they are sliding. A session does everything else."""

from __future__ import annotations

from typing import Any

from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from pagedkv.contrib.hf.layer import LayerKV


class PagedLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of full attention."""


class PagedSlidingLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A layer with a sliding window."""


NoLayer = getattr(cache_utils, "DummyLayer", PagedLayer)
"""For a layer that keeps nothing; older releases have no word for it."""


def make_layers(layers: list[LayerKV], num_layers: int) -> list[Any]:
    """Return one marker for each layer of a model; those that are not in `layers` keep nothing."""
    kept = {kv.layer: kv.window for kv in layers}
    return [
        NoLayer()
        if i not in kept
        else PagedLayer()
        if (window := kept[i]) is None
        else PagedSlidingLayer(sliding_window=window)
        for i in range(num_layers)
    ]
