"""What `auto` learns and decides in the engine: costs, calibration, whether to draft; and that no output changes."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import oracles
import pytest
import torch
from clockwork import AUTO, FIXED, OFF, Prices, bench
from fakes import Bench, Counting, RandomLanguage, say

from verifier import costs, economy
from verifier.bills import Bill
from verifier.calibration import Calibration
from verifier.costs import UNPROFILED, RowCosts, profile
from verifier.drafts import Drafts
from verifier.economy import Economy
from verifier.feeds import Feed
from verifier.request import Request
from verifier.scheduler import Step
from verifier.switch import Switch
from workers import config
from workers.config import PruneConfig, TreeConfig
from workers.ipc import Speculation, Submit
from workers.types import DraftReply, Rule, SamplingParams, TreeLimits, Verdict

torch.set_num_threads(1)

TREE = TreeConfig(kind="dynamic", num_nodes=7, max_depth=3, prune=PruneConfig(auto=True))


# ---- costs


def test_a_bill_follows_what_was_paid_through_noise_and_hiccups():
    rng, bill = np.random.default_rng(0), Bill([1.0, 1.0, 1.0], doubts=[1.0, 1.0, 1.0])
    quantities = np.stack([np.ones(600), rng.integers(1, 9, 600), rng.integers(0, 40, 600)], axis=1)
    true = quantities @ [2.0, 1.5, 0.1]
    paid = true * rng.lognormal(0, 0.1, 600) * np.where(rng.random(600) < 0.05, 10, 1)
    for step, (amount, row) in enumerate(zip(paid, quantities, strict=True)):
        bill.paid(step, amount, row)
    estimate = bill.price(quantities.T)
    assert np.abs(estimate / true - 1).mean() < 0.12


def test_one_measurement_puts_the_scale_right():
    bill = Bill([1.0, 2.0], doubts=[1.0, 1.0], has_scale=False)
    bill.paid(0, 50.0, (1, 2))
    assert float(bill.price((1, 2))) == pytest.approx(50.0)


def test_what_is_rarely_paid_is_soon_known_and_not_forgotten():
    """Steps cost 60 and 10 a tree; after 20 plain steps three with a few trees tell what eight would cost, and 200
    further plain steps take nothing of that away."""
    rng, bill = np.random.default_rng(1), Bill([50.0, 1.0], doubts=[10.0, 5.0])

    learnt = []
    for step, num_trees in enumerate([0] * 20 + [1, 4, 4] + [0] * 200):
        bill.paid(step, (60 + 10 * num_trees) * rng.lognormal(0, 0.03), (1, num_trees))
        learnt.append(float(bill.price((0, 8))))
    assert learnt[22] == pytest.approx(80, rel=0.2) and learnt[-1] == pytest.approx(learnt[22], rel=0.1)


def test_given_prices_stay():
    bill = Bill([1.0, 2.0])
    bill.paid(0, 50.0, (1, 2))
    assert float(bill.price((1, 2))) == 5.0


def test_beyond_its_last_entry_the_table_goes_on_as_steep():
    table = RowCosts(np.array([1.0, 2.0, 4.0, 8.0]), np.array([5.0, 5.0, 6.0, 10.0]))
    assert table.ms(np.array([1, 3, 8, 16])).tolist() == [5.0, 5.5, 10.0, 18.0]


def test_start_up_times_the_target_on_a_few_sizes():
    with bench(Prices(fixed=1, row=1, message=1, fed=0, level=1, node=0)) as b:
        began = time.perf_counter()
        table = profile(b.engine._target, b.engine._config, b.engine._allocator.num_pages)
        assert time.perf_counter() - began < 20
    assert len(table.rows_T) >= 2 and table.rows_T[0] == 1
    assert (np.diff(table.rows_T) > 0).all() and (np.diff(table.ms_T) >= 0).all() and table.ms_T[0] > 0


def test_a_slow_target_on_a_busy_machine_is_timed_well_beyond_a_tree(monkeypatch):
    """A second per forward, and for a while everything takes twice as long: the table shows neither."""
    clock = iter(range(10**6))
    monkeypatch.setattr(costs.time, "perf_counter", lambda: 100.0 * next(clock))
    calls: list[int] = []

    def took(target: object, config: object, num_pages: int, num_rows: int) -> float:
        calls.append(num_rows)
        return (1000 + 10 * num_rows) * (2 if 5 < len(calls) < 25 else 1)

    monkeypatch.setattr(costs, "_timed", took)
    config = SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=4, tree_rows=17)
    table = profile(SimpleNamespace(graphs=None), config, 9)  # type: ignore[arg-type]
    assert table.rows_T.tolist() == [1, 2, 3, 4, 6, 9, 13, 19, 28]
    assert table.ms_T.tolist() == [1000 + 10 * rows for rows in table.rows_T]


# ---- calibration


def verdicts_of(a: float, b: float, num_steps: int, seed: int = 0) -> Calibration:
    """A calibration shown trees of a root with three children, of which each has three, that survive by (a, b)."""
    rng, calibration = np.random.default_rng(seed), Calibration()
    parents = [-1, 0, 0, 0, *[1] * 3, *[2] * 3, *[3] * 3]
    for _ in range(num_steps):
        raw = np.concatenate([-np.sort(-rng.dirichlet([1.0, 0.5, 0.3, 0.3]))[:3] for _ in range(4)])
        logit = np.log(raw / (1 - raw))
        depth = np.array([1] * 3 + [2] * 9)
        used = calibration.fit_D2[depth - 1].astype(np.float64)
        shown = 1 / (1 + np.exp(-(used[:, 0] * logit + used[:, 1])))
        chance = 1 / (1 + np.exp(-(a * logit + b)))
        weight = np.concatenate([[1.0], shown])
        weight[4:] *= weight[[parents[row] for row in range(4, 13)]]
        path: list[int] = []
        for first in (1, None):
            start = first if first is not None else 1 + 3 * path[-1]
            ends = np.cumsum(chance[start - 1 : start + 2])
            survives = [start + int(np.searchsorted(ends, draw))] if (draw := rng.random()) < ends[-1] else []
            if not survives:
                break
            path.append(survives[0])
        tree = oracles.tree(parents, list(range(13)))
        object.__setattr__(tree, "weight_N", torch.tensor(weight, dtype=torch.float32))
        calibration.learn(tree, [Verdict(tuple(path), (0,), 12, 12)], np.array([True]))
    return calibration


@pytest.mark.parametrize(("a", "b"), [(1.0, 0.0), (0.7, -0.3), (1.4, -0.5)])
def test_calibration_recovers_how_confidence_and_survival_relate(a, b):
    fit_2 = verdicts_of(a, b, 1500).fit_D2[0]
    for raw in (0.1, 0.3, 0.6, 0.8):
        logit = np.log(raw / (1 - raw))
        chances = [1 / (1 + np.exp(-(x * logit + y))) for x, y in ((a, b), fit_2)]
        assert abs(chances[0] - chances[1]) < 0.07


def test_a_depth_never_seen_takes_the_shared_fit_and_the_first_fit_is_the_identity():
    assert Calibration().fit_D2.tolist() == [[1.0, 0.0]] * 8
    fit_D2 = verdicts_of(0.6, -0.5, 600).fit_D2
    assert np.abs(fit_D2[7] - fit_D2[:2].mean(0)).max() < 0.4 and not np.allclose(fit_D2[7], [1, 0], atol=0.1)


# ---- the engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_tokens_are_those_of_the_target_whatever_auto_decides(monkeypatch, method, temperature):
    """Requests are drafted for at random, and owed feeds of any length: memory, features and tokens stay right."""
    rng = np.random.default_rng(5)
    monkeypatch.setattr(
        economy.Economy, "_choose", lambda self, auto, others, step: [r for r in auto if rng.random() < 0.4]
    )
    language = RandomLanguage(error=0.3)
    with Bench(language, method, TREE, max_num_batched_tokens=24, max_num_seqs=4) as b:
        b.engine._economy._most_fed, b.engine._economy._max_backlog = 10, 6
        asked = []
        for n in range(6):
            params = SamplingParams(temperature=temperature, seed=n)
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


def test_while_nothing_is_drafted_the_drafter_hears_nothing():
    prices = Prices(fixed=1, row=1, message=200, fed=0.01, level=200, node=1)
    with bench(prices) as b:
        b.run(AUTO, 1, 0.0, num_prompts=1, num_tokens=16)
        b.run(AUTO, 1, 0.0, num_prompts=1, num_tokens=64)
        assert len(b.engine._drafter.requests) <= 4


def test_auto_asks_for_costs_and_others_do_not():
    with Bench(Counting(), "eagle3", TREE) as b:
        b.ask([1, 2, 3], 12, SamplingParams(temperature=0.0))
        assert any(request.costs is not None for request in b.drafter.requests)
    with Bench(Counting(), "eagle3", TREE) as b:
        b.ask([1, 2, 3], 12, SamplingParams(temperature=0.0), speculation=Speculation(auto=False))
        assert all(request.costs is None for request in b.drafter.requests)


# ---- the bundled pair on a clock of chosen prices

CHEAP_DRAFTS = Prices(fixed=20, row=0.05, message=0.5, fed=0.01, level=1.0, node=0.01)
DEAR_DRAFTS = Prices(fixed=3, row=0.5, message=4, fed=0.05, level=3, node=0.3)
DEAR_ROWS = Prices(fixed=3, row=1.0, message=0.2, fed=0.02, level=0.2, node=0.02)
DEAR_TREES = Prices(fixed=30, row=2.0, message=0.2, fed=0.01, level=0.2, node=0.02, tree=12)


@pytest.mark.parametrize(
    ("prices", "batch"),
    [(CHEAP_DRAFTS, 1), (DEAR_DRAFTS, 8), (DEAR_ROWS, 1), (DEAR_TREES, 8)],
    ids=["drafts", "no drafts", "rows", "what the table does not tell"],
)
def test_auto_is_as_fast_as_the_better_of_drafting_and_not(prices, batch):
    with bench(prices) as b:
        off, fixed = (b.run(asked, batch, 0.0, num_prompts=batch + 3, num_tokens=32) for asked in (OFF, FIXED))
        b.run(AUTO, batch, 0.0, num_prompts=batch, num_tokens=128)  # learns
        auto = b.run(AUTO, batch, 0.0, num_prompts=batch + 3, num_tokens=32)
    assert auto.tokens == fixed.tokens == off.tokens
    assert auto.rate > 0.95 * max(off.rate, fixed.rate)


def test_auto_verifies_far_fewer_nodes_than_a_full_tree_and_accepts_as_much():
    with bench(Prices(fixed=20, row=0.5, message=0.2, fed=0.01, level=0.2, node=0)) as b:
        b.run(AUTO, 1, 0.0, num_prompts=3, num_tokens=64)  # learns
        fixed, auto = (b.run(asked, 1, 0.0, num_prompts=6, num_tokens=64) for asked in (FIXED, AUTO))
    assert auto.tokens == fixed.tokens and auto.rate > fixed.rate
    assert auto.verified_per_token < 0.8 * fixed.verified_per_token
    assert auto.acceptance_length > 0.95 * fixed.acceptance_length


@pytest.mark.parametrize("batch", [1, 8])
def test_where_drafting_never_pays_tries_take_no_more_than_a_hundredth_of_the_time(batch):
    with bench(DEAR_DRAFTS) as b:
        b.run(AUTO, batch, 0.0, num_prompts=8, num_tokens=64)  # learns
        off, auto = (b.run(asked, batch, 0.0, num_prompts=max(36, 5 * batch), num_tokens=64) for asked in (OFF, AUTO))
    assert auto.tokens == off.tokens
    assert auto.rate > 0.98 * off.rate and auto.num_trees > 0


def believing(prices: config.Prices) -> Economy:
    return Economy(UNPROFILED, PruneConfig(prices=prices), most_fed=2048, max_backlog=256)


@pytest.mark.parametrize(("draft", "pays"), [(10.0, False), (1.0, True)])
@pytest.mark.parametrize("num_prompt_rows", [0, 2000])
def test_prompts_of_the_same_step_do_not_make_drafting_pay(draft, pays, num_prompt_rows):
    deciding = believing(config.Prices(step=3, row=0.5, draft=draft, level=0.1))
    decode, joining = [
        Request(Submit(id=n, prompt=[1] * 2000, max_tokens=64), Rule.COUPLED, TreeLimits(num_nodes=16, auto=True), 0)
        for n in range(2)
    ]
    prefill = [(joining, slice(0, num_prompt_rows))] if num_prompt_rows else []
    step = Step(preempted=[], shared=[], pages=[], decode=[decode], prefill=prefill)
    assert bool(deciding.worthwhile([decode], {decode: Feed([1], 16, 8)}.get, step, lambda request: 0)) == pays


def test_while_drafting_is_off_auto_looks_rarely_until_the_batch_changes(monkeypatch):
    deciding = believing(config.Prices(step=3, row=0.5, draft=10.0, level=0.1))
    deciding._switch._owed_ms = 1e9  # no tries
    choose, looks = deciding._choose, []
    monkeypatch.setattr(deciding, "_choose", lambda *asked: (looks.append(1), choose(*asked))[1])
    limits = TreeLimits(num_nodes=16, auto=True)
    requests = [Request(Submit(id=n, prompt=[1] * 9, max_tokens=64), Rule.COUPLED, limits, 0) for n in range(8)]

    def num_looks(decode: list[Request], num_steps: int) -> int:
        looks.clear()
        for _ in range(num_steps):
            step = Step(preempted=[], shared=[], pages=[], decode=decode, prefill=[])
            deciding.worthwhile(decode, lambda request: Feed([1], 16, 8), step, lambda request: 0)
        return len(looks)

    num_looks(requests, 10)  # turns drafting off
    assert num_looks(requests, 192) == 3
    assert num_looks(requests[:6], 1) == 0, "a quarter less is still the same batch"
    assert num_looks(requests[:5], 1) == 1
    assert num_looks(requests[:4], 1) == 0


def test_what_a_try_taught_is_weighed_in_the_next_step():
    switch = Switch()
    while not switch.is_trial:
        if not switch.rests(num_decoding=4):
            switch.weigh(advantage=0.5, num_decoding=4)
        switch.pay(step_ms=10.0, otherwise_ms=10.0)
    assert not switch.is_on
    switch.pay(step_ms=30.0, otherwise_ms=10.0)
    assert not switch.rests(num_decoding=4)
    switch.weigh(advantage=2.0, num_decoding=4)
    assert switch.is_on and switch.drafts


def test_guesses_of_what_drafting_takes_switch_nothing_off():
    """Rows of trees that grow at once, 16 a level, cost next to nothing: no first guess knows."""
    deciding = Economy(UNPROFILED, PruneConfig(auto=True), most_fed=2048, max_backlog=256)
    deciding._growth = economy._Average(np.array([8.0, 7 * 16.0]))
    limits = TreeLimits(num_nodes=16, auto=True)
    requests = [Request(Submit(id=n, prompt=[1], max_tokens=64), Rule.COUPLED, limits, 0) for n in range(8)]
    step = Step(preempted=[], shared=[], pages=[], decode=requests, prefill=[])
    reply = DraftReply(
        trees=oracles.tree([-1, 0], [1, 2]), probs=None, pruned_GD=torch.zeros(1, 1), num_levels=8, num_run=7 * 16,
        seconds=0.0,
    )  # fmt: skip

    def feeds() -> dict[Request, Feed]:
        return deciding.worthwhile(requests, lambda request: Feed([1], 16, 8), step, lambda request: 0)

    assert feeds()
    for _ in range(3):  # the first two may have compiled something
        deciding.learn_draft({requests[0]: Feed([1], 16, 8)}, reply, seconds=1.0)
    assert not feeds()


def test_what_has_not_been_paid_for_long_may_have_become_cheap():
    bill = Bill([1.0, 1.0], doubts=[0.5, 0.5])
    for step in range(20):
        bill.paid(step, 2.0 + step % 2, (1, 1 + step % 2))
    assert bill.hopeful().price((0, 1)) > 0.8
    for step in range(20, 400):
        bill.paid(step, 1.0, (1, 0))
    assert bill.price((0, 1)) == pytest.approx(1.0, rel=0.1)
    assert bill.hopeful().price((0, 1)) < 0.7 and bill.hopeful().price((1, 0)) > 0.8


@pytest.mark.parametrize(("waited", "bonus"), [(31, 1.0), (32, 2.0)])
def test_what_sets_a_request_apart_is_forgotten_while_nothing_is_drafted(waited, bonus):
    deciding = believing(config.Prices(step=3, row=0.5, draft=10.0, level=0.1))
    request = Request(Submit(id=0, prompt=[1], max_tokens=64), Rule.COUPLED, TreeLimits(num_nodes=16, auto=True), 0)
    request.draft_bonus, deciding._switch._waited = 2.0, waited
    step = Step(preempted=[], shared=[], pages=[], decode=[request], prefill=[])
    deciding.learn(step, Drafts.of(None, [False], [[1]]), [Verdict((), (5,), 0, 0)], 0.01)
    assert request.draft_bonus == pytest.approx(bonus)


def test_a_plain_step_is_priced_behind_one_with_nodes_though_a_prompt_comes_between(monkeypatch):
    deciding = believing(config.Prices(step=3, row=0.5, draft=10.0, level=0.1))
    request = Request(Submit(id=0, prompt=[1], max_tokens=64), Rule.COUPLED, TreeLimits(num_nodes=16, auto=True), 0)
    priced: list[Step] = []
    monkeypatch.setattr(deciding._prices, "learn_rest", lambda number, step, *own: priced.append(step))
    deciding._had_nodes = True
    plain, with_prompt = (
        Step(preempted=[], shared=[], pages=[], decode=[request], prefill=prefill)
        for prefill in ([], [(request, slice(0, 9))])
    )
    for step in (with_prompt, plain, plain):
        deciding.learn(step, Drafts.of(None, [False], [[1]]), [Verdict((), (5,), 0, 0)] * 2, 0.01)
    assert priced == [with_prompt, plain]


def test_where_prices_are_given_tries_are_charged_by_them():
    """However quick this machine is: one try at the price of 1000 steps is paid off in 100,000."""
    dear = PruneConfig(auto=True, prices=config.Prices(step=1e3, row=0, draft=1e6))
    with Bench(RandomLanguage(), "eagle3", replace(TREE, prune=dear)) as b:
        b.ask([1, 2, 3], 120, SamplingParams(temperature=0.0))
        assert sum(bool((request.num_nodes_B > 0).any()) for request in b.drafter.requests) == 1


def test_code_that_is_compiled_in_the_first_exchanges_is_not_the_price_of_drafting():
    num_trees = []
    for late_ms in ([], [5000.0, 800.0]):
        with bench(CHEAP_DRAFTS) as b:
            proposer = b.engine._drafter._proposer
            extend = proposer.extend

            def late(request, extend=extend, clock=b.clock, late_ms=late_ms):
                clock.ms += late_ms.pop(0) if late_ms else 0.0
                return extend(request)

            proposer.extend = late
            num_trees.append(b.run(AUTO, 4, 0.0, num_prompts=8, num_tokens=32).num_trees)
    on_time, compiling = num_trees
    assert compiling > 0.8 * on_time > 20


def test_auto_comes_back_when_drafting_pays_again():
    with bench(DEAR_DRAFTS) as b:
        b.run(AUTO, 4, 0.0, num_prompts=8, num_tokens=32)
        assert b.run(AUTO, 4, 0.0, num_prompts=8, num_tokens=32).num_trees < 30
        b.clock.prices = CHEAP_DRAFTS
        b.run(AUTO, 4, 0.0, num_prompts=24, num_tokens=96)
        fast = b.run(AUTO, 4, 0.0, num_prompts=8, num_tokens=32)
    assert fast.num_trees > 30
