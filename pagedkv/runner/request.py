"""One request: what was asked, how far it is, what came out and how long it took."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagedkv.runner.completion import Completion, FinishReason
from pagedkv.runner.detokenizer import TextStream
from pagedkv.runner.logprobs import TokenLogprobs
from pagedkv.runner.metrics import RequestStats
from pagedkv.runner.prompt_key import PromptKey
from pagedkv.runner.sampling import SamplingParams
from pagedkv.sequence import Sequence

if TYPE_CHECKING:
    from pagedkv.runner.job import Job

OnToken = Callable[[Completion, str], None]


class RequestState(enum.Enum):
    """Where a request is. Only a running one holds pages."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, kw_only=True)
class Request:
    """A prompt on its way to its answers. Made by `Engine.submit`; read it, change nothing.

    What it has of an answer (`output_ids`, `text`, `logprobs` and so on) is its first completion's.

    Attributes
    ----------
    prompt_ids : list of int
        The prompt's tokens.
    params : SamplingParams
        As asked, with `max_tokens` clipped to what the model's context leaves.
    completions : list of Completion
        The answers, ``params.n`` of them; of beams the best first.
    cache_salt, extras
        What separates this request's cached blocks from those of others.
    on_token : callable or None
        Called after each token with (completion, the text that became certain, often empty).
    deadline_s : float or None
        When it ends at the latest, on the engine's clock.
    error : Exception or None
        Why it failed, when `finish_reason` is "error".
    prompt_logprobs : list of (TokenLogprobs or None)
        For each of `prompt_ids`, if the params ask for them; None for the first, which nothing precedes.
    num_cached_tokens : int
        Prompt tokens that were not computed because the cache had them.
    num_preemptions : int
        How often it gave up its pages for others.
    num_draft_tokens, num_accepted_tokens : int
        Tokens that were drafted for verification, and those of them that held.
    submitted_s, scheduled_s, first_token_s, finished_s : float or None
        Moments on the engine's clock; None when not reached.
    """

    # What may be long is left out of the repr.
    prompt_ids: list[int] = field(repr=False)
    params: SamplingParams
    end_tokens: frozenset[int]
    submitted_s: float
    cache_salt: str | bytes | None = None
    extras: tuple[Any, ...] = field(default=(), repr=False)
    on_token: OnToken | None = field(default=None, repr=False)
    make_stream: Callable[[], TextStream] | None = field(default=None, repr=False)
    deadline_s: float | None = None

    completions: list[Completion] = field(default_factory=list, repr=False)
    jobs: list[Job] = field(default_factory=list, repr=False)
    error: Exception | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list, repr=False)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    def __post_init__(self) -> None:
        """Make the answers, which are empty yet."""
        self.key = PromptKey.of(self.prompt_ids, self.cache_salt, self.extras)
        for index in range(self.params.n):
            stream = None if self.make_stream is None else self.make_stream()
            self.completions.append(Completion(request=self, index=index, stream=stream))

    @property
    def state(self) -> RequestState:
        """Where it is; running as soon as one of its answers is."""
        if self.is_finished:
            return RequestState.FINISHED
        return RequestState.RUNNING if any(job.is_running for job in self.jobs) else RequestState.WAITING

    @property
    def is_finished(self) -> bool:
        """Whether all answers are complete, or it ended otherwise."""
        return self.finished_s is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """How its first answer ended, or "error" if anything failed; None while any goes on."""
        if not self.is_finished:
            return None
        return self.completions[0].finish_reason if self.error is None else "error"

    @property
    def output_ids(self) -> list[int]:
        """Tokens of the first answer so far."""
        return self.completions[0].output_ids

    @property
    def text(self) -> str:
        """Text of the first answer so far."""
        return self.completions[0].text

    @property
    def top_logits(self) -> list[list[tuple[int, float]]]:
        """Best logits of the first answer's tokens."""
        return self.completions[0].top_logits

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities of the first answer's tokens."""
        return self.completions[0].logprobs

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers so far."""
        return sum(len(completion.output_ids) for completion in self.completions)

    @property
    def sequences(self) -> list[Sequence]:
        """The cache's side of the request: one for each answer or beam that goes on."""
        return [sequence for job in self.jobs for sequence in job.sequences]

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of prompt and first answer whose K and V are there; 0 while it holds no pages."""
        return self.sequences[0].num_computed_tokens if self.sequences else 0

    @property
    def queue_s(self) -> float | None:
        """Seconds from submission to the first scheduled step."""
        return None if self.scheduled_s is None else self.scheduled_s - self.submitted_s

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
    def time_per_output_token_s(self) -> float | None:
        """Mean seconds between two tokens of the first answer; None for fewer than two tokens."""
        if self.first_token_s is None or self.finished_s is None or len(self.output_ids) < 2:
            return None
        return (self.finished_s - self.first_token_s) / (len(self.output_ids) - 1)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens a second of the first answer after its first token; None for fewer than two tokens."""
        seconds = self.time_per_output_token_s
        return None if seconds is None else 1 / max(seconds, 1e-9)

    @property
    def num_cached_tokens_by_source(self) -> dict[str, int]:
        """The prompt tokens that were found, by where; ``"device"`` is the cache's own pages."""
        return {"device": self.num_cached_tokens}

    @property
    def stats(self) -> RequestStats:
        """What it cost, in numbers."""
        return RequestStats(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens_by_source=self.num_cached_tokens_by_source,
            num_computed_tokens=self.num_prompt_tokens - self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            queue_s=self.queue_s,
            time_to_first_token_s=self.time_to_first_token_s,
            time_per_output_token_s=self.time_per_output_token_s,
            finish_reason=self.finish_reason,
            num_preemptions=self.num_preemptions,
        )
