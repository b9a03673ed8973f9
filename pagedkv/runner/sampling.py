"""From logits to the next token."""

from __future__ import annotations

import hashlib
import math
import secrets
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedkv.checks import check_int, check_iterable, show
from pagedkv.errors import UsageError

_WHERE = ", in SamplingParams"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's answer is drawn and when it ends.

    Attributes
    ----------
    max_tokens : int
        The answer's greatest length; clipped to what the model's context leaves.
    temperature : float
        0 takes the likeliest token; larger is more random.
    top_k : int
        Draw among so many likeliest tokens; 0 is all.
    top_p : float
        Draw among the likeliest tokens that together reach this probability; 1 is all.
    seed : int or None
        Makes the draws repeatable, whatever else runs in the batch. None draws a new one.
    stop : tuple of str
        The answer ends before the first of these texts. A single str will do.
    stop_token_ids : frozenset of int
        The answer ends with any of these tokens, besides the model's own end tokens. Any iterable will do.
    ignore_eos : bool
        Go on past the model's own end tokens.
    num_top_logits : int
        How many of the best logits to keep with each token, in `Request.top_logits`; 0 keeps none.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_top_logits: int = 0

    def __post_init__(self) -> None:
        """Normalise collections and refuse values without a meaning."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(check_iterable("stop", self.stop))
        object.__setattr__(self, "stop", stop)
        ends = check_iterable("stop_token_ids", self.stop_token_ids)
        ends = frozenset(check_int("stop_token_ids", each, 0, 2**32 - 1, _WHERE) for each in ends)
        object.__setattr__(self, "stop_token_ids", ends)
        check_int("max_tokens", self.max_tokens, 1, 2**31 - 1, _WHERE)
        check_int("top_k", self.top_k, 0, 2**31 - 1, _WHERE)
        check_int("num_top_logits", self.num_top_logits, 0, 2**31 - 1, _WHERE)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**63 - 1, _WHERE)
        if not (_is_number(self.temperature) and 0 <= self.temperature < math.inf):
            raise UsageError(f"temperature: expected 0 or more, got {show(self.temperature)}{_WHERE}")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise UsageError(f"top_p: expected more than 0, at most 1, got {show(self.top_p)}{_WHERE}")
        if not all(isinstance(text, str) and text for text in stop):
            raise UsageError(f"stop: expected texts that are not empty, got {show(stop)}{_WHERE}")


class Sampler:
    """Draws one request's tokens.

    Each token has random numbers of its own, made from the seed and the token's place in the answer. So a
    draw depends neither on the batch nor on earlier draws, and repeating one gives the same token again.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._seed = secrets.randbits(63) if params.seed is None else params.seed
        self._generator = torch.Generator()

    def __call__(self, logits: Tensor, index: int) -> int:
        """Return the `index`-th token of the answer for float32 `logits` [vocab]."""
        params = self.params
        if params.temperature == 0:
            return int(logits.argmax())
        # Hashed, because generators with neighbouring seeds begin alike.
        mixed = hashlib.sha256(f"{self._seed} {index}".encode()).digest()
        self._generator.manual_seed(int.from_bytes(mixed[:8], "little") >> 1)
        # Shifted before it is divided: a tiny temperature then gives -inf, never inf - inf.
        scores = ((logits - logits.max()) / params.temperature).cpu()
        if params.top_k == 0 and params.top_p == 1:
            return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
        scores, tokens = scores.topk(min(params.top_k or len(scores), len(scores)))
        weights = scores.softmax(-1)
        # Keep tokens until top_p is reached, the one that reaches it included.
        weights[weights.cumsum(-1) - weights >= params.top_p] = 0
        return int(tokens[torch.multinomial(weights, 1, generator=self._generator)])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
