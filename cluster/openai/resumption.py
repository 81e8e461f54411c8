"""Event ids, with which a stream that broke off goes on, at any replica and without a journal.

Where tokens are reproducible, the same body with the same seeds gives the same answer again. So an id says which answer
its stream is, and how many tokens of each choice its client has:

    1:DIGEST:CREATED:RESPONSE:SEEDS:REQUEST:17~9af3c2d1.,12~04be77a0,-

17 tokens of choice 0, which has ended (`.`), with their checksum; 12 of choice 1; and no event yet of choice 2. `:end`
follows once the totals were sent. What a choice's events tell is a function of its tokens alone, not of the steps that
brought them; so the count says exactly which text, calls and log probabilities the client has.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from urllib.parse import quote, unquote
from zlib import crc32

from cluster.errors import BadRequest, HttpError
from cluster.openai.output_processor import Generation, TextDelta
from secateur.requests import SamplingRequest
from secateur.responses import ErrorResponse
from verifier.speculation import rule_of
from workers.comm.ipc import Submit, TokenChunk
from workers.config import DraftConfig

HEADER = "Last-Event-ID"
MAX_CHOICES = 128
"""Streams of more choices have no ids: every event would have kilobytes of them."""
_FORMAT = re.compile(
    r"1:(?P<digest>[0-9a-f]{16}):(?P<created>[0-9]{1,12}):(?P<response>(?:cmpl|chatcmpl)-[0-9a-f]{32})"
    r":(?P<seeds>-?[0-9]{1,19}(?:,-?[0-9]{1,19})*):(?P<request>[!-9;-~]{1,6144}):(?P<places>[-0-9a-f~.,]+)(?P<end>:end)?"
)
_NOT_BEGUN = "-"
_PLACE = re.compile(r"(?P<num>[0-9]{1,10})~(?P<checksum>[0-9a-f]{8})(?P<finished>\.?)")


class Place(NamedTuple):
    """How far a choice has come: its tokens, and what tells whether another run has the same ones."""

    num_tokens: int = 0
    checksum: int = 0
    is_finished: bool = False

    def after(self, tokens: Sequence[int], *, is_finished: bool = False) -> Place:
        """Return the place behind these tokens."""
        return Place(self.num_tokens + len(tokens), crc32(array("i", tokens).tobytes(), self.checksum), is_finished)

    def __str__(self) -> str:
        return f"{self.num_tokens}~{self.checksum:08x}{'.' * self.is_finished}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Identifies an answer. It is the same in all ids of a stream."""

    digest: str
    """The request's, as `digest_of` computes it."""
    created: int
    response_id: str
    seeds: tuple[int, ...]
    """One per prompt."""
    request_id: str

    def __str__(self) -> str:
        seeds = ",".join(map(str, self.seeds))
        return f"1:{self.digest}:{self.created}:{self.response_id}:{seeds}:{quote(self.request_id, safe='')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventId:
    """The state of a stream behind one of its events. places: by choice; None = no event of it was sent."""

    origin: Origin
    places: tuple[Place | None, ...]
    is_closed: bool = False
    """The totals were sent."""

    @classmethod
    def parse(cls, text: str) -> EventId:
        """Read an id. Raises BadRequest."""
        found = _FORMAT.fullmatch(text)
        try:
            if found is None:
                raise ValueError
            origin = Origin(
                digest=found["digest"],
                created=int(found["created"]),
                response_id=found["response"],
                seeds=tuple(map(int, found["seeds"].split(","))),
                request_id=unquote(found["request"], errors="strict"),
            )
            if not origin.request_id.isprintable() or not all(-(2**63) <= seed < 2**63 for seed in origin.seeds):
                raise ValueError
            places = tuple(map(_place, found["places"].split(",")))
        except ValueError:
            message = f"{HEADER}: {text[:80]!r} is no event id of this service; send the last one as it came, or none"
            raise BadRequest(message, param=None, code="invalid_event_id") from None
        return cls(origin=origin, places=places, is_closed=found["end"] is not None)

    def __str__(self) -> str:
        places = ",".join(_NOT_BEGUN if place is None else str(place) for place in self.places)
        return f"{self.origin}:{places}{':end' * self.is_closed}"


def _place(text: str) -> Place | None:
    if text == _NOT_BEGUN:
        return None
    if (found := _PLACE.fullmatch(text)) is None:
        raise ValueError(text)
    return Place(int(found["num"]), int(found["checksum"], 16), bool(found["finished"]))


def digest_of(kind: str, model: str, defaults: Mapping[str, Any], body: bytes) -> str:
    """Return a digest of what an answer depends on beside its seeds. defaults: the model's sampling parameters."""
    digest = hashlib.blake2b(f"{kind}\n{model}\n{sorted(defaults.items())}\n".encode(), digest_size=8)
    digest.update(body)
    return digest.hexdigest()


def read_event_id(header: str, body: SamplingRequest, *, num_prompts: int, digest: str) -> EventId:
    """Return the id of a `Last-Event-ID` header. Raises BadRequest if it is none of this request."""
    if not body.stream:
        raise BadRequest(f'{HEADER} continues a stream; add "stream": true, or leave the header out', param="stream")
    event_id = EventId.parse(header)
    counts = (len(event_id.origin.seeds), len(event_id.places))
    if event_id.origin.digest != digest or counts != (num_prompts, num_prompts * body.n):
        raise BadRequest(
            f"{HEADER} is the id of another request: its path, model or body is not this one's; send the same bytes "
            "again, or leave the header out",
            param=None,
            code="event_id_of_another_request",
        )
    return event_id


def why_not_resumable(
    body: SamplingRequest, submit: Submit, draft: DraftConfig | None, num_choices: int
) -> BadRequest | None:
    """Return why the events of a stream have no ids; None if they have. submit: of any of its choices."""
    if rule_of(submit, draft).is_sampled:
        why = (
            'under acceptance "rejection" with draft probabilities another run has other tokens; ask for "coupled", or '
            'for "enable_draft_probs": false'
        )
        return _not_resumable(why, "speculative")
    if body.return_speculative_trees:
        return _not_resumable("the trees of a run do not repeat", "return_speculative_trees")
    if num_choices > MAX_CHOICES:
        return _not_resumable(f"it has more than {MAX_CHOICES} answers", "n")
    return None


def _not_resumable(why: str, param: str) -> BadRequest:
    message = f"{HEADER}: this stream cannot be continued: {why}; or leave the header out to start anew"
    return BadRequest(message, param=param, code="not_resumable")


class EventIds:
    """Writes the ids of one stream. begun: its state where it goes on; None = it is new."""

    def __init__(self, origin: Origin, num_choices: int, begun: EventId | None = None) -> None:
        self._origin = str(origin)
        self._places = [Place()] * num_choices  # of the tokens processed ...
        places = begun.places if begun else (None,) * num_choices  # ... and sent
        self._sent = [_NOT_BEGUN if place is None else str(place) for place in places]
        self._end = ":end" if begun and begun.is_closed else ""

    def has_begun(self, index: int) -> bool:
        """Return whether an event of a choice was sent."""
        return self._sent[index] != _NOT_BEGUN

    def process(self, index: int, tokens: Sequence[int], *, is_finished: bool) -> None:
        """Count tokens of a choice, whether an event tells of them or not."""
        self._places[index] = self._places[index].after(tokens, is_finished=is_finished)

    def sent(self, index: int) -> str:
        """Return the id of an event that tells of a choice's tokens so far."""
        self._sent[index] = str(self._places[index])
        return self.last

    def closed(self) -> str:
        """Return the id of the event with the totals."""
        self._end = ":end"
        return self.last

    @property
    def is_closed(self) -> bool:
        """Return whether the event with the totals was sent."""
        return bool(self._end)

    def is_over(self, *, has_totals: bool) -> bool:
        """Return whether all events were sent. has_totals: whether the last one has the totals."""
        return all(place.endswith(".") for place in self._sent) and (self.is_closed or not has_totals)

    @property
    def last(self) -> str:
        """Return the id of the latest event."""
        return f"{self._origin}:{','.join(self._sent)}{self._end}"


class Replay:
    """Tells a choice's chunks that its client has, up to `place`, from those that follow."""

    def __init__(self, place: Place) -> None:
        self._goal, self._place = place, Place()

    @property
    def is_over(self) -> bool:
        """Return whether the next chunk is new to the client."""
        return self._place == self._goal

    def deltas(self, chunk: TokenChunk, generation: Generation) -> Iterator[TextDelta]:
        """Yield what a chunk adds to the text: the part that the client has, marked so, and the rest."""
        if self.is_over:
            yield generation.process(chunk)
            return
        num = self._goal.num_tokens - self._place.num_tokens
        is_whole = len(chunk.tokens) < num or (len(chunk.tokens) == num and chunk.finish_reason is None)
        known, rest = (chunk, None) if is_whole or self._goal.is_finished else split(chunk, num)
        delta = generation.process(known)
        delta.is_replayed = True
        self.process(delta.token_ids, is_finished=delta.finish_reason is not None)
        yield delta
        if rest is not None:
            yield generation.process(rest)

    def process(self, tokens: Sequence[int], *, is_finished: bool) -> None:
        """Count the tokens that a part added. Raises HttpError (409) if they are not the client's."""
        self._place = self._place.after(tokens, is_finished=is_finished)
        if not is_finished and (
            self._place.num_tokens < self._goal.num_tokens or self._goal == self._place._replace(is_finished=True)
        ):
            return  # more tokens, or the end, are still to come
        if self._place != self._goal:
            message = (
                f"the answer cannot be continued: its first {self._goal.num_tokens} tokens are not those that the "
                "stream began with. Other weights give others, and so may near-ties in floating point. Send the "
                "request without Last-Event-ID"
            )
            raise HttpError(409, ErrorResponse.of(message, type="conflict_error", code="answer_changed"))


def split(chunk: TokenChunk, num: int) -> tuple[TokenChunk, TokenChunk]:
    """Return a chunk's first `num` tokens, and the rest with what belongs to the chunk's end."""
    scores: Any = chunk.logprobs
    first = replace(
        chunk,
        tokens=chunk.tokens[:num],
        logprobs=scores and scores[:num],
        num_accepted=min(num, chunk.num_accepted),
        finish_reason=None,
        stop_token=None,
    )
    rest = replace(
        chunk,
        tokens=chunk.tokens[num:],
        logprobs=scores and scores[num:],
        num_accepted=max(0, chunk.num_accepted - num),
    )
    return first, rest
