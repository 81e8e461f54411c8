"""Limits of API keys on requests and tokens per minute, on a clock of their own."""

from __future__ import annotations

import pytest

from cluster.observe.metrics import Metrics
from cluster.observe.rate_limits import Caller, Callers
from secateur.api_keys import ApiKey
from workers.comm.ipc import EngineStats


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def callers_on(clock: Clock) -> Callers:
    return Callers(Metrics("model", "replica", EngineStats), clock)


def caller_with(clock: Clock, **limits: int) -> Caller:
    key = ApiKey(key="secret", name="team", **limits)
    return callers_on(clock).of(key, (key,))


def waits(caller: Caller) -> int:
    """Return the seconds after which a refused request is to be sent again; 0 if it is admitted."""
    refusal = caller.admit()
    return 0 if refusal is None else refusal.retry_after_s


def test_a_minute_s_requests_may_come_at_once_and_come_back_evenly(clock: Clock) -> None:
    caller = caller_with(clock, requests_per_minute=6)
    assert [waits(caller) for _ in range(7)] == [0] * 6 + [10]
    clock.now_s += 4
    assert waits(caller) == 6
    clock.now_s += 6
    assert [waits(caller), waits(caller)] == [0, 10]
    clock.now_s += 3600
    assert [waits(caller) for _ in range(7)] == [0] * 6 + [10], "no more than a minute's worth is saved up"


def test_a_long_answer_is_paid_back_before_the_next_request(clock: Clock) -> None:
    caller = caller_with(clock, tokens_per_minute=60)
    caller.charge(prompt_tokens=50, generation_tokens=100)
    assert waits(caller) == 91, "90 in debt, and one token to begin with"
    clock.now_s += 90.5
    assert waits(caller) == 1
    clock.now_s += 0.5
    assert waits(caller) == 0


def test_a_request_that_lacks_tokens_takes_no_request(clock: Clock) -> None:
    caller = caller_with(clock, requests_per_minute=1, tokens_per_minute=60)
    caller.charge(generation_tokens=60)
    assert waits(caller) == 1
    clock.now_s += 1
    assert waits(caller) == 0


def test_a_key_without_limits_is_never_refused(clock: Clock) -> None:
    caller = caller_with(clock)
    caller.charge(prompt_tokens=10**9)
    assert [waits(caller) for _ in range(1000)] == [0] * 1000


def test_changed_limits_apply_at_once_and_forget_nothing_that_was_used(clock: Clock) -> None:
    callers = callers_on(clock)

    def caller(**limits: int) -> Caller:
        key = ApiKey(key="secret", **limits)
        return callers.of(key, (key,))

    assert [waits(caller(requests_per_minute=60)) for _ in range(50)] == [0] * 50
    assert [waits(caller(requests_per_minute=5)) for _ in range(6)] == [0] * 5 + [12]
    assert waits(caller()) == 0
    caller(tokens_per_minute=60).charge(generation_tokens=100)
    assert waits(caller(tokens_per_minute=120)) == 21, "40 in debt"
    other = ApiKey(key="other")
    callers.of(other, (other,))
    assert [waits(caller(requests_per_minute=5)) for _ in range(6)] == [0] * 5 + [12], "a removed key is forgotten"
