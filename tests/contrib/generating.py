"""generate with a session and without, on the same model or its twin."""

from __future__ import annotations

from typing import Any

import torch
from architectures import PAD

from pagedkv.contrib.hf import PagedCache


def plain(model: Any, ids: torch.Tensor, num_new: int = 8, **options: Any) -> torch.Tensor:
    """Generate with transformers' own cache."""
    return model.generate(ids, max_new_tokens=num_new, do_sample=False, **options)


def paged(
    cache: PagedCache, ids: torch.Tensor, num_new: int = 8, **options: Any
) -> tuple[torch.Tensor, list[int]]:
    """Generate with a session; return the ids, and how many tokens of each row were cached."""
    salt = options.pop("salt", None)
    with cache.session(ids, attention_mask=options.get("attention_mask"), salt=salt) as session:
        out = cache.model.generate(
            ids, max_new_tokens=num_new, do_sample=False, **{cache_name(cache): session}, **options
        )
        cached = session.num_cached_tokens
    cache.pool.check_integrity()
    return out, cached


def cache_name(cache: PagedCache) -> str:
    """Return what the installed release calls generate's argument."""
    from pagedkv.contrib.hf.probing import cache_argument

    return cache_argument(cache.model)


def padded(ids: torch.Tensor, lengths: list[int], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first `lengths` ids of each row, padded on one side, and the mask."""
    out, mask = torch.full_like(ids, PAD), torch.zeros_like(ids)
    width = ids.shape[1]
    for row, length in enumerate(lengths):
        place = slice(width - length, width) if side == "left" else slice(0, length)
        out[row, place], mask[row, place] = ids[row, :length], 1
    return out, mask
