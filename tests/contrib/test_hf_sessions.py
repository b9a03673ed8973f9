"""What generate can do with a cache, and what a session refuses."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import transformers
from architectures import (
    ATTENTIONS,
    CHUNKS_SINCE,
    IN_PLACE_SINCE,
    LATER_IN_PLACE,
    NOT_IN_PLACE,
    PAD,
    RELEASE,
    random_ids,
    small_model,
)
from generating import cache_name, padded, paged, plain

from pagedkv import OutOfBlocksError, StateError, UsageError
from pagedkv.contrib.hf import PagedCache


@pytest.fixture(params=ATTENTIONS, ids=str)
def cache(request: pytest.FixtureRequest) -> Any:
    with PagedCache.for_model(small_model("llama", request.param), num_blocks=120) as cache:
        yield cache
        gc.collect()
        cache.pool.check_integrity()
        assert cache.reset(), "a session was closed and its pages are still referenced"


@pytest.fixture
def model() -> Any:
    return small_model("llama", None)


def test_only_the_uncached_suffix_goes_through_the_model(cache: PagedCache) -> None:
    paged(cache, random_ids(64, 1))
    widths: list[int] = []
    count = cache.model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: widths.append(args[0].shape[1])
    )
    ids = torch.cat([random_ids(64, 1), random_ids(7, 2)], 1)
    out, _ = paged(cache, ids, 3)
    count.remove()
    assert widths == [7, 1, 1]
    assert torch.equal(out[:, :71], ids)


def test_a_conversation_may_keep_its_session(cache: PagedCache, model: Any) -> None:
    ids = random_ids(21, 3)
    name = cache_name(cache)
    with cache.session(ids) as session:
        for turn in range(4):
            mask = torch.ones_like(ids)
            options = {"max_new_tokens": 9, "do_sample": False, "attention_mask": mask}
            out = cache.model.generate(ids, **{name: session}, **options)
            assert torch.equal(out, model.generate(ids, **options))
            assert session.num_computed_tokens == [out.shape[1] - 1]
            ids = torch.cat([out, random_ids(5, 4 + turn)], 1)


def test_a_conversation_may_have_a_session_for_each_turn(cache: PagedCache, model: Any) -> None:
    ids = random_ids(21, 5)
    for turn in range(4):
        mask = torch.ones_like(ids)
        out, found = paged(cache, ids, 9, attention_mask=mask)
        assert torch.equal(out, plain(model, ids, 9, attention_mask=mask))
        assert found[0] >= (ids.shape[1] - 6) // 16 * 16 * (turn > 0)
        ids = torch.cat([out, random_ids(5, 6 + turn)], 1)


def test_samples_share_a_prompt(cache: PagedCache) -> None:
    ids = random_ids(48, 7, batch=2)
    with cache.session(ids) as session:
        out = cache.model.generate(
            ids, do_sample=True, num_return_sequences=4, max_new_tokens=6, **{cache_name(cache): session}
        )
        assert out.shape == (8, 54)
        # 2 prompts of 3 whole blocks, and a block of its own for each sample
        assert cache.pool.num_blocks - cache.stats().num_free_blocks <= 2 * 3 + 8
        gaps = [plain_logits(small_model("llama", None), row) for row in out]
    assert all(gap > 0 for gap in gaps)


def plain_logits(model: Any, ids: torch.Tensor) -> float:
    """Return the least probability that the model gives the last tokens of a text."""
    with torch.no_grad():
        probabilities = model(ids[None]).logits[0].softmax(-1)
    return probabilities[range(47, 53), ids[48:]].min().item()


@pytest.mark.skipif(RELEASE < CHUNKS_SINCE, reason="this release has no chunks, or one graph for each")
@pytest.mark.parametrize("chunk", [5, 16, 23])
def test_prefill_in_chunks(cache: PagedCache, model: Any, chunk: int) -> None:
    shared, ids = random_ids(40, 8), torch.cat([random_ids(40, 8), random_ids(31, 9)], 1)
    paged(cache, shared)
    rows, mask = padded(torch.cat([ids, random_ids(71, 10)]), [71, 44], "left")
    for batch, options in ((ids, {}), (rows, {"attention_mask": mask})):
        expected = plain(model, batch, **options)
        for _ in range(2):
            assert torch.equal(paged(cache, batch, prefill_chunk_size=chunk, **options)[0], expected)


def test_an_assistant_model_guesses(cache: PagedCache, model: Any) -> None:
    ids = torch.cat([random_ids(20, 11)] * 3, 1)
    assistant = copy.deepcopy(model)  # some releases change its generation_config
    for options in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": assistant}):
        options["eos_token_id"] = 2  # without one, some releases stumble
        expected = plain(model, ids, 20, eos_token_id=2)
        for _ in range(2):
            assert torch.equal(paged(cache, ids, 20, **options)[0], expected)


def test_rejected_guesses_are_never_published(cache: PagedCache) -> None:
    ids = random_ids(30, 12)
    with cache.session(ids) as session:
        feed(cache, session, ids)
        guesses = random_ids(30, 13)
        feed(cache, session, guesses)
        session.crop(-29)
        assert session.get_seq_length() == 31
        assert session.num_computed_tokens == [31]
    assert cache.pool.match(torch.cat([ids, guesses], 1)[0].numpy()).num_tokens == 16


def feed(cache: PagedCache, session: Any, ids: torch.Tensor) -> torch.Tensor:
    """Run columns through the model."""
    with torch.no_grad():
        return cache.model(ids, **{cache_name(cache): session}).logits


def test_tokens_stream(cache: PagedCache, model: Any) -> None:
    class Streamer(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            pass

    ids = random_ids(37, 14)
    for _ in range(2):
        streamer = Streamer()
        paged(cache, ids, streamer=streamer)
        assert streamer.tokens == plain(model, ids)[0].tolist()


def test_output_as_a_dict_and_scores(cache: PagedCache, model: Any) -> None:
    ids = random_ids(37, 15)
    options = {"return_dict_in_generate": True, "output_scores": True}
    expected = plain(model, ids, **options)
    for _ in range(2):
        out, _ = paged(cache, ids, **options)
        assert torch.equal(out.sequences, expected.sequences)
        for own, other in zip(out.scores, expected.scores, strict=True):
            torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)
        del out


def test_a_row_of_a_padded_batch_reuses_what_a_row_alone_left(cache: PagedCache, model: Any) -> None:
    alone = random_ids(50, 16)
    paged(cache, alone, 20)
    ids, mask = padded(torch.cat([random_ids(60, 17), random_ids(60, 16)]), [60, 55], "left")
    ids[1, 5:55] = alone[0]
    out, found = paged(cache, ids, attention_mask=mask)
    assert found == [0, 50]
    assert torch.equal(out, plain(model, ids, attention_mask=mask))


def test_what_stands_behind_padding_is_never_shared_at_another_place(cache: PagedCache, model: Any) -> None:
    """Most releases rotate the K of what is generated behind padding on the right for another place."""
    ids, mask = padded(random_ids(40, 18, batch=2), [40, 24], "right")
    out, _ = paged(cache, ids, 30, attention_mask=mask)
    assert cache.pool.match(out[0].numpy()).num_tokens >= 64
    text = torch.cat([ids[1, :24], out[1, 40:]])[None]
    with cache.session(text, attention_mask=torch.ones_like(text)) as session, torch.no_grad():
        past = session.get_seq_length()
        logits = cache.model(text[:, past:], **{cache_name(cache): session}).logits
        expected = model(text).logits[:, past:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_salts_of_rows_differ(cache: PagedCache) -> None:
    ids = random_ids(40, 19).expand(2, -1)
    paged(cache, ids, salt=["a", "b"])
    assert paged(cache, ids, salt=["a", "c"])[1] == [32, 0]


def test_a_session_that_nobody_holds_gives_its_pages_back(cache: PagedCache) -> None:
    ids = random_ids(40, 20)
    cache.model.generate(ids, max_new_tokens=4, **{cache_name(cache): cache.session(ids)})
    stats = cache.stats()
    assert stats.num_free_blocks + stats.num_evictable_blocks == cache.num_blocks
    assert cache.pool.match(ids[0].numpy()).num_tokens == 32


def test_a_tokenizers_result_brings_its_mask(cache: PagedCache, model: Any) -> None:
    ids, mask = padded(random_ids(40, 21, batch=2), [40, 24], "left")
    inputs = transformers.BatchEncoding({"input_ids": ids, "attention_mask": mask})
    with cache.session(inputs) as session:
        out = cache.model.generate(
            **inputs, max_new_tokens=5, do_sample=False, **{cache_name(cache): session}
        )
    assert torch.equal(out, plain(model, ids, 5, attention_mask=mask))


def test_a_prompt_too_long_for_the_pool_changes_nothing(cache: PagedCache, model: Any) -> None:
    long = random_ids(120 * 16 + 1, 22)
    with cache.session(long) as session:
        before = cache.stats()
        with pytest.raises(OutOfBlocksError):
            cache.model.generate(long, max_new_tokens=2, **{cache_name(cache): session})
        assert cache.stats() == before
    ids = random_ids(30, 23)
    assert torch.equal(paged(cache, ids)[0], plain(model, ids))


def test_a_pass_that_fails_may_be_tried_again(cache: PagedCache, model: Any) -> None:
    ids = random_ids(30, 24)
    with cache.session(ids) as session:
        feed(cache, session, ids)

        def fail(*args: Any) -> None:
            raise RuntimeError("out of memory")

        hook = cache.model.get_output_embeddings().register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            feed(cache, session, random_ids(3, 25))
        hook.remove()
        logits = feed(cache, session, random_ids(4, 26))
    with torch.no_grad():
        expected = model(torch.cat([ids, random_ids(4, 26)], 1)).logits[:, 30:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_another_prompt_than_the_sessions_is_refused(cache: PagedCache) -> None:
    with (
        cache.session(random_ids(30, 27)) as session,
        pytest.raises(UsageError, match="in row 0 from position 0"),
    ):
        cache.model.generate(random_ids(30, 28), max_new_tokens=2, **{cache_name(cache): session})


def test_the_same_prompt_again_in_one_session_is_refused(cache: PagedCache) -> None:
    ids = random_ids(30, 29)
    with cache.session(ids) as session:
        options = {"max_new_tokens": 8, cache_name(cache): session}
        cache.model.generate(ids, **options)
        # Some releases stop before they come to the model.
        with pytest.raises((UsageError, IndexError), match=r"make a session for each|out of bounds"):
            cache.model.generate(ids, **options)


def test_another_mask_than_the_sessions_is_refused(cache: PagedCache) -> None:
    ids, mask = padded(random_ids(30, 30, batch=2), [30, 20], "left")
    with (
        cache.session(ids, attention_mask=torch.ones_like(mask)) as session,
        pytest.raises(UsageError, match="attention_mask: expected the mask that the session was made with"),
    ):
        cache.model.generate(ids, attention_mask=mask, max_new_tokens=2, **{cache_name(cache): session})


def test_the_session_of_another_model_is_refused(cache: PagedCache) -> None:
    ids = random_ids(30, 31)
    with (
        PagedCache.for_model(small_model("qwen2", None), num_blocks=8) as other,
        other.session(ids) as session,
        pytest.raises(UsageError, match="another model's"),
    ):
        cache.model.generate(ids, max_new_tokens=2, **{cache_name(cache): session})


def test_a_closed_session_is_refused(cache: PagedCache) -> None:
    ids = random_ids(30, 32)
    session = cache.session(ids)
    session.close()
    with pytest.raises(StateError, match="closed"):
        cache.model.generate(ids, max_new_tokens=2, **{cache_name(cache): session})


def test_a_closed_cache_is_named() -> None:
    ids = random_ids(30, 32)
    cache = PagedCache.for_model(small_model("llama", None), num_blocks=8)
    session = cache.session(ids)
    cache.close()
    with pytest.raises(StateError, match="expected an open cache"):
        cache.session(ids)
    with pytest.raises(StateError, match="whose cache was closed"):
        cache.model.generate(ids, max_new_tokens=2, **{cache_name(cache): session})


def test_labels_are_refused(cache: PagedCache) -> None:
    ids = random_ids(30, 33)
    with cache.session(ids) as session, pytest.raises(UsageError, match="labels: expected none"):
        cache.model(ids, labels=ids, **{cache_name(cache): session})


def test_samples_with_a_seed_are_those_of_the_model(cache: PagedCache, model: Any) -> None:
    ids = random_ids(40, 61)
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 10, "temperature": 0.8}
    torch.manual_seed(5)
    expected = model.generate(ids, **options)
    for _ in range(2):
        torch.manual_seed(5)
        with cache.session(ids) as session:
            assert torch.equal(cache.model.generate(ids, **options, **{cache_name(cache): session}), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_all_rows_may_be_padded(cache: PagedCache, model: Any, side: str) -> None:
    ids, mask = padded(random_ids(40, 62, batch=2), [37, 24], side)
    for rows in (slice(0, 2), slice(0, 1)):  # and without a mask, where the padding's id says it
        for options in (
            {"attention_mask": mask[rows]},
            {},
            {"prompt_lookup_num_tokens": 4, "eos_token_id": 2},
        ):
            if "prompt_lookup_num_tokens" in options and len(ids[rows]) > 1:
                continue  # generate takes one row only
            end = {"eos_token_id": 2} if "eos_token_id" in options else {}
            expected = plain(model, ids[rows], attention_mask=mask[rows], **end)
            for _ in range(2):
                assert torch.equal(paged(cache, ids[rows], **options)[0], expected)


def test_a_mask_may_have_holes(cache: PagedCache, model: Any) -> None:
    ids = random_ids(40, 63)
    mask = torch.ones_like(ids)
    mask[0, 10:14] = 0
    expected = plain(model, ids, attention_mask=mask)
    for found in ([0], [32]):
        out, cached = paged(cache, ids, attention_mask=mask)
        assert torch.equal(out, expected)
        assert cached == found


def test_embeddings_are_refused(cache: PagedCache) -> None:
    ids = random_ids(30, 33)
    embeddings = cache.model.get_input_embeddings()(ids)
    with cache.session(ids) as session, pytest.raises(UsageError, match="expected input_ids"):
        cache.model(inputs_embeds=embeddings, **{cache_name(cache): session})


@pytest.mark.parametrize("bad", ["text", [[1, 2], [3]], torch.ones(2, 3, 4).long(), [], [1.5]], ids=repr)
def test_a_prompt_that_is_none_is_refused(cache: PagedCache, bad: Any) -> None:
    with pytest.raises(UsageError, match="input_ids: expected integers"):
        cache.session(bad)


def test_a_size_is_needed_and_one_only() -> None:
    model = small_model("llama", None)
    with pytest.raises(UsageError, match="num_blocks or memory, got neither"):
        PagedCache.for_model(model)
    with pytest.raises(UsageError, match="num_blocks or memory, got both"):
        PagedCache.for_model(model, num_blocks=1, memory=1)
    with pytest.raises(UsageError, match="at least the 6144 bytes of one block"):
        PagedCache.for_model(model, memory=6143)
    with PagedCache.for_model(model, memory="60KiB") as cache:
        assert cache.num_blocks == 10


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2), "encoder-decoder"),
        (transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, state_size=4), "keep a state"),
        (
            transformers.JambaConfig(
                vocab_size=99,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
            ),
            "keep a state",
        ),
    ],
    ids=["t5", "mamba", "jamba"],
)
def test_models_without_k_and_v_of_each_token_are_refused(config: Any, sentence: str) -> None:
    kind = (
        transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    )
    with pytest.raises(UsageError, match=sentence):
        PagedCache.for_model(kind.from_config(config), num_blocks=8)


@pytest.mark.skipif(RELEASE < IN_PLACE_SINCE, reason="in place from 4.53 on")
@pytest.mark.parametrize(
    "name", sorted(NOT_IN_PLACE) + [name for name, since in LATER_IN_PLACE.items() if since > RELEASE]
)
def test_layers_that_do_not_look_up_their_attention_are_refused_in_place(name: str) -> None:
    with pytest.raises(UsageError, match=r"leave it at its default|in transformers 4"):
        PagedCache.for_model(small_model(name, "pagedkv"), num_blocks=8)


def test_without_a_session_the_model_is_as_before(cache: PagedCache, model: Any) -> None:
    ids, mask = padded(random_ids(40, 34, batch=2), [40, 24], "left")
    before = cache.stats()
    assert torch.equal(plain(cache.model, ids, attention_mask=mask), plain(model, ids, attention_mask=mask))
    assert cache.stats() == before


def test_a_rope_that_depends_on_the_length_shares_nothing_where_it_does() -> None:
    config = transformers.LlamaConfig(
        **{**small_model("llama", None).config.to_diff_dict(), "max_position_embeddings": 40},
    )
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(small_model("llama", None).state_dict())
    model.generation_config = small_model("llama", None).generation_config
    reproducible = []
    for _ in range(2):
        model(random_ids(3, 36))
        reproducible.append(plain(model, random_ids(30, 35), 12))
    if not torch.equal(*reproducible):
        pytest.skip("in this release the model itself answers by the longest text that it has seen")
    with PagedCache.for_model(model, num_blocks=60) as cache:
        for length in (30, 36, 60, 70, 30):
            ids = random_ids(80, 35)[:, :length]
            model(random_ids(3, 36))  # the model itself remembers the longest text since a short one
            expected = plain(model, ids, 12)
            model(random_ids(3, 36))
            out, found = paged(cache, ids, 12)
            assert torch.equal(out, expected)
            assert length <= 40 or found == [0]
        assert found == [29]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by old ones
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_compiled_model_gives_the_same(attention: str | None) -> None:
    model, twin = small_model("qwen2", attention), small_model("qwen2", None)
    forward = model.forward
    model.forward = torch.compile(forward, backend="eager", dynamic=True)
    try:
        with PagedCache.for_model(model, num_blocks=60) as cache:
            ids, mask = padded(random_ids(40, 36, batch=2), [40, 24], "left")
            for batch, options in ((random_ids(40, 36), {}), (ids, {"attention_mask": mask})):
                expected = plain(twin, batch, **options)
                for _ in range(2):
                    assert torch.equal(paged(cache, batch, **options)[0], expected)
    finally:
        model.forward = forward
        torch._dynamo.reset()


def test_padding_id_is_padding(model: Any) -> None:
    assert model.generation_config.pad_token_id == PAD


def test_generating_without_a_cache_is_refused(cache: PagedCache) -> None:
    """It would give every pass the whole text. What a model's configuration leaves out may be asked for."""
    ids = random_ids(20, 60)
    with cache.session(ids) as session, pytest.raises(UsageError, match="use_cache: expected True"):
        cache.model.generate(ids, max_new_tokens=2, use_cache=False, **{cache_name(cache): session})
