"""Text in, tokens out, and back: the model's tokenizer, text that grows with its tokens, stop strings.

The two streaming classes are functions of the token sequence alone: however an engine groups tokens into steps, the
same text leaves and the same stop string ends it. Speculation on or off therefore cannot change an answer here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from os.path import commonprefix
from typing import Any, NamedTuple

from secateur.requests import ROLES

_CONTEXT_TOKENS, _MOST_CONTEXT_TOKENS = 8, 16
"""Tokens before a new one that are decoded with it. A decoder needs the one before (SentencePiece drops the space of a
text's first word), and the bytes of a character may be spread over four tokens."""

_MOST_QUOTED = 64  # characters of what a caller sent, in an error
_REPLACEMENT = "\ufffd"
_MOST_INCOMPLETE = 3
"""Bytes of a character that lacks its last. Decoders write one U+FFFD for all of them or for each."""
_MOST_ERROR_CHARS = 300
_OWN_FIELD = "write it as a field of the request, beside messages"
_INSTEAD = {
    "chat_template": "the model's own chat template is used; it cannot be replaced per request; remove it",
    "conversation": "write messages as a field of the request",
    "conversations": "write messages as a field of the request",
    **dict.fromkeys(("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"), _OWN_FIELD),
}
"""Of what a chat template's caller sets: where it belongs."""


class PromptError(ValueError):
    """What a caller sent cannot become tokens: broken or endless text, messages that the chat template refuses."""

    def __init__(self, message: str, *, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class TextLimit(NamedTuple):
    """The longest text that could fit: `tokens` of the context, each as long as the longest there is."""

    tokens: int
    chars: int

    def check(self, num_chars: int, *, param: str) -> None:
        """Raises PromptError. To be called before tokenizing, which takes many seconds for millions of characters."""
        if num_chars > self.chars:
            raise PromptError(
                f"this model's maximum context length is {self.tokens} tokens, which {self.chars} characters fit into "
                f"at the most, and the prompt has {num_chars}; shorten it",
                param=param,
                code="context_length_exceeded",
            )


def text_size(value: Any) -> int:
    """Characters of all texts and names in a JSON value; everything else counts as one."""
    size, left = 0, [value]
    while left:
        match left.pop():
            case str() as text:
                size += len(text)
            case dict() as fields:
                left += fields.keys()
                left += fields.values()
            case list() as items:
                left += items
            case _:
                size += 1
    return size


class TokenText(NamedTuple):
    r"""One token by itself. Example, the first byte of an emoji: TokenText("bytes:\xf0", b"\xf0")."""

    text: str
    """As it stands inside a text; OpenAI's escapes if its bytes are no text yet."""
    utf8: bytes


class Tokenizer:
    """A model folder's tokenizer and chat template. Loads from disk only; thread-safe for reading.

    Raises OSError or ValueError if there is none, or one without a vocabulary.
    """

    def __init__(self, path: str, *, revision: str | None = None) -> None:
        from transformers import AutoTokenizer  # seconds of imports: only when an engine really starts

        self.path, self.revision = path, revision
        # Left open, transformers would ask at the terminal about a folder that names code of its own (MiMo's does).
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
        # The Rust tokenizer decodes a ten-token window in 2 us, the Python wrapper around it in 30.
        self._fast: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        self._special = _special_ids(self._tokenizer, self._fast)
        decoder = getattr(self._fast, "decoder", None)
        self._has_byte_fallback = decoder is not None and decoder.decode(["<0xC3>", "<0xA9>"]) == "é"
        self._texts: dict[int, TokenText] = {}  # filled as tokens come by, so never larger than the vocabulary
        self._before = self.encode("a", add_special_tokens=False)
        if not self._before:  # what transformers makes of a Qwen folder without tokenizer files
            raise ValueError("its vocabulary is missing")
        self.longest_token = max(map(len, self._tokenizer.get_vocab()))
        """In characters: no text has fewer tokens than its length over this."""

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def eos_token_id(self) -> int | None:
        """What the tokenizer itself ends a text with."""
        return self._tokenizer.eos_token_id

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises PromptError for a text that is no Unicode (JSON can spell half a surrogate pair)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"the text is not valid Unicode: {error.reason}", param="prompt") from error
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these tokens. Their bytes are read as UTF-8: a complete character stays whatever stands beside
        it, every broken part is one U+FFFD."""
        if self._fast is None:
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        text = self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
        if self._has_byte_fallback and _REPLACEMENT in text:
            shown = [
                self._fast.id_to_token(id) for id in ids if self.shows(id, skip_special_tokens=skip_special_tokens)
            ]
            text = self._fast.decoder.decode(list(_without_broken_bytes(shown)))
        return text

    def shows(self, id: int, *, skip_special_tokens: bool = True) -> bool:
        """Whether a text shows this token at all: `decode` passes over special ones and unknown ids."""
        if skip_special_tokens and id in self._special:
            return False
        return self._fast is None or self._fast.id_to_token(id) is not None

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return list(self._tokenizer.convert_ids_to_tokens(list(ids)))

    def token_text(self, id: int) -> TokenText:
        """What one token stands for; special tokens have their names."""
        if (found := self._texts.get(id)) is None:
            found = self._texts[id] = self._token_text(id)
        return found

    def _token_text(self, id: int) -> TokenText:
        # After another token: SentencePiece drops the space of a text's first word.
        around = self.decode([*self._before, id], skip_special_tokens=False)
        text = around[len(self.decode(self._before, skip_special_tokens=False)) :]
        if _REPLACEMENT not in text:
            return TokenText(text, text.encode())
        utf8 = _bytes_of(self.token_strings([id])[0] or "")
        try:
            return TokenText(utf8.decode(), utf8)
        except UnicodeDecodeError:
            return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8), utf8)

    def bad_words(self, words: Iterable[str]) -> list[list[int]]:
        """The token sequences that write these words, at the beginning of a text and after a space.

        vLLM's rule, but for one thing: it forgets the form after a space if that has more or fewer tokens. Raises
        PromptError for a word that is no Unicode.
        """
        found: list[list[int]] = []
        for word in words:
            bare = word.lstrip(" ") or word
            try:
                alone, spaced = (self.encode(text, add_special_tokens=False) for text in (bare, " " + bare))
            except PromptError as error:
                raise PromptError(str(error), param="bad_words") from error
            found.append(alone)
            if spaced[-len(alone) :] != alone:  # otherwise forbidding the first forbids the second
                found.append(spaced)
        return [ids for position, ids in enumerate(found) if ids and ids not in found[:position]]

    @cached_property
    def template_arguments(self) -> frozenset[str]:
        """Names that rendering and the tokenizer itself give the chat template: no request may set these variables."""
        from transformers.utils.chat_template_utils import render_jinja_template

        calls = (self._tokenizer.apply_chat_template, render_jinja_template)
        parameters = [parameter for call in calls for parameter in inspect.signature(call).parameters.values()]
        named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
        return frozenset(named | self._tokenizer.special_tokens_map.keys() | {"self", "messages"})

    def check_template_variables(self, variables: Mapping[str, Any]) -> None:
        """Raises PromptError for what only the service may hand to a chat template, above all another template."""
        if taken := sorted(variables.keys() & self.template_arguments):
            instead = _INSTEAD.get(taken[0], "is not a variable of the template; remove it")
            raise PromptError(f"chat_template_kwargs.{taken[0]}: {instead}", param="chat_template_kwargs")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """A conversation through the chat template.

        Raises PromptError for what the caller's messages can cause, and for variables named as in `template_arguments`.
        """
        if not self.has_chat_template:
            raise PromptError("this model has no chat template; use /v1/completions", param="messages")
        if template_kwargs:
            self.check_template_variables(template_kwargs)
        self._check_roles(messages)
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=None if tools is None else [dict(tool) for tool in tools],
                **(template_kwargs or {}),
            )
        except MemoryError:
            raise
        except Exception as error:  # templates are user code: Jinja raises its own tree, filters anything at all
            told = str(error)[:_MOST_ERROR_CHARS]  # one of transformers' quotes the whole conversation
            raise PromptError(f"the chat template refused the messages: {told}", param="messages") from error

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Prompt ids of a conversation: `render`, then `encode`. Raises PromptError."""
        text = self.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            tools=tools,
        )
        return self.encode(text, add_special_tokens=add_special_tokens)

    def _check_roles(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raises PromptError for a role that is none of OpenAI's and that the template does not name.

        Most templates render any word; what such a message says, the model has never been taught.
        """
        for number, message in enumerate(messages):
            role = message["role"]
            if role not in ROLES and not self._template_names(role):
                raise PromptError(
                    f"messages.{number}.role: {_short(role)} is unknown to this model's chat template; write "
                    f"{', '.join(ROLES[:-1])} or {ROLES[-1]}",
                    param="messages",
                )

    def _template_names(self, word: str) -> bool:
        """Whether the chat template has this word as a text of its own."""
        templates = self._tokenizer.chat_template
        sources = templates.values() if isinstance(templates, Mapping) else [templates]
        return any(f"{quote}{word}{quote}" in source for source in sources for quote in "'\"")


def _short(text: str) -> str:
    return repr(text if len(text) <= _MOST_QUOTED else text[:_MOST_QUOTED] + "...")


def _special_ids(tokenizer: Any, fast: Any) -> frozenset[int]:
    if fast is None:
        return frozenset(tokenizer.all_special_ids)
    return frozenset(id for id, token in fast.get_added_tokens_decoder().items() if token.special)


_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _without_broken_bytes(tokens: Iterable[str]) -> Iterator[str]:
    """The same tokens with U+FFFD in place of each broken part of their bytes.

    The decoder ByteFallback replaces a whole run of byte tokens if it is no UTF-8 somewhere: whether a character can
    be read would depend on what comes later, and a stream would have to take it back.
    """
    run: list[str] = []
    for token in tokens:
        if _BYTE_TOKEN.fullmatch(token):
            run.append(token)
            continue
        yield from _mended(run)
        run = []
        yield token
    yield from _mended(run)


def _mended(run: list[str]) -> Iterator[str]:
    utf8, begin = memoryview(b"".join(map(_bytes_of, run))), 0
    while begin < len(run):
        try:
            str(utf8[begin:], "utf-8")
        except UnicodeDecodeError as error:
            yield from run[begin : begin + error.start]
            yield _REPLACEMENT
            begin += error.end
        else:
            yield from run[begin:]
            return


def _bytes_of(token: str) -> bytes:
    """The bytes of a token that is no text by itself: "<0xE2>" (SentencePiece) or byte-level BPE's letters."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    try:
        return bytes(_BYTE_OF[letter] for letter in token)
    except KeyError:  # a tokenizer of a third kind: the replacement character is what it shows
        return _REPLACEMENT.encode()


def _byte_letters() -> dict[str, int]:
    """Byte-level BPE spells every byte as a visible letter (GPT-2's `bytes_to_unicode`, backwards)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF = _byte_letters()


class IncrementalDetokenizer:
    """The text that new tokens add.

    Contract: all pieces of `feed` and the last one of `flush` joined are what `tokenizer.decode` says of prompt and
    answer together beyond what it says of the prompt. Bytes that may yet become a character are held back, so no piece
    is ever taken back. Tokens are read one at a time: whatever a decoder does, steps do not show in the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(islice(filter(self._shows, reversed(prompt)), _CONTEXT_TOKENS))[::-1]
        self._told = self._read()  # the window's text as far as it is out

    def feed(self, ids: Sequence[int]) -> str:
        """Text these tokens complete; may be empty."""
        return "".join([self._feed(id) for id in ids if self._shows(id)])

    def flush(self) -> str:
        """What is held back, incomplete bytes as U+FFFD. Ends the stream."""
        text = self._read()
        piece, self._told = text[self._start_in(text) :], text
        return piece

    def _feed(self, id: int) -> str:
        self._window.append(id)
        text = self._read()
        start, end = self._start_in(text), len(text) - _num_open(text)
        if piece := text[start:end]:
            self._told = text[:end]
        if len(self._window) > _MOST_CONTEXT_TOKENS:
            num_untold = len(text) - max(start, end)
            self._window = self._window[-_CONTEXT_TOKENS:]
            text = self._read()
            self._told = text[: len(text) - num_untold]
        return piece

    def _start_in(self, text: str) -> int:
        """How many of its characters are out. A prompt may end within a character, which the answer then completes."""
        return len(self._told) if text.startswith(self._told) else len(commonprefix([text, self._told]))

    def _shows(self, id: int) -> bool:
        return self._tokenizer.shows(id, skip_special_tokens=self._skip)

    def _read(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip) if self._window else ""


def _num_open(text: str) -> int:
    """Characters at the end of a text that further bytes may change."""
    return min(len(text) - len(text.rstrip(_REPLACEMENT)), _MOST_INCOMPLETE)


class Cut(NamedTuple):
    """What may leave now; `stop` is the stop string that ended the text."""

    text: str
    stop: str | None


class StopStrings:
    """Ends a growing text at the first stop string to be completed, which is cut off unless `include`.

    Rule: read the text character by character; the first stop string that is complete ends it (of several completed
    by the same character, the longest). This does not depend on how the text was cut into pieces. Text that could
    still become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = sorted((stop for stop in stops if stop), key=len, reverse=True)
        self._include = include
        self._held = ""

    def feed(self, text: str, *, may_stop: bool = True) -> Cut:
        """The text that may leave; after a Cut with a stop, feed nothing more.

        Without `may_stop`, stop strings that this text completes end nothing.
        """
        if not self._stops:
            return Cut(text, None)
        old, text = len(self._held), self._held + text
        if may_stop and (found := self._first_complete(text, old)):
            end, stop = found
            self._held = ""
            return Cut(text[: end if self._include else end - len(stop)], stop)
        keep = self._could_begin_a_stop(text)
        self._held = text[len(text) - keep :]
        return Cut(text[: len(text) - keep], None)

    def flush(self) -> str:
        """What was held back; no stop string came of it."""
        text, self._held = self._held, ""
        return text

    def _first_complete(self, text: str, old: int) -> tuple[int, str] | None:
        """(end, stop string) of the first one to end behind the first `old` characters, which ended nothing."""
        starts = ((max(0, old - len(stop) + 1), stop) for stop in self._stops)
        ends = [(at + len(stop), stop) for start, stop in starts if (at := text.find(stop, start)) >= 0]
        return min(ends, key=lambda found: found[0]) if ends else None  # stable: the longest comes first

    def _could_begin_a_stop(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
