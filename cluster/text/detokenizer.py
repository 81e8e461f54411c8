"""Incremental detokenization and stop strings.

Both classes depend on the token sequence alone, never on how the engine groups tokens into steps. Speculation therefore
cannot change the text of an answer or where a stop string ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from os.path import commonprefix

from cluster.text.tokenizer import REPLACEMENT_CHARACTER, Tokenizer

_CONTEXT_TOKENS, _MAX_CONTEXT_TOKENS = 8, 16
"""Number of preceding tokens that are decoded together with a new one. A decoder needs the previous token
(SentencePiece drops the space of a text's first word), and a character's bytes may be spread over four tokens."""
_MAX_INCOMPLETE = 3
"""Longest prefix, in bytes, of a character that lacks its last byte. Decoders write one U+FFFD for all of these bytes
or one for each."""


class IncrementalDetokenizer:
    """Converts tokens to text as they arrive.

    Contract: the texts returned by `feed` and `flush`, joined, equal `tokenizer.decode(prompt + answer)` minus the
    leading `tokenizer.decode(prompt)`. Bytes that may still become a character are held back: returned text is final.
    Tokens are decoded one at a time, so the engine's steps never show in the text, whatever the decoder does. Each is
    decoded with those before it, unless the tokenizer joins bytes and the token's are whole characters.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(islice(filter(self._is_visible, reversed(prompt)), _CONTEXT_TOKENS))[::-1]
        self._emitted = self._decode()  # the part of the window's text that has been returned
        self._holds = _num_unfinished(self._emitted) > 0  # it may lack characters at its end
        self._is_stale = False  # nothing is held back, and all of the window's text has been returned

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; it may be empty."""
        return "".join([self._feed(id) for id in ids if self._is_visible(id)])

    def flush(self) -> str:
        """Return the text held back, with incomplete bytes as U+FFFD. Call it once, at the end."""
        text = self._decode()
        rest, self._emitted = "" if self._is_stale else text[self._start_in(text) :], text
        return rest

    def _feed(self, id: int) -> str:
        if not self._holds and (whole := self._tokenizer.whole_text(id)) is not None:
            self._window.append(id)
            del self._window[:-_MAX_CONTEXT_TOKENS]
            self._is_stale = True
            return whole
        if self._is_stale:
            self._emitted, self._is_stale = self._decode(), False
        self._window.append(id)
        text = self._decode()
        start, end = self._start_in(text), len(text) - _num_unfinished(text)
        self._holds = end < len(text)
        if new := text[start:end]:
            self._emitted = text[:end]
        if len(self._window) > _MAX_CONTEXT_TOKENS:
            num_held = len(text) - max(start, end)
            self._window = self._window[-_CONTEXT_TOKENS:]
            text = self._decode()
            self._emitted = text[: len(text) - num_held]
        return new

    def _start_in(self, text: str) -> int:
        """Return where new text starts. The answer may complete a character that the prompt's last bytes began."""
        return len(self._emitted) if text.startswith(self._emitted) else len(commonprefix([text, self._emitted]))

    def _is_visible(self, id: int) -> bool:
        return self._tokenizer.is_visible(id, skip_special_tokens=self._skip)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip) if self._window else ""


def _num_unfinished(text: str) -> int:
    """Return the number of characters at the end of `text` that further bytes may change."""
    return min(len(text) - len(text.rstrip(REPLACEMENT_CHARACTER)), _MAX_INCOMPLETE)


class StopStrings:
    """Ends a growing text at the first stop string to be completed, which is cut off unless `include` is set.

    Rule: read the text character by character; the first stop string that is complete ends it (of several completed by
    the same character, the longest). The result does not depend on how the text is split into calls. Text that could
    still become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = sorted((stop for stop in stops if stop), key=len, reverse=True)
        self._include = include
        self._held = ""

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Return the text that is final, and the stop string that ended the answer, if one did. Feed nothing after it.

        Without `may_stop`, stop strings that this text completes are ignored.
        """
        if not self._stops:
            return text, None
        num_old, text = len(self._held), self._held + text
        if may_stop and (found := self._first_complete(text, num_old)):
            end, stop = found
            self._held = ""
            return text[: end if self._include else end - len(stop)], stop
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """Return the text held back."""
        text, self._held = self._held, ""
        return text

    def _first_complete(self, text: str, num_old: int) -> tuple[int, str] | None:
        """Return (end, stop string) of the first match that ends after the `num_old` characters checked before."""
        starts = ((max(0, num_old - len(stop) + 1), stop) for stop in self._stops)
        ends = [(at + len(stop), stop) for start, stop in starts if (at := text.find(stop, start)) >= 0]
        return min(ends, key=lambda found: found[0]) if ends else None  # stable: the longest comes first

    def _num_held(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a prefix of a stop string."""
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
