"""What a request changes about the model's logits before a token is chosen by them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from pagedkv.runner.sampling import SamplingParams


class Penalties:
    """Applies bias and penalties as vLLM defines them; keeps nothing from token to token.

    Parameters
    ----------
    params : SamplingParams
    prompt_ids : sequence of int
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._prompt_ids = set(prompt_ids) if params.repetition_penalty != 1 else set()

    def __call__(self, logits: Tensor, output_ids: Sequence[int]) -> Tensor:
        """Return the logits by which the token after `output_ids` is chosen; `logits` [vocab] stay."""
        params = self._params
        if not params.changes_logits:
            return logits
        logits = logits.clone()

        def tensor(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=logits.device)

        if params.logit_bias:
            tokens, biases = zip(*params.logit_bias, strict=True)
            logits[tensor(tokens, torch.int64)] += tensor(biases, logits.dtype)
        counts = Counter(output_ids)
        if params.repetition_penalty != 1 and (seen := self._prompt_ids | counts.keys()):
            ids = tensor(list(seen), torch.int64)
            scores, penalty = logits[ids], params.repetition_penalty
            logits[ids] = torch.where(scores > 0, scores / penalty, scores * penalty)
        if counts and (params.frequency_penalty or params.presence_penalty):
            ids = tensor(list(counts), torch.int64)
            times = tensor(list(counts.values()), logits.dtype)
            logits[ids] -= params.frequency_penalty * times + params.presence_penalty
        return logits
