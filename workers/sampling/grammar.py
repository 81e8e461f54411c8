"""Grammars of structured outputs: which tokens may follow a request's output, and any path of its tree.

A grammar is a JSON schema, a regular expression, a list of choices or a context-free grammar; llguidance parses and
matches it. Each process compiles a request's grammar once and keeps its matcher between steps: a step consumes only the
new tokens. End tokens may follow exactly where the text may end, and nothing else may follow a complete text.

Where a text must go on in one way, llguidance allows only the tokenizer's own spelling of it. The masks are a function
of the tokens so far, so this is part of the law that drafts must keep.

This module imports no torch, and llguidance only when a request has a grammar.
Legend: Q rows, V vocabulary, Y bytes of a mask.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from workers.sampling.json_schema import prepared

if TYPE_CHECKING:
    from workers.config import EngineConfig
    from workers.sampling.logits_state import LogitsState

logger = logging.getLogger(__name__)

GrammarKind = Literal["json", "regex", "choice", "grammar"]
Whitespace = Literal["free", "none", "usual"]
_WHITESPACE: dict[Whitespace, dict[str, Any] | None] = {
    "free": None,
    "none": {"whitespace_flexible": False},
    "usual": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
}

MAX_GRAMMAR_CHARS = 1 << 16
"""A grammar is sent with every step, as all constraints are."""
MASK_SECONDS = 0.5
"""The most time for a request's masks in one step, after which it fails. Ordinary masks take a few milliseconds."""
_STEP_LEXER_FUEL, _STEP_ITEMS = 100_000, 20_000  # of one mask
_ROW_ITEMS = 600
"""Parses of an ambiguous grammar that are followed at once: with llguidance's own 2,000 a token takes a second, with
600 at most a tenth. A JSON object of 150 optional properties needs 600."""
_LEXER_STATES = 50_000  # of 1 to 2 kB, per grammar
_MAX_ERROR_CHARS = 300
_NO_TOKEN = "no token may follow"
_NO_RANGE = "minimum, maximum: numbers between these bounds cannot be followed; write bounds of at most 18 digits"
ONE_OF = (
    "oneOf is only supported where no text can match two of its schemas, such as those of different types; "
    "write anyOf instead"
)


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or a process that cannot compile any. The message is for the client."""


def grammar_text(
    kind: GrammarKind, source: Any, *, whitespace: Whitespace = "free", closes_objects: bool = True
) -> str:
    """Return a grammar in llguidance's notation, which may not compile. Raises GrammarError.

    source: a JSON schema (an object, also as a string), a regular expression, a list of strings, or a grammar in Lark's
    or GBNF's notation. whitespace: between JSON's tokens. closes_objects: objects have no properties that the schema
    does not name, where it says nothing of them.
    """
    grammar = _notation(kind, source, whitespace, closes_objects)
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"it has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are allowed")
    return grammar


def _notation(kind: GrammarKind, source: Any, whitespace: Whitespace, closes_objects: bool) -> str:
    llguidance = _llguidance()
    try:
        match kind:
            case "json":
                schema = json.loads(source) if isinstance(source, str) else source
                if not isinstance(schema, dict):
                    raise GrammarError(f"a JSON schema is an object, not {json.dumps(schema)[:40]}")
                _check_names_suffice(schema)
                schema = prepared(schema, closes=closes_objects)
                return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_WHITESPACE[whitespace])
            case _:
                return llguidance.grammar_from(kind, source)
    except GrammarError:
        raise
    except ValueError as error:
        raise GrammarError(_shortened(str(error))) from None
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None


class ThoughtMarks(NamedTuple):
    """The marks around reasoning that comes before a structure."""

    opening: str
    """An answer without it begins with the structure; "" = the prompt ends with it, so all answers begin inside."""
    closing: str


class TokenTable:
    """The bytes of every token of a model, from the tokenizer.json in its folder, read on first use.

    vocab_size: the number of logits. end_token_ids: the tokens that end a text. Ids beyond the vocabulary are ignored.
    """

    def __init__(self, folder: str, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.end_token_ids = [token for token in dict.fromkeys(end_token_ids) if token < vocab_size]
        self._file = Path(folder) / "tokenizer.json"
        self._tokenizer: Any = None

    @classmethod
    def of(cls, config: EngineConfig, vocab_size: int) -> TokenTable:
        """Return the table of an engine's model."""
        return cls(config.tokenizer_path or config.model_path, vocab_size, config.eos_token_ids)

    def compile(self, grammar: str) -> Any:
        """Return an LLMatcher at the beginning of the grammar. Raises GrammarError."""
        llguidance = _llguidance()
        tokenizer = self.load()
        limits = llguidance.LLParserLimits(
            step_lexer_fuel=_STEP_LEXER_FUEL,
            step_max_items=_STEP_ITEMS,
            max_items_in_row=_ROW_ITEMS,
            max_lexer_states=_LEXER_STATES,
            verbose_errors=False,
        )
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(_shortened(matcher.get_error()))
        if not self._allows_text(matcher) and not matcher.is_accepting():
            why = _shortened(matcher.get_error())
            raise GrammarError(why if why and why != _NO_TOKEN else "no text matches it")
        return matcher

    def behind(self, thought: ThoughtMarks, grammar: str) -> str:
        """Return the grammar of reasoning and then of a text of this grammar, behind at most two line breaks.

        Reasoning is any text without its closing mark, and no end token may come before the structure does.
        """
        own = json.loads(grammar)["grammars"] if grammar.lstrip().startswith("{") else [{"lark_grammar": grammar}]
        opening, closing = self._terminals(thought.opening), self._terminals(thought.closing)
        end = "" if "<[" in closing else closing  # a suffix can be rolled back, but only a text can be one
        lines = [
            f"start: ({opening} thought)? @structure" if opening else "start: thought @structure",
            f"thought: inner {'' if end else closing} /\\n{{0,2}}/",
            f"inner{f'[suffix={end}]' if end else ''}: /(.|\\n)*/",
        ]
        first = {"lark_grammar": "\n".join(lines)}
        return json.dumps({"grammars": [first, {**own[0], "name": "structure"}, *own[1:]]})

    def _terminals(self, mark: str) -> str:
        """Return a mark in llguidance's notation, in which special tokens are no text."""
        tokenizer = self.load()
        tokens = tokenizer.tokenize_str(mark, parse_special=True) if mark else []
        if not any(map(tokenizer.is_special_token, tokens)):
            return json.dumps(mark) if mark else ""
        return " ".join(
            f"<[{token}]>" if tokenizer.is_special_token(token) else json.dumps(tokenizer.decode_str([token]))
            for token in tokens
        )

    def load(self) -> Any:
        """Return the LLTokenizer. Raises GrammarError if there is no tokenizer.json, or no end token."""
        if self._tokenizer is None:
            llguidance = _llguidance()
            if not self._file.is_file():
                raise GrammarError("structured outputs need a model with a tokenizer.json, and this one has none")
            if not self.end_token_ids:
                raise GrammarError("structured outputs need a model with an end token, and this one names none")
            text = self._file.read_text()
            try:
                table = llguidance.LLTokenizer(text, n_vocab=self.vocab_size, eos_token=self.end_token_ids)
            except ValueError:  # the tokenizer has more tokens than the model has logits
                table = llguidance.LLTokenizer(text, eos_token=self.end_token_ids)
            self._tokenizer = table
        return self._tokenizer

    def _allows_text(self, matcher: Any) -> bool:
        """Return whether a token that does not end the text may come first."""
        allowed_V = unpacked(np.frombuffer(matcher.compute_bitmask(), np.uint8)[None], self.vocab_size)[0].copy()
        allowed_V[self.end_token_ids] = False
        return bool(allowed_V.any())


class PathMasks(NamedTuple):
    """The tokens that may follow each of Q paths."""

    packed_QY: np.ndarray  # uint8, one bit per token, lowest first
    is_over_Q: np.ndarray  # bool: the path has ended the text, is forbidden, or the request failed; no mask then


class Grammars:
    """One process's matchers, one for each request with a grammar. Not thread-safe.

    The states that drafter and verifier exchange carry the grammar and all of the output, so a matcher can always be
    built again. At most `capacity` matchers and compiled grammars are kept, the last used ones.

    mask_seconds: the most time for a request's masks in one call; a request that takes more fails. is_alone: no other
    rank must have the same masks, so the call ends there. Of ranks that must agree, one may have a limit, and that one
    ends the request.
    """

    def __init__(
        self, table: TokenTable, capacity: int = 256, *, mask_seconds: float = MASK_SECONDS, is_alone: bool = True
    ) -> None:
        self.table = table
        self._capacity, self._mask_seconds, self._is_alone = capacity, mask_seconds, is_alone
        self._compiled: OrderedDict[str, Any] = OrderedDict()  # LLMatchers at the beginning, to be copied
        self._matchers: OrderedDict[int, _Matcher] = OrderedDict()
        self._failures: dict[int, str] = {}

    def problem(self, grammar: str) -> str | None:
        """Return why the grammar cannot be compiled; None if it can."""
        try:
            self._compile(grammar)
        except GrammarError as error:
            return str(error)
        return None

    def masks(self, logits_state: LogitsState, paths: Sequence[Sequence[int]]) -> PathMasks:
        """Return the masks behind each path of tokens below the root.

        The paths are visited in lexicographic order, which is depth first, so siblings share the walk to their parent.
        """
        num_bytes = -(-self.table.vocab_size // 8)
        packed_QY = np.zeros((len(paths), num_bytes), dtype=np.uint8)
        is_over_Q = np.ones(len(paths), dtype=bool)
        if (matcher := self._at_root(logits_state)) is None:
            return PathMasks(packed_QY, is_over_Q)
        began = time.thread_time()  # without compiling, for which the first request also reads the tokens' table
        ends = self.table.end_token_ids
        for place in sorted(range(len(paths)), key=lambda place: tuple(paths[place])):
            if time.thread_time() - began > self._mask_seconds:
                self._fail(logits_state.id, f"its masks take more than {self._mask_seconds:g} s")
                if self._is_alone:
                    break
            path = paths[place]
            is_over_Q[place] = not matcher.move(path) or (len(path) > 0 and path[-1] in ends)
            packed_QY[place] = np.frombuffer(matcher.own.compute_bitmask(), np.uint8)[:num_bytes]
        matcher.move(())
        self._check(logits_state, matcher)
        return PathMasks(packed_QY, is_over_Q)

    def count_allowed(self, logits_state: LogitsState, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, from the first, may follow the root.

        A matcher consumes some tokens that its mask excludes: where a text must go on in one way, only the tokenizer's
        own spelling of it is allowed.
        """
        if (matcher := self._at_root(logits_state)) is None:
            return 0
        count = 0
        for token in tokens:
            if not matcher.move(tokens[:count]) or not matcher.allows(token):
                break
            count += 1
            if token in self.table.end_token_ids:
                break
        matcher.move(())
        self._check(logits_state, matcher)
        return count

    def failure(self, id: int) -> str | None:
        """Return why the request's matcher gave up, if it did: its masks exceeded a limit, or no token may follow."""
        return self._failures.get(id)

    def drop(self, id: int) -> None:
        """Forget a request that has ended or lost its pages."""
        self._matchers.pop(id, None)
        self._failures.pop(id, None)

    def _at_root(self, logits_state: LogitsState) -> _Matcher | None:
        """Return the request's matcher behind all of its output; None if it failed."""
        id, grammar = logits_state.id, logits_state.constraints.grammar
        if id in self._failures:
            return None
        matcher = self._matchers.get(id)
        if matcher is None or matcher.grammar != grammar:
            try:
                compiled = self._compile(grammar)
            except GrammarError as error:  # a node whose files or packages are not those of the others
                self._fail(id, str(error))
                return None
            matcher = self._matchers[id] = _Matcher(grammar, compiled.deep_copy())
            while len(self._matchers) > self._capacity:
                self._matchers.popitem(last=False)
        self._matchers.move_to_end(id)
        if not matcher.advance(logits_state.output):
            self._fail(id, _shortened(matcher.own.get_error()) or "the output does not match it")
            return None
        return matcher

    def _compile(self, grammar: str) -> Any:
        """Return the matcher of a grammar, compiled once for all requests that have it. Raises GrammarError."""
        if grammar not in self._compiled:
            self._compiled[grammar] = self.table.compile(grammar)
            while len(self._compiled) > self._capacity:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar]

    def _check(self, logits_state: LogitsState, matcher: _Matcher) -> None:
        """Record a matcher's failure, from which it never recovers."""
        if matcher.own.is_error():
            self._fail(logits_state.id, _shortened(matcher.own.get_error()))

    def _fail(self, id: int, why: str) -> None:
        self._matchers.pop(id, None)
        if id not in self._failures:
            logger.warning("request %d: its grammar failed: %s", id, why)
            self._failures[id] = why
            while len(self._failures) > self._capacity:
                del self._failures[next(iter(self._failures))]


class _Matcher:
    """An LLMatcher that has consumed `output` and a path below it."""

    def __init__(self, grammar: str, own: Any) -> None:
        self.grammar = grammar
        self.own = own
        self._output = b""  # int32
        self._path: list[int] = []

    def advance(self, output: bytes) -> bool:
        """Consume an output, of which the beginning is mostly consumed. Return whether the grammar allows all of it."""
        self.move(())
        if not output.startswith(self._output):
            old, new = np.frombuffer(self._output, np.int32), np.frombuffer(output, np.int32)
            shorter = min(len(old), len(new))
            differs = np.flatnonzero(old[:shorter] != new[:shorter])
            common = int(differs[0]) if len(differs) else shorter
            self.own.rollback(len(old) - common)
            self._output = output[: common * new.itemsize]
        tokens = np.frombuffer(output[len(self._output) :], np.int32).tolist()
        if not tokens:
            return True
        count = self.own.try_consume_tokens(tokens)
        self._output = output[: len(self._output) + 4 * count]
        return count == len(tokens)

    def allows(self, token: int) -> bool:
        """Return whether the mask here has the token."""
        mask = self.own.compute_bitmask()
        return token < 8 * len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)

    def move(self, path: Sequence[int]) -> bool:
        """Move to a path below the output. Return False if the grammar forbids it; the matcher then stops before."""
        common = 0
        for own, wanted in zip(self._path, path, strict=False):
            if own != wanted:
                break
            common += 1
        if common < len(self._path):
            self.own.rollback(len(self._path) - common)
            del self._path[common:]
        if common < len(path):
            rest = list(path[common:])
            self._path += rest[: self.own.try_consume_tokens(rest)]
        return len(self._path) == len(path)


def _check_names_suffice(schema: Any) -> None:
    """Raise GrammarError if an answer could only seem to have enough properties, because names may come twice.

    llguidance follows `minProperties` by counting. Properties that the schema names come once each, but free names may
    repeat, and JSON's readers keep one of two equal names. One free name is always enough of one.
    """
    if isinstance(schema, list):
        for part in schema:
            _check_names_suffice(part)
    if isinstance(schema, dict):
        least, required = schema.get("minProperties"), schema.get("required", [])
        if isinstance(least, int) and isinstance(required, list) and least > len(required) + 1:
            raise GrammarError(
                f"minProperties: {least} is not supported beside {len(required)} required properties, because names "
                "could repeat; require the properties by their names"
            )
        for keyword, part in schema.items():
            if keyword not in ("const", "enum", "default", "examples"):
                _check_names_suffice(part)


def unpacked(packed_QY: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return masks as bool [Q, V]."""
    return np.unpackbits(packed_QY, axis=1, count=vocab_size, bitorder="little").view(bool)


def _llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise GrammarError("structured outputs need the package llguidance, which is not installed here") from None
    return llguidance


def _shortened(message: str) -> str:
    """Return an error of llguidance without its drawing of the place, on one line, and without its own settings."""
    lines = (line.strip() for line in message.replace("<non-verbose/>", "").splitlines())
    text = " ".join(line for line in lines if line and not re.match(r"\d+ \||\^", line))
    if text.startswith("NoExtension"):
        return _NO_TOKEN
    if "coerce_one_of" in text:
        return ONE_OF
    if "Failed to generate regex for" in text:
        return _NO_RANGE
    return text if len(text) <= _MAX_ERROR_CHARS else text[: _MAX_ERROR_CHARS - 3] + "..."
