"""Thresholds on the bundled pair, through a real engine: fewer nodes are verified, nothing else changes."""

import pytest

from tests.support.engines import GenerationJob, Runner, bundled, prompts, pruned
from workers.comm.ipc import Speculation


@pytest.mark.slow
def test_a_higher_threshold_verifies_fewer_nodes_and_changes_no_output() -> None:
    def run(**rules: float) -> tuple[int, list[list[int]]]:
        asked = Speculation(rules=rules)
        jobs = [GenerationJob(prompt=prompt, max_tokens=40, speculation=asked) for prompt in prompts(4)]
        answers = runner.run(jobs, concurrency=4)
        return sum(answer.stats.num_verified_tokens for answer in answers), [answer.tokens for answer in answers]

    with Runner(bundled(pruned())) as runner:
        unpruned, expected = run()
        for name in ("min_prob", "path_prob"):
            verified, outputs = zip(*(run(**{name: threshold}) for threshold in (0.1, 0.3, 0.7)), strict=True)
            assert [unpruned, *verified] == sorted([unpruned, *verified], reverse=True), name
            assert verified[-1] < 0.7 * unpruned and set(map(str, outputs)) == {str(expected)}, name
