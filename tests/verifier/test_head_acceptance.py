"""A draft model that fits badly is noticed, and one that fits is not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.engines import BUNDLED
from verifier.head_acceptance import HeadAcceptance
from verifier.tree import chains
from workers.comm.ipc import EngineStats
from workers.types import Verdict


def note_after(folder: Path, shares: list[float], *, kind: int = 1, steps: int = 1000, trees: int = 1) -> str:
    """Return what is amiss after chains of which each depth is accepted with its probability."""
    own, rng, stats = HeadAcceptance(str(folder)), np.random.default_rng(5), EngineStats()
    for _ in range(steps):
        is_accepted = rng.random((trees, len(shares))) < shares
        paths = [tuple(range(1, 1 + int(row.cumprod().sum()))) for row in is_accepted]
        verdicts = [Verdict(path, (0,) * (len(path) + 1), len(shares), len(shares)) for path in paths]
        own.observe(chains([[7] * (len(shares) + 1)] * trees), verdicts, [kind] * trees)
        own.report(stats)
    return stats.head_note


@pytest.mark.parametrize(("kind", "trees"), [(0, 1), (1, 1), (1, 8)])
def test_a_useless_head_is_noticed_within_a_thousand_steps(kind: int, trees: int, tmp_path: Path) -> None:
    for folder in (BUNDLED / "eagle3", BUNDLED / "smollm2-eagle3", tmp_path):
        assert "at depth 1" in note_after(folder, [0.01, 0.0], kind=kind, trees=trees)
        assert not note_after(folder, [0.6, 0.6], kind=kind, trees=trees)
        assert not note_after(folder, [0.0, 0.0], kind=kind, steps=150), "too few trees to tell"


def test_traffic_that_drifts_away_is_noticed_by_its_depth_and_kind() -> None:
    assert "sampled requests' drafts at depth 3" in note_after(BUNDLED / "eagle3", [0.7, 0.7, 0.1])
    assert "greedy" in note_after(BUNDLED / "eagle3", [0.2], kind=0)
    assert not note_after(BUNDLED / "eagle3", [0.45, 0.45])


def test_shares_and_counts_are_those_of_the_paths(tmp_path: Path) -> None:
    own, stats = HeadAcceptance(str(tmp_path)), EngineStats()
    trees = chains([[7, 8, 9], [7, 8, 9], [7], [7, 8]])
    verdicts = [
        Verdict((1, 2), (8, 9, 1), 2, 2),
        Verdict((), (1,), 2, 2),
        Verdict((), (1,), 0, 0),
        Verdict((1,), (8, 1), 1, 1),
    ]
    own.observe(trees, verdicts, [0, 0, 1, -1])
    own.report(stats)
    assert (stats.num_head_trees, stats.num_head_accepted_tokens) == (2, 2)
    assert stats.greedy_acceptance == [0.5, 1.0] and stats.sampled_acceptance == []


def test_a_record_of_another_form_promises_little(tmp_path: Path) -> None:
    for text in ("", "[]", '{"log": []}', '{"log": [{}]}', json.dumps({"log": [{"agreement": ["x"]}]})):
        (tmp_path / "training.json").write_text(text)
        assert not note_after(tmp_path, [0.2], steps=300)
