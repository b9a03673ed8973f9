"""The mask that goes with ``attn_implementation="pagedkv"``: mostly none."""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import sdpa_mask

from pagedkv.contrib.hf.eagerly import uncompiled
from pagedkv.contrib.hf.forward import current_forward


@uncompiled
def paged_mask(
    *args: Any, allow_is_causal_skip: bool = True, use_vmap: bool = False, **kwargs: Any
) -> torch.Tensor | None:
    """Return the mask that sdpa takes, or None where pages are read, whose lengths say it all.

    A model that alters the causal pattern, as some do for images, has its pages gathered for this pass.
    """
    forward = current_forward.get()
    if forward is not None and forward.in_place:
        if allow_is_causal_skip and not use_vmap:
            return None
        forward.in_place = False
    mask: torch.Tensor | None = sdpa_mask(
        *args, allow_is_causal_skip=allow_is_causal_skip, use_vmap=use_vmap, **kwargs
    )
    return mask
