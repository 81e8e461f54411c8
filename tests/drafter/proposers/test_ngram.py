"""N-gram lookup: reference tables for chains, all continuations as siblings, trees compared with brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drafter.proposers.ngram import MatchLengths, NgramProposer, find_matches
from drafter.tree.frontier import DraftVocabulary, Frontier, NgramCandidates
from drafter.tree.score import ChildScores, score
from workers.settings import Rule, SamplingSettings
from workers.types import DraftRequest, SamplingBatch

PAGE = 4
VOCAB = 10000


def draft_request(
    histories: list[list[int]], tables: np.ndarray, *, start: list[int] | None = None, num_nodes: int = 8
) -> DraftRequest:
    """Feed each request's tokens from `start` on; an empty `start` feeds everything."""
    start = start or [0] * len(histories)
    fed = [history[first:] for history, first in zip(histories, start, strict=True)]
    size = len(histories)
    return DraftRequest(
        **empty_fields()
        | {
            "offsets": torch.tensor(np.cumsum([0, *map(len, fed)]), dtype=torch.int32),
            "start_B": torch.tensor(start, dtype=torch.int32),
            "token_M": torch.tensor([token for tokens in fed for token in tokens], dtype=torch.int32),
            "page_table_BP": torch.from_numpy(tables.astype(np.int32)),
            "num_nodes_B": torch.full((size,), num_nodes, dtype=torch.int32),
        }
    )


def empty_fields() -> dict[str, torch.Tensor]:
    """Return the fields of a DraftRequest that lookup does not read."""
    return {name: torch.empty(0) for name in DraftRequest.__dataclass_fields__}


def propose(histories: list[list[int]], lengths: MatchLengths) -> tuple[NgramProposer, NgramCandidates]:
    pages_each = max(len(history) for history in histories) // PAGE + 1
    tables = np.random.default_rng(0).permutation(len(histories) * pages_each).reshape(len(histories), -1) + 1
    proposer = NgramProposer(lengths, VOCAB, tables.size + 1, PAGE)
    return proposer, proposer.extend(draft_request(histories, tables))


def children(candidates: NgramCandidates, node: int = 0) -> list[int]:
    return [int(t) for t, q in zip(candidates.token_FK[node], candidates.log_q_FK[node], strict=True) if q > -np.inf]


def child_level(request: list[int], row: list[int], parent: list[int], token: list[int], depth: int) -> Frontier:
    as_array = [np.array(values, dtype=np.int64) for values in (request, row, parent, token)]
    return Frontier(depth, *as_array, np.zeros(len(row), dtype=np.int64))


def chain(history: list[int], lengths: MatchLengths, num: int) -> list[int]:
    """Return the path of first children."""
    proposer, candidates = propose([history], lengths)
    tokens: list[int] = []
    while len(tokens) < num and (found := children(candidates)):
        tokens.append(found[0])
        candidates = proposer.expand(child_level([0], [len(tokens)], [len(tokens) - 1], tokens[-1:], len(tokens)))
    return tokens


LEFTMOST = [
    ("1 2 3 4 1 2 3 5 6", (2, 2), 2, ""),
    ("1 2 3 4 1 2 3", (2, 2), 3, "4 1 2"),
    ("1 2 3 4 1 2 3", (2, 2), 2, "4 1"),
    ("1 2 3 4 1 2 3", (1, 1), 3, "4 1 2"),
    ("1 2 3 4 1 2 3", (1, 1), 2, "4 1"),
    ("1 3 6 2 3 4 1 2 3", (2, 2), 3, "4 1 2"),
    ("1 3 6 2 3 4 1 2 3", (1, 1), 2, "6 2"),
    ("1 2 3 4 5", (2, 2), 2, ""),
    ("1 2 3 4 1 2 3", (4, 4), 2, ""),
    ("1 2 3 4 1 2 3", (3, 4), 2, "4 1"),
    ("2 3 4 5 1 2 3 4 1 2 3 4", (3, 4), 2, "1 2"),
    ("3 4 5 2 3 4 1 2 3 4", (2, 4), 2, "1 2"),
    ("1 2 3 100 1 2 3 200 1 2 3 300 1 2 3", (3, 3), 2, "100 1"),
    ("1 2 3 1 2", (2, 2), 2, "3 1"),
    ("4 5 6", (2, 2), 2, ""),
    ("7 8 9 7 8", (2, 2), 2, "9 7"),
    (" ".join(map(str, [*range(8192), 4096, 4097])), (2, 2), 2, "4098 4099"),
    ("7 7", (1, 1), 3, "7"),  # an occurrence may overlap the end, but is never the end itself
    ("7", (1, 5), 3, ""),
    ("1 2 3 1 2", (2, 2), 9, "3 1 2"),  # a copy stops where the history does
    ("1 2 7 2 1 2 7 1 9 1", (1, 1), 3, "2 7 2"),  # a copy goes on, whatever its own tokens would match
]


@pytest.mark.parametrize(("history", "lengths", "num", "drafts"), LEFTMOST)
def test_a_chain_copies_the_leftmost_longest_match(history, lengths, num, drafts):
    assert chain([int(t) for t in history.split()], MatchLengths(*lengths), num) == [int(t) for t in drafts.split()]


def test_an_empty_history_matches_nothing():
    assert len(find_matches(np.zeros(0, dtype=np.int32), MatchLengths(2, 2)).place_P) == 0


RIGHTMOST = [
    ("1 2 3 100 1 2 3 200 1 2 3 300 1 2 3", (3, 3), "300 1"),
    ("1 2 3 4 50 51 2 3 4 60 61 1 2 3 4", (3, 4), "50 51"),
    ("2 3 4 50 51 3 4 60 61 1 2 3 4", (2, 4), "50 51"),
    ("9 1 2 3 8 1 2 3", (2, 3), "8 1"),
    ("7 1 2 9 1 2", (2, 3), "9 1"),
    ("1 2 3 4 1", (1, 1), "2 3"),
    ("1 2 1 2", (2, 2), "1 2"),
]


@pytest.mark.parametrize(("history", "lengths", "drafts"), RIGHTMOST)
def test_a_tree_holds_the_rightmost_match_too(history, lengths, drafts):
    first, second = (int(t) for t in drafts.split())
    proposer, candidates = propose([[int(t) for t in history.split()]], MatchLengths(*lengths))
    assert first in children(candidates)
    assert second in children(proposer.expand(child_level([0], [1], [0], [first], 1)))


def test_all_continuations_are_siblings_longest_match_first_then_leftmost():
    _, candidates = propose([[1, 2, 3, 100, 2, 3, 300, 9, 3, 400, 1, 2, 3, 200, 1, 2, 3]], MatchLengths(1, 3))
    assert children(candidates) == [100, 200, 300, 400]


def brute_force(history: list[int], path: list[int], lengths: MatchLengths) -> list[int]:
    """Return the candidates after `path`, by comparing every position."""
    found: dict[int, tuple[int, int]] = {}
    for place in range(1, len(history)):
        length = 0
        while length < min(lengths.max, place) and history[place - 1 - length] == history[-1 - length]:
            length += 1
        follows = history[place : place + len(path) + 1]
        if length >= lengths.min and follows[:-1] == path:
            found[follows[-1]] = min(found.get(follows[-1], (0, 0)), (-length, place))
    return sorted(found, key=found.__getitem__)


@pytest.mark.parametrize("seed", range(20))
def test_trees_of_a_batch_equal_brute_force(seed):
    rng = np.random.default_rng(seed)
    lengths = MatchLengths(1 + seed % 2, 1 + seed % 2 + seed % 4)
    histories = [rng.integers(0, 4, rng.integers(1, 60)).tolist() for _ in range(3)]
    proposer, candidates = propose(histories, lengths)
    nodes = [(g, 0, list[int]()) for g in range(3)]  # request, row, path
    num_rows = [1, 1, 1]
    for depth in range(1, 5):
        wanted = [(g, row, path, brute_force(histories[g], path, lengths)) for g, row, path in nodes]
        assert [children(candidates, i) for i in range(len(nodes))] == [tokens for *_, tokens in wanted]
        nodes, parents = [], []
        for g, row, path, tokens in wanted:
            for token in tokens[:3]:
                nodes.append((g, num_rows[g], [*path, token]))
                parents.append(row)
                num_rows[g] += 1
        if not nodes:
            return
        request, row = [g for g, *_ in nodes], [row for _, row, _ in nodes]
        candidates = proposer.expand(child_level(request, row, parents, [path[-1] for *_, path in nodes], depth))


def test_weights_agree_with_the_order_and_leave_mass_for_unseen_tokens():
    # The second candidate occurs more often than the first, at the same match length.
    _, candidates = propose([[1, 5, 1, 6, 1, 6, 1, 6, 1]], MatchLengths(1, 1))
    assert children(candidates) == [5, 6]
    q = np.exp(candidates.log_q_FK[0].astype(np.float64))
    assert q[0] > q[1] > 0 and q.sum() < 1


def test_a_longer_match_has_more_probability():
    totals = []
    for length in (1, 2, 5):
        _, candidates = propose([[1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5]], MatchLengths(1, length))
        totals.append(float(np.exp(candidates.log_q_FK).sum()))
    assert totals == sorted(totals) and totals[0] == pytest.approx(1 / 3, abs=1e-3)


def shares(candidates: NgramCandidates) -> dict[int, float]:
    q = np.exp(candidates.log_q_FK[0].astype(np.float64))
    return {int(token): float(share) for token, share in zip(candidates.token_FK[0], q, strict=True) if share > 0}


def test_a_match_counts_by_its_length_and_each_step_along_it_adds_one():
    """A match of length n counts 2^n - 1, unseen tokens count 2."""
    proposer, candidates = propose([[3, 1, 2, 7, 8, 1, 2, 7, 9, 5, 2, 7, 8, 3, 1, 2]], MatchLengths(1, 2))
    assert shares(candidates) == pytest.approx({7: (3 + 3 + 1) / 9})
    candidates = proposer.expand(child_level([0], [1], [0], [7], 1))
    assert shares(candidates) == pytest.approx({8: (7 + 3) / 19, 9: 7 / 19}, rel=1e-2)
    candidates = proposer.expand(child_level([0], [2], [1], [8], 2))
    assert shares(candidates) == pytest.approx({1: 15 / 24, 3: 7 / 24}, rel=1e-2)


def test_matches_beyond_sixteen_tokens_have_equal_weight():
    many = list(range(10, 40))
    _, candidates = propose([[*many, 1, 0, *many[-17:], 2, 0, *many[-15:], 3, 0, *many]], MatchLengths(1, 30))
    one, two, three = 2**16 - 1, 2**16 - 1, 2**15 - 1
    total = one + two + three
    assert shares(candidates) == pytest.approx({1: one / total, 2: two / total, 3: three / total}, rel=1e-2)


def test_a_node_has_no_more_candidates_than_a_tree_has_rows():
    _, candidates = propose([[x for token in range(2, 90) for x in (1, token)] + [1]], MatchLengths(1, 1))
    assert children(candidates) == list(range(2, 66))


def test_history_is_read_from_the_pages():
    """The history is fed in pieces, beside another request; accepted tokens overwrite their own slots only."""
    tables = np.array([[3, 1, 5], [2, 6, 4]])
    proposer = NgramProposer(MatchLengths(2, 2), VOCAB, 7, PAGE)
    first, second = [1, 2, 3, 4, 1, 2, 3], [8, 9, 7, 8, 9]
    assert proposer.extend(draft_request([first[:5], second[:2]], tables, num_nodes=0)).token_FK.shape[0] == 0
    candidates = proposer.extend(draft_request([first, second], tables, start=[5, 2]))
    assert [children(candidates, g) for g in range(2)] == [[4], [7]]


def test_a_request_without_a_match_has_no_candidates():
    _, candidates = propose([[1, 2, 3], [4, 5, 4]], MatchLengths(1, 1))
    assert [children(candidates, g) for g in range(2)] == [[], [5]]


def scored(log_q_FK: np.ndarray, num_children: int) -> ChildScores:
    """Return the scores of greedy rows whose candidates are the tokens 0, 1, 2, ..."""
    num_rows, count = log_q_FK.shape
    draft = NgramCandidates(np.tile(np.arange(count), (num_rows, 1)), log_q_FK)
    params = SamplingBatch.stack([SamplingSettings(temperature=0.0)] * num_rows)
    rule_F, index_F = np.full(num_rows, Rule.COUPLED.value), np.full(num_rows, 7)
    return score(draft, params, rule_F, index_F, num_children, DraftVocabulary(target_size=count))


def test_equal_candidates_keep_their_order():
    log_q_FK = np.log(np.tile([0.01, 0.005], 40))[None].astype(np.float32)
    assert scored(log_q_FK, 8).token_FK.tolist() == [[*range(0, 16, 2)]]


def test_a_level_without_any_candidate_has_no_children():
    scores = scored(np.zeros((2, 0), dtype=np.float32), 4)
    assert scores.token_FK.shape == (2, 0) and scores.top_prob_F.tolist() == [0.0, 0.0]
