"""Tree graphs of real draft models match growth level by level; without a GPU Triton runs in its interpreter."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.drafter import Drafter
from drafter.proposers.base import (
    DraftModelProposer,
    FeatureProposer,
    decoder_tree_graphs,
    head_tree_graphs,
    shared_vocabulary,
)
from drafter.proposers.eagle3 import Eagle3Head
from drafter.tree.policy import make_tree_policy
from tests.support import checkpoints
from tests.support.attention_cases import moved
from tests.support.clockwork import AUTO, ClockCosts, bench
from tests.support.draft_costs import FREE
from tests.support.engines import AUTO as ENGINES_AUTO
from tests.support.engines import BUNDLED, bundled
from tests.support.kernel_twins import growth_twins
from workers.config import PruneConfig, TreeConfig, TreeRules
from workers.kernels.interpreted import is_interpreted
from workers.kernels.select import TORCH
from workers.kv_cache import KVPool
from workers.models.layers import Runtime
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.sampling.logits_state import LogitsState, TokenCounter, pack_logits_states
from workers.settings import Constraints, Rule, SamplingSettings
from workers.types import AttentionMetadata, DraftRequest, SamplingBatch, TreeBatch

pytest.importorskip("triton")
torch.set_num_threads(1)

PAGE = 16
TREE = TreeConfig(num_speculative_tokens=14, max_depth=4, max_children=2, prune=PruneConfig(auto=True))
"""As many nodes as three levels may have, so growth level by level never lacks rows."""
CONFIG = bundled(TREE, max_num_seqs=3, max_model_len=64)
SAMPLING = [
    SamplingSettings(temperature=0.0),
    SamplingSettings(temperature=1.0, seed=3),
    SamplingSettings(temperature=0.8, top_p=0.9, seed=4, constraints=Constraints(repetition_penalty=1.5)),
]
STEPS: list[dict[int, tuple[int, int, int]]] = [
    {0: (9, 14, 4), 1: (20, 14, 4), 2: (31, 6, 3)},
    {1: (2, 14, 4)},
    {0: (1, 14, 3), 2: (3, 0, 0)},
    {2: (1, 14, 4), 0: (4, 1, 1), 1: (1, 14, 4)},
]
"""Per step and request: tokens fed, maximum nodes and depth. Most steps need padding."""


@pytest.fixture(autouse=True)
def twins() -> Iterator[None]:
    """Without a GPU grow with the kernels' twins. `test_device_growth.py` has the kernels."""
    with growth_twins() if is_interpreted() else nullcontext():
        yield


def logits_state(constraints: Constraints) -> LogitsState:
    """Return a logits state after a text of every third token."""
    counts = TokenCounter(constraints, range(0, 2048, 3)).counts()
    return LogitsState(constraints=constraints, end_token_ids=[], counts=counts, tail=[], num_output=0)


def message(
    step: dict[int, tuple[int, int, int]], fed: list[int], width: int | None, generator: torch.Generator, device: str
) -> DraftRequest:
    """One of STEPS, on no more pages than each request needs. fed: tokens that the drafter has of each of them, or one
    more; width: of the features that a head reads."""
    counts, nodes, depths = (torch.tensor(column, dtype=torch.int32) for column in zip(*step.values(), strict=True))
    sampling = [SAMPLING[b % len(SAMPLING)] for b in step]
    num_pages = [-(-(fed[b] + num_fed + num_nodes) // PAGE) for b, (num_fed, num_nodes, _) in step.items()]
    table_BP = torch.zeros(len(step), max(num_pages), dtype=torch.int32)
    for row, (b, count) in enumerate(zip(step, num_pages, strict=True)):
        table_BP[row, :count] = torch.arange(count) * len(fed) + b + 1
    num_rows, size = int(counts.sum()), len(step)
    return DraftRequest(
        offsets=F.pad(counts.cumsum(0), (1, 0)).int(),
        start_B=torch.tensor([fed[b] for b in step], dtype=torch.int32),
        token_M=torch.randint(0, 2048, (num_rows,), generator=generator, dtype=torch.int32),
        page_table_BP=table_BP,
        rule_B=torch.full((size,), Rule.COUPLED, dtype=torch.int32),
        auto_B=torch.ones(size, dtype=torch.int32),
        num_nodes_B=nodes,
        max_depth_B=depths,
        rules=TreeRules().each(lambda _: torch.zeros(size)),
        sampling=SamplingBatch.stack(sampling),
        constraints_U=pack_logits_states(
            [None if p.constraints.is_empty else logits_state(p.constraints) for p in sampling]
        ),
        costs=FREE,
        features_MH=torch.randn(num_rows, width, generator=generator).to(device) if width else None,
    )


def messages(width: int | None, device: str) -> Iterator[DraftRequest]:
    generator = torch.Generator().manual_seed(7)
    fed = [1 if width else 0] * len(SAMPLING)  # a head's slot 0 stays empty
    for step in STEPS:
        yield message(step, fed, width, generator, device)
        for b, (count, _, _) in step.items():
            fed[b] += count


def proposers(
    method: str,
    device: str = "cpu",
    *,
    is_captured: bool = False,
    head: Path = BUNDLED / "eagle3",
    num_pages: int = 16,
    target_size: int = 2048,
) -> tuple[Any, Any]:
    """Return a proposer that grows level by level with torch, and one that grows whole trees with Triton."""
    from workers.kernels import fused

    if method == "eagle3":
        heads = [
            checkpoints.load_eagle3(head, BUNDLED / "target", Runtime(device=device, kernels=kernels))
            for kernels in (TORCH, fused)
        ]
        pools = [head.new_kv_pool(num_pages * PAGE) for head in heads]
        by_level, at_once = (FeatureProposer(heads[0], pool, PAGE, CONFIG.tree_rows) for pool in pools)
        at_once.tree_graphs = head_tree_graphs(heads[1], pools[1], CONFIG, is_captured=is_captured)
    else:
        path, spec = BUNDLED / "draft", read_spec(BUNDLED / "draft")
        models = [load_decoder(path, spec, Runtime(device=device, kernels=kernels)) for kernels in (TORCH, fused)]
        pools = [model.new_kv_pool(num_pages * PAGE) for model in models]
        vocabs = [shared_vocabulary(model, target_size) for model in models]
        by_level, at_once = (DraftModelProposer(models[0], vocabs[0], pool, PAGE) for pool in pools)
        at_once.tree_graphs = decoder_tree_graphs(models[1], vocabs[1], pools[1], CONFIG, is_captured=is_captured)
    at_once.expand = None
    if is_interpreted():
        at_once.tree_graphs._kernels = TORCH  # Triton's truncation takes seconds there, and test_kernels.py has it
    return by_level, at_once


def assert_same_trees(by_level: Any, at_once: Any, device: str = "cpu") -> None:
    """Compare the trees of all STEPS, with the same buffers."""
    policy = make_tree_policy(TREE)
    for message in messages(by_level._head.width if isinstance(by_level, FeatureProposer) else None, device):
        expected, got = (Drafter(proposer, policy).draft(message) for proposer in (by_level, at_once))
        for name in TreeBatch.__slots__:
            torch.testing.assert_close(getattr(got.trees, name), getattr(expected.trees, name), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the GPU in gpu/")
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_replayed_trees_equal_those_grown_level_by_level_in_every_step(method: str) -> None:
    assert_same_trees(*proposers(method))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the GPU in gpu/")
@pytest.mark.parametrize("target_size", [2000, 2100])
def test_trees_over_a_vocabulary_of_another_size_equal_those_grown_level_by_level(target_size: int) -> None:
    assert_same_trees(*proposers("draft_model", target_size=target_size))


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the GPU in gpu/")
@pytest.mark.parametrize("window", [3, pytest.param(9, marks=pytest.mark.full)])
def test_trees_of_a_head_with_a_window_equal_those_grown_level_by_level(tmp_path: Path, window: int) -> None:
    """A window of 3 is smaller than the depth of a tree."""
    head = shutil.copytree(BUNDLED / "eagle3", tmp_path / "head")
    checkpoints.edit_config(head, **checkpoints.sliding(window, "sliding_attention"))
    assert_same_trees(*proposers("eagle3", head=head))


class Replanning:
    """A head with torch kernels, whose plans are rebuilt for other places and ancestors instead of updated."""

    def __init__(self, head: Eagle3Head) -> None:
        self._head = head

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def plan(self, metadata: AttentionMetadata, page_size: int) -> SimpleNamespace:
        plan = SimpleNamespace()

        def move(base_B: np.ndarray, page_table_BP: np.ndarray) -> None:
            nonlocal metadata
            metadata = moved(metadata, base_B, page_table_BP)

        def set_ancestors(ancestors_N: Tensor) -> None:
            plan.made = self._head.plan(replace(metadata, ancestors_N=ancestors_N.numpy()), page_size)

        plan.move, plan.set_ancestors = move, set_ancestors
        return plan

    def forward(self, tokens_M: Tensor, features_MH: Tensor, positions_M: Tensor, plan: Any, kv: KVPool) -> Tensor:
        return self._head.forward(tokens_M, features_MH, positions_M, plan.made, kv)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_engines_emit_the_same_tokens_and_gain_as_much(temperature: float) -> None:
    """The bundled pair; all trees grow at once in the same buffers. Levels cost nothing on either clock."""
    work: dict[str, Any] = dict(batch=3, temperature=temperature, num_prompts=12, num_tokens=32)
    clock_costs = ClockCosts(fixed=100, row=0.5, message=2, fed=0.1, level=0, node=0)
    with bench(clock_costs) as plain:
        expected = plain.run(AUTO, **work)
    with bench(clock_costs) as at_once:
        proposer = at_once.engine._drafter.channel.drafter.proposer  # type: ignore[union-attr]
        proposer.tree_graphs = head_tree_graphs(
            Replanning(proposer._head), proposer._kv, bundled(ENGINES_AUTO), is_captured=False
        )
        proposer.expand = None
        got = at_once.run(AUTO, **work)
    assert got.tokens == expected.tokens
    assert got.acceptance_length > 0.95 * expected.acceptance_length > 1
    assert got.rate > 0.95 * expected.rate
