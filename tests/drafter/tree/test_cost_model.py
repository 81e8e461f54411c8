"""Trees under `auto`: the best nodes by calibrated survival, as many as pay for their time."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import drafter.tree.grow
from drafter.tree.cost_model import TreeCostModel, calibrate
from drafter.tree.frontier import DraftVocabulary, Frontier
from drafter.tree.grow import GrownTrees
from drafter.tree.policy import TYPICAL_CHILDREN, DynamicTreePolicy, StaticTreePolicy, TreePolicy
from tests.support import oracles
from tests.support.draft_costs import CALIBRATION, FREE, costs
from tests.support.growing import grow
from tests.support.oracles import Path
from workers.settings import SamplingSettings
from workers.types import DraftCosts, SamplingBatch

torch.set_num_threads(1)

V, CHILDREN, DEPTH = 8, 3, 3
SHAPE = DynamicTreePolicy(CHILDREN, DEPTH)
STATIC = StaticTreePolicy(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
CHAIN = StaticTreePolicy(((0,), (0, 0), (0, 0, 0)))


@dataclass(frozen=True)
class Ask:
    """One request's part of a batch."""

    model: int = 0
    num_nodes: int = 8
    max_depth: int = DEPTH
    min_prob: float = 0.0
    path_prob: float = 0.0
    temperature: float = 1.0
    auto: bool = True

    @property
    def candidates(self) -> dict[Path, float]:
        return self.survival(CALIBRATION)

    def survival(self, calibration: Sequence[float]) -> dict[Path, float]:
        return oracles.candidates(
            lambda path: model_logits(self.model, path).tolist(),
            max_depth=self.max_depth, max_children=CHILDREN, min_prob=self.min_prob, path_prob=self.path_prob,
            temperature=self.temperature, seed=self.model, root_index=20, calibration=calibration,
        )  # fmt: skip

    @property
    def best(self) -> dict[Path, float]:
        ranked = sorted(self.candidates.items(), key=lambda item: -item[1])
        return dict(ranked[: self.num_nodes])


@functools.cache
def model_logits(model: int, path: Path) -> np.ndarray:
    rng = np.random.default_rng([model, zlib.crc32(repr(path).encode())])
    return rng.normal(scale=1.0 + 2.0 * rng.random(), size=V).astype(np.float32)


def grown(asks: Sequence[Ask], draft_costs: DraftCosts = FREE, policy: TreePolicy = SHAPE) -> GrownTrees:
    paths: dict[tuple[int, int], Path] = {(b, 0): () for b in range(len(asks))}

    def expand(frontier: Frontier) -> torch.Tensor:
        for b, row, parent, token in zip(*frontier[1:5], strict=True):
            assert row <= asks[b].num_nodes, "the draft model has no more rows"
            paths[b, row] = (*paths[b, parent], int(token))
        keys = zip(frontier.request_F, frontier.row_F, strict=True)
        return torch.from_numpy(np.stack([model_logits(asks[b].model, paths[b, row]) for b, row in keys]))

    return grow(
        torch.from_numpy(np.stack([model_logits(ask.model, ()) for ask in asks])),
        np.zeros(len(asks), dtype=np.int64),
        np.full(len(asks), 20),
        limits=oracles.limits(
            [ask.num_nodes for ask in asks],
            [ask.max_depth for ask in asks],
            [ask.min_prob for ask in asks],
            [ask.path_prob for ask in asks],
            auto=[ask.auto for ask in asks],
        ),
        sampling=SamplingBatch.stack([SamplingSettings(temperature=ask.temperature, seed=ask.model) for ask in asks]),
        policy=policy,
        expand=expand,
        vocab=DraftVocabulary(target_size=V),
        costs=draft_costs,
    )


def weights(trees: GrownTrees, request: int = 0) -> dict[Path, float]:
    begin, end = trees.trees.offsets[request : request + 2].tolist()
    return dict(
        zip(oracles.paths_of(trees.trees, request)[1:], trees.trees.weight_N[begin + 1 : end].tolist(), strict=True)
    )


def assert_rooted(nodes: dict[Path, float]) -> None:
    assert all(path[:-1] in nodes or len(path) == 1 for path in nodes)


# ---- best-first growth


THRESHOLD = st.one_of(st.just(0.0), st.floats(0, 0.5, width=32))
ASK = st.builds(
    Ask,
    model=st.integers(0, 10**6),
    num_nodes=st.integers(1, 30),
    max_depth=st.integers(1, DEPTH),
    min_prob=THRESHOLD,
    path_prob=THRESHOLD,
    temperature=st.sampled_from([0.0, 0.4, 1.0]),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ASK)
@example(Ask(num_nodes=2, max_depth=2, temperature=0.0))  # a child may be likelier than children typically are
def test_without_costs_a_tree_is_the_best_that_the_thresholds_allow(ask):
    # A weight below the rounding error of the sum does not raise the throughput: such a node may be kept or not.
    got = {path: weight for path, weight in weights(grown([ask])).items() if weight > 1e-6}
    assert got == {path: pytest.approx(weight, rel=1e-3) for path, weight in ask.best.items() if weight > 1e-6}


def test_a_node_that_fails_a_threshold_frees_its_place():
    whole, pruned = (Ask(model=3, num_nodes=6, path_prob=p) for p in (0.0, 0.2))
    assert set(pruned.best) != set(whole.best) and len(weights(grown([pruned]))) == 6


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(ASK, min_size=2, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4))
def test_without_costs_requests_get_the_same_tree_together_and_alone(asks, autos):
    asks = [replace(ask, auto=auto) for ask, auto in zip(asks, autos, strict=False)]
    together = grown(asks)
    for b, ask in enumerate(asks):
        # A weight below the rounding error of the sum may be kept or not, as above.
        got, alone = (
            {path: weight for path, weight in own.items() if weight > 1e-6}
            for own in (weights(together, b), weights(grown([ask])))
        )
        assert got == pytest.approx(alone, rel=1e-6)


def test_growth_ends_when_the_draft_models_rows_do():
    """Displaced candidates keep their rows: `grown` asserts that no request gets more rows than exist."""
    for model in range(30):
        assert len(weights(grown([Ask(model=model, num_nodes=4)]))) == 4


def test_rows_are_breadth_first_and_parents_in_order():
    trees = grown([Ask(model=m, num_nodes=14) for m in range(5)]).trees
    for begin, end in zip(trees.offsets, trees.offsets[1:], strict=False):
        parents = trees.parent_N[begin:end].tolist()
        assert parents == sorted(parents)


def test_a_level_is_not_grown_if_it_does_not_pay():
    def depth(level: float) -> int:
        return int(grown([Ask(model=1, num_nodes=16)], costs(level=level)).trees.depth_N.max())

    depths = [depth(level) for level in (0.0, 2.0, 5.0, 100.0)]
    assert depths == sorted(depths, reverse=True) and depths[0] == DEPTH and depths[-1] == 1


def test_fewer_nodes_are_run_if_running_one_costs_more():
    asks = [Ask(model=m, num_nodes=16) for m in range(4)]
    run = [grown(asks, costs(run=run)).num_run for run in (0.0, 0.3, 1.0, 100.0)]
    assert run == sorted(run, reverse=True) and run[0] > run[1] > run[-1] == 0


# ---- the cut


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(0, 30), st.integers(0, 5), st.floats(0, 2), st.floats(0, 20))
def test_the_best_count_equals_exhaustive_search(seed, count, num_fixed, node, draft_ms):
    rng = np.random.default_rng(seed)
    ranked = np.sort(rng.random(count).astype(np.float32))[::-1]
    fixed = rng.random(num_fixed).astype(np.float32)
    step_costs = costs(node=node, sure=2.0)
    rates = [(2 + fixed.sum() + ranked[:n].sum()) / (draft_ms + 10 + node * (num_fixed + n)) for n in range(count + 1)]
    got = TreeCostModel(step_costs).best_count(ranked, draft_ms, fixed)
    assert rates[got] == pytest.approx(max(rates), rel=1e-5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(ASK, min_size=1, max_size=4), st.floats(0, 6, width=32))
def test_one_threshold_cuts_the_whole_batch(asks, node):
    free, cut = grown(asks), grown(asks, costs(node=node))
    before, after = ([weights(trees, b) for b in range(len(asks))] for trees in (free, cut))
    least_kept, most_cut = 1.0, 0.0
    for tree, whole in zip(after, before, strict=True):
        assert_rooted(tree)
        assert bool(tree) == bool(whole), "none starves"
        kept = sorted(tree.values(), reverse=True)
        least_kept = min([least_kept, *kept[1:]])  # the best of each request stays in any case
        most_cut = max([most_cut, *(weight for path, weight in whole.items() if path not in tree)])
    assert most_cut <= least_kept * 1.001


def test_fewer_nodes_are_verified_if_verification_costs_more():
    asks = [Ask(model=m, num_nodes=20) for m in range(4)]
    sizes = [len(grown(asks, costs(node=node)).trees.token_N) for node in (0.0, 0.3, 1.0, 3.0, 1000.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 4 * 21 > sizes[1] and sizes[-1] == 4 * 2


@pytest.mark.parametrize("policy", [STATIC, CHAIN])
def test_static_trees_are_cut_too_and_keep_their_shape(policy):
    asks = [Ask(model=m, num_nodes=6) for m in range(6)]
    whole = grown([replace(ask, auto=False) for ask in asks], policy=policy)
    cut = grown(asks, costs(node=1.0), policy=policy)
    for b in range(len(asks)):
        assert set(weights(cut, b)) <= set(weights(whole, b))
        assert_rooted(weights(cut, b))
    assert len(cut.trees.token_N) < len(whole.trees.token_N)
    assert cut.pruned_BD.sum() + len(cut.trees.token_N) <= len(whole.trees.token_N)
    assert len(grown(asks, costs(node=1000.0), policy=policy).trees.token_N) == 2 * len(asks), "none starves"


@pytest.mark.parametrize("policy", [STATIC, CHAIN])
def test_weights_of_fixed_trees_are_calibrated_if_the_trees_are_cut(policy):
    asks = [Ask(model=m, num_nodes=6, auto=bool(m % 2)) for m in range(4)]
    together = grown(asks, policy=policy)
    for b, ask in enumerate(asks):
        survival = ask.survival(CALIBRATION if ask.auto else (0.0,))
        got = weights(together, b)
        assert len(got) > 2 and got == pytest.approx({path: survival[path] for path in got}, rel=1e-3)


@pytest.mark.parametrize("policy", [STATIC, CHAIN])
def test_nodes_pruned_by_a_threshold_are_counted_at_their_depth(policy):
    num_nodes = len(weights(grown([Ask(num_nodes=6, auto=False)], policy=policy)))
    assert grown([Ask(num_nodes=6, min_prob=1.0, auto=False)], policy=policy).pruned_BD.tolist() == [[num_nodes, 0, 0]]
    for model in range(5):
        pruned = grown([Ask(model=model, num_nodes=6, path_prob=0.4, min_prob=0.3, auto=False)], policy=policy)
        assert len(weights(pruned)) + pruned.pruned_BD.sum() == num_nodes


def test_nodes_cut_from_a_chain_are_counted_at_its_end():
    asks = [Ask(model=m, num_nodes=3) for m in range(8)]
    cut = grown(asks, costs(node=0.7), CHAIN)
    kept = [len(weights(cut, b)) for b in range(len(asks))]
    assert len(set(kept)) > 1
    for row, k in zip(cut.pruned_BD.tolist(), kept, strict=True):
        assert row[:k] == [0] * k and sum(row) == 3 - k


# ---- the cost model


def test_draft_time_counts_levels_beyond_the_first_and_nodes_run_on_them():
    cost_model = TreeCostModel(costs(level=2.0, run=0.25))
    assert [cost_model.draft_ms(*bill) for bill in ((0, 0), (1, 0), (2, 3), (4, 10))] == [1.0, 1.0, 3.75, 9.5]


@pytest.mark.parametrize("policy", ["best-first", "budgeted"])
def test_growth_passes_its_work_so_far_to_the_cost_model_without_roots(monkeypatch, policy):
    told: list[tuple[int, int]] = []

    class Noted(TreeCostModel):
        def draft_ms(self, num_levels: int, num_run: int) -> float:
            told.append((num_levels, num_run))
            return super().draft_ms(num_levels, num_run)

    monkeypatch.setattr(drafter.tree.grow, "TreeCostModel", Noted)
    asks = [Ask(model=1, num_nodes=8), Ask(model=2, num_nodes=8)]
    if policy == "best-first":
        whole = grown(asks)
        assert told == [(1, 0), (2, 2 * CHILDREN), (DEPTH, whole.num_run)] and whole.num_levels == DEPTH
    else:
        grown(asks, policy=CHAIN)
        assert told == [(1, 0), (2, 2), (3, 4), (3, 4)], "after each level, and for the cut"


def test_growth_passes_all_nodes_but_the_roots_to_the_cost_model(monkeypatch):
    told: list[int] = []

    class Noted(TreeCostModel):
        def worth_running(self, weight_F, displaced_F, weights, draft_ms):
            told.append(len(weights))
            return super().worth_running(weight_F, displaced_F, weights, draft_ms)

    monkeypatch.setattr(drafter.tree.grow, "TreeCostModel", Noted)
    asks = [Ask(model=1, num_nodes=6), Ask(model=2, num_nodes=6)]
    grown(asks, policy=STATIC)
    assert told == [4, 10, 12], "two children of each root, then theirs, then one more"
    told.clear()
    grown(asks)
    assert told[0] == 2 * CHILDREN


def test_a_row_that_starts_a_bucket_costs_its_share_of_it():
    stairs = replace(FREE, nodes_T=torch.tensor([0, 8, 9, 16]), verify_ms_T=torch.tensor([10.0, 10.0, 14.0, 14.0]))
    cost_model = TreeCostModel(stairs)
    assert [float(cost_model.node_verify_ms(n)) for n in (0, 7, 8, 9, 15, 16, 99)] == [0, 0, 4 / 8, 0, 0, 0, 0]


def test_calibration_keeps_a_weight_of_zero():
    odds = torch.tensor(3.0)
    assert calibrate(torch.tensor([0.0, 0.5]), odds).tolist() == [0.0, pytest.approx(1 / (1 + np.exp(-3)))]


def test_a_node_is_run_if_its_expected_children_are_worth_its_time():
    """At a rate of 2.5 tokens over 11 ms; children survive with 0.62, 0.13, 0.06, ..., in all 0.895."""
    weights = np.array([0.8, 0.7], dtype=np.float32)
    expensive = 0.895 * 0.75 / (2.5 / 11)  # between what the two bring
    cost_model = TreeCostModel(costs(run=expensive))
    assert cost_model.worth_running(weights, np.zeros(2), weights, 1.0).tolist() == [True, False]
    assert TreeCostModel(costs()).worth_running(weights, np.zeros(2), weights, 1.0).tolist() == [True, True]


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize(
    ("node", "level", "run"), [(0.5, 0.5, 0.02), (0.02, 2.0, 0.2), (2.0, 0.0, 0.0), (0.0, 0.0, 0.0)]
)
def test_the_budget_set_before_drawing_is_the_best_number_of_typical_nodes(num_requests, node, level, run):
    survival = np.array([0.6, 0.35, 0.2, 0.12, 0.1, 0.08, 0.05, 0.04], dtype=np.float32)
    max_depth = 3

    def rate(slots: int) -> float:
        tokens = 2.0 + num_requests * float(survival[:slots].sum())
        draft_ms = 1.0 + level * (min(slots, max_depth) - 1) + run * num_requests * (slots - 1)
        return tokens / (draft_ms + 10.0 + node * num_requests * slots)

    got = TreeCostModel(costs(node, level, run, sure=2.0)).budget_before_drawing(survival, num_requests, max_depth)
    assert rate(got) == pytest.approx(max(rate(slots) for slots in range(1, 9)), rel=1e-5)


def test_a_tree_with_room_displaces_nothing_though_another_tree_is_full():
    """Even the node of least weight gets children while there is room for them."""
    large = Ask(model=4, num_nodes=39, temperature=0.0)
    together, alone = weights(grown([Ask(model=1, num_nodes=1), large]), 1), weights(grown([large]))

    def counted(tree: dict[Path, float]) -> set[Path]:
        """Leave out what the batch's sum of weights, in float32, may lose."""
        return {path for path, weight in tree.items() if weight > 1e-6}

    assert counted(together) == counted(alone) and len(counted(alone)) >= 38


def test_trees_without_auto_are_never_cut():
    asks = [Ask(model=1, num_nodes=9, auto=False), Ask(model=2, num_nodes=9)]
    together = grown(asks, costs(node=5.0))
    assert len(weights(together, 0)) == 9 > len(weights(together, 1))


def test_nodes_of_requests_without_auto_count_towards_the_verify_cost():
    """Twelve nodes are free and the thirteenth is expensive; nine belong to another request. Roots do not count."""
    step_costs = replace(
        FREE, nodes_T=torch.tensor([0, 12, 13, 1000]), verify_ms_T=torch.tensor([10.0, 10.0, 1e6, 1e6])
    )
    together = grown([Ask(model=1, num_nodes=9, auto=False), Ask(model=2, num_nodes=12)], step_costs)
    assert (len(weights(together, 0)), len(weights(together, 1))) == (9, 3)
    assert_rooted(weights(together, 1))


@pytest.mark.parametrize("policy", [STATIC, CHAIN])
def test_an_expensive_level_is_grown_for_requests_without_auto_alone(policy):
    expensive = costs(level=1000.0)
    whole = grown([Ask(model=1, num_nodes=6, auto=False)], policy=policy)
    beside = grown([Ask(model=1, num_nodes=6, auto=False), Ask(model=2, num_nodes=6)], expensive, policy)
    assert weights(beside, 0).keys() == weights(whole).keys() and beside.num_levels == whole.num_levels > 1
    shallow = grown([Ask(model=1, num_nodes=6, max_depth=1, auto=False), Ask(model=2, num_nodes=6)], expensive, policy)
    assert shallow.num_levels == 1 and all(len(path) == 1 for path in weights(shallow, 1))


def test_free_drafting_runs_no_node_whose_children_would_not_be_verified():
    """Rows of the draft model are scarce: nodes without gain must not take them from deeper levels."""
    cost_model = TreeCostModel(costs(node=0.5))
    sure, hopeless = np.float32(0.9), np.float32(0.01)
    weights = np.array([sure, hopeless, hopeless], dtype=np.float32)
    assert cost_model.worth_running(weights, np.zeros(3), weights, 1.0).tolist() == [True, False, False]


# ---- the rules in plain Python

SLOPE = ([0, 1000], [10.0, 60.0])
STAIRS = ([0, 1, 8, 9, 16, 17, 1000], [10.0, 11.0, 11.0, 13.0, 13.0, 16.0, 90.0])


@dataclass(frozen=True)
class PlainCostModel:
    """`TreeCostModel` written from its docstrings, one number at a time."""

    table: tuple[list[int], list[float]]
    first: float
    level: float
    node: float
    sure: float

    def told(self) -> TreeCostModel:
        nodes, ms = self.table
        step_costs = replace(FREE, nodes_T=torch.tensor(nodes, dtype=torch.int32), verify_ms_T=torch.tensor(ms))
        drafting = torch.tensor([self.first, self.level, self.node])
        return TreeCostModel(replace(step_costs, draft_ms_3=drafting, base_tokens_1=torch.tensor([self.sure])))

    def verify_ms(self, num_nodes: int) -> float:
        return float(np.interp(num_nodes, *self.table))

    def draft_ms(self, num_levels: int, num_run: int) -> float:
        return self.first + max(num_levels - 1, 0) * self.level + num_run * self.node

    def node_verify_ms(self, num_nodes: int) -> float:
        price = self.verify_ms(num_nodes + 1)
        flight = sum(self.verify_ms(n) <= price for n in range(num_nodes + 1, 1001))
        return (price - self.verify_ms(num_nodes)) / flight

    def worth_running(self, frontier: list[float], least: list[float], weights: list[float], ms: float) -> list[bool]:
        ranked = sorted(weights, reverse=True)
        rates = [(self.sure + sum(ranked[:n])) / (ms + self.verify_ms(n)) for n in range(len(ranked) + 1)]
        rate = max(rates)
        must = [max(place, rate * self.node_verify_ms(rates.index(rate))) for place in least]
        gain = [
            sum(max(weight * child - m, 0) for child in TYPICAL_CHILDREN)
            for weight, m in zip(frontier, must, strict=True)
        ]
        runs = [w > m and g >= rate * self.node for w, m, g in zip(frontier, must, gain, strict=True)]
        net = sum(g - rate * self.node for g, is_run in zip(gain, runs, strict=True) if is_run)
        return [is_run and net >= rate * self.level for is_run in runs]

    def budget(self, expected: list[float], num_requests: int, max_depth: int) -> int:
        def rate(slots: int) -> float:
            ms = self.draft_ms(min(slots, max_depth), num_requests * (slots - 1))
            gain = self.sure + num_requests * sum(expected[:slots])
            return gain / (ms + self.verify_ms(num_requests * slots))

        return max(range(1, len(expected) + 1), key=rate)


def floats(least: float, most: float) -> st.SearchStrategy[float]:
    """Draw numbers that float32 represents exactly, as on the wire."""
    return st.integers(int(least * 1024), int(most * 1024)).map(lambda n: n / 1024)


PLAIN = st.builds(
    PlainCostModel,
    table=st.sampled_from([SLOPE, STAIRS]),
    first=floats(0, 9),
    level=floats(0, 4),
    node=floats(0, 0.5),
    sure=floats(1, 16),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(PLAIN, st.integers(0, 10**6), st.integers(1, 24), st.integers(1, 4))
def test_the_nodes_worth_running_are_those_of_the_plain_rule(plain, seed, num_nodes, every):
    rng = np.random.default_rng(seed)
    weights = rng.random(num_nodes).astype(np.float32)
    frontier, ms = weights[::every], float(rng.uniform(1, 20))
    least = rng.choice([0.0, 0.1, 0.4], len(frontier)).astype(np.float32)
    got = plain.told().worth_running(frontier, least, weights, ms).tolist()
    assert got == plain.worth_running(frontier.tolist(), least.tolist(), weights.tolist(), ms)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(PLAIN, st.integers(1, 60), st.integers(1, 8), st.integers(1, 9))
def test_the_budget_before_drawing_is_that_of_the_plain_rule(plain, most, num_requests, max_depth):
    expected = (0.9 ** np.arange(1, most + 1)).astype(np.float32)
    got = plain.told().budget_before_drawing(expected, num_requests, max_depth)
    assert got == plain.budget(expected.tolist(), num_requests, max_depth)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(PLAIN, st.integers(0, 1100), st.integers(0, 9), st.integers(0, 300))
def test_times_and_rates_follow_the_tables(plain, num_nodes, num_levels, num_run):
    cost_model = plain.told()
    assert cost_model.draft_ms(num_levels, num_run) == pytest.approx(plain.draft_ms(num_levels, num_run), rel=1e-5)
    at_most = min(num_nodes, 999)
    assert cost_model.node_verify_ms(at_most) == pytest.approx(plain.node_verify_ms(at_most), rel=1e-3)
    assert cost_model.node_verify_ms(1000 + num_nodes) == 0
    rates = cost_model.throughput(np.array([0.5], dtype=np.float32), 1.0, np.full(num_nodes, 0.25, dtype=np.float32))
    assert rates.dtype == np.float32  # every drafter rank decides alike
    for n in range(2):
        rate = (plain.sure + 0.25 * num_nodes + 0.5 * n) / (1 + plain.verify_ms(min(num_nodes + n, 1000)))
        assert rates[n] == pytest.approx(rate, rel=1e-5)


def test_a_weight_of_one_is_calibrated_too():
    """Without a bound its logit would be infinite, which no odds could change."""
    assert float(calibrate(torch.ones(()), torch.tensor(-14.0))) == pytest.approx(0.455, abs=0.01)


def test_a_threshold_holds_on_every_level_beside_a_request_that_keeps_growing():
    """Whether a level pays is decided for all requests under `auto` together; thresholds are per request."""
    num_cut = 0
    for model in range(12):
        asks = [Ask(model=model, num_nodes=5, path_prob=0.2), Ask(model=99, num_nodes=5)]
        [cut, whole] = [weights(grown([replace(ask, auto=False)], policy=CHAIN)) for ask in asks]
        both = grown(asks, policy=CHAIN)
        assert weights(both, 0).keys() <= cut.keys() and weights(both, 1).keys() <= whole.keys()
        num_cut += 0 < len(cut) < len(whole)
    assert num_cut > 3


def test_roots_do_not_count_as_run():
    only_roots = grown([Ask(num_nodes=4, max_depth=1, auto=False)])
    assert (only_roots.num_levels, only_roots.num_run) == (1, 0)


def test_a_grown_tree_has_the_types_of_the_wire():
    trees = grown([Ask(num_nodes=6)]).trees
    found = {name: getattr(trees, name).dtype for name in ("offsets", "token_N", "parent_N", "depth_N", "weight_N")}
    assert found == {**dict.fromkeys(found, torch.int32), "weight_N": torch.float32}
    assert (trees.ancestors_N.dtype, trees.kind_N.dtype) == (torch.int64, torch.uint8)
