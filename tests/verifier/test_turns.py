"""Half-batches in turns: the same tokens and KV entries, half a batch per step, and nobody waits for who has left."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.fakes import Bench, Counting, RandomLanguage, say
from verifier.draft_inputs import DraftInput
from verifier.tree import chains
from verifier.turns import next_turn, of_those_here
from workers.comm.ipc import Speculation
from workers.config import PruneConfig, SimulatedCosts, TreeConfig
from workers.settings import SamplingSettings
from workers.types import DraftProbs, DraftReply, TreeTrace

torch.set_num_threads(1)

LANGUAGE = RandomLanguage()
COSTS = SimulatedCosts(step_ms=10.0, row_ms=0.1, draft_ms=0.1)
TREES = {
    "dynamic": TreeConfig(num_speculative_tokens=8, max_depth=4, max_children=3),
    "auto": TreeConfig(num_speculative_tokens=8, prune=PruneConfig(auto=True, simulated_costs=COSTS)),
    "chain": TreeConfig(kind="chain", num_speculative_tokens=4),
}
GREEDY = SamplingSettings(temperature=0.0)


def bench(method: Any = "eagle3", tree: str = "dynamic", **settings: Any) -> Bench:
    return Bench(settings.pop("language", LANGUAGE), method, TREES[tree], overlap="alternate", **settings)


def submit(own: Bench, firsts: Sequence[int], max_tokens: int = 40) -> list[int]:
    return [own.submit([first], max_tokens, GREEDY) for first in firsts]


def verified(own: Bench) -> list[int]:
    """Return the requests that the last step verified, by their ids."""
    last = own.engine._stats.steps - 1
    return [request.id for request in own.engine._running if request.last_step == last]


def asked(own: Bench) -> list[int]:
    asked: Any = own.engine._drafting._asked  # type: ignore[attr-defined]
    return [request.id for request in asked.requests] if asked else []


def test_a_step_verifies_one_half_while_the_drafter_drafts_for_the_other() -> None:
    with bench() as own:
        submit(own, (1, 2, 3, 4))
        own.step()  # the prompts
        own.step()
        assert (verified(own), asked(own)) == ([0, 1], [2, 3])
        own.step()
        assert (verified(own), asked(own)) == ([2, 3], [0, 1])
        assert own.drafter is not None
        assert [len(request.start_B) for request in own.drafter.requests] == [2, 2, 2], "one message for each turn"


def test_every_request_has_a_tree_in_each_of_its_steps() -> None:
    with bench(language=Counting()) as own:
        ids = submit(own, (1, 20, 30, 40))
        own.run()
        for id, first in zip(ids, (1, 20, 30, 40), strict=True):
            answer = own.answers[id]
            assert answer.tokens == [(first + 1 + i) % 64 for i in range(40)]
            drafts = answer.last.stats.num_drafts  # type: ignore[union-attr]
            assert answer.num_chunks - 2 <= drafts, "all but the prompt's token and a last one without room"


def test_a_single_request_is_drafted_for_as_usual() -> None:
    with bench() as own, Bench(LANGUAGE, "eagle3", TREES["dynamic"]) as usual:
        assert own.ask([5, 6], 40, GREEDY).tokens == usual.ask([5, 6], 40, GREEDY).tokens
        assert own.engine._stats.steps == usual.engine._stats.steps


@pytest.mark.parametrize("num", [2, 3, 5, 8, 9])
def test_turns_are_equal_and_nobody_rests_for_long(num: int) -> None:
    with bench(num_pages=257) as own:
        submit(own, range(num), 60)
        own.step()
        for _ in range(12):
            own.step()
            assert len(verified(own)) <= -(-num // 2)
            rests = [own.engine._stats.steps - 1 - request.last_step for request in own.engine._running]
            assert max(rests) <= 2


def test_halves_become_equal_again_when_requests_end() -> None:
    with bench() as own:
        long = submit(own, (1, 2, 3, 4), 60)
        submit(own, (5, 6, 7, 8), 2)
        while len(own.open) > len(long):
            own.step()
        own.step()
        own.step()
        assert sorted([len(verified(own)), len(asked(own))]) == [2, 2]


def test_a_turn_whose_requests_have_all_left_is_skipped() -> None:
    with bench() as own:
        ids = submit(own, (1, 2, 3, 4))
        for _ in range(3):
            own.step()
        for id in asked(own):
            own.abort(id)
        own.step()
        assert verified(own), "the step was not lost"
        own.run()
        for id in set(ids) - own.open:
            answer = own.answers[id]
            assert answer.tokens == say(LANGUAGE, [1 + id], len(answer.tokens), GREEDY)
        assert own.num_free == own._allocator.num_pages - 1


def test_an_engine_whose_requests_have_all_left_answers_the_next_one() -> None:
    with bench() as own:
        submit(own, (1, 2))
        for _ in range(3):
            own.step()
        assert asked(own)
        own.abort(0)
        own.abort(1)
        assert own.ask([9], 20, GREEDY).tokens == say(LANGUAGE, [9], 20, GREEDY)


def test_the_trees_of_those_that_left_are_not_given_to_others() -> None:
    """With what was pruned: every tree's record is that of the request's own text."""
    with bench(language=Counting(), num_pages=257) as own:
        firsts = range(0, 60, 6)
        ids = [own.submit([first], 30, GREEDY, has_trees=True) for first in firsts]
        for _ in range(4):
            own.step()
        own.abort(asked(own)[1])
        own.run()
        for id, first in zip(ids, firsts, strict=True):
            text = [first]
            for chunk in own.answers[id].chunks:
                assert chunk.tree is not None and chunk.tree.tokens[0] == text[-1]
                assert [chunk.tree.tokens[row] for row in chunk.tree.path] == chunk.tokens[: len(chunk.tree.path)]
                text += chunk.tokens


def test_when_all_others_are_preempted_the_resting_ones_are_verified() -> None:
    """A pool for one request: the drafter has the message of one that had to leave."""
    with bench(num_pages=14, enable_prefix_caching=False) as own:
        ids = submit(own, (1, 2), 36)
        own.run()
        assert own.engine._stats.num_preemptions > 0
        for id in ids:
            assert own.answers[id].tokens == say(LANGUAGE, [1 + id], 36, GREEDY)


@pytest.mark.parametrize("with_next_message", [False, True], ids=["before the message", "before the reply"])
def test_a_lost_drafter_takes_the_turns_with_it(with_next_message: bool) -> None:
    with bench(may_lose_drafter=True) as own:
        ids = submit(own, (1, 2, 3, 4))
        for _ in range(4):
            own.step()
        own.lose_drafter(with_next_message=with_next_message)
        while not own.losses:
            own.step()
        own.step()
        own.step()
        assert verified(own) == ids and not asked(own)
        own.run()
        for id in ids:
            assert own.answers[id].tokens == say(LANGUAGE, [1 + id], 40, GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
@pytest.mark.parametrize("seed", range(3))
def test_a_crowd_with_aborts_and_preemptions_gets_the_targets_tokens(seed: int, method: str, tree: str) -> None:
    rng = random.Random(seed)
    asked_for = {}
    kinds = [Speculation(), Speculation(enabled=False), Speculation(num_speculative_tokens=2)]
    with bench(method, tree, num_pages=rng.choice([33, 49, 129]), max_num_seqs=7) as own:
        for _ in range(40):
            prompt = [rng.randrange(32) for _ in range(rng.choice([1, 3, 30]))]
            params = SamplingSettings(temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(2**32))
            id = own.submit(prompt, rng.randrange(1, 40), params, speculation=rng.choice(kinds))
            asked_for[id] = prompt, params
            for _ in range(rng.randrange(4)):
                own.step()
            if rng.random() < 0.15 and own.open:
                own.abort(rng.choice(sorted(own.open)))
            if rng.random() < 0.1 and own.engine._running:
                own.engine.preempt(rng.choice(own.engine._running))
        own.run()
        for id, (prompt, params) in asked_for.items():
            answer = own.answers[id]
            if answer.last is not None:
                assert answer.tokens == say(LANGUAGE, prompt, len(answer.tokens), params)
        assert own.engine._stats.num_preemptions > 0 and own.engine._stats.num_trees > 50
        own.step()
        assert own.num_free == own._allocator.num_pages - 1


def test_rejection_depends_on_no_turn() -> None:
    """A sampled tree comes from seed, position and text alone, so the tokens are those of whole batches."""
    rule = Speculation(acceptance="rejection")
    with bench() as own, Bench(LANGUAGE, "eagle3", TREES["dynamic"]) as usual:
        for each in (own, usual):
            for seed in range(6):
                each.submit([seed, 3], 40, SamplingSettings(seed=seed), speculation=rule)
            each.run()
        assert [own.answers[id].tokens for id in range(6)] == [usual.answers[id].tokens for id in range(6)]
        assert own.engine._stats.steps > 1.5 * usual.engine._stats.steps


def test_those_that_rest_the_longest_come_first() -> None:
    class Resting:
        def __init__(self, last_step: int) -> None:
            self.last_step = last_step

    a, b, c, d = (Resting(last_step) for last_step in (3, 1, 1, 2))
    decoding: Any = [a, b, c, d]
    assert next_turn(decoding, [a]) == [b, c]  # type: ignore[list-item]
    assert next_turn(decoding, []) == [b, c]
    assert next_turn(decoding, decoding) == []


def test_a_reply_is_cut_to_the_requests_that_are_still_there() -> None:
    """Trees, draft probabilities, counts of pruned nodes and traces, each with the types that the wire has."""
    everyone: Any = ["stays", "left", "is only fed", "has a long tree"]
    inputs = {name: DraftInput([1], num, num) for name, num in zip(everyone, (1, 2, 0, 3), strict=True)}
    plan: Any = SimpleNamespace(inputs=inputs)
    reply = DraftReply(
        trees=chains([[10, 11], [20, 21, 22], [30, 31, 32, 33]]),
        probs=DraftProbs(
            offsets=int32(0, 1, 1, 3, 3, 3, 3, 5, 5, 6),
            id_S=int32(11, 21, 22, 32, 39, 33),
            weight_S=int32(1, 2, 3, 4, 5, 6),
        ),
        pruned_GD=int32(0, 7, 1, 8, 2, 9).view(3, 2),
        num_levels=4,
        num_run=9,
        seconds=0.5,
        trace=trace([10, 11, 20, 30, 31, 35], [-1, 0, -1, -1, 0, 0], 0, 2, 3, 6),
    )
    kept = of_those_here(reply, plan, [everyone[3], everyone[0]])
    assert_fields(kept.trees, chains([[10, 11], [30, 31, 32, 33]]))
    ids = DraftProbs(offsets=int32(0, 1, 1, 1, 3, 3, 4), id_S=int32(11, 32, 39, 33), weight_S=int32(1, 4, 5, 6))
    assert_fields(kept.probs, ids)
    assert_fields(kept.trace, trace([10, 11, 30, 31, 35], [-1, 0, -1, 0, 0], 0, 2, 5))
    assert torch.equal(kept.pruned_GD, int32(0, 7, 2, 9).view(2, 2))
    assert (kept.num_levels, kept.num_run, kept.seconds) == (4, 9, 0.5)

    last = of_those_here(reply, plan, [everyone[3]])
    assert last.trace is not None and last.trace.offsets.tolist() == [0, 3] and last.trace.token_T.tolist()[0] == 30
    assert of_those_here(reply, plan, everyone) is reply


def trace(tokens: list[int], parents: list[int], *offsets: int) -> TreeTrace:
    """A trace with trees of depth 1, and numbers that tell tokens apart."""
    return TreeTrace(
        offsets=int32(*offsets),
        token_T=int32(*tokens),
        parent_T=int32(*parents),
        depth_T=int32(*parents) + 1,
        prob_T=torch.tensor(tokens) / 64,
        weight_T=torch.tensor(tokens) / 128,
        reason_T=torch.tensor(tokens, dtype=torch.uint8),
    )


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def assert_fields(own: Any, expected: Any) -> None:
    for name in expected.__slots__:
        torch.testing.assert_close(getattr(own, name), getattr(expected, name), rtol=0, atol=0)
