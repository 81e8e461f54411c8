"""The drafter's inputs of one step: requests' new rows, most urgent first, no more than one message holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from verifier.request import Request
from workers.config import EngineConfig

_MAX_BACKLOG, _MAX_WAITING = 256, 32768


def max_backlog(config: EngineConfig) -> int:
    """The most rows that may wait for a request that is not drafted for.

    Feeding later costs no more, and the request has often finished by then. With many requests the limit is lower,
    because every waiting row keeps a hidden state.
    """
    return min(_MAX_BACKLOG, _MAX_WAITING // config.max_num_seqs)


def max_message_rows(config: EngineConfig) -> int:
    """The most rows of one message to the drafter.

    It holds a whole step, one more row for each request that begins, and any one request's backlog with its tree. So a
    prompt never waits for another, and a request over its backlog is fed as fast as its tokens come.
    """
    step = config.max_num_batched_tokens + config.max_num_seqs
    trees = config.max_num_seqs * config.tree_rows + config.page_size
    return max(step, trees, max_backlog(config) + 2 * config.tree_rows)


class DraftInput(NamedTuple):
    """What one request sends the drafter in a step: its new rows, and the tree that it asks for (0 nodes = none)."""

    tokens: list[int]
    num_nodes: int
    max_depth: int


def next_input(request: Request, config: EngineConfig) -> DraftInput | None:
    """The request's next input; None if it never speculates, has no new rows, or has at most one token left to emit."""
    if request.limits is None or not request.num_computed or request.draft_room <= 0:
        return None
    tokens = request.tokens[request.num_fed : request.num_feedable]
    if request.is_decoding:
        return DraftInput(tokens, request.limits.num_speculative_tokens, draft_depth(request, config))
    # A single row can wait: it is the first behind a shared prefix, before anything of the request was computed.
    return DraftInput(tokens, 0, 0) if len(tokens) > 1 else None


def draft_depth(request: Request, config: EngineConfig) -> int:
    """The longest path that a draft for this request may have. Admission ensures that it fits max_model_len."""
    assert config.draft is not None
    return min(request.draft_room, config.draft.tree.longest_path)


def is_due(request: Request, max_backlog: int) -> bool:
    """Whether the request must be fed even if it gets no tree."""
    has_sharers = request.is_repeated and request.num_fed < request.num_prompt
    return has_sharers or backlog(request) > max_backlog


def within_message(inputs: dict[Request, DraftInput], max_rows: int, max_backlog: int) -> dict[Request, DraftInput]:
    """The inputs cut to `max_rows`, due requests first. A request whose rows do not all fit gets no tree."""
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
    return sum(len(own.tokens) for own in inputs.values())


def backlog(request: Request) -> int:
    """Rows that the drafter has not been fed."""
    return request.num_feedable - request.num_fed
