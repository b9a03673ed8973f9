"""The engine: requests in, tokens out, one `PagedKVCache` between them.

`Engine.step` is the page to read for whoever writes an engine of their own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pagedkv.cache import PagedKVCache
from pagedkv.checks import check_int, check_iterable
from pagedkv.config import Backend
from pagedkv.runner.batch_logits import Made, choose_all
from pagedkv.runner.beam_job import BeamJob
from pagedkv.runner.completion import Completion, FinishReason
from pagedkv.runner.job import Job
from pagedkv.runner.memory import pages_within
from pagedkv.runner.metrics import EngineMetrics
from pagedkv.runner.model import AnyModel
from pagedkv.runner.policies import QueuePolicy, make_policy
from pagedkv.runner.request import OnToken, Request
from pagedkv.runner.sample_job import SampleJob
from pagedkv.runner.sampling import SamplingParams
from pagedkv.runner.scheduler import Batch, Scheduler
from pagedkv.runner.streaming import TextIterator
from pagedkv.runner.submission import Submissions
from pagedkv.runner.tokenizer import Tokenizer
from pagedkv.runner.waiting import WaitingQueue


class Engine:
    """Serves many requests at once with one model.

    Not safe for use from several threads at once.

    Parameters
    ----------
    model : AnyModel
    tokenizer : Tokenizer, optional
        Without one, prompts are token ids and answers have no text.
    num_blocks : int or sequence of int, optional
        Pages of the cache, of every group of layers or of each; takes precedence over `memory`.
    memory : int or str
        Bytes for K and V, such as ``"512MiB"``.
    block_size : int
        Tokens a page.
    prefix_caching : bool
        Whether requests reuse what others computed.
    max_batch_tokens : int
        The most tokens a step computes. Longer prompts are computed in chunks, between which others decode.
    max_num_seqs : int
        The most sequences that run at the same time.
    schedule : {"fcfs", "longest-prefix", "depth-first"} or QueuePolicy
        In which order waiting requests are admitted: by age, by how much of them is cached, or so that those
        which begin alike run together.
    max_overtakes : int
        How many younger requests may be admitted before one by that order; then it comes first.
    backend : Backend, optional
        Of the cache's operations; chosen by device when left out.
    clock : callable
        Seconds, for times and deadlines.

    Attributes
    ----------
    cache : PagedKVCache
    metrics : EngineMetrics
        Latencies and counts of all requests so far; `EngineCollector` shows them to Prometheus.
    """

    def __init__(
        self,
        model: AnyModel,
        tokenizer: Tokenizer | None = None,
        *,
        num_blocks: int | Iterable[int] | None = None,
        memory: int | str = "1GiB",
        block_size: int = 16,
        prefix_caching: bool = True,
        max_batch_tokens: int = 2048,
        max_num_seqs: int = 64,
        schedule: str | QueuePolicy = "fcfs",
        max_overtakes: int = 64,
        backend: Backend | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_int("max_batch_tokens", max_batch_tokens, 1, 2**31 - 1, ", in Engine")
        check_int("max_num_seqs", max_num_seqs, 1, 2**31 - 1, ", in Engine")
        check_int("max_overtakes", max_overtakes, 1, 2**31 - 1, ", in Engine")
        waiting = WaitingQueue(make_policy(schedule), max_overtakes=max_overtakes)
        spec = model.config.kv_spec(str(model.dtype).removeprefix("torch."), block_size=block_size)
        self.model = model
        self.tokenizer = tokenizer
        self.metrics = EngineMetrics()
        if num_blocks is None:
            context_length = model.config.context_length
            num_blocks = pages_within(
                spec, memory, context_length=context_length, max_batch_tokens=max_batch_tokens
            )
        self.cache = PagedKVCache(
            spec,
            num_blocks,
            device=model.device,
            namespace=model.namespace,
            prefix_caching=prefix_caching,
            backend=backend,
        )
        limits = {"max_batch_tokens": max_batch_tokens, "max_num_seqs": max_num_seqs}
        self._scheduler = Scheduler(self.cache, waiting, **limits)
        self._submissions = Submissions(self.cache, model.config, tokenizer, **limits)
        self._clock = clock
        self._timed: dict[Request, None] = {}  # those with a deadline
        self._dropped: deque[Request] = deque()

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Answers that wait, preempted ones included; one for a request that has none yet."""
        return len(self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Answers that run."""
        return len(self._scheduler.running)

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        cache_salt: str | bytes | None = None,
        extras: Iterable[Any] | None = (),
        on_token: OnToken | None = None,
        deadline_s: float | None = None,
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
            Called after every token with (completion, new text); of beams once, at the end. The text may be
            empty while a character or a stop string is incomplete. It may abort requests; an aborted one is
            called no more. An exception in it fails its request, and no other.
        deadline_s : float, optional
            Seconds from now after which the request ends with what it has.

        Raises
        ------
        UsageError
            The request can never run: its tokens are wrong, its prompt fills the model's context, or it
            needs more pages than the pool has.
        """
        request = self._make_request(prompt, params, cache_salt, extras, on_token, deadline_s)
        self._queue(request)
        return request

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        cache_salt: str | bytes | None = None,
        extras: Iterable[Any] | None = (),
        deadline_s: float | None = None,
    ) -> TextIterator:
        """Queue a request for one answer; return an iterator over its text, which steps the engine.

        All other requests get on at the same time. Closing the iterator, or dropping it, aborts the request.

        Raises
        ------
        UsageError
            As `submit` does, and for more than one answer.
        """
        return TextIterator(self, prompt, params, cache_salt=cache_salt, extras=extras, deadline_s=deadline_s)

    def step(self) -> list[Request]:
        """Compute one step for all requests that fit in it; return those that finished.

        A request whose deadline has passed, whose logits are not finite or whose callback raises ends alone:
        its `finish_reason` says why, with the exception in `Request.error`.

        An exception in the computation, an interrupt say, leaves every request as it was before the step.
        One that comes while answers are extended aborts the requests of these answers. An interrupt in a
        callback reaches the caller when the step is complete and all its callbacks have been called. The
        engine stays usable in each case.

        Raises
        ------
        OutOfBlocksError
            Pages are held by somebody outside this engine, and not even one request fits beside them.
        """
        now_s = self._clock()
        finished = self._end_late(now_s)
        batch = self._scheduler.schedule()
        if batch is None:
            return finished
        made: list[Made] = []
        try:
            self._note_start(batch, now_s)
            meta = self.cache.prepare(batch.step)
            hidden = self.model.forward(self.cache, meta)
            choices = choose_all(self.model, hidden, batch.parts)
            # Closed before the commit, so that nothing of them is published.
            finished += [self._fail(job.request, error) for job, error in choices.failed if job.sequences]
            made = [each for each in choices.made if each.job.sequences]
            self.cache.commit(batch.step, choices.num_accepted)
            shown, done = self._advance(made)
        except BaseException:
            self._recover(batch, [each.job.request for each in made])
            raise
        return finished + done + self._show(shown)

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
        deadline_s: float | None = None,
    ) -> list[Request]:
        """Run `prompts` to their ends, together, and return their requests in order.

        One that fails says so in its `finish_reason` and `error`. An exception from a step aborts those that
        are not finished.

        Raises
        ------
        UsageError
            One of them can never run; then none is queued.
        """
        extras = _as_tuple(extras)
        requests = [
            self._make_request(prompt, params, cache_salt, extras, on_token, deadline_s) for prompt in prompts
        ]
        for request in requests:
            self._queue(request)
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
            self._end(request, "abort")

    def abort_later(self, request: Request) -> None:
        """End a request when the next step begins; for callers that may come in the middle of one."""
        if not request.is_finished:
            self._dropped.append(request)

    def _advance(self, made: list[Made]) -> tuple[list[tuple[Completion, str]], list[Request]]:
        """Take what was chosen; return each new token's text, and the requests that are finished by it."""
        now_s = self._clock()
        shown: list[tuple[Completion, str]] = []
        finished = []
        for job, choice, of_prompt in made:
            request = job.request
            request.prompt_logprobs += of_prompt
            if choice is None:
                continue
            progress = job.apply(choice)
            self._note_progress(job, len(progress.shown), now_s)
            shown += progress.shown
            for each in progress.forked:
                each.last_token_s = now_s
                self._scheduler.adopt(each)
            for each in (job, *progress.forked):
                if each.is_done:
                    self._scheduler.remove(each)
            if not request.jobs:
                self._finish(request, now_s)
                finished.append(request)
        return shown, finished

    def _show(self, shown: list[tuple[Completion, str]]) -> list[Request]:
        """Call the callbacks of all that none of them has ended; return the requests that fail by theirs."""
        interrupt: BaseException | None = None
        failed = []
        for completion, text in shown:
            request = completion.request
            if request.on_token is None or request.error is not None or completion.finish_reason == "abort":
                continue
            try:
                request.on_token(completion, text)
            except Exception as error:  # noqa: BLE001 (whatever it is, it must not cost others their text)
                if not request.is_finished:  # else it's among the finished already
                    failed.append(request)
                self._fail(request, error)
            except BaseException as error:  # noqa: BLE001 (raised below)
                interrupt = interrupt or error
        if interrupt is not None:
            raise interrupt
        return failed

    def _note_start(self, batch: Batch, now_s: float) -> None:
        for part in batch.parts:
            request = part.job.request
            if request.scheduled_s is None:
                request.scheduled_s = now_s
                request.num_cached_tokens = part.sequences[0].num_cached_tokens

    def _note_progress(self, job: Job, num_tokens: int, now_s: float) -> None:
        """Take down that an answer, or all beams of a request, grew."""
        if job.request.first_token_s is None:
            job.request.first_token_s = now_s
            self.metrics.note_first_token(job.request)
        self.metrics.note_tokens(num_tokens, job.last_token_s, now_s)
        job.last_token_s = now_s

    def _recover(self, batch: Batch, answering: list[Request]) -> None:
        """Undo a step that failed, or end the requests that it may have changed in part."""
        if batch.step.state == "committed":
            for request in answering:
                self.abort(request)
            return
        self.cache.abandon(batch.step)  # as if the step had never been
        for part in batch.parts:
            part.job.withdraw_draft()

    def _end_late(self, now_s: float) -> list[Request]:
        """End what nobody waits for any more, and what has had its time."""
        while self._dropped:
            self.abort(self._dropped.popleft())
        late = [each for each in self._timed if each.deadline_s is not None and each.deadline_s <= now_s]
        for request in late:
            self._end(request, "deadline")
        return late

    def _fail(self, request: Request, error: Exception) -> Request:
        request.error = error
        if not request.is_finished:
            self._end(request, "error")
        return request

    def _end(self, request: Request, reason: FinishReason) -> None:
        """End a request before its answers are complete."""
        unfinished = [each for each in request.completions if each.finish_reason is None]
        for job in [*request.jobs]:
            job.end_early()
            self._scheduler.remove(job)
        for completion in unfinished:
            completion.finish_reason = reason
        self._finish(request, self._clock())

    def _finish(self, request: Request, now_s: float) -> None:
        request.finished_s = now_s
        self._timed.pop(request, None)
        self.metrics.note_end(request)

    def _queue(self, request: Request) -> None:
        is_beams = request.params.num_beams > 1
        first = request.completions[0]
        self._scheduler.add(BeamJob(request, self.cache) if is_beams else SampleJob(first, self.cache))
        if request.deadline_s is not None:
            self._timed[request] = None

    def _make_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        cache_salt: str | bytes | None,
        extras: Iterable[Any] | None,
        on_token: OnToken | None,
        deadline_s: float | None,
    ) -> Request:
        return self._submissions.make(
            prompt,
            SamplingParams() if params is None else params,
            cache_salt=cache_salt,
            extras=_as_tuple(extras),
            on_token=on_token,
            deadline_s=deadline_s,
            now_s=self._clock(),
        )


def _as_tuple(extras: Iterable[Any] | None) -> tuple[Any, ...]:
    return tuple(check_iterable("extras", () if extras is None else extras))
