"""Trees grown by Triton's kernels equal those of their torch twin; without a GPU they run in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from drafter.tree.best_first_device import GrowInputs, StaticOptions, grow_on_device
from drafter.tree.device_rows import Candidates, NodeTensors, RowParameters, StaticRows, StaticShape
from drafter.tree.frontier import DraftVocabulary
from drafter.tree.tree_graphs import make_levels
from drafter.tree.triton_growth import TritonLevels
from drafter.tree.triton_rows import TritonStaticRows
from workers.config import TreeConfig
from workers.kernels import fused, reference
from workers.kernels.interpreted import is_interpreted

torch.set_num_threads(1)

DEVICE = "cpu" if is_interpreted() else "cuda"
DEPTH, CHILDREN, WIDTH = 3, 2, 5
PLAIN = dict(
    token=3, position=20, has_noise=0, num_nodes=6, max_depth=DEPTH, min_prob=0, path_prob=0, temperature=1, top_k=0,
    top_p=1, min_p=0, tau=0.6, repetition=1, frequency=0, presence=0, is_auto=1,
)  # fmt: skip
NOISY = PLAIN | dict(has_noise=1, temperature=0.7)
PADDING = dict.fromkeys(PLAIN, 0)
BATCHES = {
    "plain and noisy": [PLAIN, NOISY, PADDING],
    "cold": [PLAIN | dict(temperature=0, tau=0.45)],
    "fewer nodes": [NOISY | dict(num_nodes=1), PLAIN | dict(num_nodes=4, max_depth=1), NOISY | dict(max_depth=2)],
    "thresholds": [PLAIN | dict(min_prob=0.35), NOISY | dict(path_prob=0.2), PLAIN | dict(min_prob=1.0)],
    "thresholds without auto": [
        PLAIN | dict(min_prob=0.35, is_auto=0), NOISY | dict(path_prob=0.2, is_auto=0), PLAIN | dict(min_prob=1.0)
    ],
    "truncated": [
        NOISY | dict(top_k=4), PLAIN | dict(top_p=0.6), NOISY | dict(min_p=0.3), PLAIN | dict(temperature=0, top_k=1)
    ],
    "penalized": [PLAIN | dict(repetition=1.5, presence=0.4), NOISY | dict(frequency=1.0), PLAIN],
}  # fmt: skip
SOME = [
    pytest.param(name, marks=[] if name in ("plain and noisy", "fewer nodes", "thresholds") else pytest.mark.full)
    for name in BATCHES
]
"""All kinds of growth score children in the same kernels, in which truncation and penalties are."""


class Model:
    """A draft model whose logits depend on everything it is given."""

    def __init__(self, vocab_size: int, num_rows: int, flat: bool = False) -> None:
        draw = torch.Generator().manual_seed(vocab_size)
        scale = 0.0 if flat else 1.0
        self.by_token, self.by_feature, self.by_position, self.by_ancestor = (
            (scale * torch.randn(n, vocab_size, generator=draw)).to(DEVICE) for n in (400, WIDTH, 64, num_rows)
        )

    def read(self, token: Tensor, feature: Tensor, position: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
        bit_R = torch.arange(len(self.by_ancestor), device=DEVICE)
        own = (ancestors[..., None] >> bit_R & 1).float()
        logits = self.by_token[token % 400] + feature @ self.by_feature + self.by_position[position % 64]
        return feature.roll(1, -1) + token[..., None] % 7 * 0.1, logits + own @ self.by_ancestor


def grown(
    kernels: Any,
    batch: list[dict[str, float]],
    vocab: DraftVocabulary,
    num_nodes: int = 6,
    *,
    flat: bool = False,
    paths: tuple[tuple[int, ...], ...] = (),
) -> NodeTensors:
    draw, size = torch.Generator().manual_seed(1), len(batch)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(DEVICE)

    roots_BV = (0 if flat else 2) * random(size, vocab.size)
    inputs = GrowInputs(
        features_BH=random(size, WIDTH),
        noise_BDV=2 * random(size, DEPTH, vocab.size),
        count_BV=(random(size, vocab.size) * 2).round().clamp(min=-1),
        table=torch.tensor([list(row.values()) for row in batch], dtype=torch.float64, device=DEVICE),
        log_odds_D=torch.tensor([0.0, -0.3, 0.4], device=DEVICE),
        num_nodes=num_nodes,
    )
    tree = TreeConfig(
        kind="static" if paths else "dynamic",
        num_speculative_tokens=num_nodes,
        max_depth=DEPTH,
        max_children=CHILDREN,
        static_paths=paths,
    )
    options = StaticOptions(
        tree=tree,
        vocab=vocab,
        kernels=kernels,
        has_truncation=any(row["top_k"] or row["top_p"] not in (0, 1) or row["min_p"] for row in batch),
        has_penalties=any(row["repetition"] not in (0, 1) for row in batch),
        shape=StaticShape(paths, torch.device(DEVICE)) if paths else None,
    )
    levels = make_levels(inputs, options)
    assert isinstance(levels, TritonLevels) is (kernels is fused)
    grow_on_device(levels, roots_BV, Model(vocab.size, 1 + num_nodes, flat).read, DEPTH)
    return levels.nodes


def assert_same_trees(got: NodeTensors, expected: NodeTensors) -> None:
    is_node = expected.weight > 0
    assert torch.equal(got.weight > 0, is_node)
    for name in ("token", "parent", "depth", "column"):
        assert torch.equal(getattr(got, name)[is_node], getattr(expected, name)[is_node]), name
    for name in ("weight", "path_prob"):
        torch.testing.assert_close(getattr(got, name)[is_node], getattr(expected, name)[is_node], rtol=1e-4, atol=0)


def vocabulary(size: int, *, is_reduced: bool) -> DraftVocabulary:
    ids = (torch.arange(size) * 2 + 3).to(DEVICE) if is_reduced else None
    return DraftVocabulary(target_size=2 * size + 3 if is_reduced else size, target_ids=ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCHES)
def test_trees_are_those_of_the_torch_twin(name: str) -> None:
    assert RowParameters._fields == tuple(f"{field}_B" for field in PLAIN)
    for vocab in (vocabulary(9, is_reduced=True), vocabulary(11, is_reduced=False)):
        assert_same_trees(grown(fused, BATCHES[name], vocab), grown(reference, BATCHES[name], vocab))


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_static_trees_are_those_of_the_torch_twin(name: str) -> None:
    paths = ((0,), (1,), (2,), (0, 0), (2, 1), (0, 0, 3))
    for vocab in (vocabulary(9, is_reduced=True), vocabulary(11, is_reduced=False)):
        got, expected = (grown(kernels, BATCHES[name], vocab, paths=paths) for kernels in (fused, reference))
        assert_same_trees(got, expected)
        assert torch.equal(got.parent[0], torch.tensor([0, 0, 0, 0, 1, 3, 4], device=DEVICE))


CHAIN = TreeConfig(kind="chain", num_speculative_tokens=8)
FORK = TreeConfig(kind="static", num_speculative_tokens=5, static_paths=((0,), (2,), (0, 1), (2, 0), (2, 0, 0)))
WIDE = TreeConfig(
    kind="static", num_speculative_tokens=63, static_paths=(*((i,) for i in range(9)), *((8, i) for i in range(54)))
)
PLACED = {
    "a chain": CHAIN,
    "a chain of 63": replace(CHAIN, num_speculative_tokens=63),
    "one node": replace(CHAIN, num_speculative_tokens=1),
    "static": FORK,
    "wide": WIDE,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACED)
def test_children_are_placed_exactly_where_the_torch_twin_places_them(name: str) -> None:
    """Level by level, in all fields of all rows, whether they hold a node or not."""
    tree, draw = PLACED[name], torch.Generator().manual_seed(len(name))
    N, D, K = tree.num_speculative_tokens, tree.longest_path, tree.num_children
    asks = [(N, D), (1, D), (N, 1), (0, 0), (N // 2, 2), (max(N - 1, 1), max(D - 1, 1)), (N, D)]
    shape = StaticShape(tree.paths, torch.device(DEVICE))
    for batch in (asks, asks[:1]):
        B = len(batch)
        rows = [PLAIN | dict(token=5 + b, position=9 * b, num_nodes=n, max_depth=d) for b, (n, d) in enumerate(batch)]
        rows = [row if row["num_nodes"] else PADDING for row in rows]
        table = torch.tensor([list(row.values()) for row in rows], dtype=torch.float64, device=DEVICE)
        got, expected = TritonStaticRows(shape, table), StaticRows(shape, RowParameters(*table.unbind(1)))
        for depth in range(D):
            first, F = (0, 1) if depth == 0 else (1, N)
            is_open_BF = expected.nodes.depth[:, first : first + F].cpu() == depth
            is_open_BF &= expected.nodes.weight[:, first : first + F].cpu() > 0
            is_open_BF &= (depth < table[:, 4:5].cpu()) & (torch.rand(B, F, generator=draw) > 0.2 * (depth > 0))
            weight_BFK = torch.rand(B, F, K, generator=draw) * is_open_BF[:, :, None]
            candidates = Candidates(
                token=torch.randint(900, (B, F * K), generator=draw).to(DEVICE),
                weight=weight_BFK.flatten(1).to(DEVICE),
                path_prob=torch.rand(B, F * K, generator=draw, dtype=torch.float64).to(DEVICE),
                column=torch.randint(900, (B, F * K), generator=draw).to(DEVICE),
            )
            inputs, twin_inputs = got.place(candidates, depth), expected.place(candidates, depth)
            for field in inputs._fields:
                assert torch.equal(getattr(inputs, field), getattr(twin_inputs, field)), (depth, field)
            for field in got.nodes._fields:
                assert torch.equal(getattr(got.nodes, field), getattr(expected.nodes, field)), (depth, field)
        assert (expected.nodes.weight > 0).sum() > B, "nodes were placed"


@pytest.mark.slow
def test_a_row_of_several_blocks_is_merged() -> None:
    vocab = vocabulary(4100, is_reduced=True)
    batch = [NOISY | dict(temperature=0.2)]
    assert_same_trees(grown(fused, batch, vocab, 2), grown(reference, batch, vocab, 2))


@pytest.mark.slow
def test_the_earlier_of_equal_candidates_is_kept() -> None:
    """All tokens are equally likely, so all children of all nodes are."""
    vocab, batch = vocabulary(4, is_reduced=False), [PLAIN | dict(num_nodes=n, temperature=0) for n in (2, 5)]
    got, expected = (grown(kernels, batch, vocab, flat=True) for kernels in (fused, reference))
    is_node = expected.weight > 0
    assert torch.equal(got.weight > 0, is_node) and is_node.sum(1).tolist() == [3, 6]
    assert torch.equal(got.parent[is_node], expected.parent[is_node])  # which of equal tokens is first is open


@pytest.mark.slow
def test_the_largest_tree_fills_its_masks() -> None:
    """Row 63 is the sign bit."""
    vocab, batch = vocabulary(40, is_reduced=False), [NOISY | dict(num_nodes=63)]
    assert_same_trees(grown(fused, batch, vocab, 63), grown(reference, batch, vocab, 63))


@pytest.mark.slow
def test_rows_without_a_node_have_inputs_that_the_draft_model_can_read() -> None:
    seen = []
    read = Model.read

    def kept(self: Model, *given: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(given)
        return read(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "read", kept)
        grown(fused, [PADDING, PLAIN | dict(num_nodes=2)], vocabulary(9, is_reduced=True))
    for token, feature, position, ancestors in seen:
        row = torch.arange(1, 7, device=DEVICE)
        assert ((token >= 0) & (token < 21)).all() and ((position >= 0) & (position <= 20 + DEPTH)).all()
        assert (ancestors >> row & ancestors & 1 == 1).all(), "each sees itself and the root"
        assert feature.isfinite().all()
