"""Prompt lookup: what matches, how likely it goes on, how much is verified, and that no output changes."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import oracles
from tests.support.fakes import Bench, Counting, RandomLanguage, say
from verifier.adaptive.prompt_lookup import Average, LookupDraft, Match, PromptLookup, TokenIndex, choose
from verifier.draft_batch import DraftBatch
from verifier.request import Request
from workers.comm.ipc import Speculation, Submit
from workers.config import PruneConfig, SimulatedCosts, TreeConfig
from workers.settings import Rule, SamplingSettings, TreeLimits
from workers.types import DraftReply, Verdict

torch.set_num_threads(1)


def request_of(text: list[int], temperature: float = 0.0, **limits: float) -> Request:
    submit = Submit(id=0, prompt=text, max_tokens=64, sampling=SamplingSettings(temperature=temperature))
    return Request(submit, Rule.COUPLED, TreeLimits(num_speculative_tokens=16, auto=True, **limits), 0)


def allow_all(request: Request, tokens: list[int]) -> int:
    return len(tokens)


def free(num_nodes: np.ndarray, num_trees: np.ndarray) -> np.ndarray:
    return np.full(len(num_nodes), 10.0)


def looked_up(request: Request, lookup: PromptLookup, most: int = 8) -> list[int]:
    return lookup.look([request], lambda _: most, 1.0, free).chosen.get(request, [])


def said(*tokens: int) -> Verdict:
    return Verdict(tuple(range(1, len(tokens))), tokens, len(tokens), len(tokens))


# ---- what matches


def longest_match(text: list[int]) -> Match | None:
    """By looking everywhere."""
    end, best = len(text), None
    for place in range(1, end):
        length = 0
        while length < min(8, place) and text[place - 1 - length] == text[end - 1 - length]:
            length += 1
        if length and (best is None or length >= best.length):
            best = Match(place, length)
    return best


@pytest.mark.parametrize("count", range(9))
def test_a_draft_ends_before_the_first_token_that_the_grammar_forbids(count):
    own, asked = request_of([4, 1, 2, 3, 1, 2, 3]), []

    def count_allowed(request: Request, tokens: list[int]) -> int:
        asked.append((request, tokens))
        return count

    assert looked_up(own, PromptLookup(count_allowed)) == [1, 2, 3, 1, 2, 3, 1, 2][:count]
    assert asked == [(own, [1, 2, 3, 1, 2, 3, 1, 2, 3])], "one more than may be drafted"


@pytest.mark.parametrize("vocab", [2, 5, 40])
def test_the_longest_match_is_found_the_latest_of_equals(vocab):
    rng = np.random.default_rng(vocab)
    for _ in range(30):
        index, text = TokenIndex(), rng.integers(0, vocab, 3).tolist()
        while len(text) < 60:
            assert index.find(text) == longest_match(text)
            text += rng.integers(0, vocab, rng.integers(1, 5)).tolist()


def test_places_and_lengths_are_those_of_the_example():
    assert TokenIndex().find([1, 3, 6, 2, 3, 4, 2, 3]) == Match(place=5, length=2)
    assert TokenIndex().find([1, 2, 3]) is None


def test_only_so_many_places_are_looked_at():
    far = [5, 6, 7, 9] + [8, 7] * 63
    assert TokenIndex().find([*far, 5, 6, 7]) == Match(3, 3)
    assert TokenIndex().find([*far, 8, 7, 5, 6, 7]) == Match(len(far) + 2, 1)


def test_a_draft_goes_round_where_the_text_repeats_itself():
    assert looked_up(request_of([4, 1, 2, 3, 1, 2, 3]), PromptLookup(allow_all)) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_a_draft_is_no_longer_than_allowed():
    request = request_of([4, 1, 2, 3, 1, 2, 3])
    assert [len(looked_up(request, PromptLookup(allow_all), most)) for most in (0, 1, 3)] == [0, 1, 3]
    few = replace(request.limits, num_speculative_tokens=2)
    request.limits = few
    assert looked_up(request, PromptLookup(allow_all)) == [1, 2]


# ---- how likely it goes on


@pytest.mark.parametrize("chance", [0.1, 0.9])
def test_the_estimate_tends_to_how_often_matches_went_on(chance):
    rng, average = np.random.default_rng(0), Average(3 / 5, 4)
    for _ in range(2000):
        average.add(bool(rng.random() < chance))
    assert average.mean == pytest.approx(chance, abs=0.1)


def test_all_long_matches_count_as_one_length():
    prompt_lookup = PromptLookup(allow_all)
    assert prompt_lookup._chance(8) is prompt_lookup._chance(500) is not prompt_lookup._chance(7)


def test_what_comes_teaches_until_the_first_difference():
    prompt_lookup, request = PromptLookup(allow_all), request_of([1, 2, 5, 6, 7, 8, 1, 2])
    found = prompt_lookup.look([request], lambda _: 3, 1.0, free)
    draft = found.candidates[request]
    assert (draft.length, draft.tokens) == (2, [5, 6, 7, 8])
    before = [prompt_lookup._chance(length).mean for length in range(2, 6)]
    prompt_lookup.observe(found, {request: said(5, 6, 9)})
    after = [prompt_lookup._chance(length).mean for length in range(2, 6)]
    assert after[0] > before[0] and after[1] > before[1] and after[2] < before[2] and after[3] == before[3]
    assert draft.index.hits == 4 + 2 and draft.index.expected == pytest.approx(4 + sum(before[:3]))


def test_a_request_that_goes_its_own_way_is_drafted_for_less_than_others():
    prompt_lookup = PromptLookup(allow_all)
    own, other = (request_of([1, 2, 3, 1, 2, 3]) for _ in range(2))
    looked_up(own, prompt_lookup)
    prompt_lookup._index[own].expected = 44.0
    assert len(looked_up(own, prompt_lookup)) < len(looked_up(other, prompt_lookup))


def test_the_index_of_a_request_goes_with_it():
    prompt_lookup, request = PromptLookup(allow_all), request_of([1, 2, 3, 1, 2, 3])
    looked_up(request, prompt_lookup)
    assert len(prompt_lookup._index) == 1
    del request
    gc.collect()
    assert not prompt_lookup._index


def test_thresholds_end_a_draft_and_equal_values_are_kept():
    text = [1, 2, 3, 1, 2, 3]  # three tokens match: chances .6, .67, .71 ...
    first, second = 3 / 5, 4 / 6
    assert looked_up(request_of(text, min_prob=first), PromptLookup(allow_all), 2) == [1, 2]
    assert looked_up(request_of(text, min_prob=first + 1e-6), PromptLookup(allow_all), 2) == []
    assert looked_up(request_of(text, path_prob=first * second), PromptLookup(allow_all), 4) == [1, 2, 3]
    assert looked_up(request_of(text, path_prob=first + 1e-6), PromptLookup(allow_all), 4) == [1]


# ---- how much of it is verified


def draft_of(weights: list[float]) -> LookupDraft:
    return LookupDraft(TokenIndex(), 1, list(range(len(weights) + 1)), weights)


@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_all_choices_is_taken(seed):
    """Against every way to cut three drafts, on prices with a staircase and a price per tree."""
    rng = np.random.default_rng(seed)
    drafts = [draft_of(np.cumprod(rng.uniform(0.2, 1, rng.integers(1, 5))).tolist()) for _ in range(3)]
    row, tree, stairs = rng.uniform(0, 0.3), rng.uniform(0, 0.5), int(rng.integers(1, 4))

    def ms_of(num_nodes: Any, num_trees: Any) -> Any:
        return 3 + row * stairs * -(-num_nodes // stairs) + tree * num_trees

    def pace(counts: tuple[int, ...]) -> float:
        steps = sum(1 / (1 + sum(draft.weights[:n])) for draft, n in zip(drafts, counts, strict=True))
        return 1 / (steps * ms_of(sum(counts), sum(n > 0 for n in counts)))

    chosen, gain = choose(drafts, 3, ms_of)
    assert gain == pytest.approx(pace(tuple(chosen)) / pace((0, 0, 0)))
    best = max(map(pace, itertools.product(*(range(len(draft.weights) + 1) for draft in drafts))))
    # Nodes are taken by what they save; where a tree has a price of its own, another order may be a little better.
    assert pace(tuple(chosen)) >= 0.9 * best


def test_nothing_is_verified_for_less_than_the_margin():
    def ms_of(num_nodes: np.ndarray, num_trees: np.ndarray) -> np.ndarray:
        return 10.0 + num_nodes

    assert choose([draft_of([0.12])], 1, ms_of) == ([0], 1.0)
    counts, gain = choose([draft_of([0.2])], 1, ms_of)
    assert counts == [1] and gain == pytest.approx(1.2 / 1.1)


# ---- the engine

NO_DRAFTER = SimulatedCosts(step_ms=10, row_ms=0.01, draft_ms=1e9)
TREE = TreeConfig(
    kind="dynamic", num_speculative_tokens=7, max_depth=5, prune=PruneConfig(auto=True, simulated_costs=NO_DRAFTER)
)
LOOP = [*range(8), *range(8), 0, 1]  # what `Counting(8)` goes on with is what was there before


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_copies_of_a_loop_are_all_accepted(method, temperature):
    with Bench(Counting(8), method, TREE) as b:
        answer = b.ask(LOOP, 60, SamplingSettings(temperature=temperature))
        assert answer.tokens == [(2 + n) % 8 for n in range(60)]
        stats = b.engine._stats
        assert stats.num_accepted_tokens == stats.num_verified_tokens > 40
        assert len(b.target.steps) < 20
        assert sum(int((request.num_nodes_B > 0).sum()) for request in b.drafter.requests) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_copies_that_are_mostly_wrong_change_no_token(temperature):
    """A random language of few words: there is always something to copy, and it is hardly ever what comes next."""
    language = RandomLanguage(vocab=6)
    with Bench(language, "eagle3", TREE, max_num_batched_tokens=24) as b:
        asked = []
        for n in range(5):
            params = SamplingSettings(temperature=temperature, seed=n)
            prompt = [n % 6, 1, 2, 3, 1, 2]
            asked.append((b.submit(prompt, 40, params), prompt, params))
        b.run()
        for id, prompt, params in asked:
            assert b.answers[id].tokens == say(language, prompt, 40, params)
        assert 0 < b.engine._stats.num_accepted_tokens < b.engine._stats.num_verified_tokens


@pytest.mark.parametrize(
    "speculation",
    [Speculation(enabled=False), Speculation(auto=False), Speculation(acceptance="rejection")],
    ids=["off", "fixed trees", "sampled drafts"],
)
def test_nothing_is_copied_for_who_did_not_ask_for_it(speculation, monkeypatch):
    looked = []
    real = PromptLookup.look
    monkeypatch.setattr(
        PromptLookup, "look", lambda self, requests, *own: (looked.extend(requests), real(self, requests, *own))[1]
    )
    with Bench(Counting(8), "eagle3", TREE) as b:
        b.ask(LOOP, 20, SamplingSettings(temperature=1.0), speculation=speculation)
        assert not looked
        b.ask(LOOP, 20, SamplingSettings(temperature=1.0))
        assert looked


def test_requests_may_allow_trees_of_different_size():
    with Bench(Counting(8), "eagle3", TREE) as b:
        for num_tokens in (1, 7, 2):
            answer = b.ask(
                LOOP, 12, SamplingSettings(temperature=0.0), speculation=Speculation(num_speculative_tokens=num_tokens)
            )
            assert answer.tokens == [(2 + n) % 8 for n in range(12)]
            assert 1 < max(len(step.sample_row_R) for step in b.target.steps[-3:]) <= 1 + num_tokens


def test_a_drafter_that_costs_nothing_is_asked_where_there_is_nothing_to_copy():
    """First nothing was seen before, so the drafter is asked; then the text is in its second round and is copied."""
    cheap = replace(
        TREE, prune=PruneConfig(auto=True, simulated_costs=SimulatedCosts(step_ms=10, row_ms=0.01, draft_ms=1.0))
    )
    with Bench(Counting(32), "eagle3", cheap) as b:
        b.ask([0, 1], 30, SamplingSettings(temperature=0.0))
        drafted = len(b.drafter.requests)
        assert drafted >= 5
        b.ask([*range(32), *range(32), 0, 1], 30, SamplingSettings(temperature=0.0))
        trees = sum(int((request.num_nodes_B > 0).sum()) for request in b.drafter.requests[drafted:])
        assert trees <= 2 and len(b.target.steps) < 30


def test_looking_that_brings_nothing_becomes_rare_and_comes_back():
    prompt_lookup = PromptLookup(allow_all)
    for _ in range(300):
        prompt_lookup.profit.add(-0.01)
    assert not prompt_lookup.pays
    for _ in range(10):
        prompt_lookup.profit.add(0.1)
    assert prompt_lookup.pays


@pytest.mark.parametrize("copies", [True, False])
def test_copies_are_counted_apart_from_drafts(copies):
    tree = replace(
        TREE,
        prune=PruneConfig(
            auto=True, prompt_lookup=copies, simulated_costs=SimulatedCosts(step_ms=10, row_ms=0.01, draft_ms=1e6)
        ),
    )
    with Bench(Counting(8), "eagle3", tree) as b:
        answer = b.ask(LOOP, 30, SamplingSettings(temperature=0.0))
        stats, total = answer.last.stats, b.frames[-1].stats
        for counts in (stats, total):
            drafted = sum(int((request.num_nodes_B > 0).sum()) for request in b.drafter.requests)
            assert (counts.num_copied_tokens > 0) == copies
            assert counts.num_accepted_copied_tokens <= counts.num_copied_tokens <= counts.num_verified_tokens
            if not drafted:
                assert counts.num_copied_tokens == counts.num_verified_tokens
                assert counts.num_accepted_copied_tokens == counts.num_accepted_tokens


def test_copies_beyond_the_end_are_not_counted_as_accepted():
    with Bench(Counting(8), "eagle3", TREE) as b:
        answer = b.ask(LOOP, 60, SamplingSettings(temperature=0.0), stop_token_ids=[5])
        assert answer.tokens == [2, 3, 4, 5]  # of 3 4 5 6 7, all right
        for stats in (answer.last.stats, b.frames[-1].stats):
            assert stats.num_copied_tokens == stats.num_verified_tokens == 5
            assert stats.num_accepted_copied_tokens == stats.num_accepted_tokens == 3
        assert (answer.last.num_accepted, answer.last.is_copied) == (3, True)


def test_a_copy_beside_drafts_is_told_from_them():
    """Of four requests the first and the last are drafted for, the second has a copy and the third nothing."""
    reply = DraftReply(
        trees=oracles.trees([([-1, 0, 0], [5, 6, 7]), ([-1], [9])]),
        probs=None,
        pruned_GD=torch.tensor([[1, 2, 0], [4, 0, 0]], dtype=torch.int32),
        num_levels=2,
        num_run=3,
        seconds=0.0,
    )
    drafts = DraftBatch.of(reply, [True, False, False, True], [[5], [3, 1, 4], [8], [9]])
    assert drafts.trees.token_N.tolist() == [5, 6, 7, 3, 1, 4, 8, 9]
    assert drafts.verified == [[2], [1, 1], [], []]
    assert drafts.pruned == [[1, 2], [], [], [4]]
    assert drafts.copied == [False, True, False, False]
    assert (drafts.num_nodes, drafts.num_trees) == (4, 2)
