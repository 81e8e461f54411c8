"""The fleet simulation compared with a step-by-step simulation and with queueing theory; its invariants."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from typing import NamedTuple

import numpy as np
import pytest

from cluster.planner.cost_model import PlannerCostModel, PrefillChunk
from cluster.planner.fleet import Fleet, Load, ReplicaSpec, simulate
from secateur.errors import ConfigError
from secateur.plan import Arrival, CostTable, DraftCostTable, LengthDistribution, VerifyCostTable

GRID = ((2.0, 4.0), (3.0, 8.0))
TABLE = CostTable(
    verify=VerifyCostTable(
        rows=(1, 64, 512),
        ms=(5, 6, 40),
        request_ms=0.05,
        kv_token_ms=1e-3,
        row_kv_token_ms=1e-4,
        tree_ms=0.7,
        tree_request_ms=0.1,
    ),
    draft=DraftCostTable(
        requests=(1, 8), nodes=(1, 16), ms=GRID, transfer_ms=GRID, kv_token_ms=(1e-4, 1e-3), prompt_token_ms=0.01
    ),
    host_ms=0.5,
    host_request_ms=0.1,
)
ACCEPTED = np.log1p(np.arange(64))


def replica(table: CostTable = TABLE, nodes: list[int] | None = None, **more: object) -> ReplicaSpec:
    return ReplicaSpec(costs=PlannerCostModel(table), accepted=ACCEPTED, nodes_by_batch=nodes or [0] * 9, **more)  # type: ignore[arg-type]


def flat(step_ms: float) -> CostTable:
    """Return costs with which every step takes the same time."""
    return CostTable(verify=VerifyCostTable(rows=(1, 2), ms=(step_ms, step_ms)))


def poisson(rate: float, count: int, prompt: str = "exp:60", output: str = "exp:30", seed: int = 0) -> Load:
    return Load.poisson(rate, count, LengthDistribution.parse(prompt), LengthDistribution.parse(output), seed)


# -- the twin --------------------------------------------------------------------------------------------------------


class Running(NamedTuple):
    job: int
    cached: float
    left: float


def stepwise(load: Load, one: ReplicaSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return the times of every request's first and last token on one replica, step by step."""
    first, finish = np.zeros(len(load.arrival_J)), np.zeros(len(load.arrival_J))
    coming = deque(range(len(load.arrival_J)))
    waiting: deque[int] = deque()
    prompts: list[list[int]] = []  # job, tokens done
    running: list[Running] = []
    life = load.prompt_J + load.output_J + one.tree_rows
    now = 0.0
    while coming or waiting or prompts or running:
        if not (waiting or prompts or running):
            now = max(now, load.arrival_J[coming[0]])
        while coming and load.arrival_J[coming[0]] <= now + 1e-9:
            waiting.append(coming.popleft())
        while waiting:
            held = sum(life[r.job] for r in running) + sum(life[job] for job, _ in prompts)
            if len(running) + len(prompts) >= one.max_num_seqs or held + life[waiting[0]] > one.max_kv_tokens:
                break
            prompts.append([waiting.popleft(), 0])
        batch = len(running)
        nodes = one.nodes_by_batch[batch]
        budget = max(1, one.max_num_batched_tokens - batch * (1 + nodes))
        chunks = []
        for prompt in prompts:
            rows = min(budget, load.prompt_J[prompt[0]] - prompt[1])
            if rows:
                prompt[1] += rows
                budget -= rows
                chunks.append(PrefillChunk(int(rows), int(prompt[1])))
        cached = sum(r.cached for r in running)
        now += 1e-3 * one.costs.step(batch, nodes, cached, chunks, feeds_drafter=any(one.nodes_by_batch)).ms
        gain = 1 + one.accepted[nodes]
        running = [Running(r.job, r.cached + gain, r.left - gain) for r in running]
        for r in running:
            if r.left <= 1e-9:
                finish[r.job] = now
        running = [r for r in running if r.left > 1e-9]
        for job, _ in [prompt for prompt in prompts if prompt[1] == load.prompt_J[prompt[0]]]:
            first[job] = now
            if load.output_J[job] == 1:
                finish[job] = now
            else:
                running.append(Running(job, float(load.prompt_J[job]), load.output_J[job] - 1))
        prompts = [prompt for prompt in prompts if prompt[1] < load.prompt_J[prompt[0]]]
    return first, finish


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "one",
    [
        replica(),
        replica(nodes=[0, 16, 16, 8, 8, 4, 4, 0, 0]),
        replica(nodes=[0, *[7] * 6], max_num_batched_tokens=70),
        replica(nodes=[0, *[3] * 20], max_kv_tokens=900),
    ],
    ids=["plain", "budgets by batch", "prompts in chunks", "little memory"],
)
@pytest.mark.parametrize("rate", [2.0, 60.0])
def test_events_happen_when_a_step_by_step_simulation_has_them(one: ReplicaSpec, rate: float, seed: int) -> None:
    load = poisson(rate, 120, seed=seed)
    first, finish = stepwise(load, one)
    found = simulate(load, one)
    np.testing.assert_allclose(found.first_J, first, atol=1e-6)
    np.testing.assert_allclose(found.finish_J, finish, atol=1e-6)


# -- queueing theory -------------------------------------------------------------------------------------------------


def test_waiting_for_a_fixed_speed_server_follows_pollaczek_khinchine() -> None:
    """M/D/1: rho D / (2 (1 - rho))."""
    load = poisson(80.0, 25_000, prompt="10", output="1")
    found = simulate(load, replica(flat(10.0), [0, 0]))
    waited = found.ttft_J.mean() - 0.010
    assert waited == pytest.approx(0.8 * 0.010 / (2 * 0.2), rel=0.06)


def test_waiting_for_random_answers_follows_pollaczek_khinchine() -> None:
    """M/G/1: lambda E[S^2] / (2 (1 - rho)), S a step for each token."""
    load = poisson(7.0, 25_000, prompt="10", output="exp:100")
    found = simulate(load, replica(flat(1.0), [0, 0]))
    service = 1e-3 * load.output_J
    rho = 7.0 * service.mean()
    expected = 7.0 * (service**2).mean() / (2 * (1 - rho))
    assert found.ttft_J.mean() - 0.001 == pytest.approx(expected, rel=0.08)
    assert found.utilisation == pytest.approx(rho, rel=0.03)
    assert found.busy_seconds == pytest.approx(service.sum())


def test_waiting_for_several_servers_follows_erlang_c() -> None:
    """M/M/c: P(wait) / (c mu - lambda), with steps too short to matter."""
    seats, mean, rho = 4, 0.2, 0.7
    rate = rho * seats / mean
    load = poisson(rate, 50_000, prompt="1", output="exp:400", seed=1)
    found = simulate(load, replica(flat(0.5), [0] * (seats + 1)))
    offered = rho * seats
    tail = offered**seats / math.factorial(seats) / (1 - rho)
    p_wait = tail / (sum(offered**k / math.factorial(k) for k in range(seats)) + tail)
    expected = p_wait / (seats / mean - rate)
    # Until the step ends in which it comes, if anybody is served (half a step), and its own first step.
    assert found.ttft_J.mean() - 0.00075 == pytest.approx(expected, rel=0.08)


def test_two_choices_shorten_queues_as_predicted() -> None:
    """Mitzenmacher 1996: a share rho^(2^k - 1) of many single servers has at least k requests; then Little's law."""
    rho, count = 0.9, 200
    load = poisson(rho * count / 0.1, 25_000, prompt="1", output="exp:200", seed=2)
    found = simulate(load, replica(flat(0.5), [0, 0]), count, seed=3)
    late = slice(8_000, 20_000)  # when the fleet has filled and is not yet emptying
    present = rho * count / 0.1 * found.e2e_J[late].mean() / count
    assert present == pytest.approx(sum(rho ** (2**k - 1) for k in range(1, 8)), rel=0.05)
    assert np.bincount(found.replica_J, minlength=count).min() > 0


# -- what may never be lost ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def busy_fleet() -> Fleet:
    return simulate(poisson(300.0, 4000, seed=4), replica(nodes=[0, *[8] * 8], num_devices=2), 12, seed=5)


def test_every_request_is_served_once_and_in_order(busy_fleet: Fleet) -> None:
    load = busy_fleet.load
    assert np.isfinite(busy_fleet.finish_J).all()
    assert (busy_fleet.first_J > load.arrival_J).all() and (busy_fleet.finish_J >= busy_fleet.first_J).all()
    assert ((busy_fleet.finish_J == busy_fleet.first_J) == (load.output_J == 1)).all()
    served = busy_fleet.tokens_per_second * busy_fleet.seconds
    assert served == pytest.approx(load.output_J.sum())


def test_utilisation_is_at_most_one(busy_fleet: Fleet) -> None:
    assert 0 < busy_fleet.utilisation <= 1
    assert 0 < busy_fleet.mean_batch <= 8
    assert (busy_fleet.num_replicas, busy_fleet.num_devices) == (12, 24)
    assert busy_fleet.per_device == busy_fleet.tokens_per_second / 24


def test_a_replica_starts_requests_in_order_of_arrival(busy_fleet: Fleet) -> None:
    for number in range(12):
        mine = busy_fleet.replica_J == number
        assert (np.diff(busy_fleet.first_J[mine]) >= 0).all()


@pytest.mark.parametrize("rate", [1.0, 50.0, 5000.0])
def test_total_work_does_not_depend_on_batching(rate: float) -> None:
    """If only rows cost time, each prompt token and each further output token is one row."""
    by_row = CostTable(verify=VerifyCostTable(rows=(1, 2), ms=(1.0, 2.0)))
    load = poisson(rate, 500)
    found = simulate(load, replica(by_row), 3)
    assert found.busy_seconds == pytest.approx(1e-3 * (load.prompt_J.sum() + (load.output_J - 1).sum()))


def test_equal_seeds_give_equal_simulations() -> None:
    def run(seed: int) -> Fleet:
        return simulate(poisson(100.0, 500, seed=seed), replica(), 6, seed)

    once, again, other = run(1), run(1), run(2)
    assert (once.finish_J == again.finish_J).all() and (once.replica_J == again.replica_J).all()
    assert not np.array_equal(once.finish_J, other.finish_J)


def test_without_trees_no_prompt_is_fed_to_a_drafter() -> None:
    load = poisson(1.0, 40)._replace(arrival_J=10.0 * np.arange(40))  # one at a time
    assert TABLE.draft is not None
    dear = TABLE.model_copy(update={"draft": TABLE.draft.model_copy(update={"prompt_token_ms": 1.0})})
    assert simulate(load, replica(dear)).seconds == simulate(load, replica()).seconds
    trees = [0, *[4] * 8]
    fed = simulate(load, replica(dear, trees)).busy_seconds - simulate(load, replica(TABLE, trees)).busy_seconds
    assert fed == pytest.approx(load.prompt_J.sum() * (1.0 - 0.01) / 1e3)


def test_accepted_tokens_save_steps() -> None:
    load = Load(np.zeros(1), np.array([10]), np.array([101]))
    plain = simulate(load, replica(flat(1.0), [0, 0]))
    twice = ReplicaSpec(costs=PlannerCostModel(flat_with_drafts()), accepted=np.ones(64), nodes_by_batch=[0, 5])
    assert plain.num_steps == 101 and plain.seconds == pytest.approx(0.101)
    assert simulate(load, twice).num_steps == 51
    assert simulate(load, twice).tpot_J[0] == pytest.approx(0.5e-3)


def test_random_acceptance_spreads_durations_without_changing_the_mean() -> None:
    count = 4000
    load = Load(np.arange(count) * 10.0, np.full(count, 4), np.full(count, 201))
    lucky = ReplicaSpec(
        costs=PlannerCostModel(flat_with_drafts()), accepted=ACCEPTED.clip(0, 1), nodes_by_batch=[0, 5], spread=0.5
    )
    steps = (simulate(load, lucky).finish_J - simulate(load, lucky).first_J) / 1e-3
    assert steps.mean() == pytest.approx(100.5, rel=0.01)  # the last one often brings more than was needed
    assert steps.std() == pytest.approx(0.5 * 10, rel=0.05)
    assert simulate(load, dataclasses.replace(lucky, nodes_by_batch=[0, 0])).tpot_J.std() < 1e-9  # no trees, no luck


def flat_with_drafts() -> CostTable:
    grid = ((0.0,),)
    draft = DraftCostTable(requests=(1,), nodes=(5,), ms=grid, transfer_ms=grid)
    return flat(1.0).model_copy(update={"draft": draft})


def test_a_request_that_never_fits_is_refused() -> None:
    load = Load(np.zeros(2), np.array([10, 90]), np.array([5, 30]))
    with pytest.raises(ConfigError, match="a request of 121 tokens"):
        simulate(load, replica(max_kv_tokens=120))
    assert np.isfinite(simulate(load, replica(max_kv_tokens=121)).finish_J).all()


def test_a_trace_is_simulated_as_recorded() -> None:
    trace = [Arrival(seconds=s, prompt_tokens=4, output_tokens=3) for s in (2.0, 0.5)]
    found = simulate(Load.of_trace(trace), replica(flat(1.0)))
    assert found.finish_J.tolist() == pytest.approx([0.503, 2.003])


def test_lengths_follow_the_given_distribution() -> None:
    load = poisson(1.0, 20_000, prompt="64-128", output="exp:50")
    assert (load.prompt_J.min(), load.prompt_J.max()) == (64, 128)
    assert load.prompt_J.mean() == pytest.approx(96, rel=0.01)
    assert load.output_J.mean() == pytest.approx(50.5, rel=0.03) and load.output_J.min() == 1
    assert np.diff(load.arrival_J).mean() == pytest.approx(1.0, rel=0.03)
