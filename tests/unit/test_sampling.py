"""From logits to a token: what is drawn, how often, and that nobody else's draws matter."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pagedkv.errors import UsageError  # noqa: E402
from pagedkv.runner.sampler import Sampler  # noqa: E402
from pagedkv.runner.sampling import SamplingParams  # noqa: E402

LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.05, 0.25]))


def drawn(params: SamplingParams, count: int = 2000, logits: torch.Tensor = LOGITS) -> Counter[int]:
    sampler = Sampler(params)
    return Counter(sampler(logits, index) for index in range(count))


def test_zero_temperature_takes_the_likeliest() -> None:
    assert drawn(SamplingParams(), 3) == {1: 3}


def test_draws_follow_the_probabilities() -> None:
    counts = drawn(SamplingParams(temperature=1.0, seed=1), 4000)
    for token, probability in enumerate(LOGITS.exp().tolist()):
        assert counts[token] / 4000 == pytest.approx(probability, abs=0.03)


def test_temperature_sharpens_and_flattens() -> None:
    cold = drawn(SamplingParams(temperature=0.5, seed=1))
    hot = drawn(SamplingParams(temperature=5.0, seed=1))
    squares = LOGITS.exp().square() / LOGITS.exp().square().sum()
    assert cold[1] / 2000 == pytest.approx(float(squares[1]), abs=0.04)
    assert hot[1] < 700


def test_top_k_draws_among_the_k_likeliest_only() -> None:
    assert set(drawn(SamplingParams(temperature=3.0, top_k=2, seed=1))) == {1, 4}


def test_top_k_beyond_the_vocabulary_is_all() -> None:
    assert set(drawn(SamplingParams(temperature=3.0, top_k=99, seed=1))) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, {1}), (0.39, {1}), (0.6, {1, 4}), (0.7, {1, 4, 2}), (0.999, {0, 1, 2, 3, 4})]
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: set[int]) -> None:
    assert set(drawn(SamplingParams(temperature=1.0, top_p=top_p, seed=1))) == kept


def test_top_p_counts_within_top_k() -> None:
    # Of tokens 1, 4 and 2, whose probabilities are then 0.47, 0.29 and 0.24.
    assert set(drawn(SamplingParams(temperature=1.0, top_k=3, top_p=0.7, seed=1))) == {1, 4}


def test_same_seed_draws_the_same_and_another_does_not() -> None:
    flat = torch.zeros(1000)

    def tokens(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed))
        return [sampler(flat, index) for index in range(20)]

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)


def test_draw_can_be_repeated_whatever_was_drawn_before() -> None:
    flat = torch.zeros(1000)
    sampler = Sampler(SamplingParams(temperature=1.0))
    tokens = [sampler(flat, index) for index in range(20)]
    assert [sampler(flat, index) for index in reversed(range(20))] == tokens[::-1]


def test_tokens_of_neighbouring_seeds_and_places_are_independent() -> None:
    flat = torch.zeros(1000)
    draws = Counter(
        Sampler(SamplingParams(temperature=1.0, seed=s))(flat, i) for s in range(30) for i in range(30)
    )
    # 900 draws of 1000 hit about 593 different ones.
    assert 550 < len(draws) < 640


def test_draws_do_not_touch_torch_s_own_random_numbers() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    drawn(SamplingParams(temperature=1.0, seed=1), 5)
    drawn(SamplingParams(temperature=1.0), 5)
    assert torch.equal(before, torch.random.get_rng_state())


def test_two_requests_without_a_seed_draw_differently() -> None:
    flat = torch.zeros(1 << 20)
    first, second = (Sampler(SamplingParams(temperature=1.0)) for _ in range(2))
    assert [first(flat, i) for i in range(4)] != [second(flat, i) for i in range(4)]


@pytest.mark.parametrize("temperature", [1e-45, 1e-8, 1e30])
def test_extreme_temperatures_draw_a_token(temperature: float) -> None:
    logits = torch.tensor([1.0, 3.0e4, -3.0e4, -math.inf])
    token = Sampler(SamplingParams(temperature=temperature, seed=1))(logits, 0)
    assert token == 1 if temperature < 1 else token in (0, 1, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0}, {"max_tokens": 1.5}, {"max_tokens": True},
        {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": "1"},
        {"top_k": -1}, {"top_k": 2.0}, {"num_top_logits": -1},
        {"top_p": 0.0}, {"top_p": 1.01}, {"top_p": math.nan}, {"top_p": None},
        {"seed": -1}, {"seed": 2**63}, {"seed": 1.0},
        {"stop": ""}, {"stop": ("a", "")}, {"stop": (b"a",)},
        {"stop_token_ids": (-1,)}, {"stop_token_ids": ("a",)}, {"stop_token_ids": ([1],)},
    ],
    ids=repr,
)  # fmt: skip
def test_values_without_a_meaning_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))}: expected .*, got .*, in SamplingParams$"):
        SamplingParams(**wrong)


@pytest.mark.parametrize("wrong", [{"stop": 5}, {"stop": None}, {"stop_token_ids": 5}], ids=repr)
def test_what_is_no_collection_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))}: expected a sequence, got "):
        SamplingParams(**wrong)


def test_one_stop_text_is_a_tuple_of_one() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 3])  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (("end",), {3})
