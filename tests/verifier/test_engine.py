"""The engine loop with fakes that read their prefix from paged memory: output, counters, freed pages."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import verifier.engine
import verifier.target
from tests.support.fakes import Bench, Counting, RandomLanguage, say
from workers.comm.ipc import FrontGone, RequestStats, Speculation
from workers.config import AcceptanceConfig, PruneConfig, TreeConfig
from workers.settings import Constraints, SamplingSettings

torch.set_num_threads(1)

CHAIN_3 = TreeConfig(kind="chain", num_speculative_tokens=3)
TREES = {
    "chain": CHAIN_3,
    "static": TreeConfig(
        kind="static", num_speculative_tokens=7, static_paths=((0,), (1,), (0, 0), (0, 1), (0, 2), (1, 0), (0, 0, 0))
    ),
    "dynamic": TreeConfig(num_speculative_tokens=12, max_depth=5, max_children=4),
    "pruned": TreeConfig(
        num_speculative_tokens=12, max_depth=5, max_children=4, prune=PruneConfig(min_prob=0.2, path_prob=0.05)
    ),
}
SPECULATIONS = [(None, TreeConfig()), *(("eagle3", tree) for tree in TREES.values()), ("draft_model", TREES["dynamic"])]
IDS = ["plain", *TREES, "draft model"]
PARAMS = [
    SamplingSettings(temperature=0.0),
    SamplingSettings(temperature=1.0, seed=3),
    SamplingSettings(temperature=0.7, top_p=0.9, seed=2**64 - 5),
    SamplingSettings(temperature=1.2, top_k=6, min_p=0.02, seed=4),
]


# ---- what comes out


@pytest.mark.parametrize(("method", "tree"), SPECULATIONS, ids=IDS)
def test_a_batch_gives_every_request_the_targets_output(method, tree):
    language = RandomLanguage()
    with Bench(language, method, tree, max_num_batched_tokens=40, max_num_seqs=3) as bench:
        ids = [bench.submit(list(range(1, 4 + 5 * i)), 20 + i, params) for i, params in enumerate(PARAMS)]
        bench.run()
        for i, (id, params) in enumerate(zip(ids, PARAMS, strict=True)):
            assert bench.answers[id].tokens == say(language, list(range(1, 4 + 5 * i)), 20 + i, params)
            assert bench.answers[id].last.finish_reason == "length"
        assert bench.num_free == 64


@pytest.mark.parametrize("error", [0.0, 100.0])
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_the_drafters_quality_changes_only_the_number_of_steps(method, error):
    language = RandomLanguage(error=error)
    params = SamplingSettings(seed=8)
    with Bench(language, method, CHAIN_3) as bench:
        answer = bench.ask([5, 6], 41, params)
        assert answer.tokens == say(language, [5, 6], 41, params)
        assert len(bench.target.steps) == 11 if error == 0.0 else len(bench.target.steps) > 25


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_a_request_reports_how_long_it_waited_for_its_seat(monkeypatch, max_num_seqs):
    """On a clock that counts steps. With two seats the last is preempted: its time counts until it first joins."""
    with Bench(RandomLanguage(), None, TreeConfig(), num_pages=13, max_num_seqs=max_num_seqs) as bench:
        monkeypatch.setattr(time, "perf_counter", lambda: float(len(bench.target.steps)))
        ids = [bench.submit([1, 2], 30), bench.submit([3, 4], 30)]
        bench.run()
        assert [bench.answers[id].last.queued_s for id in ids] == [0.0, 30.0 if max_num_seqs == 1 else 0.0]
        assert bench.frames[-1].stats.num_preemptions == max_num_seqs - 1


def test_higher_thresholds_verify_fewer_nodes_and_change_no_token():
    language, params = RandomLanguage(error=0.5), SamplingSettings(temperature=0.8, seed=11)
    tokens, verified = [], []
    for threshold in (0.0, 0.15, 0.3, 0.6):
        tree = TreeConfig(num_speculative_tokens=16, prune=PruneConfig(min_prob=threshold, path_prob=threshold))
        with Bench(language, "eagle3", tree) as bench:
            answer = bench.ask([1, 2, 3], 60, params)
            tokens.append(answer.tokens)
            verified.append(answer.last.stats.num_verified_tokens / answer.last.stats.num_drafts)
    assert all(t == tokens[0] for t in tokens)
    assert verified == sorted(verified, reverse=True) and verified[0] > verified[-1]


def test_requests_join_and_leave_between_steps():
    language = RandomLanguage()
    with Bench(language, "eagle3", TREES["dynamic"]) as bench:
        first = bench.submit([1], 60, PARAMS[1])
        for _ in range(3):
            bench.step()
        second = bench.submit([9, 9, 9], 30, PARAMS[2])
        bench.step()
        assert second in bench.open and first in bench.open
        bench.step()
        assert len(bench.engine._running) == 2
        bench.run()
        assert bench.answers[first].tokens == say(language, [1], 60, PARAMS[1])
        assert bench.answers[second].tokens == say(language, [9, 9, 9], 30, PARAMS[2])


# ---- when a request ends


@pytest.mark.parametrize("method", [None, "eagle3", "draft_model"])
def test_a_stop_token_inside_accepted_drafts_ends_the_answer_there(method):
    with Bench(Counting(), method, CHAIN_3) as bench:
        answer = bench.ask([9], 30, stop_token_ids=[42, 12])
        assert answer.tokens == [10, 11, 12]
        assert (answer.last.finish_reason, answer.last.stop_token) == ("stop", 12)
        assert bench.num_free == 64


@pytest.mark.parametrize("method", [None, "eagle3"])
def test_the_end_of_text_stops_unless_it_is_ignored(method):
    with Bench(Counting(), method, CHAIN_3, eos_token_ids=(11, 13)) as bench:
        answer = bench.ask([8], 5)
        assert (answer.tokens, answer.last.finish_reason, answer.last.stop_token) == ([9, 10, 11], "stop", 11)
        ignored = bench.ask([8], 5, ignore_eos=True)
        assert (ignored.tokens, ignored.last.finish_reason) == ([9, 10, 11, 12, 13], "length")
        still = bench.ask([8], 9, ignore_eos=True, stop_token_ids=[12])
        assert (still.tokens, still.last.stop_token) == ([9, 10, 11, 12], 12)


@pytest.mark.parametrize("method", [None, "eagle3", "draft_model"])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 9])
def test_max_tokens_is_exact(method, max_tokens):
    with Bench(Counting(), method, CHAIN_3) as bench:
        answer = bench.ask([9], max_tokens)
        assert answer.tokens == list(range(10, 10 + max_tokens))
        assert answer.last.finish_reason == "length"


def test_each_of_several_end_tokens_ends_the_answer():
    with Bench(Counting(), "eagle3", CHAIN_3, eos_token_ids=(11, 13)) as bench:
        assert bench.ask([11], 9).last.stop_token == 13


def test_a_stop_token_at_the_length_limit_is_a_stop():
    with Bench(Counting(), "eagle3", CHAIN_3) as bench:
        assert bench.ask([9], 3, stop_token_ids=[12]).last.finish_reason == "stop"


@pytest.mark.parametrize("num_nodes", [1, 3, 10])
def test_the_context_is_filled_to_its_last_position(num_nodes):
    with Bench(
        Counting(128), "eagle3", TreeConfig(kind="chain", num_speculative_tokens=num_nodes), max_model_len=100
    ) as bench:
        answer = bench.ask(list(range(20)), 80, ignore_eos=True)
        assert answer.tokens == list(range(20, 100))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        ([1] * 90, 11, "exceeds max_model_len 100"),
        ([], 5, "at least one prompt token"),
        ([1], 0, "at least one prompt token"),
        ([1] * 60, 30, "KV cache of 20 pages"),
    ],
)
def test_an_impossible_request_gets_an_error_with_the_reason(prompt, max_tokens, words):
    with Bench(Counting(), "eagle3", CHAIN_3, num_pages=21, max_model_len=100) as bench:
        answer = bench.ask(prompt, max_tokens)
        assert answer.last.finish_reason == "error" and words in answer.last.error and answer.tokens == []
        assert bench.num_free == 20 and not bench.target.steps
        assert bench.ask([1], 3).tokens == [2, 3, 4]


# ---- what is told of tokens


@pytest.mark.parametrize("num_logprobs", [0, 2])
def test_log_probabilities_are_those_of_the_tokens_that_were_kept(num_logprobs):
    """Also if a stop token ends the answer inside an accepted draft. 0 requests the token's own log probability."""
    language = RandomLanguage(error=0.1)
    params = SamplingSettings(seed=3, num_logprobs=num_logprobs)
    text = say(language, [5, 6], 30, params)
    for at in range(2, 30):
        if text[at] in text[:at]:
            continue
        with Bench(language, "eagle3", CHAIN_3) as bench:
            answer = bench.ask([5, 6], 30, params, stop_token_ids=[text[at]])
        told = [one for frame in bench.frames for chunk in frame.chunks for one in chunk.logprobs]
        assert answer.tokens == text[: at + 1] and len(told) == len(answer.tokens)
        for i, one in enumerate(told):
            logp = torch.from_numpy(language.target([5, 6, *text[:i]])).log_softmax(-1)
            assert one.logprob == pytest.approx(float(logp[text[i]]), abs=1e-4)
            assert one.rank == 1 + int((logp > logp[text[i]]).sum())
            assert [token for token, _ in one.top] == logp.argsort(descending=True)[:num_logprobs].tolist()


def test_log_probabilities_of_chosen_tokens_come_with_every_token():
    """Whether the token was drafted or drawn, and whatever constraints shape the draw."""
    language = RandomLanguage(error=0.1)
    chosen = [7, 2, 9]
    constraints = Constraints(logit_bias={2: 5.0}, presence_penalty=1.0)
    params = SamplingSettings(seed=3, num_logprobs=1, logprob_token_ids=chosen, constraints=constraints)
    with Bench(language, "eagle3", CHAIN_3) as bench:
        answer = bench.ask([5, 6], 20, params)
        told = [one for frame in bench.frames for chunk in frame.chunks for one in chunk.logprobs]
        assert any(chunk.num_accepted for frame in bench.frames for chunk in frame.chunks)
    assert len(told) == len(answer.tokens) == 20
    for i, (token, one) in enumerate(zip(answer.tokens, told, strict=True)):
        logp = torch.from_numpy(language.target([5, 6, *answer.tokens[:i]])).log_softmax(-1)
        assert [id for id, _ in one.top] == list(dict.fromkeys([token, *chosen]))
        assert [value for _, value in one.top] == pytest.approx([float(logp[id]) for id, _ in one.top], abs=1e-4)
        assert (one.logprob, one.rank) == (
            pytest.approx(float(logp[token]), abs=1e-4),
            1 + int((logp > logp[token]).sum()),
        )


# ---- prompts in chunks


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_a_prompt_in_chunks_is_drafted_for_only_after_its_first_token(method):
    with Bench(Counting(128), method, CHAIN_3, max_num_batched_tokens=50) as bench:
        bench.ask(list(range(80)), 5)
        rows = [(len(step.token_N), len(step.sample_row_R)) for step in bench.target.steps]
        assert rows == [(50, 0), (30, 1), (4, 4)]
        assert [r.num_nodes_B.tolist() for r in bench.drafter.requests] == [[0], [3]]


def test_a_long_prompt_does_not_stop_the_others():
    with Bench(Counting(128), "eagle3", CHAIN_3, max_num_batched_tokens=24) as bench:
        short = bench.submit([5], 30)
        bench.step()
        long = bench.submit(list(range(60)), 3)
        bench.run()
        assert bench.answers[short].tokens == list(range(6, 36))
        assert bench.answers[long].tokens == [60, 61, 62]
        assert any(len(s.token_N) > 4 and len(s.sample_row_R) == 4 for s in bench.target.steps), "both in one step"


@pytest.mark.parametrize("method", [None, "eagle3"])
def test_plain_rows_keep_their_own_sampling_beside_a_prompt_that_is_not_done(method):
    """As many rows are sampled as requests decode, but the step has one request more."""
    language, off = RandomLanguage(), Speculation(enabled=False)
    with Bench(language, method, CHAIN_3, max_num_batched_tokens=8) as bench:
        ids = [bench.submit([3 + i], 20, params, speculation=off) for i, params in enumerate(PARAMS[1:])]
        bench.step()
        long = bench.submit([i % 32 for i in range(60)], 2, PARAMS[3], speculation=off)
        bench.run()
        assert any(len(step.token_N) > len(step.sample_row_R) == len(ids) for step in bench.target.steps)
        for i, (id, params) in enumerate(zip(ids, PARAMS[1:], strict=True)):
            assert bench.answers[id].tokens == say(language, [3 + i], 20, params)
        assert bench.answers[long].tokens == say(language, [i % 32 for i in range(60)], 2, PARAMS[3])


def test_the_drafter_is_fed_every_token_exactly_once():
    with Bench(RandomLanguage(), "eagle3", TREES["dynamic"], max_num_batched_tokens=30) as bench:
        bench.ask(list(range(25)) * 2, 30, PARAMS[1])
        spans = [(int(r.start_B), int(r.start_B) + len(r.token_M)) for r in bench.drafter.requests]
        assert spans[0][0] == 1 and all(a[1] == b[0] for a, b in itertools.pairwise(spans))


# ---- the request's own speculation


def test_a_request_may_switch_speculation_off():
    with Bench(Counting(), "eagle3", CHAIN_3) as bench:
        answer = bench.ask([1], 10, speculation=Speculation(enabled=False))
        assert answer.tokens == list(range(2, 12)) and not bench.drafter.requests
        assert answer.last.stats == RequestStats()


@pytest.mark.parametrize(("asked", "nodes"), [(0, 0), (2, 2), (9, 3), (None, 3)])
def test_a_request_narrows_the_servers_tree_but_never_widens_it(asked, nodes):
    with Bench(Counting(), "eagle3", CHAIN_3) as bench:
        answer = bench.ask([1], 20, speculation=Speculation(num_speculative_tokens=asked))
        assert answer.tokens == list(range(2, 22))
        assert max(int(r.num_nodes_B) for r in bench.drafter.requests) == nodes


def test_a_request_brings_its_own_thresholds():
    prune = PruneConfig(min_prob=0.25, path_prob=0.5)
    with Bench(Counting(), "eagle3", TreeConfig(kind="chain", num_speculative_tokens=3, prune=prune)) as bench:
        bench.ask([1], 6)
        bench.ask([1], 6, speculation=Speculation(rules={"min_prob": 0.0, "path_prob": 0.75}))
        limits = {tuple(map(float, r.rules.values)) for r in bench.drafter.requests}
        assert limits == {(0.25, 0.5), (0.0, 0.75)}


CONSTRAINTS = {
    "penalties": Constraints(presence_penalty=1.0, frequency_penalty=0.8, repetition_penalty=1.3),
    "bias": Constraints(logit_bias={3: 4.0, 4: 3.0}),
    "bad words": Constraints(bad_words=[[0], *([a, b, (a + b) % 8] for a in range(8) for b in range(8))]),
    "allowed ids": Constraints(allowed_token_ids=[1, 2, 6]),
    "minimum length": Constraints(min_tokens=30),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("constraints", CONSTRAINTS.values(), ids=CONSTRAINTS)
def test_a_perfect_draft_is_accepted_whole_under_constraints(constraints, temperature):
    """The drafter gets the constraints with the request's index: the previous request is fed and gets no tree."""
    language, params = RandomLanguage(vocab=8, error=0.0), SamplingSettings(temperature=temperature, seed=5)
    with Bench(language, "eagle3", CHAIN_3, eos_token_ids=(7,)) as bench:
        bench.submit([7], 60, params, speculation=Speculation(num_speculative_tokens=0), ignore_eos=True)
        own = bench.submit([5, 6], 60, replace(params, constraints=constraints), ignore_eos=True)
        bench.run()
        assert all(request.num_nodes_B.tolist()[0] == 0 for request in bench.drafter.requests)
        stats = bench.answers[own].last.stats
        assert stats.num_accepted_tokens == stats.num_verified_tokens > 40


@pytest.mark.parametrize("cut", [{"min_p": 0.3}, {"top_p": 0.6}, {"top_k": 2}, {"temperature": 0.4}], ids=str)
def test_a_perfect_draft_is_accepted_whole_with_any_truncation(cut):
    with Bench(RandomLanguage(vocab=8, error=0.0), "eagle3", CHAIN_3) as bench:
        bench.submit([7], 60, SamplingSettings(seed=9))
        own = bench.submit([5, 6], 60, SamplingSettings(seed=5, **cut))
        bench.run()
        stats = bench.answers[own].last.stats
        assert stats.num_accepted_tokens == stats.num_verified_tokens > 40


@pytest.mark.parametrize("method", [None, "eagle3"])
def test_a_bad_word_begins_and_ends_in_the_answer(method):
    """As in vLLM, words that begin in the prompt do not count."""
    with Bench(Counting(), method, CHAIN_3) as bench:

        def text(prompt: list[int], *words: list[int]) -> list[int]:
            constraints = Constraints(bad_words=list(words))
            return bench.ask(prompt, 5, SamplingSettings(temperature=0.0, constraints=constraints)).tokens

        assert text([9, 10], [10, 11]) == text([8, 9, 10], [9, 10, 11]) == [11, 12, 13, 14, 15]
        assert text([9, 10], [11, 12]) == [11, 0, 1, 2, 3]
        assert text([9, 10], [12, 13, 14], [11, 13]) == [11, 12, 13, 0, 1]


def test_stop_tokens_wait_for_the_minimum_length_like_the_end_of_text():
    with Bench(Counting(), "eagle3", CHAIN_3, eos_token_ids=(12,)) as bench:
        params = SamplingSettings(temperature=0.0, constraints=Constraints(min_tokens=4))
        assert bench.ask([9], 9, params, stop_token_ids=[11]).tokens == [10, 0, 1, 2, 3, 4, 5, 6, 7]
        assert bench.ask([8], 9, params, stop_token_ids=[15]).tokens == [9, 10, 11, 0, 1, 2, 3, 4, 5]
        assert bench.ask([7], 9, params).tokens == [8, 9, 10, 11, 12]
        assert bench.ask([8], 9, params, ignore_eos=True).tokens == [9, 10, 11, 0, 1, 2, 3, 4, 5], "as in vLLM"
        assert bench.ask([7], 7, params, ignore_eos=True).tokens == [8, 9, 10, 11, 12, 13, 14]


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
@pytest.mark.parametrize("how", ["probabilistic", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_concurrent_requests_under_rejection_get_what_they_get_alone(method, how):
    """Its draws, coins and last tokens depend on its own seed, temperature and position."""
    language = RandomLanguage(error=1.5)
    sampled = [replace(params, seed=11 + i) for i, params in enumerate(PARAMS * 3)]
    asked = [(Speculation(acceptance="rejection", draft_probs=i % 5 != 2), params) for i, params in enumerate(sampled)]
    asked[4] = (Speculation(), asked[4][1])

    def texts(together: bool) -> list[list[int]]:
        acceptance = AcceptanceConfig(sample_method=how)
        with Bench(language, method, TREES["dynamic"], num_pages=300, acceptance=acceptance) as bench:
            for i, (speculation, params) in enumerate(asked):
                bench.submit([1 + i, 2, *range(i % 4)], 12, params, speculation=speculation)
                if not together:
                    bench.run()
            bench.run()
            return [answer.tokens for answer in bench.answers.values()]

    assert texts(together=True) == texts(together=False)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_logits_of_a_few_rows_at_a_time_give_the_same_tokens(acceptance, monkeypatch):
    """Under both rules, with constraints, and with log-probabilities of rows that were drawn in several pieces."""
    language = RandomLanguage(error=1.5)
    constraints = [Constraints(), Constraints(repetition_penalty=1.3), Constraints(allowed_token_ids=[2, 4, 6, 8])]

    def answers() -> list[object]:
        with Bench(language, "eagle3", TREES["dynamic"], num_pages=300) as bench:
            for i, params in enumerate(PARAMS * 3):
                params = replace(params, constraints=constraints[i % 3], num_logprobs=2 if i % 4 == 1 else None)
                rule = acceptance if i % 5 else "coupled"
                bench.submit([1 + i, 2], 12, params, speculation=Speculation(acceptance=rule))
            bench.run()
            return [(answer.tokens, [chunk.logprobs for chunk in answer.chunks]) for answer in bench.answers.values()]

    whole = answers()
    monkeypatch.setattr(verifier.target, "DRAWN_ROWS", 7)
    assert answers() == whole


def test_drafted_and_plain_requests_share_a_batch():
    language = RandomLanguage()
    with Bench(language, "eagle3", TREES["dynamic"]) as bench:
        ids = [
            bench.submit([3 + i], 25, PARAMS[1], speculation=Speculation(enabled=i % 2 == 1, num_speculative_tokens=i))
            for i in range(6)
        ]
        bench.run()
        for i, id in enumerate(ids):
            assert bench.answers[id].tokens == say(language, [3 + i], 25, PARAMS[1])
            assert (bench.answers[id].last.stats.num_drafts > 0) == (i % 2 == 1)


# ---- aborts


def test_an_abort_frees_a_waiting_and_a_running_request():
    with Bench(Counting(), "eagle3", CHAIN_3, max_num_seqs=1) as bench:
        running, waiting, other = (bench.submit([1], 50) for _ in range(3))
        bench.step()
        assert bench.num_free < 64
        bench.abort(waiting)
        bench.step()
        bench.abort(running)
        bench.abort(12345)  # nobody
        bench.run()
        assert bench.answers[other].tokens == [*range(2, 52)]
        assert bench.answers[waiting].tokens == [] and bench.answers[waiting].last is None
        assert 0 < len(bench.answers[running].tokens) < 50
        assert bench.num_free == 64 and not bench.engine._running and not bench.engine._waiting


def test_pages_of_an_aborted_request_serve_the_next_without_its_moves():
    """A path accepted outside of the first branch leaves a pending move; its pages may be reused at once."""
    language = RandomLanguage(error=1.5)
    tree = TREES["dynamic"]
    with Bench(language, "eagle3", tree, num_pages=17) as bench:
        for n in range(12):
            victim = bench.submit([n, 1], 40, SamplingSettings(seed=n))
            for _ in range(40):
                bench.step()
                if bench.engine._moves or victim not in bench.open:
                    break
            bench.abort(victim)
            after = bench.submit([n, 2, 3, 4, 5], 10, SamplingSettings(seed=n))
            bench.run()
            assert bench.answers[after].tokens == say(language, [n, 2, 3, 4, 5], 10, SamplingSettings(seed=n))
    assert any(len(step.copy_source) for step in bench.target.steps)


# ---- counters


def test_the_counters_match_the_steps():
    with Bench(Counting(errs=(16,)), "eagle3", CHAIN_3) as bench:
        answer = bench.ask([9], 11)
        # 10 | 11 12 13 14 | 15 (16 was drafted wrong) 16 | 17 18 19 20
        assert answer.tokens == list(range(10, 21))
        expected = RequestStats(num_drafts=3, verified_per_depth=[3, 3, 3], accepted_per_depth=[3, 2, 2])
        assert answer.last.stats == expected and answer.num_chunks == 4
        stats = bench.frames[-1].stats
        assert (stats.steps, stats.requests_finished, stats.prompt_tokens, stats.generation_tokens) == (4, 1, 1, 11)
        assert (stats.num_drafts, stats.num_draft_tokens, stats.num_verified_tokens) == (3, 9, 9)
        assert stats.accepted_per_depth == [3, 2, 2] and stats.num_accepted_tokens == 7
        assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
        assert 0 < stats.draft_seconds and 0 < stats.transfer_seconds and 0 < stats.verify_seconds
        assert stats.draft_seconds + stats.transfer_seconds + stats.verify_seconds < stats.step_seconds
        assert stats.forward_seconds + stats.accept_seconds <= stats.verify_seconds, "of all steps, not of the last"


@pytest.mark.parametrize("ending", [{"stop_token_ids": [12]}, {}], ids=["stop token", "end of text"])
def test_tokens_behind_a_stop_token_do_not_count_as_accepted(ending):
    with Bench(Counting(), "eagle3", CHAIN_3, eos_token_ids=(() if ending else (12,))) as bench:
        answer = bench.ask([9], 30, **ending)
        # 10 | 11 12, and 13 14 were accepted behind the end
        assert answer.tokens == [10, 11, 12]
        for stats in (answer.last.stats, bench.frames[-1].stats):
            assert stats.accepted_per_depth == [1, 1]
            assert stats.verified_per_depth == [1, 1, 1]  # what was paid for is told
        assert (answer.last.num_accepted, answer.last.is_copied) == (2, False)


def test_a_chunk_reports_its_drafted_tokens():
    with Bench(Counting(errs=(16,)), "eagle3", CHAIN_3) as bench:
        bench.ask([9], 11)
        chunks = [chunk for frame in bench.frames for chunk in frame.chunks]
        # 10 | 11 12 13 14 | 15 16 | 17 18 19 20, the last of each step being the target's own
        assert [(len(chunk.tokens), chunk.num_accepted) for chunk in chunks] == [(1, 0), (4, 3), (2, 1), (4, 3)]


def test_a_step_whose_every_node_was_pruned_is_no_draft():
    tree = TreeConfig(kind="chain", num_speculative_tokens=3, prune=PruneConfig(min_prob=1.0))
    with Bench(RandomLanguage(), "eagle3", tree) as bench:
        stats = bench.ask([5, 6], 20, SamplingSettings(seed=3)).last.stats
        assert (stats.num_drafts, stats.num_verified_tokens) == (0, 0) < (1, stats.num_draft_tokens)
        assert bench.frames[-1].stats.num_drafts == 0


def test_no_more_is_drafted_than_the_request_can_still_generate():
    with Bench(Counting(), "eagle3", CHAIN_3) as bench:
        bench.ask([1], 3)  # one from the prompt, one draft, one bonus
        assert [r.max_depth_B.tolist() for r in bench.drafter.requests] == [[1]]
        assert bench.frames[-1].stats.num_draft_tokens == 1


@pytest.mark.parametrize(
    ("tree", "most"),
    [(CHAIN_3, 3), (TREES["static"], 3), (TREES["dynamic"], TREES["dynamic"].max_depth)],
    ids=["chain", "static", "dynamic"],
)
def test_a_requested_depth_is_at_most_the_trees(tree, most):
    """Arrays by depth in a reply are as long as the largest depth in the message, so it must not exceed the tree's."""
    with Bench(RandomLanguage(), "eagle3", tree) as bench:
        bench.ask([5, 6], 150, SamplingSettings(temperature=0.0))
        assert max(int(request.max_depth_B.max()) for request in bench.drafter.requests) == most


def test_an_unfinished_prompt_needs_no_whole_rows():
    """Whole vocabulary rows are gathered and kept only for requests that sample."""
    wants_all = SamplingSettings(temperature=1.0, seed=1, num_logprobs=2)
    with Bench(RandomLanguage(), "eagle3", CHAIN_3, max_num_batched_tokens=12) as bench:
        bench.submit([5, 6], 40, SamplingSettings(temperature=0.0))
        bench.step()
        bench.submit(list(range(32)), 4, wants_all, speculation=Speculation(acceptance="rejection"))
        bench.run()
        first, *_ = [n for n, step in enumerate(bench.target.steps) if step.has_logprobs or step.has_sampled]
        chunks = [n for n, step in enumerate(bench.target.steps) if len(step.token_N) > len(step.sample_row_R)]
        assert len(chunks) > 3 and first == chunks[-1], "from the step on that ends the prompt"


def test_gauges_count_running_and_waiting_requests():
    with Bench(Counting(), max_num_seqs=2, num_pages=41) as bench:
        for _ in range(5):
            bench.submit([1], 39)
        bench.step()
        stats = bench.frames[-1].stats
        assert (stats.num_running, stats.num_waiting) == (2, 3)
        assert stats.kv_usage == pytest.approx(2 / 40)  # a token and the next root's row: a page each


def test_all_tokens_of_a_step_leave_as_one_frame_with_one_chunk_each():
    with Bench(Counting(), "eagle3", CHAIN_3) as bench:
        bench.submit([1], 9)
        bench.submit([30], 9)
        bench.run()
        assert [[(c.id, len(c.tokens)) for c in f.chunks] for f in bench.frames if f.chunks] == [
            [(0, n), (1, n)] for n in (1, 4, 4)
        ]


# ---- life and death


def test_a_front_that_leaves_in_the_middle_of_a_step_ends_the_engine_between_two():
    """Other ranks of the target must not wait for a step that rank 0 has left."""
    with Bench(Counting(), "eagle3", CHAIN_3) as bench:
        bench.submit([1], 30)
        bench.engine._step()
        send = bench.drafter.send
        bench.drafter.send = lambda message, step: (send(message, step), bench.front.close())
        bench.engine._step()  # the tokens of the first step cannot be sent
        assert len(bench.target.steps) == 2
        with pytest.raises(FrontGone):
            bench.engine._step()
        assert len(bench.target.steps) == 2


def test_an_idle_engine_sends_heartbeats_to_front_and_peers(monkeypatch):
    monkeypatch.setattr(verifier.engine, "HEARTBEAT_S", 0.02)
    with Bench(Counting(), "eagle3", CHAIN_3) as bench:
        for _ in range(5):
            bench.step()
        assert bench.frames and all(not frame.chunks for frame in bench.frames)
        assert bench.target.heartbeats > 0 and bench.drafter.heartbeats > 0


def test_an_engine_that_never_drafts_sends_the_drafter_heartbeats(monkeypatch):
    monkeypatch.setattr(verifier.engine, "HEARTBEAT_S", 0.0)
    with Bench(Counting(), "eagle3", CHAIN_3) as bench:
        bench.ask([1], 10, speculation=Speculation(enabled=False))
        assert bench.drafter.heartbeats >= 10


def test_an_engine_without_a_front_stops_all_ranks():
    with Bench(Counting(), "eagle3", CHAIN_3) as bench:
        bench.submit([1], 200)
        bench.front.close()
        with pytest.raises(FrontGone):
            bench.engine.run()
        bench.engine.stop()
        assert bench.target.stopped and bench.drafter.stopped


# ---- everything at once


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "tree"), [("eagle3", TREES["dynamic"]), ("draft_model", TREES["static"])], ids=["eagle3", "draft model"]
)
def test_a_crowd_of_random_requests_with_aborts_leave_every_page_free(method, tree):
    rng = random.Random(7)
    language = RandomLanguage(vocab=24)
    with Bench(
        language, method, tree, num_pages=70, max_num_seqs=5, max_num_batched_tokens=90, eos_token_ids=(5,)
    ) as bench:
        asked = []
        while len(asked) < 80 or bench.open:
            while len(asked) < 80 and rng.random() < 0.35:
                prompt = [rng.randrange(24) for _ in range(rng.choice([1, 2, 7, 30, 100]))]
                params = SamplingSettings(
                    temperature=rng.choice([0.0, 0.8, 1.0]), top_p=rng.choice([1.0, 0.9]), seed=rng.getrandbits(64)
                )
                speculation = Speculation(
                    enabled=rng.random() < 0.8, num_speculative_tokens=rng.choice([None, None, 0, 1, 4]),
                    rules=rng.choice([{}, {"min_prob": 0.3}, {"path_prob": 0.1}, {"min_prob": 0.3, "path_prob": 0.1}]),
                )  # fmt: skip
                max_tokens = rng.randint(1, 30)
                ignore_eos = rng.random() < 0.5
                bench.submit(
                    prompt, max_tokens, params, speculation=speculation, ignore_eos=ignore_eos, stop_token_ids=[11]
                )
                asked.append((prompt, max_tokens, params, {11} if ignore_eos else {11, 5}))
            if bench.open and rng.random() < 0.08:
                bench.abort(rng.choice(sorted(bench.open)))
            if bench.open or rng.random() < 0.2:
                bench.step()
        bench.submit([1], 1)
        bench.run()  # the last aborts have been taken
        assert bench.num_free == 69 and not bench.engine._running and not bench.engine._moves
        num_finished = 0
        for (prompt, max_tokens, params, stops), answer in zip(asked, bench.answers.values(), strict=False):
            tokens = answer.tokens
            expected = say(language, prompt, len(tokens), params)
            assert tokens == expected
            if answer.last is not None:
                num_finished += 1
                stopped = [i for i, token in enumerate(tokens) if token in stops]
                assert stopped == ([len(tokens) - 1] if answer.last.finish_reason == "stop" else [])
                assert (len(tokens) == max_tokens) or stopped
        assert num_finished > 50
        finished_drafts = np.array([a.last.stats.num_accepted_tokens for a in bench.answers.values() if a.last])
        assert finished_drafts.sum() > 100


def test_an_idle_engine_sends_one_heartbeat_per_period(monkeypatch):
    monkeypatch.setattr(verifier.engine, "HEARTBEAT_S", 60.0)
    with Bench(Counting()) as bench:
        bench.submit([1], 2)
        bench.run()
        before = bench.target.heartbeats
        bench.submit([1], 2)  # wakes it at once: it was idle, and has given a sign a moment ago
        bench.step()
        assert bench.target.heartbeats == before


def test_preemptions_and_seconds_of_drafting_add_up():
    with Bench(RandomLanguage(), "eagle3", CHAIN_3) as bench:
        bench.submit([1, 2, 3], 40, SamplingSettings(seed=1))
        told = []
        receive = bench.drafter.receive
        bench.drafter.receive = lambda: (told.append(receive()), told[-1])[1]
        for number in range(3):
            while not bench.engine._running or not bench.engine._running[0].is_decoding:
                bench.step()
            bench.step()
            bench.engine.preempt(bench.engine._running[0])
            assert bench.engine._stats.num_preemptions == number + 1
        bench.run()
        drafted = sum(received.message.seconds for received in told)
        assert bench.frames[-1].stats.draft_seconds == pytest.approx(drafted) and len(told) > 5


@pytest.mark.parametrize("tree", [TREES["chain"], TREES["static"]], ids=["chain", "static"])
def test_sampled_drafts_keep_their_probabilities_beside_a_prompt_that_is_finished(tree):
    """With fixed trees a seeded request under `rejection` has the same output in any batch."""
    rejection = AcceptanceConfig(kind="rejection")
    params = SamplingSettings(temperature=1.0, seed=7)
    with Bench(RandomLanguage(error=0.3), "eagle3", tree, acceptance=rejection) as bench:
        alone = bench.ask([5, 6], 40, params).tokens
    with Bench(RandomLanguage(error=0.3), "eagle3", tree, acceptance=rejection) as bench:
        first = bench.submit([5, 6], 40, params)
        for _ in range(20):
            bench.submit([9, 8], 1)  # its prompt is finished in the same step
            bench.step()
        bench.run()
        assert bench.answers[first].tokens == alone
