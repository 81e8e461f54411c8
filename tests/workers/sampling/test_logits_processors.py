"""Logits processors along every path of a tree equal plain Python, for all vocabulary shards, and are lossless."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.tree.frontier import DraftVocabulary
from tests.support import oracles
from tests.support.oracles import SMALL_V, Path, draft_logits, target_logits
from tests.support.pairs import pairs
from workers.sampling.logits_edits import UNSEEN, Columns, ConstrainedRow
from workers.sampling.logits_processors import constrain, write_token_counts
from workers.sampling.logits_state import LogitsState, TokenCounter
from workers.sampling.philox import gumbel
from workers.sampling.sampler import draw, process_logits
from workers.settings import Constraints, SamplingSettings
from workers.types import SamplingBatch, TreeBatch

torch.set_num_threads(1)

V = 17
WHOLE = Columns(0, V)


def logits_state(constraints: Constraints, prompt: Path, output: Path, ends: Sequence[int] = ()) -> LogitsState:
    longest = max(map(len, constraints.bad_words), default=1)
    counter = TokenCounter(constraints, prompt)
    counter.add(output)
    return LogitsState(
        constraints=constraints,
        end_token_ids=list(ends),
        counts=counter.counts(),
        tail=list(output[max(0, len(output) - longest + 1) :]),
        num_output=len(output),
    )


def edited(
    logits: Sequence[float], state: LogitsState, path: Sequence[int] = (), columns: Columns = WHOLE
) -> list[float]:
    return constrain(torch.tensor([logits]), [ConstrainedRow(0, state, path)], columns)[0].tolist()


def forbidden(state: LogitsState, path: Sequence[int] = (), columns: Columns = WHOLE) -> set[int]:
    return {t for t, x in enumerate(edited([0.0] * columns.width, state, path, columns)) if x == -math.inf}


# ---- one sentence each


def test_a_token_of_the_path_counts_as_output():
    state = logits_state(Constraints(frequency_penalty=0.5, presence_penalty=0.25), (1,), (2, 2))
    assert edited([0.0] * V, state)[:5] == [0, 0, -1.25, 0, 0]
    assert edited([0.0] * V, state, (2, 4, 4))[:5] == [0, 0, -1.75, 0, -1.25]


def test_repetition_shrinks_what_was_seen_anywhere_towards_less_likely():
    state = logits_state(Constraints(repetition_penalty=2.0), (0, 1), (2,))
    assert edited([4.0, -4.0, 4.0, -4.0, 4.0] + [0.0] * 12, state, (3,))[:5] == [2, -8, 2, -8, 4]


def test_a_bad_word_is_forbidden_only_where_it_would_be_completed():
    state = logits_state(Constraints(bad_words=[[5], [3, 6], [1, 2, 3, 7], [8, 1, 9]]), (8,), (1, 2))
    assert forbidden(state) == forbidden(logits_state(state.constraints, (8,), (1,))) == {5}
    assert forbidden(state, (3,)) == {5, 6, 7}
    assert forbidden(state, (3, 3)) == {5, 6}
    assert forbidden(state, (0, 1, 2, 3)) == {5, 6, 7}


def test_a_bad_word_longer_than_the_text_forbids_nothing():
    assert forbidden(logits_state(Constraints(bad_words=[[1, 1, 1, 1]]), (1,), (1, 1))) == set()


def test_end_tokens_wait_for_min_tokens_along_the_path():
    state = logits_state(Constraints(min_tokens=4), (1,), (2, 2), ends=(0, 9))
    assert forbidden(state) == forbidden(state, (3,)) == {0, 9}
    assert forbidden(state, (3, 3)) == set()


def test_bias_comes_before_the_penalties_and_cannot_lift_a_mask():
    both = Constraints(logit_bias={3: -3.0, 5: 100.0}, repetition_penalty=2.0, bad_words=[[5]])
    assert edited([2.0] * V, logits_state(both, (3,), ()))[3] == -2.0  # 2 - 3 is negative, hence doubled
    assert edited([2.0] * V, logits_state(both, (5,), ()))[5] == -math.inf


def test_a_mask_of_every_token_is_not_applied():
    allowed = Constraints(allowed_token_ids=[2, 3])
    everything = set(range(V))
    assert forbidden(logits_state(replace(allowed, bad_words=[[2], [1, 3]]), (1,), (1,))) == everything - {2, 3}
    assert forbidden(logits_state(replace(allowed, bad_words=[[2], [1, 3]]), (7,), ())) == everything - {3}
    assert forbidden(
        logits_state(replace(allowed, bad_words=[[2]], min_tokens=1), (1,), (), ends=[3])
    ) == everything - {3}
    assert forbidden(logits_state(replace(allowed, min_tokens=1), (1,), (), ends=[2, 3])) == everything - {2, 3}


def test_a_draft_vocabulary_without_any_allowed_id_is_left_as_it_is():
    columns = Columns(0, 2, torch.tensor([-1, 0, -1, 1] + [-1] * 13))
    assert forbidden(logits_state(Constraints(allowed_token_ids=[2, 5]), (1,), ()), columns=columns) == set()
    assert forbidden(logits_state(Constraints(allowed_token_ids=[2, 3]), (1,), ()), columns=columns) == {0}
    assert forbidden(logits_state(Constraints(bad_words=[[1], [3]]), (1,), ()), columns=columns) == set()
    assert forbidden(logits_state(Constraints(bad_words=[[3], [2]]), (1,), ()), columns=columns) == {1}


def test_a_drafter_s_own_vocabulary_forbids_what_it_knows_and_no_other_token_in_its_place():
    columns = DraftVocabulary(target_size=V, target_ids=torch.tensor([4, 2, 5])).columns
    assert columns.width == 3
    assert forbidden(logits_state(Constraints(bad_words=[[1], [2], [16]]), (1,), ()), columns=columns) == {1}
    assert forbidden(logits_state(Constraints(bad_words=[[4], [2], [5]]), (1,), ()), columns=columns) == set()
    assert forbidden(logits_state(Constraints(allowed_token_ids=[0, 5]), (1,), ()), columns=columns) == {0, 1}


def test_ids_beyond_the_vocabulary_forbid_nothing():
    state = logits_state(Constraints(min_tokens=9), (1,), (), ends=[3, V, 5000])
    assert forbidden(state) == {3}
    assert forbidden(state, columns=Columns(0, 2, torch.tensor([-1, 0, -1, 1] + [-1] * 13))) == {1}


def test_all_shards_agree_whether_a_mask_applies():
    # Of the allowed ids 2 and 9 a bad word takes 2: the left shard ends up empty, which the right one makes good.
    state = logits_state(Constraints(allowed_token_ids=[2, 9], bad_words=[[2]]), (1,), ())
    assert forbidden(state, columns=Columns(0, 5)) == set(range(5))
    assert forbidden(state, columns=Columns(5, 12)) == set(range(12)) - {4}


def test_without_rows_the_logits_come_back_as_they_are():
    logits_RW = torch.randn(3, V, dtype=torch.bfloat16)
    assert constrain(logits_RW, [], WHOLE) is logits_RW


def test_low_precision_logits_are_edited_in_float32():
    logits_RW = torch.full((1, V), 2.0, dtype=torch.bfloat16)
    row = ConstrainedRow(0, logits_state(Constraints(presence_penalty=0.01), (), (3,)), ())
    assert constrain(logits_RW, [row], WHOLE)[0, 3].item() == pytest.approx(1.99)


# ---- against the oracle

TOKENS = st.integers(0, 5)  # few of the V, so that texts repeat themselves and bad words meet
TEXT = st.lists(TOKENS, max_size=7).map(tuple)
CONSTRAINTS = st.builds(
    Constraints,
    presence_penalty=st.sampled_from([0.0, 0.6, -1.1]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100, width=32), max_size=3),
    bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=4),
    allowed_token_ids=st.none() | st.lists(st.integers(0, V - 1), min_size=1, max_size=8),
    min_tokens=st.integers(0, 9),
)


class Asked:
    """One constrained request and the paths of its rows."""

    def __init__(self, constraints: Constraints, prompt: Path, output: Path, ends: list[int], paths: list[Path]):
        self.prompt, self.output, self.paths = prompt, output, paths
        self.logits_state = logits_state(constraints, prompt, output, ends)

    def oracle(self, logits: dict[int, float], path: Path) -> list[float]:
        state = self.logits_state
        after = (*self.output, *path)
        return list(oracles.constrain(logits, state.constraints, state.end_token_ids, self.prompt, after).values())


ASKED = st.builds(
    Asked, CONSTRAINTS, TEXT, TEXT, st.lists(st.integers(0, V - 1), max_size=3), st.lists(TEXT, min_size=1, max_size=4)
)


def layout(requests: list[Asked], seed: int) -> tuple[np.ndarray, list[ConstrainedRow], dict[int, tuple[Asked, Path]]]:
    """Return random logits with the requests' rows shuffled among unconstrained ones."""
    rng = np.random.default_rng(seed)
    wanted = [(asked, path) for asked in requests for path in asked.paths]
    numbers = rng.permutation(len(wanted) + 2)[: len(wanted)].tolist()
    logits_RV = rng.normal(scale=3, size=(len(wanted) + 2, V)).astype(np.float32)
    rows = [ConstrainedRow(r, asked.logits_state, path) for r, (asked, path) in zip(numbers, wanted, strict=True)]
    return logits_RV, rows, dict(zip(numbers, wanted, strict=True))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(ASKED, min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_every_row_is_edited_by_the_plain_rule_for_its_own_path(requests, seed):
    logits_RV, rows, asked_of = layout(requests, seed)
    before_RV = torch.from_numpy(logits_RV.copy())
    got_RV = constrain(before_RV, rows, WHOLE)
    assert torch.equal(before_RV, torch.from_numpy(logits_RV))
    for r, logits in enumerate(logits_RV.tolist()):
        expected = logits
        if r in asked_of:
            asked, path = asked_of[r]
            expected = asked.oracle(dict(enumerate(logits)), path)
        assert got_RV[r].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert got_RV[r].isfinite().any()


@settings(max_examples=75, deadline=None, derandomize=True)
@given(
    st.lists(ASKED, min_size=1, max_size=3),
    st.lists(st.integers(1, V - 1), max_size=3, unique=True),
    st.integers(0, 2**32 - 1),
)
def test_joined_shards_equal_the_whole_row(requests, cuts, seed):
    logits_RV, rows, _ = layout(requests, seed)
    whole_RV = torch.from_numpy(logits_RV)
    edges = [0, *sorted(cuts), V]
    shards = [constrain(whole_RV[:, a:b], rows, Columns(a, b - a)) for a, b in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(shards, 1), constrain(whole_RV, rows, WHOLE))


@settings(max_examples=75, deadline=None, derandomize=True)
@given(st.lists(ASKED, min_size=1, max_size=3), st.permutations(range(V)), st.integers(1, V), st.integers(0, 2**32 - 1))
def test_a_reduced_vocabulary_is_edited_as_if_there_were_no_other_tokens(requests, order, width, seed):
    logits_RV, rows, asked_of = layout(requests, seed)
    column_of_V = torch.full((V,), -1)
    column_of_V[order[:width]] = torch.arange(width)
    got_RW = constrain(torch.from_numpy(logits_RV[:, :width]), rows, Columns(0, width, column_of_V))
    for r, (asked, path) in asked_of.items():
        expected = asked.oracle(dict(zip(order[:width], logits_RV[r].tolist(), strict=False)), path)
        assert got_RW[r].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(ASKED, min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_a_row_is_edited_alike_alone_and_in_a_batch(requests, seed):
    logits_RV, rows, _ = layout(requests, seed)
    together_RV = constrain(torch.from_numpy(logits_RV), rows, WHOLE)
    for r, state, path in rows:
        alone_1V = constrain(torch.from_numpy(logits_RV[r : r + 1]), [ConstrainedRow(0, state, path)], WHOLE)
        assert torch.equal(together_RV[r], alone_1V[0])


# ---- reference cases: vLLM's rejection sampler on chains, here as chains of a tree

OTHER = 15  # the target's token if its first choice is masked: its logit is 1 less


def follow(trees: TreeBatch, winner_N: list[int]) -> list[list[int]]:
    """Return the tokens per request if the target draws winner_N: walk down the tree along these tokens."""
    said = []
    for b, (begin, end) in enumerate(zip(trees.offsets.tolist(), trees.offsets[1:].tolist(), strict=False)):
        row_of = {path: row for row, path in enumerate(oracles.paths_of(trees, b))}
        winners, path = winner_N[begin:end], ()
        while path in row_of:
            path = (*path, winners[row_of[path]])
        said.append(list(path))
    return said


def verify(trees: TreeBatch, wanted_N: list[int], logits_states: list[LogitsState | None]) -> list[list[int]]:
    logits_NV = torch.full((len(wanted_N), 100), -100.0)
    logits_NV[:, OTHER] = 99.0
    logits_NV[torch.arange(len(wanted_N)), wanted_N] = 100.0
    rows = [
        ConstrainedRow(int(trees.offsets[b]) + row, state, path)
        for b, state in enumerate(logits_states)
        if state is not None
        for row, path in enumerate(oracles.paths_of(trees, b))
    ]
    return follow(trees, constrain(logits_NV, rows, Columns(0, 100)).argmax(-1).tolist())


def test_a_frequency_penalty_sees_drafts_accepted_in_the_same_step():
    trees = oracles.trees([oracles.chain(drafts) for drafts in ([1, 1, 1], [], [1, 1, 1])])
    texts = [((5, 6, 7), (2,), 1.5), ((6, 7, 8), (3,), 1.5), ((7, 8, 9), (4,), 0.7)]
    logits_states = [logits_state(Constraints(frequency_penalty=f), prompt, output) for prompt, output, f in texts]
    assert verify(trees, [1, 1, 1, 1, 7, 1, 1, 1, 1], logits_states) == [[1, 15], [7], [1, 1, 15]]


def test_bad_words_stop_a_chain_where_they_would_be_completed():
    trees = oracles.trees([oracles.chain(drafts) for drafts in ([1, 2, 3], [1, 15, 3], [1, 2, 3])])
    bad = logits_state(Constraints(bad_words=[[2]]), (), (0,))
    said = verify(trees, [1, 2, 3, 4, 1, 15, 3, 4, 1, 2, 3, 4], [bad, None, bad])
    assert said == [[1, 15], [1, 15, 3, 4], [1, 15]]


def test_allowed_ids_hold_at_every_row():
    trees = oracles.trees([oracles.chain(drafts) for drafts in ([1, 2, 10], [10, 5, 3], [7, 10, 12])])
    high, gap = list(range(5, 100)), [0, 1, *range(7, 100)]
    logits_states = [
        logits_state(Constraints(allowed_token_ids=ids), (), (0,)) for ids in (high, list(range(100)), gap)
    ]
    # The reference is state its bonus token 5 from outside; here the last row is constrained like the others.
    said = verify(trees, [1, 2, 10, 5, 10, 5, 10, 5, 7, 10, 12, 5], logits_states)
    assert said == [[15], [10, 5, 10], [7, 10, 12, 15]]


def test_each_branch_has_penalties_of_its_own():
    trees = oracles.tree([-1, 0, 0, 1, 1, 2, 3], [0, 1, 15, 1, 15, 15, 1])  # 1 1 1, 1 15, 15 15
    state = logits_state(Constraints(frequency_penalty=1.5), (), (0,))
    # After 1 a second 1 costs more than the gap; after 1 15 both have been said once.
    assert verify(trees, [1] * 7, [state]) == [[1, 15, 1]]
    # The other branch, which the target follows when it may not begin with 1, owes nothing for the 1s of the first.
    assert verify(trees, [15, 1, 1, 1, 1, 1, 1], [state]) == [[15, 1]]


# ---- speculation never changes a token

PROMPT = (1, 4)
ENDS = [0, 3]
SMALL = Columns(0, SMALL_V)


def plain(params: SamplingSettings, length: int) -> Path:
    """Return the output of a plain loop: one token at a time, constraints by the oracle."""
    batch = SamplingBatch.stack([params])
    output: Path = ()
    while len(output) < length:
        logits = dict(enumerate(target_logits(PROMPT + output).tolist()))
        row = oracles.constrain(logits, params.constraints, ENDS, PROMPT, output)
        index_1 = torch.tensor([len(PROMPT) + len(output)])
        output += (int(draw(torch.tensor([list(row.values())]), batch, index_1)),)
    return output


def grown(params: SamplingSettings, output: Path, error: float, is_draft_constrained: bool, widths: list[int]) -> Path:
    """Return paths below the root, breadth-first: at each depth the best `widths` children by log q + G."""
    batch = SamplingBatch.stack([params])
    state = logits_state(params.constraints, PROMPT, output, ENDS)
    paths: list[Path] = [()]
    level: list[Path] = [()]
    for depth, width in enumerate(widths):
        logits_FV = torch.from_numpy(np.stack([draft_logits(PROMPT + output + path, error) for path in level]))
        if is_draft_constrained:
            logits_FV = constrain(logits_FV, [ConstrainedRow(i, state, p) for i, p in enumerate(level)], SMALL)
        scores_FV = process_logits(logits_FV, batch.rows(torch.zeros(len(level), dtype=torch.long)))
        if params.temperature > 0:
            index_1 = torch.tensor([len(PROMPT) + len(output) + depth])
            scores_FV = scores_FV + gumbel(batch.seed_B, index_1, 0, SMALL_V)
        best = [scores.topk(width).indices.tolist() for scores in scores_FV]
        level = [(*path, token) for path, tokens in zip(level, best, strict=True) for token in tokens]
        paths += level
    return paths


def speculate(
    params: SamplingSettings,
    length: int,
    error: float,
    is_draft_constrained: bool,
    widths: list[int],
    is_path_forgotten: bool = False,
) -> tuple[Path, int]:
    """Return the output and the number of rounds of drafting and verifying trees, by the real functions."""
    batch = SamplingBatch.stack([params])
    output: Path = ()
    num_rounds = 0
    while len(output) < length:
        paths = grown(params, output, error, is_draft_constrained, widths)
        state = logits_state(params.constraints, PROMPT, output, ENDS)
        logits_NV = torch.from_numpy(np.stack([target_logits(PROMPT + output + path) for path in paths]))
        rows = [ConstrainedRow(n, state, () if is_path_forgotten else path) for n, path in enumerate(paths)]
        index_N = torch.tensor([len(PROMPT) + len(output) + len(path) for path in paths])
        params_N = batch.rows(torch.zeros(len(paths), dtype=torch.long))
        winner_of = dict(zip(paths, draw(constrain(logits_NV, rows, SMALL), params_N, index_N).tolist(), strict=True))
        path: Path = ()
        while path in winner_of:
            path = (*path, winner_of[path])
        output += path
        num_rounds += 1
    return output[:length], num_rounds


ACTIVE = {
    "presence": Constraints(presence_penalty=1.5),
    "frequency": Constraints(frequency_penalty=0.8),
    "repetition": Constraints(repetition_penalty=1.7),
    "bias": Constraints(logit_bias={2: 3.0, 5: -4.0, 7: 1.0}),
    "bad words": Constraints(bad_words=[[2], [6, 7], [5, 5], [9, 10, 1], [10, 10], [8, 4, 11], [4, 9]]),
    "allowed ids": Constraints(allowed_token_ids=[1, 5, 6, 8, 9]),
    "min tokens": Constraints(min_tokens=17),
    "all": Constraints(
        presence_penalty=0.4,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias={3: 3.0, 5: -2.0},
        bad_words=[[2], [6, 7], [9, 1], [5, 9, 3]],
        allowed_token_ids=[0, 1, 2, 3, 5, 6, 7, 9, 11],
        min_tokens=17,
    ),
    "masks that leave nothing": Constraints(allowed_token_ids=[0, 3], bad_words=[[0], [3]], min_tokens=9),
}
SAMPLED = {
    "greedy": SamplingSettings(temperature=0.0),
    "sampled": SamplingSettings(seed=2**64 - 9),
    "cut": SamplingSettings(temperature=1.3, top_k=5, top_p=0.95, min_p=0.02, seed=4),
}
LENGTH = 25


@pytest.mark.slow
@pytest.mark.parametrize(("active", "sampling"), pairs(ACTIVE, SAMPLED, every=3))
def test_speculation_never_changes_a_constrained_token(active, sampling):
    params = replace(SAMPLED[sampling], constraints=ACTIVE[active])
    expected = plain(params, LENGTH)
    assert expected != plain(SAMPLED[sampling], LENGTH), "the constraint has no effect here"
    for widths in ([1, 1, 1, 1], [2, 2, 1], [3]):
        for error in (0.0, 0.8, 50.0):
            for is_draft_constrained in (False, True):
                assert speculate(params, LENGTH, error, is_draft_constrained, widths)[0] == expected


def test_a_perfect_draft_under_the_same_constraints_is_always_accepted():
    for active in ACTIVE:
        for sampling in SAMPLED.values():
            _, num_rounds = speculate(replace(sampling, constraints=ACTIVE[active]), LENGTH, 0.0, True, [1, 1, 1, 1])
            assert num_rounds == LENGTH // 5


@pytest.mark.parametrize("active", ["presence", "frequency", "repetition", "bad words", "min tokens"])
def test_a_verifier_that_ignores_the_path_is_detected(active):
    changed = []
    for sampling in SAMPLED.values():
        params = replace(sampling, constraints=ACTIVE[active])
        forgetful, _ = speculate(params, LENGTH, 0.0, False, [2, 2, 1], is_path_forgotten=True)
        changed.append(forgetful != plain(params, LENGTH))
    assert any(changed)


def test_logits_are_edited_in_any_memory_layout():
    state = logits_state(Constraints(bad_words=[[5]], frequency_penalty=1.0), (1,), (2,))
    logits_RW = torch.randn(V, 2, generator=torch.Generator().manual_seed(1)).T
    rows = [ConstrainedRow(1, state, ())]
    assert torch.equal(constrain(logits_RW, rows, WHOLE), constrain(logits_RW.contiguous(), rows, WHOLE))


@pytest.mark.parametrize(
    "columns", [WHOLE, Columns(4, 6), Columns(0, 3, torch.tensor([-1] * 5 + [2, 0, 1] + [-1] * 9))]
)
def test_the_counts_of_every_column_are_laid_request_by_request(columns):
    repeated, frequent = Constraints(repetition_penalty=1.5), Constraints(frequency_penalty=0.5)
    logits_states = {0: logits_state(repeated, (1, 5, 6), (6, 7, 7)), 2: logits_state(frequent, (1, 5), (9, 9, 9, 5))}
    count_BW = torch.full((4, columns.width), 99.0)
    write_token_counts(count_BW, logits_states, columns)
    of_column = {columns.start + w: w for w in range(columns.width)}
    if columns.column_of_V is not None:
        of_column = {token: w for token, w in enumerate(columns.column_of_V.tolist()) if w >= 0}
    expected = [[UNSEEN] * columns.width for _ in range(4)]
    for b, told in ((0, {1: 0, 5: 0, 6: 1, 7: 2}), (2, {9: 3, 5: 1})):
        for token in told.keys() & of_column.keys():
            expected[b][of_column[token]] = told[token]
    assert count_BW.tolist() == expected
    write_token_counts(count_BW, {}, columns)
    assert (count_BW == UNSEEN).all()
