"""Prometheus metrics of one service, with vLLM's names under our prefix.

Request metrics are observed when a request ends, token metrics at every delta; `engine_metrics` reads the engine's at
scrape time. Accepted tokens are counted here and not in the engine, which does not know what a stop string cuts off.
Every sample has the labels `model_name` and `replica`, because scrapes of one address may reach different replicas.
Acceptance length = 1 + num_accepted_tokens / num_drafts. The fronts of one engine are one service: each keeps its
values in files (prometheus_client's multiprocess mode), and a scrape of any of them sums up all.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from cluster.observe.engine_metrics import COUNTERS as ENGINE_COUNTERS
from cluster.observe.engine_metrics import GAUGES, GAUGES_PER_POSITION, PER_POSITION, PREFIX, EngineCollector
from cluster.system.shared import Shared
from secateur.token_tree import MAX_NODES
from workers.comm.ipc import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_PHASE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_LENGTH_BUCKETS = tuple(1 << power for power in range(0, 18))

# stem -> (what it measures, buckets)
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From the request's arrival to its first token.", _TTFT_BUCKETS),
    "inter_token_latency_seconds": ("From a step with tokens of a request to its next one.", _TPOT_BUCKETS),
    "request_time_per_output_token_seconds": (
        "Per request: time from the first to the last token, per further token.",
        _TPOT_BUCKETS,
    ),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _E2E_BUCKETS),
    "request_queue_time_seconds": ("In the engine, before the request first joins the running batch.", _PHASE_BUCKETS),
    "request_prefill_time_seconds": ("From then to the first token.", _PHASE_BUCKETS),
    "request_decode_time_seconds": ("From the first to the last token.", _PHASE_BUCKETS),
    "request_inference_time_seconds": ("Prefill and decode: from the running batch to the last token.", _PHASE_BUCKETS),
    "request_prompt_tokens": ("Prompt tokens of a request.", _LENGTH_BUCKETS),
    "request_generation_tokens": ("Tokens that a request got.", _LENGTH_BUCKETS),
    "request_params_max_tokens": ("Tokens that a request asked for at most.", _LENGTH_BUCKETS),
}
# stem -> (what it counts, further labels)
_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "request_success": ("Requests that ended, by reason: stop, length, abort, error.", ("finished_reason",)),
    "prompt_tokens": ("Prompt tokens of ended requests.", ()),
    "generation_tokens": ("Tokens answered.", ()),
    "requests_rejected": ("Requests turned away: too many were pending.", ()),
    "key_requests": (
        "POST requests with an API key, by its name; outcome: accepted, requests_limited, tokens_limited.",
        ("key", "outcome"),
    ),
    "key_tokens": ("Tokens used by the holders of API keys; type: prompt, generation.", ("key", "type")),
    "batch_lines": ("Lines of batch jobs that this replica answered; result: completed, failed.", ("result",)),
    "http_requests": ("HTTP responses, by status.", ("method", "handler", "status")),
}
_HTTP_SECONDS = "http_request_duration_seconds"
_HTTP_SECONDS_TEXT = "From a request's headers to the end of its response."
_CLIENT_REQUESTS = "client_requests_running"
_CLIENT_REQUESTS_TEXT = "HTTP requests of clients that are being answered; those of batch jobs are not among them."
MAX_GAPS = 256
"""Steps after which they are counted at the latest."""
_COMMON = ("model_name", "replica")
_FINISH_REASONS = ("stop", "length", "abort", "error")
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})


@dataclass(slots=True, kw_only=True)
class RequestTimes:
    """When a request got how far, in seconds since its arrival; None = it did not.

    Example: RequestTimes(submitted=0.01, scheduled=0.02, first_token=0.1, last_token=0.9, end=0.9)
    """

    submitted: float | None = None
    """It went to the engine."""
    scheduled: float | None = None
    """It joined the running batch."""
    first_token: float | None = None
    last_token: float | None = None
    end: float = 0.0


class Description(NamedTuple):
    """Describes a metric for the reference. `name` is the family's; Prometheus adds _total to counters."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def descriptions() -> list[Description]:
    """Return all metrics of a service, without the standard ones of its process."""
    return [
        *(Description(PREFIX + stem, "histogram", _COMMON, text) for stem, (text, _) in _HISTOGRAMS.items()),
        Description(PREFIX + _HTTP_SECONDS, "histogram", (*_COMMON, "method", "handler"), _HTTP_SECONDS_TEXT),
        *(Description(PREFIX + stem, "counter", (*_COMMON, *own), text) for stem, (text, own) in _COUNTERS.items()),
        Description(PREFIX + _CLIENT_REQUESTS, "gauge", _COMMON, _CLIENT_REQUESTS_TEXT),
        *(Description(PREFIX + stem, "gauge", _COMMON, text) for stem, (text, _) in GAUGES.items()),
        *(Description(PREFIX + stem, "counter", _COMMON, text) for stem, (text, _) in ENGINE_COUNTERS.items()),
        *(
            Description(PREFIX + stem, kind, (*_COMMON, "position"), table[stem][0])
            for kind, table in (("counter", PER_POSITION), ("gauge", GAUGES_PER_POSITION))
            for stem in table
        ),
    ]


class Metrics:
    """One registry per service, so that several can live in one process (tests do)."""

    def __init__(
        self, model_name: str, replica: str, stats: Callable[[], EngineStats], shared: Shared | None = None
    ) -> None:
        shared = shared or Shared()
        self.registry = CollectorRegistry()
        self._folder = metrics_folder(shared.folder)
        self._unsummed = self.registry if self._folder is None else CollectorRegistry()  # all fronts have the same
        self._labels = dict(zip(_COMMON, (model_name, replica), strict=True))
        self._histograms = {
            stem: Histogram(PREFIX + stem, text, list(self._labels), registry=self.registry, buckets=buckets)
            for stem, (text, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            stem: Counter(PREFIX + stem, text, [*self._labels, *own], registry=self.registry)
            for stem, (text, own) in _COUNTERS.items()
        }
        self._http_seconds = Histogram(
            PREFIX + _HTTP_SECONDS,
            _HTTP_SECONDS_TEXT,
            [*self._labels, "method", "handler"],
            registry=self.registry,
            buckets=_E2E_BUCKETS,
        )
        # A counter that begins at 0 lets `rate` see its first event.
        for reason in _FINISH_REASONS:
            self._count("request_success", 0, finished_reason=reason)
        self.observe_batch_lines(0, 0)
        for stem in ("prompt_tokens", "generation_tokens", "requests_rejected"):
            self._count(stem, 0)
        self._num_uncounted, self._gaps_s = 0, list[float]()
        self._series: dict[str, Histogram] = {}  # by stem, those with observations
        # Of all fronts: accepted tokens by depth, and last the copied ones.
        self._returned = shared.array("returned", (shared.num_fronts, MAX_NODES + 1), np.int64)
        self._own_returned = self._returned[shared.number]
        self._client_requests = Gauge(
            PREFIX + _CLIENT_REQUESTS,
            _CLIENT_REQUESTS_TEXT,
            list(self._labels),
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self._client_requests.labels(**self._labels)
        self._unsummed.register(EngineCollector(self._labels, lambda: self._with_returned(stats())))
        self._unsummed.register(_ProcessCollector(self._labels, self._folder))

    def _with_returned(self, stats: EngineStats) -> EngineStats:
        *accepted, num_copied = self._returned.sum(axis=0).tolist()
        by_depth = accepted[: len(accepted) - accepted[::-1].count(0)]
        return replace(stats, accepted_per_depth=by_depth, num_accepted_copied_tokens=num_copied)

    def _count(self, stem: str, amount: float = 1, **labels: str) -> None:
        self._counters[stem].labels(**self._labels, **labels).inc(amount)

    def _observe(self, stem: str, value: float) -> None:
        if (series := self._series.get(stem)) is None:  # looking a series up takes as long as observing twice
            series = self._series[stem] = self._histograms[stem].labels(**self._labels)
        series.observe(value)

    def observe_tokens(
        self, num_tokens: int, num_accepted: int, *, is_copied: bool, gap_s: float | None = None
    ) -> None:
        """Count the tokens that one step added to a choice; the first `num_accepted` of them were draft tokens.

        gap_s: seconds since the choice's last step with tokens; None = this is the first.
        """
        self._num_uncounted += num_tokens
        if num_accepted:
            self._own_returned[:num_accepted] += 1
            self._own_returned[-1] += num_accepted * is_copied
        if gap_s is not None:
            self._gaps_s.append(gap_s)
            if len(self._gaps_s) >= MAX_GAPS:
                self._flush()

    def _flush(self) -> None:
        """Count the steps observed since the last call: for each of them alone this takes ten times as long."""
        tokens, self._num_uncounted = self._num_uncounted, 0
        self._counters["generation_tokens"].labels(**self._labels).inc(tokens)
        if not self._gaps_s:
            return
        gaps_s, self._gaps_s = self._gaps_s, []
        series = self._histograms["inter_token_latency_seconds"].labels(**self._labels)
        series._sum.inc(sum(gaps_s))
        for bucket, number in Counts(np.searchsorted(series._upper_bounds, gaps_s).tolist()).items():
            series._buckets[bucket].inc(number)

    def observe_finished(
        self, reason: str, times: RequestTimes, *, prompt_tokens: int, generation_tokens: int, max_tokens: int
    ) -> None:
        """Record a finished choice."""
        self._flush()  # other fronts of the service read files, and see all steps of what has ended
        self._count("request_success", finished_reason=reason)
        self._count("prompt_tokens", prompt_tokens)
        self._observe("e2e_request_latency_seconds", times.end)
        self._observe("request_prompt_tokens", prompt_tokens)
        self._observe("request_generation_tokens", generation_tokens)
        self._observe("request_params_max_tokens", max_tokens)
        if times.scheduled is None or times.first_token is None or times.last_token is None:
            return
        decode_s = times.last_token - times.first_token
        self._observe("time_to_first_token_seconds", times.first_token)
        self._observe("request_prefill_time_seconds", times.first_token - times.scheduled)
        self._observe("request_decode_time_seconds", decode_s)
        self._observe("request_inference_time_seconds", times.last_token - times.scheduled)
        if generation_tokens > 1:
            self._observe("request_time_per_output_token_seconds", decode_s / (generation_tokens - 1))

    def observe_queued(self, seconds: float) -> None:
        """Record how long a choice waited in the engine's queue."""
        self._observe("request_queue_time_seconds", seconds)

    def observe_rejected(self) -> None:
        """Count a request answered with 429."""
        self._count("requests_rejected")

    def observe_key_request(self, name: str, outcome: str) -> None:
        """Count a request of an API key's holder. `name` is the key's name, never the key."""
        self._count("key_requests", key=name, outcome=outcome)

    def observe_key_tokens(self, name: str, prompt_tokens: int, generation_tokens: int) -> None:
        """Count tokens that the holder of an API key used."""
        for kind, number in (("prompt", prompt_tokens), ("generation", generation_tokens)):
            if number:
                self._count("key_tokens", number, key=name, type=kind)

    def observe_http(self, method: str, handler: str, status: int, seconds: float) -> None:
        """Count an HTTP response. `handler` is the route's pattern, so that clients cannot add series."""
        method = method if method in _METHODS else "other"
        self._count("http_requests", method=method, handler=handler, status=str(status))
        self._http_seconds.labels(**self._labels, method=method, handler=handler).observe(seconds)

    def client_request(self) -> AbstractContextManager[None]:
        """Return a context in which one more request of a client is running."""
        return self._client_requests.labels(**self._labels).track_inprogress()

    def observe_batch_lines(self, num_completed: int, num_failed: int) -> None:
        """Count lines of batch jobs whose answers were recorded."""
        for result, number in (("completed", num_completed), ("failed", num_failed)):
            self._count("batch_lines", number, result=result)

    def render(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        self._flush()
        if self._folder is None:
            return generate_latest(self.registry)
        summed = CollectorRegistry()
        MultiProcessCollector(summed, str(self._folder))
        return generate_latest(summed) + generate_latest(self._unsummed)


def metrics_folder(shared: Path | None) -> Path | None:
    """Return where fronts keep their metrics, which their environment's PROMETHEUS_MULTIPROC_DIR names, too."""
    return None if shared is None else shared / "metrics"


class _ProcessCollector(Collector):
    """Prometheus's standard metrics of this process, or of all fronts together, with our labels."""

    def __init__(self, labels: Mapping[str, str], folder: Path | None) -> None:
        self._labels = dict(labels)
        self._folder = folder

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for pid in self._pids():
            for family in ProcessCollector(pid=partial(str, pid), registry=CollectorRegistry()).collect():
                total = families.setdefault(family.name, family)
                add = min if family.name == "process_start_time_seconds" else float.__add__
                values = zip(total.samples, family.samples, strict=True)
                total.samples = [
                    sample._replace(
                        labels={**sample.labels, **self._labels},
                        value=sample.value if total is family else add(float(sample.value), float(other.value)),
                    )
                    for sample, other in values
                ]
        yield from families.values()

    def _pids(self) -> list[str]:
        if self._folder is None:
            return ["self"]
        return [path.stem.rpartition("_")[2] for path in self._folder.glob("gauge_livesum_*.db")]
