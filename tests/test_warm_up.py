"""What a drafter does before anybody asks: it drafts every kind of node, and leaves nothing behind that is read."""

from __future__ import annotations

import pytest
import torch
from engines import AUTO, BUNDLED, CHAIN, DYNAMIC, STATIC, bundled

from drafter.eagle3 import Eagle3Head
from drafter.propose import DraftModelProposer, FeatureProposer
from drafter.shape import make_shape
from drafter.worker import draft, nobody
from workers.checkpoint import read_spec
from workers.model import Decoder
from workers.types import NodeKind, Rule


@pytest.mark.parametrize("tree", [DYNAMIC, AUTO, CHAIN, STATIC], ids=["dynamic", "auto", "chain", "static"])
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_every_kind_of_node_is_drafted_for_nobody_on_the_null_page(method, tree):
    config = bundled(tree, method=method)
    proposer: FeatureProposer | DraftModelProposer
    if method == "eagle3":
        head = Eagle3Head.load(BUNDLED / "eagle3", BUNDLED / "target")
        kv = head.new_kv_pool(8 * config.page_size)
        proposer = FeatureProposer(head, kv, config.page_size, config.tree_rows)
    else:
        model = Decoder.load(BUNDLED / "draft", read_spec(BUNDLED / "draft"))
        kv = model.new_kv_pool(8 * config.page_size)
        proposer = DraftModelProposer(model, kv, config.page_size)
    with torch.inference_mode():
        kv.data.fill_(7.0)
    requests = nobody(config, proposer.width)
    replies = [draft(request, proposer, make_shape(tree)) for request in requests]
    assert [int(request.rule_B) for request in requests] == [Rule.COUPLED, Rule.COUPLED, Rule.TRAVERSAL]
    for reply in replies:
        num_nodes = len(reply.trees.token_N) - 1
        assert num_nodes == tree.num_nodes or (tree is AUTO and num_nodes > 0)
    kinds = [set(reply.trees.kind_N[1:].tolist()) for reply in replies]
    assert kinds == [{NodeKind.DETERMINISTIC}, {NodeKind.COUPLED}, {NodeKind.SAMPLED}]
    pages = kv.data.unflatten(1, (8, config.page_size))
    assert (pages[:, 0] != 7.0).any()
    assert (pages[:, 1:] == 7.0).all()
