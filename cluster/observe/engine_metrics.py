"""The engine's statistics as Prometheus metrics, read from the last StepOutput at scrape time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.comm.ipc import EngineStats

PREFIX = "secateur_"

# stem -> (what it counts, how to read it)
COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
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
    "num_drafter_losses": ("Times that the engine lost its drafter and went on.", lambda s: s.num_drafter_losses),
    "num_draft_head_swaps": ("Times that another draft head took over.", lambda s: s.num_head_swaps),
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
PER_POSITION: dict[str, tuple[str, Callable[[EngineStats], list[int]]]] = {
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
GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Requests in the running batch.", lambda s: s.num_running),
    "num_requests_waiting": ("Requests that wait for a place in it.", lambda s: s.num_waiting),
    "drafter_connected": ("1 while the engine has its drafter, 0 without one.", lambda s: s.has_drafter),
    "draft_head_decayed": (
        "1 while far less of the drafts is accepted than the draft model's training promised.",
        lambda s: bool(s.head_note),
    ),
    "kv_cache_usage_perc": ("Share of KV pages that requests hold, 0 to 1.", lambda s: s.kv_usage),
}
GAUGES_PER_POSITION: dict[str, tuple[str, Callable[[EngineStats], list[float]]]] = {
    "spec_decode_greedy_acceptance_per_pos": (
        "Share of greedy requests' drafts accepted at each depth, of some 500 recent trees.",
        lambda s: s.greedy_acceptance,
    ),
    "spec_decode_sampled_acceptance_per_pos": ("The same of other requests.", lambda s: s.sampled_acceptance),
}


def by_depth(*counts: Sequence[int]) -> list[int]:
    """Add lists of counts per depth. Example: by_depth([3, 1], [2]) == [5, 1]."""
    return [sum(level) for level in zip_longest(*counts, fillvalue=0)]


class EngineCollector(Collector):
    """Exports the statistics that `stats` returns at the moment of a scrape."""

    def __init__(self, labels: Mapping[str, str], stats: Callable[[], EngineStats]) -> None:
        self._names = list(labels)
        self._values = list(labels.values())
        self._stats = stats

    def describe(self) -> list[Metric]:
        """Return nothing: the names are known only with the statistics."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each statistic."""
        stats = self._stats()
        for stem, (text, read) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + stem, text, labels=self._names)
            counter.add_metric(self._values, read(stats))
            yield counter
        for stem, (text, per_depth) in PER_POSITION.items():
            counter = CounterMetricFamily(PREFIX + stem, text, labels=[*self._names, "position"])
            for position, number in enumerate(per_depth(stats)):
                counter.add_metric([*self._values, str(position)], number)
            yield counter
        for stem, (text, shares) in GAUGES_PER_POSITION.items():
            gauge = GaugeMetricFamily(PREFIX + stem, text, labels=[*self._names, "position"])
            for position, share in enumerate(shares(stats)):
                gauge.add_metric([*self._values, str(position)], share)
            yield gauge
        for stem, (text, read) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + stem, text, labels=self._names)
            gauge.add_metric(self._values, read(stats))
            yield gauge
