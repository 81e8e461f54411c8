"""The text of an answer is a function of its tokens: whatever the steps were, whatever the tokenizer's decoder does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cluster.tokens import IncrementalDetokenizer, Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "<s>"]
WORDS = ["▁", "▁▁", "a", "▁a", "b", "世", "\ufffd", "▁\ufffd", "é", "<0x", "ab"]


def llama(folder: Path) -> tokenizers.Tokenizer:
    """SentencePiece with byte fallback, as Llama 2's and Mistral's."""
    vocab = {word: id for id, word in enumerate([*SPECIAL, *BYTES, *WORDS])}
    fast = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast


def gemma(folder: Path) -> tokenizers.Tokenizer:
    """The same without the space before a text."""
    fast = llama(folder)
    fast.normalizer = normalizers.Replace(" ", "▁")
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return fast


def byte_level(folder: Path) -> tokenizers.Tokenizer:
    """GPT-2's kind, with tokens of several bytes that are no characters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spell = {char: "".join(letters_of(char)) for char in ("世", "🌳")}
    words = [*SPECIAL, *letters, spell["世"][:2], spell["世"][1:], spell["🌳"][:3], "a" + spell["🌳"][:2], "Ġa"]
    fast = tokenizers.Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, [], unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    return fast


def letters_of(text: str) -> list[str]:
    [(spelt, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return list(spelt)


def word_piece(folder: Path) -> tokenizers.Tokenizer:
    words = [*SPECIAL, "a", "##a", "b", "##b", ".", ",", "don", "'", "t", "世", "##世", "\ufffd"]
    vocab = {word: id for id, word in enumerate(words)}
    fast = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.decoder = decoders.WordPiece()
    return fast


def metaspace(folder: Path) -> tokenizers.Tokenizer:
    """T5's kind."""
    fast = tokenizers.Tokenizer(models.Unigram([(word, -1.0) for word in [*SPECIAL, *WORDS]], unk_id=0))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Metaspace()
    return fast


def word_ends(folder: Path) -> tokenizers.Tokenizer:
    """GPT-1's kind: the space behind a word is written if another follows."""
    vocab = {word: id for id, word in enumerate([*SPECIAL, "a", "a</w>", "b", "b</w>", "世</w>"])}
    fast = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.decoder = decoders.BPEDecoder()
    return fast


def rewriting(folder: Path) -> tokenizers.Tokenizer:
    """A decoder that takes back a space once the next token has come: no stream can say what it says of the whole."""
    fast = llama(folder)
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Replace(" a", "a")]
    )
    return fast


STREAMABLE = (llama, gemma, byte_level, word_piece, metaspace, word_ends)
Kinds = Callable[[Callable[[Path], tokenizers.Tokenizer]], Tokenizer]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    """The tokenizer of a kind, from its folder."""
    made: dict[str, Tokenizer] = {}

    def load(kind: Callable[[Path], tokenizers.Tokenizer]) -> Tokenizer:
        if kind.__name__ not in made:
            folder = tmp_path_factory.mktemp(kind.__name__)
            wrapped = PreTrainedTokenizerFast(tokenizer_object=kind(folder), unk_token="<unk>", bos_token="<s>")
            wrapped.save_pretrained(folder)
            made[kind.__name__] = Tokenizer(str(folder))
        return made[kind.__name__]

    return load


def steps(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[begin:end] for begin, end in pairwise(edges)]


def pieces(tokenizer: Tokenizer, prompt: list[int], groups: list[list[int]], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.feed(group) for group in groups), detokenizer.flush()]


Ids = st.lists(st.integers(0, 10_000), max_size=40)


@pytest.mark.parametrize("kind", [*STREAMABLE, rewriting], ids=lambda kind: kind.__name__)
@settings(max_examples=100)
@given(prompt=Ids, ids=Ids, cuts=st.lists(st.integers(0, 40), max_size=8), skip=st.booleans())
def test_no_steps_change_the_text(loaded, kind, prompt, ids, cuts, skip) -> None:
    tokenizer = loaded(kind)
    prompt, ids = ([id % tokenizer.vocab_size for id in some] for some in (prompt, ids))
    cut, single, whole = (
        "".join(pieces(tokenizer, prompt, groups, skip)) for groups in (steps(ids, cuts), [[id] for id in ids], [ids])
    )
    assert cut == single == whole


@pytest.mark.parametrize("kind", STREAMABLE, ids=lambda kind: kind.__name__)
@settings(max_examples=100)
@given(ids=Ids, cuts=st.lists(st.integers(0, 40), max_size=8), skip=st.booleans())
def test_the_pieces_are_the_text_of_all_tokens_together(loaded, kind, ids, cuts, skip) -> None:
    tokenizer = loaded(kind)
    ids = [id % tokenizer.vocab_size for id in ids]
    assert "".join(pieces(tokenizer, [], steps(ids, cuts), skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", STREAMABLE, ids=lambda kind: kind.__name__)
@settings(max_examples=100)
@given(prompt=Ids, ids=Ids, skip=st.booleans())
def test_an_answer_goes_on_where_its_prompt_ended(loaded, kind, prompt, ids, skip) -> None:
    tokenizer = loaded(kind)
    prompt, ids = ([id % tokenizer.vocab_size for id in some] for some in (prompt, ids))
    before, both = (tokenizer.decode(some, skip_special_tokens=skip) for some in (prompt, prompt + ids))
    # A character that the prompt begins and the answer completes belongs to the answer.
    assert "".join(pieces(tokenizer, prompt, [ids], skip)) == both[len(common(before, both)) :]


def common(one: str, other: str) -> str:
    length = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return one[:length] if length is not None else min(one, other, key=len)


Spelt = st.lists(st.sampled_from([*BYTES, *BYTES[0x80:], "a", "▁a", "世"]), max_size=30)


@settings(max_examples=200)
@given(words=Spelt)
@example(words=["<0xE4>", "<0xB8>", "<0x96>", "<0xF0>", "<0x9F>"])
@example(words=["<0x3C>", "<0x30>", "<0x78>", "<0x34>", "<0x31>", "<0x3E>", "<0xFF>"])  # bytes that spell "<0x41>"
@example(words=["<0xE2>", "<0x96>", "<0x81>", "<0xFF>"])  # bytes that spell the sign for a space
def test_bytes_are_utf8_with_a_replacement_per_broken_part(loaded, words) -> None:
    tokenizer = loaded(gemma)
    ids = tokenizer._tokenizer.convert_tokens_to_ids(words)
    utf8 = b"".join(bytes([BYTES.index(w)]) if w in BYTES else w.replace("▁", " ").encode() for w in words)
    assert tokenizer.decode(ids) == utf8.decode("utf-8", "replace")


def test_what_is_complete_is_not_broken_by_what_follows(loaded) -> None:
    tokenizer = loaded(llama)
    ids = tokenizer._tokenizer.convert_tokens_to_ids(["<0xE4>", "<0xB8>", "<0x96>", "<0xF0>", "<0x9F>"])
    assert tokenizer.decode(ids) == "世\ufffd"
    assert pieces(tokenizer, [], [[id] for id in ids]) == ["", "", "世", "", "", "\ufffd"]
    assert pieces(tokenizer, [], [ids]) == ["世", "\ufffd"]


def test_only_what_may_yet_become_a_character_is_held_back(loaded) -> None:
    """Endless broken bytes leave as they come, and the work per token does not grow with them."""
    tokenizer = loaded(llama)
    [broken] = tokenizer._tokenizer.convert_tokens_to_ids(["<0xFF>"])
    detokenizer = IncrementalDetokenizer(tokenizer)
    told = 0
    for number in range(1, 2000):
        told += len(detokenizer.feed([broken]))
        assert number - 3 <= told <= number
    assert len(detokenizer._window) < 100
    assert told + len(detokenizer.flush()) == number
