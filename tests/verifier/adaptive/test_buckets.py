"""`auto` where forwards run in buckets of rows (`workers.cuda_graphs.bucket`), as CUDA graphs do.

Costs are a staircase, and trees fill the step that they have paid for. The profiles are made up; the buckets are real.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.tree.cost_model import TreeCostModel
from tests.support.clockwork import AUTO, ClockCosts, bench
from tests.support.engines import AUTO as AUTO_TREE
from tests.support.engines import bundled
from verifier.adaptive import profile as profiling
from verifier.adaptive.controller import Controller
from verifier.adaptive.cost_model import CostModel, RowCosts
from verifier.adaptive.profile import profile
from verifier.draft_inputs import DraftInput
from verifier.request import Request
from verifier.scheduler import Step
from workers.comm.ipc import Submit
from workers.cuda_graphs import Size, bucket, decoder_graphs, fitting
from workers.settings import Rule, TreeLimits

torch.set_num_threads(1)

ENDS = [n for n in range(1, 513) if bucket(n) == n]


def timed(row: float, most: int = 512) -> RowCosts:
    """What start-up measures of a target that takes 10 ms and `row` more for each row that it runs."""
    rows = np.array([float(n) for n in ENDS if n <= most])
    return RowCosts(rows, 10 + row * rows)


def requests(count: int, num_nodes: int = 63) -> list[Request]:
    limits = TreeLimits(num_speculative_tokens=num_nodes, auto=True)
    found = [Request(Submit(id=n, prompt=[1], max_tokens=64), Rule.COUPLED, limits, 0) for n in range(count)]
    for request in found:
        request.append([2])
        request.num_computed = request.num_fed = request.root
    return found


def step_of(decode: list[Request]) -> Step:
    return Step(preempted=[], shared=[], pages=[], decode=decode, prefill=[])


def measuring(row_costs: RowCosts) -> Controller:
    return Controller(bundled(AUTO_TREE), row_costs, lambda request, tokens: len(tokens))


def budget(verify: RowCosts, count: int) -> TreeCostModel:
    """What the drafter is told when so many requests decode and its own work is free."""
    decode = requests(count)
    inputs = {
        request: DraftInput([1], request.limits.num_speculative_tokens, 8) for request in decode if request.limits
    }
    sent = CostModel(verify, None).for_drafter(inputs, step_of(decode), np.zeros(1, dtype=np.float32))
    return TreeCostModel(replace(sent, draft_ms_3=torch.zeros(3)))


# ---- the table


@pytest.mark.parametrize(("measured", "largest"), [(512, 512), (512, 48), (16, 48)], ids=["all", "more", "fewer"])
def test_so_many_rows_cost_what_their_bucket_costs(measured, largest):
    flat = timed(0.1, measured)
    stairs = flat.in_buckets(largest)
    rows = np.arange(1, largest + 1)
    assert (stairs.ms(rows) == flat.ms(np.array([bucket(n) for n in rows.tolist()]))).all()
    assert (np.diff(stairs.rows_T) > 0).all() and (np.diff(stairs.ms(np.arange(1, 1000))) >= 0).all()
    if measured > largest:  # what no graph holds costs what it did
        assert (stairs.ms(np.arange(largest, measured)) == flat.ms(np.arange(largest, measured))).all()


@pytest.mark.parametrize("has_graphs", [True, False])
def test_start_up_times_buckets_where_there_are_any(monkeypatch, has_graphs):
    asked = []

    def took(target, config, num_pages, num_rows):
        asked.append(num_rows)
        return 10 + 0.1 * num_rows

    monkeypatch.setattr(profiling, "timed_forward", took)
    config = SimpleNamespace(max_num_batched_tokens=100, max_num_seqs=4, tree_rows=8)
    table = profile(SimpleNamespace(graphs=object() if has_graphs else None), config, 9)  # type: ignore[arg-type]
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96] if has_graphs else [1, 2, 3, 4, 6, 9, 13, 19, 28, 42, 63, 94]
    assert asked == [*(n for n in sizes for _ in range(2)), *sizes * 8]
    if has_graphs:
        assert (table.ms(5), table.ms(25), table.ms(32)) == (10.6, 13.2, 13.2) and table.ms(40) == pytest.approx(14)
    else:
        assert table.rows_T.tolist() == sizes and table.ms_T.tolist() == [10 + 0.1 * n for n in sizes]


def test_what_start_up_times_is_in_a_graph(monkeypatch):
    ran = []
    with bench(ClockCosts(fixed=1, row=1, message=1, fed=0, level=1, node=0)) as b:
        target, config = b.engine._target, b.engine._config
        graphs = target.graphs = decoder_graphs(target._decoder, target._kv, config, is_captured=False)
        run = target.run
        monkeypatch.setattr(target, "run", lambda step, n: (ran.append(step.attention), run(step, n))[1])
        monkeypatch.setattr(profiling, "_FIRST_ROUND_S", 60.0)
        monkeypatch.setattr(profiling, "_MAX_ROUNDS", 1)
        profile(target, config, b.engine._allocator.num_pages)
    timed = {Size.of(len(step.slot_N), len(step.base_B)) for step in ran}
    largest, most = bucket(config.max_num_seqs * config.tree_rows), graphs._most_requests
    with_graph = {size.rows for size in graphs._buckets if size.rows <= largest}
    assert {size.rows for size in timed if size.rows <= largest} == with_graph
    assert all(fitting(size, graphs._buckets, most) for size in timed if size.rows <= largest)


# ---- how many nodes


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 16), st.integers(0, 300), st.floats(0.001, 2), st.floats(0, 20))
def test_the_batch_fills_its_bucket_or_has_no_nodes_left(seed, num_requests, num_nodes, row, draft_ms):
    num_nodes = min(num_nodes, 63 * num_requests)
    ranked = np.sort(np.random.default_rng(seed).uniform(0.01, 1, num_nodes).astype(np.float32))[::-1]
    flat = timed(row)
    chosen = budget(flat.in_buckets(512), num_requests)
    count = chosen.best_count(ranked, draft_ms, np.zeros(0, dtype=np.float32))
    assert bucket(num_requests + count) == num_requests + count or count in (0, num_nodes)
    assert count == num_nodes or count == 0 or ranked[count] <= ranked[count - 1]
    rows = num_requests + np.arange(num_nodes + 1)
    guess_ms = (0.1 + 0.005 * num_requests) * float(flat.ms(1))  # what drafts take beside their rows
    ms = draft_ms + guess_ms + flat.ms(np.array([bucket(n) for n in rows.tolist()]))
    rate_N = (num_requests + np.concatenate([[0], np.cumsum(ranked, dtype=np.float64)])) / ms
    assert rate_N[count] == pytest.approx(rate_N.max(), rel=1e-5)


def test_the_dearer_rows_are_the_fewer_buckets_are_filled():
    ranked = np.linspace(1, 0.3, 200, dtype=np.float32)
    none = np.zeros(0, dtype=np.float32)
    rows = [8 + budget(timed(row).in_buckets(512), 8).best_count(ranked, 5.0, none) for row in (0.01, 0.1, 0.3, 1, 100)]
    assert rows == sorted(rows, reverse=True) and len(set(rows)) == 5
    assert all(n in ENDS for n in rows[1:]) and rows[0] == 208


def test_a_full_bucket_does_not_end_the_search():
    """A single further row would pay for a whole bucket; the rows of a level share it."""
    ranked = np.repeat(np.array([0.9, 0.6, 0.4], dtype=np.float32), 32)
    frontier, least = ranked[:64], np.zeros(64, dtype=np.float32)
    stairs, flat = (budget(table, 32) for table in (timed(0.05).in_buckets(512), timed(0.05)))
    assert 32 + stairs.best_count(ranked, 5.0, np.zeros(0)) == 128
    assert stairs.worth_running(frontier, least, ranked, 5.0).all()
    assert flat.worth_running(frontier, least, ranked, 5.0).all()


def test_an_engine_that_is_told_of_buckets_fills_them(monkeypatch):
    """The bundled pair on a clock that charges whole buckets; the tokens are the same."""
    prices = ClockCosts(fixed=5, row=0.2, message=0.2, fed=0.01, level=0.2, node=0.01)

    def ran(row_costs: RowCosts) -> tuple[list[list[int]], float]:
        """The tokens, and the share of steps with trees that filled a bucket."""
        is_full = []
        with bench(prices, row_costs) as b:
            run = b.engine._target.run

            def charged(step, number, **more):
                num_rows = len(step.token_N)
                if num_rows > len(step.attention.base_B):
                    is_full.append(bucket(num_rows) == num_rows)
                b.clock.ms += prices.row * (bucket(num_rows) - num_rows)
                return run(step, number, **more)

            monkeypatch.setattr(b.engine._target, "run", charged)
            b.run(AUTO, 4, 0.0, num_prompts=4, num_tokens=64)  # learns
            is_full.clear()
            return b.run(AUTO, 4, 0.0, num_prompts=12, num_tokens=48).tokens, float(np.mean(is_full))

    (tokens, told), (same, untold) = ran(prices.rows.in_buckets(512)), ran(prices.rows)
    assert tokens == same and told > 0.4 > 0.25 > untold


# ---- the engine's part


def test_whether_drafting_pays_is_asked_at_the_price_of_the_bucket():
    """A tree of four nodes and its root are five rows: drafting pays at the price of 5, not at that of 6."""
    flat = RowCosts(np.array([1.0, 2, 3, 4, 6, 8]), np.array([10.0, 10, 10, 10, 40, 40]))
    decode = requests(1)
    for table, is_drafted in ((flat, True), (flat.in_buckets(8), False)):
        controller = measuring(table)
        assert bool(controller.plan(step_of(decode), decode).inputs) == is_drafted


def test_what_a_step_took_counts_for_its_whole_bucket():
    """A step of 9 rows and one of 12 teach the same, and what is learnt leaves the staircase a staircase."""
    learnt = []
    for num_rows in (9, 12):
        costs, decode = CostModel(timed(0.5).in_buckets(512), None), requests(1)
        for ms in (20.0, 25.0, 31.0):
            costs.observe_step(step_of(decode), num_rows - 1, 1, ms)
        learnt.append(costs.verify_ms(step_of(decode), np.arange(64), 1))
    unlearnt_ms = CostModel(timed(0.5), None).verify_ms(step_of(decode), np.arange(64), 1)
    assert (learnt[0] == learnt[1]).all() and (learnt[0] != unlearnt_ms).any()
    for begin, end in itertools.pairwise(n for n in ENDS if n <= 64):
        assert len(set(learnt[0][begin:end])) == 1 and learnt[0][begin] > learnt[0][begin - 1]
