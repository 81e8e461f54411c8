"""What `secateur top` shows: the figures of a running service, from two reads of its /metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a span of time; None where nothing happened that could be measured, or in rates since the start."""

    tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    steps_per_s: float | None
    requests_finished: int
    requests_rejected: int
    preemptions: int
    ttft_ms: float | None
    """Mean time to the first token, of the requests that ended."""
    acceptance_length: float | None
    """Tokens per step with drafts."""
    drafted_per_token: float | None
    pruned_per_token: float | None
    verified_per_token: float | None
    prefix_cache_hits: float | None
    """Share of the prompt tokens that were found in the prefix cache."""
    step_ms: float | None
    draft_ms: float | None
    transfer_ms: float | None
    verify_ms: float | None
    other_ms: float | None
    """Of `step_ms`: neither drafter nor target nor between them."""


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

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


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


def _figures(values: Mapping[str, float], seconds: float | None) -> Figures:
    def count(name: str) -> float:
        return values.get(name, 0.0)

    tokens, steps = count("engine_generation_tokens"), count("engine_steps")
    parts = {part: _ratio(1000 * count(f"{part}_seconds"), steps) for part in ("step", "draft", "transfer", "verify")}
    other = None
    if parts["step"] is not None:
        other = max(0.0, parts["step"] - sum(parts[part] or 0.0 for part in ("draft", "transfer", "verify")))
    accepted = _ratio(count("spec_decode_num_accepted_tokens"), count("spec_decode_num_drafts"))
    return Figures(
        tokens_per_s=_ratio(tokens, seconds),
        prompt_tokens_per_s=_ratio(count("engine_prompt_tokens"), seconds),
        steps_per_s=_ratio(steps, seconds),
        requests_finished=round(count("request_success")),
        requests_rejected=round(count("requests_rejected")),
        preemptions=round(count("num_preemptions")),
        ttft_ms=_ratio(1000 * count("time_to_first_token_seconds_sum"), count("time_to_first_token_seconds_count")),
        acceptance_length=None if accepted is None else 1 + accepted,
        drafted_per_token=_ratio(count("spec_decode_num_draft_tokens"), tokens),
        pruned_per_token=_ratio(count("spec_decode_num_pruned_tokens"), tokens),
        verified_per_token=_ratio(count("spec_decode_num_verified_tokens"), tokens),
        prefix_cache_hits=_ratio(count("prefix_cache_hits"), count("prefix_cache_queries")),
        step_ms=parts["step"],
        draft_ms=parts["draft"],
        transfer_ms=parts["transfer"],
        verify_ms=parts["verify"],
        other_ms=other,
    )


def _ratio(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None


def lines_of_view(view: ReplicaView) -> list[str]:
    """Return the view as a table of text: the figures of the last interval beside those since the start."""
    now, start = view.now, view.since_start
    span = "now" if view.seconds is None else f"last {view.seconds:.2g} s"
    lines = [
        f"{view.model}  (replica {view.replica})",
        f"  running {view.requests_running}   waiting {view.requests_waiting}   "
        f"KV pages {100 * view.kv_cache_usage:.1f} %   drafter {'connected' if view.has_drafter else 'none'}",
        _row("", span, "since start"),
    ]
    lines += [
        _row(label, _shown(None if now is None else getattr(now, name), text), _shown(getattr(start, name), text))
        for label, name, text in _ROWS
    ]
    return lines


_ROWS: tuple[tuple[str, str, str], ...] = (
    ("tokens/s", "tokens_per_s", "{:.1f}"),
    ("prompt tokens/s", "prompt_tokens_per_s", "{:.1f}"),
    ("steps/s", "steps_per_s", "{:.1f}"),
    ("requests finished", "requests_finished", "{:d}"),
    ("requests rejected", "requests_rejected", "{:d}"),
    ("preemptions", "preemptions", "{:d}"),
    ("time to first token, ms", "ttft_ms", "{:.0f}"),
    ("acceptance length", "acceptance_length", "{:.2f}"),
    ("nodes drafted per token", "drafted_per_token", "{:.2f}"),
    ("  pruned", "pruned_per_token", "{:.2f}"),
    ("  verified", "verified_per_token", "{:.2f}"),
    ("prefix cache hits, share", "prefix_cache_hits", "{:.2f}"),
    ("step, ms", "step_ms", "{:.2f}"),
    ("  draft", "draft_ms", "{:.2f}"),
    ("  transfer", "transfer_ms", "{:.2f}"),
    ("  verify", "verify_ms", "{:.2f}"),
    ("  other", "other_ms", "{:.2f}"),
)


def _row(label: str, *cells: str) -> str:
    return f"  {label:26}" + "".join(f"{cell:>13}" for cell in cells)


def _shown(value: float | None, text: str) -> str:
    return "-" if value is None else text.format(value)


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
