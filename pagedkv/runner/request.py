"""One request: what was asked, how far it is, what came out and how long it took."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

from pagedkv.runner.detokenizer import TextStream
from pagedkv.runner.sampling import Sampler, SamplingParams
from pagedkv.runner.stop_strings import StopStrings
from pagedkv.sequence import Sequence


class RequestState(enum.Enum):
    """Where a request is. Only a running one holds pages."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Draw(NamedTuple):
    """A sampled token, with the best logits if the params ask for any."""

    token_id: int
    top_logits: list[tuple[int, float]]


@dataclass(eq=False, kw_only=True)
class Request:
    """A prompt on its way to an answer. Made by `Engine.submit`; read it, change nothing.

    Attributes
    ----------
    prompt_ids : list of int
        The prompt's tokens.
    params : SamplingParams
        As asked, with `max_tokens` clipped to what the model's context leaves.
    cache_salt, extras
        What separates this request's cached blocks from those of others.
    on_token : callable or None
        Called after each token with (request, the text that became certain, often empty).
    sequence : pagedkv.Sequence or None
        The cache's side of the request, from its first admission to its end.
    output_ids : list of int
        Tokens so far, with the token that ended the answer.
    top_logits : list of list of (int, float)
        For each of `output_ids` the best tokens with their logits, best first, if the params ask for any.
    text : str
        Text so far, without end tokens and stop strings.
    finish_reason : {"stop", "length", "abort"} or None
        None while it isn't finished.
    num_cached_tokens : int
        Prompt tokens that were not computed because the cache had them.
    num_preemptions : int
        How often it gave up its pages for older requests.
    submitted_s, scheduled_s, first_token_s, finished_s : float or None
        Moments on the clock of `time.perf_counter`; None when not reached.
    """

    # What may be long is left out of the repr.
    prompt_ids: list[int] = field(repr=False)
    params: SamplingParams
    end_tokens: frozenset[int]
    submitted_s: float
    cache_salt: str | bytes | None = None
    extras: tuple[Any, ...] = field(default=(), repr=False)
    on_token: Callable[[Request, str], None] | None = field(default=None, repr=False)
    stream: TextStream | None = field(default=None, repr=False)

    state: RequestState = RequestState.WAITING
    sequence: Sequence | None = None
    output_ids: list[int] = field(default_factory=list, repr=False)
    top_logits: list[list[tuple[int, float]]] = field(default_factory=list, repr=False)
    text: str = field(default="", repr=False)
    finish_reason: Literal["stop", "length", "abort"] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    def __post_init__(self) -> None:
        """Set up what carries state from token to token."""
        self._sampler = Sampler(self.params)
        self._stops = StopStrings(self.params.stop)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete or was aborted."""
        return self.state is RequestState.FINISHED

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from submission to the first token, waiting included."""
        return None if self.first_token_s is None else self.first_token_s - self.submitted_s

    @property
    def prefill_s(self) -> float | None:
        """Seconds from the first scheduled step to the first token."""
        if self.first_token_s is None or self.scheduled_s is None:
            return None
        return self.first_token_s - self.scheduled_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens a second after the first one; None for fewer than two tokens."""
        if self.first_token_s is None or self.finished_s is None or len(self.output_ids) < 2:
            return None
        return (len(self.output_ids) - 1) / max(self.finished_s - self.first_token_s, 1e-9)

    def sample(self, logits: Tensor) -> Draw:
        """Draw the next token from float32 `logits` [vocab]. Until `accept`, it's the same again."""
        best = logits.topk(min(self.params.num_top_logits, len(logits)))
        top_logits = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return Draw(self._sampler(logits, len(self.output_ids)), top_logits)

    def accept(self, draw: Draw, *, now_s: float) -> str:
        """Take the sampled token, set `finish_reason` at the end; return the text that may now be shown."""
        token_id = draw.token_id
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.output_ids.append(token_id)
        if draw.top_logits:
            self.top_logits.append(draw.top_logits)
        new_text = ""
        if token_id in self.end_tokens:
            self.finish_reason = "stop"
        else:
            new_text = self._stops.put("" if self.stream is None else self.stream.put(token_id))
            if self._stops.matched is not None:
                self.finish_reason = "stop"
            elif len(self.output_ids) == self.params.max_tokens:
                self.finish_reason = "length"
        if self.finish_reason is not None and self._stops.matched is None:
            new_text += self._flush()
            if self._stops.matched is not None:
                self.finish_reason = "stop"
        self.text += new_text
        return new_text

    def _flush(self) -> str:
        """Return the text that was kept back for what might have followed."""
        rest = "" if self.stream is None else self.stream.flush()
        return self._stops.put(rest) + self._stops.flush()
