"""Trees grown on the device equal those grown level by level, and are the best possible ones.

Without a GPU the kernels run in Triton's interpreter, so shapes are small.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from drafter.tree import triton_growth
from drafter.tree.frontier import DraftVocabulary, Frontier, GrowLimits, TreeRoots
from drafter.tree.grow import GrownTrees
from drafter.tree.policy import DynamicTreePolicy, make_tree_policy
from drafter.tree.tree_graphs import Shape, TreeGraphs, shapes
from tests.support import oracles
from tests.support.attention_cases import moved
from tests.support.draft_costs import FREE, costs
from tests.support.growing import grow
from tests.support.kernel_twins import growth_twins
from tests.support.oracles import Path
from workers.config import DraftConfig, EngineConfig, PruneConfig, TreeConfig
from workers.kernels.host import keys_N
from workers.kernels.interpreted import is_interpreted
from workers.kernels.select import TORCH
from workers.sampling.logits_state import LogitsState, TokenCounter
from workers.settings import Constraints, Rule, SamplingSettings
from workers.types import AttentionMetadata, DraftCosts, SamplingBatch

torch.set_num_threads(1)

DEVICE = "cpu" if is_interpreted() else "cuda"
V, CHILDREN, DEPTH, NODES, PAGE = 9, 3, 3, 6, 4
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

    @property
    def num_nodes(self) -> int:
        return len(self.metadata.slot_N) // len(self.metadata.base_B)

    def move(self, base_B: np.ndarray, page_table_BP: np.ndarray) -> None:
        self.metadata = moved(self.metadata, base_B, page_table_BP)

    def set_ancestors(self, ancestors_N: Tensor) -> None:
        self.ancestors_N = ancestors_N


class Draft:
    """Draft models whose logits depend on a node's path, read from its ancestor mask, and on its parent's feature."""

    def __init__(self, asks: Sequence[Ask], vocab: DraftVocabulary = REDUCED, max_depth: int = DEPTH) -> None:
        self.asks, self.vocab, self.max_depth = asks, vocab, max_depth
        self.last_row_B = [0] * len(asks)
        self._told: dict[tuple[int, int], int] = {}
        self._path: dict[tuple[int, int], Path] = {}

    @property
    def roots(self) -> Tensor:
        return torch.stack([model_logits(ask.model, (), ask.model) for ask in self.asks])

    def logits(self, hidden_N2: Tensor) -> Tensor:
        """The logits of `TreeGraphs`, by the numbers that `start` and `run` give their outputs."""
        return torch.stack([self._logits[int(number)] for number in hidden_N2[:, 1]]).to(DEVICE)

    @property
    def start(self) -> tuple[TreeRoots, Tensor, Tensor]:
        bases = [ask.base for ask in self.asks]
        table = np.zeros((len(bases), 1 + max(bases) // PAGE), dtype=np.int32)
        for b, base in enumerate(bases):
            table[b, : 1 + base // PAGE] = 1 + 20 * b + np.arange(1 + base // PAGE)
        roots = TreeRoots(np.array(bases, dtype=np.int32), table)
        hidden = torch.tensor([[ask.model, -1 - b] for b, ask in enumerate(self.asks)]).float()
        self._logits = {-1 - b: logits_V for b, logits_V in enumerate(self.roots)} | {0: torch.zeros(V)}
        return roots, hidden.to(DEVICE), torch.arange(len(bases), device=DEVICE)

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

    def run(self, plan: Any, tokens_N: Tensor, features_N2: Tensor, positions_N: Tensor) -> Tensor:
        """The models for `TreeGraphs`: all rows but the roots; rows beyond the requests are padding."""
        tokens, masks, N = tokens_N.tolist(), plan.ancestors_N.tolist(), plan.num_nodes
        row_N = torch.arange(len(tokens_N), device=DEVICE) % N + 1
        assert (plan.ancestors_N >> row_N & plan.ancestors_N & 1 == 1).all(), "each row sees itself and the root"
        assert all(0 <= token < self.vocab.target_size for token in tokens) and features_N2.isfinite().all()
        out_N2 = torch.zeros(len(tokens_N), 2)
        for n in range(len(self.asks) * N):
            b = n // N
            path = tuple(tokens[b * N + row - 1] for row in range(1, 1 + N) if masks[n] >> row & 1)
            assert 0 <= int(positions_N[n]) - self.asks[b].base <= self.max_depth
            told = telling(int(features_N2[n, 0]), tokens[n])
            out_N2[n, 0], out_N2[n, 1] = told, 1 + n
            self._logits[1 + n] = model_logits(self.asks[b].model, path, told)
        return out_N2.to(DEVICE)


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Use the kernels' twins, but for tests with the mark `slow`, or on a GPU: the kernels themselves."""
    if request.node.get_closest_marker("slow") is None and DEVICE == "cpu":
        with growth_twins():
            yield
        return
    # A row of logits takes two blocks, the second of them partial. Padding requests divide zero by zero.
    with pytest.MonkeyPatch.context() as patch, np.errstate(invalid="ignore", divide="ignore"):
        patch.setattr(triton_growth, "_BLOCK", 8)
        yield


class Bench:
    """An uncaptured TreeGraphs that grows batch after batch in the same buffers."""

    def __init__(self, vocab: DraftVocabulary = REDUCED, tree: TreeConfig | None = None) -> None:
        self.draft = Draft([], vocab)
        assert CONFIG.draft is not None
        self.tree = tree or CONFIG.draft.tree
        ids = vocab.target_ids
        self.tree_graphs = TreeGraphs(
            lambda *given: self.draft.run(*given),
            lambda hidden_N2: self.draft.logits(hidden_N2),
            Plan,
            torch.zeros(1, 2, device=DEVICE),
            replace(vocab, target_ids=None if ids is None else ids.to(DEVICE)),
            TORCH,  # Triton's truncation takes seconds in the interpreter, and has tests of its own
            replace(CONFIG, draft=replace(CONFIG.draft, tree=self.tree)),
            is_captured=False,
        )

    def grown(self, asks: Sequence[Ask], draft_costs: DraftCosts = FREE, **options: Any) -> GrownTrees:
        self.draft = Draft(asks, self.draft.vocab, self.tree.longest_path)
        self.tree_graphs.set_roots(*self.draft.start)
        whole = self.tree.num_speculative_tokens, self.tree.longest_path  # whatever the last trees were
        self.tree_graphs._wanted_nodes, self.tree_graphs._wanted_levels = whole
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


HOT, COLD = (SamplingSettings(temperature=t, seed=5) for t in (0.7, 0.0))
PENALTIES = Constraints(repetition_penalty=1.3, frequency_penalty=0.6), Constraints(presence_penalty=-0.8)
BATCHES = {
    "hot and cold": [Ask(sampling=HOT), Ask(model=1, sampling=COLD), Ask(model=2, rule=Rule.TARGET_ONLY, base=30)],
    "limits": [Ask(num_nodes=1), Ask(model=1, num_nodes=4, max_depth=1)],
    "thresholds": [Ask(min_prob=0.3), Ask(model=1, path_prob=0.2, sampling=HOT)],
    "truncated": [
        Ask(sampling=replace(HOT, top_k=4, min_p=0.2)),
        Ask(model=1, sampling=replace(HOT, top_p=0.8)),
    ],
    "penalized": [Ask(constraints=PENALTIES[0]), Ask(model=1, sampling=COLD, constraints=PENALTIES[1])],
}


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
    assert (at_once.pruned_BD == by_level.pruned_BD).all() and at_once.pruned_BD.dtype == np.int32
    for b in range(count):
        assert tree(at_once, b) == tree(by_level, b)
        assert weights(at_once, b) == pytest.approx(weights(by_level, b), rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_auto"), [*((name, True) for name in BATCHES), ("thresholds", False)])
def test_trees_equal_those_grown_level_by_level(bench: Bench, name: str, is_auto: bool) -> None:
    """Thresholds included: what they keep out of a tree without `auto` is counted at the same depths."""
    asks = BATCHES[name]
    options = {"limits": limits_of(asks, auto=[is_auto] * len(asks))}
    assert_same_trees(bench.grown(asks, **options, expand=None), grown(Draft(asks), **options), len(asks))


def test_other_vocabularies_and_noise_of_a_target_id(whole: Bench) -> None:
    asks = BATCHES["hot and cold"][:2]
    assert_same_trees(whole.grown(asks, expand=None), grown(Draft(asks, WHOLE)), 2)


@pytest.fixture(scope="module")
def whole() -> Bench:
    return Bench(WHOLE)


def test_the_cut_is_the_same_as_for_trees_grown_level_by_level(bench):
    """One level leaves no choice of what to run, so costs can only show in the cut."""
    asks = [Ask(model=m, max_depth=1) for m in range(2)]
    sizes = []
    for node in (0.0, 3.0):
        at_once, by_level = bench.grown(asks, costs(node=node)), grown(Draft(asks), costs(node=node))
        assert [tree(at_once, b) for b in range(2)] == [tree(by_level, b) for b in range(2)]
        assert (at_once.pruned_BD == by_level.pruned_BD).all() and at_once.pruned_BD.dtype == np.int32
        sizes.append(len(at_once.trees.token_N))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


def test_a_trace_is_the_same_as_of_trees_grown_level_by_level(bench):
    asks, options = [Ask(model=m, max_depth=1) for m in range(2)], {"traced_B": np.array([True, False])}
    at_once = bench.grown(asks, costs(node=1.0), **options).trace
    by_level = grown(Draft(asks), costs(node=1.0), **options).trace
    for name in ("offsets", "token_T", "parent_T", "depth_T", "reason_T"):
        assert torch.equal(getattr(at_once, name), getattr(by_level, name)), name
    for name in ("prob_T", "weight_T"):
        torch.testing.assert_close(getattr(at_once, name), getattr(by_level, name), rtol=1e-4, atol=1e-6)
    assert at_once.reason_T.any()


PATHS: tuple[Path, ...] = ((0,), (2,), (0, 0), (2, 1), (0, 0, 0), (0, 0, 1))
FIXED = TreeConfig(kind="static", num_speculative_tokens=NODES, max_depth=DEPTH, static_paths=PATHS)
CHAIN = TreeConfig(kind="chain", num_speculative_tokens=4, max_depth=2)
WIDE = TreeConfig(
    kind="static",
    num_speculative_tokens=63,
    static_paths=(*((i,) for i in range(9)), *((i, k) for i in range(6) for k in range(9))),
)


@pytest.fixture(scope="module")
def fixed() -> Bench:
    return Bench(tree=FIXED)


@pytest.mark.slow
@pytest.mark.parametrize("is_auto", [False, True])
def test_static_trees_equal_those_grown_level_by_level(fixed: Bench, is_auto: bool) -> None:
    asks = [Ask(), Ask(model=1, num_nodes=4, sampling=HOT), Ask(model=2, max_depth=2, sampling=COLD)]
    options = {"policy": make_tree_policy(FIXED), "limits": limits_of(asks, auto=[is_auto] * len(asks))}
    assert_same_trees(fixed.grown(asks, **options, expand=None), grown(Draft(asks), **options), len(asks))


@pytest.mark.parametrize("tree", [CHAIN, replace(CHAIN, num_speculative_tokens=1), WIDE], ids=["chain", "one", "wide"])
def test_a_static_tree_of_any_form_equals_one_grown_level_by_level(tree: TreeConfig) -> None:
    asks = [Ask(num_nodes=tree.num_speculative_tokens, max_depth=tree.longest_path), Ask(model=1, num_nodes=1)]
    options = {"policy": make_tree_policy(tree), "limits": limits_of(asks, auto=[False, False])}
    at_once = Bench(tree=tree).grown(asks, **options, expand=None)
    assert_same_trees(at_once, grown(Draft(asks), **options), 2)
    assert at_once.trees.offsets.tolist() == [0, 1 + tree.num_speculative_tokens, 3 + tree.num_speculative_tokens]


@pytest.mark.slow
def test_the_largest_tree_fills_its_masks() -> None:
    """Row 63 is the sign bit."""
    tree = TreeConfig(num_speculative_tokens=63, max_depth=2, max_children=9)
    asks = [Ask(num_nodes=63, max_depth=2)]
    options = {"policy": make_tree_policy(tree), "limits": limits_of(asks, auto=[False])}
    at_once = Bench(tree=tree).grown(asks, **options, expand=None)
    assert_same_trees(at_once, grown(Draft(asks), **options), 1)
    assert len(at_once.trees.token_N) == 64


@pytest.mark.parametrize("name", ["min_prob", "path_prob"])
def test_a_higher_threshold_gives_a_subset_on_the_device_too(bench: Bench, name: str) -> None:
    whole = set(oracles.paths_of(bench.grown([Ask()], limits=limits_of([Ask()], auto=[False])).trees, 0))
    sizes = []
    for threshold in (0.1, 0.4):
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
    assert (CHAIN.longest_path, CHAIN.num_children, CHAIN.paths[-1]) == (4, 1, (0, 0, 0, 0))
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
    metadata = bench.tree_graphs._plans[Shape(4, NODES)].metadata
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


@pytest.mark.slow
def test_as_many_requests_as_the_largest_bucket_has_grow_in_its_graph(bench):
    asks = [Ask(model=m) for m in range(8)]
    got, expected = bench.grown(asks, expand=None), grown(Draft(asks))
    assert all(tree(got, m) == tree(expected, m) for m in range(8))


def test_more_requests_than_any_bucket_has_grow_level_by_level(bench):
    asks = [Ask(model=m) for m in range(9)]
    assert tree(bench.grown(asks), 8) == tree(grown(Draft(asks)), 8) and any(bench.draft.last_row_B)


@pytest.fixture
def shaped(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Shapes of few nodes for few requests, and the logits of two of their trees at once."""
    monkeypatch.setattr("drafter.tree.tree_graphs._FEW_ROWS", 1)
    monkeypatch.setattr("drafter.tree.device.LOGITS_AT_ONCE", 2 * NODES * V)
    return Bench()


@pytest.mark.parametrize(
    ("num_nodes", "max_depth", "rows", "levels"), [(1, 3, 2, 1), (2, 2, 2, 2), (3, 3, 4, 3), (6, 2, 6, 2), (6, 3, 6, 3)]
)
def test_trees_grow_in_the_fewest_rows_and_levels_that_hold_them(
    shaped: Bench, num_nodes: int, max_depth: int, rows: int, levels: int
) -> None:
    asks = [
        Ask(model=m, sampling=HOT, constraints=PENALTIES[0], num_nodes=num_nodes, max_depth=max_depth) for m in range(5)
    ]
    got = shaped.grown(asks, expand=None)
    assert_same_trees(got, grown(Draft(asks)), len(asks))
    assert (got.num_levels, got.num_run) == (levels, (levels - 1) * len(asks) * rows)


def test_trees_under_auto_follow_what_paid_in_the_last_steps(shaped: Bench) -> None:
    """Levels and rows are dropped one a step; nodes that are all worth their costs bring them back."""
    shaped.grown([Ask()])
    sizes = {}
    for name, node in (("dear", 30.0), ("free", 0.0)):
        sizes[name] = []
        for _ in range(NODES):
            shaped.draft = Draft([Ask()])
            shaped.tree_graphs.set_roots(*shaped.draft.start)
            got = grown(shaped.draft, costs(node=node), tree_graphs=shaped.tree_graphs)
            sizes[name].append((got.num_levels, got.num_run))
    assert sizes["dear"][0] == (DEPTH, (DEPTH - 1) * NODES) and sizes["dear"][-1] == (2, 2), "a node and a level more"
    assert sizes["free"][-1] == sizes["dear"][0]
    assert [levels for levels, _ in sizes["free"][:2]] == [2, 3]


def test_the_earlier_of_equal_candidates_is_kept(bench):
    """All children of all nodes are equally likely."""
    asks = [Ask(model=FLAT, num_nodes=n, sampling=SamplingSettings(temperature=0.0)) for n in (2, 5)]
    at_once, by_level = bench.grown(asks), grown(Draft(asks))
    for name in ("parent_N", "depth_N"):  # which of equal tokens is first is open
        assert [tree(at_once, b)[name] for b in range(2)] == [tree(by_level, b)[name] for b in range(2)]


@pytest.mark.parametrize(
    ("max_requests", "num_nodes", "expected"),
    [
        (5, 16, {1: [16], 2: [16], 4: [16], 8: [16]}),
        (100, 16, {1: [16], 2: [16], 4: [16], 8: [16], 16: [8, 16], 32: [4, 8, 16], 64: [2, 4, 8, 16], 128: [2, 4, 8]}),
        (16, 63, {1: [63], 2: [63], 4: [32, 63], 8: [16, 32, 63], 16: [8, 16, 32, 63]}),
        (2048, 1, {1 << i: [1] for i in range(11)}),
    ],
)
def test_shapes_end_where_the_computation_outweighs_the_launches(
    max_requests: int, num_nodes: int, expected: dict[int, list[int]]
) -> None:
    """Few rows have no smaller shape, because a pass reads its weights in any case."""
    tree = replace(CONFIG.draft.tree, num_speculative_tokens=num_nodes, max_depth=1)
    found = shapes(replace(CONFIG, draft=replace(CONFIG.draft, tree=tree), max_num_seqs=max_requests))
    assert len(found) == len(set(found)) and found[0].requests * found[0].nodes == max(b * n for b, n in found)
    assert {b: sorted(n for requests, n in found if requests == b) for b, _ in found} == expected
