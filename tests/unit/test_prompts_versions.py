"""A prompt's version is its content, and no version is used before its KV is there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import Adapter, BlockPool, StateError, UsageError
from pagedkv.prompts import PromptVersions

OLD, NEW = list(range(50)), list(range(100, 160))


class Engine:
    """Computes prompts into a pool, as an engine would, and counts."""

    def __init__(self, pool: BlockPool, **asked: Any) -> None:
        self.pool, self.asked, self.computed = pool, asked, 0

    def __call__(self, token_ids: Any) -> None:
        with self.pool.open(token_ids, **self.asked) as seq:
            self.computed += seq.num_uncached_tokens
            self.pool.commit(self.pool.reserve(seq, seq.num_uncached_tokens))


def test_a_version_is_warmed_then_switched_to() -> None:
    pool = BlockPool(32, clock="manual")
    prompts, engine = PromptVersions(pool), Engine(pool)
    old, new = prompts.pin("agent", OLD), prompts.pin("agent", NEW)
    with pytest.raises(StateError, match="warm, got 0 of 48 tokens"):
        prompts.switch(old)
    assert prompts.warm(old, engine) == 48
    assert prompts.switch(old) is None
    assert prompts.current("agent") is old
    with pytest.raises(StateError):
        prompts.switch(new)
    assert prompts.current("agent") is old
    prompts.warm(new, engine)
    assert prompts.switch(new) is old
    assert prompts.current("agent") is new
    assert prompts.versions("agent") == [old, new]
    assert engine.computed == 110


def test_what_is_warm_is_not_computed_again() -> None:
    pool = BlockPool(32, clock="manual")
    prompts, engine = PromptVersions(pool), Engine(pool)
    version = prompts.pin("agent", OLD)
    prompts.warm(version, engine)
    assert prompts.warm(version, engine) == 0
    assert engine.computed == 50
    pool.evict(1)
    assert not prompts.is_warm(version)
    assert prompts.warm(version, engine) == 16


def test_a_warm_version_outlives_the_traffic_that_follows() -> None:
    pool = BlockPool(16, clock="manual")
    prompts, engine = PromptVersions(pool), Engine(pool)
    version = prompts.pin("agent", OLD)
    prompts.warm(version, engine, ttl_s=60)
    for n in range(20):
        engine(range(1000 * n + 1000, 1000 * n + 1100))
    assert prompts.is_warm(version)
    pool.advance(61)
    for n in range(3):
        engine(range(50_000 + 1000 * n, 50_200 + 1000 * n))
    assert not prompts.is_warm(version)


def test_a_pool_that_loses_it_at_once_is_told() -> None:
    pool = BlockPool(8, clock="manual")
    prompts = PromptVersions(pool)
    with pytest.raises(StateError, match="expected 48 cached tokens of agent"):
        prompts.warm(prompts.pin("agent", OLD), lambda token_ids: None)


def test_a_prompt_that_was_changed_by_accident_is_refused() -> None:
    prompts = PromptVersions(BlockPool(8))
    digest = prompts.pin("agent", OLD).digest
    assert prompts.pin("agent", OLD, digest=digest[:12].upper()).digest == digest
    with pytest.raises(UsageError, match="agent: expected the version"):
        prompts.pin("agent", [*OLD[:-1], 7], digest=digest)
    with pytest.raises(UsageError, match="agent: expected the version"):
        prompts.pin("agent", OLD, digest=digest[:7])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=50), st.integers(0, 49))
def test_equal_tokens_are_the_same_version_and_any_other_is_not(tokens: list[int], at: int) -> None:
    prompts = PromptVersions(BlockPool(8))
    version = prompts.pin("a", tokens)
    assert prompts.pin("a", np.array(tokens)) is version
    assert PromptVersions(BlockPool(4)).pin("b", tokens).digest == version.digest
    at %= len(tokens)
    other = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    assert prompts.pin("a", other).digest != version.digest
    assert prompts.pin("a", [*tokens, 0]).digest != version.digest


def test_what_the_kv_depends_on_enters_the_digest() -> None:
    pools = BlockPool(8), BlockPool(8, namespace=b"m")
    adapter = Adapter("lora", bytes(32))
    made = [
        PromptVersions(pools[0]),
        PromptVersions(pools[1]),
        PromptVersions(pools[0], cache_salt="t"),
        PromptVersions(pools[0], extras=[adapter]),
    ]
    assert len({prompts.pin("a", OLD).digest for prompts in made}) == 4


def test_a_tenants_prompt_is_warm_for_the_tenant() -> None:
    pool = BlockPool(32, clock="manual")
    prompts = PromptVersions(pool, cache_salt="t")
    version = prompts.pin("a", OLD)
    with pytest.raises(StateError):
        prompts.warm(version, Engine(pool))
    prompts.warm(version, Engine(pool, cache_salt="t"))
    assert prompts.is_warm(version)


@pytest.mark.parametrize(
    ("name", "tokens"), [("", OLD), (5, OLD), ("a", []), ("a", range(15)), ("a", [-1] * 20)]
)
def test_what_can_be_no_version_is_refused(name: Any, tokens: Any) -> None:
    with pytest.raises(UsageError):
        PromptVersions(BlockPool(8)).pin(name, tokens)


def test_versions_of_others_and_names_unknown_are_refused() -> None:
    pool = BlockPool(8)
    stranger = PromptVersions(pool).pin("a", OLD)
    prompts = PromptVersions(pool)
    for call in (lambda: prompts.switch(stranger), lambda: prompts.warm(stranger, print)):
        with pytest.raises(UsageError, match="pinned here"):
            call()
    with pytest.raises(UsageError, match="in use"):
        prompts.current("a")
