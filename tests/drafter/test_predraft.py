"""Pre-drafted trees change no token and no KV entry, whatever is predicted and whenever the drafter is interrupted."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from drafter.predraft import PreDrafter
from tests.support.fakes import Bench, Counting, RandomLanguage, say
from workers.comm.ipc import Speculation
from workers.config import AcceptanceConfig, PruneConfig, TreeConfig
from workers.settings import Constraints, SamplingSettings

pytestmark = pytest.mark.slow  # every context is a Python list

LANGUAGE = RandomLanguage()
TREES = {
    "dynamic": TreeConfig(num_speculative_tokens=8),
    "auto": TreeConfig(num_speculative_tokens=8, prune=PruneConfig(auto=True)),
    "chain": TreeConfig(kind="chain", num_speculative_tokens=4),
    "thresholds": TreeConfig(num_speculative_tokens=8, prune=PruneConfig(min_prob=0.3)),
}
METHODS = ["eagle3", "draft_model"]


def bench(method: Any = "eagle3", tree: str = "dynamic", **settings: Any) -> Bench:
    return Bench(settings.pop("language", LANGUAGE), method, TREES[tree], **{"overlap": "predraft"} | settings)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("method", METHODS)
def test_one_request_gets_the_targets_tokens(method: str, tree: str, temperature: float) -> None:
    params = SamplingSettings(temperature=temperature, seed=5)
    with bench(method, tree) as own:
        assert own.ask([3, 1, 4], 60, params).tokens == say(LANGUAGE, [3, 1, 4], 60, params)
        stats = own.engine._stats
        assert 0 < stats.num_predrafted < stats.num_trees or tree == "auto"  # which draws few trees in fakes


@pytest.mark.parametrize("method", METHODS)
def test_a_perfect_drafter_predicts_every_outcome(method: str) -> None:
    """All trees but that of the first step are grown before the request for them arrives."""
    with bench(method, language=Counting()) as own:
        assert own.ask([7], 50).tokens == [(8 + i) % 64 for i in range(50)]
        stats = own.engine._stats
        assert stats.num_trees - 2 <= stats.num_predrafted < stats.num_trees
        assert own.drafter is not None and len(own.drafter.requests) == stats.steps - 1


def test_a_hit_runs_no_level_in_the_reply() -> None:
    """What the request waits for is one lookup: its rows are fed after the reply."""
    with bench(language=Counting()) as own:
        own.submit([7], 60)
        own.step()
        own.step()
        levels: list[int] = []
        assert own.drafter is not None
        receive = own.drafter.receive

        def recording() -> Any:
            received = receive()
            levels.append(received.message.num_levels)  # type: ignore[union-attr]
            return received

        own.drafter.receive = recording  # type: ignore[method-assign]
        own.run()
        assert levels and set(levels[:-1]) == {1}, levels


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(3))
def test_a_crowd_with_interruptions_aborts_and_preemptions_gets_the_targets_tokens(seed: int, method: str) -> None:
    """The KV cache of both models is checked after every step."""
    rng = random.Random(seed)
    with bench(
        method, num_pages=40, max_num_seqs=6, max_num_batched_tokens=24, is_interrupted=lambda: rng.random() < 0.2
    ) as own:
        asked = {}
        for _ in range(24):
            prompt = [rng.randrange(32) for _ in range(rng.randrange(1, 20))]
            params = SamplingSettings(temperature=rng.choice([0.0, 0.7, 1.0]), seed=rng.randrange(2**40))
            asked[own.submit(prompt, rng.randrange(1, 30), params)] = (prompt, params)
            for _ in range(rng.randrange(4)):
                own.step()
            if rng.random() < 0.15 and own.open:
                own.abort(rng.choice(sorted(own.open)))
        own.run()
        for id, (prompt, params) in asked.items():
            answer = own.answers[id]
            if answer.last is not None:
                assert answer.tokens == say(LANGUAGE, prompt, len(answer.tokens), params)
        stats = own.engine._stats
        assert stats.num_predrafted > 0
        assert own.num_free == own._allocator.num_pages - 1


def test_a_batch_does_not_wait_for_those_that_were_not_predicted() -> None:
    """Half of a batch was predicted: the others verify their roots, and get the target's tokens all the same."""
    language = Counting(errs=(20,))
    with bench(language=language) as own:
        ids = [own.submit([first], 40) for first in (1, 18, 40)]
        own.run()
        for id, first in zip(ids, (1, 18, 40), strict=True):
            assert own.answers[id].tokens == [(first + 1 + i) % 64 for i in range(40)]
        assert own.drafter is not None and own.engine._stats.num_predrafted > 5


@pytest.mark.parametrize(
    "special",
    [
        {"speculation": Speculation(acceptance="rejection")},
        {"params": SamplingSettings(seed=3, constraints=Constraints(presence_penalty=0.5))},
    ],
    ids=["rejection", "constrained"],
)
def test_messages_with_sampled_trees_or_constraints_are_drafted_as_usual(special: dict[str, Any]) -> None:
    params = special.get("params", SamplingSettings(seed=3))
    more = {"speculation": special["speculation"]} if "speculation" in special else {}
    with bench() as own, Bench(LANGUAGE, "eagle3", TREES["dynamic"]) as usual:
        assert own.ask([5, 6], 40, params, **more).tokens == usual.ask([5, 6], 40, params, **more).tokens
        assert own.engine._stats.num_predrafted == 0 < own.engine._stats.num_trees


def test_rejection_by_default_leaves_pre_drafting_to_requests_that_are_coupled() -> None:
    with bench(acceptance=AcceptanceConfig(kind="rejection")) as own:
        params = SamplingSettings(seed=9)
        coupled = Speculation(acceptance="coupled")
        assert own.ask([1, 2], 40, params, speculation=coupled).tokens == say(LANGUAGE, [1, 2], 40, params)
        assert own.engine._stats.num_predrafted > 0


def test_a_sampled_request_gets_its_trees_whatever_was_predicted_for_others() -> None:
    """Its tokens depend on its trees, so no root may stand for one because the outcomes of others were predicted."""
    special, params = Speculation(acceptance="rejection"), SamplingSettings(seed=3)
    with bench(language=Counting()) as alone:
        expected = alone.ask([5, 6], 30, params, speculation=special)
    with bench(language=Counting()) as own:
        for first in (1, 20, 40):
            own.submit([first], 60)
        own.step()
        own.step()
        own.step()
        answer = own.ask([5, 6], 30, params, speculation=special)
        assert own.engine._stats.num_predrafted > 0, "the others' outcomes were predicted"
        assert answer.tokens == expected.tokens
        assert answer.last is not None and expected.last is not None
        assert answer.last.stats == expected.last.stats, "the same trees"


def test_hybrid_trees_are_drafted_as_usual() -> None:
    """Whatever a deployment's rule is, every tree is grown by its settings."""
    hybrid = AcceptanceConfig(kind="rejection", sample_method="hybrid")
    params = SamplingSettings(seed=4)
    with bench(acceptance=hybrid) as own, Bench(LANGUAGE, "eagle3", TREES["dynamic"], acceptance=hybrid) as usual:
        assert own.ask([5, 6], 60, params).tokens == usual.ask([5, 6], 60, params).tokens
        assert own.engine._stats.accepted_per_depth == usual.engine._stats.accepted_per_depth


def test_smaller_limits_than_the_pre_drafted_tree_are_kept() -> None:
    """Near the end of an output trees become shallower than those that were grown before."""
    with bench(language=Counting()) as own:
        for max_tokens in range(1, 14):
            answer = own.ask([7], max_tokens)
            assert answer.tokens == [(8 + i) % 64 for i in range(max_tokens)]
        assert own.drafter is not None
        for chunk in own.answers[12].chunks:
            assert chunk.stats.num_verified_tokens <= 13 * 8


def test_trees_are_traced_as_usual() -> None:
    with bench(language=Counting()) as own:
        trees = [chunk.tree for chunk in own.ask([7], 30, has_trees=True).chunks]
        assert all(tree is not None and len(tree.tokens) == len(tree.parents) for tree in trees)
        drafted = [tree for tree in trees if tree is not None and len(tree.tokens) > 1]
        assert len(drafted) > 2
        for tree in drafted:
            assert tree.parents[0] == -1 and all(0 <= p < i for i, p in enumerate(tree.parents) if i)
            assert all(np.isfinite(p) for p in tree.probs[1:] if p is not None)


# ---- `auto`, on a clock that passes while the drafter works and until the next message


class Clock:
    """Each pass of the drafter takes 1 ms for each of its requests; a message comes `gap_s` after the last reply."""

    def __init__(self, gap_s: float) -> None:
        self.now, self._gap_s = 100.0, gap_s
        self._replied_at = 0.0

    def perf_counter(self) -> float:
        return self.now

    def is_interrupted(self) -> bool:
        return self.now - self._replied_at > self._gap_s

    def drives(self, own: Bench) -> PreDrafter:
        assert own.drafter is not None and own.drafter._ahead is not None
        proposer, ahead = own.proposer, own.drafter._ahead
        extend, expand, draft_ahead = proposer.extend, proposer.expand, ahead.draft_ahead

        def timed_extend(request: Any) -> Any:
            self.now += 1e-3 * len(request.start_B)
            return extend(request)

        def timed_expand(frontier: Any) -> Any:
            self.now += 1e-3 * len(set(frontier.request_F.tolist()))
            return expand(frontier)

        def timed_ahead(is_interrupted: Any) -> None:
            self._replied_at = self.now
            draft_ahead(is_interrupted)
            self.now = max(self.now, self._replied_at + self._gap_s)

        proposer.extend, proposer.expand = timed_extend, timed_expand  # type: ignore[method-assign]
        ahead.draft_ahead = timed_ahead  # type: ignore[method-assign]
        return ahead


@pytest.mark.parametrize(
    ("gap_s", "fanout", "is_used"), [(1.0, 16, True), (0.045, 8, True), (0.015, 2, True), (0.002, 1, False)]
)
def test_auto_predicts_as_many_outcomes_as_there_is_time_for(
    gap_s: float, fanout: int, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no time for one, it tries again once in 64 messages."""
    clock = Clock(gap_s)
    monkeypatch.setattr("drafter.predraft.time", clock)
    with bench(overlap="auto", is_interrupted=clock.is_interrupted) as own:
        ahead = clock.drives(own)
        assert own.ask([3, 1], 100).tokens == say(LANGUAGE, [3, 1], 100, SamplingSettings())
        assert ahead._fanout == fanout, (ahead._ahead_s, ahead._gap_s)
        assert (own.engine._stats.num_predrafted > 0) is is_used
        assert (ahead._num_skipped > 10) is not is_used
