"""Copies of earlier text: what is found, how far it is trusted, how much is verified, and that no output changes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import oracles
import pytest
import torch
from fakes import Bench, Counting, RandomLanguage, say

from verifier import lookup
from verifier.drafts import Drafts
from verifier.lookup import Copy, Lookup, Passage, Passages, Trust, choose
from verifier.request import Request
from workers.config import Prices, PruneConfig, TreeConfig
from workers.ipc import Speculation, Submit
from workers.types import DraftReply, Rule, SamplingParams, TreeLimits, Verdict

torch.set_num_threads(1)


def request_of(text: list[int], temperature: float = 0.0, **limits: float) -> Request:
    submit = Submit(id=0, prompt=text, max_tokens=64, sampling=SamplingParams(temperature=temperature))
    return Request(submit, Rule.COUPLED, TreeLimits(num_nodes=16, auto=True, **limits), 0)


def free(num_nodes: int, num_trees: int) -> float:
    return 10.0


def looked_up(request: Request, found: Lookup, most: int = 8) -> list[int]:
    found.look([request], lambda _: most, 1.0, free)
    return found.chosen.get(request, [])


def said(*tokens: int) -> Verdict:
    return Verdict(tuple(range(1, len(tokens))), tokens, len(tokens), len(tokens))


# ---- what is found


def longest_agreement(text: list[int]) -> Passage | None:
    """By looking everywhere."""
    end, best = len(text), None
    for place in range(1, end):
        length = 0
        while length < min(8, place) and text[place - 1 - length] == text[end - 1 - length]:
            length += 1
        if length and (best is None or length >= best.length):
            best = Passage(place, length)
    return best


@pytest.mark.parametrize("vocab", [2, 5, 40])
def test_the_longest_agreement_is_found_the_latest_of_equals(vocab):
    rng = np.random.default_rng(vocab)
    for _ in range(30):
        passages, text = Passages(), rng.integers(0, vocab, 3).tolist()
        while len(text) < 60:
            assert passages.find(text) == longest_agreement(text)
            text += rng.integers(0, vocab, rng.integers(1, 5)).tolist()


def test_places_and_lengths_are_those_of_the_example():
    assert Passages().find([1, 3, 6, 2, 3, 4, 2, 3]) == Passage(place=5, length=2)
    assert Passages().find([1, 2, 3]) is None


def test_only_so_many_places_are_looked_at():
    far = [5, 6, 7, 9] + [8, 7] * 63
    assert Passages().find([*far, 5, 6, 7]) == Passage(3, 3)
    assert Passages().find([*far, 8, 7, 5, 6, 7]) == Passage(len(far) + 2, 1)


def test_a_copy_goes_round_where_the_text_repeats_itself():
    assert looked_up(request_of([4, 1, 2, 3, 1, 2, 3]), Lookup()) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_a_copy_is_as_long_as_the_draft_may_be():
    request = request_of([4, 1, 2, 3, 1, 2, 3])
    assert [len(looked_up(request, Lookup(), most)) for most in (0, 1, 3)] == [0, 1, 3]
    few = replace(request.limits, num_nodes=2)
    request.limits = few
    assert looked_up(request, Lookup()) == [1, 2]


# ---- how far it is trusted


def test_before_anything_was_seen_longer_agreement_is_trusted_more():
    assert [lookup.first_chance(length) for length in (1, 2, 8)] == [1 / 3, 1 / 2, 0.8]


@pytest.mark.parametrize("chance", [0.1, 0.9])
def test_trust_tends_to_how_often_passages_went_on(chance):
    rng, trust = np.random.default_rng(0), Trust()
    for _ in range(2000):
        trust.learn(3, bool(rng.random() < chance))
    assert trust.chance(3) == pytest.approx(chance, abs=0.1)
    assert trust.chance(4) == lookup.first_chance(4)


def test_all_long_agreements_are_one():
    trust = Trust()
    for _ in range(100):
        trust.learn(30, False)
    assert trust.chance(8) == trust.chance(500) < 0.2 < trust.chance(7)


def test_what_is_said_teaches_until_it_differs():
    copy = Copy(Passages(), Trust(), 2, [5, 6, 7, 8], [0.5, 0.3, 0.2])
    before = [copy.trust.chance(length) for length in range(2, 6)]
    copy.learn([5, 6, 9])
    after = [copy.trust.chance(length) for length in range(2, 6)]
    assert after[0] > before[0] and after[1] > before[1] and after[2] < before[2] and after[3] == before[3]
    assert copy.passages.hits == 2 and copy.passages.expected == pytest.approx(sum(before[:3]))


def test_texts_of_different_heat_are_different_kinds():
    found = Lookup()
    hot, cold = request_of([1, 2, 3, 1, 2, 3], 1.0), request_of([1, 2, 3, 1, 2, 3], 0.0)
    for _ in range(200):
        assert found._find(hot, 4) is not None
        found.look([hot], lambda _: 4, 1.0, free)
        found.learn({hot: said(9)}, [], profit=0.0)
        hot.passages.hits, hot.passages.expected = 0, 0.0
    assert looked_up(hot, found, 4) == [] and looked_up(cold, found, 4) == [1, 2, 3, 1]


def test_a_request_that_goes_its_own_way_is_trusted_less_than_others():
    found = Lookup()
    own, other = (request_of([1, 2, 3, 1, 2, 3]) for _ in range(2))
    own.passages.expected = 40.0
    assert len(looked_up(own, found)) < len(looked_up(other, found))


def test_copies_that_keep_half_of_what_they_promise_are_worth_half():
    found, request = Lookup(), request_of([1, 2, 3, 1, 2, 3])
    assert looked_up(request, found, 2) == [1, 2]
    before, trust = found.expected(request), found._found[request].trust
    for _ in range(400):
        trust.verified(promised=4.0, kept=2)
    assert trust.faith == pytest.approx(0.5, abs=0.01)
    assert looked_up(request, found, 2) == [1, 2] and found.expected(request) == pytest.approx(before * trust.faith)
    for _ in range(400):
        trust.verified(promised=1.0, kept=2)
    assert trust.faith == 1, "luck is no promise"


def test_only_copies_that_were_verified_are_held_to_their_promise():
    found, request = Lookup(), request_of([1, 2, 3, 1, 2, 3])
    for verified, is_moved in (([], False), ([request], True)):
        looked_up(request, found)
        before = found._found[request].trust.faith
        found.learn({request: said(9)}, verified, profit=0.0)
        assert (found._found[request].trust.faith < before) == is_moved


def test_thresholds_end_a_copy_and_equal_values_are_kept():
    text = [1, 2, 3, 1, 2, 3]  # three tokens agree: chances .6, .67, .71 ...
    first, second = lookup.first_chance(3), lookup.first_chance(4)
    assert looked_up(request_of(text, min_prob=first), Lookup(), 2) == [1, 2]
    assert looked_up(request_of(text, min_prob=first + 1e-6), Lookup(), 2) == []
    assert looked_up(request_of(text, path_prob=first * second), Lookup(), 4) == [1, 2, 3]
    assert looked_up(request_of(text, path_prob=first + 1e-6), Lookup(), 4) == [1]


# ---- how much of it is verified


def copy_of(weights: list[float]) -> Copy:
    return Copy(Passages(), Trust(), 1, list(range(len(weights) + 1)), weights)


@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_all_choices_is_taken(seed):
    """Against every way to cut three copies, on prices with a staircase and a price per tree."""
    rng = np.random.default_rng(seed)
    copies = [copy_of(np.cumprod(rng.uniform(0.2, 1, rng.integers(1, 5))).tolist()) for _ in range(3)]
    row, tree, stairs = rng.uniform(0, 0.3), rng.uniform(0, 0.5), int(rng.integers(1, 4))

    def ms_of(num_nodes: int, num_trees: int) -> float:
        return 3 + row * stairs * -(-num_nodes // stairs) + tree * num_trees

    def rate(counts: tuple[int, ...]) -> float:
        gain = sum(sum(copy.weights[:n]) for copy, n in zip(copies, counts, strict=True))
        return (3 + gain) / ms_of(sum(counts), sum(n > 0 for n in counts))

    chosen, gain = choose(copies, 3.0, ms_of)
    assert gain == pytest.approx(rate(tuple(chosen)) / rate((0, 0, 0)))
    best = max(map(rate, itertools.product(*(range(len(copy.weights) + 1) for copy in copies))))
    # Nodes are taken by weight; where a tree has a price of its own, another order may be a little better.
    assert rate(tuple(chosen)) >= 0.9 * best


def test_nothing_is_verified_for_less_than_the_margin():
    def ms_of(num_nodes: int, num_trees: int) -> float:
        return 10 + num_nodes

    assert choose([copy_of([0.12])], 1.0, ms_of) == ([0], 1.0)
    counts, gain = choose([copy_of([0.2])], 1.0, ms_of)
    assert counts == [1] and gain == pytest.approx(1.2 / 1.1)


# ---- the engine

NO_DRAFTER = Prices(step=10, row=0.01, draft=1e9)
TREE = TreeConfig(kind="dynamic", num_nodes=7, max_depth=5, prune=PruneConfig(auto=True, prices=NO_DRAFTER))
LOOP = [*range(8), *range(8), 0, 1]  # what `Counting(8)` goes on with is what was there before


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_copies_of_a_loop_are_all_accepted(method, temperature):
    with Bench(Counting(8), method, TREE) as b:
        answer = b.ask(LOOP, 60, SamplingParams(temperature=temperature))
        assert answer.tokens == [(2 + n) % 8 for n in range(60)]
        stats = b.engine._stats
        assert stats.num_accepted_tokens == stats.num_verified_tokens > 40
        assert len(b.target.steps) < 20
        assert sum(int((request.num_nodes_B > 0).sum()) for request in b.drafter.requests) == 1, "one try"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_copies_that_are_mostly_wrong_change_no_token(temperature):
    """A random language of few words: there is always something to copy, and it is hardly ever what comes next."""
    language = RandomLanguage(vocab=6)
    with Bench(language, "eagle3", TREE, max_num_batched_tokens=24) as b:
        asked = []
        for n in range(5):
            params = SamplingParams(temperature=temperature, seed=n)
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
    monkeypatch.setattr(Lookup, "look", lambda self, requests, *_: looked.extend(requests))
    with Bench(Counting(8), "eagle3", TREE) as b:
        b.ask(LOOP, 20, SamplingParams(temperature=1.0), speculation=speculation)
        assert not looked
        b.ask(LOOP, 20, SamplingParams(temperature=1.0))
        assert looked


def test_requests_may_allow_trees_of_different_size():
    with Bench(Counting(8), "eagle3", TREE) as b:
        for num_tokens in (1, 7, 2):
            answer = b.ask(LOOP, 12, SamplingParams(temperature=0.0), speculation=Speculation(num_tokens=num_tokens))
            assert answer.tokens == [(2 + n) % 8 for n in range(12)]
            assert 1 < max(len(step.sample_row_R) for step in b.target.steps[-3:]) <= 1 + num_tokens


def test_a_drafter_that_costs_nothing_is_asked_where_there_is_nothing_to_copy():
    """First nothing was seen before, so the drafter is asked; then the text is in its second round and is copied."""
    cheap = replace(TREE, prune=PruneConfig(auto=True, prices=Prices(step=10, row=0.01, draft=1.0)))
    with Bench(Counting(32), "eagle3", cheap) as b:
        b.ask([0, 1], 30, SamplingParams(temperature=0.0))
        drafted = len(b.drafter.requests)
        assert drafted >= 5
        b.ask([*range(32), *range(32), 0, 1], 30, SamplingParams(temperature=0.0))
        trees = sum(int((request.num_nodes_B > 0).sum()) for request in b.drafter.requests[drafted:])
        assert trees <= 2 and len(b.target.steps) < 30


def test_looking_that_brings_nothing_becomes_rare_and_comes_back():
    found = Lookup()
    request = request_of([1, 2, 3, 1, 2, 3])
    for _ in range(300):
        found.look([request], lambda _: 4, 1.0, free)
        found.learn({request: said(9)}, [], profit=-0.01)
    assert not found.pays
    for _ in range(10):
        found.look([request], lambda _: 4, 1.0, free)
        found.learn({request: said(1, 2, 3)}, [], profit=0.1)
    assert found.pays


def test_looking_is_not_blamed_where_what_it_brings_cannot_be_told():
    found = Lookup()
    request = request_of([1, 2, 3, 1, 2, 3])
    for _ in range(300):
        found.look([request], lambda _: 4, 1.0, free)
        found.learn({request: said(9)}, [], profit=None)
    assert found.pays


def test_a_step_with_a_prompt_does_not_tell_what_looking_brings():
    """Or steady traffic would end looking: it takes its time in every step."""
    with Bench(Counting(8), "eagle3", TREE, max_num_batched_tokens=12) as b:
        economy, looked = b.engine._economy, 0
        b.submit(LOOP, 60, SamplingParams(temperature=0.0))
        b.step()
        b.submit([n % 8 for n in range(120)], 3, SamplingParams(temperature=0.0))
        for _ in range(15):
            before = economy._lookup._profit
            b.step()
            if economy._looked is not None and not economy._drafted:
                assert any(not request.is_decoding for request in b.engine._running)
                assert economy._lookup._profit == before
                looked += 1
        assert looked > 3


@pytest.mark.parametrize("copies", [True, False])
def test_copies_are_counted_apart_from_drafts(copies):
    tree = replace(TREE, prune=PruneConfig(auto=True, copies=copies, prices=Prices(step=10, row=0.01, draft=1e6)))
    with Bench(Counting(8), "eagle3", tree) as b:
        answer = b.ask(LOOP, 30, SamplingParams(temperature=0.0))
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
        answer = b.ask(LOOP, 60, SamplingParams(temperature=0.0), stop_token_ids=[5])
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
    drafts = Drafts.of(reply, [True, False, False, True], [[5], [3, 1, 4], [8], [9]])
    assert drafts.trees.token_N.tolist() == [5, 6, 7, 3, 1, 4, 8, 9]
    assert drafts.verified == [[2], [1, 1], [], []]
    assert drafts.pruned == [[1, 2], [], [], [4]]
    assert drafts.copied == [False, True, False, False]
    assert (drafts.num_nodes, drafts.num_trees) == (4, 2)
