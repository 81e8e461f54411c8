"""The speculation gate: when drafting is on, how often it probes, what probes teach."""

from __future__ import annotations

import itertools

import pytest

from verifier.adaptive.gate import SpeculationGate


def run(gate: SpeculationGate, advantage: float, num_steps: int, loss: float = 1.0) -> list[int]:
    """Steps of a batch of 4, all with one forecast; the indices of those that probed."""
    probes = []
    for index in range(num_steps):
        if not gate.begin_step(num_decoding=4):
            gate.weigh(advantage, num_decoding=4)
        if gate.is_probe:
            probes.append(index)
            gate.observe_probe(loss)
    return probes


@pytest.mark.parametrize(("loss", "gap"), [(0.0075, 20), (0.075, 200), (-1.0, 16)])
def test_probes_of_eight_steps_are_as_rare_as_they_are_dear(loss, gap):
    """Eight steps that lose 0.0075 steps each once in 20 steps lose 0.3 %."""
    gate = SpeculationGate()
    probes = run(gate, 0.9, 15000, loss)
    assert not gate.is_on and 64 <= probes[0] <= 66
    probes = probes[: len(probes) // 8 * 8]
    firsts, lasts = probes[::8], probes[7::8]
    assert all(last - first == 7 for first, last in zip(firsts, lasts, strict=True))
    assert all(abs(after - before - gap) <= 1 for before, after in itertools.pairwise(firsts))


def test_drafting_that_is_on_needs_no_probes():
    gate = SpeculationGate()
    assert run(gate, 2.0, 2000) == [] and gate.is_on


def test_a_probe_that_loses_too_much_ends():
    probes = run(SpeculationGate(), 0.9, 15000, loss=0.6)
    assert [after - before for before, after in itertools.pairwise(probes[:8])] == [1, 1, 1, 1, 509, 1, 1]
    assert {after - before for before, after in itertools.pairwise(run(SpeculationGate(), 0.9, 15000, loss=9))} == {513}


def test_feeding_what_the_drafter_missed_does_not_end_a_probe():
    """In SmolLM2's first probes it cost up to 1.4 plain steps, and trees that do not pay 0.5; one tree tells little."""
    gate, probes = SpeculationGate(), []
    for number in range(200):
        if not gate.begin_step(num_decoding=1):
            gate.weigh(advantage=0.9, num_decoding=1)
        if gate.is_probe:
            gate.observe_probe(0.5 if probes else 1.4)
            probes.append(number)
    assert probes == list(range(probes[0], probes[0] + 5))


def test_a_probe_ends_when_drafting_comes_on():
    gate = SpeculationGate()
    run(gate, 0.9, 66)
    assert gate.is_probe
    gate.begin_step(num_decoding=4)
    gate.weigh(1.2, num_decoding=4)
    assert gate.is_on and not gate.is_probe


def test_what_a_probe_taught_is_weighed_in_the_next_step():
    gate = SpeculationGate()
    while not gate.is_probe:
        if not gate.begin_step(num_decoding=4):
            gate.weigh(advantage=0.5, num_decoding=4)
    assert not gate.is_on
    assert not gate.begin_step(num_decoding=4)
    assert gate.weigh(advantage=2.0, num_decoding=4) and gate.is_on


def test_drafting_follows_the_forecast():
    gate = SpeculationGate()
    gate.begin_step(1)
    for advantage in (1.02, 0.99, 1.01):
        gate.weigh(advantage, 1)
        assert gate.is_on == (advantage > 1)
