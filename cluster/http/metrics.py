"""Prometheus metrics of one service, with vLLM's names under our prefix.

Request metrics are observed when a request ends, token metrics at every delta; engine metrics are read from the last
StepOutput at scrape time. Accepted tokens are counted here and not in the engine, which does not know what a stop
string cuts off. Every sample has the labels `model_name` and `replica`, because scrapes of one address may reach
different replicas. Acceptance length = 1 + num_accepted_tokens / num_drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import zip_longest

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.comm.ipc import EngineStats, RequestStats

PREFIX = "secateur_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)

# stem -> (what it counts, how to read it)
_COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "spec_decode_num_drafts": ("Steps that verified at least one draft node.", lambda s: s.num_drafts),
    "spec_decode_num_draft_tokens": ("Tree nodes drafted or copied: pruned or verified.", lambda s: s.num_draft_tokens),
    "spec_decode_num_pruned_tokens": ("Draft nodes that pruning kept out.", lambda s: sum(s.pruned_per_depth)),
    "spec_decode_num_verified_tokens": ("Draft nodes that went through the target.", lambda s: s.num_verified_tokens),
    "spec_decode_num_accepted_tokens": ("Draft tokens accepted and answered.", lambda s: s.num_accepted_tokens),
    "spec_decode_num_copied_tokens": (
        "Of the verified: copied from earlier text instead of drafted.",
        lambda s: s.num_copied_tokens,
    ),
    "spec_decode_num_accepted_copied_tokens": (
        "Of the accepted: copied from earlier text.",
        lambda s: s.num_accepted_copied_tokens,
    ),
    "spec_decode_num_trees": ("Trees that the drafter sent.", lambda s: s.num_trees),
    "spec_decode_num_predrafted_trees": (
        "Of them: grown while the target verified.",
        lambda s: s.num_predrafted,
    ),
    "num_drafter_losses": ("Times that the engine lost its drafter and went on.", lambda s: s.num_drafter_losses),
    "num_preemptions": ("Requests that lost their KV pages to others.", lambda s: s.num_preemptions),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_cache_queries),
    "prefix_cache_hits": ("Prompt tokens found there.", lambda s: s.prefix_cache_hits),
    "engine_steps": ("Engine steps.", lambda s: s.steps),
    "engine_prompt_tokens": ("Prompt tokens computed or found in the prefix cache.", lambda s: s.prompt_tokens),
    "engine_generation_tokens": ("Tokens committed.", lambda s: s.generation_tokens),
    "step_seconds": ("Seconds spent in steps.", lambda s: s.step_seconds),
    "draft_seconds": ("Seconds of steps spent in the drafter.", lambda s: s.draft_seconds),
    "transfer_seconds": ("Seconds of steps between the two, both ways.", lambda s: s.transfer_seconds),
    "verify_seconds": ("Seconds of steps spent in the target.", lambda s: s.verify_seconds),
}
# The same per depth of the tree, in place of vLLM's position in a chain.
_PER_POSITION: dict[str, tuple[str, Callable[[EngineStats], list[int]]]] = {
    "spec_decode_num_draft_tokens_per_pos": (
        "Tree nodes drafted at each depth (0 = directly below the root).",
        lambda s: by_depth(s.pruned_per_depth, s.verified_per_depth),
    ),
    "spec_decode_num_pruned_tokens_per_pos": ("Draft nodes pruned at each depth.", lambda s: s.pruned_per_depth),
    "spec_decode_num_verified_tokens_per_pos": ("Draft nodes verified at each depth.", lambda s: s.verified_per_depth),
    "spec_decode_num_accepted_tokens_per_pos": (
        "Draft tokens accepted and answered at each depth.",
        lambda s: s.accepted_per_depth,
    ),
}
_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Requests in the running batch.", lambda s: s.num_running),
    "num_requests_waiting": ("Requests that wait for a place in it.", lambda s: s.num_waiting),
    "drafter_connected": ("1 while the engine has its drafter, 0 without one.", lambda s: s.has_drafter),
    "kv_cache_usage_perc": ("Share of KV pages that requests hold, 0 to 1.", lambda s: s.kv_usage),
}


def by_depth(*counts: Sequence[int]) -> list[int]:
    """Add lists of counts per depth. Example: by_depth([3, 1], [2]) == [5, 1]."""
    return [sum(level) for level in zip_longest(*counts, fillvalue=0)]


class _EngineCollector(Collector):
    def __init__(self, labels: Mapping[str, str], stats: Callable[[], EngineStats]) -> None:
        self._names = list(labels)
        self._values = list(labels.values())
        self._stats = stats

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for stem, (text, read) in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + stem, text, labels=self._names)
            counter.add_metric(self._values, read(stats))
            yield counter
        for stem, (text, per_depth) in _PER_POSITION.items():
            counter = CounterMetricFamily(PREFIX + stem, text, labels=[*self._names, "position"])
            for position, number in enumerate(per_depth(stats)):
                counter.add_metric([*self._values, str(position)], number)
            yield counter
        for stem, (text, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + stem, text, labels=self._names)
            gauge.add_metric(self._values, read(stats))
            yield gauge


class Metrics:
    """One registry per service, so that several can live in one process (tests do)."""

    def __init__(self, model_name: str, replica: str, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "replica": replica}
        names, registry = list(self._labels), self.registry
        self._ttft = Histogram(
            PREFIX + "time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            names,
            registry=registry,
            buckets=_TTFT_BUCKETS,
        )
        self._tpot = Histogram(
            PREFIX + "request_time_per_output_token_seconds",
            "Per request: time from the first to the last token, per further token.",
            names,
            registry=registry,
            buckets=_TPOT_BUCKETS,
        )
        self._e2e = Histogram(
            PREFIX + "e2e_request_latency_seconds",
            "From arrival to the last token.",
            names,
            registry=registry,
            buckets=_E2E_BUCKETS,
        )
        self._finished = Counter(
            PREFIX + "request_success",
            "Requests that ended, by reason (stop, length, abort, error).",
            [*names, "finished_reason"],
            registry=registry,
        )
        self._prompt = Counter(PREFIX + "prompt_tokens", "Prompt tokens of ended requests.", names, registry=registry)
        self._generated = Counter(PREFIX + "generation_tokens", "Tokens answered.", names, registry=registry)
        self._returned = RequestStats()
        self._rejected = Counter(
            PREFIX + "requests_rejected", "Requests turned away: too many were pending.", names, registry=registry
        )
        self._rejected.labels(**self._labels)
        self._client_requests = Gauge(
            PREFIX + "client_requests_running",
            "HTTP requests of clients, from their first byte to the last of the answer; batch jobs are not among them.",
            names,
            registry=registry,
        )
        self._client_requests.labels(**self._labels)
        self._batch_lines = Counter(
            PREFIX + "batch_lines",
            "Lines of batch jobs that this replica answered, by result (completed, failed).",
            [*names, "result"],
            registry=registry,
        )
        registry.register(_EngineCollector(self._labels, lambda: self._with_returned(stats())))

    def _with_returned(self, stats: EngineStats) -> EngineStats:
        return replace(
            stats,
            accepted_per_depth=self._returned.accepted_per_depth,
            num_accepted_copied_tokens=self._returned.num_accepted_copied_tokens,
        )

    def observe_tokens(self, num_tokens: int, num_accepted: int, *, is_copied: bool) -> None:
        """Count the tokens that one step added to a choice; the first `num_accepted` of them were draft tokens."""
        self._generated.labels(**self._labels).inc(num_tokens)
        self._returned.count_nodes([], [], num_accepted)
        self._returned.num_accepted_copied_tokens += num_accepted * is_copied

    def observe_finished(
        self,
        reason: str,
        *,
        prompt_tokens: int,
        generation_tokens: int,
        total_s: float,
        first_token_s: float | None,
        last_token_s: float | None,
    ) -> None:
        """Record a finished choice. Times are seconds since the request's arrival; None = it has no token."""
        self._finished.labels(**self._labels, finished_reason=reason).inc()
        self._prompt.labels(**self._labels).inc(prompt_tokens)
        self._e2e.labels(**self._labels).observe(total_s)
        if first_token_s is not None and last_token_s is not None:
            self._ttft.labels(**self._labels).observe(first_token_s)
            if generation_tokens > 1:
                self._tpot.labels(**self._labels).observe((last_token_s - first_token_s) / (generation_tokens - 1))

    def observe_rejected(self) -> None:
        """Count a request answered with 429."""
        self._rejected.labels(**self._labels).inc()

    def client_request(self) -> AbstractContextManager[None]:
        """Return a context in which one more request of a client is running."""
        return self._client_requests.labels(**self._labels).track_inprogress()

    def observe_batch_lines(self, num_completed: int, num_failed: int) -> None:
        """Count lines of batch jobs whose answers were recorded."""
        for result, number in (("completed", num_completed), ("failed", num_failed)):
            self._batch_lines.labels(**self._labels, result=result).inc(number)

    def render(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self.registry)
