"""Thresholds on the bundled pair, through a real engine: fewer nodes are verified, nothing else changes."""

import pytest

from tests.bench.pruning import sweep


@pytest.mark.slow
@pytest.mark.parametrize("name", ["min_prob", "path_prob"])
def test_a_higher_threshold_verifies_fewer_nodes_and_changes_no_output(name: str) -> None:
    rows = sweep(name, num_prompts=6, thresholds=(0.0, 0.1, 0.3, 0.7))
    verified = [row.verified_per_token for row in rows]
    assert verified == sorted(verified, reverse=True) and verified[-1] < 0.7 * verified[0]
    assert all([a.tokens for a in row.answers] == [a.tokens for a in rows[0].answers] for row in rows)
