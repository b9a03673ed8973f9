"""What a session is to transformers: a Cache. How one is made differs by release."""

from __future__ import annotations

from typing import Any

from transformers import cache_utils

from pagedkv.contrib.hf.layer import LayerKV
from pagedkv.contrib.hf.releases import CUTS_WINDOWS, HAS_LAYERS

NO_MAXIMUM = -1 if HAS_LAYERS else None
"""What a cache without a largest length says of it."""


Base: Any = cache_utils.Cache if HAS_LAYERS else cache_utils.DynamicCache
"""Before there were layers, `generate` cropped nothing else than a DynamicCache."""


class CacheWithLayers(Base):  # type: ignore[misc]
    """A Cache whose layers tell transformers whether they are sliding; all else is a session's."""

    def __init__(self, layers: list[LayerKV], num_layers: int) -> None:
        if CUTS_WINDOWS:
            super().__init__(layers=make_layers(layers, num_layers))
        elif HAS_LAYERS:
            super().__init__(layer_classes=cache_utils.DynamicLayer)
        else:
            super().__init__()
        self._num_layers = num_layers

    def __len__(self) -> int:
        """Layers of the model. A cache without any counts as none in places."""
        return self._num_layers


def make_layers(layers: list[LayerKV], num_layers: int) -> list[Any]:
    """Return one marker for each layer of a model; those that are not in `layers` keep nothing."""
    kept = {kv.layer: kv.window for kv in layers}
    none = getattr(cache_utils, "DummyLayer", cache_utils.DynamicLayer)  # older releases have no word for it
    return [
        none()
        if i not in kept
        else cache_utils.DynamicLayer()
        if (window := kept[i]) is None
        else cache_utils.DynamicSlidingWindowLayer(sliding_window=window)
        for i in range(num_layers)
    ]
