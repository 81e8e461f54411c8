"""The speculation gate: it follows the forecast, and its probes grow rarer."""

from __future__ import annotations

import itertools

import pytest

from verifier.adaptive.gate import SpeculationGate


def run(gate: SpeculationGate, advantage: float, num_steps: int) -> list[int]:
    """Steps of a batch of 4, all with one forecast; the indices of those that probed."""
    probes = []
    for index in range(num_steps):
        if not gate.begin_step(num_decoding=4):
            gate.weigh(advantage, num_decoding=4)
        if gate.is_probe:
            probes.append(index)
    return probes


def test_probes_grow_rarer_while_drafting_stays_off():
    gate = SpeculationGate()
    probes = run(gate, 0.5, 5000)
    gaps = [after - before for before, after in itertools.pairwise(probes)]
    assert not gate.is_on
    assert 32 <= probes[0] <= 40 and gaps[0] <= 80 and max(gaps) <= 1100 and gaps == sorted(gaps)
    assert 6 <= len(probes) <= 12


def test_drafting_that_is_on_needs_no_probes():
    gate = SpeculationGate()
    assert run(gate, 2.0, 2000) == [] and gate.is_on


def test_drafting_that_went_off_again_is_probed_soon_again():
    gate = SpeculationGate()
    run(gate, 0.5, 3000)
    run(gate, 2.0, 65)
    assert gate.is_on
    assert run(gate, 0.5, 40) and not gate.is_on


def test_what_a_probe_taught_is_weighed_in_the_next_step():
    gate = SpeculationGate()
    while not gate.is_probe:
        if not gate.begin_step(num_decoding=4):
            gate.weigh(advantage=0.5, num_decoding=4)
    assert not gate.is_on and gate.drafts
    assert not gate.begin_step(num_decoding=4)
    gate.weigh(advantage=2.0, num_decoding=4)
    assert gate.is_on and gate.drafts


@pytest.mark.parametrize("was_on", [True, False])
@pytest.mark.parametrize(("advantage", "is_on"), [(0.99, False), (1.01, True)])
def test_drafting_is_on_exactly_while_it_is_forecast_to_be_faster(was_on, advantage, is_on):
    gate = SpeculationGate()
    gate.begin_step(1)
    gate.weigh(2.0 if was_on else 0.5, 1)
    gate.weigh(advantage, 1)
    assert gate.is_on == is_on
