"""The controller drafts where that pays, learns from every outcome, and changes neither outputs nor requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engines import AUTO as AUTO_TREE
from tests.support.engines import bundled
from tests.support.fakes import Bench, Counting, RandomLanguage, say
from verifier.adaptive import controller as adaptive
from verifier.adaptive import gate
from verifier.adaptive.controller import Controller, Plan, StepOutcome
from verifier.adaptive.cost_model import UNPROFILED
from verifier.draft_batch import DraftBatch
from verifier.request import Request
from verifier.scheduler import Step
from verifier.tree import PromptChunk
from workers import config
from workers.comm.ipc import Speculation, Submit
from workers.config import PruneConfig, TreeConfig
from workers.settings import Rule, SamplingSettings, TreeLimits
from workers.types import Verdict

torch.set_num_threads(1)

TREE = TreeConfig(kind="dynamic", num_speculative_tokens=7, max_depth=3, prune=PruneConfig(auto=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_tokens_are_those_of_the_target_whatever_auto_decides(monkeypatch, method, temperature):
    """Requests are drafted for at random, and owed feeds of any length: memory, features and tokens stay right."""
    rng = np.random.default_rng(5)
    monkeypatch.setattr(adaptive.Controller, "_choose", lambda self, auto, *_: [r for r in auto if rng.random() < 0.4])
    language = RandomLanguage(error=0.3)
    with Bench(language, method, TREE, max_num_batched_tokens=24, max_num_seqs=4) as b:
        b.engine._controller._max_rows, b.engine._controller._max_backlog = 10, 6
        asked = []
        for n in range(6):
            params = SamplingSettings(temperature=temperature, seed=n)
            prompt = [int(t) for t in rng.integers(0, 32, 3 + 5 * n)]
            speculation = Speculation(auto=n != 3)
            asked.append((b.submit(prompt, 30, params, speculation=speculation), prompt, params))
        b.run()
        for id, prompt, params in asked:
            assert b.answers[id].tokens == say(language, prompt, 30, params)
        assert any((request.num_nodes_B == 0).all() for request in b.drafter.requests), "some messages only feed"
        sent = [len(request.token_M) for request in b.drafter.requests]
        assert max(sent) == 10, "some messages are cut"
        assert len(b.drafter.requests) < len(b.target.steps)


def test_auto_asks_for_costs_and_others_do_not():
    with Bench(Counting(), "eagle3", TREE) as b:
        b.ask([1, 2, 3], 12, SamplingSettings(temperature=0.0))
        assert any(request.costs is not None for request in b.drafter.requests)
    with Bench(Counting(), "eagle3", TREE) as b:
        b.ask([1, 2, 3], 12, SamplingSettings(temperature=0.0), speculation=Speculation(auto=False))
        assert all(request.costs is None for request in b.drafter.requests)


def decoding(count: int, num_prompt: int = 9, **limits: Any) -> list[Request]:
    """Requests under `auto` whose prompts are computed and fed."""
    requests = []
    for n in range(count):
        submit = Submit(id=n, prompt=[1] * num_prompt, max_tokens=64)
        request = Request(submit, Rule.COUPLED, TreeLimits(num_speculative_tokens=16, auto=True, **limits), 0)
        request.append([2])
        request.num_computed, request.num_fed = request.root, request.root
        requests.append(request)
    return requests


def step_of(decode: list[Request], prefill: Sequence[tuple[Request, PromptChunk]] = ()) -> Step:
    return Step(preempted=[], shared=[], pages=[], decode=decode, prefill=list(prefill))


def controller_of(prices: config.SimulatedCosts | None) -> Controller:
    prune = PruneConfig(auto=True, simulated_costs=prices)
    return Controller(bundled(replace(AUTO_TREE, prune=prune)), UNPROFILED, lambda request, tokens: len(tokens))


def plain(plan: Plan, step: Step, ms: float = 10.0) -> StepOutcome:
    """The outcome of a step without any draft."""
    chains = [request.tokens[-1:] for request in step.decode]
    verdicts = [Verdict((), (5,), 0, 0)] * len(chains)
    return StepOutcome(step, DraftBatch.of(None, [False] * len(chains), chains), verdicts, None, ms)


@pytest.mark.parametrize(("draft", "pays"), [(10.0, False), (1.0, True)])
@pytest.mark.parametrize("num_prompt_rows", [0, 2000])
def test_prompts_of_the_same_step_do_not_make_drafting_pay(draft, pays, num_prompt_rows):
    controller = controller_of(config.SimulatedCosts(step_ms=3, row_ms=0.5, draft_ms=draft, level_ms=0.1))
    requests = decoding(1)
    joining = Request(Submit(id=9, prompt=[1] * 2000, max_tokens=64), Rule.COUPLED, None, 0)
    prefill = [(joining, PromptChunk(0, num_prompt_rows))] if num_prompt_rows else []
    assert bool(controller.plan(step_of(requests, prefill), requests).inputs) == pays


def test_trees_take_no_rows_that_prompts_have():
    """The scheduler expects few nodes under auto; where prompts fill the step, no tree may make it larger."""
    controller, requests = controller_of(config.SimulatedCosts(step_ms=30, row_ms=0.01, draft_ms=0.1)), decoding(4)
    joining = Request(Submit(id=9, prompt=[1] * 4000, max_tokens=64), Rule.COUPLED, None, 0)
    for num_rows, trees in ((2048 - 4 - 40, 2), (2048 - 4 - 15, 0), (0, 4)):
        prefill = [(joining, PromptChunk(0, num_rows))] if num_rows else []
        plan = controller.plan(step_of(requests, prefill), requests)
        assert sum(own.num_nodes > 0 for own in plan.inputs.values()) == trees


def test_while_drafting_is_off_forecasts_are_rare_until_the_batch_changes(monkeypatch):
    monkeypatch.setattr(gate, "_FIRST_GAP", 10**6)  # no probes
    controller = controller_of(config.SimulatedCosts(step_ms=3, row_ms=0.5, draft_ms=10.0, level_ms=0.1))
    choose, forecasts = controller._choose, []
    monkeypatch.setattr(controller, "_choose", lambda *asked: (forecasts.append(1), choose(*asked))[1])
    requests = decoding(8)

    def num_forecasts(decode: list[Request], num_steps: int) -> int:
        forecasts.clear()
        for _ in range(num_steps):
            controller.plan(step_of(decode), decode)
        return len(forecasts)

    num_forecasts(requests, 10)  # turns drafting off
    assert num_forecasts(requests, 192) == 0
    assert num_forecasts(requests[:6], 1) == 0, "a quarter less is still the same batch"
    assert num_forecasts(requests[:5], 1) == 1
    assert num_forecasts(requests[:4], 1) == 0


def test_a_few_bad_trees_do_not_switch_drafting_off_and_many_do():
    controller, requests = controller_of(None), decoding(1)
    for count, drafts in ((5, True), (50, False)):
        controller._tree.mean, controller._num_trees = np.array([0.4, 4.0]), count
        assert bool(controller.plan(step_of(requests), requests).inputs) == drafts, count


def test_a_plan_says_who_is_drafted_for_and_what_the_drafter_may_spend():
    controller, requests = (
        controller_of(config.SimulatedCosts(step_ms=30, row_ms=0.1, draft_ms=1.0, level_ms=0.1)),
        decoding(3),
    )
    plan = controller.plan(step_of(requests), requests)
    assert [plan.inputs[request].num_nodes for request in requests] == [16, 16, 16]
    assert plan.costs is not None and not plan.is_probe
    assert all(map(plan.is_drafted, requests)) and not plan.lookup_drafts


def test_a_request_gets_a_tree_or_a_lookup_draft_not_both():
    controller = controller_of(config.SimulatedCosts(step_ms=30, row_ms=0.1, draft_ms=40.0, level_ms=0.1))
    [repeating] = decoding(1)
    repeating.append([3, 4, 2])
    repeating.num_computed = repeating.num_fed = repeating.root
    plan = controller.plan(step_of([repeating]), [repeating])
    assert not plan.is_drafted(repeating) and plan.lookup_drafts[repeating][:2] == [3, 4]
    cheap = controller_of(config.SimulatedCosts(step_ms=30, row_ms=0.1, draft_ms=0.0, level_ms=0.0))
    plan = cheap.plan(step_of([repeating]), [repeating])
    assert plan.is_drafted(repeating) != (repeating in plan.lookup_drafts)


def test_the_controller_writes_to_no_request():
    controller, requests = (
        controller_of(config.SimulatedCosts(step_ms=30, row_ms=0.1, draft_ms=1.0, level_ms=0.1)),
        decoding(2),
    )
    before = [(list(r.tokens), r.num_fed, r.num_computed) for r in requests]
    for _ in range(40):
        plan = controller.plan(step_of(requests), requests)
        controller.observe(plan, plain(plan, step_of(requests)))
    assert [(r.tokens, r.num_fed, r.num_computed) for r in requests] == before
