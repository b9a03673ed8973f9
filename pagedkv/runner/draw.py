"""A chosen token, with what a request keeps of the logits that it was chosen by."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from pagedkv.runner.logprobs import TokenLogprobs, token_logprobs
from pagedkv.runner.sampling import SamplingParams


class Draw(NamedTuple):
    """A token of an answer, with what the params ask to keep of its logits."""

    token_id: int
    top_logits: list[tuple[int, float]]
    logprobs: TokenLogprobs | None


def make_draws(logits: Tensor, token_ids: list[int], params: SamplingParams) -> list[Draw]:
    """Return for each row of the model's own float32 `logits` [n, vocab] its token of `token_ids` [n]."""
    draws = [Draw(token_id, [], None) for token_id in token_ids]
    if params.num_top_logits:
        top = logits.topk(min(params.num_top_logits, logits.shape[-1]))
        rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        kept = [list(zip(*row, strict=True)) for row in rows]
        draws = [draw._replace(top_logits=each) for draw, each in zip(draws, kept, strict=True)]
    if params.logprobs is not None:
        judged = token_logprobs(logits, token_ids, params.logprobs)
        draws = [draw._replace(logprobs=each) for draw, each in zip(draws, judged, strict=True)]
    return draws
