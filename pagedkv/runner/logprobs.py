"""Log-probabilities of tokens, for whoever asks how sure the model was."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """One token's log-probability beside those of the likeliest ones.

    Attributes
    ----------
    token_id : int
    logprob : float
        By the model's own logits, before bias, penalties and temperature.
    rank : int
        1 for the likeliest token.
    top : list of (int, float)
        The likeliest tokens with their log-probabilities, best first, as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


def token_logprobs(logits: Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """Return for each row of float32 `logits` [n, vocab] what it says of one of `token_ids` [n]."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])  # [n, 1]
    ranks = (logprobs > chosen).sum(-1) + 1
    best = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    columns = (token_ids, chosen[:, 0].tolist(), ranks.tolist(), best.indices.tolist(), best.values.tolist())
    return [
        TokenLogprobs(token_id, logprob, rank, list(zip(ids, values, strict=True)))
        for token_id, logprob, rank, ids, values in zip(*columns, strict=True)
    ]
