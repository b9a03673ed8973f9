"""An engine around the toy model, and what its answers must be: a plain loop without a cache."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
import toy_model
from torch import Tensor
from toy_model import ToyModel

import pagedkv
from pagedkv.runner.beam_search import BeamSearch
from pagedkv.runner.config import ModelConfig
from pagedkv.runner.engine import Engine
from pagedkv.runner.penalties import Penalties
from pagedkv.runner.sampler import Sampler
from pagedkv.runner.sampling import SamplingParams

END = 0
CONFIG = ModelConfig(
    name="toy",
    vocab_size=toy_model.VOCABULARY,
    hidden_size=toy_model.WIDTH,
    intermediate_size=1,
    num_layers=toy_model.NUM_LAYERS,
    num_heads=toy_model.NUM_HEADS,
    num_kv_heads=toy_model.NUM_KV_HEADS,
    head_dim=toy_model.HEAD_DIM,
    context_length=toy_model.MAX_TOKENS,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    eos_token_ids=frozenset({END}),
)


class ToyRunnerModel(ToyModel):
    """The toy model as an engine takes it."""

    config = CONFIG
    dtype = torch.float32
    device = torch.device("cpu")
    namespace = b"toy"

    def forward(self, cache: pagedkv.PagedKVCache, meta: pagedkv.AttentionMetadata) -> Tensor:
        return self.hidden(cache, meta)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weights["head"]


MODEL = ToyRunnerModel()


def toy_engine(**options: Any) -> Engine:
    """Make an engine with small pages, so that short prompts have many."""
    return Engine(MODEL, **{"num_blocks": 200, "block_size": 4, **options})  # type: ignore[arg-type]


def assert_idle(engine: Engine) -> None:
    """No request is left, and none left a page behind."""
    stats = engine.cache.stats()
    assert not engine.has_work
    assert (stats.num_writable_blocks, stats.num_committed_blocks) == (0, 0)
    assert stats.num_free_blocks + stats.num_evictable_blocks == stats.num_blocks
    engine.cache.check_integrity()


@cache
def expected_answer(prompt: tuple[int, ...], params: SamplingParams, sample: int = 0) -> list[int]:
    """Return the answer as far as it is certain: rounding may decide a near tie in either way.

    Ends there with −1.
    """
    sampler, penalties = Sampler(params, sample), Penalties(params, prompt)
    ends = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | {END}
    output: list[int] = []
    while len(output) < params.max_tokens and not (output and output[-1] in ends):
        logits = MODEL.expected_logits([*prompt, *output])
        chosen = {sampler(penalties(row, output), len(output)) for row in _nearby(logits)}
        output.append(chosen.pop())
        if chosen:
            output[-1] = -1
            break
    return output


def assert_answer(output_ids: list[int], expected: list[int], *, is_whole: bool = True) -> None:
    """Compare an answer, or its beginning, with what it must be."""
    if expected and expected[-1] == -1:
        size = min(len(output_ids), len(expected) - 1)
        assert output_ids[:size] == expected[:size]
    elif is_whole:
        assert output_ids == expected
    else:
        assert output_ids == expected[: len(output_ids)]


@cache
def expected_beams(prompt: tuple[int, ...], params: SamplingParams) -> list[list[int]] | None:
    """Return the answers of beam search, each computed anew from its tokens; None for near ties."""
    found = []
    penalties = Penalties(params, prompt)
    ends = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | {END}
    for variant in range(3):
        search = BeamSearch(params, ends)
        while not search.is_done:
            rows = [
                _nearby(MODEL.expected_logits([*prompt, *beam.output_ids]))[variant].log_softmax(-1)
                for beam in search.running
            ]
            beams = zip(rows, search.running, strict=True)
            search = search.advance(torch.stack([penalties(row, beam.output_ids) for row, beam in beams]))
        found.append([list(beam.output_ids) for _, beam in search.best(params.n)])
    return found[0] if found[0] == found[1] == found[2] else None


def assert_completions(request: Any, *, is_whole: bool = True) -> None:
    """Compare all answers of a request with what they must be."""
    prompt, params = tuple(request.prompt_ids), request.params
    if params.num_beams == 1:
        for each in request.completions:
            assert_answer(each.output_ids, expected_answer(prompt, params, each.index), is_whole=is_whole)
    elif is_whole and (beams := expected_beams(prompt, params)) is not None:
        assert [each.output_ids for each in request.completions] == beams


def _nearby(logits: np.ndarray) -> Iterable[Any]:
    """Return the logits and two like them, off by more than float32 rounds and by less than matters."""
    row = torch.from_numpy(logits).float()
    noise = 1e-4 * torch.randn(2, len(row), generator=torch.Generator().manual_seed(len(row)))
    return [row, row + noise[0], row + noise[1]]
