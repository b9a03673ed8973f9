"""The engine: requests in, tokens out, one `PagedKVCache` between them.

`Engine.step` is the page to read for whoever writes an engine of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from pagedkv.cache import PagedKVCache
from pagedkv.checks import check_int, check_iterable
from pagedkv.config import Backend
from pagedkv.errors import UsageError
from pagedkv.hashing import as_tokens
from pagedkv.runner.model import Model
from pagedkv.runner.request import Draw, Request
from pagedkv.runner.sampling import SamplingParams
from pagedkv.runner.scheduler import Scheduler
from pagedkv.runner.tokenizer import Tokenizer

OnToken = Callable[[Request, str], None]


class Engine:
    """Serves many requests at once with one model.

    Not safe for use from several threads at once.

    Parameters
    ----------
    model : Model
    tokenizer : Tokenizer, optional
        Without one, prompts are token ids and answers have no text.
    num_blocks : int, optional
        Pages of the cache; takes precedence over `memory`.
    memory : int or str
        Bytes for K and V, such as ``"512MiB"``.
    block_size : int
        Tokens a page.
    prefix_caching : bool
        Whether requests reuse what others computed.
    max_batch_tokens : int
        The most tokens a step computes. Longer prompts are computed in chunks, between which others decode.
    max_num_seqs : int
        The most requests that run at the same time.
    backend : Backend, optional
        Of the cache's operations; chosen by device when left out.

    Attributes
    ----------
    cache : PagedKVCache
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        *,
        num_blocks: int | None = None,
        memory: int | str = "1GiB",
        block_size: int = 16,
        prefix_caching: bool = True,
        max_batch_tokens: int = 2048,
        max_num_seqs: int = 64,
        backend: Backend | None = None,
    ) -> None:
        check_int("max_batch_tokens", max_batch_tokens, 1, 2**31 - 1, ", in Engine")
        check_int("max_num_seqs", max_num_seqs, 1, 2**31 - 1, ", in Engine")
        spec = model.config.kv_spec(str(model.dtype).removeprefix("torch."), block_size=block_size)
        self.model = model
        self.tokenizer = tokenizer
        self.cache = PagedKVCache(
            spec,
            spec.blocks_in(memory) if num_blocks is None else num_blocks,
            device=model.device,
            namespace=model.namespace,
            prefix_caching=prefix_caching,
            backend=backend,
        )
        self._scheduler = Scheduler(self.cache, max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs)

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        cache_salt: str | bytes | None = None,
        extras: Iterable[Any] | None = (),
        on_token: OnToken | None = None,
    ) -> Request:
        """Queue a request; it runs when `step` is called.

        Parameters
        ----------
        prompt : str or sequence of int
            A text, or token ids. For a conversation pass ``tokenizer.encode_chat(messages)``.
        params : SamplingParams, optional
            Greedy, 256 tokens, when left out.
        cache_salt, extras
            As in `PagedKVCache.open`: requests with different ones share nothing.
        on_token : callable, optional
            Called after every token with (request, new text). The text may be empty while a character or
            a stop string is incomplete. It may abort requests; an aborted one is called no more.

        Raises
        ------
        UsageError
            The request can never run: its tokens are wrong, its prompt fills the model's context, or it
            needs more pages than the pool has.
        """
        request = self._make_request(prompt, params, cache_salt, _as_tuple(extras), on_token)
        self._scheduler.add(request)
        return request

    def step(self) -> list[Request]:
        """Compute one step for all requests that fit in it; return those that finished.

        An exception in the computation, an interrupt say, leaves every request as it was before the step.
        One that comes while answers are extended aborts the requests of these answers. One in a callback
        reaches the caller when the step is complete and all its callbacks have been called; of several
        such exceptions, the first. The engine stays usable in each case.

        Raises
        ------
        OutOfBlocksError
            Pages are held by somebody outside this engine, and not even one request fits beside them.
        """
        started_s = time.perf_counter()
        scheduled = self._scheduler.schedule()
        if scheduled is None:
            return []
        step, requests = scheduled
        answering: list[Request] = []
        try:
            for request, sequence in zip(requests, step.sequences, strict=True):
                if request.scheduled_s is None:
                    request.scheduled_s = started_s
                    request.num_cached_tokens = sequence.num_cached_tokens
            meta = self.cache.prepare(step)
            hidden = self.model.forward(self.cache, meta)
            # A request whose prompt isn't computed to its end by this step has no next token yet.
            planned = zip(step.sequences, step.num_new_tokens, strict=True)
            rows = [row for row, (sequence, n) in enumerate(planned) if sequence.num_uncached_tokens == n]
            answering = [requests[row] for row in rows]
            logits = self.model.logits(hidden[meta.last_token_index[rows]])  # [len(rows), vocab]
            draws = [request.sample(row) for request, row in zip(answering, logits, strict=True)]
            # Only now: a committed request without a next token would have nothing to compute, forever.
            self.cache.commit(step)
            finished, texts = self._advance(answering, draws)
        except BaseException:
            if step.state == "committed":
                for request in answering:  # each may have its token in part
                    self.abort(request)
            else:
                self.cache.abandon(step)  # as if the step had never been
            raise
        _show(answering, texts)
        return finished

    def run(self) -> None:
        """Step until no request is left."""
        while self.has_work:
            self.step()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        cache_salt: str | bytes | None = None,
        extras: Iterable[Any] | None = (),
        on_token: OnToken | None = None,
    ) -> list[Request]:
        """Run `prompts` to their ends, together, and return their requests in order.

        An exception, whether from a step or a callback, aborts those that are not finished.

        Raises
        ------
        UsageError
            One of them can never run; then none is queued.
        """
        items = _as_tuple(extras)
        requests = [self._make_request(prompt, params, cache_salt, items, on_token) for prompt in prompts]
        for request in requests:
            self._scheduler.add(request)
        try:
            while not all(request.is_finished for request in requests):
                self.step()
        finally:
            for request in requests:  # after an exception nobody else could: the caller has none of them
                self.abort(request)
        return requests

    def abort(self, request: Request) -> None:
        """End a request now and release its pages. One that is finished already stays as it is."""
        if not request.is_finished:
            request.finish_reason = "abort"
            self._finish(request, time.perf_counter())

    def _advance(self, requests: list[Request], draws: list[Draw]) -> tuple[list[Request], list[str]]:
        """Give each request its next token; return those that are finished by it, and each one's new text."""
        now_s = time.perf_counter()
        texts = [request.accept(draw, now_s=now_s) for request, draw in zip(requests, draws, strict=True)]
        finished = [request for request in requests if request.finish_reason is not None]
        for request, draw in zip(requests, draws, strict=True):
            if request.finish_reason is not None:
                self._finish(request, now_s)
            elif request.sequence is not None:
                self.cache.append(request.sequence, draw.token_id)
        return finished, texts

    def _finish(self, request: Request, now_s: float) -> None:
        self._scheduler.remove(request)
        request.finished_s = now_s

    def _make_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        cache_salt: str | bytes | None,
        extras: tuple[Any, ...],
        on_token: OnToken | None,
    ) -> Request:
        submitted_s = time.perf_counter()
        params = params or SamplingParams()
        config = self.model.config
        tokenizer = self.tokenizer
        if tokenizer is None and (isinstance(prompt, str) or params.stop):
            expected = "token ids and no stop strings (the model has no tokenizer)"
            raise UsageError(f"prompt: expected {expected}, got text, in Engine.submit")
        if isinstance(prompt, str):
            assert tokenizer is not None, "checked above"
            prompt = tokenizer.encode(prompt)
        token_ids = as_tokens(prompt)
        if len(token_ids) == 0:
            raise UsageError("prompt: expected at least one token, got none, in Engine.submit")
        # Changes nothing, and refuses bad tokens, salts and extras now instead of in the middle of a step.
        self.cache.match(token_ids, cache_salt=cache_salt, extras=extras)
        prompt_ids: list[int] = token_ids.tolist()
        if max(prompt_ids) >= config.vocab_size:
            expected = f"token ids below {config.vocab_size} (the vocabulary)"
            raise UsageError(f"prompt: expected {expected}, got {max(prompt_ids)}, in Engine.submit")
        room = config.context_length - len(prompt_ids)
        if room < 1:
            expected = f"fewer tokens than the model's context of {config.context_length}"
            raise UsageError(f"prompt: expected {expected}, got {len(prompt_ids)}, in Engine.submit")
        params = replace(params, max_tokens=min(params.max_tokens, room))
        block_size, num_blocks = self.cache.spec.block_size, self.cache.pool.num_blocks
        # The last token is sampled but never computed.
        needed = -(-(len(prompt_ids) + params.max_tokens - 1) // block_size)
        if needed > num_blocks:
            asked = f"{len(prompt_ids)} prompt tokens and {params.max_tokens} new ones"
            expected = f"at most {num_blocks} pages of {block_size} tokens (the pool)"
            raise UsageError(f"request: expected {expected}, got {needed} for {asked}, in Engine.submit")
        ends = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | config.eos_token_ids
        return Request(
            prompt_ids=prompt_ids,
            params=params,
            end_tokens=ends,
            submitted_s=submitted_s,
            cache_salt=cache_salt,
            extras=extras,
            on_token=on_token,
            stream=None if tokenizer is None else tokenizer.stream(),
        )


def _show(requests: list[Request], texts: list[str]) -> None:
    """Call the callbacks of all requests that none of them has aborted; then raise what one raised first."""
    first: BaseException | None = None
    for request, text in zip(requests, texts, strict=True):
        if request.on_token is None or request.finish_reason == "abort":
            continue
        try:
            request.on_token(request, text)
        except BaseException as error:  # noqa: BLE001 (raised below: one's mistake must not cost others their text)
            first = first or error
    if first is not None:
        raise first


def _as_tuple(extras: Iterable[Any] | None) -> tuple[Any, ...]:
    return tuple(check_iterable("extras", () if extras is None else extras))
