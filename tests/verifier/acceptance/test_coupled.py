"""The walk: follow the target's token down the tree, then emit the next one. Chains are trees, too."""

from __future__ import annotations

import pytest
import torch

from tests.support import oracles
from tests.support.verdicts import accept
from verifier.acceptance.coupled import walk
from workers.sampling.sampler import draw
from workers.settings import SamplingSettings
from workers.types import SamplingBatch

torch.set_num_threads(1)

V = 100
GREEDY = SamplingSettings(temperature=0.0)


def one_hot(tokens: list[int]) -> torch.Tensor:
    logits = torch.full((len(tokens), V), -100.0)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 100.0
    return logits


def emitted_by_chains(
    spec: list[list[int]], target: list[list[int]], params: SamplingSettings = GREEDY
) -> list[list[int]]:
    batch = oracles.trees([oracles.chain(drafts) for drafts in spec])
    logits_NV = one_hot([token for row in target for token in row])
    roots = torch.arange(len(spec)) + 40
    verdicts = accept(batch, logits_NV, SamplingBatch.stack([params] * len(spec)), roots)
    return [list(verdict.tokens) for verdict in verdicts]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("spec", "target", "expected"),
    [
        pytest.param([[1, 2, 3]], [[1, 2, 3, 4]], [[1, 2, 3, 4]], id="all accepted"),
        pytest.param([[1, 2, 3]], [[1, 5, 3, 4]], [[1, 5]], id="cut at the first mismatch"),
        pytest.param([[1, 2], [3]], [[1, 2, 5], [3, 4]], [[1, 2, 5], [3, 4]], id="ragged"),
        pytest.param([[1]], [[1, 2]], [[1, 2]], id="one draft"),
        pytest.param([[]], [[5]], [[5]], id="no draft"),
        pytest.param([[1, 2, 3], [4, 5, 6]], [[1, 2, 7, 6], [4, 8, 6, 9]], [[1, 2, 7], [4, 8]], id="two mismatches"),
        pytest.param([[1, 2]], [[1, 2, 3]], [[1, 2, 3]], id="two accepted"),
        pytest.param([[1]], [[2, 3]], [[2]], id="none accepted"),
        pytest.param([[1, 2], [3, 4]], [[1, 5, 6], [3, 4, 7]], [[1, 5], [3, 4, 7]], id="one each way"),
    ],
)
def test_a_chain_is_accepted_up_to_the_targets_first_other_token(spec, target, expected, temperature):
    # A gap of 200 between logits is far beyond any noise: both temperatures must say the same.
    assert emitted_by_chains(spec, target, SamplingSettings(temperature=temperature, seed=3)) == expected


def test_a_placeholder_is_never_accepted():
    assert emitted_by_chains([[1, -1, -1]], [[1, 2, 3, 4]]) == [[1, 2]]


TWO_BY_TWO = ([-1, 0, 0, 1, 1, 2, 2], [50, 7, 9, 5, 6, 8, 4])


@pytest.mark.parametrize(
    ("winners", "path", "tokens"),
    [
        ({0: 9, 2: 4, 6: 11}, (2, 6), (9, 4, 11)),
        ({0: 7, 1: 6, 4: 1}, (1, 4), (7, 6, 1)),
        ({0: 3}, (), (3,)),
        ({0: 9, 2: 5}, (2,), (9, 5)),
    ],
    ids=["second branch", "first branch", "root only", "a child of another node is not followed"],
)
def test_a_tree_is_walked_along_its_own_edges(winners, path, tokens):
    # Rows that the walk must not read are tempting: they say what the emitted token's row would.
    rows = [winners.get(row, tokens[-1]) for row in range(7)]
    batch = oracles.tree(*TWO_BY_TWO)
    (verdict,) = accept(batch, one_hot(rows), SamplingBatch.stack([GREEDY]), torch.tensor([10]))
    assert (verdict.path, verdict.tokens, verdict.bonus_token) == (path, tokens, tokens[-1])
    assert (verdict.num_drafted, verdict.num_verified) == (6, 6)
    assert len(verdict.path) <= 2


def test_equal_tokens_in_different_branches_are_different_nodes():
    # 0 -> {5, 6}, both have a child 5: the one below 6 is row 4.
    (verdict,) = walk(oracles.tree([-1, 0, 0, 1, 2], [9, 5, 6, 5, 5]), [6, 1, 5, 2, 3])
    assert verdict.path == (2, 4) and verdict.tokens == (6, 5, 3)


def test_a_depth_first_order_is_walked_too():
    (verdict,) = walk(oracles.tree([-1, 0, 1, 0, 3], [9, 5, 6, 7, 8]), [7, 1, 2, 8, 4])
    assert verdict.path == (3, 4) and verdict.tokens == (7, 8, 4)


def ragged_batch():
    each = [oracles.chain([1, 2, 3]), oracles.chain([4]), oracles.chain([]), oracles.chain([2, 2]), TWO_BY_TWO]
    params = [
        SamplingSettings(temperature=1.0, seed=1),
        GREEDY,
        SamplingSettings(temperature=0.0, top_k=2, min_p=0.5),
        SamplingSettings(temperature=0.6, top_p=0.7, seed=4),
        SamplingSettings(temperature=1.0, top_k=4, seed=2**63 + 5),
    ]
    positions = [3, 77, 0, 12, 400]
    rows = [len(tokens) for _, tokens in each]
    logits = [2 * torch.randn(n, 12, generator=torch.Generator().manual_seed(n + i)) for i, n in enumerate(rows)]
    return each, params, positions, logits


def test_a_ragged_batch_gives_every_request_its_result_alone():
    each, params, positions, logits = ragged_batch()
    together = accept(oracles.trees(each), torch.cat(logits), SamplingBatch.stack(params), torch.tensor(positions))
    for one, p, position, rows, verdict in zip(each, params, positions, logits, together, strict=True):
        assert accept(oracles.tree(*one), rows, SamplingBatch.stack([p]), torch.tensor([position])) == [verdict]


def test_every_row_uses_the_noise_of_the_next_position():
    """The noise's index is the position of the drawn token."""
    each, params, positions, logits = ragged_batch()
    batch, one_each = oracles.trees(each), SamplingBatch.stack(params)
    request_N = torch.arange(len(each)).repeat_interleave(batch.offsets.diff())
    index_N = torch.tensor(positions)[request_N] + 1 + batch.depth_N
    drawn = draw(torch.cat(logits), one_each.rows(request_N), index_N).tolist()
    assert accept(batch, torch.cat(logits), one_each, torch.tensor(positions)) == walk(batch, drawn)


def test_greedy_rows_in_a_mixed_batch_follow_the_argmax():
    each, params, positions, _ = ragged_batch()
    target = [[9, 9, 9, 9], [4, 6], [3], [1, 1, 1], [0] * 7]
    verdicts = accept(
        oracles.trees(each),
        one_hot([t for row in target for t in row]),
        SamplingBatch.stack(params),
        torch.tensor(positions),
    )
    assert [v.tokens for v in verdicts] == [(9,), (4, 6), (3,), (1,), (0,)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_give_a_short_valid_answer(temperature):
    batch = oracles.trees([oracles.chain([1, 2, 3]), TWO_BY_TWO])
    params = SamplingBatch.stack([SamplingSettings(temperature=temperature, top_p=0.9)] * 2)
    for verdict in accept(batch, torch.full((11, V), torch.nan), params, torch.tensor([3, 4])):
        assert 1 <= len(verdict.tokens) <= 4
        assert all(0 <= token < V for token in verdict.tokens)


def test_logits_have_one_row_per_tree_row_exactly():
    batch = oracles.tree(*oracles.chain([1, 2]))
    with pytest.raises(AssertionError):
        accept(batch, torch.zeros(4, V), SamplingBatch.stack([GREEDY]), torch.tensor([0]))
