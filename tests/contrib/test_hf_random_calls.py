"""Whatever was called before, a call with a session gives what a model without any cache gives."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from architectures import (
    ATTENTIONS,
    CHUNKS_SINCE,
    IN_PLACE_SINCE,
    PAD,
    RELEASE,
    WINDOW,
    random_ids,
    runs,
    small_model,
)
from generating import cache_name, padded
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from pagedkv.contrib.hf import PagedCache

NUM_BLOCKS = 40  # few: most calls evict what others left
HEADS = [random_ids(48, seed)[0].tolist() for seed in range(3)]
LENGTH = 60
NAMES = ["llama", *(["gemma2", "gemma3_text"] if runs("gemma2") else ["mistral"])]
ODD = [name for name in ("gemma3n_text", "gemma4_text", "gpt_oss") if name in CONFIG_MAPPING and runs(name)]
"""Layers that share K and V, of two head_dims, and sinks."""
TAKE_MEANS = {"gemma2"} if RELEASE >= IN_PLACE_SINCE else {"mistral"}
"""Models with windows whose attention gives something where a query sees nothing: eager, and old sdpa."""


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a batch of prompts that share beginnings, and how to generate from it."""
    rows = draw(st.integers(1, 3))
    prompts = []
    for _ in range(rows):
        head = draw(st.sampled_from(HEADS))[: draw(st.integers(1, 48))]
        prompts.append(head + draw(st.lists(st.integers(3, 6), max_size=LENGTH - 48)))
    options: dict[str, Any] = draw(
        st.sampled_from(
            [
                {},
                {"num_beams": 2},
                {"num_beams": 3, "num_return_sequences": 2},
                {"prefill_chunk_size": 7} if RELEASE >= CHUNKS_SINCE else {},
                {"repetition_penalty": 1.3},
            ]
        )
    )
    if rows == 1 and draw(st.booleans()):
        options = {"prompt_lookup_num_tokens": 3, "eos_token_id": 2}
    return {
        "prompts": prompts,
        "side": draw(st.sampled_from(["left", "left", "right"])),
        "num_more": draw(st.sampled_from([0, 0, 0, 3, 40])),
        "salt": draw(st.sampled_from([None, None, "a"])),
        "num_new": draw(st.integers(1, 9)),
        "again": draw(st.booleans()),
        "options": options,
    }


def make_batch(prompts: list[list[int]], side: str, num_more: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad prompts, to more columns than the longest has."""
    lengths = [len(prompt) for prompt in prompts]
    width = max(lengths) + num_more
    ids = torch.tensor([prompt + [PAD] * (width - len(prompt)) for prompt in prompts])
    return padded(ids, lengths, side)


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in ODD)])
@pytest.mark.parametrize("attention", ATTENTIONS)
@given(sequence=st.lists(calls(), min_size=2, max_size=5))
@settings(max_examples=max(4, settings.default.max_examples // 20))
def test_no_sequence_of_calls_differs_from_a_fresh_model(
    name: str, attention: str | None, sequence: list[dict[str, Any]]
) -> None:
    model = small_model(name, None)
    with PagedCache.for_model(small_model(name, attention), num_blocks=NUM_BLOCKS) as cache:
        held = []  # a session that is kept while others run
        for call in sequence:
            ids, mask = make_batch(call["prompts"], call["side"], call["num_more"])
            options = {"attention_mask": mask, "max_new_tokens": call["num_new"], "do_sample": False}
            options |= call["options"]
            if name in TAKE_MEANS and num_padding(mask) >= WINDOW:
                options.pop("prefill_chunk_size", None)  # whose own cache gives other means then
            session = cache.session(ids, attention_mask=mask, salt=call["salt"])
            out = cache.model.generate(ids, **{cache_name(cache): session}, **options)
            check(model, ids, options, out)
            if call["again"] and "num_beams" not in options and call["side"] == "left":
                # One more turn in the same session.
                options.pop("prefill_chunk_size", None)
                ids = torch.cat([out, torch.full((len(out), 2), 7)], 1)
                options["attention_mask"] = torch.cat(
                    [mask, mask.new_ones(len(out), ids.shape[1] - mask.shape[1])], 1
                )
                out = cache.model.generate(ids, **{cache_name(cache): session}, **options)
                check(model, ids, options, out)
            held = [session] if len(call["prompts"]) == 1 and not held else []
            del session
            gc.collect(0)
            cache.pool.check_integrity()
        held.clear()
        assert cache.reset()


@pytest.mark.parametrize("attention", ATTENTIONS)
@given(
    batches=st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 1), st.integers(1, 48)), min_size=1, max_size=3),
            st.integers(1, 9),
            st.sampled_from([{}, {"num_beams": 2}]),
        ),
        min_size=2,
        max_size=6,
    )
)
@settings(max_examples=max(6, settings.default.max_examples // 10))
def test_what_fits_into_the_pool_cold_fits_warm(attention: str | None, batches: list[Any]) -> None:
    """With no page to spare, where reuse that ends inside a block may have to be given up."""
    model = small_model("llama", None)
    for rows, num_new, options in batches:
        beams = options.get("num_beams", 1)
        prompts = [HEADS[head][:length] for head, length in rows]
        options = {"max_new_tokens": num_new, "do_sample": False, **options}
        ids, mask = make_batch(prompts, "left")
        num_blocks = sum(-(-(length + num_new - 1) // 16) * beams for _, length in rows)
        with PagedCache.for_model(small_model("llama", attention), num_blocks=num_blocks) as cache:
            before, before_mask = make_batch([HEADS[0][: min(48, 16 * num_blocks)]], "left")
            calls = [(before, before_mask, 1)] + 2 * [(ids, mask, num_new)]
            for own, own_mask, number in calls:
                session = cache.session(own, attention_mask=own_mask)
                options |= {"attention_mask": own_mask, "max_new_tokens": number}
                out = cache.model.generate(own, **{cache_name(cache): session}, **options)
                check(model, own, options, out)
                del session
                gc.collect(0)


def num_padding(mask: torch.Tensor) -> int:
    """Return how many columns of padding stand behind a row's last token, at most."""
    return int(mask.flip(1).argmax(1).max())


def check(model: Any, ids: torch.Tensor, options: dict[str, Any], out: torch.Tensor) -> None:
    """Compare with the model alone, without what changes no token and older releases' own cache can't do."""
    plain = {k: v for k, v in options.items() if k not in ("prefill_chunk_size", "prompt_lookup_num_tokens")}
    expected = model.generate(ids, **plain)
    if "prompt_lookup_num_tokens" in options:
        out = out[:, : expected.shape[1]]  # the last guess of older releases may go beyond the end
    assert torch.equal(out, expected)
