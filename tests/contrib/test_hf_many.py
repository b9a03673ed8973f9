"""generate_many: the answers of generate, with less to read."""

from __future__ import annotations

import pytest
import torch
from architectures import ATTENTIONS, random_ids, small_model
from generating import plain
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import UsageError
from pagedkv.contrib.hf import PagedCache, generate_many
from pagedkv.contrib.hf.many import batches


def prompts() -> list[list[int]]:
    """Return prompts that share one of two beginnings, in no order, of many lengths."""
    heads = [random_ids(50, seed)[0].tolist() for seed in (1, 2)]
    return [heads[i % 2] + random_ids(3 + 5 * (i * 7 % 11), 10 + i)[0].tolist() for i in range(11)]


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_answers_are_those_of_each_prompt_alone(batch_size: int, attention: str | None) -> None:
    model = small_model("llama", None)
    report = generate_many(
        small_model("llama", attention),
        prompts(),
        memory="1MiB",
        batch_size=batch_size,
        progress=False,
        max_new_tokens=6,
        do_sample=False,
    )
    for prompt, answer in zip(prompts(), report.answers, strict=True):
        ids = torch.tensor([prompt])
        expected = plain(model, ids, 6, attention_mask=torch.ones_like(ids))
        assert answer.token_ids == expected[0, len(prompt) :].tolist()
        assert answer.num_prompt_tokens == len(prompt)
    assert report.num_cached_tokens == sum(answer.num_cached_tokens for answer in report.answers)
    # Of the two beginnings of three blocks, all but the first reading of each.
    # Padding costs a batch some of it.
    assert report.num_cached_tokens >= (9 * 48 if batch_size == 1 else 5 * 48)
    assert report.seconds_saved > 0
    assert "prompt tokens were cached" in str(report)


def test_tokens_read_and_cached_are_all_there_are() -> None:
    """Every token of a prompt goes through the model or is counted as cached."""
    model = small_model("llama", None)
    read = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: read.append(args[0].numel())
    )
    same = [random_ids(64, 3)[0].tolist() + [5 + i] * 4 for i in range(4)]
    with PagedCache.for_model(model, num_blocks=50) as cache:
        read.clear()
        report = generate_many(model, same, cache=cache, batch_size=4, progress=False, max_new_tokens=1)
    hook.remove()
    assert sum(read) == report.num_prompt_tokens - report.num_cached_tokens == 64 + 4 * 4


def test_an_answer_ends_with_its_end_token() -> None:
    model = small_model("llama", None)
    texts = [row.tolist() for row in random_ids(20, 4, batch=3)]
    free = generate_many(model, texts, progress=False, memory="1MiB", max_new_tokens=8, do_sample=False)
    end = free.answers[0].token_ids[3]
    report = generate_many(
        model,
        texts,
        progress=False,
        memory="1MiB",
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=0,
    )
    first = free.answers[0].token_ids.index(end)
    assert report.answers[0].token_ids == free.answers[0].token_ids[: first + 1]


def test_samples_of_a_prompt_follow_each_other() -> None:
    report = generate_many(
        small_model("llama", None),
        prompts()[:3],
        progress=False,
        memory="1MiB",
        max_new_tokens=2,
        do_sample=True,
        num_return_sequences=2,
    )
    lengths = [len(prompt) for prompt in prompts()[:3] for _ in range(2)]
    assert [answer.num_prompt_tokens for answer in report.answers] == lengths


@pytest.mark.parametrize("bad", ["text", [], [[1]], [1.5], [{"role": "user", "content": "hello"}]], ids=repr)
def test_what_is_no_prompt_is_refused(bad: object) -> None:
    with pytest.raises(UsageError, match=r"prompts\[1\]: expected"):
        generate_many(small_model("llama", None), [[3, 4], bad], memory="1MiB", progress=False)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), max_size=12), st.integers(1, 5))
def test_batches_have_every_prompt_once(rows: list[list[int]], batch_size: int) -> None:
    cut = list(batches(rows, batch_size, 4))
    assert sorted(i for batch in cut for i in batch) == list(range(len(rows)))
    assert all(0 < len(batch) <= batch_size for batch in cut)
