"""The cost model: it follows what steps and exchanges take, and does not blame one cause for another."""

from __future__ import annotations

import numpy as np
import pytest

from verifier.adaptive.cost_model import DraftCost, DraftWork, RowCosts, _VerifyCost


def test_beyond_its_last_entry_the_table_goes_on_as_steep():
    table = RowCosts(np.array([1.0, 2.0, 4.0, 8.0]), np.array([5.0, 5.0, 6.0, 10.0]))
    assert table.ms(np.array([1, 3, 8, 16])).tolist() == [5.0, 5.5, 10.0, 18.0]


def test_drafting_costs_are_followed_through_noise_and_hiccups():
    rng, cost = np.random.default_rng(0), DraftCost(DraftWork(messages=2.0, rows_fed=0.1, levels=1.0, nodes_run=0.1))
    true = DraftWork(messages=3.0, rows_fed=0.15, levels=1.5, nodes_run=0.15)
    errors = []
    for step in range(800):
        levels = int(rng.integers(0, 8))
        work = DraftWork(1, int(rng.integers(1, 60)), levels, int(levels * rng.integers(1, 8)))
        ms = float(np.dot(true, work))
        if step >= 600:
            errors.append(abs(cost.ms(work) / ms - 1))
        cost.observe(ms * rng.lognormal(0, 0.1) * (10 if rng.random() < 0.05 else 1), work)
    assert np.mean(errors) < 0.2


def test_the_first_measurement_sets_the_scale_of_guesses():
    cost = DraftCost(DraftWork(messages=1.0, levels=2.0))
    cost.observe(50.0, DraftWork(messages=1, levels=2))
    assert float(cost.ms(DraftWork(messages=1, levels=2))) == pytest.approx(50.0)
    assert float(cost.ms(DraftWork(messages=1))) == pytest.approx(10.0)


def test_a_slow_exchange_moves_the_drafting_cost_by_a_quarter_at_most():
    cost, work = DraftCost(DraftWork(messages=1.0)), DraftWork(messages=1)
    cost.observe(10.0, work)
    cost.observe(1e6, work)
    assert float(cost.ms(work)) == pytest.approx(12.5)


def test_what_a_tree_adds_is_told_from_the_load_and_not_forgotten_over_plain_steps():
    """Steps cost 1.2 times the table and 10 more a tree; 200 plain steps after the last tree change nothing of that."""
    rng, cost = np.random.default_rng(1), _VerifyCost()
    for num_trees in [0, 1, 4, 0, 4, 2] * 30:
        ms = 66 + 10 * num_trees if num_trees else 60
        cost.observe(ms * rng.lognormal(0, 0.03), 55.0 if num_trees else 50.0, num_trees)
    learnt = cost.tree_ms
    assert cost.ms(50.0, 0) == pytest.approx(60, rel=0.1) and learnt == pytest.approx(10 / 1.2, rel=0.2)
    for _ in range(200):
        cost.observe(60 * rng.lognormal(0, 0.03), 50.0, 0)
    assert cost.tree_ms == learnt


def test_a_slower_machine_changes_no_ratio_of_costs():
    """While only steps with trees run, a load of 1.5 is not blamed on the trees."""
    cost = _VerifyCost()
    for _ in range(50):
        cost.observe(1.5 * 55.0, 55.0, 1)
    assert cost.ms(50.0, 0) == pytest.approx(1.5 * 50.0, rel=0.12)
    assert cost.ms(55.0, 1) == pytest.approx(1.5 * 55.0, rel=0.01)


def test_a_hiccup_moves_the_load_by_a_quarter_for_a_step_or_two():
    cost = _VerifyCost()
    cost.observe(1e6, 50.0, 0)
    assert cost.load == pytest.approx(1.25)
    for _ in range(4):
        cost.observe(50.0, 50.0, 0)
    assert cost.load == pytest.approx(1.0, abs=0.02)
