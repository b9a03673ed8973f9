"""What the installed release of transformers has; everything that differs between releases asks here."""

from __future__ import annotations

from pagedkv.contrib.hf.versions import is_at_least

MASKS_SINCE = "4.53"
ASKS_FOR_MASKS = is_at_least(MASKS_SINCE)
"""Attention and masks are looked up by name, and masks ask a cache how much K there is.

Before, each model made its own, in shapes that it knew from caches of transformers.
"""
HAS_LAYERS = is_at_least("4.54")
"""A cache is a list of layers."""
WINDOWS_SINCE = "4.56"
CUTS_WINDOWS = is_at_least(WINDOWS_SINCE)
"""Layers with a sliding window are handed the K and V of that window; before, those of all columns.

What shares the K and V of another layer is handed them; before, it took them out of the cache's own tensors.
"""
