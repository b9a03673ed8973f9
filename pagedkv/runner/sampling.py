"""How an answer is drawn and when it ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pagedkv.checks import check_bool, check_int, check_iterable, show
from pagedkv.errors import UsageError

_WHERE = ", in SamplingParams"
_MANY = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's answers are drawn and when they end. Names and meanings are vLLM's where it has them.

    Attributes
    ----------
    n : int
        How many answers: samples that share the prompt's pages, or the best of `num_beams`.
    max_tokens : int
        The answer's greatest length; clipped to what the model's context leaves.
    temperature : float
        0 takes the likeliest token; larger is more random.
    top_k : int
        Draw among so many likeliest tokens; 0 is all.
    top_p : float
        Draw among the likeliest tokens that together reach this probability; 1 is all.
    min_p : float
        Draw among tokens of at least this share of the likeliest one's probability; 0 is all. Comes after
        the temperature and before `top_k` and `top_p`.
    seed : int or None
        Makes the draws repeatable, whatever else runs in the batch. None draws a new one.
    repetition_penalty : float
        Divides positive logits of tokens that the prompt or the answer has, and multiplies negative ones; 1
        is off.
    presence_penalty : float
        Subtracted once from the logits of tokens that the answer has; 0 is off.
    frequency_penalty : float
        Subtracted from a token's logit for each time that the answer has it; 0 is off.
    logit_bias : tuple of (int, float)
        Added to the logits of these tokens, before penalties; ``-inf`` forbids one. A mapping will do.
    stop : tuple of str
        The answer ends before the first of these texts. A single str will do.
    stop_token_ids : frozenset of int
        The answer ends with any of these tokens, besides the model's own end tokens. Any iterable will do.
    ignore_eos : bool
        Go on past the model's own end tokens.
    logprobs : int or None
        Keep the log-probability of each token of the answer and of so many likeliest ones, in
        `Completion.logprobs`: the model's own, before bias, penalties and temperature. 0 keeps the token's
        alone, None nothing.
    prompt_logprobs : int or None
        The same for the tokens of the prompt, in `Request.prompt_logprobs`. Such a request computes all of
        its prompt, whatever is cached of it.
    num_top_logits : int
        How many of the best logits to keep with each token, in `Completion.top_logits`; 0 keeps none.
    num_speculative_tokens : int
        Draft up to so many tokens a step, copied from where the text so far went on from the same words, and
        verify them at once. Changes speed and nothing else; 0 is off.
    num_beams : int
        Beam search with so many beams, as in transformers; 1 is off.
    length_penalty : float
        Beams are ranked by their log-probability over their length to this power.
    early_stopping : bool
        End as soon as `num_beams` answers are complete, even if one that is not might still become better.
    """

    n: int = 1
    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_top_logits: int = 0
    num_speculative_tokens: int = 0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        """Normalise collections and refuse values without a meaning."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(check_iterable("stop", self.stop))
        if not all(isinstance(text, str) and text for text in stop):
            raise UsageError(f"stop: expected texts that are not empty, got {show(stop)}{_WHERE}")
        object.__setattr__(self, "stop", stop)
        ends = check_iterable("stop_token_ids", self.stop_token_ids)
        ends = frozenset(check_int("stop_token_ids", each, 0, 2**32 - 1, _WHERE) for each in ends)
        object.__setattr__(self, "stop_token_ids", ends)
        object.__setattr__(self, "logit_bias", _as_pairs(self.logit_bias))
        for name in ("n", "max_tokens", "num_beams"):
            check_int(name, getattr(self, name), 1, _MANY, _WHERE)
        for name in ("top_k", "num_top_logits", "num_speculative_tokens"):
            check_int(name, getattr(self, name), 0, _MANY, _WHERE)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, _MANY, _WHERE)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**63 - 1, _WHERE)
        for name in ("ignore_eos", "early_stopping"):
            check_bool(name, getattr(self, name))
        self._check_number("temperature", "0 or more", lambda x: 0 <= x < math.inf)
        self._check_number("top_p", "more than 0, at most 1", lambda x: 0 < x <= 1)
        self._check_number("min_p", "0 or more, at most 1", lambda x: 0 <= x <= 1)
        self._check_number("repetition_penalty", "more than 0", lambda x: 0 < x < math.inf)
        for name in ("presence_penalty", "frequency_penalty", "length_penalty"):
            self._check_number(name, "a finite number", math.isfinite)
        if self.num_beams > 1:
            self._check_beams()

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are chosen by other logits than the model's own."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(self.logit_bias) or penalties != (1.0, 0.0, 0.0)

    def _check_number(self, name: str, expected: str, is_right: Any) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and is_right(value)):
            raise UsageError(f"{name}: expected {expected}, got {show(value)}{_WHERE}")

    def _check_beams(self) -> None:
        """Refuse what has no meaning for beams."""
        if self.n > self.num_beams:
            raise UsageError(f"n: expected at most num_beams ({self.num_beams}), got {self.n}{_WHERE}")
        for name in ("temperature", "num_speculative_tokens"):
            if got := getattr(self, name):
                raise UsageError(f"{name}: expected 0 beside num_beams, got {show(got)}{_WHERE}")


def _as_pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    pairs: Iterable[Any] = bias.items() if isinstance(bias, Mapping) else check_iterable("logit_bias", bias)
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UsageError(f"logit_bias: expected pairs of token and bias, got {show(pair)}{_WHERE}")
        token_id, value = pair
        check_int("logit_bias", token_id, 0, 2**32 - 1, _WHERE)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and value < math.inf):  # which NaN isn't either
            raise UsageError(f"logit_bias: expected a finite number or -inf, got {show(value)}{_WHERE}")
        found[int(token_id)] = float(value)
    return tuple(sorted(found.items()))
