"""A record agrees with the step's verdict, and asking for it changes no token."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.support.fakes import Answer, Bench, Counting, RandomLanguage
from tests.support.pairs import pairs
from workers.comm.ipc import Speculation, TreeRecord
from workers.config import AcceptanceConfig, PruneConfig, SimulatedCosts, TreeConfig
from workers.settings import SamplingSettings

torch.set_num_threads(1)

SIZE = {"num_speculative_tokens": 12, "max_depth": 5, "max_children": 4}
COSTS = SimulatedCosts(step_ms=10, row_ms=0.2, draft_ms=0.5, level_ms=0.1)
TREES = {
    "thresholds": TreeConfig(**SIZE, prune=PruneConfig(min_prob=0.3, path_prob=0.1)),
    "auto": TreeConfig(**SIZE, prune=PruneConfig(auto=True, simulated_costs=COSTS, prompt_lookup=False)),
    "static": TreeConfig(kind="static", num_speculative_tokens=3, static_paths=((0,), (1,), (0, 0))),
}
RULES = {
    "coupled": AcceptanceConfig(),
    "traversal": AcceptanceConfig(kind="rejection"),
    "recursive": AcceptanceConfig(kind="rejection", rejection_method="recursive"),
}
GREEDY, HOT = SamplingSettings(temperature=0.0), SamplingSettings(temperature=1.0, seed=3)
METHODS = ("eagle3", "draft_model")
HEAT = {"greedy": GREEDY, "hot": HOT}


def records(answer: Answer) -> list[TreeRecord]:
    found = [chunk.tree for chunk in answer.chunks]
    assert all(tree is not None for tree in found)
    return found


def assert_agrees(answer: Answer, prompt: list[int]) -> None:
    """Roots follow each other, paths spell the emitted tokens, counts are those of the statistics."""
    tokens, num_accepted, num_verified = list(prompt), 0, 0
    for chunk, tree in zip(answer.chunks, records(answer), strict=True):
        assert len({len(column) for column in (tree.tokens, tree.parents, tree.depths, tree.probs, tree.reasons)}) == 1
        assert (tree.tokens[0], tree.parents[0], tree.depths[0]) == (tokens[-1], -1, 0)
        assert all(parent < row for row, parent in enumerate(tree.parents))
        assert all(tree.depths[row] == tree.depths[parent] + 1 for row, parent in enumerate(tree.parents) if row)
        for above, below in pairwise([0, *tree.path]):
            assert tree.parents[below] == above and not tree.reasons[below]
        kept = tree.path[: chunk.num_accepted]
        assert [tree.tokens[row] for row in kept] == chunk.tokens[: chunk.num_accepted]
        assert len(chunk.tokens) <= len(tree.path) + 1 and tree.verify_ms > 0
        num_accepted += chunk.num_accepted
        num_verified += tree.reasons.count(0) - 1
        tokens += chunk.tokens
    stats = answer.last.stats
    assert (stats.num_accepted_tokens, stats.num_verified_tokens) == (num_accepted, num_verified)
    assert tokens == prompt + answer.tokens


@pytest.mark.slow
@pytest.mark.parametrize(("method", "tree", "rule", "heat"), pairs(METHODS, TREES, RULES, HEAT, every=3))
def test_records_agree_with_verdicts_and_change_no_token(method, tree, rule, heat):
    prompt, language = [5, 6, 7], RandomLanguage(error=0.5)
    answers = []
    for has_trees in (False, True):
        with Bench(language, method, TREES[tree], acceptance=RULES[rule]) as bench:
            other = bench.submit([9, 8], 30, HOT)  # does not ask
            answers.append(bench.ask(prompt, 40, HEAT[heat], has_trees=has_trees))
            assert all(chunk.tree is None for chunk in bench.answers[other].chunks)
            traced = [request.traced_B for request in bench.drafter.requests]
            assert any(traced_B is not None for traced_B in traced) == has_trees
    plain, seen = answers
    assert seen.tokens == plain.tokens
    assert all(chunk.tree is None for chunk in plain.chunks)
    assert_agrees(seen, prompt)
    trees = records(seen)
    assert any(tree.path for tree in trees) and any(tree.draft_ms is not None for tree in trees)
    if tree == "thresholds":
        shown = [reason for record in trees for reason in record.reasons if reason]
        assert shown and set(shown) <= {1, 2}
    estimates = [pair for record in trees for pair in zip(record.weights, record.probs, strict=True)]
    assert any(weight and q and 0 < weight < 1 and 0 < q < 1 for weight, q in estimates)


def test_the_prompt_s_own_token_and_steps_without_a_draft_have_a_bare_root():
    with Bench(RandomLanguage(), None) as bench:
        answer = bench.ask([5, 6], 6, HOT, has_trees=True)
        assert_agrees(answer, [5, 6])
        assert [tree.tokens for tree in records(answer)] == [[token] for token in [6, *answer.tokens[:-1]]]
        assert all(tree.draft_ms is None and not tree.path for tree in records(answer))


def test_a_request_that_turns_speculation_off_has_bare_roots():
    with Bench(RandomLanguage(), "eagle3", TREES["static"]) as bench:
        answer = bench.ask([5, 6], 6, GREEDY, has_trees=True, speculation=Speculation(enabled=False))
        assert {len(tree.tokens) for tree in records(answer)} == {1} and len(answer.chunks) == 6


def test_lookup_copies_are_chains_without_estimates():
    costs = SimulatedCosts(step_ms=10, row_ms=0.01, draft_ms=1e6)
    tree = TreeConfig(num_speculative_tokens=3, max_depth=3, prune=PruneConfig(auto=True, simulated_costs=costs))
    prompt = [n % 8 for n in range(40)]
    with Bench(Counting(8), "eagle3", tree, max_model_len=512) as bench:
        answer = bench.ask(prompt, 200, GREEDY, has_trees=True, ignore_eos=True)
    assert_agrees(answer, prompt)
    copied = [chunk.tree for chunk in answer.chunks if chunk.is_copied]
    assert copied
    for record in copied:
        size = len(record.tokens)
        assert record.parents == list(range(-1, size - 1)) and record.probs == [None] * size
        assert record.path == list(range(1, size))


def test_a_record_survives_preemption():
    with Bench(RandomLanguage(), "eagle3", TREES["thresholds"]) as bench:
        id = bench.submit([5, 6, 7], 30, HOT, has_trees=True)
        for _ in range(4):
            bench.step()
        bench.engine.preempt(bench.engine._running[0])
        bench.run()
        assert_agrees(bench.answers[id], [5, 6, 7])
