"""Grammars: what may follow every path, matchers that are kept between steps, and what bounds them."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path as File
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import oracles
from tests.support.grammars import TinyTable, allowed_by, state_of
from verifier.request import Request
from workers.comm.ipc import Submit
from workers.sampling import grammar as module
from workers.sampling.grammar import GrammarError, Grammars, TokenTable, grammar_text, unpacked
from workers.sampling.grammar_masks import grammar_masks
from workers.sampling.logits_edits import Columns, ConstrainedRow
from workers.sampling.logits_processors import constrain
from workers.sampling.logits_state import LogitsState, pack_logits_states, unpack_logits_states
from workers.settings import Constraints, Rule, SamplingSettings

torch.set_num_threads(1)

TEXTS = ["a", "b", "ab", "c", "<end>", "ca", "<stop>", "x", "bc"]
ENDS = (4, 6)
LANGUAGE = ["".join(parts) for length in (1, 2, 3) for parts in itertools.product(["ab", "c"], repeat=length)]
GRAMMAR = Constraints(grammar=grammar_text("regex", "(ab|c){1,3}"))
V = len(TEXTS)
HOSTILE = "start: A\nA: /(.*[a-z].*){1,20}/ & /(.*[0-9].*){1,20}/ & ~/.*xyz.*/"
BUNDLED = str(File(module.__file__).parents[2] / "secateur" / "bundled" / "target")
Path = tuple[int, ...]


def all_paths(path: Path = (), most: int = 4) -> list[Path]:
    """Return every path that the language allows, up to a length."""
    if len(path) == most or set(path) & set(ENDS):
        return [path]
    following = allowed_by(TEXTS, ENDS, LANGUAGE, path)
    return [path, *(longer for token in sorted(following) for longer in all_paths((*path, token), most))]


PATHS = all_paths()


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(TinyTable(TEXTS, ENDS))


def allowed_after(grammars: Grammars, state: LogitsState, path: Path) -> set[int]:
    return set(np.flatnonzero(unpacked(grammars.masks(state, [path]).packed_QY, V)[0]).tolist())


def edited(state: LogitsState, paths: list[Path], columns: Columns, grammars: Grammars) -> list[set[int]]:
    """Return the columns of each row that the logits processors leave."""
    rows = [ConstrainedRow(row, state, list(path)) for row, path in enumerate(paths)]
    x_RW = constrain(torch.zeros(len(paths), columns.width), rows, columns, grammar_masks(rows, columns, grammars))
    return [set(torch.nonzero(x_W > -torch.inf)[:, 0].tolist()) for x_W in x_RW]


# ---- masks


def test_the_masks_of_all_paths_are_what_the_language_allows(grammars: Grammars) -> None:
    assert len(PATHS) > 100
    shuffled = random.Random(0).sample(PATHS, len(PATHS))
    for num_output in (0, 1, 2):
        for output in {path[:num_output] for path in PATHS if len(path) > num_output}:
            if set(output) & set(ENDS):
                continue
            below = [path[num_output:] for path in shuffled if path[:num_output] == output]
            masks = grammars.masks(state_of(GRAMMAR, output), below)
            for path, allowed_V, is_over in zip(below, unpacked(masks.packed_QY, V), masks.is_over_Q, strict=True):
                assert is_over == bool(set(path) & set(ENDS))
                if not is_over:
                    wanted = allowed_by(TEXTS, ENDS, LANGUAGE, output + path)
                    assert set(np.flatnonzero(allowed_V).tolist()) == wanted


def test_a_forbidden_path_is_over_and_does_not_disturb_its_siblings(grammars: Grammars) -> None:
    state = state_of(GRAMMAR, ())
    paths = [(0, 0), (0, 1), (7,), (2, 4, 4), (0, 0, 1), (0,), ()]
    masks = grammars.masks(state, paths)
    assert masks.is_over_Q.tolist() == [True, False, True, True, True, False, False]
    for path, allowed_V in zip(paths, unpacked(masks.packed_QY, V), strict=True):
        if path in [(0, 1), (0,), ()]:
            assert set(np.flatnonzero(allowed_V).tolist()) == allowed_by(TEXTS, ENDS, LANGUAGE, path)


def test_the_allowed_beginning_of_a_draft_is_counted(grammars: Grammars) -> None:
    state = state_of(GRAMMAR, (2,))
    for tokens, count in [((3, 0, 1, 4), 4), ((3, 0, 0), 2), ((7,), 0), ((4, 4), 1), ((), 0), ((3, 3, 3), 2)]:
        assert grammars.count_allowed(state, tokens) == count
        assert allowed_after(grammars, state, ()) == allowed_by(TEXTS, ENDS, LANGUAGE, (2,)), "it moved"


def test_a_draft_is_cut_where_the_mask_ends_it_although_a_matcher_would_consume_it() -> None:
    table = TokenTable(BUNDLED, 2048, (0, 2))
    schema = {"type": "object", "properties": {"ab": {"const": 1}}, "required": ["ab"], "additionalProperties": False}
    grammar = grammar_text("json", schema, whitespace="none")
    [quote], [brace] = (table.load().tokenize_str(text) for text in '"{')
    matcher = table.compile(grammar)
    assert matcher.validate_tokens([brace, quote]) == 2
    state = state_of(Constraints(grammar=grammar), (brace,))
    grammars = Grammars(table)
    following = np.flatnonzero(unpacked(grammars.masks(state, [()]).packed_QY, 2048)[0]).tolist()
    assert len(following) == 1, "the text goes on in one way"
    others = set(range(3, 2048)) - set(following)
    assert grammars.count_allowed(state, following) == 1
    assert not any(grammars.count_allowed(state, [token]) for token in others)


# ---- columns


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shards_of_the_vocabulary_together_have_the_whole_mask(grammars: Grammars, size: int) -> None:
    paths = [path for path in PATHS if not set(path) & set(ENDS)]
    whole = edited(state_of(GRAMMAR, ()), paths, Columns(0, V), grammars)
    assert whole == [allowed_by(TEXTS, ENDS, LANGUAGE, path) for path in paths]
    starts = [V * rank // size for rank in range(size + 1)]
    shards = [edited(state_of(GRAMMAR, ()), paths, Columns(a, b - a), grammars) for a, b in itertools.pairwise(starts)]
    for row, allowed in enumerate(whole):
        assert allowed == {start + c for start, shard in zip(starts, shards, strict=False) for c in shard[row]}


def test_a_reduced_vocabulary_has_its_part_of_the_mask_and_tells_where_that_is_empty(grammars: Grammars) -> None:
    ids = [4, 7, 1]
    column_of_V = torch.full((V + 2,), -1)  # a head may know ids that have no logit
    column_of_V[torch.tensor([*ids, V])] = torch.arange(4)
    columns = Columns(0, 4, column_of_V)
    rows = [ConstrainedRow(5 + row, state_of(GRAMMAR, ()), list(path)) for row, path in enumerate(PATHS)]
    masks = grammar_masks(rows, columns, grammars)
    assert masks is not None and sorted(masks.row_Q.tolist()) == [row.row for row in rows]
    for number, is_dead, allowed_W in zip(masks.row_Q, masks.is_dead_Q, masks.allowed(4), strict=True):
        path = PATHS[number - 5]
        wanted = allowed_by(TEXTS, ENDS, LANGUAGE, path) & set(ids) if not set(path) & set(ENDS) else set()
        assert {ids[column] for column in np.flatnonzero(allowed_W)} == wanted
        assert is_dead == (not wanted)
    assert masks.is_dead_Q[PATHS.index(())], "only other tokens may follow"
    assert not masks.is_dead_Q.all()


@pytest.mark.parametrize("columns", [Columns(1024, 1024), Columns(36, 8), Columns(40, 12), Columns(0, 2048)])
def test_columns_are_taken_from_whole_bytes_only_where_they_begin_and_end_with_one(columns: Columns) -> None:
    grammars = Grammars(TokenTable(BUNDLED, 2048, (0, 2)))
    state = state_of(Constraints(grammar=grammar_text("regex", "[ACEGIKMO0-9a-z]*")), ())
    masks = grammar_masks([ConstrainedRow(0, state, [])], columns, grammars)
    assert masks is not None
    whole_V = unpacked(grammars.masks(state, [()]).packed_QY, 2048)[0]
    part_W = whole_V[columns.start : columns.start + columns.width]
    assert masks.allowed(columns.width).tolist() == [part_W.tolist()]
    assert part_W.any() and not part_W.all()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the simulated device takes the real one's place")
@pytest.mark.parametrize("columns", [Columns(0, V), Columns(3, 4)])
def test_masks_on_a_device_are_those_on_the_host_without_waiting_for_it(grammars: Grammars, columns: Columns) -> None:
    rows = [ConstrainedRow(row, state_of(GRAMMAR, ()), list(path)) for row, path in enumerate(PATHS)]
    x_RW = torch.arange(len(rows) * columns.width).view(len(rows), -1).float()
    masks = grammar_masks(rows, columns, grammars)
    on_host = constrain(x_RW, rows, columns, masks)
    pytest.importorskip("triton")
    from tests.support.simulated_cuda import simulated_cuda

    with simulated_cuda() as cuda:
        x_there = x_RW.to("cuda", non_blocking=True)
        on_device = constrain(x_there, rows, columns, masks)
        assert on_device.is_cuda and not cuda.waits
        assert on_device.tolist() == on_host.tolist()


# ---- with other constraints


def narrowed(constraints: Constraints, output: Path, path: Path) -> set[int]:
    """By the rule: each mask applies within the others unless no token is left."""
    allowed = allowed_by(TEXTS, ENDS, LANGUAGE, output + path)
    said = output + path
    for kept in (
        allowed & set(constraints.allowed_token_ids or range(V)),
        {t for t in range(V) if not any((*said, t)[-len(word) :] == tuple(word) for word in constraints.bad_words)},
        set(range(V)) - (set(ENDS) if len(said) < constraints.min_tokens else set()),
    ):
        allowed = allowed & kept or allowed
    return allowed


@pytest.mark.parametrize(
    "others",
    [
        {"allowed_token_ids": [0, 1, 3, 4]},
        {"allowed_token_ids": [7]},
        {"bad_words": [[2], [0, 1], [3, 3]]},
        {"bad_words": [[0], [2], [3], [5]]},
        {"min_tokens": 3},
        {"min_tokens": 9, "bad_words": [[3]], "allowed_token_ids": [0, 1, 2, 3, 6]},
    ],
)
def test_other_masks_apply_within_the_grammar(grammars: Grammars, others: dict[str, Any]) -> None:
    constraints = replace(GRAMMAR, **others)
    for output in [(), (2,), (0, 1)]:
        paths = [p[len(output) :] for p in PATHS if p[: len(output)] == output and not set(p) & set(ENDS)]
        left = edited(state_of(constraints, output, ENDS), paths, Columns(0, V), grammars)
        assert left == [narrowed(constraints, output, path) for path in paths]


def test_penalties_and_biases_are_those_without_a_grammar(grammars: Grammars) -> None:
    others = Constraints(
        repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={3: 2.0, 7: 9.0}
    )
    state, path = state_of(replace(others, grammar=GRAMMAR.grammar), (2,)), [3]
    row = [ConstrainedRow(0, state, path)]
    x_1V = torch.arange(V)[None] / 3 - 1
    got = constrain(x_1V, row, Columns(0, V), grammar_masks(row, Columns(0, V), grammars))[0].tolist()
    free = oracles.constrain(dict(enumerate(x_1V[0].tolist())), others, ENDS, (), (2, 3))
    allowed = allowed_by(TEXTS, ENDS, LANGUAGE, (2, 3))
    assert got == pytest.approx([free[t] if t in allowed else -np.inf for t in range(V)])


# ---- matchers between steps


def test_a_matcher_follows_any_change_of_its_output(grammars: Grammars) -> None:
    rng = random.Random(1)
    outputs = [path for path in PATHS if not set(path) & set(ENDS)]
    for _ in range(200):
        output, id = rng.choice(outputs), rng.randrange(3)
        state = state_of(GRAMMAR, output, id=id)
        assert allowed_after(grammars, state, ()) == allowed_by(TEXTS, ENDS, LANGUAGE, output)
    assert grammars.failure(0) is None


def test_a_step_consumes_only_the_new_tokens(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, consumed = [], []
    own_compile, own_advance = grammars.table.compile, module._Matcher.advance

    def counted(grammar: str) -> Any:
        compiled.append(grammar)
        return own_compile(grammar)

    def advance(self: Any, output: bytes) -> bool:
        consumed.append(len(output) - len(self._output))
        return own_advance(self, output)

    monkeypatch.setattr(grammars.table, "compile", counted)
    monkeypatch.setattr(module._Matcher, "advance", advance)
    for output in [(), (3,), (3, 0), (3, 0, 1)]:
        for id in (1, 2):
            grammars.masks(state_of(GRAMMAR, output, id=id), [(), (0,)])
    assert compiled == [GRAMMAR.grammar] and consumed == [0, 0, 4, 4, 4, 4, 4, 4]
    grammars.drop(1)
    assert allowed_after(grammars, state_of(GRAMMAR, (3, 0), id=1), ()) == {1, 8}
    assert len(compiled) == 1 and consumed[-1] == 8


def test_only_so_many_matchers_are_kept() -> None:
    grammars = Grammars(TinyTable(TEXTS, ENDS), capacity=3)
    for id in range(9):
        own = replace(GRAMMAR, grammar=grammar_text("regex", f"(ab|c){{1,{id + 1}}}"))
        assert allowed_after(grammars, state_of(own, (3,), id=id), ()) >= set(ENDS)
    assert len(grammars._matchers) == len(grammars._compiled) == 3
    assert allowed_after(grammars, state_of(GRAMMAR, (3, 3), id=0), ()) == {0, 2, 3, 4, 5, 6} - {5}


def test_a_matcher_that_exceeds_its_limits_is_reported_and_dropped() -> None:
    grammars = Grammars(TokenTable(BUNDLED, 2048, (0, 2)))
    other = state_of(Constraints(grammar=grammar_text("regex", "[ab]")), ())
    before = grammars.masks(other, [()]).packed_QY
    assert "too many expressions" in str(grammars.problem(grammar_text("grammar", HOSTILE)))
    slowly = Constraints(grammar=grammar_text("regex", "((a{1,500}){1,500}){1,500}"))
    assert grammars.problem(slowly.grammar) is None
    state = state_of(slowly, [68] * 12, id=7)
    for _ in range(3):
        grammars.masks(state, [(68,) * length for length in range(40)])
        assert grammars.failure(7) == "lexer error: too many expressions constructed"
        assert 7 not in grammars._matchers
    grammars.drop(7)
    assert grammars.failure(7) is None
    assert (grammars.masks(other, [()]).packed_QY == before).all()


def test_masks_that_take_too_long_fail_their_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(module.time, "thread_time", lambda: float(next(clock)))
    grammars = Grammars(TinyTable(TEXTS, ENDS), mask_seconds=2.0)
    slow, other = state_of(GRAMMAR, (), id=1), state_of(GRAMMAR, (), id=2)
    masks = grammars.masks(slow, [(), (0,), (2,), (3,)])
    assert masks.is_over_Q.tolist() == [False, False, True, True]
    assert grammars.failure(1) == "its masks take more than 2 s" and 1 not in grammars._matchers
    assert grammars.masks(slow, [()]).is_over_Q.all() and grammars.count_allowed(slow, [0]) == 0
    assert allowed_after(grammars, other, (3,)) == allowed_by(TEXTS, ENDS, LANGUAGE, (3,))
    assert grammars.failure(2) is None


def test_the_tokens_table_that_the_first_request_reads_does_not_count_as_its_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "thread_time", lambda: now[0])

    class Slow(TinyTable):
        def load(self) -> Any:
            now[0] += 5.0
            return super().load()

    grammars, state = Grammars(Slow(TEXTS, ENDS), mask_seconds=2.0), state_of(GRAMMAR, ())
    assert not grammars.masks(state, [(), (3,)]).is_over_Q.any()
    assert now[0] >= 5.0 and grammars.failure(0) is None


def test_a_rank_that_must_agree_with_others_computes_all_masks_before_it_fails_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count()
    monkeypatch.setattr(module.time, "thread_time", lambda: float(next(clock)))
    table, paths = TinyTable(TEXTS, ENDS), [(), (0,), (2,), (3,)]
    leader = Grammars(table, mask_seconds=2.0, is_alone=False)
    follower = Grammars(table, mask_seconds=math.inf, is_alone=False)
    masks, theirs = (grammars.masks(state_of(GRAMMAR, ()), paths) for grammars in (leader, follower))
    assert (masks.packed_QY == theirs.packed_QY).all() and not (masks.is_over_Q | theirs.is_over_Q).any()
    assert leader.failure(0) == "its masks take more than 2 s" and follower.failure(0) is None


def test_a_very_ambiguous_grammar_fails() -> None:
    grammars = Grammars(TokenTable(BUNDLED, 2048, (0, 2)))
    text = grammar_text("grammar", 'start: e\ne: e e e | e e | /[a-z]/ | "(" e ")"')
    letters = [token for letter in "abcdefgh" * 50 for token in grammars.table.load().tokenize_str(letter)]
    for length in range(0, len(letters), 10):
        if grammars.failure(0) is None:
            grammars.masks(state_of(Constraints(grammar=text), letters[:length]), [(), letters[length : length + 1]])
    assert "items" in str(grammars.failure(0))


# ---- grammars and tables


def test_a_string_schema_is_parsed_so_that_it_adds_no_grammar_of_its_own() -> None:
    with pytest.raises(GrammarError, match="Extra data"):
        grammar_text("json", '{}}, {"lark_grammar": "start: /x*/"')


@pytest.mark.parametrize("choices", [["a"], ["", "a"], ['"', "\\"], ["\n", "\u2028", "🌳"]])
def test_choices_are_taken_literally(choices: list[str]) -> None:
    table = TokenTable(BUNDLED, 2048, (0, 2))
    for text in choices:
        matcher = table.compile(grammar_text("choice", choices))
        assert matcher.consume_tokens(table.load().tokenize_str(text)) and matcher.is_accepting()


def test_logits_may_be_more_or_fewer_than_the_tokenizers_tokens() -> None:
    for vocab_size in (2048 + 120, 2048, 2000):
        grammars = Grammars(TokenTable(BUNDLED, vocab_size, (7, 5000)))
        masks = grammars.masks(state_of(Constraints(grammar=grammar_text("regex", "[a-c]")), ()), [()])
        allowed_V = unpacked(masks.packed_QY, vocab_size)[0]
        assert len(allowed_V) == vocab_size and allowed_V.sum() == 3
        behind = state_of(Constraints(grammar=grammar_text("regex", "[a-c]")), np.flatnonzero(allowed_V)[:1].tolist())
        assert np.flatnonzero(unpacked(grammars.masks(behind, [()]).packed_QY, vocab_size)[0]).tolist() == [7]


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema = '{"not": ' * 100_000 + "true" + "}" * 100_000
    with pytest.raises(GrammarError, match=r"^it is nested too deeply$"):
        grammar_text("json", schema)


@pytest.mark.parametrize(
    ("least", "required", "is_refused"),
    [(1, [], False), (2, ["a"], False), (2, [], True), (3, ["a"], True), (1, None, False), (2, None, True)],
)
def test_a_minimum_of_properties_that_repeated_names_would_meet_is_refused(
    least: int, required: list[str] | None, is_refused: bool
) -> None:
    own: dict[str, Any] = {"type": "object", "properties": {"a": {}} if required else {}, "minProperties": least}
    if required is not None:
        own["required"] = required
    for schema in (own, {"anyOf": [{"type": "null"}, {"type": "array", "items": own}]}):
        if is_refused:
            with pytest.raises(GrammarError, match=f"minProperties: {least} .* require the properties by their names"):
                grammar_text("json", schema)
        else:
            assert str(least) in grammar_text("json", schema)
    grammar_text("json", {"enum": [own], "default": own, "properties": {"minProperties": {"const": own}}})


def test_json_may_have_whitespace_unless_told_otherwise() -> None:
    table = TokenTable(BUNDLED, 2048, (0, 2))
    texts = ['{"a": [1, {}]}', '{"a":[1,{}]}', '{ "a": [1,\n{}] }']
    for options, accepted in (
        ({}, [True, True, True]),
        ({"whitespace": "free"}, [True, True, True]),
        ({"whitespace": "none"}, [False, True, False]),
        ({"whitespace": "usual"}, [True, False, False]),
    ):
        for text, is_accepted in zip(texts, accepted, strict=True):
            matcher = table.compile(grammar_text("json", {"type": "object"}, **options))
            ids = table.load().tokenize_str(text)
            assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == is_accepted


def test_a_grammar_that_only_this_process_cannot_compile_fails_its_request_with_the_reason() -> None:
    grammars = Grammars(TokenTable("nowhere", 9, (0,)))
    masks = grammars.masks(state_of(GRAMMAR, (), id=5), [()])
    assert masks.is_over_Q.all()
    assert grammars.failure(5) == "structured outputs need a model with a tokenizer.json, and this one has none"


def test_an_error_is_the_library_s_own_words_on_one_line_of_bounded_length() -> None:
    table = TokenTable(BUNDLED, 2048, (0, 2))
    with pytest.raises(GrammarError) as short:
        table.compile(grammar_text("regex", "(a"))
    with pytest.raises(GrammarError) as long:
        table.compile(grammar_text("grammar", f"start: {'x' * 500}"))
    assert str(short.value) == ('at 1(8): invalid regex "(a" (in regex): regex parse error: (a error: unclosed group')
    assert len(str(long.value)) == 300 and str(long.value).endswith("...")


def test_an_error_advises_what_can_be_written_and_not_a_setting_of_the_library() -> None:
    schema = {"type": "object", "properties": {"a": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}}
    with pytest.raises(GrammarError) as refused:
        TokenTable(BUNDLED, 2048, (0, 2)).compile(grammar_text("json", schema))
    assert "oneOf" in str(refused.value) and "write anyOf instead" in str(refused.value)
    assert "coerce_one_of" not in str(refused.value)


def test_the_state_with_its_grammar_survives_the_wire() -> None:
    states = [None, state_of(GRAMMAR, (3, 2), id=12), state_of(Constraints(min_tokens=2), (), ENDS)]
    assert unpack_logits_states(pack_logits_states(states)) == {1: states[1], 2: states[2]}


# ---- the cost without a grammar


@pytest.mark.slow
def test_without_a_grammar_no_mask_is_computed_and_the_library_is_not_imported() -> None:
    code = """
import sys
import torch
from tests.support.grammars import state_of  # imports it
del sys.modules["llguidance"]
from workers.sampling.grammar import Grammars, TokenTable
from workers.sampling.grammar_masks import grammar_masks
from workers.sampling.logits_edits import Columns, ConstrainedRow
from workers.settings import Constraints
grammars = Grammars(TokenTable("nowhere", 9, ()))
row = ConstrainedRow(0, state_of(Constraints(min_tokens=3), ()), [])
assert grammar_masks([row], Columns(0, 9), grammars) is None
assert grammar_masks([], Columns(0, 9), None) is None
assert "llguidance" not in sys.modules
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=File(module.__file__).parents[2])
    assert ran.returncode == 0


def test_the_state_without_a_grammar_carries_no_output() -> None:
    penalized = SamplingSettings(constraints=Constraints(presence_penalty=1.0))
    for sampling, size in ((penalized, 0), (SamplingSettings(constraints=GRAMMAR), 8)):
        request = Request(Submit(id=3, prompt=[1], max_tokens=9, sampling=sampling), Rule.COUPLED, None, 0)
        request.append([5, 2])
        state = request.logits_state(ENDS)
        assert state is not None and len(state.output) == size and state.id == 3
