"""Growing and pruning: every tree equals that of a plain implementation, node by node."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.tree.frontier import DraftVocabulary, Frontier
from drafter.tree.policy import DynamicTreePolicy, StaticTreePolicy, TreePolicy, make_tree_policy
from tests.support import oracles
from tests.support.growing import grow
from tests.support.oracles import Path
from workers.config import MAX_TREE_NODES, TreeConfig
from workers.settings import SamplingSettings
from workers.types import NodeKind, SamplingBatch, TreeBatch

torch.set_num_threads(1)

V = 24
TWO_BY_TWO = ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))
THREE_BY_TWO = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1))
RAGGED = ((0,), (1,), (0, 0), (0, 1), (0, 2), (1, 0), (0, 0, 0))
CHAIN_3 = ((0,), (0, 0), (0, 0, 0))


@dataclass(frozen=True)
class Ask:
    """One request's part of a growing batch."""

    root: int = 7
    index: int = 20  # of the token drawn at the root
    num_nodes: int = 8
    max_depth: int = 3
    min_prob: float = 0.0
    path_prob: float = 0.0
    params: SamplingSettings = SamplingSettings(temperature=0.0)
    model: int = 0  # seed of its draft model


@functools.cache
def model_logits(model: int, path: Path) -> np.ndarray:
    rng = np.random.default_rng([model, zlib.crc32(repr(path).encode())])
    return rng.normal(scale=1.0 + 2.0 * rng.random(), size=V).astype(np.float32)


@dataclass
class Grower:
    """Run `grow` with fake draft models and record every call of `expand`."""

    asks: list[Ask]
    policy: TreePolicy
    logits_of: Callable[[int, Path], np.ndarray] = model_logits
    vocab: DraftVocabulary = DraftVocabulary(target_size=V)
    frontiers: list[Frontier] = field(default_factory=list)
    path: dict[tuple[int, int], Path] = field(default_factory=dict)
    pruned_BD: np.ndarray = field(init=False)

    def run(self) -> TreeBatch:
        asks = self.asks
        self.path = {(b, 0): () for b in range(len(asks))}
        grown = grow(
            torch.from_numpy(np.stack([self.logits_of(ask.model, ()) for ask in asks])),
            np.array([ask.root for ask in asks]),
            np.array([ask.index for ask in asks]),
            limits=oracles.limits(
                [ask.num_nodes for ask in asks],
                [ask.max_depth for ask in asks],
                [ask.min_prob for ask in asks],
                [ask.path_prob for ask in asks],
            ),
            sampling=SamplingBatch.stack([ask.params for ask in asks]),
            policy=self.policy,
            expand=self.expand,
            vocab=self.vocab,
        )
        assert grown.probs is None
        assert grown.pruned_BD.dtype == np.int32 and grown.trees.kind_N.dtype == torch.uint8
        self.pruned_BD = grown.pruned_BD
        return grown.trees

    def expand(self, frontier: Frontier) -> torch.Tensor:
        self.frontiers.append(frontier)
        rows = []
        for b, row, parent, token in zip(
            frontier.request_F, frontier.row_F, frontier.parent_row_F, frontier.token_F, strict=True
        ):
            self.path[b, row] = (*self.path[b, parent], int(token))
            rows.append(self.logits_of(self.asks[b].model, self.path[b, row]))
        return torch.from_numpy(np.stack(rows))


def grown(ask: Ask, policy: TreePolicy) -> TreeBatch:
    return Grower([ask], policy).run()


def request(batch: TreeBatch, b: int) -> dict[str, list]:
    begin, end = batch.offsets[b], batch.offsets[b + 1]
    return {n: getattr(batch, n)[begin:end].tolist() for n in TreeBatch.__slots__ if n != "offsets"}


def assert_well_formed(batch: TreeBatch, asks: list[Ask]) -> None:
    """Roots, breadth-first rows, depths, masks, distinct children, budgets, depths, kinds and weights."""
    for b, ask in enumerate(asks):
        got = request(batch, b)
        parents, tokens = got["parent_N"], got["token_N"]
        kind = NodeKind.COUPLED if ask.params.temperature > 0 else NodeKind.DETERMINISTIC
        expected = request(oracles.tree(parents, tokens, kind), 0)
        for name in ("depth_N", "ancestors_N", "kind_N"):
            assert got[name] == expected[name], name
        assert tokens[0] == ask.root
        assert parents == sorted(parents) and got["depth_N"] == sorted(got["depth_N"])
        assert len(set(zip(parents, tokens, strict=True))) == len(tokens)
        assert len(tokens) - 1 <= ask.num_nodes and max(got["depth_N"]) <= ask.max_depth
        weights = got["weight_N"]
        assert weights[0] == 1 and all(
            0 < w <= weights[p] * 1.00001 for w, p in zip(weights[1:], parents[1:], strict=True)
        )


# ---- static trees


@pytest.mark.parametrize(
    ("paths", "parents", "depths"),
    [
        (CHAIN_3, [-1, 0, 1, 2], [0, 1, 2, 3]),
        (TWO_BY_TWO, [-1, 0, 0, 1, 1, 2, 2], [0, 1, 1, 2, 2, 2, 2]),
        (THREE_BY_TWO, [-1, 0, 0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 1, 1, 2, 2, 2, 2, 2, 2]),
        (RAGGED, [-1, 0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 2, 2, 2, 2, 3]),
    ],
    ids=["chain", "2x2", "3x2", "ragged"],
)
def test_a_static_tree_has_its_parents_and_depths(paths, parents, depths):
    ask = Ask(num_nodes=len(paths))
    batch = grown(ask, StaticTreePolicy(paths))
    assert batch.parent_N.tolist() == parents and batch.depth_N.tolist() == depths
    assert_well_formed(batch, [ask])


@pytest.mark.parametrize(
    ("paths", "rows"),
    [
        (CHAIN_3, ["1000", "1100", "1110", "1111"]),
        (TWO_BY_TWO, ["1000000", "1100000", "1010000", "1101000", "1100100", "1010010", "1010001"]),
    ],
    ids=["chain", "2x2"],
)
def test_a_node_may_attend_to_its_path(paths, rows):
    batch = grown(Ask(num_nodes=len(paths)), StaticTreePolicy(paths))
    assert [f"{mask:0{len(rows)}b}"[::-1] for mask in batch.ancestors_N.tolist()] == rows


@pytest.mark.parametrize(
    "paths", [((0,),), CHAIN_3, ((0,), (1,), (2,)), THREE_BY_TWO], ids=["1", "chain", "star", "3x2"]
)
def test_greedy_children_are_proposed_in_breadth_first_order(paths):
    """The logits rank base + 0, 1, 2, ..., so that a correct tree counts up from base in row order."""
    bases = [42, 60]
    children = [sum(p[:-1] == parent for p in paths) for parent in [(), *paths]]

    def logits(first_B: np.ndarray) -> torch.Tensor:
        out = np.full((len(first_B), 100), -100.0, dtype=np.float32)
        for row, first in zip(out, first_B, strict=True):
            row[first : first + 5] = 100 - np.arange(5)
        return torch.from_numpy(out)

    def expand(frontier: Frontier) -> torch.Tensor:
        # Row r's children come after those of rows 0 .. r - 1.
        first = [sum(children[:r]) for r in frontier.row_F]
        return logits(np.array(bases)[frontier.request_F] + np.array(first))

    count = len(paths)
    batch, *_ = grow(
        logits(np.array(bases)),
        np.array([1, 2]),
        np.array([5, 9]),
        limits=oracles.limits([count] * 2, [9] * 2),
        sampling=SamplingBatch.stack([SamplingSettings(temperature=0.0)] * 2),
        policy=StaticTreePolicy(paths),
        expand=expand,
        vocab=DraftVocabulary(target_size=100),
    )
    assert request(batch, 0)["token_N"] == [1, *range(42, 42 + count)]
    assert request(batch, 1)["token_N"] == [2, *range(60, 60 + count)]


@pytest.mark.parametrize("budget", range(0, 9))
def test_a_static_tree_is_cut_to_a_budget_in_breadth_first_order(budget):
    whole = oracles.paths_of(grown(Ask(num_nodes=7), StaticTreePolicy(RAGGED)))
    assert oracles.paths_of(grown(Ask(num_nodes=budget), StaticTreePolicy(RAGGED))) == whole[: 1 + min(budget, 7)]


@pytest.mark.parametrize("depth", range(0, 4))
def test_a_static_tree_is_cut_to_a_depth(depth):
    whole = oracles.paths_of(grown(Ask(num_nodes=7), StaticTreePolicy(RAGGED)))
    cut = oracles.paths_of(grown(Ask(num_nodes=7, max_depth=depth), StaticTreePolicy(RAGGED)))
    assert cut == [path for path in whole if len(path) <= depth]


def test_a_chain_is_a_static_tree_and_reaches_63_nodes():
    ask = Ask(num_nodes=63, max_depth=63)
    batch = grown(ask, make_tree_policy(TreeConfig(kind="chain", num_speculative_tokens=63)))
    assert batch.parent_N.tolist() == list(range(-1, 63))
    assert batch.ancestors_N[-1] == -1  # all 64 bits
    assert_well_formed(batch, [ask])


# ---- dynamic trees


TYPICAL = (0.6, 0.17, 0.05)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4), st.integers(0, 20))
def test_a_budget_goes_to_the_largest_expected_values(seed, children, room, slots):
    weights = -np.sort(-np.random.default_rng(seed).dirichlet(np.full(children, 0.6)))
    policy = DynamicTreePolicy(children, 4, TYPICAL)
    budgets = policy.split(np.array([slots]), np.array([0]), np.array([room]), weights[None])
    assert budgets.size_FK[0].tolist() == oracles.deal_best_first(slots, room, weights, TYPICAL[:children])


@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("seed", range(12))
def test_a_dynamic_tree_is_the_best_one_without_what_is_below_failed_nodes(seed, temperature):
    rng = np.random.default_rng(seed)
    params = SamplingSettings(
        temperature=temperature, seed=int(rng.integers(2**63)), top_k=int(rng.choice([0, 9])),
        top_p=float(rng.choice([1.0, 0.9])), min_p=float(rng.choice([0.0, 0.05])),
    )  # fmt: skip
    ask = Ask(
        num_nodes=int(rng.integers(1, 21)), max_depth=int(rng.integers(1, 5)), model=seed, params=params,
        min_prob=float(rng.choice([0, 0.2])), path_prob=float(rng.choice([0, 0.02])), index=int(rng.integers(1000)),
    )  # fmt: skip
    batch = grown(ask, DynamicTreePolicy(3, 4))
    candidates = oracles.candidates(
        lambda path: model_logits(seed, path).tolist(), max_depth=ask.max_depth, max_children=3, min_prob=0.0,
        path_prob=0.0, temperature=temperature, seed=params.seed, root_index=ask.index, calibration=[0.0],
        cuts=(params.top_k, params.top_p, params.min_p),
    )  # fmt: skip
    best = sorted(candidates, key=lambda path: -candidates[path])[: ask.num_nodes]
    expected = {path: candidates[path] for path in oracles.without_descendants(best, functools.partial(passes, ask))}
    got = dict(zip(oracles.paths_of(batch)[1:], batch.weight_N.tolist()[1:], strict=True))
    assert got == {path: pytest.approx(weight, rel=1e-4) for path, weight in expected.items()}
    assert_well_formed(batch, [ask])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.integers(0, MAX_TREE_NODES - 1),
    st.integers(0, 8),
    st.integers(1, 8),
    st.sampled_from([0.0, 1.0]),
)
def test_no_tree_ever_exceeds_its_budget_or_depth(seed, num_nodes, depth, children, temperature):
    asks = [
        Ask(
            num_nodes=num_nodes,
            max_depth=depth,
            model=seed,
            params=SamplingSettings(temperature=temperature, seed=seed),
        ),
        Ask(num_nodes=5, max_depth=2, model=seed + 1),
    ]
    assert_well_formed(Grower(asks, DynamicTreePolicy(children, 8)).run(), asks)


def test_an_unpruned_dynamic_tree_spends_its_whole_budget():
    for num_nodes in (1, 2, 15, 63):
        batch = grown(Ask(num_nodes=num_nodes, max_depth=8), make_tree_policy(TreeConfig()))
        assert len(batch.token_N) == 1 + num_nodes


def test_a_confident_draft_grows_deep_and_an_uncertain_one_wide():
    def depth(sharpness: float) -> int:
        grower = Grower([Ask(num_nodes=6, max_depth=8)], DynamicTreePolicy(8, 8))
        grower.logits_of = lambda model, path: sharpness * np.linspace(1, 0, V, dtype=np.float32)
        return int(grower.run().depth_N.max())

    assert depth(200.0) == 6 and depth(0.01) < 4


# ---- a batch


def mixed_asks() -> list[Ask]:
    return [
        Ask(num_nodes=12, max_depth=4, model=1, params=SamplingSettings(temperature=0.9, seed=5, top_p=0.9)),
        Ask(num_nodes=0, model=2),
        Ask(num_nodes=3, max_depth=1, model=3),
        Ask(num_nodes=20, max_depth=5, model=4, path_prob=0.05),
        Ask(num_nodes=9, max_depth=0, model=5),
        Ask(num_nodes=16, max_depth=3, model=6, min_prob=0.25, params=SamplingSettings(seed=2**64 - 1, min_p=0.1)),
        Ask(num_nodes=7, max_depth=6, model=1, index=21, params=SamplingSettings(temperature=0.9, seed=5, top_k=4)),
    ]


@pytest.mark.parametrize("policy", [DynamicTreePolicy(4, 8), StaticTreePolicy(RAGGED)], ids=["dynamic", "static"])
def test_requests_get_the_same_tree_together_and_alone_bit_for_bit(policy):
    asks = mixed_asks()
    together = Grower(asks, policy).run()
    assert_well_formed(together, asks)
    for b, ask in enumerate(asks):
        assert request(together, b) == request(grown(ask, policy), 0)


def test_an_empty_batch_grows_nothing():
    grower = Grower([], DynamicTreePolicy(4, 8), vocab=DraftVocabulary(target_size=V))
    trees, *_ = grow(
        torch.zeros(0, V),
        np.zeros(0, dtype=np.int32),
        np.zeros(0, dtype=np.int32),
        limits=oracles.limits([], []),
        sampling=SamplingBatch.stack([]),
        policy=grower.policy,
        expand=grower.expand,
        vocab=grower.vocab,
    )  # fmt: skip
    assert trees.offsets.tolist() == [0] and not grower.frontiers


def test_the_draft_model_runs_once_per_level_and_only_for_nodes_that_need_logits():
    asks, policy = mixed_asks(), StaticTreePolicy(RAGGED)
    grower = Grower(asks, policy)
    batch = grower.run()
    assert [frontier.depth for frontier in grower.frontiers] == list(range(1, len(grower.frontiers) + 1))
    for frontier in grower.frontiers:
        order = list(zip(frontier.request_F.tolist(), frontier.row_F.tolist(), strict=True))
        assert order == sorted(set(order))
        for b, row, parent, token, mask in zip(
            frontier.request_F,
            frontier.row_F,
            frontier.parent_row_F,
            frontier.token_F,
            frontier.ancestors_F,
            strict=True,
        ):
            tree = request(batch, b)
            assert tree["depth_N"][row] == frontier.depth < asks[b].max_depth
            assert (tree["parent_N"][row], tree["token_N"][row], tree["ancestors_N"][row]) == (parent, token, mask)
            assert path_probability(asks[b], grower.path[b, row]) >= asks[b].path_prob
    expanded = {
        (b, r) for frontier in grower.frontiers for b, r in zip(frontier.request_F, frontier.row_F, strict=True)
    }
    for b, ask in enumerate(asks):  # a node that was run has children, unless the min test failed after its forward
        parents = set(request(batch, b)["parent_N"])
        for row in range(1, len(request(batch, b)["token_N"])):
            if (b, row) in expanded and row not in parents:
                assert top_probability(ask, grower.path[b, row]) < ask.min_prob


def test_rows_of_displaced_nodes_are_used_again_and_masks_hold_the_path():
    """As many rows as nodes are enough for every node that is run, however many are displaced."""
    asks = [*mixed_asks(), Ask(num_nodes=5, max_depth=6, model=8)]
    grower = Grower(asks, DynamicTreePolicy(4, 8))
    grower.run()
    rows_used, depth_of = [], {(b, 0): 0 for b in range(len(asks))}
    mask_of = {(b, 0): 1 for b in range(len(asks))}
    for depth, frontier in enumerate(grower.frontiers, 1):
        order = list(zip(frontier.request_F.tolist(), frontier.row_F.tolist(), strict=True))
        assert frontier.depth == depth and order == sorted(set(order))
        parents = zip(order, frontier.parent_row_F.tolist(), frontier.ancestors_F.tolist(), strict=True)
        for (b, row), parent, mask in parents:
            assert 0 < row <= asks[b].num_nodes and depth_of[b, parent] == depth - 1
            assert mask == mask_of[b, parent] | 1 << row
        for (b, row), mask in zip(order, frontier.ancestors_F.tolist(), strict=True):
            depth_of[b, row], mask_of[b, row] = depth, mask
        rows_used += order
    assert len(rows_used) > len(set(rows_used))


# ---- thresholds


def probabilities(ask: Ask, path: Path) -> list[float]:
    p = ask.params
    return oracles.softmax(
        oracles.process(model_logits(ask.model, path).tolist(), p.temperature, p.top_k, p.top_p, p.min_p)
    )


def top_probability(ask: Ask, path: Path) -> float:
    return max(probabilities(ask, path))


def passes(ask: Ask, path: Path) -> bool:
    return top_probability(ask, path) >= ask.min_prob and path_probability(ask, path) >= ask.path_prob


def path_probability(ask: Ask, path: Path) -> float:
    return float(np.prod([probabilities(ask, path[:n])[path[n]] for n in range(len(path))]))


SHAPES = st.sampled_from(
    [DynamicTreePolicy(3, 4), DynamicTreePolicy(8, 4), StaticTreePolicy(RAGGED), StaticTreePolicy(CHAIN_3)]
)
THRESHOLD = st.one_of(st.just(0.0), st.floats(0, 1, width=32))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), SHAPES, THRESHOLD, THRESHOLD, st.sampled_from([0.0, 0.7]), st.integers(1, 24))
def test_pruning_removes_exactly_the_descendants_of_failing_nodes(
    seed, policy, min_prob, path_prob, temperature, nodes
):
    whole = Ask(num_nodes=nodes, max_depth=4, model=seed, params=SamplingSettings(temperature=temperature, seed=seed))
    pruned = Ask(**{**vars(whole), "min_prob": min_prob, "path_prob": path_prob})

    def is_expanded(path: Path) -> bool:
        return top_probability(whole, path) >= min_prob and path_probability(whole, path) >= path_prob

    everything = oracles.paths_of(grown(whole, policy))
    assert oracles.paths_of(grown(pruned, policy)) == oracles.without_descendants(everything, is_expanded)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    SHAPES,
    st.lists(THRESHOLD, min_size=2, max_size=2),
    st.booleans(),
    st.sampled_from([0.0, 1.0]),
)
def test_a_higher_threshold_gives_a_subset(seed, policy, values, is_min, temperature):
    low, high = sorted(values)
    params = SamplingSettings(temperature=temperature, seed=seed)
    trees = [
        grown(Ask(num_nodes=16, max_depth=4, model=seed, params=params, **{name: value}), policy)
        for value in (low, high)
        for name in ["min_prob" if is_min else "path_prob"]
    ]
    weights = [dict(zip(oracles.paths_of(t), t.weight_N.tolist(), strict=True)) for t in trees]
    assert weights[1].items() <= weights[0].items()


def test_a_value_equal_to_its_threshold_is_kept():
    half = np.full(V, -np.inf, dtype=np.float32)
    half[:2] = 0.0  # q = 1/2, 1/2 exactly

    def size(**thresholds: float) -> int:
        grower = Grower([Ask(num_nodes=14, max_depth=3, **thresholds)], DynamicTreePolicy(2, 3))
        grower.logits_of = lambda model, path: half
        return len(grower.run().token_N) - 1

    above = float(np.nextafter(np.float32(0.5), np.float32(1)))
    assert size() == size(min_prob=0.5) == 14 and size(min_prob=above) == 0
    assert size(path_prob=0.25) == 14 and size(path_prob=0.5) == 6 and size(path_prob=above) == 2
    assert size(path_prob=1.0) == 2 and size(min_prob=1.0) == 0


def test_the_path_test_of_a_static_tree_is_made_before_the_forward_pass():
    grower = Grower([Ask(num_nodes=7, max_depth=3, path_prob=1.0)], StaticTreePolicy(RAGGED))
    assert len(grower.run().token_N) > 1 and not grower.frontiers


def test_pruned_nodes_of_a_dynamic_tree_are_counted_at_their_depth():
    whole = Grower([Ask(num_nodes=14, max_depth=3)], DynamicTreePolicy(2, 3))
    pruned = Grower([Ask(num_nodes=14, max_depth=3, path_prob=1.0)], DynamicTreePolicy(2, 3))
    whole.logits_of = pruned.logits_of = lambda model, path: np.zeros(V, dtype=np.float32)
    assert len(whole.run().token_N) == 15 and whole.pruned_BD.tolist() == [[0, 0, 0]]
    assert len(pruned.run().token_N) == 3 and pruned.pruned_BD.tolist() == [[0, 4, 8]]


# ---- the noise


def test_children_are_ranked_by_the_noise_the_verifier_will_use():
    """With the target's own logits the first child of every node is the token the target draws there."""
    params = SamplingSettings(temperature=1.0, seed=77)
    ask = Ask(num_nodes=4, max_depth=4, params=params, model=9, index=31)
    path = oracles.paths_of(grown(ask, make_tree_policy(TreeConfig(kind="chain", num_speculative_tokens=4))))[-1]
    for depth in range(4):
        scores = model_logits(9, path[:depth]) + [oracles.gumbel(77, 31 + depth, token) for token in range(V)]
        assert path[depth] == scores.argmax()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_a_reduced_draft_vocabulary_sees_the_noise_of_its_target_ids(seed, temperature):
    ids = np.sort(np.random.default_rng(seed).choice(1000, size=V, replace=False))
    ask = Ask(num_nodes=14, max_depth=4, model=seed, params=SamplingSettings(temperature=temperature, seed=seed + 50))

    def draft_path(path: Path) -> Path:
        return tuple(np.searchsorted(ids, path).tolist())

    def full(model: int, path: Path) -> np.ndarray:
        out = np.full(1000, -np.inf, dtype=np.float32)
        out[ids] = model_logits(model, draft_path(path))
        return out

    reduced = Grower(
        [ask], DynamicTreePolicy(4, 4), lambda model, path: model_logits(model, draft_path(path)),
        DraftVocabulary(target_size=1000, target_ids=torch.from_numpy(ids)),
    ).run()  # fmt: skip
    whole = Grower([ask], DynamicTreePolicy(4, 4), full, DraftVocabulary(target_size=1000)).run()
    assert set(reduced.token_N.tolist()[1:]) <= set(ids.tolist())
    assert oracles.paths_of(reduced) == oracles.paths_of(whole)
    torch.testing.assert_close(reduced.weight_N, whole.weight_N)


def test_forbidden_tokens_never_become_children():
    """top-k 2 leaves two tokens: a budget of six per node, but no third child."""
    params = SamplingSettings(temperature=1.0, top_k=2, seed=1)
    batch = grown(Ask(num_nodes=40, max_depth=2, params=params), DynamicTreePolicy(8, 2))
    assert np.bincount(batch.parent_N[1:]).tolist() == [2, 2, 2]


def test_a_vocabulary_smaller_than_the_number_of_children_still_grows():
    for policy in (DynamicTreePolicy(8, 2), StaticTreePolicy(tuple((k,) for k in range(6)))):
        grower = Grower([Ask(num_nodes=6, max_depth=2)], policy, lambda model, path: np.zeros(3, dtype=np.float32))
        grower.vocab = DraftVocabulary(target_size=3)
        assert set(grower.run().token_N.tolist()[1:]) == {0, 1, 2}
