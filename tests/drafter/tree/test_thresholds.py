"""Thresholds on the bundled pair, through a real engine: fewer nodes are verified, nothing else changes."""

import pytest

from tests.support.engines import GenerationJob, Runner, bundled, prompts, pruned
from workers.comm.ipc import Speculation


@pytest.mark.slow
@pytest.mark.parametrize("name", ["min_prob", "path_prob"])
def test_a_higher_threshold_verifies_fewer_nodes_and_changes_no_output(name: str) -> None:
    verified, outputs = [], []
    with Runner(bundled(pruned())) as runner:
        for threshold in (0.0, 0.1, 0.3, 0.7):
            speculation = Speculation(rules={name: threshold})
            answers = runner.run([GenerationJob(prompt=p, speculation=speculation) for p in prompts(6)], concurrency=4)
            outputs.append([answer.tokens for answer in answers])
            verified.append(sum(answer.stats.num_verified_tokens for answer in answers))
    assert verified == sorted(verified, reverse=True) and verified[-1] < 0.7 * verified[0]
    assert all(tokens == outputs[0] for tokens in outputs)
