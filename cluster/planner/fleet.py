"""Replicas under load, event by event: who waits, who decodes, when each token comes. No clock but its own.

A replica works as the engine's scheduler does: every running request gets a tree in each step, what is left of the
step's token budget goes to prompts, first come first served, and whoever arrives waits for the step to end. Between
two changes of its batch all steps are alike but for the growing cache, in which a step's time is linear; so they are
one event, of the duration

    sum over i < n of (first + i * growth) = n * first + growth * n (n - 1) / 2

Simpler than the engine: a step brings every request its expected number of tokens (what luck does to that over a whole
answer is drawn once, as if an answer were so much longer or shorter), and a request joins when its whole life fits the
cache, so that nobody is ever preempted. Requests are routed as Ray Serve does: of two replicas drawn at random, the one
with fewer requests.

Legend: J requests, in order of arrival. Times are seconds, steps' milliseconds.
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
from cluster.planner.cost_model import CostModel, PrefillChunk
from secateur.errors import ConfigError
from secateur.plan import Arrival, LengthDistribution

SPREAD = 0.5
"""Standard deviation over mean of the tokens that a tree brings: on the bundled pair 0.3 to 0.4 from step to step, and
0.5 to 0.65 by what it adds up to over an answer, since texts differ too."""
_EPSILON = 1e-9


class Load(NamedTuple):
    """What arrives."""

    arrival_J: np.ndarray
    prompt_J: np.ndarray
    output_J: np.ndarray

    @staticmethod
    def poisson(rate: float, count: int, prompt: LengthDistribution, output: LengthDistribution, seed: int) -> Load:
        """`count` requests at `rate` per second."""
        rng = np.random.default_rng(seed)
        arrival_J = rng.exponential(1 / rate, count).cumsum()
        return Load(arrival_J, _draw(prompt, count, rng), _draw(output, count, rng))

    @staticmethod
    def of_trace(trace: Sequence[Arrival]) -> Load:
        rows = [(arrival.seconds, arrival.prompt_tokens, arrival.output_tokens) for arrival in trace]
        seconds, prompt, output = zip(*sorted(rows), strict=True)
        return Load(np.array(seconds), np.array(prompt), np.array(output))


def _draw(lengths: LengthDistribution, count: int, rng: np.random.Generator) -> np.ndarray:
    if lengths.is_exponential:
        return np.ceil(rng.exponential(lengths.low, count)).astype(np.int64).clip(1)
    return rng.integers(lengths.low, lengths.high or lengths.low, count, endpoint=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """What one replica can do."""

    costs: CostModel
    accepted: AcceptanceCurve
    nodes_by_batch: Sequence[int]
    """[1 + max_num_seqs] nodes of each tree when so many requests decode."""
    max_num_batched_tokens: int = 2048
    max_kv_tokens: float = math.inf
    """Tokens that the cache has room for."""
    num_devices: int = 1
    spread: float = 0.0
    """See SPREAD; 0 = no luck."""

    @property
    def max_num_seqs(self) -> int:
        return len(self.nodes_by_batch) - 1

    @property
    def drafts(self) -> bool:
        """At some batch; then every prompt is fed to the drafter."""
        return any(self.nodes_by_batch)

    @property
    def tree_rows(self) -> int:
        return 1 + max(self.nodes_by_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What became of a load."""

    load: Load
    first_J: np.ndarray  # when the first token came
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
        return self.busy_seconds / (self.num_replicas * self.seconds)

    @property
    def mean_batch(self) -> float:
        return self.batch_seconds / max(self.busy_seconds, _EPSILON)

    @property
    def tokens_per_second(self) -> float:
        return float(self.load.output_J.sum()) / self.seconds

    @property
    def per_device(self) -> float:
        return self.tokens_per_second / self.num_devices

    @property
    def ttft_J(self) -> np.ndarray:
        return self.first_J - self.load.arrival_J

    @property
    def e2e_J(self) -> np.ndarray:
        return self.finish_J - self.load.arrival_J

    @property
    def tpot_J(self) -> np.ndarray:
        """Seconds per token after the first, of the requests that have more."""
        more = self.load.output_J > 1
        return (self.finish_J - self.first_J)[more] / (self.load.output_J[more] - 1)


def simulate(load: Load, replica: ReplicaSpec, num_replicas: int = 1, seed: int = 0) -> Fleet:
    """Serves every request of the load. Raises ConfigError for one that no replica can ever hold."""
    need = int((load.prompt_J + load.output_J).max()) + replica.tree_rows
    if need > replica.max_kv_tokens:
        raise ConfigError(
            f"a request of {need} tokens, tree included, does not fit the KV cache of {replica.max_kv_tokens:.0f}"
        )
    count = len(load.arrival_J)
    speed = _DecodeRates(replica)
    book = _RequestTable(
        load.prompt_J.tolist(),
        load.output_J.tolist(),
        (load.prompt_J + load.output_J + replica.tree_rows).tolist(),
        np.random.default_rng([seed, 2]).normal(size=count).tolist(),
        np.full(count, np.nan),
        np.full(count, np.nan),
    )
    members = [_SimulatedReplica(replica, speed, book) for _ in range(num_replicas)]
    router = np.random.default_rng([seed, 1])
    draws = router.integers(num_replicas, size=(count, 2))
    draws[:, 1] = (draws[:, 0] + router.integers(1, max(num_replicas, 2), size=count)) % num_replicas
    replica_J = np.zeros(count, dtype=np.int64)
    events: list[tuple[float, int, int, int]] = []  # time, order, member, plan number
    order = itertools.count()

    def expect(number: int, at: float | None) -> None:
        if at is not None:
            heapq.heappush(events, (at, next(order), number, members[number].plan))

    def settle_until(now: float) -> None:
        while events and events[0][0] < now:
            at, _, number, plan = heapq.heappop(events)
            if members[number].plan == plan:  # otherwise an arrival has changed it
                expect(number, members[number].boundary(at))

    for job, (now, (one, other)) in enumerate(zip(load.arrival_J.tolist(), draws.tolist(), strict=True)):
        settle_until(now)
        number = one if members[one].num_ongoing <= members[other].num_ongoing else other
        replica_J[job] = number
        expect(number, members[number].arrive(job, now))
    settle_until(math.inf)
    return Fleet(
        load=load,
        first_J=book.first_J,
        finish_J=book.finish_J,
        replica_J=replica_J,
        busy_seconds=sum(member.busy for member in members),
        num_steps=sum(member.num_steps for member in members),
        num_replicas=num_replicas,
        num_devices=num_replicas * replica.num_devices,
        batch_seconds=sum(member.batch_seconds for member in members),
    )


class _RequestTable(NamedTuple):
    """What is asked and what came of it, of all requests."""

    prompt_J: list[int]
    output_J: list[int]
    life_J: list[int]  # the most that it can ever have in the cache
    luck_J: list[float]  # in standard deviations
    first_J: np.ndarray
    finish_J: np.ndarray


class _DecodeRate(NamedTuple):
    """Of steps with a certain batch."""

    nodes: int
    fixed_ms: float  # with an empty cache
    kv_ms: float  # more for each cached token
    gain: float  # tokens per request


class _DecodeRates:
    """Steps' times and gains by batch, looked up once."""

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
    job: int
    done: int = 0


@dataclass(slots=True)
class _SimulatedReplica:
    """One replica at work. `boundary` is called when the steps planned last are over."""

    replica: ReplicaSpec
    speed: _DecodeRates
    book: _RequestTable
    plan: int = 0  # number of the last plan: what was expected of an older one does not come
    busy: float = 0.0
    batch_seconds: float = 0.0
    num_steps: int = 0
    _waiting: deque[int] = field(default_factory=deque)
    _prompts: deque[_Prefill] = field(default_factory=deque)
    _running: list[tuple[float, int, float]] = field(default_factory=list)  # heap: end and start in `_tokens`
    _tokens: float = 0.0  # that a request would have got that has been running since the beginning
    _kv: float = 0.0  # cached tokens of the running requests
    _reserved: int = 0
    # The steps under way.
    _began: float = 0.0
    _steps: int = 0
    _first: float = 0.0  # seconds of the first
    _growth: float = 0.0  # of each further one over its predecessor
    _gain: float = 0.0
    _chunks: list[tuple[_Prefill, PrefillChunk]] = field(default_factory=list)

    @property
    def num_ongoing(self) -> int:
        return len(self._waiting) + len(self._prompts) + len(self._running)

    def arrive(self, job: int, now: float) -> float | None:
        """When the present steps are now over; None if nothing changes."""
        self._waiting.append(job)
        if not self._steps:
            if self.num_ongoing > 1:
                return None  # somebody came at this very moment
            self.plan += 1
            return now
        if len(self._waiting) > 1 or self._chunks or not self._fits(job):
            return None  # who waits already could not join, or is about to
        steps = min(self._steps, self._steps_within(now - self._began))
        if steps == self._steps:
            return None
        self._steps, self.plan = steps, self.plan + 1
        return self._began + self._duration(steps)

    def boundary(self, now: float) -> float | None:
        """Ends the steps that were planned, and plans the next. When those are over; None if there are none."""
        self._settle(now)
        while self._waiting and self._fits(self._waiting[0]):
            job = self._waiting.popleft()
            self._reserved += self.book.life_J[job]
            self._prompts.append(_Prefill(job))
        self._steps = 0
        if not self._prompts and not self._running:
            self._tokens = self._kv = 0.0  # no rounding is carried on
            return None
        self.plan += 1
        self._began = now
        batch = len(self._running)
        if self._prompts:
            self._plan_prompts(batch)
        else:
            rate = self.speed.of(batch)
            self._gain = rate.gain
            self._first = 1e-3 * (rate.fixed_ms + rate.kv_ms * self._kv)
            self._growth = 1e-3 * rate.kv_ms * batch * rate.gain
            self._steps = max(1, math.ceil((self._running[0][0] - self._tokens) / rate.gain - _EPSILON))
        return now + self._duration(self._steps)

    def _plan_prompts(self, batch: int) -> None:
        """One step, in which prompts advance as far as the budget goes."""
        nodes = self.replica.nodes_by_batch[batch]
        budget = max(1, self.replica.max_num_batched_tokens - batch * (1 + nodes))
        for prompt in self._prompts:
            rows = min(budget, self.book.prompt_J[prompt.job] - prompt.done)
            if not rows:
                break
            self._chunks.append((prompt, PrefillChunk(rows, prompt.done + rows)))
            budget -= rows
        chunks = [chunk for _, chunk in self._chunks]
        step = self.replica.costs.step(batch, nodes, self._kv, chunks, feeds=self.replica.drafts)
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
            _, job, start = heapq.heappop(self._running)
            self._kv -= self.book.prompt_J[job] + self._tokens - start
            self._finish(job, now)
        for prompt, chunk in self._chunks:
            prompt.done += chunk.rows
            job = prompt.job
            if prompt.done < self.book.prompt_J[job]:
                continue
            self._prompts.popleft()
            self.book.first_J[job] = now
            if self.book.output_J[job] == 1:
                self._finish(job, now)
            else:
                heapq.heappush(self._running, (self._tokens + self._length(job), job, self._tokens))
                self._kv += self.book.prompt_J[job]
        self._chunks.clear()

    def _length(self, job: int) -> float:
        """Tokens after the first, more or fewer by luck: of n / gain steps the deviation is the root times spread."""
        length, spread = self.book.output_J[job] - 1, self.replica.spread
        gain = self.speed.of(len(self._running) + 1).gain  # in its company
        if gain == 1 or not spread:
            return length
        return max(1.0, length + self.book.luck_J[job] * spread * math.sqrt(length * gain))

    def _finish(self, job: int, now: float) -> None:
        self.book.finish_J[job] = now
        self._reserved -= self.book.life_J[job]

    def _fits(self, job: int) -> bool:
        has_seat = len(self._prompts) + len(self._running) < self.replica.max_num_seqs
        return has_seat and self._reserved + self.book.life_J[job] <= self.replica.max_kv_tokens

    def _duration(self, steps: int) -> float:
        return steps * self._first + self._growth * steps * (steps - 1) / 2

    def _steps_within(self, seconds: float) -> int:
        """The step that is under way after so long, counted from 1."""
        linear = self._first - self._growth / 2
        if self._growth > _EPSILON * self._first:
            steps = (math.sqrt(linear * linear + 2 * self._growth * seconds) - linear) / self._growth
        else:
            steps = seconds / self._first
        return max(1, math.ceil(steps - _EPSILON))
