"""Why the oracle does not have a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from pagedkv.testing.identity import ModelSequence, find
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
    usable = pool.match(token_ids, **prompt)
    run, start = usable.num_partial_tokens, len(usable.blocks) * size
    found = start + run, start
    if start + run == len(seq.tokens):
        return ModelExplanation(*found, "hit")
    if len(seq.tokens) - start < size:
        return ModelExplanation(*found, "short_tail")
    seq.generation = pool.generation
    index = {identity for identity in pool.known if pool.is_current(identity)}
    blocks, _, longest = find(index, seq)
    if start + run < len(blocks) * size + longest * pool.granular:
        return ModelExplanation(*found, "window")
    missing = seq.identity(start + size)
    if any(identity[1:] == missing[1:] for identity in pool.known):
        return ModelExplanation(*found, "generation")
    for identity, at, by in reversed(pool.history):
        if identity == missing[1:]:
            return ModelExplanation(*found, "evicted", evicted_at_s=at, evicted_by=by)
    if across_tenants and _is_elsewhere(pool, seq, len(usable.blocks)):
        return ModelExplanation(*found, "other_salt")
    here = missing[1 + start :]
    siblings = [
        i[1 + start :] for i in index if (i[: 1 + start], len(i)) == (missing[: 1 + start], len(missing))
    ]
    rivals = [block for block in siblings if block[0][1] == here[0][1] and block[:run] == here[:run]]
    if rivals:
        tokens = {block[run][0] for block in rivals}
        return ModelExplanation(
            *found, "differs", frozenset(None if t == here[run][0] else t for t in tokens)
        )
    return ModelExplanation(*found, "unknown")


def _is_elsewhere(pool: ModelPages, seq: ModelSequence, num_cached_blocks: int) -> bool:
    """Whether more blocks are there with other request-wide entries.

    At the beginning, where ours enter, or where the blocks that are shared end.
    """
    own = seq.scope
    for position in {0, num_cached_blocks * seq.block_size, *own}:
        others = {i[1 + position][1] for i in pool.known if len(i) > 1 + position} | {()}
        for scope in others:
            seq.scope = {**own, position: list(scope)}
            if len(pool._find(seq).blocks) > num_cached_blocks:
                return True
    return False
