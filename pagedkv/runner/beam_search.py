"""Beam search over log-probabilities, by the rules of transformers; knows nothing of pages or models."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from pagedkv.runner.sampling import SamplingParams


@dataclass(frozen=True)
class Beam:
    """A beginning of an answer.

    Attributes
    ----------
    output_ids : tuple of int
    logprob : float
        The sum over its tokens, rounded to float32 as it is summed.
    parent : int
        Which of the beams before it was extended.
    """

    output_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    parent: int = 0


@dataclass(frozen=True)
class BeamSearch:
    """The state between two steps; `advance` makes the next one.

    Attributes
    ----------
    params : SamplingParams
        Of them `num_beams`, `length_penalty`, `early_stopping` and `max_tokens`.
    end_tokens : frozenset of int
    running : tuple of Beam
        Beams to extend, the likeliest first; one without tokens at the start.
    finished : tuple of (float, Beam)
        At most `num_beams` complete answers with their scores, the best first.
    is_done : bool
    """

    params: SamplingParams
    end_tokens: frozenset[int]
    running: tuple[Beam, ...] = (Beam(),)
    finished: tuple[tuple[float, Beam], ...] = ()
    is_done: bool = False

    def advance(self, logprobs: Tensor) -> BeamSearch:
        """Extend each running beam by float32 `logprobs` [len(running), vocab]; return the next state."""
        num_beams, params = self.params.num_beams, self.params
        sums = logprobs.new_tensor([beam.logprob for beam in self.running])
        totals = (logprobs + sums[:, None]).flatten()
        # So many that num_beams are left to go on with, should the others all end.
        num_kept = max(2, 1 + len(self.end_tokens)) * num_beams
        best = totals.topk(min(num_kept, len(totals)))
        candidates = []
        for total, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            parent, token_id = divmod(place, logprobs.shape[-1])
            candidates.append(Beam((*self.running[parent].output_ids, token_id), total, parent))
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
        rest = [(self._score(beam), beam) for beam in self.running if beam.output_ids]
        return [*self.finished, *rest][:count]

    def _ends(self, beam: Beam) -> bool:
        return beam.output_ids[-1] in self.end_tokens or len(beam.output_ids) == self.params.max_tokens

    def _score(self, beam: Beam) -> float:
        return beam.logprob / math.pow(len(beam.output_ids), self.params.length_penalty)
