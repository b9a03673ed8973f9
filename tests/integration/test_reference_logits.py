"""The real model, through pages, computes what transformers computes from the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import all_logits

from pagedkv.runner.engine import Engine
from pagedkv.runner.loader import LoadedModel
from pagedkv.runner.sampling import SamplingParams

REFERENCE = json.loads(Path(__file__).with_name("smollm2_reference.json").read_text(encoding="utf-8"))
CASES = [pytest.param(case, id=f"prompt{i}") for i, case in enumerate(REFERENCE["results"])]


def encode(loaded: LoadedModel, prompt: str | list[dict[str, str]]) -> list[int]:
    assert loaded.tokenizer is not None
    return (
        loaded.tokenizer.encode(prompt) if isinstance(prompt, str) else loaded.tokenizer.encode_chat(prompt)
    )


@pytest.mark.parametrize("case", CASES)
def test_prompt_has_the_reference_token_ids(smollm2: LoadedModel, case: dict[str, Any]) -> None:
    assert encode(smollm2, case["prompt"]) == case["input_ids"]


@pytest.mark.parametrize("case", CASES)
def test_five_best_tokens_and_their_logits_equal_the_reference(
    smollm2: LoadedModel, case: dict[str, Any]
) -> None:
    best = all_logits(smollm2.model, case["input_ids"])[-1].topk(5)
    assert best.indices.tolist() == case["top5_ids"]
    assert best.values.tolist() == pytest.approx(case["top5_logits"], abs=2e-3)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_greedy_answers_equal_the_reference_when_all_run_together(
    smollm2: LoadedModel, prefix_caching: bool
) -> None:
    engine = Engine(*smollm2, num_blocks=64, prefix_caching=prefix_caching)
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    requests = engine.generate([case["input_ids"] for case in REFERENCE["results"]], params)
    assert [request.output_ids for request in requests] == [case["greedy32"] for case in REFERENCE["results"]]


def test_answer_ends_at_the_model_s_own_end_token(smollm2: LoadedModel) -> None:
    case = REFERENCE["results"][0]
    (request,) = Engine(*smollm2, num_blocks=64).generate([case["prompt"]], SamplingParams(max_tokens=64))
    end = case["greedy32"].index(2)
    assert request.output_ids == case["greedy32"][: end + 1]
    assert request.finish_reason == "stop"
    assert request.text == case["text"].partition("<|im_end|>")[0]


def test_stop_string_ends_the_answer_and_is_never_shown(smollm2: LoadedModel) -> None:
    case = REFERENCE["results"][1]
    shown: list[str] = []
    engine = Engine(*smollm2, num_blocks=64)
    (request,) = engine.generate(
        [case["input_ids"]],
        SamplingParams(max_tokens=32, stop="structure that"),
        on_token=lambda _, text: shown.append(text),
    )
    assert request.finish_reason == "stop"
    assert request.text == "".join(shown) == case["text"].partition("structure that")[0]
    assert len(shown) == len(request.output_ids) < 32
