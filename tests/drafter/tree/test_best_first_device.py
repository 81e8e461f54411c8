"""Trees grown on the device equal those grown level by level, and are the best possible ones."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafter.tree.frontier import DraftVocabulary, Frontier, GrowLimits, TreeRoots
from drafter.tree.grow import GrownTrees
from drafter.tree.policy import DynamicTreePolicy, make_tree_policy
from drafter.tree.tree_graphs import TreeGraphs, buckets
from tests.support import oracles
from tests.support.attention_cases import moved
from tests.support.draft_costs import CALIBRATION, FREE, costs
from tests.support.growing import grow
from tests.support.oracles import Path
from workers.config import DraftConfig, EngineConfig, PruneConfig, TreeConfig
from workers.kernels import reference
from workers.kernels.host import keys_N
from workers.kernels.select import TORCH
from workers.sampling.logits_state import LogitsState, TokenCounter
from workers.settings import Constraints, Rule, SamplingSettings
from workers.types import AttentionMetadata, DraftCosts, SamplingBatch

torch.set_num_threads(1)

V, CHILDREN, DEPTH, NODES, PAGE = 9, 3, 4, 14, 4
FLAT = 10**7
"""The draft model to which every token is as likely as any other."""
WHOLE, REDUCED = DraftVocabulary(target_size=V), DraftVocabulary(target_size=24, target_ids=torch.arange(V) * 2 + 3)
SHAPE = DynamicTreePolicy(CHILDREN, DEPTH)
CONFIG = EngineConfig(
    model_path="fake",
    draft=DraftConfig(
        method="eagle3",
        model_path="fake",
        tree=TreeConfig(
            num_speculative_tokens=NODES, max_depth=DEPTH, max_children=CHILDREN, prune=PruneConfig(auto=True)
        ),
    ),
    max_num_seqs=5,
    max_model_len=64,
    page_size=PAGE,
)


@dataclass(frozen=True)
class Ask:
    """One request's part of a batch."""

    model: int = 0
    num_nodes: int = NODES
    max_depth: int = DEPTH
    min_prob: float = 0.0
    path_prob: float = 0.0
    rule: Rule = Rule.COUPLED
    sampling: SamplingSettings = SamplingSettings(temperature=1.0)
    constraints: Constraints = Constraints()
    base: int = 5

    @property
    def logits_state(self) -> LogitsState:
        """Return a logits state after a text with tokens outside the draft vocabulary."""
        counter = TokenCounter(self.constraints, [3, 4, 11])
        counter.add([5, 5, 8, 3 + self.model % 7])
        return LogitsState(
            constraints=self.constraints, end_token_ids=[], counts=counter.counts(), tail=[], num_output=4
        )


@functools.cache
def model_logits(model: int, path: Path, told: int) -> Tensor:
    """Return the logits after a path of target tokens below the root. told: the feature from the parent."""
    if model == FLAT:
        return torch.zeros(V)
    rng = np.random.default_rng([model, told, zlib.crc32(repr(path).encode())])
    return torch.from_numpy(rng.normal(scale=1.0 + 2.0 * rng.random(), size=V).astype(np.float32))


def telling(told: int, token: int) -> int:
    """Return a node's feature for its children: a number that depends on its whole path."""
    return (31 * told + token + 1) % 65521


@dataclass
class Plan:
    """A fake attention plan with each row's ancestors."""

    metadata: AttentionMetadata
    ancestors_N: Tensor | None = None

    def move(self, base_B: np.ndarray, page_table_BP: np.ndarray) -> None:
        self.metadata = moved(self.metadata, base_B, page_table_BP)

    def set_ancestors(self, ancestors_N: Tensor) -> None:
        self.ancestors_N = ancestors_N


class Draft:
    """Draft models whose logits depend on a node's path, read from its ancestor mask, and on its parent's feature."""

    def __init__(self, asks: Sequence[Ask], vocab: DraftVocabulary = REDUCED) -> None:
        self.asks, self.vocab = asks, vocab
        self.last_row_B = [0] * len(asks)
        self._told: dict[tuple[int, int], int] = {}
        self._path: dict[tuple[int, int], Path] = {}

    @property
    def roots(self) -> Tensor:
        return torch.stack([model_logits(ask.model, (), ask.model) for ask in self.asks])

    def root_logits(self, hidden_B1: Tensor) -> Tensor:
        """The models for the roots of `TreeGraphs`; rows beyond the requests are padding."""
        logits_BV = torch.zeros(len(hidden_B1), V)
        logits_BV[: len(self.asks)] = self.roots
        return logits_BV

    @property
    def start(self) -> tuple[TreeRoots, Tensor, Tensor]:
        bases = [ask.base for ask in self.asks]
        table = np.zeros((len(bases), 1 + max(bases) // PAGE), dtype=np.int32)
        for b, base in enumerate(bases):
            table[b, : 1 + base // PAGE] = 1 + 20 * b + np.arange(1 + base // PAGE)
        roots = TreeRoots(np.array(bases, dtype=np.int32), table)
        return roots, torch.tensor([[ask.model] for ask in self.asks]).float(), torch.arange(len(bases))

    def expand(self, frontier: Frontier) -> Tensor:
        """The models for `grow`, level by level."""
        if frontier.depth == 1:
            self._told = {(b, 0): ask.model for b, ask in enumerate(self.asks)}
            self._path = {(b, 0): () for b in range(len(self.asks))}
        rows = []
        for b, row, parent, token in zip(*(column.tolist() for column in frontier[1:5]), strict=True):
            self._path[b, row] = (*self._path[b, parent], token)
            self._told[b, row] = telling(self._told[b, parent], token)
            self.last_row_B[b] = max(self.last_row_B[b], row)
            rows.append(model_logits(self.asks[b].model, self._path[b, row], self._told[b, row]))
        return torch.stack(rows)

    def run(self, plan: Any, tokens_N: Tensor, features_N1: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """The models for `TreeGraphs`: all rows but the roots; rows beyond the requests are padding."""
        out_N1, logits_NV = torch.zeros(len(tokens_N), 1), torch.zeros(len(tokens_N), V)
        tokens, masks = tokens_N.tolist(), plan.ancestors_N.tolist()
        for n in range(len(self.asks) * NODES):
            b = n // NODES
            path = tuple(tokens[b * NODES + row - 1] for row in range(1, 1 + NODES) if masks[n] >> row & 1)
            assert masks[n] & 1 and int(positions_N[n]) <= self.asks[b].base + DEPTH
            out_N1[n] = told = telling(int(features_N1[n, 0]), tokens[n])
            logits_NV[n] = model_logits(self.asks[b].model, path, told)
        return out_N1, logits_NV


class Bench:
    """An uncaptured TreeGraphs that grows batch after batch in the same buffers."""

    def __init__(self, vocab: DraftVocabulary = REDUCED, tree: TreeConfig | None = None) -> None:
        self.draft = Draft([], vocab)
        assert CONFIG.draft is not None
        config = CONFIG if tree is None else replace(CONFIG, draft=replace(CONFIG.draft, tree=tree))
        self.tree_graphs = TreeGraphs(
            lambda *given: self.draft.run(*given),
            lambda hidden_B1: self.draft.root_logits(hidden_B1),
            Plan,
            torch.zeros(1, 1),
            vocab,
            TORCH,
            config,
            is_captured=False,
        )

    def grown(self, asks: Sequence[Ask], draft_costs: DraftCosts = FREE, **options: Any) -> GrownTrees:
        self.draft = Draft(asks, self.draft.vocab)
        self.tree_graphs.set_roots(*self.draft.start)
        return grown(self.draft, draft_costs, tree_graphs=self.tree_graphs, **options)


def grown(draft: Draft, draft_costs: DraftCosts = FREE, **options: Any) -> GrownTrees:
    asks = draft.asks
    settings: dict[str, Any] = dict(
        limits=oracles.limits(
            [ask.num_nodes for ask in asks],
            [ask.max_depth for ask in asks],
            [ask.min_prob for ask in asks],
            [ask.path_prob for ask in asks],
            [ask.rule for ask in asks],
            auto=[True] * len(asks),
        ),
        sampling=SamplingBatch.stack([ask.sampling for ask in asks]),
        policy=SHAPE,
        expand=draft.expand,
        vocab=draft.vocab,
        costs=draft_costs,
        logits_states={b: ask.logits_state for b, ask in enumerate(asks) if not ask.constraints.is_empty},
    )
    index_B = np.array([ask.base + 1 for ask in asks])
    return grow(draft.roots, np.array([3 + ask.model % 7 for ask in asks]), index_B, **settings | options)


THRESHOLD = st.one_of(st.just(0.0), st.floats(0, 0.5, width=32))
SAMPLING = st.builds(
    SamplingSettings,
    temperature=st.sampled_from([0.0, 0.4, 1.0]),
    top_k=st.sampled_from([0, 0, 4]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.0, 0.2]),
    seed=st.integers(0, 99),
)
ASK = st.builds(
    Ask,
    model=st.integers(0, 10**6),
    num_nodes=st.integers(1, NODES),
    max_depth=st.integers(1, DEPTH),
    min_prob=THRESHOLD,
    path_prob=THRESHOLD,
    rule=st.sampled_from([Rule.COUPLED, Rule.TARGET_ONLY]),
    sampling=SAMPLING,
    constraints=st.just(Constraints())
    | st.builds(
        Constraints,
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        frequency_penalty=st.sampled_from([0.0, 0.6]),
        presence_penalty=st.sampled_from([0.0, -0.8]),
    ),
    base=st.integers(1, 30),
)


UNTRUNCATED = st.builds(
    Ask,
    model=st.integers(0, 10**6),
    num_nodes=st.integers(1, NODES),
    max_depth=st.integers(1, 3),
    min_prob=THRESHOLD,
    path_prob=THRESHOLD,
    sampling=st.builds(SamplingSettings, temperature=st.sampled_from([0.0, 0.4, 1.0]), seed=st.integers(0, 99)),
)
"""Requests without truncation, with few enough levels to enumerate every tree."""


def tree(grown: GrownTrees, b: int) -> dict[str, list]:
    begin, end = grown.trees.offsets[b : b + 2].tolist()
    names = ("token_N", "parent_N", "depth_N", "ancestors_N", "kind_N")
    return {name: getattr(grown.trees, name)[begin:end].tolist() for name in names}


def weights(grown: GrownTrees, b: int) -> list[float]:
    begin, end = grown.trees.offsets[b : b + 2].tolist()
    return grown.trees.weight_N[begin:end].tolist()


def limits_of(asks: Sequence[Ask], *, auto: Sequence[bool]) -> GrowLimits:
    names = ("num_nodes", "max_depth", "min_prob", "path_prob", "rule")
    return oracles.limits(*([getattr(ask, name) for ask in asks] for name in names), auto=list(auto))


def assert_same_trees(at_once: GrownTrees, by_level: GrownTrees, count: int) -> None:
    assert (at_once.num_levels, at_once.num_run) == (DEPTH, (DEPTH - 1) * count * NODES)
    assert (at_once.pruned_BD == by_level.pruned_BD).all() and at_once.pruned_BD.dtype == np.int32
    for b in range(count):
        assert tree(at_once, b) == tree(by_level, b)
        assert weights(at_once, b) == pytest.approx(weights(by_level, b), rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@pytest.mark.slow
@pytest.mark.parametrize("is_auto", [True, False])
@settings(max_examples=80, deadline=None, derandomize=True)
@given(asks=st.lists(ASK, min_size=1, max_size=5))
def test_trees_equal_those_grown_level_by_level(bench: Bench, is_auto: bool, asks: list[Ask]) -> None:
    """Thresholds included: what they keep out of a tree without `auto` is counted at the same depths."""
    options = {"limits": limits_of(asks, auto=[is_auto] * len(asks))}
    assert_same_trees(bench.grown(asks, **options, expand=None), grown(Draft(asks), **options), len(asks))


def told(model: int, path: Path) -> int:
    return functools.reduce(telling, path, model)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(UNTRUNCATED)
def test_without_costs_a_tree_is_the_best_that_the_thresholds_allow(whole, ask):
    candidates = oracles.candidates(
        lambda path: model_logits(ask.model, path, told(ask.model, path)).tolist(),
        max_depth=ask.max_depth, max_children=CHILDREN, min_prob=ask.min_prob, path_prob=ask.path_prob,
        temperature=ask.sampling.temperature, seed=ask.sampling.seed, root_index=ask.base + 1, calibration=CALIBRATION,
    )  # fmt: skip
    best = sorted(candidates.items(), key=lambda item: -item[1])[: ask.num_nodes]
    got = whole.grown([ask])
    nodes = dict(zip(oracles.paths_of(got.trees, 0)[1:], weights(got, 0)[1:], strict=True))
    # A weight below the rounding error of the sum does not raise the throughput: such a node may be kept or not.
    assert {path: weight for path, weight in nodes.items() if weight > 1e-6} == {
        path: pytest.approx(weight, rel=1e-3) for path, weight in best if weight > 1e-6
    }


@pytest.fixture(scope="module")
def whole() -> Bench:
    return Bench(WHOLE)


def test_the_cut_is_the_same_as_for_trees_grown_level_by_level(bench):
    """One level leaves no choice of what to run, so costs can only show in the cut."""
    asks = [Ask(model=m, max_depth=1) for m in range(4)]
    sizes = []
    for node in (0.0, 1.0, 3.0):
        at_once, by_level = bench.grown(asks, costs(node=node)), grown(Draft(asks), costs(node=node))
        assert [tree(at_once, b) for b in range(4)] == [tree(by_level, b) for b in range(4)]
        assert (at_once.pruned_BD == by_level.pruned_BD).all() and at_once.pruned_BD.dtype == np.int32
        sizes.append(len(at_once.trees.token_N))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


def test_a_trace_is_the_same_as_of_trees_grown_level_by_level(bench):
    asks, options = [Ask(model=m, max_depth=1) for m in range(4)], {"traced_B": np.array([True, False, True, True])}
    at_once = bench.grown(asks, costs(node=1.0), **options).trace
    by_level = grown(Draft(asks), costs(node=1.0), **options).trace
    for name in ("offsets", "token_T", "parent_T", "depth_T", "reason_T"):
        assert torch.equal(getattr(at_once, name), getattr(by_level, name)), name
    for name in ("prob_T", "weight_T"):
        torch.testing.assert_close(getattr(at_once, name), getattr(by_level, name), rtol=1e-4, atol=1e-6)
    assert at_once.reason_T.any()


PATHS: tuple[Path, ...] = (
    (0,), (1,), (2,),
    (0, 0), (0, 1), (0, 2), (1, 0), (2, 0),
    (0, 0, 0), (0, 0, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0),
)  # fmt: skip
FIXED = TreeConfig(kind="static", num_speculative_tokens=NODES, max_depth=DEPTH, static_paths=PATHS)


@pytest.fixture(scope="module")
def fixed() -> Bench:
    return Bench(tree=FIXED)


@pytest.mark.parametrize("is_auto", [False, True])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(asks=st.lists(ASK, min_size=1, max_size=5))
def test_static_trees_equal_those_grown_level_by_level(fixed: Bench, is_auto: bool, asks: list[Ask]) -> None:
    asks = [replace(ask, min_prob=0.0, path_prob=0.0) for ask in asks]
    options = {"policy": make_tree_policy(FIXED), "limits": limits_of(asks, auto=[is_auto] * len(asks))}
    by_level = grown(Draft(asks), **options)
    at_once = fixed.grown(asks, **options, expand=None)
    assert_same_trees(at_once, by_level, len(asks))


@pytest.mark.parametrize("name", ["min_prob", "path_prob"])
def test_a_higher_threshold_gives_a_subset_on_the_device_too(bench: Bench, name: str) -> None:
    whole = set(oracles.paths_of(bench.grown([Ask()], limits=limits_of([Ask()], auto=[False])).trees, 0))
    sizes = []
    for threshold in (0.05, 0.2, 0.5):
        asks = [Ask(**{name: threshold})]
        got = bench.grown(asks, limits=limits_of(asks, auto=[False]))
        assert set(oracles.paths_of(got.trees, 0)) <= whole
        assert len(got.trees.token_N) + int(got.pruned_BD.sum()) == len(whole)
        sizes.append(len(got.trees.token_N))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


def test_a_trace_without_auto_names_what_thresholds_keep_out(bench: Bench) -> None:
    asks = [Ask(min_prob=0.3), Ask(model=1, path_prob=0.3)]
    options: dict[str, Any] = {"limits": limits_of(asks, auto=[False, False]), "traced_B": np.array([True, True])}
    at_once, by_level = bench.grown(asks, **options, expand=None).trace, grown(Draft(asks), **options).trace
    assert torch.equal(at_once.token_T, by_level.token_T) and torch.equal(at_once.reason_T, by_level.reason_T)
    assert at_once.reason_T.unique().numel() == 3


def test_a_chain_is_a_static_tree_whatever_its_depth_limit_says() -> None:
    chain = TreeConfig(kind="chain", num_speculative_tokens=4, max_depth=2)
    assert (chain.longest_path, chain.num_children, chain.paths[-1]) == (4, 1, (0, 0, 0, 0))
    assert (FIXED.longest_path, FIXED.num_children, CONFIG.draft.tree.paths) == (DEPTH, 3, ())


@pytest.mark.parametrize(("num_children", "fits"), [(V, True), (V + 1, False)])
def test_a_static_tree_needs_as_many_tokens_as_a_node_has_children(num_children: int, fits: bool) -> None:
    paths = tuple((rank,) for rank in range(num_children))
    tree = TreeConfig(kind="static", num_speculative_tokens=num_children, static_paths=paths)
    graphs = Bench(tree=tree).tree_graphs
    assert bool(graphs._grow) is bool(graphs._plans) is fits
    for plan in graphs._plans.values():  # as the kernels read them
        assert {getattr(plan.metadata, name).dtype.name for name in ("slot_N", "visible_N", "base_B")} == {"int32"}


@pytest.mark.parametrize(
    ("change", "auto"),
    [
        ({"min_prob": 0.1}, [False, False]),
        ({"path_prob": 0.1}, [True, True]),
        ({"rule": Rule.TRAVERSAL}, [False, False]),
        ({}, [True, False]),
    ],
    ids=["min", "path", "sampled", "auto for some"],
)
def test_thresholds_sampling_and_mixed_batches_are_left_to_growth_by_level(
    fixed: Bench, change: dict[str, Any], auto: list[bool]
) -> None:
    asks = [Ask(), Ask(model=1, **change)]
    options = {"policy": make_tree_policy(FIXED), "limits": limits_of(asks, auto=auto)}
    assert fixed.grown(asks, **options).num_run == grown(Draft(asks), **options).num_run


def test_every_level_and_row_of_a_tree_counts_as_run(bench):
    got = bench.grown([Ask(num_nodes=1, max_depth=1), Ask(), Ask(path_prob=1.0)])
    assert (got.num_levels, got.num_run) == (DEPTH, 3 * NODES * (DEPTH - 1))


def test_rows_write_to_pages_of_their_own_request_or_to_the_null_page(bench):
    bases = [3, 30, 8]
    bench.grown([Ask(base=base) for base in bases])
    metadata = bench.tree_graphs._plans[4].metadata
    assert metadata.query_offsets.tolist() == [0, NODES, 2 * NODES, 3 * NODES, 4 * NODES]
    owner_N = metadata.owner_N
    assert (keys_N(metadata, owner_N) == metadata.base_B[owner_N] + 1 + NODES).all(), "any row may be an ancestor"
    slots = metadata.physical(owner_N, metadata.slot_N, PAGE).reshape(4, NODES)
    for b, base in enumerate(bases):
        own = PAGE - 1 - base % PAGE  # rows behind the root on the last page that the request has
        page = int(metadata.page_table_BP[b, base // PAGE])
        assert slots[b, :own].tolist() == [page * PAGE + base % PAGE + 1 + i for i in range(own)]
        assert (slots[b, own:] < PAGE).all()
    assert (slots[3] < PAGE).all()


def test_penalties_are_applied_on_the_device(bench):
    """The first request repeats its path's tokens; penalties prevent it in the others."""
    plain, often, seen = Constraints(), Constraints(frequency_penalty=9.0), Constraints(repetition_penalty=1.5)
    asks = [
        Ask(constraints=constraints, sampling=SamplingSettings(temperature=0.0)) for constraints in (plain, often, seen)
    ]
    got = bench.grown(asks)
    assert not any(bench.draft.last_row_B), "nothing grows level by level"
    tokens = [tree(got, b)["token_N"] for b in range(3)]
    assert tokens[0] != tokens[1] != tokens[2] != tokens[0]
    bare = bench.grown([Ask(sampling=SamplingSettings(temperature=0.0))])
    assert tree(bare, 0) == tree(got, 0), "a request without penalties is left alone beside others"


def other(**changes: Any) -> GrowLimits:
    limits = oracles.limits([NODES] * 2, [DEPTH] * 2, auto=[True] * 2)
    return replace(limits, **{name: np.array(value) for name, value in changes.items()})


@pytest.mark.parametrize(
    "options",
    [
        {"limits": other(auto_B=[1, 0])},
        {"limits": other(rule_B=[Rule.COUPLED, Rule.TRAVERSAL])},
        {"logits_states": {1: Ask(constraints=Constraints(presence_penalty=1.0, logit_bias={3: 9.0})).logits_state}},
    ],
    ids=["auto for some", "sampled", "constrained"],
)
def test_batches_not_all_best_first_grow_level_by_level(bench, options):
    asks = [Ask(), Ask(model=1)]
    got, expected = bench.grown(asks, **options), grown(Draft(asks), **options)
    assert any(bench.draft.last_row_B) and tree(got, 1) == tree(expected, 1)


def test_as_many_requests_as_the_largest_bucket_has_grow_in_its_graph(bench):
    bench.grown([Ask(model=9 + m) for m in range(8)])
    got = bench.grown([Ask(model=m) for m in range(8)])
    assert not any(bench.draft.last_row_B)
    assert all(tree(got, m) == tree(bench.grown([Ask(model=m)]), 0) for m in range(8))


def test_more_requests_than_any_bucket_has_grow_level_by_level(bench):
    asks = [Ask(model=m) for m in range(9)]
    assert tree(bench.grown(asks), 8) == tree(grown(Draft(asks)), 8) and any(bench.draft.last_row_B)


def test_the_earlier_of_equal_candidates_is_kept(bench):
    """All children of all nodes are equally likely."""
    asks = [Ask(model=FLAT, num_nodes=n, sampling=SamplingSettings(temperature=0.0)) for n in (1, 2, 5, 11)]
    at_once, by_level = bench.grown(asks), grown(Draft(asks))
    assert [tree(at_once, b) for b in range(4)] == [tree(by_level, b) for b in range(4)]


@pytest.mark.parametrize(
    ("max_requests", "num_nodes", "vocab_size", "most"),
    [(64, 16, 32_000, 32), (5, 16, 2_048, 8), (64, 63, 151_936, 1), (64, 63, 300_000, 0)],
)
def test_buckets_end_where_the_computation_outweighs_the_launches(max_requests, num_nodes, vocab_size, most):
    sizes = buckets(max_requests, num_nodes, vocab_size)
    assert sizes == [n for n in (32, 16, 8, 4, 2, 1) if n <= most]


@pytest.mark.parametrize("tree", [CONFIG.draft.tree, FIXED], ids=["best-first", "static"])
def test_growth_does_not_synchronize_with_the_host(tree: TreeConfig) -> None:
    """Meta tensors have no values: reading one, a shape that depends on one, or mixing in a tensor of the host, fails.

    Torch's own `truncation_threshold` would; Triton's is one launch.
    """
    kernels = SimpleNamespace(**{name: getattr(reference, name) for name in reference.__all__})
    kernels.truncation_threshold = lambda x_RV, top_k_R, top_p_R: x_RV.amax(-1)
    weight_VV = torch.empty(V, V, device="meta")
    vocab = DraftVocabulary(target_size=24, target_ids=torch.empty(V, dtype=torch.int64, device="meta"))

    def run(plan: Any, tokens_N: Tensor, features_NV: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        out_NV = features_NV @ weight_VV + (tokens_N + positions_N + plan.ancestors_N)[:, None]
        return out_NV, out_NV

    example_1V = torch.empty(1, V, device="meta")
    config = replace(CONFIG, draft=replace(CONFIG.draft, tree=tree))
    tree_graphs = TreeGraphs(run, torch.clone, Plan, example_1V, vocab, kernels, config, is_captured=False)
    for (num_requests, *_), grow_all in tree_graphs._grow.items():
        assert grow_all().shape == (num_requests, 5, 1 + NODES)
