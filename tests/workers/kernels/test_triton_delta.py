"""The Triton kernels of gated delta nets leave what their torch twin leaves; without a GPU Triton interprets them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: nothing was shown about its kernels")

from tests.support.attention_cases import paths_of
from tests.workers.kernels.test_torch_delta import GATES, SHAPES, error, metadata
from workers.kernels import reference, triton_delta
from workers.kernels.interpreted import is_interpreted
from workers.kernels.select import Kernels
from workers.kernels.torch_delta import DeltaWeights, LayerStates, chains
from workers.kernels.triton_delta import DeltaTables
from workers.types import AttentionMetadata, Folds

torch.set_num_threads(1)

DEVICE = "cpu" if is_interpreted() else "cuda"
HEADS = {
    "0.8B": (2, 2, 16, 16),
    "4B": (2, 4, 16, 16),
    "27B": (1, 3, 32, 32),
    "122B": (1, 4, 16, 48),
    "odd": (2, 2, 40, 20),
    "least": (1, 1, 16, 16),
}
"""Key heads, value heads and widths, in the proportions of published models; "odd" has widths of no power of 2."""
NUM_SEATS = 12


class Net:
    """A layer of random weights. nearness: of all keys to one another."""

    def __init__(
        self, seed: int, heads: str, gate: str = "usual", nearness: float = 0.0, dtype: str = "float32"
    ) -> None:
        self.generator, self.nearness = torch.Generator().manual_seed(seed), nearness
        self.dtype = getattr(torch, dtype)
        K, H, d, v = self.heads = HEADS[heads]
        self.num_channels = 2 * K * d + H * v
        conv_4C = self.normal(4, self.num_channels) / 2
        self.weights = DeltaWeights(conv_4C, -GATES[gate] * self.normal(H).abs(), self.normal(H), K)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Return projected rows as a part of wider ones, and the inputs of their gates."""
        K, H, d, v = self.heads
        near = torch.zeros(self.num_channels + H * v)
        near[K * d : 2 * K * d] = self.nearness
        rows = self.normal(count, len(near)) * (1 - near) + 2 * self.normal(len(near)) * near
        return rows.to(self.dtype)[:, : self.num_channels], self.normal(count, 2 * H).to(self.dtype)

    def states(self, num_stashed: int) -> LayerStates:
        """Return states of all seats; the null seat has zeros."""
        _, H, d, v = self.heads
        stash = self.normal(num_stashed, self.num_channels + 2 * H).to(self.dtype)
        made = LayerStates(
            self.normal(NUM_SEATS, H, d, v), self.normal(NUM_SEATS, 3, self.num_channels).to(self.dtype), stash
        )
        for each in made[:2]:
            each[0] = 0
        return made


def step(trees: list[list[int]], chunks: list[int], seats: list[int]) -> AttentionMetadata:
    """Return a step of trees and chunks; a chunk of an odd place in the list goes on from its own seat."""
    masks = [sum(1 << row for row in path) for parents in trees for path in paths_of(parents)]
    sizes = [len(parents) for parents in trees] + chunks
    write = [0] * len(trees) + seats[len(trees) : len(sizes)]
    read = seats[: len(trees)] + [seat * (i % 2) for i, seat in enumerate(seats[len(trees) : len(sizes)])]
    return metadata(sizes, masks + [0] * sum(chunks), read, write)


def random_tree(rng: random.Random, shape: str, rows: int) -> list[int]:
    return [-1, *(SHAPES[shape](rng, row) for row in range(1, rows))]


def fold_of(rng: random.Random, trees: list[list[int]], seats: list[int]) -> Folds:
    """Accept a random path of each tree; keep the state behind some row of the first."""
    offsets = np.cumsum([0, *map(len, trees)])
    paths = [rng.choice(paths_of(parents)) for parents in trees]
    return Folds(
        offsets=torch.tensor(np.cumsum([0, *map(len, paths)]), dtype=torch.int32),
        row_A=torch.tensor([offsets[i] + row for i, path in enumerate(paths) for row in path], dtype=torch.int32),
        seat_F=torch.tensor(seats[: len(trees)], dtype=torch.int32),
        keep_row_K=torch.tensor([rng.randrange(len(paths[0]))], dtype=torch.int32),
        keep_seat_K=torch.tensor([NUM_SEATS - 1], dtype=torch.int32),
    )


def run(
    kernels: Kernels,
    net: Net,
    own: AttentionMetadata,
    rows: tuple[Tensor, Tensor],
    before: LayerStates,
    folds: Folds | None = None,
    plant: Callable[[DeltaTables], object] = lambda plan: None,
) -> tuple[Tensor, ...]:
    """Return the outputs of a step and what it leaves: states, inputs, and the stash; then states and inputs folded."""
    weights = DeltaWeights(*(x.to(DEVICE) for x in net.weights[:3]), net.weights.num_keys)
    layer = LayerStates(*(x.clone().to(DEVICE) for x in before))
    plan = kernels.delta_plan(own, DEVICE)
    plant(plan)  # type: ignore[arg-type]
    left = [kernels.delta_net(*(x.to(DEVICE) for x in rows), weights, plan, layer), *(x.clone() for x in layer)]
    if folds is not None:
        kernels.delta_fold(folds.row_A.to(DEVICE), weights, kernels.delta_plan(chains(folds), DEVICE), layer)
        left += layer[:2]
    return tuple(x.cpu() for x in left)


def compare(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], tolerance: float = 1e-5) -> None:
    for actual, expected in zip(found, wanted, strict=True):
        if actual.numel():
            assert error(actual.float(), expected.float()) < tolerance


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, pytest.param(200, marks=pytest.mark.full)])
def test_trees_and_their_accepted_paths_equal_the_twins(count: int, shape: str) -> None:
    """Trees have 1 to 64 rows, with `--full` a thousand steps in all; in some of them keys are nearly equal."""
    rng = random.Random(shape)
    for seed in range(count):
        sizes = [rng.choice([1, 2, 15, 16, 17, 33, 64, rng.randrange(1, 65)]) for _ in range(rng.choice([1, 2, 3]))]
        trees = [random_tree(rng, shape, rows) for rows in sizes]
        seats = rng.sample(range(1, NUM_SEATS - 1), len(trees))
        net = Net(seed, rng.choice(list(HEADS)), rng.choice(list(GATES)), nearness=rng.choice([0, 0.97]))
        own, rows, before = step(trees, [], seats), net.rows(sum(sizes)), net.states(sum(sizes))
        folds = fold_of(rng, trees, seats)
        found, wanted = (run(kernels, net, own, rows, before, folds) for kernels in (triton_delta, reference))
        compare(found, wanted)
        assert torch.equal(found[1], before[0]), "rows of trees move no state"


@pytest.mark.parametrize(
    "heads", [pytest.param(name, marks=[] if name in ("27B", "odd") else pytest.mark.full) for name in HEADS]
)
def test_chunks_beside_trees_move_states_on_and_keep_those_that_are_named(heads: str) -> None:
    """A new request, one that goes on, and one with a state in a block, where blocks meet and behind its last row."""
    rng, trees = random.Random(heads), [[-1, 0, 0, 1, 3], [-1], random_tree(random.Random(1), "random", 18)]
    sizes, seats = [18, 1, 34], [1, 2, 3, 4, 5, 6]
    net, own = Net(len(heads), heads), step(trees, sizes, seats)
    num_tree_rows, num_rows = 24, 24 + sum(sizes)
    begin = num_rows - 34
    own = replace(
        own,
        keep_row_K=np.array([num_tree_rows + 15, begin + 4, begin + 20, num_rows - 1]),
        keep_seat_K=np.array([7, 8, 9, 10]),
    )
    rows, before = net.rows(num_rows), net.states(num_tree_rows)
    folds = fold_of(rng, trees, seats)
    found, wanted = (run(kernels, net, own, rows, before, folds) for kernels in (triton_delta, reference))
    compare(found, wanted)
    moved = (found[1] != before[0]).flatten(1).any(1).nonzero().flatten().tolist()
    assert moved == [4, 5, 6, 7, 8, 9, 10], "only seats that are named are written"


def test_rows_of_16_bits_are_computed_in_float32() -> None:
    trees, seats = [random_tree(random.Random(2), "random", 20)], [3, 5]
    net = Net(0, "27B", dtype="bfloat16")
    own, rows, before = step(trees, [9], seats), net.rows(29), net.states(20)
    folds = fold_of(random.Random(3), trees, seats)
    found, wanted = (run(kernels, net, own, rows, before, folds) for kernels in (triton_delta, reference))
    assert found[0].dtype == found[1].dtype == torch.float32 and found[2].dtype == torch.bfloat16
    compare(found, wanted)


def test_a_stash_without_room_for_all_rows_has_the_first() -> None:
    net, own = Net(0, "0.8B"), step([[-1, 0, 1], [-1, 0]], [], [1, 2])
    rows, before = net.rows(5), net.states(4)
    found, wanted = (run(kernels, net, own, rows, before) for kernels in (triton_delta, reference))
    compare(found, wanted)
    assert torch.equal(found[3], torch.cat([x[:4] for x in rows], dim=1))


def test_what_is_planted_wrong_shows() -> None:
    """Row 20 of a tree is a child of row 7, in an earlier block, beside row 19; row 22 has path 0 .. 7, 20, 21."""
    parents = [-1, *range(7), *range(7, 19), 7, 20, 21]
    net, own = Net(1, "least", "slow"), step([parents], [4], [3, 4])
    num_rows = len(parents) + 4
    rows, before = net.rows(num_rows), net.states(len(parents))

    def section(plan: DeltaTables, number: int) -> Tensor:
        return plan.rows[number * plan.padded_rows :][: plan.padded_rows]

    plants: dict[str, Callable[[DeltaTables], object]] = {
        "an ancestor in an earlier block": lambda plan: plan.path_N[22].bitwise_xor_(1 << 7),
        "an ancestor in its block": lambda plan: plan.path_N[22].bitwise_xor_(1 << 20),
        "a sibling": lambda plan: plan.path_N[22].bitwise_or_(1 << 19),
        "the convolution's parent": lambda plan: section(plan, 2)[22].fill_(19),
        "the tree's first row": lambda plan: section(plan, 4)[16 : len(parents)].fill_(16),
    }
    right = run(triton_delta, net, own, rows, before)
    compare(right, run(reference, net, own, rows, before))
    for what, plant in plants.items():
        wrong = run(triton_delta, net, own, rows, before, plant=plant)
        assert (wrong[0][22] - right[0][22]).abs().max() > 1e-3, what
        assert torch.equal(wrong[0][:16], right[0][:16]), "rows off its path stay"
    net.weights = net.weights._replace(decay_H=2 * net.weights.decay_H)
    wrong = run(triton_delta, net, own, rows, before)
    assert ((wrong[0] - right[0]).flatten(1).abs().amax(1) > 1e-3).sum() > 10, "a decay"


def test_a_plan_is_filled_for_another_step_of_its_size() -> None:
    net = Net(2, "0.8B")
    first, second = step([[-1, 0, 0, 2]], [20], [1, 2]), step([[-1, 0]], [22], [3, 4])
    rows, before = net.rows(24), net.states(4)
    plan = triton_delta.delta_plan(first, DEVICE)
    filled = triton_delta.delta_plan(second, DEVICE, plan)
    assert filled is plan and torch.equal(plan.rows, triton_delta.delta_plan(second, DEVICE).rows)
    with pytest.raises(AssertionError, match="for the size it was made for"):
        triton_delta.delta_plan(step([[-1]], [22], [3, 4]), DEVICE, plan)
    compare(run(triton_delta, net, second, rows, before), run(reference, net, second, rows, before))
