"""DSpark and DFlash heads equal a plain float64 implementation of the published formulas, and refuse other heads.

The proposer is fed as the engine feeds it (scattered pages, chunks, two requests), then asked for tree levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drafter.drafter import Drafter, warm_up_requests
from drafter.proposers.base import head_graphs
from drafter.proposers.one_pass import OnePassProposer, ScratchPages, block_growth, block_tree_graphs
from drafter.tree.frontier import Frontier
from drafter.tree.policy import make_tree_policy
from tests.support import checkpoints
from tests.support.oracles import paths_of
from tests.support.plain_block import PlainBlock
from workers.config import DraftConfig, EngineConfig, PruneConfig, TreeConfig
from workers.models.block_format import read_block_spec
from workers.models.config_json import read_config
from workers.models.draft_methods import METHODS, read_draft_spec
from workers.models.fusion import load_fusion
from workers.models.readers import check_model, read_spec
from workers.settings import SamplingSettings
from workers.types import DraftRequest, SamplingBatch, TreeBatch

torch.set_num_threads(1)

PAGE, PAGES = 4, 12
TOLERANCE = 1e-5


HEADS: dict[str, dict[str, Any]] = {
    "DSpark of DeepSpec": {},
    "DSpark of DeepSpec, a block of 16 in five layers": {"block_size": 16, "num_hidden_layers": 5, "head_dim": 16},
    "DSpark of DeepSpec, gated": {"markov_head_type": "gated", "rope_theta": 5e4},
    "DSpark of SpecForge": {"style": "specforge"},
    "DSpark of SpecForge with some of the target's rows": {"style": "specforge", "draft_vocab_size": 40},
    "DSpark of speculators": {"style": "speculators", "from_anchor": True, "draft_vocab_size": 40},
    "DSpark of speculators, own slots": {"style": "speculators", "from_anchor": False, "draft_vocab_size": 40},
    "DSpark of speculators with windows": {
        "style": "speculators",
        "from_anchor": True,
        **checkpoints.sliding(5, "sliding_attention", "full_attention"),
    },
    "DFlash of DeepSpec": {"markov_rank": 0},
    "DFlash of z-lab": {"style": "z-lab", "markov_rank": 0, "block_size": 8},
}
OWN_SLOT = ("DSpark of speculators, own slots", "DFlash of z-lab")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_model(tmp_path_factory.mktemp("target"), "qwen3", head_dim=8)


def feed(histories: list[list[int]], features: list[Tensor], start: list[int], stop: list[int]) -> DraftRequest:
    """Feed tokens start .. stop - 1 of each request, each with the feature of the token before it."""
    nothing = {name: torch.empty(0) for name in DraftRequest.__dataclass_fields__}
    spans = list(zip(histories, features, start, stop, strict=True))
    is_root = [end == len(history) for history, _, _, end in spans]
    return DraftRequest(
        **nothing
        | {
            "offsets": torch.tensor(np.cumsum([0, *(b - a for *_, a, b in spans)]), dtype=torch.int32),
            "start_B": torch.tensor(start, dtype=torch.int32),
            "token_M": torch.tensor([t for history, _, a, b in spans for t in history[a:b]], dtype=torch.int32),
            "page_table_BP": torch.tensor([[9, 2, 11, 5], [4, 8, 3, 10]], dtype=torch.int32),
            "num_nodes_B": torch.tensor(is_root, dtype=torch.int32) * 4,
            "features_MH": torch.cat([f[a - 1 : b - 1] for _, f, a, b in spans]),
        }
    )


def proposer_of(
    path: Path, target: Path, *, is_padded: bool = False, num_pages: int = PAGES, page_size: int = PAGE
) -> OnePassProposer:
    """is_padded: whether passes run as in graphs, context rows among them."""
    head = checkpoints.load_block(path, target)
    scratch = ScratchPages(num_pages, page_size, head.spec.block_size)
    kv = head.new_kv_pool((num_pages + 2 * scratch.per_request) * page_size)
    with torch.inference_mode():
        kv.data.fill_(7.0)  # reading slot 0 or an unwritten slot changes the result
    config = EngineConfig(model_path=str(target), page_size=page_size, max_num_seqs=2, max_model_len=16)
    graphs = head_graphs(head, kv, config, scratch.per_request, is_captured=False) if is_padded else None
    return OnePassProposer(head, kv, page_size, scratch, graphs)


@pytest.mark.parametrize("is_padded", [False, True], ids=["as it is", "padded as in graphs"])
@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_a_head_equals_the_published_formulas(tmp_path: Path, target: Path, name: str, is_padded: bool) -> None:
    """Prompts in chunks, then two steps in which both requests grow a tree behind more committed tokens."""
    path = checkpoints.write_block(tmp_path, **HEADS[name])
    plain = PlainBlock(path, target, from_anchor=name not in OWN_SLOT)
    spec = read_block_spec(path, read_spec(target))
    assert spec.max_depth == spec.block_size - (name in OWN_SLOT)
    assert spec.has_marginals is ("DFlash" in name)
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (15, 11)]
    taps = [torch.randn(len(history) - 1, 128, generator=generator) for history in tokens]
    fusion = load_fusion(path, spec)
    features = [fusion(own) for own in taps]
    contexts = [plain.fuse(own) for own in taps]
    for own, expected in zip(features, contexts, strict=True):
        assert_close(own, expected)

    proposer = proposer_of(path, target, is_padded=is_padded)
    assert proposer.extend(feed(tokens, features, [1, 1], [7, 3])).shape == (0, len(plain.target_ids))
    start = [7, 3]
    for stop in ([12, 8], [15, 11]):
        histories = [own[:end] for own, end in zip(tokens, stop, strict=True)]
        roots = proposer.extend(feed(histories, features, start, stop))
        start = stop
        ask = [(own[-1], context[: len(own) - 1]) for own, context in zip(histories, contexts, strict=True)]
        for g in range(2):
            assert_close(roots[g], plain.logits(*ask[g], []))
        # Request 0: root -> 1, 2; 2 -> 3; 1 -> 4. Request 1: root -> 1 -> 2.
        first = proposer.expand(frontier(1, [0, 0, 1], [17, 60, 5]))
        for row, (g, below) in enumerate([(0, [17]), (0, [60]), (1, [5])]):
            assert_close(first[row], plain.logits(*ask[g], below))
        second = proposer.expand(frontier(2, [0, 0, 1], [41, 3, 90]))
        for row, (g, below) in enumerate([(0, [60, 41]), (0, [17, 3]), (1, [5, 90])]):
            assert_close(second[row], plain.logits(*ask[g], below))
        last = spec.max_depth - 1
        deepest = proposer.expand(frontier(last, [1], [33]))
        assert_close(deepest[0], plain.logits(*ask[1], [9] * (last - 1) + [33]))


def frontier(depth: int, request: list[int], token: list[int]) -> Frontier:
    """Return nodes of one level; a look-up needs neither their rows nor their ancestors."""
    unread = np.zeros(len(request), dtype=np.int64)
    return Frontier(depth, np.array(request), unread, unread, np.array(token), unread)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Random weights give logits of about 20, so the tolerance is relative to the largest."""
    scale = expected[expected.isfinite()].abs().max()
    torch.testing.assert_close(actual.double() / scale, expected / scale, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["DSpark of DeepSpec", "DSpark of speculators, own slots", "DFlash of z-lab"])
def test_sampled_children_come_with_the_published_law_at_every_node(tmp_path: Path, target: Path, name: str) -> None:
    """The law that travels with a tree, by which `rejection` tests children, is softmax(base + bias) of each parent."""
    path = checkpoints.write_block(tmp_path, **HEADS[name])
    plain = PlainBlock(path, target, from_anchor=name not in OWN_SLOT)
    proposer, spec = proposer_of(path, target), read_block_spec(path, read_spec(target))
    config = EngineConfig(
        model_path=str(target), draft=DraftConfig(method="dspark", model_path=str(path)), page_size=PAGE
    )
    sampled = warm_up_requests(config, proposer.width)[-1]
    tokens, taps = [3, 40, 17, 60, 5], torch.randn(4, 128, generator=torch.Generator().manual_seed(1))
    sampled = replace(
        sampled,
        offsets=torch.tensor([0, 4], dtype=torch.int32),
        token_M=torch.tensor(tokens[1:], dtype=torch.int32),
        page_table_BP=torch.tensor([[9, 2, 11]], dtype=torch.int32),
        features_MH=load_fusion(path, spec)(taps),
        sampling=SamplingBatch.stack([SamplingSettings(temperature=4.0, seed=7)]),
    )
    is_leafy = spec.has_marginals
    policy = make_tree_policy(TreeConfig(), has_leaf_siblings=is_leafy)
    reply = Drafter(proposer, policy, max_depth=spec.max_depth).draft(sampled)
    assert reply.probs is not None and reply.trees.depth_N.max() > 1
    paths = paths_of(reply.trees)
    seen = 0
    for row, below in enumerate(paths):
        begin, end = reply.probs.offsets[row : row + 2].tolist()
        if begin == end:
            continue
        expected = (plain.logits(tokens[-1], plain.fuse(taps), list(below)) / 4).softmax(-1)
        q = torch.zeros(96, dtype=torch.float64)
        weight = reply.probs.weight_S[begin:end].double()
        q[reply.probs.id_S[begin:end].long()] = weight / weight.sum()
        torch.testing.assert_close(q[plain.target_ids], expected, atol=1e-4, rtol=0)
        seen += 1
    assert seen > 2
    assert has_leaf_siblings(reply.trees) is is_leafy


def has_leaf_siblings(trees: TreeBatch) -> bool:
    """Return whether no depth of a tree has two nodes with children."""
    inner = set(trees.parent_N[1:].tolist())
    return len(inner) == len({int(trees.depth_N[row]) for row in inner})


TREE_HEADS = ["DSpark of DeepSpec", "DSpark of DeepSpec, gated", "DSpark of speculators", "DFlash of z-lab"]


@pytest.mark.parametrize("name", TREE_HEADS)
def test_trees_grown_on_a_device_equal_those_grown_level_by_level(tmp_path: Path, target: Path, name: str) -> None:
    """Two requests at T = 0 and 1, and a padding request; then the second alone, with a smaller tree."""
    pytest.importorskip("triton")
    from tests.drafter.tree import test_tree_graphs as tree_cases
    from tests.support.kernel_twins import growth_twins

    path = checkpoints.write_block(tmp_path, **HEADS[name])
    by_level, at_once = (proposer_of(path, target, num_pages=40, page_size=tree_cases.PAGE) for _ in range(2))
    has_leaves, head = "DFlash" in name, at_once._head
    tree = tree_cases.TREE
    draft = DraftConfig(method="dspark", model_path=str(path), tree=tree)
    config = EngineConfig(model_path=str(target), draft=draft, max_num_seqs=3, max_model_len=64)
    policy, generator = make_tree_policy(tree, has_leaf_siblings=has_leaves), torch.Generator().manual_seed(5)
    with growth_twins():
        at_once.tree_graphs = block_tree_graphs(head, config, has_leaf_siblings=has_leaves, is_captured=False)
        at_once.expand = None  # type: ignore[assignment, method-assign]
        for step, fed in (({0: (4, 14, 4), 1: (9, 14, 4)}, [1, 1]), ({1: (2, 5, 3)}, [5, 10])):
            asked = tree_cases.message(step, fed, head.width, generator, "cpu")
            asked = replace(asked, token_M=asked.token_M % 96)
            expected, got = (Drafter(proposer, policy).draft(asked) for proposer in (by_level, at_once))
            for field in TreeBatch.__slots__:
                torch.testing.assert_close(getattr(got.trees, field), getattr(expected.trees, field), atol=1e-4, rtol=0)
            assert len(got.trees.token_N) > 5
            assert has_leaf_siblings(got.trees) or not has_leaves


def grown_both_ways(
    tmp_path: Path, target: Path, name: str, num_candidates: int, nodes: int, temperatures: tuple[float, float]
) -> Iterator[tuple[TreeBatch, TreeBatch]]:
    """Yield the trees of 20 messages, grown level by level and on the host at once."""
    path = checkpoints.write_block(tmp_path, **HEADS[name])
    by_level, at_once = (proposer_of(path, target, num_pages=40, page_size=16) for _ in range(2))
    has_leaves, head = "DFlash" in name, at_once._head
    tree = TreeConfig(num_speculative_tokens=nodes, max_depth=5, max_children=3, prune=PruneConfig(auto=True))
    at_once.tree_graphs = block_growth(head, tree, has_leaf_siblings=has_leaves, num_candidates=num_candidates)
    at_once.expand = None  # type: ignore[assignment, method-assign]
    from tests.drafter.tree.test_tree_graphs import message

    policy, generator = make_tree_policy(tree, has_leaf_siblings=has_leaves), torch.Generator().manual_seed(5)
    for seed in range(20):
        asked = message({0: (4, nodes, 5), 1: (9, nodes - 1, 4)}, [1, 1], head.width, generator, "cpu")
        sampling = SamplingBatch.stack([SamplingSettings(temperature=t, seed=seed) for t in temperatures])
        empty = torch.zeros(0, dtype=torch.uint8)
        asked = replace(asked, token_M=asked.token_M % 96, sampling=sampling, constraints_U=empty)
        expected, got = (Drafter(proposer, policy).draft(asked).trees for proposer in (by_level, at_once))
        yield expected, got


def weights_of(trees: TreeBatch) -> dict[tuple[int, ...], float]:
    """Return each node's weight by the number of its tree and the tokens from the root to it."""
    paths = [(request, *path) for request in range(2) for path in paths_of(trees, request)]
    return dict(zip(paths, trees.weight_N.tolist(), strict=True))


@pytest.mark.parametrize("name", ["DSpark of DeepSpec", "DSpark of speculators", "DFlash of z-lab"])
def test_trees_grown_on_the_host_at_once_equal_those_grown_level_by_level(
    tmp_path: Path, target: Path, name: str
) -> None:
    """With every token a candidate."""
    for expected, got in grown_both_ways(tmp_path, target, name, 96, 14, (0.0, 1.0)):
        assert weights_of(got) == pytest.approx(weights_of(expected), abs=1e-4)
        assert len(got.token_N) > 20
        assert (got.depth_N.diff()[got.parent_N[1:] >= 0] >= 0).all(), "rows are not breadth-first"


def test_few_candidates_change_little(tmp_path: Path, target: Path) -> None:
    """The biases of this head are as large as its logits; those of trained ones are far smaller."""
    shared = [
        len(weights_of(expected).keys() & weights_of(got).keys()) / len(expected.token_N)
        for expected, got in grown_both_ways(tmp_path, target, "DSpark of DeepSpec", 48, 8, (0.0, 0.7))
    ]
    assert 0.5 < sum(shared) / len(shared) < 1


@pytest.mark.parametrize("name", ["DSpark of DeepSpec", "DFlash of z-lab"])
@pytest.mark.parametrize("temperature", [0.0, 4.0])
def test_a_large_tree_grows_to_the_block_s_depth_and_no_further(
    tmp_path: Path, target: Path, name: str, temperature: float
) -> None:
    path = checkpoints.write_block(tmp_path, **HEADS[name])
    proposer = proposer_of(path, target)
    spec = read_block_spec(path, read_spec(target))
    tree = TreeConfig(num_speculative_tokens=60, max_depth=20, max_children=4)
    config = EngineConfig(
        model_path=str(target),
        draft=DraftConfig(method="dspark", model_path=str(path), tree=tree),
        page_size=PAGE,
        max_model_len=64,
    )
    asked = warm_up_requests(config, proposer.width)[0]
    asked = replace(asked, sampling=SamplingBatch.stack([SamplingSettings(temperature=temperature, seed=7)]))
    policy = make_tree_policy(tree, has_leaf_siblings=spec.has_marginals)
    trees = Drafter(proposer, policy, max_depth=spec.max_depth).draft(asked).trees
    assert trees.depth_N.max() == spec.max_depth == 7
    assert has_leaf_siblings(trees) is spec.has_marginals
    assert spec.mask_token_id not in trees.token_N[1:].tolist()


def test_a_wrong_layout_and_a_shifted_tap_change_the_result(tmp_path: Path, target: Path) -> None:
    """Neither raises an error in an engine: drafts are only accepted less often."""
    path = checkpoints.write_block(tmp_path, style="speculators", from_anchor=True)
    right = PlainBlock(path, target, from_anchor=True)
    wrong = PlainBlock(path, target, from_anchor=False)
    context = right.fuse(torch.randn(5, 128, generator=torch.Generator().manual_seed(0)))
    assert not torch.allclose(right.logits(7, context, []), wrong.logits(7, context, []), atol=0.1)
    spec = read_spec(target)
    for style in ("deepspec", "z-lab", "specforge", "speculators"):
        head = checkpoints.write_block(tmp_path / style, style=style, taps=(0, 2), from_anchor=True)
        assert read_block_spec(head, spec).tap_layers == (0, 2), style


@pytest.mark.parametrize(
    ("written", "num_tokens", "expected"), [(None, 7, True), (None, 6, False), (False, 7, False), (True, 6, True)]
)
def test_the_slots_of_speculators_heads(
    tmp_path: Path, target: Path, written: bool | None, num_tokens: int, expected: bool
) -> None:
    path = checkpoints.write_block(tmp_path, style="speculators", from_anchor=written)
    proposals = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}]}
    checkpoints.edit_config(path, speculators_config=proposals)
    assert read_block_spec(path, read_spec(target)).from_anchor is expected


def edited(**changes: Any) -> Callable[[Path], None]:
    return lambda path: checkpoints.edit_config(path, **changes)


@pytest.mark.parametrize(
    ("options", "damage", "message"),
    [
        ({}, edited(block_size=None), "block_size in config.json is None; for this target it must be 2 to 64"),
        ({}, edited(mask_token_id=96), "mask_token_id in config.json is 96; for this target it must be 0 to 95"),
        ({}, edited(target_layer_ids=[0, 2]), r"its layer ids \[0, 2\] do not fit a target of 3 layers"),
        ({}, edited(markov_head_type="rnn"), "markov_head_type 'rnn' is not supported; supported: vanilla, gated"),
        ({}, edited(final_logit_softcapping=30.0), "final_logit_softcapping 30.0 is not supported; supported: none"),
        ({}, edited(vocab_size=97), "for a target with a vocabulary of 97, this one has 96"),
        ({}, edited(target_hidden_size=65), "for a target with a hidden size of 65, this one has 64"),
        ({}, edited(markov_rank=8), r"markov_w1.weight is \(96, 12\), config.json asks for \(96, 8\): .*markov_rank"),
        ({"style": "specforge"}, edited(dflash_config={"use_swa": True}), "dflash_config has use_swa, which is not"),
        ({"style": "speculators"}, edited(), "does not say which token a slot predicts; write sample_from_anchor"),
        (
            {"style": "speculators", "from_anchor": True, **checkpoints.sliding(4, *["sliding_attention"] * 2)},
            edited(sliding_window_non_causal=True),
            "slots that see later slots within a sliding window are not supported",
        ),
        (
            {},
            lambda path: checkpoints.edit_weights(path, remove=("layers.1.self_attn.q_norm.weight",)),
            r"layers\.1\.self_attn\.q_norm\.weight",
        ),
        ({}, lambda path: checkpoints.edit_weights(path, add={"x": torch.ones(1)}), "unknown tensors: x"),
        ({}, lambda path: checkpoints.edit_weights(path, remove=("hidden_norm.weight",)), "'hidden_norm.weight' is"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, target: Path, options: dict[str, Any], damage: Callable[[Path], None], message: str
) -> None:
    path = checkpoints.write_block(tmp_path, **options)
    damage(path)
    with pytest.raises(ValueError, match=message):
        load_fusion(path, checkpoints.load_block(path, target).spec)


def test_a_head_is_told_which_method_reads_it(tmp_path: Path, target: Path) -> None:
    dspark = checkpoints.write_block(tmp_path / "dspark")
    dflash = checkpoints.write_block(tmp_path / "dflash", style="z-lab", markov_rank=0)
    eagle3 = checkpoints.write_eagle3(tmp_path / "eagle3", style="speculators")
    wrong = [
        (dspark, ("eagle", "eagle3", "dflash"), "write method 'dspark'"),
        (dflash, ("eagle", "eagle3", "dspark"), "write method 'dflash'"),
        (eagle3, ("dspark", "dflash"), "is not a block head that method"),
    ]
    for path, methods, message in wrong:
        for method in methods:
            check = METHODS[method].check
            assert check is not None
            with pytest.raises(ValueError, match=message):
                check(read_config(path), path)
    with pytest.raises(ValueError, match='"method": "dspark"'):
        check_model(read_config(dspark), dspark)


def test_a_fixed_tree_is_no_deeper_than_the_block(tmp_path: Path, target: Path) -> None:
    path = checkpoints.write_block(tmp_path)
    for tree, fits in (
        (TreeConfig(kind="chain", num_speculative_tokens=7), True),
        (TreeConfig(kind="chain", num_speculative_tokens=8), False),
        (TreeConfig(max_depth=9), True),  # drafts no deeper than it can
    ):
        draft = DraftConfig(method="dspark", model_path=str(path), tree=tree)
        if fits:
            assert read_draft_spec(draft, read_spec(target)) is not None
            continue
        with pytest.raises(ValueError, match="drafts 7 tokens in one pass, and the tree is 8 deep: write a chain or"):
            read_draft_spec(draft, read_spec(target))
