"""An engine that loses its drafter goes on with the same tokens, and drafts again once a new drafter connects."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import verifier.drafter_peer
import verifier.engine
from tests.support.fakes import Bench, Counting, FakeOffer, RandomLanguage, say
from verifier.drafter_peer import DrafterPeer
from workers.comm.channel import PeerLost
from workers.comm.ipc import DrafterLost
from workers.config import AcceptanceConfig, PruneConfig, SimulatedCosts, TreeConfig
from workers.settings import SamplingSettings

torch.set_num_threads(1)


class Clock:
    """A `time` module whose clock the test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


TREE = TreeConfig(num_speculative_tokens=8, max_depth=4, max_children=3)
COSTS = SimulatedCosts(step_ms=10.0, row_ms=0.1, draft_ms=0.1)
AUTO = replace(TREE, prune=PruneConfig(auto=True, simulated_costs=COSTS))
GREEDY = SamplingSettings(temperature=0.0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench(Counting(), "eagle3", TREE, may_lose_drafter=True) as made:
        yield made


def steps_until_lost(bench: Bench) -> None:
    while not bench.losses:
        bench.step()


@pytest.mark.parametrize("with_next_message", [False, True], ids=["before the message", "before the reply"])
def test_the_request_ends_with_its_tokens_and_without_further_drafts(bench: Bench, with_next_message: bool) -> None:
    id = bench.submit([3, 4], 40, GREEDY)
    while len(bench.answers[id].tokens) < 12:
        bench.step()
    bench.lose_drafter(with_next_message=with_next_message)
    steps_until_lost(bench)
    verified = bench.engine._stats.num_verified_tokens
    assert verified > 0
    bench.run()
    assert bench.answers[id].tokens == say(Counting(), [3, 4], 40, GREEDY)
    assert bench.engine._stats.num_verified_tokens == verified
    assert bench.losses[0].link == "fake" and "lost drafter 0" in bench.losses[0].reason
    last = bench.frames[-1].stats
    assert (last.num_drafter_losses, last.has_drafter) == (1, False)
    assert bench.num_free == 64


def test_a_message_that_only_feeds_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's chunks are fed. A drafter that dies with the second is missed when the third is sent."""
    with Bench(Counting(), "eagle3", TREE, may_lose_drafter=True, max_num_batched_tokens=8) as bench:
        assert bench.drafter is not None
        monkeypatch.setattr(bench.drafter, "receive", pytest.fail)
        id = bench.submit(list(range(2, 34)), 12, GREEDY)
        while not bench.drafter.requests:
            bench.step()
        bench.lose_drafter(with_next_message=True)
        bench.step()
        assert len(bench.drafter.requests) == 2 and not bench.losses
        bench.step()
        assert len(bench.losses) == 1
        bench.run()
        assert bench.answers[id].tokens == say(Counting(), list(range(2, 34)), 12, GREEDY)
        assert bench.answers[id].last.stats.num_drafts == 0


def test_requests_that_come_while_it_is_lost_are_answered_without_drafts(bench: Bench) -> None:
    bench.ask([1, 2], 10, GREEDY)
    bench.lose_drafter()
    first = bench.submit([5, 6], 12, GREEDY)
    steps_until_lost(bench)
    answer = bench.ask([7, 8, 9], 12, GREEDY)
    assert answer.tokens == say(Counting(), [7, 8, 9], 12, GREEDY) and answer.last.stats.num_drafts == 0
    assert bench.answers[first].tokens == say(Counting(), [5, 6], 12, GREEDY)


def test_a_new_drafter_drafts_for_new_requests_only(bench: Bench) -> None:
    old = bench.submit([3, 4], 60, GREEDY)
    for _ in range(4):
        bench.step()
    bench.lose_drafter()
    steps_until_lost(bench)
    bench.replace_drafter()
    drafts = bench.answers[old].chunks[-1].stats.num_drafts
    new = bench.ask([8, 9], 30, GREEDY)
    bench.run()
    assert new.tokens == say(Counting(), [8, 9], 30, GREEDY) and new.last.stats.num_accepted_tokens > 10
    assert bench.answers[old].tokens == say(Counting(), [3, 4], 60, GREEDY)
    assert bench.answers[old].last.stats.num_drafts == drafts
    assert bench.frames[-1].stats.has_drafter and bench.frames[-1].stats.num_drafter_losses == 1


def test_pages_that_only_the_old_drafter_held_are_not_shared_with_requests_of_the_new_one(bench: Bench) -> None:
    """The fake drafter fails on a slot that nobody has written."""
    prompt = list(range(2, 26))
    assert bench.ask(prompt, 8, GREEDY).last.num_cached_tokens == 0
    assert bench.ask(prompt, 8, GREEDY).last.num_cached_tokens == 20
    stats = bench.frames[-1].stats
    assert (stats.prefix_cache_hits, stats.prefix_cache_queries) == (20, 2 * len(prompt))
    bench.lose_drafter()
    plain = bench.ask(prompt, 8, GREEDY)
    assert plain.last.num_cached_tokens == 20, "it was lost while the request was fed"
    assert bench.ask(prompt, 8, GREEDY).last.num_cached_tokens == 20, "any page serves a request without a drafter"
    bench.replace_drafter()
    bench.step()
    cached = [bench.ask(prompt, 8, GREEDY) for _ in range(2)]
    assert [answer.last.num_cached_tokens for answer in cached] == [0, 20]
    assert all(answer.last.stats.num_accepted_tokens > 3 for answer in cached)
    assert all(answer.tokens == say(Counting(), prompt, 8, GREEDY) for answer in cached)


def test_an_idle_engine_notices_the_loss_by_its_heartbeat(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier.engine, "HEARTBEAT_S", 0.0)
    bench.ask([1, 2], 10, GREEDY)
    bench.lose_drafter()
    bench.step()
    assert len(bench.losses) == 1
    bench.step()
    assert len(bench.losses) == 1


def test_a_stopping_engine_withdraws_its_offer(bench: Bench) -> None:
    bench.ask([1, 2], 10, GREEDY)
    bench.lose_drafter()
    bench.ask([1, 2], 10, GREEDY)
    bench.engine.stop()
    assert bench.offers[0].is_closed and not bench.drafter.stopped


def test_a_drafter_that_is_lost_while_the_engine_stops_is_no_error(bench: Bench) -> None:
    bench.ask([1, 2], 10, GREEDY)
    bench.lose_drafter()
    bench.engine.stop()
    assert bench.target.stopped


def test_without_a_fallback_the_loss_ends_the_engine() -> None:
    with Bench(Counting(), "eagle3", TREE) as bench:
        bench.submit([3, 4], 40, GREEDY)
        bench.step()
        bench.lose_drafter()
        with pytest.raises(PeerLost, match="lost drafter 0"):
            for _ in range(5):
                bench.step()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "tree", "more"),
    [
        ("eagle3", TREE, {}),
        ("eagle3", AUTO, {}),
        ("draft_model", AUTO, {}),
        ("draft_model", TREE, {"acceptance": AcceptanceConfig(kind="rejection", min_temperature=0.0)}),
    ],
    ids=["eagle3", "auto", "draft model", "rejection"],
)
def test_any_losses_change_no_token_and_leave_every_page_free(
    method: Any, tree: TreeConfig, more: dict[str, Any]
) -> None:
    """Requests share beginnings, end, are aborted and preempted while drafters are lost and replaced."""
    language, rng = RandomLanguage(), random.Random(5)
    with Bench(
        language, method, tree, num_pages=48, max_num_seqs=4, max_num_batched_tokens=24, may_lose_drafter=True, **more
    ) as bench:
        wanted, is_lost = {}, False
        while bench.open or len(wanted) < 90:
            if len(bench.open) < 6 and len(wanted) < 90:
                prompt = [*range(1, rng.choice([3, 9, 17, 30])), rng.randrange(9)]
                params = rng.choice([GREEDY, SamplingSettings(temperature=0.9, seed=rng.randrange(99))])
                id = bench.submit(prompt, rng.randrange(1, 30), params)
                wanted[id] = (prompt, params)
            if bench.open and rng.random() < 0.02:
                bench.abort(rng.choice(sorted(bench.open)))
            if bench.engine._running and rng.random() < 0.03:
                bench.engine.preempt(rng.choice(bench.engine._running))
            if not is_lost and rng.random() < 0.05:
                bench.lose_drafter(with_next_message=rng.random() < 0.5)
                is_lost = True
            elif is_lost and not bench.engine._drafter.is_connected and rng.random() < 0.2:
                bench.replace_drafter()
                is_lost = False
            bench.step()
        assert len(bench.losses) > 5 and bench.engine._stats.num_accepted_tokens > 50
        for id, (prompt, params) in wanted.items():
            answer = bench.answers[id]
            if answer.last is not None and (params is GREEDY or "acceptance" not in more):
                assert answer.tokens == say(language, prompt, len(answer.tokens), params)
        assert bench.num_free == 47


def test_a_message_that_meets_no_drafter_was_not_sent() -> None:
    """Its tokens then do not count as fed."""
    with Bench(Counting(), "eagle3", TREE) as own:
        own.submit([1, 2], 6)
        own.run()
        [message] = own.drafter.requests[-1:]  # type: ignore[union-attr]
        told: list[str] = []
        peer = DrafterPeer(own.drafter, FakeOffer, lambda lost: told.append(lost.link))  # type: ignore[arg-type]
        own.lose_drafter()
        assert peer.send(message, 7) is False and not peer.is_connected and len(told) == 1


def test_a_heartbeat_follows_a_period_without_a_word_and_tells_of_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(verifier.drafter_peer, "time", clock)
    with Bench(Counting(), "eagle3", TREE) as own:
        own.submit([1, 2], 6)
        own.run()
        told: list[DrafterLost] = []
        peer = DrafterPeer(own.drafter, FakeOffer, told.append)  # type: ignore[arg-type]
        sent: list[tuple[float, int]] = []
        monkeypatch.setattr(own.drafter, "heartbeat", lambda step: sent.append((clock.now, step)))
        for clock.now in (5.0, 9.0, 10.0):
            peer.keep_alive(int(clock.now), 5.0)
        assert sent == [(5.0, 5), (10.0, 10)]
        clock.now = 12.0
        peer.send(own.drafter.requests[-1], 12)  # type: ignore[union-attr]
        peer.receive()
        for clock.now in (16.0, 17.0):
            peer.keep_alive(int(clock.now), 5.0)
        assert sent[2:] == [(17.0, 17)]

        def lost(step: int) -> None:
            raise PeerLost(f"drafter 0 was silent at step {step}")

        monkeypatch.setattr(own.drafter, "heartbeat", lost)
        clock.now = 22.0
        peer.keep_alive(22, 5.0)
        assert [each.reason for each in told] == ["drafter 0 was silent at step 22"] and not peer.is_connected
