"""What `secateur top` shows: the figures of a running service, from two reads of its /metrics."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from secateur.errors import SecateurError

PREFIX = "secateur_"


class Reading(NamedTuple):
    """The metrics of one replica at one moment."""

    model: str
    replica: str
    at: float
    """Seconds of a monotonic clock."""
    values: Mapping[str, float]
    """By name, without our prefix and `_total`; summed over other labels."""


def readings_of(text: str, at: float | None = None) -> list[Reading]:
    """Return the readings in a text of /metrics, one per replica. Raises SecateurError if it has none."""
    at = time.monotonic() if at is None else at
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError as error:
        raise SecateurError(f"/metrics is not in Prometheus's text format: {error}") from None
    found: dict[tuple[str, str], dict[str, float]] = {}
    for sample in (sample for family in families for sample in family.samples if sample.name.startswith(PREFIX)):
        values = found.setdefault((sample.labels.get("model_name", ""), sample.labels.get("replica", "")), {})
        name = sample.name.removeprefix(PREFIX).removesuffix("_total")
        values[name] = values.get(name, 0.0) + sample.value
    if not found:
        raise SecateurError("/metrics has no metrics of Secateur; is this another service?")
    return [Reading(model, replica, at, values) for (model, replica), values in found.items()]


Figures = dict[str, float | None]
"""A span of time in figures, by name; None where nothing happened to measure, and in rates since the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One replica: its state now, and its figures of the last interval and since its start."""

    model: str
    replica: str
    requests_running: int
    requests_waiting: int
    kv_cache_usage: float
    """Share of the KV pages, 0 to 1."""
    has_drafter: bool
    seconds: float | None
    """Length of the last interval; None at the first reading."""
    now: Figures | None
    since_start: Figures


def view_of(reading: Reading, before: Reading | None) -> ReplicaView:
    """Return the view of a replica from its latest reading and the one before."""
    is_same = before is not None and all(
        reading.values.get(name, 0.0) >= before.values.get(name, 0.0) for name in ("engine_steps", "step_seconds")
    )
    if before is None or not is_same or reading.at <= before.at:  # the first reading, or the engine is another one
        seconds, now = None, None
    else:
        seconds = reading.at - before.at
        now = _figures({name: value - before.values.get(name, 0.0) for name, value in reading.values.items()}, seconds)
    return ReplicaView(
        model=reading.model,
        replica=reading.replica,
        requests_running=round(reading.values.get("num_requests_running", 0)),
        requests_waiting=round(reading.values.get("num_requests_waiting", 0)),
        kv_cache_usage=reading.values.get("kv_cache_usage_perc", 0.0),
        has_drafter=reading.values.get("drafter_connected", 0) > 0,
        seconds=seconds,
        now=now,
        since_start=_figures(reading.values, None),
    )


class _Figure(NamedTuple):
    """A figure that is `scale` times one count by another; without `whole`, the count itself."""

    label: str
    name: str
    text: str
    part: str
    whole: str = ""
    scale: float = 1.0


_TTFT, _SPEC = "time_to_first_token_seconds", "spec_decode_num"
_TOKENS, _STEPS = "engine_generation_tokens", "engine_steps"
_FIGURES = (
    _Figure("tokens/s", "tokens_per_s", "{:.1f}", _TOKENS, "seconds"),
    _Figure("prompt tokens/s", "prompt_tokens_per_s", "{:.1f}", "engine_prompt_tokens", "seconds"),
    _Figure("steps/s", "steps_per_s", "{:.1f}", _STEPS, "seconds"),
    _Figure("requests finished", "requests_finished", "{:d}", "request_success"),
    _Figure("requests rejected", "requests_rejected", "{:d}", "requests_rejected"),
    _Figure("preemptions", "preemptions", "{:d}", "num_preemptions"),
    _Figure("time to first token, ms", "ttft_ms", "{:.0f}", f"{_TTFT}_sum", f"{_TTFT}_count", 1000),
    _Figure("acceptance length", "acceptance_length", "{:.2f}", "tokens_with_drafts", f"{_SPEC}_drafts"),
    _Figure("nodes drafted per token", "drafted_per_token", "{:.2f}", f"{_SPEC}_draft_tokens", _TOKENS),
    _Figure("  pruned", "pruned_per_token", "{:.2f}", f"{_SPEC}_pruned_tokens", _TOKENS),
    _Figure("  verified", "verified_per_token", "{:.2f}", f"{_SPEC}_verified_tokens", _TOKENS),
    _Figure("prefix cache hits, share", "prefix_cache_hits", "{:.2f}", "prefix_cache_hits", "prefix_cache_queries"),
    _Figure("step, ms", "step_ms", "{:.2f}", "step_seconds", _STEPS, 1000),
    _Figure("  draft", "draft_ms", "{:.2f}", "draft_seconds", _STEPS, 1000),
    _Figure("  transfer", "transfer_ms", "{:.2f}", "transfer_seconds", _STEPS, 1000),
    _Figure("  verify", "verify_ms", "{:.2f}", "verify_seconds", _STEPS, 1000),
    _Figure("  other", "other_ms", "{:.2f}", "other_seconds", _STEPS, 1000),
)


def _figures(values: Mapping[str, float], seconds: float | None) -> Figures:
    """Return the figures of a span: of counts, and of sums of them that the service does not export."""
    counts = defaultdict(float, values, seconds=seconds or 0.0)
    parts = sum(counts[f"{part}_seconds"] for part in ("draft", "transfer", "verify"))
    counts["other_seconds"] = max(0.0, counts["step_seconds"] - parts)
    counts["tokens_with_drafts"] = counts[f"{_SPEC}_accepted_tokens"] + counts[f"{_SPEC}_drafts"]
    return {figure.name: _value(figure, counts) for figure in _FIGURES}


def _value(figure: _Figure, counts: Mapping[str, float]) -> float | None:
    if not figure.whole:
        return round(counts[figure.part])
    return figure.scale * counts[figure.part] / counts[figure.whole] if counts[figure.whole] else None


def lines_of_view(view: ReplicaView) -> list[str]:
    """Return the view as a table of text: the figures of the last interval beside those since the start."""
    span = "now" if view.seconds is None else f"last {view.seconds:.2g} s"
    lines = [
        f"{view.model}  (replica {view.replica})",
        f"  running {view.requests_running}   waiting {view.requests_waiting}   "
        f"KV pages {100 * view.kv_cache_usage:.1f} %   drafter {'connected' if view.has_drafter else 'none'}",
        _row("", span, "since start"),
    ]
    for figure in _FIGURES:
        cells = (figures and figures[figure.name] for figures in (view.now, view.since_start))
        lines.append(_row(figure.label, *("-" if cell is None else figure.text.format(cell) for cell in cells)))
    return lines


def _row(label: str, *cells: str) -> str:
    return f"  {label:26}" + "".join(f"{cell:>13}" for cell in cells)


class Watch:
    """Keeps the latest reading of each replica that answers at one address, and makes the views."""

    def __init__(self, keep_s: float = 60.0) -> None:
        self._keep_s = keep_s
        self._latest: dict[tuple[str, str], Reading] = {}
        self._views: dict[tuple[str, str], ReplicaView] = {}

    def take(self, readings: Iterable[Reading]) -> list[ReplicaView]:
        """Add readings; return the views of all replicas that answered within the last `keep_s` seconds."""
        for reading in readings:
            key = (reading.model, reading.replica)
            self._views[key] = view_of(reading, self._latest.get(key))
            self._latest[key] = reading
            newest = reading.at
            for old in [key for key, seen in self._latest.items() if newest - seen.at > self._keep_s]:
                del self._latest[old], self._views[old]
        return [self._views[key] for key in sorted(self._views)]
