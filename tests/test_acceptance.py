"""What the bundled EAGLE-3 head is worth on text it has never seen: the tree, and the chain of the same head."""

from __future__ import annotations

from engines import CHAIN, DYNAMIC, Job, Runner, bundled, prompts

from workers.config import TreeConfig


def acceptance_length(tree: TreeConfig) -> float:
    """Greedy tokens per verification that had drafts, 1 + accepted / drafts, over held-out prompts."""
    with Runner(bundled(tree)) as runner:
        answers = runner.run([Job(prompt=prompt) for prompt in prompts(25)], concurrency=4)
    stats = [answer.stats for answer in answers]
    return 1 + sum(s.num_accepted_tokens for s in stats) / sum(s.num_drafts for s in stats)


def test_the_dynamic_tree_accepts_three_tokens_a_step_and_more_than_the_chain_of_its_head() -> None:
    tree, chain = acceptance_length(DYNAMIC), acceptance_length(CHAIN)
    print(f"acceptance length, greedy: dynamic tree of 16 {tree:.2f}, chain of 5 {chain:.2f}")
    assert tree >= 3.0
    assert tree > chain
