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
        cost.observe(ms * rng.lognormal(0, 0.1) * (10 if rng.random() < 0.05 else 1), work, is_probe=False)
    assert np.mean(errors) < 0.2


def test_the_first_measurement_sets_the_scale_of_guesses():
    cost = DraftCost(DraftWork(messages=1.0, levels=2.0))
    cost.observe(50.0, DraftWork(messages=1, levels=2), is_probe=False)
    assert float(cost.ms(DraftWork(messages=1, levels=2))) == pytest.approx(50.0)
    assert float(cost.ms(DraftWork(messages=1))) == pytest.approx(10.0)


@pytest.mark.parametrize(("is_probe", "expected"), [(False, 9.0), (True, 5.0)])
def test_a_probe_that_is_faster_is_believed(is_probe, expected):
    cost, work = DraftCost(DraftWork(messages=1.0)), DraftWork(messages=1)
    cost.observe(10.0, work, is_probe=False)
    cost.observe(5.0, work, is_probe=is_probe)
    assert float(cost.ms(work)) == pytest.approx(expected)


@pytest.mark.parametrize("is_probe", [False, True])
def test_a_slow_exchange_moves_the_drafting_cost_by_a_tenth(is_probe):
    cost, work = DraftCost(DraftWork(messages=1.0)), DraftWork(messages=1)
    cost.observe(10.0, work, is_probe=False)
    cost.observe(1e6, work, is_probe=is_probe)
    assert float(cost.ms(work)) == pytest.approx(11.0)


def test_what_a_tree_adds_is_not_blamed_on_plain_steps_nor_forgotten_over_them():
    """Steps cost 1.2 times the table and 10 more a tree; 200 plain steps after the last tree change nothing of that."""
    rng, cost = np.random.default_rng(1), _VerifyCost()
    for _ in range(60):
        cost.observe(60 * rng.lognormal(0, 0.03), 50.0, 0)
    for num_trees in [1, 4, 4, 2] * 15:
        cost.observe((66 + 10 * num_trees) * rng.lognormal(0, 0.03), 55.0, num_trees)
    learnt = cost.tree_ms
    assert cost.scale == pytest.approx(1.2, rel=0.05) and learnt == pytest.approx(10, rel=0.2)
    for _ in range(200):
        cost.observe(60 * rng.lognormal(0, 0.03), 50.0, 0)
    assert cost.tree_ms == learnt


def test_a_hiccup_moves_an_estimate_by_a_twentieth():
    cost = _VerifyCost()
    cost.observe(1e6, 50.0, 0)
    assert cost.scale == pytest.approx(1.05)
