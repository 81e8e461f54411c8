"""Admission sets a request's acceptance rule and tree limits, or rejects it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from verifier.admission import rejection_reason, request_of
from verifier.scheduler import Limits
from verifier.speculation import rule_of
from workers.comm.ipc import Speculation, Submit
from workers.config import AcceptanceConfig, DraftConfig, EngineConfig, PruneConfig, TreeConfig
from workers.settings import Constraints, Rule, SamplingSettings, TreeLimits

REJECTION, COUPLED = Speculation(acceptance="rejection"), Speculation(acceptance="coupled")
TREE = TreeConfig(num_speculative_tokens=6, prune=PruneConfig(auto=True, min_prob=0.2, path_prob=0.1))


def draft(method: Any = "eagle3", tree: TreeConfig = TREE, **acceptance: Any) -> DraftConfig:
    return DraftConfig(
        method=method, model_path="head", tree=tree, acceptance=AcceptanceConfig(kind="rejection", **acceptance)
    )


def submit(speculation: Speculation = REJECTION, temperature: float = 1.0, max_tokens: int = 9) -> Submit:
    sampling = SamplingSettings(temperature=temperature)
    return Submit(id=1, prompt=[1, 2], max_tokens=max_tokens, sampling=sampling, speculation=speculation)


@pytest.mark.parametrize(
    ("asked", "service", "rule"),
    [
        (submit(), draft(), Rule.TRAVERSAL),
        (submit(), draft(rejection_method="recursive"), Rule.RECURSIVE),
        (submit(), draft(sample_method="hybrid"), Rule.TRAVERSAL),
        (submit(), draft(sample_method="greedy"), Rule.TARGET_ONLY),
        (submit(), draft("ngram"), Rule.TARGET_ONLY),
        (submit(), draft("draft_model"), Rule.TRAVERSAL),
        (submit(temperature=0.0), draft(), Rule.TARGET_ONLY),
        (submit(temperature=0.0), draft(min_temperature=0.0), Rule.TARGET_ONLY),
        (submit(temperature=0.29), draft(min_temperature=0.3), Rule.TARGET_ONLY),
        (submit(temperature=0.3), draft(min_temperature=0.3), Rule.TRAVERSAL),  # a value equal to the minimum is warm
        (submit(), draft(draft_probs=False), Rule.TARGET_ONLY),
        (submit(replace(REJECTION, draft_probs=True)), draft(draft_probs=False), Rule.TRAVERSAL),
        (submit(replace(REJECTION, draft_probs=False)), draft(), Rule.TARGET_ONLY),
        (submit(replace(REJECTION, enabled=False)), draft(), Rule.COUPLED),
        (submit(), None, Rule.COUPLED),
        (submit(COUPLED), draft(), Rule.COUPLED),
        (submit(Speculation()), draft(), Rule.TRAVERSAL),
        (submit(Speculation()), replace(draft(), acceptance=AcceptanceConfig()), Rule.COUPLED),
        (submit(REJECTION), replace(draft(), acceptance=AcceptanceConfig()), Rule.TRAVERSAL),
    ],
)
def test_the_rule_is_the_requests_where_service_and_temperature_allow_it(
    asked: Submit, service: DraftConfig | None, rule: Rule
) -> None:
    assert rule_of(asked, service) == rule
    assert request_of(asked, EngineConfig(model_path="target", draft=service)).rule == rule


@pytest.mark.parametrize(
    ("asked", "limits"),
    [
        ({}, TreeLimits(num_speculative_tokens=6, auto=True, min_prob=0.2, path_prob=0.1)),
        ({"num_speculative_tokens": 2}, TreeLimits(num_speculative_tokens=2, auto=True, min_prob=0.2, path_prob=0.1)),
        ({"num_speculative_tokens": 0}, TreeLimits(num_speculative_tokens=0, auto=True, min_prob=0.2, path_prob=0.1)),
        ({"num_speculative_tokens": 7}, TreeLimits(num_speculative_tokens=6, auto=True, min_prob=0.2, path_prob=0.1)),
        ({"auto": False}, TreeLimits(num_speculative_tokens=6, auto=False, min_prob=0.2, path_prob=0.1)),
        ({"rules": {"min_prob": 0.0}}, TreeLimits(num_speculative_tokens=6, auto=True, min_prob=0.0, path_prob=0.1)),
        ({"rules": {"path_prob": 0.0}}, TreeLimits(num_speculative_tokens=6, auto=True, min_prob=0.2, path_prob=0.0)),
        ({"enabled": False}, None),
    ],
)
def test_a_request_narrows_the_services_trees(asked: dict[str, Any], limits: TreeLimits | None) -> None:
    config = EngineConfig(model_path="target", draft=draft())
    assert request_of(submit(Speculation(**asked)), config).limits == limits


@pytest.mark.parametrize(("max_tokens", "is_drafted"), [(2, False), (3, True)])
def test_a_request_gets_drafts_if_a_step_can_give_two_of_its_tokens(max_tokens: int, is_drafted: bool) -> None:
    config = EngineConfig(model_path="target", draft=draft())
    assert (request_of(submit(max_tokens=max_tokens), config).limits is not None) == is_drafted


def test_a_request_that_fits_exactly_is_accepted() -> None:
    config = EngineConfig(model_path="target")
    limits = Limits(max_num_seqs=1, max_num_batched_tokens=64, page_size=4)

    def refused(prompt: int, max_tokens: int, max_model_len: int = 100, num_pages: int = 2) -> bool:
        request = request_of(Submit(id=1, prompt=[1] * prompt, max_tokens=max_tokens), config)
        return rejection_reason(request, max_model_len, limits, num_pages) is not None

    assert not refused(6, 2, max_model_len=8) and refused(6, 3, max_model_len=8, num_pages=9)
    assert not refused(7, 1, num_pages=2), "seven tokens and a root fill two pages"
    assert refused(8, 1, num_pages=2)


def test_every_token_of_a_step_is_counted() -> None:
    constraints = Constraints(repetition_penalty=1.2)
    asked = Submit(id=1, prompt=[7, 1], max_tokens=9, sampling=SamplingSettings(constraints=constraints))
    request = request_of(asked, EngineConfig(model_path="target"))
    request.append([3, 3, 1])
    logits_state = request.logits_state((0,))
    assert logits_state is not None and logits_state.num_output == 3
    assert (logits_state.counts.id_C.tolist(), logits_state.counts.count_C.tolist()) == ([1, 3, 7], [1, 2, 0])
