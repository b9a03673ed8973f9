"""What may be asked of an engine: checks a request before it is queued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pagedkv.cache import PagedKVCache
from pagedkv.checks import check_number, show
from pagedkv.errors import UsageError
from pagedkv.hashing import as_tokens
from pagedkv.runner.config import ModelConfig
from pagedkv.runner.request import OnToken, Request
from pagedkv.runner.sampling import SamplingParams
from pagedkv.runner.tokenizer import Tokenizer

_WHERE = ", in Engine.submit"


class Submissions:
    """Makes requests for one engine.

    Parameters
    ----------
    cache : PagedKVCache
    config : ModelConfig
    tokenizer : Tokenizer or None
    max_batch_tokens, max_num_seqs : int
        The engine's.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        *,
        max_batch_tokens: int,
        max_num_seqs: int,
    ) -> None:
        self._cache = cache
        self._config = config
        self._tokenizer = tokenizer
        self._max_batch_tokens = max_batch_tokens
        self._max_num_beams = min(max_batch_tokens, max_num_seqs)

    def make(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str | bytes | None,
        extras: tuple[Any, ...],
        on_token: OnToken | None,
        deadline_s: float | None,
        now_s: float,
    ) -> Request:
        """Return a request that can run to its end.

        Raises
        ------
        UsageError
        """
        if not isinstance(params, SamplingParams):
            raise UsageError(f"params: expected SamplingParams, got {show(params)}{_WHERE}")
        if on_token is not None and not callable(on_token):
            raise UsageError(f"on_token: expected what can be called, got {show(on_token)}{_WHERE}")
        token_ids = self._token_ids(prompt, params)
        # Changes nothing, and refuses bad tokens, salts and extras now instead of in the middle of a step.
        self._cache.match(token_ids, cache_salt=cache_salt, extras=extras)
        self._check_vocabulary(token_ids, params)
        room = self._config.context_length - len(token_ids)
        if room < 1:
            expected = f"fewer tokens than the model's context of {self._config.context_length}"
            raise UsageError(f"prompt: expected {expected}, got {len(token_ids)}{_WHERE}")
        params = replace(params, max_tokens=min(params.max_tokens, room))
        self._check_size(len(token_ids), params)
        if deadline_s is not None:
            check_number("deadline_s", deadline_s)
        ends = params.stop_token_ids
        return Request(
            prompt_ids=token_ids,
            params=params,
            end_tokens=ends if params.ignore_eos else ends | self._config.eos_token_ids,
            submitted_s=now_s,
            cache_salt=cache_salt,
            extras=extras,
            on_token=on_token,
            make_stream=None if self._tokenizer is None else self._tokenizer.stream,
            deadline_s=None if deadline_s is None else now_s + deadline_s,
        )

    def _token_ids(self, prompt: str | Sequence[int], params: SamplingParams) -> list[int]:
        if self._tokenizer is None and (isinstance(prompt, str) or params.stop):
            expected = "token ids and no stop strings (the model has no tokenizer)"
            raise UsageError(f"prompt: expected {expected}, got text{_WHERE}")
        if isinstance(prompt, str):
            assert self._tokenizer is not None, "checked above"
            prompt = self._tokenizer.encode(prompt)
        token_ids: list[int] = as_tokens(prompt).tolist()
        if not token_ids:
            raise UsageError(f"prompt: expected at least one token, got none{_WHERE}")
        return token_ids

    def _check_vocabulary(self, token_ids: list[int], params: SamplingParams) -> None:
        size = self._config.vocab_size
        biased = [token_id for token_id, _ in params.logit_bias]
        for name, ids in (("prompt", token_ids), ("logit_bias", biased)):
            if ids and max(ids) >= size:
                raise UsageError(
                    f"{name}: expected token ids below {size} (the vocabulary), got {max(ids)}{_WHERE}"
                )

    def _check_size(self, num_prompt: int, params: SamplingParams) -> None:
        """Refuse what doesn't fit even when it has the pool to itself."""
        num_beams = params.num_beams
        if num_beams > self._max_num_beams:
            expected = f"at most {self._max_num_beams} (the engine's max_num_seqs and max_batch_tokens)"
            raise UsageError(f"num_beams: expected {expected}, got {num_beams}{_WHERE}")
        block_size = self._cache.spec.block_size
        num_tokens = num_prompt + params.max_tokens - 1  # the last is sampled but never computed
        asked = f"{num_prompt} prompt tokens and {params.max_tokens} new ones"
        asked += f" of {num_beams} beams" if num_beams > 1 else ""
        for group, num_blocks in zip(
            self._cache.spec.groups, self._cache.pool.num_blocks_by_group, strict=True
        ):
            alone = group.blocks_of(num_tokens, block_size, self._max_batch_tokens)
            needed = alone
            if num_beams > 1:
                # Each has its own pages behind the prompt's full ones, and while those that were just forked
                # copy their last page, what they copy from is held too.
                num_shared = num_prompt // block_size
                own = -(-num_tokens // block_size) - num_shared
                needed = min(num_shared + num_beams * own, num_beams * alone) + num_beams // 2
            if needed > num_blocks:
                where = "the pool" if group.window is None else f"the pool's for a window of {group.window}"
                expected = f"at most {num_blocks} pages of {block_size} tokens ({where})"
                raise UsageError(f"request: expected {expected}, got {needed} for {asked}{_WHERE}")
