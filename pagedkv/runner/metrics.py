"""What an engine has done: latencies of its requests and tokens, as histograms and for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, get_args

from pagedkv.prometheus import Histogram, Metrics
from pagedkv.runner.completion import FinishReason
from pagedkv.stats import CacheCollector

if TYPE_CHECKING:
    from prometheus_client import Metric

    from pagedkv.runner.engine import Engine
    from pagedkv.runner.request import Request

LATENCIES_S = [float(f"{digit}e{power}") for power in range(-4, 3) for digit in (1, 2.5, 5)]
"""Bounds for seconds: 0.1 ms to 500 s."""
COUNTS = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]
"""Bounds for tokens: 1 to 500,000."""


class RequestStats(NamedTuple):
    """One request in numbers; None for what it did not come to.

    Attributes
    ----------
    num_prompt_tokens : int
        Of these, some were found, and the others computed.
    num_cached_tokens_by_source : dict of str to int
        Prompt tokens that were found, by where; ``"device"`` is the cache's own pages.
    num_computed_tokens : int
        Prompt tokens that were not found.
    num_output_tokens : int
        Of all answers.
    queue_s : float or None
        From submission to the first step that had it.
    time_to_first_token_s : float or None
        From submission.
    time_per_output_token_s : float or None
        The mean over the first answer's tokens after its first.
    finish_reason : str or None
    num_preemptions : int
    """

    num_prompt_tokens: int
    num_cached_tokens_by_source: dict[str, int]
    num_computed_tokens: int
    num_output_tokens: int
    queue_s: float | None
    time_to_first_token_s: float | None
    time_per_output_token_s: float | None
    finish_reason: FinishReason | None
    num_preemptions: int


class EngineMetrics:
    """Filled by an engine; others read it.

    Attributes
    ----------
    num_prompt_tokens, num_output_tokens : int
        Of requests that began to answer, and of their answers.
    num_preemptions : int
    num_finished_by : dict of str to int
        Requests that ended, by how.
    queue_s, time_to_first_token_s, inter_token_s, time_per_output_token_s, prefill_s, decode_s, total_s
        Histograms of seconds. `inter_token_s` has each gap between two steps that brought tokens;
        `time_per_output_token_s` a request's mean. `total_s` is from submission to end.
    prompt_tokens, computed_tokens, output_tokens
        Histograms of tokens a request: its prompt, what was computed of it, its answers.
    """

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_preemptions = 0
        self.num_finished_by: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        self.queue_s, self.time_to_first_token_s = Histogram(LATENCIES_S), Histogram(LATENCIES_S)
        self.inter_token_s, self.time_per_output_token_s = Histogram(LATENCIES_S), Histogram(LATENCIES_S)
        self.prefill_s, self.decode_s = Histogram(LATENCIES_S), Histogram(LATENCIES_S)
        self.total_s = Histogram(LATENCIES_S)
        self.prompt_tokens, self.computed_tokens = Histogram(COUNTS), Histogram(COUNTS)
        self.output_tokens = Histogram(COUNTS)

    def note_tokens(self, num_tokens: int, previous_s: float | None, now_s: float) -> None:
        """Count what a step brought to an answer whose last tokens came at `previous_s`."""
        self.num_output_tokens += num_tokens
        if previous_s is not None:
            self.inter_token_s.add(now_s - previous_s)

    def note_first_token(self, request: Request) -> None:
        """Count a request that begins to answer."""
        self.num_prompt_tokens += request.num_prompt_tokens
        self._add(self.time_to_first_token_s, request.time_to_first_token_s)
        self._add(self.queue_s, request.queue_s)
        self._add(self.prefill_s, request.prefill_s)

    def note_end(self, request: Request) -> None:
        """Count a request that is finished, however it ended."""
        assert request.finish_reason is not None
        assert request.finished_s is not None
        self.num_finished_by[request.finish_reason] += 1
        self.num_preemptions += request.num_preemptions
        self.total_s.add(request.finished_s - request.submitted_s)
        self._add(self.time_per_output_token_s, request.time_per_output_token_s)
        if request.first_token_s is not None:
            self.decode_s.add(request.finished_s - request.first_token_s)
            self.prompt_tokens.add(request.num_prompt_tokens)
            self.computed_tokens.add(request.num_prompt_tokens - request.num_cached_tokens)
            self.output_tokens.add(request.num_output_tokens)

    @staticmethod
    def _add(histogram: Histogram, value: float | None) -> None:
        if value is not None:
            histogram.add(value)


class EngineCollector:
    """An engine and its cache for Prometheus, read when somebody asks.

    So they are served while it runs::

        with MetricsServer(EngineCollector(engine), port=9400):
            engine.run()

    Parameters
    ----------
    engine : Engine
    prefix : str
        Before the colon of each name; ``"vllm"`` gives vLLM's own names, for dashboards made for it.
    labels : mapping of str to str, optional
        On every metric, beside ``model_name`` and ``engine`` ("0"), which it may replace.

    Raises
    ------
    BackendUnavailableError
        prometheus-client is not installed.
    UsageError
        For a prefix or label that Prometheus has no place for.
    """

    def __init__(
        self, engine: Engine, *, prefix: str = "pagedkv", labels: Mapping[str, str] | None = None
    ) -> None:
        labels = {"model_name": engine.model.config.name, "engine": "0", **(labels or {})}
        self._engine = engine
        self._cache = CacheCollector(engine.cache, prefix=prefix, labels=labels)
        self._metrics = Metrics(prefix, labels)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        yield from self._cache.collect()
        engine, make, counts = self._engine, self._metrics, self._engine.metrics
        yield make.gauge("num_requests_running", "Answers that run.", engine.num_running)
        yield make.gauge("num_requests_waiting", "Answers that wait.", engine.num_waiting)
        yield make.counter("num_preemptions", "How often requests gave way.", counts.num_preemptions)
        yield make.counter("prompt_tokens", "Tokens of prompts.", counts.num_prompt_tokens)
        yield make.counter("generation_tokens", "Tokens of answers.", counts.num_output_tokens)
        yield make.counters(
            "request_success", "Requests that ended, by how.", "finished_reason", dict(counts.num_finished_by)
        )
        for name, meaning, histogram in (
            (
                "time_to_first_token_seconds",
                "From submission to the first token.",
                counts.time_to_first_token_s,
            ),
            ("inter_token_latency_seconds", "Between two tokens of an answer.", counts.inter_token_s),
            (
                "request_time_per_output_token_seconds",
                "A request's mean between two tokens.",
                counts.time_per_output_token_s,
            ),
            ("e2e_request_latency_seconds", "From submission to the end.", counts.total_s),
            ("request_queue_time_seconds", "From submission to the first step.", counts.queue_s),
            ("request_prefill_time_seconds", "From the first step to the first token.", counts.prefill_s),
            ("request_decode_time_seconds", "From the first token to the end.", counts.decode_s),
            ("request_prompt_tokens", "Tokens of a prompt.", counts.prompt_tokens),
            ("request_prefill_kv_computed_tokens", "Of a prompt, those computed.", counts.computed_tokens),
            ("request_generation_tokens", "Tokens of a request's answers.", counts.output_tokens),
        ):
            yield make.histogram(name, meaning, histogram.bounds, [*histogram.counts], histogram.total)
