"""Beam search equals transformers', whatever becomes of the pages on the way."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import random_tokens
from toy_engine import MODEL, assert_completions, assert_idle, toy_engine

from pagedkv.errors import UsageError
from pagedkv.runner.detokenizer import TextStream
from pagedkv.runner.engine import Engine
from pagedkv.runner.loader import load_model
from pagedkv.runner.model import Model
from pagedkv.runner.sampling import SamplingParams

transformers = pytest.importorskip("transformers")

PROMPT = random_tokens(18, seed=1, vocab_size=24)
BEAMS = SamplingParams(max_tokens=10, num_beams=3, n=3)


@pytest.fixture(scope="module")
def reference() -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        eos_token_id=[7, 9],
        pad_token_id=1,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("beams")
    reference.save_pretrained(folder)
    return load_model(folder).model


def generate_beams(reference: Any, prompt: list[int], params: SamplingParams, **options: Any) -> Any:
    """Search as transformers does, and give the scores as well."""
    return reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=params.max_tokens,
        num_beams=params.num_beams,
        num_return_sequences=params.n,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_beams": 4, "n": 4},
        {"num_beams": 4, "n": 2, "length_penalty": 0.0},
        {"num_beams": 4, "n": 4, "length_penalty": 2.0},
        {"num_beams": 3, "n": 3, "length_penalty": -1.0},
        {"num_beams": 5, "n": 3, "early_stopping": True},
        {"num_beams": 4, "n": 2, "repetition_penalty": 1.5},
        {"num_beams": 4, "n": 2, "max_tokens": 1},
    ],
    ids=str,
)
def test_beams_equal_those_of_transformers(reference: Any, model: Model, options: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 14, **options})
    for seed in range(4):
        prompt = random_tokens(9 + seed, seed=seed, vocab_size=60)
        theirs = generate_beams(
            reference,
            prompt,
            params,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            repetition_penalty=params.repetition_penalty,
        )
        (ours,) = Engine(model, num_blocks=80, block_size=4).generate([prompt], params)
        scores = [each.score for each in ours.completions]
        assert scores == pytest.approx(theirs.sequences_scores.tolist(), rel=2e-6, abs=1e-4)
        for each, row in zip(ours.completions, theirs.sequences.tolist(), strict=True):
            # Equal scores may come in either order; theirs are padded behind their ends.
            size = len(prompt) + len(each.output_ids)
            is_tie = any(abs(a - b) < 1e-4 for a, b in pairwise(scores) if a is not None and b is not None)
            assert is_tie or row[:size] == prompt + each.output_ids
            assert is_tie or set(row[size:]) <= {1}
            assert each.finish_reason == ("stop" if each.output_ids[-1] in (7, 9) else "length")


class Letters:
    """A tokenizer of few letters, so that two of them often follow each other."""

    def stream(self) -> TextStream:
        return TextStream(lambda tokens: "".join("abcde"[token % 5] for token in tokens))


@pytest.mark.parametrize("stop", [("ab",), ("c", "dd"), ("be", "ea")], ids=str)
def test_beams_end_at_texts_as_in_transformers(reference: Any, model: Model, stop: tuple[str, ...]) -> None:
    params = SamplingParams(max_tokens=12, num_beams=4, n=4, stop=stop)

    def has_stopped(rows: torch.Tensor, scores: Any, size: int) -> torch.Tensor:
        texts = ["".join("abcde"[token % 5] for token in row[size:]) for row in rows.tolist()]
        return torch.tensor([any(each in text for each in stop) for text in texts])

    reasons = Counter[str]()
    for seed in range(6):
        prompt = random_tokens(9 + seed, seed=seed, vocab_size=60)
        theirs = generate_beams(
            reference,
            prompt,
            params,
            stopping_criteria=transformers.StoppingCriteriaList([partial(has_stopped, size=len(prompt))]),
        )
        engine = Engine(model, tokenizer=Letters(), num_blocks=80, block_size=4)  # type: ignore[arg-type]
        (ours,) = engine.generate([prompt], params)
        scores = [each.score for each in ours.completions]
        assert scores == pytest.approx(theirs.sequences_scores.tolist(), rel=2e-6, abs=1e-4)
        for each, row in zip(ours.completions, theirs.sequences.tolist(), strict=True):
            size = len(prompt) + len(each.output_ids)
            assert row[:size] == prompt + each.output_ids
            if isinstance(each.stop_reason, str):
                assert each.stop_reason in stop
                assert not any(text in each.text for text in stop)
            reasons.update([type(each.stop_reason).__name__])
    assert reasons["str"] > 0


def test_logprobs_of_a_beam_are_the_model_s_own() -> None:
    params = replace(BEAMS, logprobs=2, num_top_logits=1, length_penalty=0.0)
    (request,) = toy_engine().generate([PROMPT], params)
    for each in request.completions:
        assert [found.token_id for found in each.logprobs] == each.output_ids
        assert sum(found.logprob for found in each.logprobs) == pytest.approx(each.score, abs=1e-4)
        assert len(each.top_logits) == len(each.output_ids)
        for index, found in enumerate(each.logprobs):
            logits = torch.from_numpy(MODEL.expected_logits([*PROMPT, *each.output_ids[:index]]))
            best = logits.log_softmax(-1).topk(2)
            assert [logprob for _, logprob in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    penalised = replace(params, repetition_penalty=1.5)
    (request,) = toy_engine().generate([PROMPT], penalised)
    (best,) = (each for each in request.completions if each.index == 0)
    logits = torch.from_numpy(MODEL.expected_logits(PROMPT))
    assert best.logprobs[0].logprob == pytest.approx(
        float(logits.log_softmax(-1)[best.output_ids[0]]), abs=1e-4
    )


def test_beams_share_their_pages() -> None:
    engine = toy_engine()
    request = engine.submit(PROMPT, replace(BEAMS, ignore_eos=True))
    for _ in range(4):
        engine.step()
        engine.cache.check_integrity()
    stats = engine.cache.stats()
    # Four whole pages of the prompt in common, and what each beam has behind them.
    assert stats.num_committed_blocks + stats.num_writable_blocks <= 4 + 3 * 2
    assert len(request.sequences) == 3
    engine.run()
    assert_completions(request)
    assert_idle(engine)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("max_batch_tokens", [3, 64])
def test_beams_answer_alike_in_a_pool_that_just_holds_them(
    prefix_caching: bool, max_batch_tokens: int
) -> None:
    # 4 whole pages of the prompt, 3 more of each beam, one to copy from.
    options = {"prefix_caching": prefix_caching, "max_batch_tokens": max_batch_tokens}
    with pytest.raises(UsageError, match="got 14 for 18 prompt tokens and 10 new ones of 3 beams"):
        toy_engine(num_blocks=13).submit(PROMPT, BEAMS)
    engine = toy_engine(num_blocks=14, **options)
    requests = [engine.submit(PROMPT[i:], replace(BEAMS, ignore_eos=True)) for i in range(3)]
    while engine.has_work:
        engine.step()
        engine.cache.check_integrity()
    for request in requests:
        assert_completions(request)
    # Three tokens a step are one request's: the others wait.
    assert (sum(request.num_preemptions for request in requests) > 0) == (max_batch_tokens > 3)
    assert_idle(engine)


@pytest.mark.parametrize("at", range(1, 11))
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_beams_fold_and_unfold_at_any_step(at: int, prefix_caching: bool) -> None:
    engine = toy_engine(prefix_caching=prefix_caching, max_batch_tokens=7)
    request = engine.submit(PROMPT, BEAMS)
    for _ in range(at):
        engine.step()
    if engine.num_running:
        engine._scheduler.preempt(engine._scheduler.running[0])
        stats = engine.cache.stats()
        assert (stats.num_writable_blocks, stats.num_committed_blocks) == (0, 0)
    engine.run()
    assert_completions(request)
    assert_idle(engine)


def test_aborted_beams_leave_what_they_have() -> None:
    engine = toy_engine()
    request = engine.submit(PROMPT, replace(BEAMS, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.abort(request)
    assert [each.finish_reason for each in request.completions] == ["abort"] * 3
    assert [len(each.output_ids) for each in request.completions] == [3, 3, 3]
    assert_idle(engine)


def test_callback_hears_of_each_beam_at_the_end() -> None:
    heard: list[tuple[int, int]] = []
    engine = toy_engine()
    engine.generate(
        [PROMPT], BEAMS, on_token=lambda each, _: heard.append((each.index, len(each.output_ids)))
    )
    assert [index for index, _ in heard] == [0, 1, 2]


def test_more_beams_than_may_run_are_refused() -> None:
    for limit in ("max_num_seqs", "max_batch_tokens"):
        with pytest.raises(UsageError, match="num_beams: expected at most 2"):
            toy_engine(**{limit: 2}).submit(PROMPT, BEAMS)
