"""What the drafter is fed in a step: requests' new rows, those that cannot wait first, no more than a message holds."""

from __future__ import annotations

from typing import NamedTuple

from verifier.request import Request
from workers.config import EngineConfig

_MAX_BACKLOG, _MAX_WAITING = 256, 32768


def max_backlog(config: EngineConfig) -> int:
    """Tokens that the drafter may be owed by a request that it does not draft for. Feeding later costs no more, and the
    request is often finished before; but many requests would keep many states."""
    return min(_MAX_BACKLOG, _MAX_WAITING // config.max_num_seqs)


def most_fed(config: EngineConfig) -> int:
    """Rows of one message to the drafter: as many as a step may compute and a row more for each request that it begins,
    and any one request's backlog with its tree.

    So a prompt never waits for another, and who is owed too much is fed as fast as tokens come.
    """
    step = config.max_num_batched_tokens + config.max_num_seqs
    trees = config.max_num_seqs * config.tree_rows + config.page_size
    return max(step, trees, max_backlog(config) + 2 * config.tree_rows)


class Feed(NamedTuple):
    """What one request sends the drafter this step: its new rows, and the tree it asks for (0 nodes = none yet)."""

    tokens: list[int]
    num_nodes: int
    max_depth: int


def next_feed(request: Request, config: EngineConfig) -> Feed | None:
    """The request's next feed; None if it never speculates, has nothing new, or will emit only one more token."""
    if request.limits is None or not request.num_computed or request.draft_room <= 0:
        return None
    tokens = request.tokens[request.num_fed : request.num_feedable]
    if request.is_decoding:
        return Feed(tokens, request.limits.num_nodes, draft_depth(request, config))
    # One row alone can wait: the first behind a shared prefix, before anything of the request was computed.
    return Feed(tokens, 0, 0) if len(tokens) > 1 else None


def draft_depth(request: Request, config: EngineConfig) -> int:
    """How many tokens a draft for this request may be long. The engine admits none that could outgrow max_model_len."""
    assert config.draft is not None
    return min(request.draft_room, config.draft.tree.longest_path)


def is_due(request: Request, max_backlog: int) -> bool:
    """Whether a request must be fed even without a tree."""
    has_sharers = request.is_repeated and request.num_fed < request.num_prompt
    return has_sharers or backlog(request) > max_backlog


def within_a_message(feeds: dict[Request, Feed], most_fed: int, max_backlog: int) -> dict[Request, Feed]:
    """As much of them as may be sent at once, what is due first. Who is not fed whole gets no tree."""
    if num_fed(feeds) <= most_fed:
        return feeds
    room, sent = most_fed, {}
    for request in sorted(feeds, key=lambda r: (r.is_auto, not is_due(r, max_backlog))):
        feed = feeds[request]
        if len(feed.tokens) <= room:
            sent[request] = feed
        elif room > 0:
            sent[request] = Feed(feed.tokens[:room], 0, 0)
        room -= len(feed.tokens)
    return {request: sent[request] for request in feeds if request in sent}


def num_fed(feeds: dict[Request, Feed]) -> int:
    return sum(len(feed.tokens) for feed in feeds.values())


def backlog(request: Request) -> int:
    """Rows that the drafter has not been fed."""
    return request.num_feedable - request.num_fed
