"""The text of an answer depends on its tokens alone, for any steps and any tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.text.detokenizer import IncrementalDetokenizer
from cluster.text.tokenizer import Tokenizer
from tests.support.tokenizer_kinds import (
    BYTES,
    WORDS,
    Kind,
    byte_level,
    gemma,
    llama,
    load,
    metaspace,
    rewriting,
    word_ends,
    word_piece,
)

STREAMABLE = (llama, gemma, byte_level, word_piece, metaspace, word_ends)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Tokenizer]:
    """Load a tokenizer of this kind."""
    return cache(lambda kind: load(kind, tmp_path_factory.mktemp(kind.__name__)))


def steps(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[begin:end] for begin, end in pairwise(edges)]


def pieces(tokenizer: Tokenizer, prompt: list[int], groups: list[list[int]], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.feed(group) for group in groups), detokenizer.flush()]


# Characters of one to four bytes among tokens at random: most of what bytes at random spell is broken.
Parts = st.lists(st.one_of(st.integers(0, 10_000), st.text("世🌳é\ufffd ab", max_size=4)), max_size=20)
Cuts = st.lists(st.integers(0, 60), max_size=8)


def ids_of(tokenizer: Tokenizer, parts: list[int | str]) -> list[int]:
    return [
        id
        for part in parts
        for id in (
            tokenizer.encode(part, add_special_tokens=False) if isinstance(part, str) else [part % tokenizer.vocab_size]
        )
    ]


@pytest.mark.parametrize("kind", [*STREAMABLE, rewriting], ids=lambda kind: kind.__name__)
@settings(max_examples=100)
@given(prompt=Parts, answer=Parts, cuts=Cuts, skip=st.booleans())
def test_the_text_does_not_depend_on_the_steps(loaded, kind, prompt, answer, cuts, skip) -> None:
    tokenizer = loaded(kind)
    prompt, ids = ids_of(tokenizer, prompt), ids_of(tokenizer, answer)
    cut, single, whole = (
        "".join(pieces(tokenizer, prompt, groups, skip)) for groups in (steps(ids, cuts), [[id] for id in ids], [ids])
    )
    assert cut == single == whole


@pytest.mark.parametrize("kind", STREAMABLE, ids=lambda kind: kind.__name__)
@settings(max_examples=100)
@given(answer=Parts, cuts=Cuts, skip=st.booleans())
def test_the_deltas_join_to_the_text_of_all_tokens(loaded, kind, answer, cuts, skip) -> None:
    tokenizer = loaded(kind)
    ids = ids_of(tokenizer, answer)
    assert "".join(pieces(tokenizer, [], steps(ids, cuts), skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", STREAMABLE, ids=lambda kind: kind.__name__)
@settings(max_examples=100)
@given(parts=Parts, cut=st.integers(0, 60), skip=st.booleans())
def test_a_character_begun_in_the_prompt_belongs_to_the_answer(loaded, kind, parts, cut, skip) -> None:
    tokenizer = loaded(kind)
    ids = ids_of(tokenizer, parts)
    prompt, answer = ids[:cut], ids[cut:]
    before, both = (tokenizer.decode(some, skip_special_tokens=skip) for some in (prompt, ids))
    # A character that the prompt begins and the answer completes belongs to the answer.
    assert "".join(pieces(tokenizer, prompt, [answer], skip)) == both[len(common(before, both)) :]


def common(one: str, other: str) -> str:
    length = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return one[:length] if length is not None else min(one, other, key=len)


@settings(max_examples=150)
@given(parts=st.lists(st.one_of(st.binary(max_size=4), st.text("世🌳é\ufffd ab", max_size=3)), max_size=12))
@example(parts=["世", b"\xf0\x9f"])
@example(parts=[b"<0x41>", b"\xff"])  # bytes that spell a byte token
@example(parts=["▁".encode(), b"\xff"])  # bytes that spell the sign for a space
def test_each_invalid_part_becomes_one_replacement_character(loaded, parts) -> None:
    tokenizer, tokens, utf8 = loaded(gemma), [], b""
    for part in parts:
        tokens += list(map(BYTES.__getitem__, part)) if isinstance(part, bytes) else spelt(part)
        utf8 += part if isinstance(part, bytes) else part.encode()
    ids = tokenizer._tokenizer.convert_tokens_to_ids(tokens)
    assert tokenizer.decode(ids) == utf8.decode("utf-8", "replace")


def spelt(text: str) -> list[str]:
    """Return one token per character in the vocabulary, otherwise its bytes."""
    chars = text.replace(" ", "▁")
    return [token for char in chars for token in ([char] if char in WORDS else map(BYTES.__getitem__, char.encode()))]


def test_a_complete_character_survives_invalid_bytes_behind_it(loaded) -> None:
    tokenizer = loaded(llama)
    ids = tokenizer._tokenizer.convert_tokens_to_ids(["<0xE4>", "<0xB8>", "<0x96>", "<0xF0>", "<0x9F>"])
    assert tokenizer.decode(ids) == "世\ufffd"
    assert pieces(tokenizer, [], [[id] for id in ids]) == ["", "", "世", "", "", "\ufffd"]
    assert pieces(tokenizer, [], [ids]) == ["世", "\ufffd"]


def test_skipped_tokens_do_not_split_a_character(loaded) -> None:
    tokenizer = loaded(llama)
    first, *rest = tokenizer._tokenizer.convert_tokens_to_ids(["<0xE4>", "<0xB8>", "<0x96>"])
    nothing = [tokenizer._tokenizer.bos_token_id] * 40
    assert pieces(tokenizer, [], [[first], nothing, rest]) == ["", "", "世", ""]
    assert pieces(tokenizer, [first, *nothing], [nothing, rest]) == ["", "世", ""]
    [word] = tokenizer._tokenizer.convert_tokens_to_ids(["▁a"])
    assert pieces(tokenizer, [word, *nothing], [[word]]) == [" a", ""]  # the first word of a text has no space


def test_only_an_incomplete_character_is_held_back(loaded) -> None:
    """Any number of invalid bytes is returned at once, with constant work per token."""
    tokenizer = loaded(llama)
    [broken] = tokenizer._tokenizer.convert_tokens_to_ids(["<0xFF>"])
    detokenizer = IncrementalDetokenizer(tokenizer)
    told = 0
    for number in range(1, 2000):
        told += len(detokenizer.feed([broken]))
        assert number - 3 <= told <= number
    assert len(detokenizer._window) < 100
    assert told + len(detokenizer.flush()) == number
