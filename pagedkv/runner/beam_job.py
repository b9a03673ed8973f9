"""A job that runs all beams of a request in step."""

from __future__ import annotations

from itertools import accumulate, takewhile

import torch
from torch import Tensor

from pagedkv.cache import PagedKVCache
from pagedkv.runner.answer_text import AnswerText
from pagedkv.runner.beam_search import Beam, BeamSearch
from pagedkv.runner.draw import Draw, make_draws
from pagedkv.runner.job import Job, Progress
from pagedkv.runner.penalties import Penalties
from pagedkv.runner.request import Request
from pagedkv.runner.sampler import Best
from pagedkv.sequence import Sequence


class BeamJob(Job):
    """Computes the prompt in one sequence, and then each beam in a fork of it.

    Preempted, it folds: one sequence keeps what all beams begin with, and the others are forked from that
    again when it is computed. So beams take the same pages afterwards, with a cache and without.
    """

    def __init__(self, request: Request, cache: PagedKVCache) -> None:
        super().__init__(request, cache)
        self.num_slots = request.params.num_beams
        self._search = BeamSearch(request.params, request.end_tokens, (Beam(text=_text_of(request)),))
        self._penalties = Penalties(request.params, request.prompt_ids)
        self._is_folded = False

    @property
    def is_done(self) -> bool:
        """Whether no beam can still become one of the answers."""
        return self._search.is_done

    @property
    def is_prefilling(self) -> bool:
        """Whether more is to be computed than the last token of each beam."""
        return self._is_folded or super().is_prefilling

    @property
    def can_release(self) -> bool:
        """Whether preempting it gives pages back; what its beams share among themselves does."""
        return any(len(sequence.block_ids) for sequence in self.sequences)

    def preempt(self) -> None:
        """Give up the pages; keep what the beams begin with in one sequence."""
        if self.lacks_prompt_logprobs:
            self.start_over()
            return
        first, others = self.sequences[0], self.sequences[1:]
        if others:
            columns = zip(*(beam.output_ids for beam in self._search.running), strict=True)
            num_shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
            self.cache.close(others)
            first.truncate(self.request.num_prompt_tokens + num_shared)
            self.sequences = [first]
            self._is_folded = True
        self.cache.preempt(first)

    def plan(self, budget: int) -> list[int]:
        """Return how many tokens each beam computes; their last ones all in the same step."""
        if self._is_folded:
            if num_uncached := self.sequences[0].num_uncached_tokens:
                return [min(num_uncached, budget)]
            self._unfold()
        needs = [sequence.num_uncached_tokens for sequence in self.sequences]
        if sum(needs) <= budget:
            return needs
        counts = []
        for need in needs:
            counts.append(min(need - 1, budget))
            budget -= counts[-1]
        return counts

    def rows(self, num_tokens: list[int]) -> list[int]:
        """Return each beam's last token, once everything before them is computed."""
        needs = [sequence.num_uncached_tokens for sequence in self.sequences]
        if self._is_folded or num_tokens != needs:
            return []
        return [end - 1 for end in accumulate(num_tokens)]

    def choose(self, logits: Tensor, best: list[Best]) -> BeamSearch:
        """Return the beams after this step."""
        logprobs = logits.log_softmax(-1)
        if not bool(logprobs.amax(-1).isfinite().all()):  # NaN if any logit is, or is +inf
            raise FloatingPointError("logits: expected finite ones, got NaN or inf, in beam search")
        # On log-probabilities, which are not normalised again: so does transformers.
        beams = zip(logprobs, self._search.running, strict=True)
        scores = torch.stack([self._penalties(row, beam.output_ids) for row, beam in beams])

        def draws(parents: list[int], token_ids: list[int]) -> list[Draw]:
            return make_draws(logits[parents], token_ids, self.request.params)

        return self._search.advance(scores, draws)

    def apply(self, choice: BeamSearch) -> Progress:
        """Fork the beams that go on from their parents, and let go of the others."""
        before, self._search = self.sequences, choice
        if choice.is_done:
            return self._finish()
        self.sequences = self._forks(before, [beam.parent for beam in choice.running])
        parents = {beam.parent for beam in choice.running}
        if dropped := [sequence for i, sequence in enumerate(before) if i not in parents]:
            self.cache.close(dropped)
        self.cache.append(self.sequences, [beam.draws[-1].token_id for beam in choice.running])
        return Progress()

    def end_early(self) -> None:
        """Answer with the best beams so far."""
        if not self.is_done:
            self._finish()

    def _forks(self, sequences: list[Sequence], parents: list[int]) -> list[Sequence]:
        """Return a sequence for each of `parents`: the parent itself the first time, then forks of it."""
        taken: set[int] = set()
        result = []
        for parent in parents:
            result.append(sequences[parent].fork() if parent in taken else sequences[parent])
            taken.add(parent)
        return result

    def _unfold(self) -> None:
        running = self._search.running
        [root] = self.sequences
        start = root.num_tokens - self.request.num_prompt_tokens
        self.sequences = self._forks([root], [0] * len(running))
        self.cache.append(self.sequences, [beam.output_ids[start:] for beam in running])
        self._is_folded = False

    def _finish(self) -> Progress:
        progress = Progress()
        completions = self.request.completions
        for completion, (score, beam) in zip(completions, self._search.best(len(completions)), strict=False):
            text = "".join(completion.accept(draw) for draw in beam.draws)
            completion.score = score
            progress.shown.append((completion, text))
        return progress


def _text_of(request: Request) -> AnswerText | None:
    """Return what beams begin with, or None where no stop string can end them."""
    if not request.params.stop or request.make_stream is None:
        return None
    return AnswerText(request.make_stream(), request.params.stop)
