"""Warm-up: the verifier runs every kernel, the drafter drafts every kind of node, and neither leaves visible state."""

from __future__ import annotations

import pytest
import torch

from drafter.drafter import Drafter, warm_up_requests
from drafter.proposers.base import DraftModelProposer, FeatureProposer, shared_vocabulary
from drafter.tree.policy import make_tree_policy
from tests.support import checkpoints
from tests.support.engines import AUTO, BUNDLED, CHAIN, DYNAMIC, STATIC, bundled
from verifier.target import Target
from verifier.warm_up import warm_up
from workers.kernels import reference
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.settings import Rule
from workers.types import NodeKind


@pytest.mark.parametrize("tree", [DYNAMIC, AUTO, CHAIN, STATIC], ids=["dynamic", "auto", "chain", "static"])
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_warm_up_drafts_every_kind_of_node_on_the_null_page(method, tree):
    config = bundled(tree, method=method)
    proposer: FeatureProposer | DraftModelProposer
    if method == "eagle3":
        head = checkpoints.load_eagle3(BUNDLED / "eagle3", BUNDLED / "target")
        kv = head.new_kv_pool(8 * config.page_size)
        proposer = FeatureProposer(head, kv, config.page_size, config.tree_rows)
    else:
        model = load_decoder(BUNDLED / "draft", read_spec(BUNDLED / "draft"))
        kv = model.new_kv_pool(8 * config.page_size)
        proposer = DraftModelProposer(model, shared_vocabulary(model, 2048), kv, config.page_size)
    with torch.inference_mode():
        kv.data.fill_(7.0)
    requests = warm_up_requests(config, proposer.width)
    replies = [Drafter(proposer, make_tree_policy(tree)).draft(request) for request in requests]
    assert [int(request.rule_B) for request in requests] == [Rule.COUPLED, Rule.COUPLED, Rule.TRAVERSAL]
    for reply in replies:
        num_nodes = len(reply.trees.token_N) - 1
        assert num_nodes == tree.num_speculative_tokens or (tree is AUTO and num_nodes > 0)
    kinds = [set(reply.trees.kind_N[1:].tolist()) for reply in replies]
    assert kinds == [{NodeKind.DETERMINISTIC}, {NodeKind.COUPLED}, {NodeKind.SAMPLED}]
    pages = kv.data.unflatten(1, (8, config.page_size))
    assert (pages[:, 0] != 7.0).any()
    assert (pages[:, 1:] == 7.0).all()


def test_the_verifier_warms_up_copies_draws_and_truncation(monkeypatch):
    ran = set()

    def noted(name):
        kernel = getattr(reference, name)

        def run(*args, **options):
            ran.add(name)
            return kernel(*args, **options)

        return run

    names = {"plan", "tree_attention", "copy_slots", "coupled_argmax", "truncation_threshold"}
    for name in names:
        monkeypatch.setattr(reference, name, noted(name))
    config, model = bundled(DYNAMIC), load_decoder(BUNDLED / "target", read_spec(BUNDLED / "target"))
    kv = model.new_kv_pool(9 * config.page_size)
    warm_up(Target(model, kv, config.page_size, None, None), config, 9)
    assert ran == names
