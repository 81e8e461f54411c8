"""The trees of real engines over HTTP: they agree with the statistics and change no answer, under every rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.local_service import local_service
from secateur import Client
from secateur.config import EngineArgs
from secateur.responses import CompletionResponse, SpeculativeTree

pytestmark = pytest.mark.slow

PROMPT = "def quicksort(items):\n"
HEAD = {"method": "eagle3", "model": "bundled:eagle3", "num_speculative_tokens": 12}
SERVICES: dict[str, dict[str, Any]] = {
    "one process each": {"speculative_config": HEAD},
    "two ranks each": {
        "tensor_parallel_size": 2,
        "speculative_config": {**HEAD, "draft_tensor_parallel_size": 2},
    },
    "draft model": {"speculative_config": {"method": "draft_model", "model": "bundled:draft"}},
    "n-grams": {"speculative_config": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}},
}
THRESHOLDS = {"tree_prune": "thresholds", "tree_prune_min_prob": 0.2, "tree_prune_path_prob": 0.05}
HOW: dict[str, dict[str, Any] | None] = {
    "auto": None,
    "off": {"enabled": False},
    "thresholds": THRESHOLDS,
    "rejection": {**THRESHOLDS, "acceptance": "rejection"},
    "target only": {**THRESHOLDS, "acceptance": "rejection", "enable_draft_probs": False},
}


ASKED = [("auto", 0), *((how, 1.0) for how in HOW)]
BRIEF = {
    "one process each": {"auto", "thresholds"},
    "two ranks each": {"rejection"},
    "draft model": {"target only"},
    "n-grams": {"off", "rejection"},
}
CELLS = [
    pytest.param(service, how, temperature, marks=[] if how in brief else pytest.mark.full)
    for service, brief in BRIEF.items()
    for how, temperature in ASKED
]
"""Every service with each way to speculate; without `--full` each service, and each way, at least once."""


@pytest.fixture(scope="module")
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    args = EngineArgs.load({"port": 0, "device": "cpu", "max_num_seqs": 4, **SERVICES[request.param]})
    with local_service(args) as url, Client(url) as client:
        yield client


def ask(client: Client, how: str, **more: Any) -> CompletionResponse:
    asked = {"max_tokens": 32, "seed": 5, "speculative": HOW[how], "return_speculative_stats": True}
    return client.complete(PROMPT, **asked, **more)


def count(trees: list[SpeculativeTree], *statuses: str) -> int:
    return sum(node.status in statuses for tree in trees for node in tree.nodes)


@pytest.mark.parametrize(("client", "how", "temperature"), CELLS, indirect=["client"])
def test_trees_agree_with_the_statistics_and_change_no_answer(client: Client, how: str, temperature: float) -> None:
    plain = ask(client, how, temperature=temperature)
    seen = ask(client, how, temperature=temperature, return_speculative_trees=True)
    trees, stats = seen.choices[0].speculative_trees, seen.speculative
    assert seen.text == plain.text == "".join(token.text for tree in trees for token in tree.tokens)
    assert stats.num_verified == count(trees, "accepted", "rejected")
    origins = [token.origin for tree in trees for token in tree.tokens]
    assert stats.num_accepted_tokens == len(origins) - origins.count("bonus")
    assert stats.num_accepted_copied_tokens == origins.count("copied")
    for tree in trees:
        path = [node for node in tree.nodes if node.status == "accepted"]
        emitted = [token for token in tree.tokens if token.origin != "bonus"]
        assert [node.token_id for node in path][: len(emitted)] == [token.token_id for token in emitted]
        assert [node.depth for node in path] == list(range(1, len(path) + 1))
    if how == "off":
        assert not count(trees, "accepted", "rejected", "pruned")
    by = {node.pruned_by for tree in trees for node in tree.nodes} - {None}
    assert by <= ({"cost"} if how == "auto" else {"min_prob", "path_prob"})
