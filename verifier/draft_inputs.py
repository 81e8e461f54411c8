"""The inputs of the drafter in one step: requests' new rows, most urgent first, limited to one message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from verifier.request import Request
from workers.config import EngineConfig


class DraftInput(NamedTuple):
    """One request's new rows for the drafter, and the size of the tree to draft (0 nodes = no tree)."""

    tokens: list[int]
    num_nodes: int
    max_depth: int


def next_input(request: Request, config: EngineConfig) -> DraftInput | None:
    """Return the request's next input; None if it gets no drafts, has no new rows, or ends with the next token."""
    if not request.has_drafter or not request.num_computed or request.draft_room <= 0:
        return None
    tokens = request.tokens[request.num_fed : request.num_feedable]
    if request.is_decoding:
        assert request.limits is not None
        return DraftInput(tokens, request.limits.num_speculative_tokens, draft_depth(request, config))
    # A single row can wait: it is the first row behind a shared prefix, and nothing else is computed yet.
    return DraftInput(tokens, 0, 0) if len(tokens) > 1 else None


def draft_depth(request: Request, config: EngineConfig) -> int:
    """Return the longest path of a draft for this request. Admission ensures that it fits max_model_len."""
    assert config.draft is not None
    return min(request.draft_room, config.draft.tree.longest_path)


def is_due(request: Request, max_backlog: int) -> bool:
    """Return whether the request must be fed even if it gets no tree.

    A prompt is fed at once, because others can share its pages only then.
    """
    return backlog(request) > max_backlog or (request.is_decoding and request.num_fed < request.feed_first)


def within_message(inputs: dict[Request, DraftInput], max_rows: int, max_backlog: int) -> dict[Request, DraftInput]:
    """Limit the inputs to `max_rows`, due requests first. A request whose rows do not all fit gets no tree."""
    if num_rows(inputs) <= max_rows:
        return inputs
    room, sent = max_rows, {}
    for request in sorted(inputs, key=lambda r: (r.is_auto, not is_due(r, max_backlog))):
        own = inputs[request]
        if len(own.tokens) <= room:
            sent[request] = own
        elif room > 0:
            sent[request] = DraftInput(own.tokens[:room], 0, 0)
        room -= len(own.tokens)
    return {request: sent[request] for request in inputs if request in sent}


def num_rows(inputs: Mapping[Request, DraftInput]) -> int:
    """Return the total number of rows fed."""
    return sum(len(own.tokens) for own in inputs.values())


def backlog(request: Request) -> int:
    """Return the number of rows that the drafter could be fed but has not been."""
    return request.num_feedable - request.num_fed
