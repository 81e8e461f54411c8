"""In a message with requests of every kind, each gets the same tree as alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from drafter.drafter import Drafter
from drafter.proposers.base import DraftModelProposer, FeatureProposer, Proposer, shared_vocabulary
from drafter.proposers.block import BlockHead
from drafter.proposers.ngram import MatchLengths, NgramProposer
from drafter.proposers.one_pass import OnePassProposer, ScratchPages
from drafter.tree.policy import make_tree_policy
from tests.support import checkpoints
from tests.support.draft_costs import FREE
from tests.support.engines import BUNDLED
from tests.support.oracles import paths_of
from verifier.draft_inputs import DraftInput
from verifier.request import Request
from verifier.step_inputs import StepInputs
from workers.comm.ipc import Submit
from workers.config import TreeConfig
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.settings import Constraints, Rule, SamplingSettings, TreeLimits
from workers.types import DraftReply

torch.set_num_threads(1)

PAGE, NUM_PAGES, TREE = 4, 60, TreeConfig(num_speculative_tokens=7, max_depth=4, max_children=3)


def eagle3() -> FeatureProposer:
    head = checkpoints.load_eagle3(BUNDLED / "eagle3", BUNDLED / "target")
    return FeatureProposer(head, head.new_kv_pool(NUM_PAGES * PAGE), PAGE, 1 + TREE.num_speculative_tokens)


@cache
def block_head() -> BlockHead:
    with TemporaryDirectory() as folder:
        return checkpoints.load_block(checkpoints.write_bigrams(Path(folder), BUNDLED / "target"), BUNDLED / "target")


def dspark() -> OnePassProposer:
    head = block_head()
    scratch = ScratchPages(NUM_PAGES, PAGE, head.spec.block_size)
    num_pages = NUM_PAGES + len(ASKED) * scratch.per_request
    return OnePassProposer(head, head.new_kv_pool(num_pages * PAGE), PAGE, scratch)


def draft_model() -> DraftModelProposer:
    model = load_decoder(BUNDLED / "draft", read_spec(BUNDLED / "draft"))
    return DraftModelProposer(model, shared_vocabulary(model, 2048), model.new_kv_pool(NUM_PAGES * PAGE), PAGE)


def ngram() -> NgramProposer:
    return NgramProposer(MatchLengths(1, 3), 2048, NUM_PAGES, PAGE)


FEW_IDS = Constraints(allowed_token_ids=[5, 6])
PENALTIES = Constraints(frequency_penalty=1.0, repetition_penalty=1.5)
# Rule, sampling, limits, nodes of this step (0 = only fed), depth.
ASKED: list[tuple[Rule, SamplingSettings, TreeLimits, int, int]] = [
    (
        Rule.RECURSIVE,
        SamplingSettings(temperature=1.7, seed=1),
        TreeLimits(num_speculative_tokens=7, min_prob=0.9),
        0,
        0,
    ),
    (Rule.COUPLED, SamplingSettings(temperature=0.0), TreeLimits(num_speculative_tokens=7), 7, 4),
    (Rule.TRAVERSAL, SamplingSettings(seed=3, top_k=9), TreeLimits(num_speculative_tokens=5), 5, 2),
    (
        Rule.COUPLED,
        SamplingSettings(seed=4, constraints=FEW_IDS),
        TreeLimits(num_speculative_tokens=7, path_prob=0.9),
        0,
        0,
    ),
    (
        Rule.TARGET_ONLY,
        SamplingSettings(temperature=0.8, seed=5),
        TreeLimits(num_speculative_tokens=6, path_prob=0.1),
        6,
        4,
    ),
    (
        Rule.COUPLED,
        SamplingSettings(seed=6, constraints=PENALTIES),
        TreeLimits(num_speculative_tokens=7, auto=True),
        7,
        3,
    ),
    (
        Rule.RECURSIVE,
        SamplingSettings(temperature=0.6, seed=7),
        TreeLimits(num_speculative_tokens=3, min_prob=0.2),
        3,
        4,
    ),
]


def requests(has_features: bool) -> list[Request]:
    made = []
    for i, (rule, sampling, limits, _, _) in enumerate(ASKED):
        text = [(i * 37 + j * j) % 11 + 300 for j in range(4 + 3 * i)]
        request = Request(Submit(id=i, prompt=text, max_tokens=20, sampling=sampling), rule, limits, int(has_features))
        request.pages.extend(range(1 + 8 * i, 9 + 8 * i))
        made.append(request)
    return made


def reply(proposer: Proposer, which: list[int], width: int, *, is_even: bool) -> DraftReply:
    """Build a message for some of the requests. is_even: only with rules that n-gram lookup supports."""
    own = [requests(width > 0)[i] for i in which]
    inputs = {r: DraftInput(r.tokens[r.num_fed :], *ASKED[i][3:]) for i, r in zip(which, own, strict=True)}
    if is_even:
        own = [replace_rule(request) for request in own]
    features = [torch.randn(30, width, generator=torch.Generator().manual_seed(i)) for i in which]
    fed = zip(features, inputs.values(), strict=True)
    rows = torch.cat([of[: len(own_input.tokens)] for of, own_input in fed]) if width else None
    return Drafter(proposer, make_tree_policy(TREE)).draft(StepInputs(4, ()).draft_request(inputs, rows, FREE))


def replace_rule(request: Request) -> Request:
    request.rule = Rule.COUPLED if request.rule == Rule.COUPLED else Rule.TARGET_ONLY
    return request


def told(reply: DraftReply, place: int) -> tuple[Any, ...]:
    """Return one tree of a reply without its weights, which rounding may change."""
    rows = slice(*reply.trees.offsets[place : place + 2].tolist())
    pruned = reply.pruned_GD[place].tolist()
    while pruned and not pruned[-1]:
        pruned.pop()
    laws: list[Any] = []
    if reply.probs is not None:
        for row in range(rows.start, rows.stop):
            begin, end = reply.probs.offsets[row : row + 2].tolist()
            laws.append(sorted(reply.probs.id_S[begin:end].tolist()[:3]))
    kinds = reply.trees.kind_N[rows].tolist()
    return (
        reply.trees.token_N[rows.start].item(),
        paths_of(reply.trees, place),
        kinds,
        pruned,
        laws if any(laws) else [],
    )


@pytest.mark.parametrize("make", [eagle3, dspark, draft_model, ngram])
def test_each_request_of_a_message_gets_the_tree_that_it_gets_alone(make: Callable[[], Any]) -> None:
    width = make().width
    together = reply(make(), list(range(len(ASKED))), width, is_even=make is ngram)
    growing = [i for i, asked in enumerate(ASKED) if asked[3]]
    assert len(together.trees.offsets) == len(growing) + 1 and len(together.trees.token_N) > 2 * len(growing)
    for place, i in enumerate(growing):
        alone = reply(make(), [i], width, is_even=make is ngram)
        assert told(together, place) == told(alone, 0), f"request {i}"
