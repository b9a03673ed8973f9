"""What the scheduler runs, preempts and ends as one: an answer, or all beams of a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pagedkv.cache import PagedKVCache
from pagedkv.runner.logprobs import TokenLogprobs, token_logprobs
from pagedkv.runner.sampler import Best
from pagedkv.sequence import Sequence

if TYPE_CHECKING:
    from pagedkv.runner.completion import Completion
    from pagedkv.runner.request import Request


@dataclass
class Progress:
    """What a step brought to a job.

    Attributes
    ----------
    shown : list of (Completion, str)
        Each new token's text, in order.
    forked : list of Job
        Other answers of the request, which go on by themselves from here.
    """

    shown: list[tuple[Completion, str]] = field(default_factory=list)
    forked: list[Job] = field(default_factory=list)


class Job(ABC):
    """One schedulable part of a request, with its sequences in the cache.

    A step goes `plan`, perhaps `draft`, then (reserved) `rows`, `choose`, then (committed) `apply`. Until
    `apply` nothing of the request changes, so a step that fails in between can be repeated.

    Attributes
    ----------
    request : Request
    sequences : list of pagedkv.Sequence
        Empty before the first admission.
    is_running : bool
        Whether the scheduler has admitted it; otherwise it holds no pages.
    rank : int
        The order of first admission: who came first gives way last. −1 before it.
    num_overtakes : int
        How many younger jobs were admitted before this one.
    last_token_s : float or None
        When a step last brought tokens, on the engine's clock.
    """

    num_slots: int = 1  # how many of the running sequences it may come to

    def __init__(self, request: Request, cache: PagedKVCache) -> None:
        self.request = request
        self.cache = cache
        self.sequences: list[Sequence] = []
        self.is_running = False
        self.rank = -1
        self.num_overtakes = 0
        self.last_token_s: float | None = None
        request.jobs.append(self)

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether nothing is left to compute."""

    @property
    def is_prefilling(self) -> bool:
        """Whether more is to be computed than the last token of each sequence."""
        return any(sequence.num_uncached_tokens > 1 for sequence in self.sequences)

    @property
    def reads_cache(self) -> bool:
        """Whether it uses what is cached of its prompt.

        Not if the log-probabilities of the prompt are wanted: only computing all of it gives them.
        """
        return self.cache.pool.prefix_caching and self.request.params.prompt_logprobs is None

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are wanted that are not there yet."""
        known, request = self.request.prompt_logprobs, self.request
        return request.params.prompt_logprobs is not None and len(known) < request.num_prompt_tokens

    @property
    def can_release(self) -> bool:
        """Whether preempting it gives pages back."""
        return any(sequence.num_releasable_blocks for sequence in self.sequences)

    def open(self) -> None:
        """Take references on what is cached of the prompt; a preempted job has its sequences still."""
        if self.sequences:
            return
        request, reuse = self.request, not self.lacks_prompt_logprobs
        self.sequences = [
            self.cache.open(
                request.key.token_ids, cache_salt=request.cache_salt, extras=request.extras, reuse=reuse
            )
        ]
        if not reuse:
            request.prompt_logprobs = [None]

    def start_over(self) -> None:
        """Give up the pages of a prompt of which all has to be computed at once, without looking it up."""
        self.cache.close(self.sequences)
        self.sequences = []

    @abstractmethod
    def preempt(self) -> None:
        """Give up the pages; what was computed is matched or computed again."""

    def close(self) -> None:
        """Release everything, whether or not it is done."""
        if self.sequences:
            self.cache.close(self.sequences)
        self.sequences = []
        self.request.jobs.remove(self)

    def end_early(self) -> None:  # noqa: B027 (an answer that grows token by token is there already)
        """Put what there is into the answers; the request ends before they are complete."""

    @abstractmethod
    def plan(self, budget: int) -> list[int]:
        """Return how many tokens each sequence computes next, `budget` in all; 0 leaves it out."""

    def draft(self, budget: int) -> int:
        """Append up to `budget` guessed tokens to what `plan` said; return how many."""
        return 0

    def withdraw_draft(self) -> int:
        """Take the guessed tokens back; return how many."""
        return 0

    def prompt_rows(self, num_tokens: list[int]) -> range:
        """Return the step's tokens that say how likely the prompt's next one was, where that is wanted."""
        if not self.lacks_prompt_logprobs:
            return range(0)
        start = self.sequences[0].num_computed_tokens
        return range(min(num_tokens[0], self.request.num_prompt_tokens - 1 - start))

    def judge_prompt(self, logits: Tensor, start: int) -> list[TokenLogprobs]:
        """Return what `logits` of the prompt's tokens from `start` on say of those that follow each."""
        num_top = self.request.params.prompt_logprobs
        assert num_top is not None, "else there are no such rows"
        return token_logprobs(logits, self.request.prompt_ids[start + 1 : start + 1 + len(logits)], num_top)

    @abstractmethod
    def rows(self, num_tokens: list[int]) -> list[int]:
        """Return of which of the step's tokens of this job the logits are needed."""

    @abstractmethod
    def choose(self, logits: Tensor, best: list[Best]) -> Any:
        """Choose what comes next by the logits of `rows`, and the `best` of each; changes nothing.

        Raises
        ------
        FloatingPointError
            No token can be chosen by these logits.
        """

    def num_accepted(self, num_tokens: list[int], choice: Any) -> list[int]:
        """Return how many of each sequence's tokens hold after `choice`."""
        return num_tokens

    @abstractmethod
    def apply(self, choice: Any) -> Progress:
        """Take the choice, after the step was committed."""
