"""When half-batches take turns, on machines whose times are chosen here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from verifier.adaptive.alternation import Alternation, Round


class Machine(NamedTuple):
    """Milliseconds of verifying and of drafting so many requests."""

    verify: Callable[[float], float]
    draft: Callable[[float], float]
    contention: float = 1.0
    """The factor of both while they run at the same time."""

    def whole_ms(self, batch: int) -> float:
        return self.verify(batch) + self.draft(batch)

    def turns_ms(self, batch: int) -> float:
        return 2 * self.contention * max(self.verify(batch / 2), self.draft(batch / 2))

    def step(self, own: Alternation, batch: int) -> float:
        """Run one step; return its share of a round, in milliseconds."""
        if not own.is_on(batch):
            verify, draft = self.verify(batch), self.draft(batch)
            own.observe(batch, lambda: Round(verify, draft, self.verify(batch / 2), self.draft(batch / 2)))
            return verify + draft
        verify, draft = self.contention * self.verify(batch / 2), self.contention * self.draft(batch / 2)
        wait = max(0.0, draft - verify)
        own.observe(batch, lambda: Round(verify, wait, self.verify(batch / 4), self.draft(batch / 4)))
        return verify + wait


PAST_THE_KNEE = Machine(lambda n: 1 + 4 * n, lambda n: 2 + 2 * n)
BOUND_BY_WEIGHTS = Machine(lambda n: 20 + 0.1 * n, lambda n: 2 + 0.1 * n)
DEAR_DRAFTS = Machine(lambda n: 10 + 0.5 * n, lambda n: 4 * n)
CHEAP_DRAFTS = Machine(lambda n: 1 + 4 * n, lambda n: 0.01 * n)
ONE_CORE = Machine(PAST_THE_KNEE.verify, PAST_THE_KNEE.draft, contention=2.0)


def alternation(overlap: str = "auto", *, is_possible: bool = True) -> Alternation:
    return Alternation(overlap, is_possible=is_possible)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("machine", "pays"),
    [(PAST_THE_KNEE, True), (BOUND_BY_WEIGHTS, False), (DEAR_DRAFTS, True), (CHEAP_DRAFTS, False)],
)
def test_turns_are_taken_where_a_round_is_faster(machine: Machine, pays: bool) -> None:
    own = alternation()
    assert (machine.turns_ms(8) < machine.whole_ms(8) / 1.03) is pays
    for _ in range(40):
        machine.step(own, 8)
    assert own.is_on(8) is pays and not own.is_on(1)


def test_turns_that_are_measured_to_be_slower_are_rarely_tried_again() -> None:
    own, tried = alternation(), 0
    for _ in range(2000):
        tried += own.is_on(8)
        ONE_CORE.step(own, 8)
    assert 8 <= tried < 60


def test_another_batch_is_measured_anew() -> None:
    own = alternation()
    for _ in range(20):
        PAST_THE_KNEE.step(own, 8)
    assert own.is_on(8)
    for _ in range(20):
        BOUND_BY_WEIGHTS.step(own, 3)
    assert not own.is_on(3)


def test_each_size_of_batch_is_remembered() -> None:
    own = alternation()
    for _ in range(3):
        for batch in (8, 6, 4, 3, 2):
            for _ in range(5):
                PAST_THE_KNEE.step(own, batch)
    for batch in (8, 6, 4, 3, 2):
        assert own.is_on(batch)


def test_whole_batches_are_measured_again_after_thousands_of_turns() -> None:
    own, num_whole = alternation(), 0
    for _ in range(10_000):
        num_whole += not own.is_on(8)
        PAST_THE_KNEE.step(own, 8)
    assert 16 <= num_whole < 40


def test_without_drafting_nobody_rests() -> None:
    own = alternation()
    for _ in range(20):
        PAST_THE_KNEE.step(own, 8)
    own.rest()
    assert not own.is_on(8)
    PAST_THE_KNEE.step(own, 8)
    assert own.is_on(8)


def test_without_drafting_a_forced_mode_halves_nothing() -> None:
    own = alternation("alternate")
    own.rest()
    assert not own.is_on(8)
    PAST_THE_KNEE.step(own, 8)
    assert own.is_on(8)


@pytest.mark.parametrize(("overlap", "is_on"), [("none", False), ("alternate", True)])
def test_a_forced_mode_stays(overlap: str, is_on: bool) -> None:
    own = alternation(overlap)
    for machine in (PAST_THE_KNEE, BOUND_BY_WEIGHTS):
        for _ in range(20):
            assert own.is_on(8) is is_on
            machine.step(own, 8)
    assert not own.is_on(1)


def test_on_a_shared_gpu_auto_takes_no_turns_and_measures_nothing() -> None:
    own = alternation(is_possible=False)
    for _ in range(20):
        PAST_THE_KNEE.step(own, 8)
    assert not own.is_on(8)
    for alone in (own, alternation("none"), alternation()):
        alone.observe(8 if alone is own else 1, lambda: pytest.fail("a round that nobody reads"))
