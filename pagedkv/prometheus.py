"""Counters as Prometheus wants them, and a port to ask at. Importing this needs no prometheus-client."""

from __future__ import annotations

import importlib
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pagedkv.checks import check_int, show
from pagedkv.errors import BackendUnavailableError, UsageError

if TYPE_CHECKING:
    from prometheus_client import Metric


class Histogram:
    """Counts values by size; one thread adds while others may read.

    Parameters
    ----------
    bounds : sequence of float
        Ascending; a value falls below the first bound that is not smaller than it.

    Attributes
    ----------
    counts : list of int [len(bounds) + 1]
        Values by bound, the last one for those above all.
    total : float
        The sum of the values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics:
    """Makes metrics that share a prefix and labels. Needs prometheus-client.

    Parameters
    ----------
    prefix : str
        Before the colon of each name; ``"vllm"`` gives the names that dashboards for vLLM ask for.
    labels : mapping of str to str, optional
        On every metric.

    Raises
    ------
    BackendUnavailableError
        prometheus-client is not installed.
    UsageError
        For a prefix or label that Prometheus has no place for.
    """

    def __init__(self, prefix: str = "pagedkv", labels: Mapping[str, str] | None = None) -> None:
        for what, name in (("prefix", prefix), *(("labels", label) for label in labels or ())):
            if not isinstance(name, str) or not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name):
                raise UsageError(f"{what}: expected letters, digits and underscores, got {show(name)}")
        self._core = _prometheus_client("Metrics").core
        self._prefix = prefix
        self._labels = dict(labels or {})

    def counter(self, name: str, meaning: str, value: float) -> Metric:
        """Make a counter; Prometheus appends ``_total`` to its name."""
        return self._family(self._core.CounterMetricFamily, name, meaning, "", {"": value})

    def counters(self, name: str, meaning: str, label: str, values: Mapping[str, float]) -> Metric:
        """Make counters that `label` tells apart."""
        return self._family(self._core.CounterMetricFamily, name, meaning, label, values)

    def gauge(self, name: str, meaning: str, value: float) -> Metric:
        """Make a gauge."""
        return self._family(self._core.GaugeMetricFamily, name, meaning, "", {"": value})

    def gauges(self, name: str, meaning: str, label: str, values: Mapping[str, float]) -> Metric:
        """Make gauges that `label` tells apart."""
        return self._family(self._core.GaugeMetricFamily, name, meaning, label, values)

    def histogram(
        self, name: str, meaning: str, bounds: Iterable[float], counts: Iterable[int], total: float | None
    ) -> Metric:
        """Make a histogram of `counts` by bound, one more than there are; a `total` of None is left out."""
        family = self._core.HistogramMetricFamily(f"{self._prefix}:{name}", meaning, labels=[*self._labels])
        edges = [*(str(float(bound)) for bound in bounds), "+Inf"]
        buckets = list(zip(edges, accumulate(counts), strict=True))
        family.add_metric([*self._labels.values()], buckets=buckets, sum_value=total)
        return family  # type: ignore[no-any-return]

    def _family(self, kind: Any, name: str, meaning: str, label: str, values: Mapping[str, float]) -> Metric:
        extra = [label] if label else []
        family = kind(f"{self._prefix}:{name}", meaning, labels=[*self._labels, *extra])
        for of, value in values.items():
            family.add_metric([*self._labels.values(), *([of] if label else [])], value)
        return family  # type: ignore[no-any-return]


class MetricsServer:
    """Serves collectors at ``http://host:port/metrics`` from a thread of its own, until it is closed.

    Parameters
    ----------
    collectors : CacheCollector, EngineCollector or whatever has `collect`
        Each is asked whenever somebody scrapes, in the server's thread.
    port : int
        0 takes any free one; `port` then tells which.
    host : str
        Where to listen: ``"0.0.0.0"`` lets other machines ask too.

    Raises
    ------
    BackendUnavailableError
        prometheus-client is not installed.
    UsageError
        Nobody can listen there: the port is taken, or `host` is no address of this machine.
    """

    def __init__(self, *collectors: Any, port: int, host: str = "127.0.0.1") -> None:
        client = _prometheus_client("MetricsServer")
        check_int("port", port, 0, 65535, ", in MetricsServer")
        registry = client.CollectorRegistry()
        for collector in collectors:
            registry.register(collector)
        try:
            self._server, self._thread = client.start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise UsageError(f"port: expected one that is free, got {port} on {host}: {error}") from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving. A second call does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _prometheus_client(where: str) -> ModuleType:
    try:
        importlib.import_module("prometheus_client.core")
        return importlib.import_module("prometheus_client")
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(
            "prometheus-client: expected to be installed (pip install 'pagedkv[metrics]'), got no such "
            f"module, in {where}"
        ) from error
