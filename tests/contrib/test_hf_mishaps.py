"""What goes wrong in one call leaves the next ones their tokens, and the pool its pages."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ATTENTIONS, BEST_ATTENTION, random_ids, runs, small_model
from generating import cache_name, padded, paged, plain

from pagedkv import OutOfBlocksError, StateError, UsageError
from pagedkv.contrib.hf import PagedCache, PagedSession

NUM_BLOCKS = 40


@pytest.fixture(params=ATTENTIONS, ids=str)
def cache(request: pytest.FixtureRequest) -> Iterator[PagedCache]:
    with PagedCache.for_model(small_model("llama", request.param), num_blocks=NUM_BLOCKS) as cache:
        yield cache
        assert holds_nothing(cache)


@pytest.fixture
def model() -> Any:
    return small_model("llama", None)


def holds_nothing(cache: PagedCache) -> bool:
    """Whether every page is free or may be evicted."""
    gc.collect()
    cache.pool.check_integrity()
    stats = cache.stats()
    return stats.num_free_blocks + stats.num_evictable_blocks == cache.num_blocks


def generate(cache: PagedCache, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Generate with a session that nobody else holds."""
    options = {"max_new_tokens": 8, "do_sample": False, **options}
    return cache.model.generate(ids, **{cache_name(cache): cache.session(ids)}, **options)


def run_interrupted(cache: PagedCache, session: PagedSession, ids: torch.Tensor) -> None:
    """Generate until somebody presses ctrl-C in the middle of a pass."""

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = cache.model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            cache.model.generate(ids, max_new_tokens=4, **{cache_name(cache): session})
    finally:
        hook.remove()


def test_an_interrupted_pass_is_over_when_the_model_is_called_again(cache: PagedCache, model: Any) -> None:
    ids = random_ids(40, 1)
    with cache.session(ids) as session:
        run_interrupted(cache, session, ids)
        rows, mask = padded(random_ids(40, 2, batch=2), [40, 24], "left")
        own = plain(cache.model, rows, attention_mask=mask)  # without any session, and with padding
        assert torch.equal(own, plain(model, rows, attention_mask=mask))
        again = cache.model.generate(ids, max_new_tokens=8, do_sample=False, **{cache_name(cache): session})
        assert torch.equal(again, plain(model, ids))


def test_an_interrupted_session_can_be_closed(cache: PagedCache, model: Any) -> None:
    ids = random_ids(40, 3)
    with cache.session(ids) as session:
        run_interrupted(cache, session, ids)
    assert holds_nothing(cache)
    assert cache.pool.match(ids[0].numpy()).num_tokens == 0
    assert torch.equal(paged(cache, ids)[0], plain(model, ids))


class FailThird(transformers.StoppingCriteria):
    """Lets two tokens pass."""

    calls = 0

    def __call__(self, ids: torch.Tensor, scores: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            raise LookupError("a user's own")
        return torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}])
def test_an_error_of_a_callback_leaves_no_page_behind(
    cache: PagedCache, model: Any, options: dict[str, Any]
) -> None:
    ids = random_ids(40, 4)
    with pytest.raises(LookupError, match="a user's own"):
        generate(cache, ids, stopping_criteria=[FailThird()], **options)
    assert holds_nothing(cache)
    assert torch.equal(paged(cache, ids)[0], plain(model, ids))


def test_pages_that_run_out_while_generating_are_given_back(cache: PagedCache, model: Any) -> None:
    ids = random_ids(16 * NUM_BLOCKS - 10, 5)
    with pytest.raises(OutOfBlocksError):
        generate(cache, ids, max_new_tokens=30)
    assert holds_nothing(cache)
    shorter = random_ids(30, 6)
    assert torch.equal(paged(cache, shorter)[0], plain(model, shorter))


def test_a_model_may_have_several_caches(cache: PagedCache, model: Any) -> None:
    ids = random_ids(40, 7)
    expected = plain(model, ids)
    with PagedCache.for_model(cache.model, num_blocks=NUM_BLOCKS) as other:
        found = []
        for own in (cache, other, cache, other):
            out, cached = paged(own, ids)
            assert torch.equal(out, expected)
            found += cached
        assert found == [0, 0, 32, 32]
        assert holds_nothing(other)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_that_differs_in_what_is_cached_alone_is_refused(
    side: str, cache: PagedCache, model: Any
) -> None:
    ids, mask = padded(random_ids(60, 5, batch=2), [60, 47], side)
    generate(cache, ids[:1])
    other = ids.clone()
    other[1, 16 if side == "left" else 3] ^= 1
    with cache.session(ids, attention_mask=mask) as session:
        options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
        cached = {cache_name(cache): session}
        first = cache.model.generate(ids, **options, **cached)
        assert torch.equal(first, plain(model, ids, attention_mask=mask))
        with pytest.raises(UsageError, match=r"input_ids: .* in row 1 from position 3 on"):
            cache.model.generate(other, **options, **cached)
    expected = pytest.raises(UsageError, match=r"input_ids: .* in row 1 from position 3 on")
    with cache.session(ids, attention_mask=mask) as session, expected:
        cache.model.generate(inputs=other, **options, **{cache_name(cache): session})


def test_a_mask_of_floats_is_zeros_and_ones(cache: PagedCache, model: Any) -> None:
    ids, mask = padded(random_ids(40, 7, batch=2), [40, 24], "left")
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        session = cache.session(ids, attention_mask=mask.to(dtype))
        with session:
            out = cache.model.generate(
                ids, attention_mask=mask, max_new_tokens=8, do_sample=False, **{cache_name(cache): session}
            )
        assert torch.equal(out, plain(model, ids, attention_mask=mask))
    added = (1 - mask.float()) * torch.finfo(torch.float32).min
    with pytest.raises(UsageError, match=r"zeros and ones, got -3\.4"):
        cache.session(ids, attention_mask=added)
    with pytest.raises(UsageError, match=r"attention_mask: expected zeros and ones \[batch, num_tokens\]"):
        cache.session(ids, attention_mask="none")


def test_a_cache_in_place_of_a_session_is_refused(cache: PagedCache) -> None:
    ids = random_ids(20, 6)
    for call in (cache.model.generate, cache.model):
        with pytest.raises(UsageError, match=r"expected a session, cache\.session\(input_ids\)"):
            call(ids, **{cache_name(cache): cache})


def test_a_closed_cache_leaves_the_model_as_it_was(model: Any) -> None:
    caches = [PagedCache.for_model(model, num_blocks=8) for _ in range(2)]
    for each in caches:
        assert "generate" in vars(model)
        each.close()
    assert "generate" not in vars(model)


def test_a_model_without_generate_gets_none_and_a_pickled_one_has_its_own(model: Any, tmp_path: Path) -> None:
    inner = model.model
    with PagedCache.for_model(inner, num_blocks=8):
        assert hasattr(inner, "generate") == hasattr(type(inner), "generate")
    ids = random_ids(20, 8)
    with PagedCache.for_model(model, num_blocks=8):
        torch.save(model, tmp_path / "model")
        copy = torch.load(tmp_path / "model", weights_only=False)
    assert torch.equal(plain(copy, ids), plain(model, ids))


def test_threads_may_share_a_cache(cache: PagedCache, model: Any) -> None:
    prompts = [torch.cat([random_ids(20, 8), random_ids(15, 9 + i)], 1) for i in range(4)]
    expected = [plain(model, ids) for ids in prompts]

    def work(start: int) -> list[bool]:
        places = [(start + i) % len(prompts) for i in range(8)]
        return [torch.equal(generate(cache, prompts[i]), expected[i]) for i in places]

    with ThreadPoolExecutor(3) as threads:
        assert all(all(equal) for equal in threads.map(work, range(3)))


def test_one_session_in_two_threads_is_refused(cache: PagedCache) -> None:
    ids = random_ids(40, 10)
    inside, go_on = threading.Event(), threading.Event()

    def wait(*args: Any) -> None:
        inside.set()
        go_on.wait(60)

    def feed() -> None:
        with torch.no_grad():
            cache.model(ids, **{cache_name(cache): session})

    with cache.session(ids) as session, ThreadPoolExecutor(1) as thread:
        hook = cache.model.model.layers[0].register_forward_pre_hook(wait)
        first = thread.submit(feed)
        inside.wait(60)
        hook.remove()
        with pytest.raises(StateError, match="one call at a time"):
            feed()
        go_on.set()
        first.result()
        assert session.num_computed_tokens == [40]


def without_positions(cache: PagedCache, session: PagedSession, rows: Any, mask: Any) -> torch.Tensor:
    return cache.model(rows, attention_mask=mask, **{cache_name(cache): session}).logits


def with_those_of_columns(cache: PagedCache, session: PagedSession, rows: Any, mask: Any) -> torch.Tensor:
    columns = torch.arange(rows.shape[1])[None]
    options = {"attention_mask": mask, "position_ids": columns, cache_name(cache): session}
    return cache.model(rows, **options).logits


@pytest.mark.parametrize("name", [name for name in ("llama", "gpt2", "opt") if runs(name)])
@pytest.mark.parametrize("call", [without_positions, with_those_of_columns])
def test_padding_counts_for_nothing_where_positions_are_left_out(name: str, call: Callable[..., Any]) -> None:
    """Or else what a row leaves behind could be used at no other place."""
    rows, mask = padded(random_ids(40, 11, batch=2), [40, 24], "left")
    twin = small_model(name, None)
    own = small_model(name, BEST_ATTENTION)
    with PagedCache.for_model(own, num_blocks=NUM_BLOCKS) as cache, torch.no_grad():
        with cache.session(rows, attention_mask=mask) as session:
            logits = call(cache, session, rows, mask)
        alone = rows[1:, 16:]
        torch.testing.assert_close(logits[1:, 16:], twin(alone).logits, atol=1e-4, rtol=1e-4)
        everything = {"attention_mask": torch.ones_like(alone)}
        out, found = paged(cache, alone, **everything)
        assert found == [16]
        assert torch.equal(out, plain(twin, alone, **everything))


def test_embeddings_are_refused_by_generate_too(cache: PagedCache) -> None:
    ids = random_ids(30, 12)
    embeddings = cache.model.get_input_embeddings()(ids)
    with pytest.raises(UsageError, match="expected input_ids, got embeddings"):
        generate(cache, ids, inputs_embeds=embeddings)


def test_another_kind_of_cache_besides_is_refused(cache: PagedCache) -> None:
    with pytest.raises(ValueError, match="cache_implementation"):
        generate(cache, random_ids(30, 13), cache_implementation="static")
