"""A candidate head is scored as the learner scores, and lets go of what it held when it ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.learning.canary import Canary, ScoredHead, verdict
from drafter.learning.learner import CANARY_WINDOWS, FEWEST_WINDOWS, WEIGHTS, Learner
from drafter.learning.reservoir import WINDOW
from drafter.proposers.eagle3 import Eagle3Head
from tests.drafter.test_learner import FOLDER, WIDTH, message
from workers.models.specs import Eagle3Spec
from workers.types import DraftRequest

NUM = 20
"""Windows that are scored; fewer than may wait."""


@pytest.fixture(scope="module")
def corrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a head whose tokens are mixed up."""
    folder = copytree(FOLDER, tmp_path_factory.mktemp("head") / "corrupted")
    weights = load_file(folder / WEIGHTS)
    rows = weights["lm_head.weight"]
    weights["lm_head.weight"] = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))]
    save_file(weights, folder / WEIGHTS)
    return folder


def ids_of(head: Eagle3Head) -> torch.Tensor:
    ids = head.vocab.target_ids
    assert ids is not None
    return ids.clone()


def canary(spec: Eagle3Spec, serving: Eagle3Head, folder: Path, num_steps: int = NUM) -> Canary:
    old, new = (ScoredHead.load(spec, str(own), serving.embed) for own in (FOLDER, folder))
    return Canary((old, new), ids_of(serving), spec.layers.vocab_size, str(folder), num_steps)


@pytest.fixture(scope="module")
def likely(spec: Eagle3Spec, serving: Eagle3Head) -> list[DraftRequest]:
    """Return messages of a window each, whose tokens are often those that the serving head drafts."""
    generator, ids = torch.Generator().manual_seed(3), ids_of(serving)
    own, probe, made = ScoredHead.load(spec, str(FOLDER), serving.embed), canary(spec, serving, FOLDER), []
    for id in range(1, 1 + NUM):
        tokens = ids[torch.randint(len(ids), (WINDOW,), generator=generator)].tolist()
        features = torch.randn(WINDOW, WIDTH, generator=generator)
        one = replace(message({id: (1, tokens)}, temperature=1.0), features_MH=features)
        probe.reservoir.add(one)
        window = probe.reservoir.fresh.pop()
        logits, rows = next(own.network.draft(own.embed(window.token_N).float(), window))
        token_M = one.token_M.clone()
        token_M[rows.start : rows.stop] = ids[logits.argmax(-1)].to(token_M.dtype)
        made.append(replace(one, token_M=token_M, candidate_MH=features.clone()))
    return made


def run(own: Canary, given: list[DraftRequest]) -> dict[str, Any]:
    for one in given:
        own.saw(one)
        while own.has_work:
            own.work()
    told: dict[str, Any] = json.loads(own.told())
    return told


def test_the_scores_are_those_of_the_learner(
    spec: Eagle3Spec, serving: Eagle3Head, corrupted: Path, likely: list[DraftRequest], tmp_path: Path
) -> None:
    learner = Learner(spec, str(FOLDER), str(tmp_path), serving.embed, ids_of(serving))
    other = ScoredHead.load(spec, str(corrupted), serving.embed).network
    for one in likely:
        learner.saw(one)
    held = [window for own in learner.reservoir.held.values() for window in own]
    windows = [*learner.reservoir.learnt, *learner.reservoir.fresh, *held]
    assert len(windows) == NUM
    told = run(canary(spec, serving, corrupted), likely)
    for name, head in (("serving", learner._serving), ("candidate", other)):
        mean = sum(learner._score(head, window) for window in windows) / NUM
        assert sum(told[name]["acceptance"]) == pytest.approx(mean, rel=1e-4)
        assert len(told[name]["standard_error"]) == len(told[name]["acceptance"])


def test_a_copy_makes_no_difference_and_a_corrupted_head_is_worse(
    spec: Eagle3Spec, serving: Eagle3Head, corrupted: Path, likely: list[DraftRequest]
) -> None:
    same, worse = (run(canary(spec, serving, folder), likely) for folder in (FOLDER, corrupted))
    assert (same["verdict"], same["gain"]) == ("no difference", 0.0)
    assert same["serving"] == same["candidate"] and same["num_tokens"] == worse["num_tokens"] > NUM * 40
    assert worse["verdict"] == "worse" and worse["gain"] < -3 * worse["gain_standard_error"]


def test_a_head_that_computes_no_numbers_is_worse(
    spec: Eagle3Spec, serving: Eagle3Head, likely: list[DraftRequest]
) -> None:
    own = canary(spec, serving, FOLDER)
    assert own._heads is not None
    own._heads[1].network.norm.weight.fill_(torch.nan)
    told = run(own, likely)
    assert told["verdict"] == "worse" and told["candidate"]["acceptance"] == [0.0] * len(told["serving"]["acceptance"])


def test_each_head_reads_its_own_features(spec: Eagle3Spec, serving: Eagle3Head, likely: list[DraftRequest]) -> None:
    wrong = [replace(one, candidate_MH=-one.candidate_MH) for one in likely if one.candidate_MH is not None]
    right, told = (run(canary(spec, serving, FOLDER), given) for given in (likely, wrong))
    assert told["serving"] == right["serving"] and told["verdict"] == "worse"


def test_it_lets_go_after_its_messages_and_its_scores_stay(
    spec: Eagle3Spec, serving: Eagle3Head, likely: list[DraftRequest]
) -> None:
    own = canary(spec, serving, FOLDER, num_steps=3)
    own.saw(replace(likely[0], candidate_MH=None))
    assert own.steps_left == 3 and not own.has_work, "a message without features for it counts for nothing"
    for one in likely[:6]:
        own.saw(one)
    assert own.steps_left == 0 and len(own.reservoir.fresh) == 3 and own._heads is not None
    while own.has_work:
        own.work()
    assert own._heads is None and not own.reservoir.fresh
    told = json.loads(own.told())
    assert told["verdict"] == "too few tokens" and told["num_tokens"] > 100 and told["steps_left"] == 0


def test_a_verdict_takes_enough_windows_and_three_standard_errors() -> None:
    assert FEWEST_WINDOWS <= NUM <= CANARY_WINDOWS
    assert verdict(1.0, 0.1, FEWEST_WINDOWS - 1) == "too few tokens"
    told = [verdict(mean, 0.1, FEWEST_WINDOWS) for mean in (0.31, 0.29, -0.29, -0.31)]
    assert told == ["better", "no difference", "no difference", "worse"]
