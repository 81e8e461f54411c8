"""Shared pages: which requests find which pages, what is computed, and that no page is lost or wrong.

The fakes read their prefix out of paged memory that is wiped when a page changes hands; an EAGLE drafter is told the
position and token of every feature. So a shared page with anything else in it than its tokens shows at once.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.fakes import Bench, Counting, RandomLanguage, say
from verifier import prefix_cache
from verifier.adaptive import gate
from verifier.prefix_cache import PrefixCache
from workers.comm.ipc import Speculation
from workers.config import PruneConfig, SimulatedCosts, TreeConfig
from workers.kv_cache import Checkpoints, OutOfPages, PageAllocator, PrefixMatch
from workers.settings import SamplingSettings

torch.set_num_threads(1)

TREES = {
    "chain": TreeConfig(kind="chain", num_speculative_tokens=3),
    "static": TreeConfig(
        kind="static", num_speculative_tokens=7, static_paths=((0,), (1,), (0, 0), (0, 1), (0, 2), (1, 0), (0, 0, 0))
    ),
    "dynamic": TreeConfig(num_speculative_tokens=12, max_depth=5, max_children=4),
    "small": TreeConfig(num_speculative_tokens=5, max_depth=2, max_children=3),
}
KINDS = [(None, "chain"), ("eagle3", "dynamic"), ("draft_model", "static")]
OFF = Speculation(enabled=False)
DEAR = PruneConfig(auto=True, simulated_costs=SimulatedCosts(step_ms=1.0, row_ms=1.0, draft_ms=1000.0, level_ms=1000.0))
GREEDY = SamplingSettings(temperature=0.0)
PROMPT = [i * 7 % 31 for i in range(41)]  # ten pages of 4 and a token


def bench_of(method: Any, tree: str = "dynamic", **settings: Any) -> Bench:
    return Bench(RandomLanguage(), method, TREES[tree], **settings)


def num_computed(bench: Bench, since: int = 0) -> int:
    """Return the number of prompt rows computed by the target."""
    return sum(len(step.token_N) for step in bench.target.steps[since:] if len(step.sample_row_R) < len(step.token_N))


def cached(bench: Bench, id: int) -> int:
    return bench.answers[id].last.num_cached_tokens


# ---- the allocator


def allocator_with(*keys: bytes, num_pages: int = 9) -> tuple[PageAllocator, list[int]]:
    allocator = PageAllocator(num_pages)
    pages = allocator.alloc(len(keys))
    for page, key in zip(pages, keys, strict=True):
        allocator.publish(page, key, is_drafted=False)
    return allocator, pages


def test_a_released_page_counts_as_free_and_is_found_until_it_is_reused():
    allocator, pages = allocator_with(b"a", b"b", num_pages=5)
    assert allocator.find([b"a", b"b", b"c"], is_drafted=False) == PrefixMatch(pages, 2)
    allocator.share(pages)
    allocator.free(pages)
    assert allocator.num_free == 2
    allocator.free(pages)
    assert allocator.num_free == 4
    assert allocator.find([b"a", b"b"], is_drafted=False) == PrefixMatch(pages, 0)
    assert len(allocator.alloc(4)) == 4
    assert allocator.find([b"a"], is_drafted=False) == PrefixMatch([], 0)
    with pytest.raises(OutOfPages):
        allocator.alloc(1)


def test_unused_pages_go_first_then_the_longest_idle_and_of_one_request_its_last():
    allocator, pages = allocator_with(b"a", b"b", b"x", num_pages=5)
    allocator.free(pages[:2])
    allocator.free(pages[2:])
    allocator.alloc(1)
    assert allocator.find([b"a", b"b"], is_drafted=False).pages == pages[:2], "the unused page went first"
    allocator.alloc(1)
    assert allocator.find([b"a", b"b"], is_drafted=False).pages == pages[:1]
    allocator.share(pages[:1])
    allocator.free(pages[:1])
    allocator.alloc(1)
    assert allocator.find([b"x"], is_drafted=False).pages == [], "page a was used since"
    assert allocator.find([b"a"], is_drafted=False).pages == pages[:1]


def test_a_missing_page_ends_the_match():
    allocator, pages = allocator_with(b"a", b"c")
    assert allocator.find([b"a", b"b", b"c"], is_drafted=False).pages == pages[:1]


def test_of_two_pages_with_one_content_the_first_stays_unless_only_the_second_is_drafted():
    allocator, (first,) = allocator_with(b"a")
    second, third = allocator.alloc(2)
    allocator.publish(second, b"a", is_drafted=False)
    assert allocator.find([b"a"], is_drafted=False).pages == [first]
    assert allocator.find([b"a"], is_drafted=True).pages == []
    allocator.free([first])
    allocator.publish(second, b"a", is_drafted=True)
    assert allocator.find([b"a"], is_drafted=False).pages == allocator.find([b"a"], is_drafted=True).pages == [second]
    allocator.publish(third, b"a", is_drafted=True)
    allocator.free([second, third])
    assert allocator.num_free == 8 and allocator.find([b"a"], is_drafted=True).pages == [second]
    assert sorted(allocator.alloc(8)) == list(range(1, 9)), "each once"


# ---- what is found


@pytest.mark.parametrize(("method", "tree"), KINDS)
def test_the_second_of_two_requests_computes_only_its_own_tokens(method, tree):
    with bench_of(method, tree) as bench:
        first, second = [*PROMPT, 5], [*PROMPT, 6, 7]
        params = SamplingSettings(seed=3)
        assert bench.ask(first, 12, params).tokens == say(RandomLanguage(), first, 12, params)
        begin = len(bench.target.steps)
        answer = bench.ask(second, 12, params)
        assert answer.tokens == say(RandomLanguage(), second, 12, params)
        assert (answer.last.num_cached_tokens, num_computed(bench, begin)) == (40, 3)
        stats = bench.frames[-1].stats
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (42 + 43, 40)
        assert bench.num_free == 64


@pytest.mark.parametrize(("method", "tree"), KINDS)
def test_the_last_prompt_token_is_always_computed(method, tree):
    with bench_of(method, tree) as bench:
        expected = bench.ask(PROMPT[:16], 9, GREEDY).tokens
        begin = len(bench.target.steps)
        again = bench.ask(PROMPT[:16], 9, GREEDY)
        assert again.tokens == expected
        assert (again.last.num_cached_tokens, num_computed(bench, begin)) == (12, 4)


@pytest.mark.parametrize(("method", "tree"), KINDS)
def test_a_conversation_finds_its_earlier_answers(method, tree):
    with bench_of(method, tree) as bench:
        prompt = PROMPT[:10]
        for turn in range(4):
            answer = bench.ask(prompt, 17, GREEDY)
            assert answer.tokens == say(RandomLanguage(), prompt, 17, GREEDY)
            # Lost at the end of an answer: its last token, whose KV nobody computed, what the drafter was not told any
            # more, and a path that still waited to be moved.
            assert not turn or len(prompt) - answer.last.num_cached_tokens <= 3 + 4 + 2 * 4
            prompt = prompt + answer.tokens + [turn, turn]
        assert bench.frames[-1].stats.prefix_cache_hits > 60


@pytest.mark.parametrize(("method", "tree"), KINDS)
def test_requests_that_share_a_running_prompt_hold_its_pages_together(method, tree):
    with bench_of(method, tree, num_pages=60) as bench:
        ids = [bench.submit(PROMPT, 20, SamplingSettings(seed=0))]
        for _ in range(3):  # the prompt, and the drafter told of it
            bench.step()
        ids += [bench.submit(PROMPT, 20, SamplingSettings(seed=n)) for n in range(1, 6)]
        bench.step()
        assert len(bench.engine._running) == 6, "six times 11 pages would not fit 59"
        bench.run()
        for n, id in enumerate(ids):
            assert bench.answers[id].tokens == say(RandomLanguage(), PROMPT, 20, SamplingSettings(seed=n))
            assert cached(bench, id) == (40 if n else 0)
        assert bench.num_free == 59


def test_a_prompt_is_shared_while_it_is_still_being_computed():
    with bench_of("eagle3", max_num_batched_tokens=16) as bench:
        first = bench.submit(PROMPT, 8, GREEDY)
        for _ in range(2):  # 32 tokens computed, 16 of them drafted
            bench.step()
        second = bench.submit(PROMPT, 8, GREEDY)
        bench.run()
        assert bench.answers[first].tokens == bench.answers[second].tokens
        assert 16 <= cached(bench, second) <= 40


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize(("method", "tree"), KINDS)
def test_pages_of_any_size_are_shared(method, tree, page_size):
    with bench_of(method, tree, page_size=page_size, num_pages=150) as bench:
        for n in (30, 33, 41):
            params = SamplingSettings(seed=n)
            answer = bench.ask(PROMPT[:n], 9, params)
            assert answer.tokens == say(RandomLanguage(), PROMPT[:n], 9, params)
        assert answer.last.num_cached_tokens == 33 // page_size * page_size


# ---- where a hybrid can begin


@pytest.fixture
def interval(monkeypatch: pytest.MonkeyPatch) -> int:
    """Keep the states of long texts behind every fourth page."""
    monkeypatch.setattr(prefix_cache, "CHECKPOINT_INTERVAL", 16)
    return 16


@pytest.mark.parametrize(("method", "tree"), KINDS)
def test_a_hybrid_begins_at_the_last_checkpoint_within_the_pages_that_it_finds(method, tree, interval):
    """Tokens computed again are no hits."""
    with bench_of(method, tree, has_states=True) as bench:
        for length in range(len(PROMPT) + 1):
            bench.ask(PROMPT, 1, GREEDY, cache_salt=str(length))
            prompt, begin = [*PROMPT[:length], 5], len(bench.target.steps)
            answer = bench.ask(prompt, 1, GREEDY, cache_salt=str(length))
            assert answer.tokens == say(RandomLanguage(), prompt, 1, GREEDY)
            expected = 40 if length >= 40 else length // interval * interval
            computed = sum(len(step.token_N) for step in bench.target.steps[begin:])
            assert (answer.last.num_cached_tokens, computed) == (expected, length + 1 - expected)
            assert bench.frames[-1].stats.prefix_cache_hits == sum(cached(bench, id) for id in bench.answers)


def test_where_prompts_part_a_state_is_kept_for_the_next_one():
    """A short prefix of many prompts is found from the third on: no regular checkpoint lies in it."""
    with bench_of(None, "chain", has_states=True) as bench:
        for n in range(4):
            bench.ask([*PROMPT[:22], *[n] * 9], 3, GREEDY)
        assert [cached(bench, id) for id in range(4)] == [0, 0, 20, 20]


def test_the_least_recently_used_checkpoint_makes_room():
    with bench_of(None, "chain", has_states=True, max_num_seqs=2, num_pages=200) as bench:
        prompts = [[n, *PROMPT[:23]] for n in range(10)]
        for prompt in [*prompts[:8], prompts[0], prompts[8]]:
            bench.ask(prompt, 2, GREEDY)
        for n, expected in ((0, 20), (1, 0), (8, 20)):
            assert bench.ask(prompts[n], 2, GREEDY).last.num_cached_tokens == expected


def test_a_state_that_a_step_uses_does_not_make_room():
    checkpoints = Checkpoints([8, 9])
    first, second = checkpoints.keep(b"a"), checkpoints.keep(b"b")
    assert {first, second} == {8, 9} and checkpoints.keep(b"c") is None, "the ranks have not computed them yet"
    checkpoints.end_step()
    assert checkpoints.keep(b"b") is None, "it is there"
    assert checkpoints.use(b"a") == first and checkpoints.keep(b"c") is None
    checkpoints.end_step()
    assert checkpoints.keep(b"c") == second and b"b" not in checkpoints and b"a" in checkpoints


def test_the_states_of_a_long_text_are_kept_ever_more_rarely(interval):
    long = PrefixCache(PageAllocator(9), 4, is_enabled=True, checkpoints=Checkpoints([]))
    found = [4 * count for count in range(1, 200) if long._is_regular(count)]
    assert found == [*range(16, 129, 16), *range(160, 257, 32), *range(320, 513, 64), 640, 768]


# ---- who may find it


def test_a_request_of_an_eagle_head_shares_drafted_pages_only():
    with bench_of("eagle3") as bench:
        for speculation in (OFF, Speculation(), OFF, Speculation()):
            bench.ask(PROMPT, 6, GREEDY, speculation=speculation)
        assert [cached(bench, id) for id in range(4)] == [0, 0, 40, 40]
        assert len({tuple(answer.tokens) for answer in bench.answers.values()}) == 1
        assert bench.answers[3].last.stats == bench.answers[1].last.stats, "the same trees"


@pytest.mark.parametrize(("method", "fed"), [("eagle3", [(41, 0)]), ("draft_model", [])])
def test_without_drafting_under_auto_the_second_request_shares_the_prefix(method, fed, monkeypatch):
    monkeypatch.setattr(gate, "_FIRST_GAP", 10**9)  # no probes
    with Bench(RandomLanguage(), method, replace(TREES["dynamic"], prune=DEAR)) as bench:
        answers = [bench.ask(PROMPT, 4, GREEDY) for _ in range(2)]
        told = [(len(request.token_M), int(request.num_nodes_B)) for request in bench.drafter.requests]
        assert told == fed, "an EAGLE head is fed the prompt once, and a draft model when it first drafts"
        assert [cached(bench, id) for id in range(2)] == [0, 40] and answers[0].tokens == answers[1].tokens


def test_a_request_shares_the_prompt_of_one_that_still_runs_without_drafts(monkeypatch):
    monkeypatch.setattr(gate, "_FIRST_GAP", 10**9)
    with Bench(RandomLanguage(), "eagle3", replace(TREES["dynamic"], prune=DEAR)) as bench:
        ids = [bench.submit(PROMPT, 20, GREEDY)]
        for _ in range(3):
            bench.step()
        ids.append(bench.submit(PROMPT, 20, GREEDY))
        bench.run()
        assert [cached(bench, id) for id in ids] == [0, 40]


def test_a_draft_model_is_fed_the_pages_that_others_computed_without_it():
    """Its drafts need tokens alone, so the target computes no page again."""
    with bench_of("draft_model") as bench:
        for speculation in (OFF, Speculation(), Speculation()):
            bench.ask(PROMPT, 6, GREEDY, speculation=speculation)
        assert [cached(bench, id) for id in range(3)] == [0, 40, 40]
        starts = [start for request in bench.drafter.requests if (start := int(request.start_B[0])) < len(PROMPT)]
        assert starts == [0, 40], "the first request with drafts feeds the whole prompt"
        assert bench.answers[2].last.stats == bench.answers[1].last.stats


def test_undrafted_tokens_are_not_shared_with_drafting_requests():
    """The last tokens of an answer are not fed, because no drafts follow."""
    with Bench(Counting(), "eagle3", TREES["chain"]) as bench:
        said = bench.ask([1, 2], 15, GREEDY).tokens  # 3 .. 17, in four drafts of 4 but for the first token
        with_drafts, without = (
            bench.ask([1, 2, *said, 18, 19], 3, GREEDY, speculation=speculation).last.num_cached_tokens
            for speculation in (Speculation(), OFF)
        )
        assert (with_drafts, without) == (12, 16)


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_request_too_short_to_draft_for_shares_like_one_that_never_drafts(max_tokens):
    with bench_of("eagle3") as bench:
        for _ in range(2):
            bench.ask(PROMPT, max_tokens, GREEDY)
        assert cached(bench, 1) == 40 and not bench.drafter.requests


def test_a_salt_keeps_prompts_apart():
    with bench_of("eagle3") as bench:
        salts = [None, "a", "b", "", "a", None]
        for salt in salts:
            bench.ask(PROMPT, 3, GREEDY, cache_salt=salt)
        assert [cached(bench, id) for id in range(len(salts))] == [0, 0, 0, 0, 40, 40]


def test_equal_pages_at_different_positions_differ():
    with bench_of("eagle3") as bench:
        bench.ask([1, 2, 3, 4] * 5, 2, GREEDY)
        assert bench.ask([9, 9, 9, 9, *[1, 2, 3, 4] * 5], 2, GREEDY).last.num_cached_tokens == 0
        assert bench.ask([1, 2, 3, 4, 9, 9, 9, 9, 1, 2, 3, 4, 5], 2, GREEDY).last.num_cached_tokens == 4


def test_without_caching_nothing_is_found_and_nothing_is_kept():
    with bench_of("eagle3", enable_prefix_caching=False) as bench:
        first, second = (bench.ask(PROMPT, 5, GREEDY) for _ in range(2))
        assert second.last.num_cached_tokens == 0 and first.tokens == second.tokens
        assert (bench.frames[-1].stats.prefix_cache_queries, bench.frames[-1].stats.prefix_cache_hits) == (0, 0)
        assert not any(bench.engine._allocator.is_published(page) for page in range(65))


# ---- when pages are short


@pytest.mark.parametrize(("method", "tree"), KINDS)
def test_a_preempted_request_finds_its_pages_again(method, tree):
    with bench_of(method, tree) as bench:
        id = bench.submit(PROMPT, 30, GREEDY)
        while len(bench.answers[id].tokens) < 15:
            bench.step()
        bench.engine.preempt(bench.engine._running[0])
        known, begin = 41 + len(bench.answers[id].tokens), len(bench.target.steps)
        bench.run()
        assert bench.answers[id].tokens == say(RandomLanguage(), PROMPT, 30, GREEDY)
        computed = len(bench.target.steps[begin].token_N)
        assert computed == (known - 1) % 4 + 4 * (computed // 4), "from a page on, up to the root"
        assert computed <= 3 * 4 and cached(bench, id) == 0


def test_the_longest_unused_prompt_is_forgotten_first():
    with bench_of("eagle3", num_pages=33) as bench:
        prompts = [[n, *PROMPT[:23]] for n in range(8)]  # 6 pages each
        for n in (0, 1, 2, 3, 0, 4, 5):
            bench.ask(prompts[n], 2, GREEDY)
        assert bench.ask(prompts[0], 2, GREEDY).last.num_cached_tokens == 20
        assert bench.ask(prompts[1], 2, GREEDY).last.num_cached_tokens < 20


def test_a_request_that_needs_every_page_takes_those_of_the_cache():
    with bench_of("eagle3", num_pages=21, max_model_len=80) as bench:
        bench.ask(PROMPT, 10, GREEDY)
        large = [3, *PROMPT]
        assert bench.ask(large, 26, GREEDY).tokens == say(RandomLanguage(), large, 26, GREEDY)  # 42 + 25 + 13 rows
        # One that shares the pages of another which fills the pool with it has to wait, and both finish.
        ids = [bench.submit(PROMPT, 27, GREEDY), bench.submit([*PROMPT[:24], 1], 28, GREEDY)]
        bench.run()
        assert [bench.answers[id].tokens for id in ids] == [
            say(RandomLanguage(), PROMPT, 27, GREEDY),
            say(RandomLanguage(), [*PROMPT[:24], 1], 28, GREEDY),
        ]
        assert bench.num_free == 20


# ---- everything at once

FEW_STEPS, SOME_STEPS, MANY_STEPS = 400, 700, 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "tree", "num_steps", "has_states"),
    [
        ("eagle3", "small", SOME_STEPS, False),
        (None, "chain", FEW_STEPS, False),
        ("draft_model", "static", FEW_STEPS, False),
        ("eagle3", "small", FEW_STEPS, True),
        pytest.param("eagle3", "small", MANY_STEPS, False, marks=pytest.mark.full),
        pytest.param(None, "chain", MANY_STEPS, False, marks=pytest.mark.full),
        pytest.param("draft_model", "static", MANY_STEPS, False, marks=pytest.mark.full),
        pytest.param("eagle3", "small", MANY_STEPS, True, marks=pytest.mark.full),
    ],
)
def test_thousands_of_random_steps_lose_no_page_and_mix_no_content(method, tree, num_steps, has_states, interval):
    """Joins, ends, aborts, preemptions, shared beginnings, salts, drafting on and off. `Bench.step` checks after every
    step that each page has as many holders as requests hold it, that none is written by two, and what every slot of
    both pools holds; a hybrid's target, that the state which a row reads is that of its context."""
    rng = random.Random(5)
    language = RandomLanguage(vocab=24)
    settings = {"max_num_seqs": 5, "max_num_batched_tokens": 40, "eos_token_ids": (5,), "max_model_len": 120}
    texts = [[rng.randrange(24) for _ in range(40)] for _ in range(5)]
    with Bench(language, method, TREES[tree], num_pages=36, has_states=has_states, **settings) as bench:
        asked: dict[int, tuple[list[int], SamplingSettings, Speculation]] = {}
        num_forced = 0
        while len(bench.target.steps) < num_steps:
            if len(bench.open) < 8 and rng.random() < 0.3:
                prompt = rng.choice(texts)[: rng.randint(1, 60)] + [rng.randrange(24) for _ in range(rng.randint(0, 6))]
                params = SamplingSettings(temperature=rng.choice([0.0, 0.0, 1.0]), seed=rng.getrandbits(32))
                speculation = rng.choice([Speculation(), Speculation(num_speculative_tokens=2), OFF])
                if rng.random() < 0.2:
                    speculation = replace(speculation, acceptance="rejection")
                salt = "a grain" if rng.random() < 0.1 else None
                id = bench.submit(prompt, rng.randint(1, 30), params, speculation=speculation, cache_salt=salt)
                asked[id] = (prompt, params, speculation)
            if bench.open and rng.random() < 0.03:
                bench.abort(rng.choice(sorted(bench.open)))
            if bench.engine._running and rng.random() < 0.03:
                bench.engine.preempt(rng.choice(bench.engine._running))
                num_forced += 1
            if bench.open:
                bench.step()
                for id in [id for id in asked if bench.answers[id].last]:
                    prompt, params, speculation = asked.pop(id)
                    tokens = bench.answers[id].tokens
                    if len(prompt + tokens) < 60:
                        texts[rng.randrange(len(texts))] = prompt + tokens
                    if params.temperature == 0.0 and (speculation.acceptance is None or not speculation.enabled):
                        assert tokens == _greedy(language, prompt, len(tokens))
        bench.run()
        bench.ask([1], 1)  # the last aborts have been taken
        stats = bench.frames[-1].stats
        assert bench.num_free == 35 and not (bench.engine._running or bench.engine._waiting or bench.engine._moves)
        assert not any(map(bench.engine._allocator.num_holders, range(36)))
        assert stats.requests_finished > num_steps / 20
        assert stats.num_preemptions > num_forced + num_steps / 200, "pages ran short, too"
        assert (0.15 if has_states else 0.3) < stats.prefix_cache_hits / stats.prefix_cache_queries < 0.9


def _greedy(language: RandomLanguage, prompt: list[int], num: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num):
        tokens.append(int(language.target(tokens).argmax()))
    return tokens[len(prompt) :]
