"""Requests with a grammar in the engine: their state carries the output, and nothing of them is kept at their end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.support.fakes import Bench, Counting
from tests.support.grammars import TinyTable
from verifier.request import Request
from workers.comm.ipc import RequestStats, Resumption, Submit
from workers.config import TreeConfig
from workers.sampling.grammar import Grammars, grammar_text
from workers.settings import Constraints, Rule, SamplingSettings

GRAMMAR = Constraints(grammar=grammar_text("regex", "(ab|c){1,3}"))
PARAMS = SamplingSettings(temperature=0.0, constraints=GRAMMAR)
TEXTS = ["a", "b", "c", "<end>", "x"]


def test_the_state_carries_all_of_the_output() -> None:
    submit = Submit(id=3, prompt=[1], max_tokens=9, sampling=PARAMS)
    resumption = Resumption(output=[2, 0], num_prompt_logprobs=0, stats=RequestStats())
    for own, before in ((submit, []), (replace(submit, resumption=resumption), [2, 0])):
        request = Request(own, Rule.COUPLED, None, 0)
        request.append([1])
        state = request.logits_state((3,))
        assert state is not None and np.frombuffer(state.output, np.int32).tolist() == [*before, 1]


def test_without_a_tokenizer_a_grammar_is_refused() -> None:
    with Bench(Counting(5)) as bench:
        answer = bench.ask([1], 4, PARAMS)
        assert (answer.last.finish_reason, answer.last.error) == ("error", "no tokenizer")
        assert answer.last.error_code == "grammar_failed"


def test_a_finished_request_leaves_no_matcher_behind() -> None:
    tree = TreeConfig(num_speculative_tokens=4, max_depth=2, max_children=2)
    with Bench(Counting(5), "eagle3", tree, eos_token_ids=(3,)) as bench:
        grammars = bench.target.grammars = Grammars(TinyTable(TEXTS, [3]))
        bench.drafter.drafter._grammars = Grammars(TinyTable(TEXTS, [3]))
        text = "".join(TEXTS[token] for token in bench.ask([1], 9, PARAMS).tokens)
        assert text.removesuffix("<end>") in {"ab", "c", "abab", "abc", "cab", "cc", "ababab", "ababc"} | {
            a + b + c for a in ("ab", "c") for b in ("ab", "c") for c in ("ab", "c")
        }
        assert not grammars._matchers and grammars._compiled
