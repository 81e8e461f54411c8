"""The cost model: it follows what steps and exchanges take, and does not blame one cause for another."""

from __future__ import annotations

import numpy as np
import pytest

from verifier.adaptive.cost_model import CostModel, DraftWork, LinearCost, RowCosts, TimedExchange


def test_beyond_its_last_entry_the_table_goes_on_as_steep():
    table = RowCosts(np.array([1.0, 2.0, 4.0, 8.0]), np.array([5.0, 5.0, 6.0, 10.0]))
    assert table.ms(np.array([1, 3, 8, 16])).tolist() == [5.0, 5.5, 10.0, 18.0]


def drafting() -> LinearCost:
    return LinearCost(np.array([2.0, 0.1, 1.0, 0.1]), np.array([10, 0.1, 2, 0.1]))


def verifying() -> LinearCost:
    """The load, what a step with drafts adds, and what each tree adds."""
    return LinearCost(np.array([1.0, 0, 0]), np.array([0.1, 5, 5]), np.array([0.05, 0, 0]))


def test_prices_are_followed_through_noise_and_hiccups():
    rng, cost, true = np.random.default_rng(0), drafting(), (3.0, 0.15, 1.5, 0.02)
    errors = []
    for step in range(800):
        levels = int(rng.integers(0, 8))
        work = DraftWork(1, int(rng.integers(1, 60)), levels, int(levels * rng.integers(1, 8)))
        ms = float(np.dot(true, work))
        if step >= 600:
            errors.append(abs(cost.ms(work) / ms - 1))
        cost.observe(ms * rng.lognormal(0, 0.1) * (10 if rng.random() < 0.05 else 1), work)
    assert np.mean(errors) < 0.1


def test_a_few_exchanges_of_a_gpu_correct_a_guess_that_is_fifty_times_too_dear():
    """One H200: a message takes nearly a step, a node almost nothing."""
    true = DraftWork(messages=4.6, rows_fed=0.004, levels=0.25, nodes_run=0.001)
    works = [DraftWork(1, n * rows, levels, 16 * n * levels) for n, rows, levels in [(1, 1, 0), (1, 64, 7)]]
    works += [DraftWork(1, n, 7, 16 * n * 7) for n in (1, 2, 4, 8, 16, 32, 64)]
    table = RowCosts(np.array([1.0, 512.0]), np.array([5.0, 15.0]))
    timed = [TimedExchange(work, float(np.dot(true, work))) for work in works]
    guess, costs = CostModel(table, None), CostModel(table, None, timed)
    for work in works[2:]:
        assert costs.draft_ms(work) == pytest.approx(np.dot(true, work), rel=0.1)
    assert guess.draft_ms(works[-1]) > 20 * np.dot(true, works[-1])


def test_a_hiccup_moves_a_known_price_by_a_quarter_at_most():
    cost, work = LinearCost(np.array([1.0]), np.array([1.0])), (1.0,)
    for _ in range(5):
        cost.observe(10.0, work)
    cost.observe(1e6, work)
    assert cost.ms(work) == pytest.approx(10, rel=0.25)


def test_what_drafts_add_is_told_from_the_load_and_not_forgotten_over_plain_steps():
    """Steps cost 1.2 times the table, 4 more with drafts and 10 more a tree; plain steps change nothing of that."""
    rng, cost = np.random.default_rng(1), verifying()
    for num_trees in [0, 1, 4, 0, 4, 2] * 30:
        ms = 66 + 4 + 10 * num_trees if num_trees else 60
        cost.observe(ms * rng.lognormal(0, 0.03), (55.0 if num_trees else 50.0, min(num_trees, 1), num_trees))
    learnt = cost.price_J[2]
    assert cost.ms((50.0, 0, 0)) == pytest.approx(60, rel=0.1) and learnt == pytest.approx(10, rel=0.2)
    for _ in range(200):
        cost.observe(60 * rng.lognormal(0, 0.03), (50.0, 0, 0))
    assert cost.price_J[2] == pytest.approx(learnt, rel=0.1)


def test_the_first_drafts_after_plain_steps_are_blamed_and_not_the_machine():
    cost = verifying()
    for _ in range(5):
        cost.observe(50.0, (50.0, 0, 0))
    cost.observe(70.0, (52.0, 1, 8))
    assert cost.price_J[0] == pytest.approx(1, abs=0.02) and cost.ms((52.0, 1, 8)) == pytest.approx(70, rel=0.06)


def test_a_slower_machine_is_not_blamed_on_trees_whose_price_is_known():
    cost = verifying()
    for num_trees in [0, 1, 4] * 20:
        cost.observe(50 + 3 * num_trees, (50.0, min(num_trees, 1), num_trees))
    for _ in range(50):
        cost.observe(1.5 * 53, (50.0, 1, 1))
    assert cost.ms((50.0, 0, 0)) == pytest.approx(75, rel=0.1) and cost.ms((50.0, 1, 1)) == pytest.approx(
        79.5, rel=0.02
    )


def test_a_hiccup_moves_the_load_by_a_quarter_for_a_few_steps():
    cost = verifying()
    cost.observe(1e6, (50.0, 0, 0))
    assert cost.price_J[0] < 1.25
    for _ in range(8):
        cost.observe(50.0, (50.0, 0, 0))
    assert cost.price_J[0] == pytest.approx(1.0, abs=0.02)
