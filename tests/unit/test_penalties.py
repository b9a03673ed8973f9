"""Bias and penalties change just the logits that they name, as vLLM and transformers define them."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pagedkv.errors import UsageError  # noqa: E402
from pagedkv.runner.penalties import Penalties  # noqa: E402
from pagedkv.runner.sampler import Sampler  # noqa: E402
from pagedkv.runner.sampling import SamplingParams  # noqa: E402

LOGITS = torch.tensor([1.5, -0.5, 0.25, -2.0, 3.0, 0.0])
PROMPT, OUTPUT = [0, 1, 1], [2, 3, 3, 3]


def changed(**params: Any) -> list[float]:
    before = LOGITS.clone()
    result: list[float] = Penalties(SamplingParams(**params), PROMPT)(LOGITS, OUTPUT).tolist()
    assert torch.equal(before, LOGITS)
    return result


def test_defaults_change_nothing() -> None:
    assert changed() == LOGITS.tolist()


def test_presence_and_frequency_count_the_answer_alone() -> None:
    assert changed(presence_penalty=0.5) == [1.5, -0.5, -0.25, -2.5, 3.0, 0.0]
    assert changed(frequency_penalty=0.5) == [1.5, -0.5, -0.25, -3.5, 3.0, 0.0]
    assert changed(presence_penalty=-1.0, frequency_penalty=0.5) == [1.5, -0.5, 0.75, -2.5, 3.0, 0.0]


def test_repetition_counts_prompt_and_answer_and_lowers_either_sign() -> None:
    assert changed(repetition_penalty=2.0) == [0.75, -1.0, 0.125, -4.0, 3.0, 0.0]


def test_repetition_and_min_p_equal_those_of_transformers() -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    tokens = [3, 7, 7, 20]
    theirs = process.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([tokens]), logits[None].clone())[0]
    ours = Penalties(SamplingParams(repetition_penalty=1.3), tokens[:2])(logits, tokens[2:])
    torch.testing.assert_close(ours, theirs)
    kept = process.MinPLogitsWarper(0.2)(None, logits[None] / 0.8)[0] > -math.inf
    sampler = Sampler(SamplingParams(temperature=0.8, min_p=0.2, seed=1))
    assert {sampler(logits, index) for index in range(600)} == set(kept.nonzero()[:, 0].tolist())


def test_min_p_comes_before_top_p() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    # Of 0.5 and 0.3 alone the first reaches 0.6; of all three it would take the second as well.
    sampler = Sampler(SamplingParams(temperature=1.0, min_p=0.5, top_p=0.6, seed=1))
    assert {sampler(logits, index) for index in range(200)} == {0}


def test_bias_is_added_before_penalties_and_may_forbid() -> None:
    assert changed(logit_bias={5: 2.0, 4: -math.inf}) == [1.5, -0.5, 0.25, -2.0, -math.inf, 2.0]
    assert changed(logit_bias={0: -2.5}, repetition_penalty=2.0)[0] == -2.0
    assert changed(logit_bias={3: -math.inf}, repetition_penalty=2.0, frequency_penalty=1.0)[3] == -math.inf


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0}, {"min_p": -0.1}, {"min_p": 1.1},
        {"repetition_penalty": 0}, {"repetition_penalty": math.inf},
        {"presence_penalty": math.nan}, {"frequency_penalty": "1"}, {"length_penalty": math.inf},
        {"logit_bias": {-1: 0.0}}, {"logit_bias": {1: math.nan}}, {"logit_bias": {1: math.inf}},
        {"logit_bias": (1, 2)}, {"logit_bias": {1: "x"}}, {"logprobs": -1}, {"logprobs": True},
        {"prompt_logprobs": 1.5}, {"num_speculative_tokens": -1}, {"num_beams": 0},
        {"n": 3, "num_beams": 2}, {"temperature": 1.0, "num_beams": 2},
        {"num_speculative_tokens": 1, "num_beams": 2},
    ],
    ids=repr,
)  # fmt: skip
def test_values_without_a_meaning_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))}: expected .*, got .*, in SamplingParams$"):
        SamplingParams(**wrong)


def test_params_with_bias_can_be_compared_and_hashed() -> None:
    assert SamplingParams(logit_bias={3: 1, 1: 2}) == SamplingParams(logit_bias=((1, 2.0), (3, 1.0)))
    assert len({SamplingParams(logit_bias={3: 1}), SamplingParams(logit_bias={3: 1.0})}) == 1
