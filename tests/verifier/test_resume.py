"""A request that a lost engine has begun goes on in another one, with the tokens that it would have had."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.fakes import Bench, RandomLanguage
from workers.comm.ipc import RequestStats, Resumption
from workers.config import TreeConfig
from workers.settings import Constraints, SamplingSettings

torch.set_num_threads(1)

TREE = TreeConfig(num_speculative_tokens=8, max_depth=4, max_children=3)
PROMPT, NUM_TOKENS = [3, 1, 4, 1, 5], 14
PARAMS = {
    "greedy": SamplingSettings(temperature=0.0),
    "seeded": SamplingSettings(temperature=0.9, seed=7),
    "constrained": SamplingSettings(
        temperature=0.8,
        seed=5,
        constraints=Constraints(
            repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=0.3, bad_words=[[9], [3, 8]], min_tokens=9
        ),
    ),
}


def undisturbed(params: SamplingSettings) -> list[int]:
    with Bench(RandomLanguage()) as bench:
        return bench.ask(PROMPT, NUM_TOKENS, params).tokens


def resumption(output: list[int], num_prompt_logprobs: int = 0) -> Resumption:
    stats = RequestStats(num_drafts=2, verified_per_depth=[5, 3], accepted_per_depth=[2, 1])
    return Resumption(output=output, num_prompt_logprobs=num_prompt_logprobs, stats=stats)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("method", [None, "eagle3", "draft_model"])
def test_it_goes_on_after_any_token_with_the_same_ones(method: Any, params: SamplingSettings) -> None:
    wanted = undisturbed(params)
    with Bench(RandomLanguage(), method, TREE, max_num_batched_tokens=8) as bench:
        for count in range(NUM_TOKENS):
            answer = bench.ask(PROMPT, NUM_TOKENS, params, resumption=resumption(wanted[:count]))
            assert answer.tokens == wanted[count:], count
            assert answer.last.finish_reason == "length"
            assert answer.last.stats.num_drafts >= 2 and answer.last.stats.num_accepted_tokens >= 3


def test_prompt_log_probabilities_that_were_sent_are_not_sent_again() -> None:
    language = RandomLanguage()
    greedy = SamplingSettings(temperature=0.0)
    with Bench(language, None, max_num_batched_tokens=4) as bench:

        def scores(**more: Any) -> list[Any]:
            answer = bench.ask(PROMPT, 3, greedy, num_prompt_logprobs=2, **more)
            return [entry for chunk in answer.chunks for entry in chunk.prompt_logprobs or ()]

        whole = scores()
        assert len(whole) == 4
        for count in range(5):
            assert scores(resumption=resumption([], count)) == whole[count:]


def test_a_resumed_request_keeps_its_length_limit_and_its_stop_tokens() -> None:
    language, greedy = RandomLanguage(), PARAMS["greedy"]
    wanted = undisturbed(greedy)
    stop = next(token for token in wanted[6:] if token not in wanted[:6])
    with Bench(language, "eagle3", TREE) as bench:
        answer = bench.ask(PROMPT, NUM_TOKENS, greedy, stop_token_ids=[stop], resumption=resumption(wanted[:5]))
        assert answer.last.finish_reason == "stop"
        assert answer.tokens == wanted[5 : wanted.index(stop) + 1]
        limited = bench.ask(PROMPT, 6, greedy, resumption=resumption(wanted[:5]))
        assert limited.tokens == wanted[5:6] and limited.last.finish_reason == "length"


def test_it_may_be_preempted_after_it_was_resumed() -> None:
    params = replace(PARAMS["constrained"], seed=11)
    wanted = undisturbed(params)
    with Bench(RandomLanguage(), "eagle3", TREE) as bench:
        id = bench.submit(PROMPT, NUM_TOKENS, params, resumption=resumption(wanted[:4]))
        while not bench.answers[id].tokens:
            bench.step()
        bench.engine.preempt(bench.engine._running[0])
        bench.run()
        assert bench.answers[id].tokens == wanted[4:]
