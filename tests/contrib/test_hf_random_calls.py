"""Whatever was called before, a call with a session gives what a model without any cache gives."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from architectures import ATTENTIONS, CHUNKS_SINCE, PAD, RELEASE, WINDOW, random_ids, runs, small_model
from generating import cache_name, padded
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.contrib.hf import PagedCache

NUM_BLOCKS = 40  # few: most calls evict what others left
HEADS = [random_ids(48, seed)[0].tolist() for seed in range(3)]
LENGTH = 60


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a batch of prompts that share beginnings, and how to generate from it."""
    rows = draw(st.integers(1, 3))
    prompts = []
    for _ in range(rows):
        head = draw(st.sampled_from(HEADS))[: draw(st.integers(1, 48))]
        prompts.append(head + draw(st.lists(st.integers(3, 6), max_size=LENGTH - 48)))
    lengths = [len(prompt) for prompt in prompts]
    # On the right the next token is asked of the last padding, which has to see more than padding.
    sides = ["left"] if max(lengths) - min(lengths) >= WINDOW else ["left", "left", "right"]
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
        "side": draw(st.sampled_from(sides)),
        "salt": draw(st.sampled_from([None, None, "a"])),
        "num_new": draw(st.integers(1, 9)),
        "again": draw(st.booleans()),
        "options": options,
    }


def make_batch(prompts: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad prompts."""
    lengths = [len(prompt) for prompt in prompts]
    width = max(lengths)
    ids = torch.tensor([prompt + [PAD] * (width - len(prompt)) for prompt in prompts])
    return padded(ids, lengths, side)


@pytest.mark.parametrize("name", ["llama", "gemma2" if runs("gemma2") else "mistral"])
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
            ids, mask = make_batch(call["prompts"], call["side"])
            options = {"attention_mask": mask, "max_new_tokens": call["num_new"], "do_sample": False}
            options |= call["options"]
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


def check(model: Any, ids: torch.Tensor, options: dict[str, Any], out: torch.Tensor) -> None:
    """Compare with the model alone, without what changes no token and older releases' own cache can't do."""
    plain = {k: v for k, v in options.items() if k not in ("prefill_chunk_size", "prompt_lookup_num_tokens")}
    expected = model.generate(ids, **plain)
    if "prompt_lookup_num_tokens" in options:
        out = out[:, : expected.shape[1]]  # the last guess of older releases may go beyond the end
    assert torch.equal(out, expected)
