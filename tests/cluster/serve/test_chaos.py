"""The bounded part of `make chaos`: every token comes, once, when a process of the service is lost or hangs."""

from __future__ import annotations

import asyncio

import pytest

from secateur.config import EngineArgs
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.run import Chaos, drain, upgrade

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(900)]

HERE = ("drafter-hangs", "rank-1", "controller")
"""`test_service.py` has some of the others, with what the service says about itself meanwhile."""


@pytest.fixture(scope="module")
def chaos(url: str) -> Chaos:
    found = Chaos(url, num_streams=8, max_tokens=150)
    asyncio.run(found.learn())
    return found


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, id=each.name, marks=() if each.name in HERE else pytest.mark.full) for each in FAULTS],
)
def test_no_request_fails_and_no_token_is_wrong_repeated_or_missing(chaos: Chaos, fault: Fault) -> None:
    done = asyncio.run(chaos.strike(fault))
    assert done.problems == []
    assert done.num_running > 0 and done.pauses_s, "a fault after the last token proves nothing"


def test_no_request_fails_while_replicas_are_replaced_by_two_and_these_by_one(url: str, args: EngineArgs) -> None:
    ends = asyncio.run(upgrade(url, args, num_requests=60, concurrency=6))
    assert ends.keys() == {"done"} and ends["done"] >= 60


def test_running_answers_end_after_two_sigterms() -> None:
    assert drain(4, 150) == []
