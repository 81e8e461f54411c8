"""Incremental text and stop strings depend on the token sequence alone, not on the steps."""

from __future__ import annotations

import random
from os.path import commonprefix
from pathlib import Path

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

import secateur
from cluster.errors import PromptError
from cluster.text.detokenizer import IncrementalDetokenizer, StopStrings
from cluster.text.tokenizer import Tokenizer, _byte_letters
from tests.support.tokenizer_kinds import byte_level

MODEL = Path(secateur.__file__).parent / "bundled" / "target"
TEXT = 'def greet(name):\n    return f"héllo, {name} 🌳 日本語 العربية 👩‍🔬"\n'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(MODEL))


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer as Llama 2's, with so small a vocabulary that most characters are bytes."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c"]
    vocab = {word: id for id, word in enumerate(words)}
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    decoders = tokenizers.decoders
    fast.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    folder = tmp_path_factory.mktemp("bytewise")
    PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>").save_pretrained(folder)
    return Tokenizer(str(folder))


def test_a_tokenizer_without_a_rust_part_decodes_by_its_python_part(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of SentencePiece alone, and of some repositories' own code."""
    ids = tokenizer.encode(TEXT)
    monkeypatch.setattr(tokenizer, "_fast", None)
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT


def pieces_of(ids: list[int], seed: int) -> list[list[int]]:
    """Return the same tokens in steps of 1 to 5."""
    chance, steps = random.Random(seed), []
    while ids:
        size = chance.randint(1, 5)
        steps.append(ids[:size])
        ids = ids[size:]
    return steps


@pytest.mark.parametrize("seed", range(20))
def test_the_pieces_join_to_the_decoded_text(tokenizer: Tokenizer, seed: int) -> None:
    ids = tokenizer.encode(TEXT)
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.feed(step) for step in pieces_of(ids, seed)] + [detokenizer.flush()]
    assert "".join(pieces) == tokenizer.decode(ids) == TEXT
    assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("seed", range(50))
def test_random_tokens_join_to_their_decoded_text(tokenizer: Tokenizer, seed: int) -> None:
    chance = random.Random(seed)
    ids = [chance.randrange(tokenizer.vocab_size) for _ in range(60)]
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.feed(step) for step in pieces_of(ids, seed)]
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids)


def test_a_character_cut_short_is_flushed_as_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🌳")
    assert len(ids) > 1
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.feed(ids[:-1]) == ""
    assert set(detokenizer.flush()) == {"\ufffd"}


def test_the_prompt_s_text_is_not_repeated(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("def f(x):\n")
    ids = tokenizer.encode("    return x")
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    assert detokenizer.feed(ids) + detokenizer.flush() == "    return x"


@pytest.mark.parametrize("kind", ["tokenizer", "bytewise"])
@pytest.mark.parametrize("text", ["ab🌳🌳c", "a\ufffdb", "a አማርኛ አማርኛ b"])
def test_a_character_begun_in_the_prompt_is_completed(request: pytest.FixtureRequest, kind: str, text: str) -> None:
    split: Tokenizer = request.getfixturevalue(kind)
    ids = split.encode(text)
    for cut in range(1, len(ids)):
        detokenizer = IncrementalDetokenizer(split, ids[:cut])
        pieces = [detokenizer.feed([id]) for id in ids[cut:]] + [detokenizer.flush()]
        assert "".join(pieces) == text.removeprefix(commonprefix([split.decode(ids[:cut]), text])), cut


def test_special_tokens_are_left_out_unless_wanted(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a"), 0]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|endoftext|>"


def test_no_token_is_longer_than_the_longest(tokenizer: Tokenizer) -> None:
    lengths = [len(tokenizer.decode([id], skip_special_tokens=False)) for id in range(tokenizer.vocab_size)]
    assert max(lengths) == tokenizer.longest_token


def test_a_chat_is_rendered_by_the_model_s_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with_prompt = tokenizer.encode_chat(messages)
    without = tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert with_prompt[: len(without)] == without
    assert len(with_prompt) > len(without)
    assert "Hi" in tokenizer.decode(with_prompt)


def test_a_template_writes_the_special_tokens_of_a_chat_itself(tmp_path: Path) -> None:
    fast = byte_level()
    fast.post_processor = tokenizers.processors.TemplateProcessing(
        single="! $A", special_tokens=[("!", fast.token_to_id("!"))]
    )
    PreTrainedTokenizerFast(tokenizer_object=fast, chat_template="{{ messages[0].content }}").save_pretrained(tmp_path)
    tokenizer = Tokenizer(str(tmp_path))
    plain = tokenizer.encode_chat([{"role": "user", "content": "a"}])
    assert plain == tokenizer.encode("a", add_special_tokens=False) != tokenizer.encode("a")


def test_the_letters_of_byte_level_vocabularies_stand_for_all_bytes() -> None:
    letters = _byte_letters()
    assert sorted(letters.values()) == list(range(256))
    known = {"!": 0x21, "~": 0x7E, "¡": 0xA1, "¬": 0xAC, "®": 0xAE, "ÿ": 0xFF, "Ġ": 0x20, "Ċ": 0x0A, "Ń": 0xAD}
    assert {letter: letters[letter] for letter in known} == known


def test_continuing_the_last_message_leaves_it_open(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, wor"}]
    ids = tokenizer.encode_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("Hello, wor")


@pytest.mark.parametrize("text", [TEXT, " a", "\ufffd"])
def test_the_bytes_of_the_tokens_join_to_those_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    texts = [tokenizer.token_text(id) for id in tokenizer.encode(text)]
    assert b"".join(token.utf8 for token in texts) == text.encode()


def test_a_token_that_is_invalid_utf8_is_escaped(tokenizer: Tokenizer) -> None:
    first, *_ = tokenizer.encode("🌳")
    assert tokenizer.token_text(first) == ("bytes:\\xf0\\x9f", b"\xf0\x9f")
    assert tokenizer.token_text(tokenizer.encode(" return")[0]) == (" return", b" return")
    assert tokenizer.token_text(0).text == "<|endoftext|>"


def test_different_tokens_have_different_strings(tokenizer: Tokenizer) -> None:
    assert len({tokenizer.token_text(id).text for id in range(tokenizer.vocab_size)}) == tokenizer.vocab_size


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer as Llama 2's: spaces are part of words, unknown characters become byte tokens."""
    vocab = {"<unk>": 0, "<s>": 1, "<0xC3>": 2, "<0xA9>": 3, "▁": 4, "a": 5, "b": 6, "▁a": 7, "▁ab": 8}
    merges = [("▁", "a"), ("▁a", "b")]
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder = tmp_path_factory.mktemp("sentencepiece")
    PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>", bos_token="<s>").save_pretrained(folder)
    return Tokenizer(str(folder))


def test_token_strings_keep_spaces_and_bytes(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.encode("ab é") == [8, 4, 2, 3]
    texts = [sentencepiece.token_text(id) for id in (8, 6, 2, 3)]
    assert texts == [(" ab", b" ab"), ("b", b"b"), ("bytes:\\xc3", b"\xc3"), ("bytes:\\xa9", b"\xa9")]


def test_a_bad_word_has_a_form_with_and_without_a_space(tokenizer: Tokenizer, sentencepiece: Tokenizer) -> None:
    alone, spaced = tokenizer.bad_words([" return"])
    assert tokenizer.decode(alone) == "return"
    assert tokenizer.decode(spaced) == " return"
    assert tokenizer.bad_words(["return", "  return"]) == [alone, spaced]
    assert tokenizer.bad_words(["\n"])[0] == tokenizer.encode("\n")
    assert sentencepiece.bad_words(["ab"]) == [[8]]  # the space is in it already


def test_a_bad_word_that_is_invalid_unicode_is_a_prompt_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptError) as caught:
        tokenizer.bad_words(["\ud800"])
    assert caught.value.param == "bad_words"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_openais_roles_are_known(tokenizer: Tokenizer, role: str) -> None:
    assert tokenizer.encode_chat([{"role": role, "content": "x"}])


@pytest.mark.parametrize("written", ["'wizard'", '"wizard"'])
def test_another_role_is_known_if_the_template_names_it(tokenizer: Tokenizer, written: str) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "wizard", "content": "x"}]
    with pytest.raises(
        PromptError, match=r"messages\.1\.role: 'wizard' is unknown.*write system, developer, user"
    ) as no:
        tokenizer.encode_chat(messages)
    assert no.value.param == "messages"
    wise = Tokenizer(str(MODEL))
    rest = "{% endif %}{{ m['role'] }} {% endfor %}"
    wise._tokenizer.chat_template = f"{{% for m in messages %}}{{% if m['role'] == {written} %}}*{rest}"
    assert wise.decode(wise.encode_chat(messages)) == "user *wizard "
    with pytest.raises(PromptError, match="'wiz' is unknown"):  # part of a name is no name
        wise.encode_chat([{"role": "wiz", "content": "x"}])


def test_tools_are_passed_to_the_template(tokenizer: Tokenizer) -> None:
    able = Tokenizer(str(MODEL))
    able._tokenizer.chat_template = "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert able.decode(able.encode_chat([{"role": "user", "content": "x"}], tools=tools)) == "f "


def test_a_templates_error_is_a_prompt_error() -> None:
    strict = Tokenizer(str(MODEL))
    strict._tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(PromptError, match="chat template refused"):
        strict.encode_chat([{"role": "user", "content": "x"}])


def cut(text: str, stops: list[str], *, seed: int, include: bool = False) -> tuple[str, str | None]:
    chance, stop_strings, result = random.Random(seed), StopStrings(stops, include=include), ""
    while text:
        size = chance.randint(1, 4)
        piece, stop = stop_strings.feed(text[:size])
        result += piece
        if stop is not None:
            return result, stop
        text = text[size:]
    return result + stop_strings.flush(), None


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ["two"], ("one ", "two")),
        ("one two three", ["four"], ("one two three", None)),
        ("aab", ["ab"], ("a", "ab")),
        ("xabcdy", ["abcd", "bc"], ("xa", "bc")),  # "bc" is complete before "abcd" is
        ("xabcdy", ["cd", "abcd"], ("x", "abcd")),  # complete together: the longest
        ("ends with \n\nde", ["\n\ndef"], ("ends with \n\nde", None)),
        ("stop", ["stop"], ("", "stop")),
    ],
)
@pytest.mark.parametrize("seed", range(8))
def test_the_first_stop_string_to_be_complete_ends_the_text(
    text: str, stops: list[str], expected: tuple[str, str | None], seed: int
) -> None:
    assert cut(text, stops, seed=seed) == expected


def test_of_stop_strings_that_end_together_the_longest_is_cut_off() -> None:
    assert StopStrings(["a", "ba"]).feed("cba") == ("c", "ba")


def test_a_stop_string_may_stay_in_the_text() -> None:
    assert cut("one two three", ["two"], seed=0, include=True) == ("one two", "two")


def test_a_possible_stop_string_is_held_back() -> None:
    stops = StopStrings(["###"])
    assert stops.feed("text ##") == ("text ", None)
    assert stops.feed("not") == ("##not", None)


@pytest.mark.parametrize(
    ("early", "late", "expected"),
    [
        ("one two", " three two", ("one two three ", "two")),  # an early one is text like any other
        ("one t", "wo", ("one ", "two")),  # it begins early and is complete late
        ("twot", "wo", ("two", "two")),
        ("ab", "x", ("abx", None)),  # the end of a longer one is held back, the short one in it came early
        ("ab", "c", ("", "abc")),
    ],
)
def test_a_stop_string_before_min_tokens_does_not_stop(early: str, late: str, expected: tuple[str, str | None]) -> None:
    stops = StopStrings(["two", "b", "abc"])
    first, _ = stops.feed(early, may_stop=False)
    second, stop = stops.feed(late)
    rest = "" if stop else stops.flush()
    assert (first + second + rest, stop) == expected


@pytest.mark.parametrize("seed", range(200))
def test_the_cut_does_not_depend_on_the_pieces(seed: int) -> None:
    chance = random.Random(seed)
    text = "".join(chance.choices("ab", k=30))
    stops = ["".join(chance.choices("ab", k=chance.randint(2, 6))) for _ in range(3)]
    assert len({cut(text, stops, seed=other) for other in range(5)}) == 1


def test_invalid_unicode_is_a_prompt_error_with_its_reason(tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptError, match=r"^the text is not valid Unicode: surrogates not allowed$") as caught:
        tokenizer.encode("\ud800")
    assert caught.value.param == "prompt"


def test_special_tokens_are_hidden_by_default_those_that_were_added_too(tmp_path: Path) -> None:
    fast = PreTrainedTokenizerFast.from_pretrained(str(MODEL))
    fast.add_tokens([tokenizers.AddedToken("<|turn|>", special=True)], special_tokens=True)
    fast.save_pretrained(tmp_path)
    tokenizer = Tokenizer(str(tmp_path))
    [added] = tokenizer.encode("<|turn|>", add_special_tokens=False)
    assert not tokenizer.is_visible(added) and tokenizer.is_visible(added, skip_special_tokens=False)
    assert tokenizer.decode([added]) == "" and tokenizer.decode([added], skip_special_tokens=False) == "<|turn|>"
