"""A session gives the tokens that transformers' own cache gives, in float32, whatever the architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from architectures import (
    CONFIGS,
    IN_PLACE_SINCE,
    LATER_IN_PLACE,
    MORE_CONFIGS,
    NOT_IN_PLACE,
    REFUSED_BEFORE,
    RELEASE,
    random_ids,
    runs,
    small_model,
)
from generating import padded, paged, plain
from transformers import CONFIG_MAPPING

from pagedkv import UsageError
from pagedkv.contrib.hf import PagedCache

Scenario = Callable[[Any, PagedCache], None]


def cold_and_warm(model: Any, cache: PagedCache) -> None:
    ids = random_ids(39, 1)
    expected = plain(model, ids, 12)
    for cached in (0, 38):
        out, found = paged(cache, ids, 12)
        assert torch.equal(out, expected)
        assert found == [cached]
    answer = expected[:, :-1]  # the last token never went through the model
    longer = torch.cat([answer, random_ids(9, 2)], 1)
    everything = {"attention_mask": torch.ones_like(longer)}  # which may hold the id of padding by chance
    out, found = paged(cache, longer, **everything)
    assert found == [48]
    assert torch.equal(out, plain(model, longer, **everything))


def partial_hit_inside_a_block(model: Any, cache: PagedCache) -> None:
    paged(cache, random_ids(64, 3))
    for shared in (37, 5):
        ids = torch.cat([random_ids(64, 3)[:, :shared], random_ids(20, 4 + shared)], 1)
        out, found = paged(cache, ids)
        assert found == [shared]
        assert torch.equal(out, plain(model, ids))


def beams(model: Any, cache: PagedCache) -> None:
    ids = random_ids(37, 5, batch=2)
    options = {"num_beams": 3, "num_return_sequences": 2}
    expected = plain(model, ids, **options)
    for _ in range(2):
        assert torch.equal(paged(cache, ids, **options)[0], expected)


def padded_batch(model: Any, cache: PagedCache) -> None:
    # Each begins with pages that nobody has written. On the right, a window of padding leaves no reuse.
    for side, seed, shortest in (("left", 6, 23), ("right", 60, 28)):
        ids = torch.cat([random_ids(20, seed).expand(3, -1), random_ids(30, seed + 1, batch=3)], 1)
        ids, mask = padded(ids, [50, shortest, 38], side)
        expected = plain(model, ids, attention_mask=mask)
        for _ in range(2):
            out, found = paged(cache, ids, attention_mask=mask)
            assert torch.equal(out, expected)
        assert all(found)


def eviction_between_calls(model: Any, cache: PagedCache) -> None:
    ids = random_ids(45, 8)
    expected = plain(model, ids)
    paged(cache, ids)
    cache.pool.evict(2)
    out, found = paged(cache, ids)
    assert torch.equal(out, expected)
    assert 0 < found[0] < 44
    assert cache.reset()
    assert paged(cache, ids)[1] == [0]


def two_salts(model: Any, cache: PagedCache) -> None:
    ids = random_ids(33, 9)
    expected = plain(model, ids)
    found = []
    for salt in ("one", "two", "one", None):
        out, cached = paged(cache, ids, salt=salt)
        assert torch.equal(out, expected)
        found += cached
    assert found == [0, 0, 32, 0]


SCENARIOS = (
    cold_and_warm,
    partial_hit_inside_a_block,
    beams,
    padded_batch,
    eviction_between_calls,
    two_salts,
)


def cannot_run(name: str, attention: str | None) -> str:
    """Return why the installed release can't run a model; empty where it can."""
    if name not in CONFIG_MAPPING:
        return f"this release of transformers has no {name}"
    if not runs(name):
        return f"{name} is refused in this release of transformers"
    if attention == "pagedkv" and max(LATER_IN_PLACE.get(name, RELEASE), IN_PLACE_SINCE) > RELEASE:
        return f"{name} looks up its attention in later releases"
    return ""


def cells() -> Iterator[Any]:
    """All scenarios with all attentions; what `make test` runs has each scenario of an architecture once."""
    for i, name in enumerate([*CONFIGS, *MORE_CONFIGS]):
        for j, scenario in enumerate(SCENARIOS):
            for k, attention in enumerate((None, "pagedkv", "eager")):
                if attention == "pagedkv" and name in NOT_IN_PLACE:
                    continue
                always = (name in CONFIGS) and (k == (i + j) % 2 or (k == 0 and name in NOT_IN_PLACE))
                always |= name in MORE_CONFIGS and scenario is padded_batch and attention == "pagedkv"
                marks = [] if always else [pytest.mark.slow]
                reason = cannot_run(name, attention)
                if reason:
                    marks.append(pytest.mark.skip(reason=reason))
                yield pytest.param(
                    name, scenario, attention, id=f"{name}-{scenario.__name__}-{attention}", marks=marks
                )


@pytest.mark.parametrize(("name", "scenario", "attention"), [*cells()])
def test_tokens_are_those_of_the_dynamic_cache(name: str, scenario: Scenario, attention: str | None) -> None:
    # Eager and sdpa differ where a query sees nothing: padding behind a window's last token.
    twin = small_model(name, None if attention == "pagedkv" else attention)
    with PagedCache.for_model(small_model(name, attention), num_blocks=120) as cache:
        scenario(twin, cache)


@pytest.mark.parametrize(
    "name",
    [name for name, since in REFUSED_BEFORE.items() if since > RELEASE and name in CONFIG_MAPPING],
)
def test_what_a_release_runs_with_no_cache_of_others_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"in transformers 4|expected transformers >= 4"):
        PagedCache.for_model(small_model(name), num_blocks=8)


@pytest.mark.skipif(RELEASE >= IN_PLACE_SINCE, reason="this release has what attention in place takes")
def test_attention_in_place_names_the_release_that_it_takes() -> None:
    ours, theirs = r"transformers >= 4\.53 for 'pagedkv'", "is not supported"  # 4.47 looks up nothing
    with pytest.raises(ValueError, match=ours if RELEASE >= (4, 48) else theirs):
        PagedCache.for_model(small_model("llama", "pagedkv"), num_blocks=8)
