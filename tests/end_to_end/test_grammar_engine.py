"""Structured outputs from the real models in this process: tokens do not depend on the drafts, and they are valid."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
import torch

from cluster.text.tokenizer import Tokenizer
from drafter.proposers.base import DraftModelProposer, FeatureProposer, Proposer, shared_vocabulary
from drafter.proposers.ngram import MatchLengths, NgramProposer
from tests.support.engine_here import EngineHere, Pair, engine_here
from tests.support.engines import AUTO, BUNDLED, CHAIN, DYNAMIC, STATIC, GenerationJob, Runner, bundled, prompts
from verifier.adaptive.cost_model import UNPROFILED
from verifier.target import Target
from workers.comm.ipc import Speculation, Submit, TokenChunk
from workers.config import AcceptanceConfig, PruneConfig, SimulatedCosts, TreeConfig
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.sampling.grammar import Grammars, ThoughtMarks, TokenTable, grammar_text
from workers.sampling.logits_state import unpack_logits_states
from workers.sampling.sampler import draw
from workers.settings import Constraints, SamplingSettings
from workers.types import SamplingBatch, TargetStep

torch.set_num_threads(1)

ENDS = (0, 2)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "colour": {"enum": ["red", "green", "dark blue"]},
        "sizes": {"type": "array", "items": {"enum": [1, 2, 30]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "colour", "sizes"],
    "additionalProperties": False,
}
ANSWER = {"anyOf": [{"const": {"answer": None}}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}]}
GRAMMARS: dict[str, tuple[str, Any, Callable[[str], object]]] = {
    "person": ("json", PERSON, lambda text: jsonschema.validate(json.loads(text), PERSON)),
    "answer": ("json", ANSWER, lambda text: jsonschema.validate(json.loads(text), ANSWER)),
    "regex": ("regex", r"[A-Z][a-z]{2,9}( [0-9]{1,4}){0,2}", lambda text: _must(GRAMMARS["regex"][1], text)),
    "choice": ("choice", ["yes", "yes, but", "no"], lambda text: ["yes", "yes, but", "no"].index(text)),
    "thought": ("choice", ["yes", "no"], lambda text: _must(r"[^\n]*\n{1,3}(yes|no)", text)),
    "grammar": ("grammar", 'start: sum\nsum: N ("+" N){0,4}\nN: /[0-9]{1,3}/', lambda text: _must(r"[0-9+]+", text)),
}


def _must(pattern: str, text: str) -> None:
    assert re.fullmatch(pattern, text), text


@cache
def pair() -> Pair:
    return Pair.load(BUNDLED / "target", BUNDLED / "eagle3")


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(str(BUNDLED / "target"))


@cache
def table() -> llguidance.LLTokenizer:
    return TokenTable(str(BUNDLED / "target"), 2048, ENDS).load()


@cache
def grammar(name: str) -> str:
    kind, source, _ = GRAMMARS[name]
    text = grammar_text(kind, source, whitespace="none")  # type: ignore[arg-type]
    return (
        TokenTable(str(BUNDLED / "target"), 2048, ENDS).behind(ThoughtMarks("", "\n"), text)
        if name == "thought"
        else text
    )


def draft_model(head: object, kv: object, page_size: int, tree_rows: int) -> Proposer:
    path = BUNDLED / "draft"
    model = load_decoder(path, read_spec(path))
    return DraftModelProposer(model, shared_vocabulary(model, 2048), model.new_kv_pool(600 * 16), page_size)


def ngram(head: object, kv: object, page_size: int, tree_rows: int) -> Proposer:
    return NgramProposer(MatchLengths(1, 4), 2048, 600, page_size)


PROPOSERS = {"eagle3": FeatureProposer, "draft_model": draft_model, "ngram": ngram}


class RecordingTarget(Target):
    """A target that keeps its steps."""

    def run(self, step: TargetStep, number: int, *more: Any, **options: Any) -> list[int]:
        self.steps = [*getattr(self, "steps", []), step]
        return super().run(step, number, *more, **options)


@contextmanager
def running(
    tree: TreeConfig | None, method: str = "eagle3", acceptance: AcceptanceConfig | None = None, **options: Any
) -> Iterator[EngineHere]:
    config = bundled(tree, method=method, eos_token_ids=ENDS, num_pages=600, **options)
    if acceptance is not None:
        assert config.draft is not None
        config = replace(config, draft=replace(config.draft, acceptance=acceptance))
    with engine_here(config, pair(), UNPROFILED, target=RecordingTarget, proposer=PROPOSERS[method]) as here:
        yield here


def submits(temperature: float, speculation: Speculation = Speculation(), seeds: int = 2) -> list[Submit]:
    """Return requests with every grammar and without one, of several seeds."""
    some = sorted(prompts(8), key=len)[:3]
    asked = [(name, seed) for seed in range(seeds) for name in (*GRAMMARS, None)]
    return [
        Submit(
            id=i,
            prompt=some[i % 3],
            max_tokens=90 if name else 20,
            sampling=SamplingSettings(
                temperature=temperature,
                seed=seed,
                constraints=Constraints(grammar=grammar(name)) if name else Constraints(),
            ),
            ignore_eos=name is None,
            speculation=speculation,
        )
        for i, (name, seed) in enumerate(asked)
    ]


def answers(here: EngineHere, asked: list[Submit], preempt_every: int = 0) -> dict[int, list[TokenChunk]]:
    """Run requests together; return the chunks of each."""
    chunks: dict[int, list[TokenChunk]] = {submit.id: [] for submit in asked}
    for submit in asked:
        here.submit(submit)
    number = 0
    while any(not own or own[-1].finish_reason is None for own in chunks.values()):
        for chunk in here.step():
            chunks[chunk.id].append(chunk)
        number += 1
        if preempt_every and number % preempt_every == 0 and here.engine._running:
            here.engine.preempt(here.engine._running[number % len(here.engine._running)])
        assert number < 2000
    return chunks


def tokens_of(chunks: dict[int, list[TokenChunk]]) -> dict[int, list[int]]:
    return {id: [token for chunk in own for token in chunk.tokens] for id, own in chunks.items()}


def check(asked: list[Submit], chunks: dict[int, list[TokenChunk]]) -> None:
    """Check that every constrained answer stops at an end token and is what its grammar describes."""
    name_of = {grammar(name): name for name in GRAMMARS}
    for submit in asked:
        name = name_of.get(submit.sampling.constraints.grammar)
        last = chunks[submit.id][-1]
        may_be_cut = name is None or (name == "thought" and not submit.sampling.temperature)  # the model goes round
        assert last.finish_reason == "stop" or (may_be_cut and last.finish_reason == "length"), (name, last)
        if name is not None and last.finish_reason == "stop":
            tokens = tokens_of(chunks)[submit.id]
            assert tokens[-1] == last.stop_token and tokens[-1] in ENDS
            GRAMMARS[name][2](tokenizer().decode(tokens[:-1]))


# ---- the oracle: a loop over transformers' logits, with a new matcher for every token


def may_follow(text: str, tokens: list[int]) -> np.ndarray:
    matcher = llguidance.LLMatcher(table(), text, log_level=0)
    assert matcher.consume_tokens(tokens) and not matcher.is_error()
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(bits, bitorder="little")[:2048].astype(bool)


@torch.inference_mode()
def plain(model: torch.nn.Module, submit: Submit) -> list[int]:
    prompt, output, batch = submit.prompt, [], SamplingBatch.stack([submit.sampling])
    while len(output) < submit.max_tokens and not (output and output[-1] in ENDS and not submit.ignore_eos):
        logits_1V = model(torch.tensor([prompt + output])).logits[:, -1].float()
        if text := submit.sampling.constraints.grammar:
            logits_1V[0, torch.from_numpy(~may_follow(text, output))] = -torch.inf
        output.append(int(draw(logits_1V, batch, torch.tensor([len(prompt + output)]))))
    return output


@cache
def truth(temperature: float) -> dict[int, list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(BUNDLED / "target", dtype=torch.float32)
    return {submit.id: plain(model, submit) for submit in submits(temperature)}


COPYING = replace(  # drafting costs more than it gains
    AUTO, prune=PruneConfig(auto=True, simulated_costs=SimulatedCosts(step_ms=1.0, row_ms=0.001, draft_ms=90.0))
)
SPECULATIONS = {
    "none": (None, "eagle3"),
    "eagle3": (DYNAMIC, "eagle3"),
    "eagle3, static": (STATIC, "eagle3"),
    "eagle3, auto": (AUTO, "eagle3"),
    "eagle3, auto, mostly copies": (COPYING, "eagle3"),
    "draft_model": (CHAIN, "draft_model"),
    "ngram": (DYNAMIC, "ngram"),
}


def pairs(rows: Iterable[str], columns: Iterable[Any], brief: set[tuple[str, Any]]) -> list[Any]:
    """Return every pair; those that are not in `brief` run with `--full`."""
    return [pytest.param(*pair, marks=[] if pair in brief else pytest.mark.full) for pair in product(rows, columns)]


BRIEF = {
    ("none", 1.0), ("eagle3", 0.0), ("eagle3", 1.0), ("eagle3, static", 0.0), ("eagle3, auto", 1.0),
    ("eagle3, auto, mostly copies", 0.0), ("draft_model", 1.0), ("ngram", 0.0),
}  # fmt: skip


@pytest.mark.parametrize(("speculation", "temperature"), pairs(SPECULATIONS, [0.0, 1.0], BRIEF))
def test_the_tokens_are_those_of_a_masked_loop_whatever_is_drafted(speculation: str, temperature: float) -> None:
    asked = submits(temperature)
    with running(*SPECULATIONS[speculation]) as here:
        chunks = answers(here, asked)
        assert tokens_of(chunks) == truth(temperature)
        check(asked, chunks)
        accepted = sum(own[-1].stats.num_accepted_tokens for own in chunks.values() if own[-1].stats)
        assert (accepted > 0) == (here.drafter is not None)
        check_drafts(here)
        if "copies" in speculation:
            assert sum(own[-1].stats.num_copied_tokens for own in chunks.values() if own[-1].stats) > 0


def check_drafts(here: EngineHere) -> None:
    """Check that no node that went through the target is forbidden, by a new matcher for each node."""
    for step in here.engine._target.steps:  # type: ignore[attr-defined]
        states = unpack_logits_states(step.constraints_U)
        begins, tokens = step.attention.query_offsets.tolist(), step.token_N.tolist()
        for request, row in zip(step.request_R.tolist(), step.sample_row_R.tolist(), strict=True):
            if request not in states or not (text := states[request].constraints.grammar):
                continue
            ancestors = int(step.attention.ancestors_N[row])
            path = [tokens[begins[request] + bit] for bit in range(1, 64) if ancestors >> bit & 1]
            output = np.frombuffer(states[request].output, np.int32).tolist()
            if path:
                assert not set(path[:-1]) & set(ENDS), "nothing follows an end token"
                assert may_follow(text, output + path[:-1])[path[-1]]


# ---- other rules, and requests that are interrupted

REJECTION = {
    "traversal": AcceptanceConfig(kind="rejection"),
    "recursive": AcceptanceConfig(kind="rejection", rejection_method="recursive"),
    "hybrid": AcceptanceConfig(kind="rejection", sample_method="hybrid"),
    "target only": AcceptanceConfig(kind="rejection", draft_probs=False),
}


OF_EAGLE3 = {("eagle3", rule) for rule in REJECTION}


@pytest.mark.parametrize(
    ("method", "rule"), pairs(["eagle3", "draft_model"], REJECTION, OF_EAGLE3 | {("draft_model", "recursive")})
)
def test_under_rejection_answers_are_valid_and_no_node_is_forbidden(method: str, rule: str) -> None:
    asked = submits(1.0)
    coupled = [replace(submit, id=100 + submit.id, speculation=COUPLED) for submit in submits(1.0, seeds=1)]
    with running(DYNAMIC, method, REJECTION[rule]) as here:
        chunks = answers(here, asked + coupled)
        check(asked + coupled, chunks)
        check_drafts(here)
        assert sum(own[-1].stats.num_accepted_tokens for own in chunks.values() if own[-1].stats) > 0
        own_tokens = tokens_of(chunks)
        assert all(own_tokens[submit.id] == truth(1.0)[submit.id - 100] for submit in coupled)


COUPLED = Speculation(acceptance="coupled")


@pytest.mark.parametrize(
    ("method", "temperature"),
    pairs(["eagle3", "draft_model", "ngram"], [0.0, 1.0], {("eagle3", 1.0), ("draft_model", 0.0), ("ngram", 1.0)}),
)
def test_preempted_requests_go_on_where_they_were(method: str, temperature: float) -> None:
    asked = submits(temperature)
    with running(DYNAMIC, method, max_num_seqs=5, max_num_batched_tokens=160) as here:
        chunks = answers(here, asked, preempt_every=2)
        assert tokens_of(chunks) == truth(temperature)
        assert here.engine._stats.num_preemptions >= 5
        assert here.engine._target.grammars is not None and not here.engine._target.grammars._matchers


def test_other_constraints_apply_within_the_grammar_with_and_without_drafts() -> None:
    own = [dict(bad_words=[[5], [91, 92]]), dict(min_tokens=12), dict(presence_penalty=1.5, logit_bias={96: 4.0})]
    asked = [
        replace(
            submit,
            id=10 * i + submit.id,
            sampling=replace(submit.sampling, constraints=replace(submit.sampling.constraints, **others)),
        )
        for i, others in enumerate(own)
        for submit in submits(1.0, seeds=1)[:5]
    ]
    told = []
    for tree in (None, DYNAMIC):
        with running(tree) as here:
            chunks = answers(here, asked)
            check([submit for submit in asked if not submit.sampling.constraints.bad_words], chunks)
            told.append(tokens_of(chunks))
    assert told[0] == told[1]
    assert told[0] != {submit.id: truth(1.0)[submit.id % 10] for submit in asked}


def test_a_complete_text_ends_the_request_even_if_end_tokens_are_ignored() -> None:
    asked = [replace(submit, ignore_eos=True) for submit in submits(1.0, seeds=1)[: len(GRAMMARS)]]
    with running(DYNAMIC) as here:
        chunks = answers(here, asked)
        check(asked, chunks)
        assert tokens_of(chunks) == {submit.id: truth(1.0)[submit.id] for submit in asked}


# ---- what goes wrong, and what costs nothing


def test_a_grammar_that_cannot_be_followed_fails_its_request_alone() -> None:
    first, *others = submits(1.0, seeds=1)
    slow = Constraints(grammar=grammar_text("regex", "((a{1,500}){1,500}){1,500}"))
    wrong = Constraints(grammar=grammar_text("regex", "("))
    hostile = [
        replace(first, id=100 + i, sampling=replace(first.sampling, constraints=own), max_tokens=200)
        for i, own in enumerate([slow, wrong])
    ]
    with running(DYNAMIC) as here:
        chunks = answers(here, [*hostile, *others])
        check(others, chunks)
        assert chunks[100][-1].finish_reason == chunks[101][-1].finish_reason == "error"
        assert chunks[100][-1].error_code == chunks[101][-1].error_code == "grammar_failed"
        assert "too many expressions" in str(chunks[100][-1].error) and "unclosed group" in str(chunks[101][-1].error)
        assert tokens_of(chunks) == tokens_of(chunks) | {s.id: truth(1.0)[s.id] for s in others}


def test_without_grammars_no_mask_is_computed_and_no_table_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a request without a grammar paid for one")

    for name in ("masks", "count_allowed", "problem", "_compile"):
        monkeypatch.setattr(Grammars, name, never)
    monkeypatch.setattr(TokenTable, "load", never)
    free = submits(1.0)[len(GRAMMARS) :: len(GRAMMARS) + 1]
    penalized = [replace(s, id=50 + s.id, sampling=replace(s.sampling, constraints=PENALIZED)) for s in free]
    for tree, method in ((None, "eagle3"), (DYNAMIC, "eagle3"), (DYNAMIC, "ngram")):
        with running(tree, method) as here:
            chunks = answers(here, free + penalized)
            assert tokens_of(chunks) == tokens_of(chunks) | {s.id: truth(1.0)[s.id] for s in free}


PENALIZED = Constraints(presence_penalty=1.0, bad_words=[[5]], min_tokens=4)


@pytest.mark.full
def test_tensor_parallel_ranks_of_target_and_drafter_agree_on_the_masks() -> None:
    asked = submits(1.0)
    jobs = [
        GenerationJob(
            prompt=submit.prompt, max_tokens=submit.max_tokens, sampling=submit.sampling, ignore_eos=submit.ignore_eos
        )
        for submit in asked
    ]
    with Runner(bundled(DYNAMIC, tp=2, draft_tp=2, eos_token_ids=ENDS)) as runner:
        told = runner.run(jobs, concurrency=6)
    assert [answer.tokens for answer in told] == [truth(1.0)[submit.id] for submit in asked]
    assert sum(answer.stats.num_accepted_tokens for answer in told) > 0
