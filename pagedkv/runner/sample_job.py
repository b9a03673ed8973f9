"""A job that draws one answer token by token, several tokens a step where guesses hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from pagedkv.cache import PagedKVCache
from pagedkv.runner.completion import Completion
from pagedkv.runner.drafting import PromptLookup
from pagedkv.runner.draw import Draw, make_draws
from pagedkv.runner.job import Job, Progress
from pagedkv.runner.penalties import Penalties
from pagedkv.runner.sampler import Best, Sampler


@dataclass
class Samples:
    """What a step brings: tokens of the job's own answer, and the first of each other."""

    draws: list[Draw]
    first_of_others: list[Draw] = field(default_factory=list)


class SampleJob(Job):
    """Computes the prompt, then one answer.

    The first answer's job computes the prompt for all answers of a request; the others fork from it when
    their first tokens are drawn.
    """

    def __init__(self, completion: Completion, cache: PagedKVCache) -> None:
        super().__init__(completion.request, cache)
        self.completion = completion
        params = self.request.params
        self._sampler = Sampler(params, completion.index)
        self._penalties = Penalties(params, self.request.prompt_ids)
        self._lookup = PromptLookup()
        self._draft: list[int] = []

    @property
    def is_done(self) -> bool:
        """Whether the answer is complete."""
        return self.completion.finish_reason is not None

    def preempt(self) -> None:
        """Give up the pages."""
        self.withdraw_draft()
        if self.lacks_prompt_logprobs:
            self.start_over()
        else:
            self.cache.preempt(self.sequences[0])

    def close(self) -> None:
        """Release everything."""
        super().close()
        self._draft = []

    def plan(self, budget: int) -> list[int]:
        """Return how many tokens to compute."""
        return [min(self.sequences[0].num_uncached_tokens, budget)]

    def draft(self, budget: int) -> int:
        """Append what followed the answer's last words the last time."""
        [sequence], params = self.sequences, self.request.params
        room = params.max_tokens - len(self.completion.output_ids) - 1
        budget = min(params.num_speculative_tokens, budget, room)
        if budget <= 0 or sequence.num_uncached_tokens != 1:
            return 0
        known = self.request.prompt_ids + self.completion.output_ids
        self._draft = self._lookup.draft(known, budget)
        if self._draft:
            sequence.append(self._draft)
        return len(self._draft)

    def withdraw_draft(self) -> int:
        """Take the guessed tokens back."""
        count = len(self._draft)
        if count:
            [sequence] = self.sequences
            sequence.truncate(sequence.num_tokens - count)
            self._draft = []
        return count

    def rows(self, num_tokens: list[int]) -> list[int]:
        """Return the last token and the guesses, once everything before them is computed."""
        end = num_tokens[0]
        if end < self.sequences[0].num_uncached_tokens:
            return []
        return list(range(end - 1 - len(self._draft), end))

    def choose(self, logits: Tensor, best: list[Best]) -> Samples:
        """Draw a token after each guess that holds, and one more.

        A token is drawn as if there were no guess and then compared with it. A guess so holds with the
        probability that its token has, and where it fails the token is drawn from the others in their
        proportions: just what rejection sampling does for a draft that is certain. And as draws depend on the
        seed and the place alone, an answer with a seed is the same with speculation and without.
        """
        output_ids = self.completion.output_ids
        chosen = Samples([])
        for row, its_best, guess in zip(logits, best, [*self._draft, None], strict=True):
            draw = self._draw(row, its_best, output_ids, self._sampler)
            chosen.draws.append(draw)
            if draw.token_id != guess or draw.token_id in self.request.end_tokens:
                break
            output_ids = [*output_ids, draw.token_id]
        if self.completion.index == 0 and not self.completion.output_ids:
            for other in self.request.completions[1:]:
                sampler = Sampler(self.request.params, other.index)
                chosen.first_of_others.append(self._draw(logits[-1], best[-1], [], sampler))
        return chosen

    def num_accepted(self, num_tokens: list[int], choice: Samples | None) -> list[int]:
        """Return how many tokens hold: of the guesses, one less than were drawn."""
        if choice is None:
            return num_tokens
        return [num_tokens[0] - len(self._draft) + len(choice.draws) - 1]

    def apply(self, choice: Samples) -> Progress:
        """Extend the answer; fork the others from its first token on."""
        [sequence] = self.sequences
        request = self.request
        request.num_draft_tokens += len(self._draft)
        request.num_accepted_tokens += len(choice.draws) - 1
        self._draft = []
        # Forked before a token is appended: they share all that is computed, and differ from here.
        others = [
            SampleJob(completion, self.cache)
            for completion in request.completions[1 : 1 + len(choice.first_of_others)]
        ]
        for job in others:
            job.sequences = [sequence.fork()]
        progress = Progress(forked=[*others])
        self._extend(choice.draws, progress)
        for job, draw in zip(others, choice.first_of_others, strict=True):
            job._extend([draw], progress)
        return progress

    def _extend(self, draws: list[Draw], progress: Progress) -> None:
        for draw in draws:
            progress.shown.append((self.completion, self.completion.accept(draw)))
            if self.is_done:  # perhaps by a stop string before the last guess that holds
                return
        self.sequences[0].append(draws[-1].token_id)

    def _draw(self, logits: Tensor, best: Best, output_ids: list[int], sampler: Sampler) -> Draw:
        params = self.request.params
        if params.changes_logits:
            token_id = sampler(self._penalties(logits, output_ids), len(output_ids))
        else:
            token_id = sampler(logits, len(output_ids), best)
        [draw] = make_draws(logits[None], [token_id], params)
        return draw
