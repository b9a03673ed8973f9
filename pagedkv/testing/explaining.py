"""Why the oracle does not have a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from pagedkv.testing.identity import ModelSequence
from pagedkv.testing.pages import ModelPages


class ModelExplanation(NamedTuple):
    """The fields of `pagedkv.Explanation`; one of several tokens may be the one expected."""

    num_cached_tokens: int
    num_block_tokens: int
    reason: str
    expected_tokens: frozenset[int | None] = frozenset({None})
    evicted_at_s: float | None = None
    evicted_by: str | None = None


def explain(
    pool: ModelPages, token_ids: Iterable[int], *, across_tenants: bool = False, **prompt: Any
) -> ModelExplanation:
    """Answer as `BlockPool.explain` has to."""
    seq, size = ModelSequence(pool.block_size, token_ids, **prompt), pool.block_size
    pages, _, run = pool.match(token_ids, **prompt)
    start = len(pages) * size
    found = start + run, start
    if start + run == len(seq.tokens):
        return ModelExplanation(*found, "hit")
    if len(seq.tokens) - start < size:
        return ModelExplanation(*found, "short_tail")
    seq.generation = pool.generation
    missing = seq.identity(start + size)
    for identity, at, by in reversed(pool.history):
        if identity == missing[1:]:
            return ModelExplanation(*found, "evicted", evicted_at_s=at, evicted_by=by)
    if any(page.identity == (pool.generation - 1, *missing[1:]) for page in pool.published):
        return ModelExplanation(*found, "generation")
    siblings = [
        i[1 + start :] for i in pool.index if i[: 1 + start] == missing[: 1 + start] and i[1 + start :]
    ]
    rivals = [block[:size] for block in siblings]
    ours = missing[1 + start :]
    if across_tenants and not any(items for _, _, items in ours):
        tokens = [(token, items) for token, _, items in ours]
        if any([(token, items) for token, _, items in rival] == tokens for rival in rivals):
            return ModelExplanation(*found, "other_salt")
    rivals = [rival for rival in rivals if rival[0][1] == ours[0][1]]
    longest = [rival for rival in rivals if rival[:run] == ours[:run]]
    if rivals:
        there = {rival[run][0] for rival in longest}
        return ModelExplanation(*found, "differs", frozenset(None if t == ours[run][0] else t for t in there))
    return ModelExplanation(*found, "unknown")
