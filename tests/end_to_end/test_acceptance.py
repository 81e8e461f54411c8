"""Acceptance of the bundled EAGLE-3 head on held-out text: trees, and the chain of the same head."""

from __future__ import annotations

import pytest

from tests.support.engines import CHAIN, DYNAMIC, GenerationJob, Runner, bundled, prompts
from workers.comm.ipc import Speculation


def acceptance_length(runner: Runner, num_tokens: int | None = None) -> float:
    """Return the greedy acceptance length, 1 + accepted / drafts, over held-out prompts."""
    jobs = [
        GenerationJob(prompt=prompt, speculation=Speculation(num_speculative_tokens=num_tokens))
        for prompt in prompts(12)
    ]
    stats = [answer.stats for answer in runner.run(jobs, concurrency=4)]
    return 1 + sum(s.num_accepted_tokens for s in stats) / sum(s.num_drafts for s in stats)


@pytest.mark.slow
def test_the_dynamic_tree_accepts_three_tokens_a_step_and_never_less_than_its_own_chain() -> None:
    with Runner(bundled(DYNAMIC)) as runner:
        tree, small_tree = acceptance_length(runner), acceptance_length(runner, num_tokens=5)
    with Runner(bundled(CHAIN)) as runner:
        chain = acceptance_length(runner)
    print(f"acceptance length, greedy: dynamic tree of 16 {tree:.2f}, of 5 {small_tree:.2f}, chain of 5 {chain:.2f}")
    assert tree >= 3.0 and tree > chain
    assert small_tree >= chain, "at the same budget a tree may not lose to its own chain"
