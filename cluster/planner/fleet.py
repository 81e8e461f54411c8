"""A discrete-event simulation of replicas under load.

A replica schedules as the engine does. Every running request gets a tree in each step, prompts share the rest of the
step's token budget first come first served, and a new request waits for the step to end. Between two changes of the
batch, steps differ only by the growing cache, in which step time is linear. So n such steps are one event, which takes

    sum over i < n of (first + i * growth) = n * first + growth * n (n - 1) / 2

Two things are simpler than in the engine. A step gives every request its expected number of tokens; the deviation of a
whole answer is drawn once, as a longer or shorter answer. And a request starts only when its maximum length fits the
cache, so there is no preemption. Requests are routed as Ray Serve does: of two random replicas, to the one with fewer
requests.

Legend: J requests, in order of arrival. Times are in seconds, step times in milliseconds.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cluster.planner.acceptance import AcceptanceCurve
from cluster.planner.cost_model import PlannerCostModel, PrefillChunk
from secateur.errors import ConfigError
from secateur.plan import Arrival, LengthDistribution

SPREAD = 0.5
"""Standard deviation over mean of the tokens per step.

On the bundled models it is 0.3 to 0.4 between steps, and 0.5 to 0.65 by its effect on whole answers, since texts
differ too.
"""
_EPSILON = 1e-9


class Load(NamedTuple):
    """The requests that arrive."""

    arrival_J: np.ndarray
    prompt_J: np.ndarray
    output_J: np.ndarray

    @staticmethod
    def poisson(rate: float, count: int, prompt: LengthDistribution, output: LengthDistribution, seed: int) -> Load:
        """Draw `count` requests that arrive as a Poisson process at `rate` per second."""
        rng = np.random.default_rng(seed)
        arrival_J = rng.exponential(1 / rate, count).cumsum()
        return Load(arrival_J, _draw(prompt, count, rng), _draw(output, count, rng))

    @staticmethod
    def of_trace(trace: Sequence[Arrival]) -> Load:
        """Return the requests of a recorded trace, sorted by arrival."""
        rows = [(arrival.seconds, arrival.prompt_tokens, arrival.output_tokens) for arrival in trace]
        seconds, prompt, output = zip(*sorted(rows), strict=True)
        return Load(np.array(seconds), np.array(prompt), np.array(output))


def _draw(lengths: LengthDistribution, count: int, rng: np.random.Generator) -> np.ndarray:
    if lengths.is_exponential:
        return np.ceil(rng.exponential(lengths.low, count)).astype(np.int64).clip(1)
    return rng.integers(lengths.low, lengths.high or lengths.low, count, endpoint=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """One replica's speed and limits."""

    costs: PlannerCostModel
    accepted: AcceptanceCurve
    nodes_by_batch: Sequence[int]
    """[1 + max_num_seqs] nodes per tree, by the number of decoding requests."""
    max_num_batched_tokens: int = 2048
    max_kv_tokens: float = math.inf
    """Capacity of the KV cache in tokens."""
    num_devices: int = 1
    spread: float = 0.0
    """See SPREAD; 0 = every answer takes its expected number of steps."""

    @property
    def max_num_seqs(self) -> int:
        """The most requests at once."""
        return len(self.nodes_by_batch) - 1

    @property
    def is_speculating(self) -> bool:
        """Return whether any batch size uses trees; then the drafter reads every prompt."""
        return any(self.nodes_by_batch)

    @property
    def tree_rows(self) -> int:
        """Rows of the largest tree with its root."""
        return 1 + max(self.nodes_by_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The simulated outcome of a load."""

    load: Load
    first_J: np.ndarray  # time of the first token
    finish_J: np.ndarray
    replica_J: np.ndarray
    busy_seconds: float  # of all replicas together
    num_steps: int
    num_replicas: int
    num_devices: int
    batch_seconds: float  # integral of the requests that decode, over all replicas

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return float(self.finish_J.max() - self.load.arrival_J[0])

    @property
    def utilisation(self) -> float:
        """Share of time in which a replica computes."""
        return self.busy_seconds / (self.num_replicas * self.seconds)

    @property
    def mean_batch(self) -> float:
        """Decoding requests per busy replica, averaged over time."""
        return self.batch_seconds / max(self.busy_seconds, _EPSILON)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all replicas per second."""
        return float(self.load.output_J.sum()) / self.seconds

    @property
    def per_device(self) -> float:
        """Tokens per second and device."""
        return self.tokens_per_second / self.num_devices

    @property
    def ttft_J(self) -> np.ndarray:
        """Seconds from arrival to the first token."""
        return self.first_J - self.load.arrival_J

    @property
    def e2e_J(self) -> np.ndarray:
        """Seconds from arrival to the last token."""
        return self.finish_J - self.load.arrival_J

    @property
    def tpot_J(self) -> np.ndarray:
        """Seconds per token after the first; one entry per request with more than one token."""
        more = self.load.output_J > 1
        return (self.finish_J - self.first_J)[more] / (self.load.output_J[more] - 1)


def simulate(load: Load, replica: ReplicaSpec, num_replicas: int = 1, seed: int = 0) -> Fleet:
    """Simulate `num_replicas` replicas. Raises ConfigError for a request that cannot fit the KV cache."""
    need = int((load.prompt_J + load.output_J).max()) + replica.tree_rows
    if need > replica.max_kv_tokens:
        raise ConfigError(
            f"a request of {need} tokens, tree included, does not fit the KV cache of {replica.max_kv_tokens:.0f}"
        )
    count = len(load.arrival_J)
    rates = _DecodeRates(replica)
    requests = _RequestTable(
        load.prompt_J.tolist(),
        load.output_J.tolist(),
        (load.prompt_J + load.output_J + replica.tree_rows).tolist(),
        np.random.default_rng([seed, 2]).normal(size=count).tolist(),
        np.full(count, np.nan),
        np.full(count, np.nan),
    )
    replicas = [_SimulatedReplica(replica, rates, requests) for _ in range(num_replicas)]
    router = np.random.default_rng([seed, 1])
    draws = router.integers(num_replicas, size=(count, 2))
    draws[:, 1] = (draws[:, 0] + router.integers(1, max(num_replicas, 2), size=count)) % num_replicas
    replica_J = np.zeros(count, dtype=np.int64)
    events: list[tuple[float, int, int, int]] = []  # time, order, replica, schedule number
    order = itertools.count()

    def push_event(number: int, at: float | None) -> None:
        if at is not None:
            heapq.heappush(events, (at, next(order), number, replicas[number].schedule_number))

    def run_until(now: float) -> None:
        while events and events[0][0] < now:
            at, _, number, schedule_number = heapq.heappop(events)
            if replicas[number].schedule_number == schedule_number:  # else an arrival has replaced that schedule
                push_event(number, replicas[number].boundary(at))

    for request, (now, (one, other)) in enumerate(zip(load.arrival_J.tolist(), draws.tolist(), strict=True)):
        run_until(now)
        number = one if replicas[one].num_ongoing <= replicas[other].num_ongoing else other
        replica_J[request] = number
        push_event(number, replicas[number].arrive(request, now))
    run_until(math.inf)
    return Fleet(
        load=load,
        first_J=requests.first_J,
        finish_J=requests.finish_J,
        replica_J=replica_J,
        busy_seconds=sum(simulated.busy for simulated in replicas),
        num_steps=sum(simulated.num_steps for simulated in replicas),
        num_replicas=num_replicas,
        num_devices=num_replicas * replica.num_devices,
        batch_seconds=sum(simulated.batch_seconds for simulated in replicas),
    )


class _RequestTable(NamedTuple):
    """Inputs and results of all requests."""

    prompt_J: list[int]
    output_J: list[int]
    max_kv_J: list[int]  # the most tokens it can have in the cache
    deviation_J: list[float]  # deviation of its length, in standard deviations
    first_J: np.ndarray
    finish_J: np.ndarray


class _DecodeRate(NamedTuple):
    """Step time and progress at one batch size."""

    nodes: int
    fixed_ms: float  # with an empty cache
    kv_ms: float  # per cached token
    gain: float  # tokens per request and step


class _DecodeRates:
    """Caches the decode rate of each batch size."""

    def __init__(self, replica: ReplicaSpec) -> None:
        self._replica = replica
        self._rates: dict[int, _DecodeRate] = {}

    def of(self, batch: int) -> _DecodeRate:
        if (rate := self._rates.get(batch)) is None:
            costs, nodes = self._replica.costs, self._replica.nodes_by_batch[batch]
            fixed, slope = costs.decode(batch, nodes, 0).ms, costs.kv_slope(nodes)
            rate = self._rates[batch] = _DecodeRate(nodes, fixed, slope, 1 + float(self._replica.accepted[nodes]))
        return rate


@dataclass(slots=True)
class _Prefill:
    request: int
    done: int = 0


@dataclass(slots=True)
class _SimulatedReplica:
    """The state of one replica. Call `boundary` when the scheduled steps have ended."""

    replica: ReplicaSpec
    rates: _DecodeRates
    requests: _RequestTable
    schedule_number: int = 0  # number of the last schedule; events of older ones are void
    busy: float = 0.0
    batch_seconds: float = 0.0
    num_steps: int = 0
    _waiting: deque[int] = field(default_factory=deque)
    _prompts: deque[_Prefill] = field(default_factory=deque)
    _running: list[tuple[float, int, float]] = field(default_factory=list)  # heap: end and start in `_tokens`
    _tokens: float = 0.0  # tokens that a request would have if it had run from the start
    _kv: float = 0.0  # cached tokens of the running requests
    _reserved: int = 0
    # The scheduled steps.
    _began: float = 0.0
    _steps: int = 0
    _first: float = 0.0  # seconds of the first step
    _growth: float = 0.0  # added seconds of each further step
    _gain: float = 0.0
    _chunks: list[tuple[_Prefill, PrefillChunk]] = field(default_factory=list)

    @property
    def num_ongoing(self) -> int:
        return len(self._waiting) + len(self._prompts) + len(self._running)

    def arrive(self, request: int, now: float) -> float | None:
        """Add a request. Return the new end of the scheduled steps, or None if it does not change."""
        self._waiting.append(request)
        if not self._steps:
            if self.num_ongoing > 1:
                return None  # another request arrived at the same moment
            self.schedule_number += 1
            return now
        if len(self._waiting) > 1 or self._chunks or not self._fits(request):
            return None  # an earlier one waits too, or a boundary is due
        steps = min(self._steps, self._steps_within(now - self._began))
        if steps == self._steps:
            return None
        self._steps, self.schedule_number = steps, self.schedule_number + 1
        return self._began + self._duration(steps)

    def boundary(self, now: float) -> float | None:
        """End the scheduled steps and schedule the next. Return their end, or None if there is nothing to do."""
        self._settle(now)
        while self._waiting and self._fits(self._waiting[0]):
            request = self._waiting.popleft()
            self._reserved += self.requests.max_kv_J[request]
            self._prompts.append(_Prefill(request))
        self._steps = 0
        if not self._prompts and not self._running:
            self._tokens = self._kv = 0.0  # resets rounding errors
            return None
        self.schedule_number += 1
        self._began = now
        batch = len(self._running)
        if self._prompts:
            self._schedule_prompts(batch)
        else:
            rate = self.rates.of(batch)
            self._gain = rate.gain
            self._first = 1e-3 * (rate.fixed_ms + rate.kv_ms * self._kv)
            self._growth = 1e-3 * rate.kv_ms * batch * rate.gain
            self._steps = max(1, math.ceil((self._running[0][0] - self._tokens) / rate.gain - _EPSILON))
        return now + self._duration(self._steps)

    def _schedule_prompts(self, batch: int) -> None:
        """Schedule one step, in which prompts advance as far as the token budget allows."""
        nodes = self.replica.nodes_by_batch[batch]
        budget = max(1, self.replica.max_num_batched_tokens - batch * (1 + nodes))
        for prompt in self._prompts:
            rows = min(budget, self.requests.prompt_J[prompt.request] - prompt.done)
            if not rows:
                break
            self._chunks.append((prompt, PrefillChunk(rows, prompt.done + rows)))
            budget -= rows
        chunks = [chunk for _, chunk in self._chunks]
        step = self.replica.costs.step(batch, nodes, self._kv, chunks, feeds_drafter=self.replica.is_speculating)
        self._gain = 1 + float(self.replica.accepted[nodes])
        self._steps, self._first, self._growth = 1, 1e-3 * step.ms, 0.0

    def _settle(self, now: float) -> None:
        if not self._steps:
            return
        batch, seconds = len(self._running), self._duration(self._steps)
        self.busy += seconds
        self.batch_seconds += batch * seconds
        self.num_steps += self._steps
        self._tokens += self._steps * self._gain
        self._kv += batch * self._steps * self._gain
        while self._running and self._running[0][0] <= self._tokens + _EPSILON:
            _, request, start = heapq.heappop(self._running)
            self._kv -= self.requests.prompt_J[request] + self._tokens - start
            self._finish(request, now)
        for prompt, chunk in self._chunks:
            prompt.done += chunk.rows
            request = prompt.request
            if prompt.done < self.requests.prompt_J[request]:
                continue
            self._prompts.popleft()
            self.requests.first_J[request] = now
            if self.requests.output_J[request] == 1:
                self._finish(request, now)
            else:
                heapq.heappush(self._running, (self._tokens + self._length(request), request, self._tokens))
                self._kv += self.requests.prompt_J[request]
        self._chunks.clear()

    def _length(self, request: int) -> float:
        """Return the tokens after the first, with the drawn deviation: spread times the root of the step count."""
        length, spread = self.requests.output_J[request] - 1, self.replica.spread
        gain = self.rates.of(len(self._running) + 1).gain  # with this request running too
        if gain == 1 or not spread:
            return length
        return max(1.0, length + self.requests.deviation_J[request] * spread * math.sqrt(length * gain))

    def _finish(self, request: int, now: float) -> None:
        self.requests.finish_J[request] = now
        self._reserved -= self.requests.max_kv_J[request]

    def _fits(self, request: int) -> bool:
        has_slot = len(self._prompts) + len(self._running) < self.replica.max_num_seqs
        return has_slot and self._reserved + self.requests.max_kv_J[request] <= self.replica.max_kv_tokens

    def _duration(self, steps: int) -> float:
        return steps * self._first + self._growth * steps * (steps - 1) / 2

    def _steps_within(self, seconds: float) -> int:
        """Return the number of the step that runs after `seconds`, counted from 1."""
        linear = self._first - self._growth / 2
        if self._growth > _EPSILON * self._first:
            steps = (math.sqrt(linear * linear + 2 * self._growth * seconds) - linear) / self._growth
        else:
            steps = seconds / self._first
        return max(1, math.ceil(steps - _EPSILON))
