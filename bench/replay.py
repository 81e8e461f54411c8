"""Measures what `auto` loses, by cause, on recorded answers of a real model and a clock with given costs.

    python -m bench.replay smollm2 --prompts FILE --num-prompts 16 --max-tokens 64 --batches 1 4 --temperatures 0 1

The target answers every prompt once. Then the engine answers them again with the real drafter and controller: the
target's draws and hidden states come from the record, and only the clock knows what a step takes. On a busy machine
the clock's costs change every half second, by up to a half, and vary by 8 % beside that. Gains are by the costs of the
idle machine, so they are those of the decisions alone, relative to no speculation.

The first prompts are answered by a fresh engine. A cause's regret is what `auto` gains when the cause is removed:

    noise   the machine is idle
    prior   the engine has answered all prompts before
    gate    drafting is on from the first step to the last, or off, whichever is better
    feed    rows of prompts and of a backlog cost nothing
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from bench.harness import BenchmarkPlan, Run, main
from cluster.bench.report import Report
from cluster.bench.setup import workload
from drafter.proposers.base import FeatureProposer
from secateur.bench import PositiveInt, Some, Temperature
from secateur.cli.bench import say
from secateur.errors import ConfigError
from tests.support.engine_here import EngineHere, Pair, engine_here
from verifier import drafting, engine
from verifier.adaptive import controller
from verifier.adaptive.cost_model import UNPROFILED, RowCosts
from verifier.adaptive.gate import SpeculationGate
from verifier.target import Target
from workers.comm.ipc import Speculation, Submit
from workers.config import EngineConfig
from workers.settings import SamplingSettings

ROWS = (1.0, 2.0, 4.0, 5.0, 8.0, 9.0, 17.0, 33.0)


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Milliseconds of a forward of `ROWS` rows, and of an exchange with the drafter, by its terms."""

    forward: tuple[float, ...]
    message: float = 0.8
    fed: float = 0.05
    level: float = 2.0
    node: float = 0.05

    @property
    def rows(self) -> RowCosts:
        return RowCosts(np.array(ROWS), np.array(self.forward))


PRICES = {
    "bfloat16, two threads": Prices(forward=(15.8, 16.4, 17.4, 18.6, 21.7, 21.8, 29.8, 46.5)),
    "float32": Prices(forward=(13.2, 13.3, 15.2, 16.2, 20.0, 21.8, 33.9, 60.9), node=0.15),
    "float32, dear drafting": Prices(
        forward=(18.0, 20.5, 26.3, 29.5, 39.0, 42.5, 66.5, 116.5), message=3.0, level=2.7, node=0.2
    ),
}
"""SmolLM2 on two cores of an EPYC with AVX-512-BF16 (bench.forward, and secateur bench step)."""
OFF, AUTO = Speculation(enabled=False), Speculation(auto=True)
FIXED = (2, 4, 8)


class ReplayPlan(BenchmarkPlan):
    """Settings."""

    num_prompts: PositiveInt = 16
    """Prompts, each answered once a pass."""
    max_tokens: PositiveInt = 64
    """Tokens per answer."""
    batches: Some[PositiveInt] = (1, 4)
    """Requests at a time."""
    temperatures: Some[Temperature] = (0.0, 1.0)
    rounds: PositiveInt = 3
    """Runs of `auto` on a busy machine, each with other noise; gains are their means."""


# ---- the clock


@dataclass
class Clock:
    """A clock that only advances when one of the models runs. quiet_ms: what it would show on an idle machine."""

    prices: Prices
    noise: random.Random | None
    ms: float = 0.0
    quiet_ms: float = 0.0
    _load: float = 1.0
    _load_until: float = 0.0

    def add(self, ms: float) -> None:
        self.quiet_ms += ms
        if self.noise is not None:
            if self.ms >= self._load_until:
                self._load = self.noise.choice((1.0, 1.1, 1.25, 1.5))
                self._load_until = self.ms + self.noise.expovariate(1 / 400)
            ms *= self._load * self.noise.lognormvariate(0, 0.08)
        self.ms += ms

    def seconds(self) -> float:
        return self.ms / 1e3


# ---- the record


@dataclass
class Answer:
    """A prompt and its answer, and the target's state at each of their positions, by which the drafter is fed."""

    tokens: list[int]
    state_of: dict[int, Tensor]


Record = dict[tuple[float, int], Answer]
"""By temperature and seed, which is the prompt's number."""


class _Recorder(Target):
    """Keeps the states of a run without drafts."""

    def __init__(self, record: Record, *own: Any) -> None:
        super().__init__(*own)
        self._record = record

    def run(self, step: Any, number: int, *more: Any, **options: Any) -> list[int]:
        drawn = super().run(step, number, *more, **options)
        state_NX, begins = self.states(), step.attention.query_offsets.tolist()
        assert state_NX is not None
        for answer, own in zip(_answers(self._record, step), map(slice, begins, begins[1:]), strict=True):
            answer.state_of |= dict(zip(step.position_N[own].tolist(), state_NX[own].clone(), strict=True))
        return drawn


class _Replayed(Target):
    """Draws what was recorded. Rows off the recorded path draw anything, because no walk reaches them."""

    def __init__(self, clock: Clock, record: Record, *own: Any) -> None:
        super().__init__(*own)
        self._clock, self._record = clock, record

    def run(self, step: Any, number: int, while_waiting: Any = lambda: None) -> list[int]:
        while_waiting()
        self._clock.add(float(self._clock.prices.rows.ms(len(step.token_N))))
        answers, begins = _answers(self._record, step), step.attention.query_offsets.tolist()
        spans = zip(answers, map(slice, begins, begins[1:]), strict=True)
        self._rows = [(answer, at) for answer, own in spans for at in step.position_N[own].tolist()]
        draws = zip(step.request_R.tolist(), step.draw_index_R.tolist(), strict=True)
        return [(answers[request].tokens[at : at + 1] or [0])[0] for request, at in draws]

    def states(self) -> Tensor:
        return torch.stack([answer.state_of.get(at, answer.state_of[0]) for answer, at in self._rows])


def _answers(record: Record, step: Any) -> list[Answer]:
    """Return the answer of each request of a step; every prompt is computed in one chunk."""
    params = dict(zip(step.request_R.tolist(), range(len(step.request_R)), strict=True))
    temperature_R, seed_R = step.sampling.temperature_B.tolist(), step.sampling.seed_B.tolist()
    return [record[temperature_R[r], seed_R[r]] for _, r in sorted(params.items())]


class _Proposer(FeatureProposer):
    def __init__(self, clock: Clock, free_feed: bool, *own: Any) -> None:
        super().__init__(*own)
        self._clock, self._free_feed = clock, free_feed

    def extend(self, request: Any) -> Any:
        prices, rows = self._clock.prices, 0 if self._free_feed else len(request.token_M)
        self._clock.add(prices.message + prices.level + prices.fed * rows)
        return super().extend(request)

    def expand(self, frontier: Any) -> Tensor:
        self._clock.add(self._clock.prices.level + self._clock.prices.node * len(frontier.request_F))
        return super().expand(frontier)


# ---- runs


class _AlwaysOn(SpeculationGate):
    def weigh(self, advantage: float, num_decoding: int) -> bool:
        return True


@dataclass
class RecordedRuns:
    """Runs engines on the recorded answers; all runs share the record, the models and the prompts."""

    config: EngineConfig
    pair: Pair
    prompts: list[list[int]]
    max_tokens: int
    record: Record

    def take(self, temperatures: tuple[float, ...]) -> None:
        """Record an answer to each prompt at each temperature."""
        with engine_here(self.config, self.pair, UNPROFILED, target=partial(_Recorder, self.record)) as here:
            for temperature in temperatures:
                for number, prompt in enumerate(self.prompts):
                    self.record[float(np.float32(temperature)), number] = Answer(list(prompt), {})
                for number, tokens in self._run(here, OFF, temperature, batch=8):
                    self.record[float(np.float32(temperature)), number].tokens += tokens

    def rate(self, prices: Prices, cell: tuple[float, int], way: Speculation, passes: int = 1, **options: Any) -> float:
        """Return tokens per millisecond of the last of some passes over all prompts; options: see `_engine`."""
        with self._engine(prices, **options) as (here, clock):
            for _ in range(passes):
                began = clock.quiet_ms
                tokens = sum(len(own) for _, own in self._run(here, way, *cell))
        return tokens / (clock.quiet_ms - began)

    def _run(
        self, here: EngineHere, way: Speculation, temperature: float, batch: int
    ) -> Iterator[tuple[int, list[int]]]:
        waiting, tokens = list(enumerate(self.prompts)), dict[int, list[int]]()
        while waiting or tokens:
            while waiting and len(tokens) < batch:
                number, prompt = waiting.pop(0)
                sampling = SamplingSettings(temperature=temperature, seed=number)
                submit = Submit(
                    id=number, prompt=prompt, max_tokens=self.max_tokens, sampling=sampling, ignore_eos=True,
                    speculation=way,
                )  # fmt: skip
                here.submit(submit)
                tokens[number] = []
            for chunk in here.step():
                tokens[chunk.id] += chunk.tokens
                if chunk.finish_reason is not None:
                    yield chunk.id, tokens.pop(chunk.id)

    @contextmanager
    def _engine(
        self, prices: Prices, *, seed: int | None = None, free_feed: bool = False, gate: type = SpeculationGate
    ) -> Iterator[tuple[EngineHere, Clock]]:
        """Start an engine on a clock. seed: of the noise; None = an idle machine."""
        clock = Clock(prices, None if seed is None else random.Random(seed))
        time = SimpleNamespace(perf_counter=clock.seconds, monotonic=clock.seconds)
        with ExitStack() as stack:
            for owner in (engine, controller, drafting):
                stack.enter_context(mock.patch.object(owner, "time", time))
            stack.enter_context(mock.patch.object(controller, "SpeculationGate", gate))
            target, proposer = partial(_Replayed, clock, self.record), partial(_Proposer, clock, free_feed)
            yield (
                stack.enter_context(engine_here(self.config, self.pair, prices.rows, target=target, proposer=proposer)),
                clock,
            )


def regret(replay: RecordedRuns, prices: Prices, cell: tuple[float, int], rounds: int) -> dict[str, float]:
    """Return the gains of fixed trees and of `auto`, and what `auto` gains when a cause of its losses is removed."""
    rate = partial(replay.rate, prices, cell)
    off, *fixed = (rate(way) for way in (OFF, *(Speculation(auto=False, num_speculative_tokens=n) for n in FIXED)))

    def gain(**options: Any) -> float:
        return float(np.mean([rate(AUTO, seed=seed, **options) for seed in range(rounds)])) / off

    gains, auto = {f"{nodes}_nodes": own / off for nodes, own in zip(FIXED, fixed, strict=True)}, gain()
    without = {
        "noise": rate(AUTO) / off,
        "prior": gain(passes=2),
        "gate": max(1.0, gain(gate=_AlwaysOn)),
        "feed": gain(free_feed=True),
    }
    return {**gains, "auto": auto, **{f"regret_{cause}": own - auto for cause, own in without.items()}}


def measure(run: Run) -> Report:
    """Measure. Raises ConfigError before anything is loaded."""
    plan: ReplayPlan = run.plan
    if plan.target_cost is not None:
        raise ConfigError("the clock has costs of its own: leave --target-cost out")
    torch.set_num_threads(1)
    args = run.args.model_copy(update={"dtype": "float32", "device": "cpu"})
    most = max(8, *plan.batches)
    config, prompts = workload(args, run.texts(plan.num_prompts), max_tokens=plan.max_tokens, max_num_seqs=most)
    config = replace(config, max_num_batched_tokens=most * config.max_model_len)  # every prompt is one chunk
    assert config.draft is not None
    pair = Pair.load(config.model_path, config.draft.model_path)
    replay = RecordedRuns(config, pair, prompts, plan.max_tokens, {})
    say("recording the answers")
    replay.take(plan.temperatures)
    with run.report("replay", config, ()) as report:
        for (name, prices), temperature, batch in product(PRICES.items(), plan.temperatures, plan.batches):
            key = {"prices": name, "temperature": temperature, "requests": batch}
            found = regret(replay, prices, (temperature, batch), plan.rounds)
            say(
                str(report.add("gains and regret", {**key, **{name: round(value, 3) for name, value in found.items()}}))
            )
    return report


if __name__ == "__main__":
    main(
        ReplayPlan, measure, {"num_prompts": 2, "max_tokens": 16, "batches": (1,), "temperatures": (0.0,), "rounds": 1}
    )
