"""Beam search over log-probabilities, by the rules of transformers; knows nothing of pages or models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from pagedkv.runner.answer_text import AnswerText
from pagedkv.runner.draw import Draw
from pagedkv.runner.sampling import SamplingParams

MakeDraws = Callable[[list[int], list[int]], list[Draw]]
"""From beams, by their places in `BeamSearch.running`, and a token for each."""


def _bare_draws(_: list[int], token_ids: list[int]) -> list[Draw]:
    return [Draw(token_id, [], None) for token_id in token_ids]


@dataclass(frozen=True)
class Beam:
    """A beginning of an answer.

    Attributes
    ----------
    draws : tuple of Draw
        Its tokens, with what is kept of their logits.
    logprob : float
        The sum over its tokens, rounded to float32 as it is summed.
    parent : int
        Which of the beams before it was extended.
    text : AnswerText or None
        Its text, where a stop string may end it.
    """

    draws: tuple[Draw, ...] = ()
    logprob: float = 0.0
    parent: int = 0
    text: AnswerText | None = field(default=None, compare=False, repr=False)

    @property
    def output_ids(self) -> tuple[int, ...]:
        """Its tokens."""
        return tuple(draw.token_id for draw in self.draws)


@dataclass(frozen=True)
class BeamSearch:
    """The state between two steps; `advance` makes the next one.

    Attributes
    ----------
    params : SamplingParams
        Of them `num_beams`, `length_penalty`, `early_stopping` and `max_tokens`.
    end_tokens : frozenset of int
    running : tuple of Beam
        Beams to extend, the likeliest first, at most `num_beams`; one without tokens at the start.
    finished : tuple of (float, Beam)
        At most `num_beams` complete answers with their scores, the best first.
    is_done : bool
    """

    params: SamplingParams
    end_tokens: frozenset[int]
    running: tuple[Beam, ...] = (Beam(),)
    finished: tuple[tuple[float, Beam], ...] = ()
    is_done: bool = False

    def advance(self, logprobs: Tensor, make_draws: MakeDraws = _bare_draws) -> BeamSearch:
        """Extend each running beam by float32 `logprobs` [len(running), vocab]; return the next state.

        `make_draws` says what to keep with each new token.
        """
        num_beams, params = self.params.num_beams, self.params
        sums = logprobs.new_tensor([beam.logprob for beam in self.running])
        totals = (logprobs + sums[:, None]).flatten()
        # So many that num_beams are left to go on with, should the others all end.
        num_kept = max(2, 1 + len(self.end_tokens)) * num_beams
        best = totals.topk(min(num_kept, len(totals)))
        places = [divmod(place, logprobs.shape[-1]) for place in best.indices.tolist()]
        parents, token_ids = [parent for parent, _ in places], [token_id for _, token_id in places]
        candidates = [
            self._extend(parent, draw, total)
            for parent, draw, total in zip(
                parents, make_draws(parents, token_ids), best.values.tolist(), strict=True
            )
        ]
        going_on = [beam for beam in candidates if not self._ends(beam)]
        # The others only were kept to go on with.
        ended = [(self._score(beam), beam) for beam in candidates[:num_beams] if self._ends(beam)]
        finished = self.finished
        is_full = len(finished) == num_beams
        if not (is_full and params.early_stopping):
            ranked = sorted([*finished, *ended], key=lambda scored: -scored[0])
            finished = tuple(ranked[:num_beams])
            is_full = len(finished) == num_beams
        running = tuple(going_on[:num_beams])
        # A heuristic of theirs: the likeliest beam is taken to end here, though it may still gain by length.
        can_improve = bool(running) and not (is_full and self._score(running[0]) <= finished[-1][0])
        is_done = not can_improve or (is_full and params.early_stopping)
        return replace(self, running=running, finished=finished, is_done=is_done)

    def best(self, count: int) -> list[tuple[float, Beam]]:
        """Return the best `count` answers; behind the complete ones come those that aren't."""
        rest = [(self._score(beam), beam) for beam in self.running if beam.draws]
        return [*self.finished, *rest][:count]

    def _extend(self, parent: int, draw: Draw, logprob: float) -> Beam:
        before = self.running[parent]
        text = before.text
        if text is not None and draw.token_id not in self.end_tokens:
            text = text.fork()
            text.put(draw.token_id)
        return Beam((*before.draws, draw), logprob, parent, text)

    def _ends(self, beam: Beam) -> bool:
        is_stopped = beam.text is not None and beam.text.stopped_by is not None
        is_long = len(beam.draws) == self.params.max_tokens
        return is_stopped or is_long or beam.draws[-1].token_id in self.end_tokens

    def _score(self, beam: Beam) -> float:
        return beam.logprob / math.pow(len(beam.draws), self.params.length_penalty)
