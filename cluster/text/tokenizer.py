"""The model's tokenizer and chat template: text to tokens and back."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from cluster.errors import PromptError
from cluster.text.tool_prompts import taught
from secateur.jsonl import leaves
from secateur.requests import ROLES

_MAX_QUOTED_CHARS = 64  # of what a client sent, in an error message
_MAX_ERROR_CHARS = 300
REPLACEMENT_CHARACTER = "\ufffd"
_REQUEST_FIELD = "write it as a field of the request, beside messages"
_ADVICE = {
    "chat_template": "the model's own chat template is used; it cannot be replaced per request; remove it",
    "conversation": "write messages as a field of the request",
    "conversations": "write messages as a field of the request",
    **dict.fromkeys(
        ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"), _REQUEST_FIELD
    ),
}
"""Reserved template variable -> what to write instead of setting it."""

_LOADING = {
    "name_or_path",
    "is_local",
    "local_files_only",
    "tokenizer_object",
    "_commit_hash",
    "backend",
    "trust_remote_code",
}
"""Arguments of transformers about loading, which say nothing about the tokenizer."""
_TOKEN_FIELDS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
"""The fields of an added token in tokenizer_config.json."""


class TextLimit(NamedTuple):
    """The longest text that could fit the context: `chars` = `tokens` times the length of the longest token."""

    tokens: int
    chars: int

    def check(self, num_chars: int, *, param: str) -> None:
        """Raise PromptError for a longer text. Call it first: tokenizing millions of characters takes many seconds."""
        if num_chars > self.chars:
            raise PromptError(
                f"this model's maximum context length is {self.tokens} tokens, which {self.chars} characters fit into "
                f"at the most, and the prompt has {num_chars}; shorten it",
                param=param,
                code="context_length_exceeded",
            )


def text_size(value: Any) -> int:
    """Count the characters of all strings and keys in a JSON value; every other scalar counts as one."""
    return sum(len(leaf) if isinstance(leaf, str) else 1 for leaf in leaves(value))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Holds what becomes a chat's prompt.

    Example: Conversation([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    """

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""
    tools: Sequence[Mapping[str, Any]] | None = None
    add_special_tokens: bool = False
    """Tokenize the rendered text with them, although most templates write them."""


class TokenText(NamedTuple):
    r"""The text of a single token. Example, the first byte of an emoji: TokenText("bytes:\xf0", b"\xf0")."""

    text: str
    """Text as it appears inside a sentence; OpenAI's `bytes:` escapes if the token's bytes are not valid UTF-8."""
    utf8: bytes


class Tokenizer:
    """The tokenizer and chat template of a model folder. Reads local files only; thread-safe.

    Raises OSError or ValueError if the folder has no tokenizer or one without a vocabulary.
    """

    def __init__(self, path: str, *, revision: str | None = None) -> None:
        from tokenizers.decoders import ByteLevel
        from transformers import AutoTokenizer  # imported late: it takes seconds

        self.path, self.revision = path, revision
        # If unset, transformers asks at the terminal about a folder that ships its own code (MiMo's does).
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
        # The Rust tokenizer decodes a ten-token window in 2 us, its Python wrapper in 30 us.
        self._fast: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._fast is None:
            self._special = frozenset(self._tokenizer.all_special_ids)
        else:
            added = self._fast.get_added_tokens_decoder().items()
            self._special = frozenset(id for id, token in added if token.special)
        decoder = getattr(self._fast, "decoder", None)
        self._has_byte_fallback = decoder is not None and decoder.decode(["<0xC3>", "<0xA9>"]) == "é"
        self._joins_bytes = isinstance(decoder, ByteLevel)
        self._texts: dict[int, TokenText] = {}  # caches, bounded by the vocabulary
        self._whole: dict[int, str | None] = {}
        self._prefix = self.encode("a", add_special_tokens=False)
        if not self._prefix:  # transformers' result for a Qwen folder without tokenizer files
            raise ValueError("its vocabulary is missing")
        self.longest_token = max(map(len, self._tokenizer.get_vocab()))
        """In characters. A text has at least its length divided by this many tokens."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return len(self._tokenizer)

    @property
    def vocabulary(self) -> dict[int, str]:
        """The entry of each id, added ones included."""
        return {id: entry for entry, id in self._tokenizer.get_vocab().items()}

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end-of-text token."""
        return self._tokenizer.eos_token_id

    @cached_property
    def template_source(self) -> str:
        """The text of the chat template, or of all of them."""
        templates = self._tokenizer.chat_template or ""
        return "\n".join(templates.values()) if isinstance(templates, Mapping) else templates

    @property
    def has_tools_template(self) -> bool:
        """True if the chat template renders tools."""
        return re.search(r"\btools\b", self.template_source) is not None

    def info(self) -> dict[str, Any]:
        """Return what tokenizer_config.json says, with the tokenizer's class and chat template, without local paths."""
        given = {
            key: value
            for key, value in self._tokenizer.init_kwargs.items()
            if key not in _LOADING and not key.endswith("_file")
        }
        settings = {key: plain for key, value in given.items() if (plain := _plain(value)) is not None}
        template = self._tokenizer.chat_template
        return settings | {"tokenizer_class": type(self._tokenizer).__name__, "chat_template": template or None}

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Tokenize a text. Raises PromptError for invalid Unicode (JSON can spell half a surrogate pair).

        param: the request's field that has the text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"the text is not valid Unicode: {error.reason}", param=param) from error
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids.

        Byte tokens are read as UTF-8: a complete character is kept even between invalid bytes, and each invalid part
        becomes one U+FFFD.
        """
        if self._fast is None:
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        text = self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
        if self._has_byte_fallback and REPLACEMENT_CHARACTER in text:
            tokens = [
                self._fast.id_to_token(id) for id in ids if self.is_visible(id, skip_special_tokens=skip_special_tokens)
            ]
            text = self._fast.decoder.decode(list(_replace_invalid_bytes(tokens)))
        return text

    def is_visible(self, id: int, *, skip_special_tokens: bool = True) -> bool:
        """Return False for tokens that `decode` skips: special tokens and unknown ids."""
        if skip_special_tokens and id in self._special:
            return False
        return self._fast is None or id in self._whole or self._fast.id_to_token(id) is not None

    def whole_text(self, id: int) -> str | None:
        """Return what a token of the vocabulary adds to any text of whole characters; None if that is not certain."""
        if id not in self._whole:
            text = self.decode([id], skip_special_tokens=False) if self._joins_bytes else REPLACEMENT_CHARACTER
            self._whole[id] = None if REPLACEMENT_CHARACTER in text else text
        return self._whole[id]

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary entries of these ids."""
        return list(self._tokenizer.convert_ids_to_tokens(list(ids)))

    def token_text(self, id: int) -> TokenText:
        """Return the text of a single token; the text of a special token is its name."""
        if (found := self._texts.get(id)) is None:
            found = self._texts[id] = self._token_text(id)
        return found

    def _token_text(self, id: int) -> TokenText:
        # Decoded after another token, because SentencePiece drops the space of a text's first word.
        both = self.decode([*self._prefix, id], skip_special_tokens=False)
        text = both[len(self.decode(self._prefix, skip_special_tokens=False)) :]
        if REPLACEMENT_CHARACTER not in text:
            return TokenText(text, text.encode())
        utf8 = _bytes_of(self.token_strings([id])[0] or "")
        try:
            return TokenText(utf8.decode(), utf8)
        except UnicodeDecodeError:
            return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8), utf8)

    def bad_words(self, words: Iterable[str]) -> list[list[int]]:
        """Return the token sequences that spell these words, at the start of a text and after a space.

        This is vLLM's rule, except that vLLM drops the form after a space if its number of tokens differs. Raises
        PromptError for invalid Unicode.
        """
        found: list[list[int]] = []
        for word in words:
            bare = word.lstrip(" ") or word
            try:
                alone, spaced = (self.encode(text, add_special_tokens=False) for text in (bare, " " + bare))
            except PromptError as error:
                raise PromptError(str(error), param="bad_words") from error
            found.append(alone)
            if spaced[-len(alone) :] != alone:  # otherwise the first form forbids the second one, too
                found.append(spaced)
        return [ids for position, ids in enumerate(found) if ids and ids not in found[:position]]

    @cached_property
    def template_arguments(self) -> frozenset[str]:
        """Variables of the chat template that transformers sets itself; requests must not set them."""
        from transformers.utils.chat_template_utils import render_jinja_template

        calls = (self._tokenizer.apply_chat_template, render_jinja_template)
        parameters = [parameter for call in calls for parameter in inspect.signature(call).parameters.values()]
        named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
        return frozenset(named | self._tokenizer.special_tokens_map.keys() | {"self", "messages"})

    def check_template_variables(self, variables: Mapping[str, Any]) -> None:
        """Raise PromptError if a request sets a reserved template variable, above all `chat_template`."""
        if reserved := sorted(variables.keys() & self.template_arguments):
            advice = _ADVICE.get(reserved[0], "is not a variable of the template; remove it")
            raise PromptError(f"chat_template_kwargs.{reserved[0]}: {advice}", param="chat_template_kwargs")

    def render(self, chat: Conversation) -> str:
        """Render a conversation with the chat template. A template without tools gets them as text.

        Raises PromptError for messages that the template rejects and for reserved variables.
        """
        if not self._tokenizer.chat_template:
            raise PromptError("this model has no chat template; use /v1/completions", param="messages")
        if chat.variables:
            self.check_template_variables(chat.variables)
        self._check_roles(chat.messages)
        messages, tools = chat.messages, chat.tools
        if not self.has_tools_template:
            messages, tools = taught(messages, tools), None
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                tools=None if tools is None else [dict(tool) for tool in tools],
                **chat.variables,
            )
        except MemoryError:
            raise
        except Exception as error:  # templates are user code: Jinja has its own exceptions, filters raise any
            reason = str(error)[:_MAX_ERROR_CHARS]  # some messages of transformers quote the whole conversation
            raise PromptError(f"the chat template refused the messages: {reason}", param="messages") from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Render and tokenize a conversation; `options` are those of `Conversation`. Raises PromptError."""
        chat = Conversation(messages, **options)
        return self.encode(self.render(chat), add_special_tokens=chat.add_special_tokens, param="messages")

    def _check_roles(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise PromptError for a role that is neither OpenAI's nor quoted in the template.

        Most templates render any role; the model has never seen messages of an unknown one.
        """
        for number, message in enumerate(messages):
            role = message["role"]
            if role not in ROLES and not any(f"{quote}{role}{quote}" in self.template_source for quote in "'\""):
                shown = repr(role if len(role) <= _MAX_QUOTED_CHARS else role[:_MAX_QUOTED_CHARS] + "...")
                raise PromptError(
                    f"messages.{number}.role: {shown} is unknown to this model's chat template; write "
                    f"{', '.join(ROLES[:-1])} or {ROLES[-1]}",
                    param="messages",
                )


def _plain(value: Any) -> Any:
    """Return a setting as JSON has it, as tokenizer_config.json writes it; None if it has no such form."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Mapping() if all(hasattr(token, "content") for token in value.values()):
            return {str(id): {name: getattr(token, name) for name in _TOKEN_FIELDS} for id, token in value.items()}
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return getattr(value, "content", None)  # a special token is written as its text


_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _replace_invalid_bytes(tokens: Iterable[str]) -> Iterator[str]:
    """Yield the same tokens, with U+FFFD in place of each invalid part of a run of byte tokens.

    The ByteFallback decoder replaces a whole run if any part of it is invalid UTF-8. Whether a character is readable
    would then depend on later tokens, and a stream would have to take it back.
    """
    run: list[str] = []
    for token in tokens:
        if _BYTE_TOKEN.fullmatch(token):
            run.append(token)
            continue
        yield from _repair_run(run)
        run = []
        yield token
    yield from _repair_run(run)


def _repair_run(run: list[str]) -> Iterator[str]:
    utf8, begin = memoryview(b"".join(map(_bytes_of, run))), 0
    while begin < len(run):
        try:
            str(utf8[begin:], "utf-8")
        except UnicodeDecodeError as error:
            yield from run[begin : begin + error.start]
            yield REPLACEMENT_CHARACTER
            begin += error.end
        else:
            yield from run[begin:]
            return


def _bytes_of(token: str) -> bytes:
    """Return the bytes of a vocabulary entry: "<0xE2>" (SentencePiece) or byte-level BPE's letters."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    try:
        return bytes(_BYTE_OF[letter] for letter in token)
    except KeyError:  # neither kind of tokenizer; it shows the replacement character
        return REPLACEMENT_CHARACTER.encode()


def _byte_letters() -> dict[str, int]:
    """Return byte-level BPE's letter -> byte table, the inverse of GPT-2's `bytes_to_unicode`."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF = _byte_letters()
