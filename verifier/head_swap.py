"""The engine's part of a swap: the drafter loads another head, and both sides take it over between the same two steps.

The verifier has a part of most heads, the fusion of the target's layers, which it loads first. A head that is only to
be scored is loaded alike; then the engine sends its features, too.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from verifier.drafter_peer import DrafterPeer
from verifier.target import Candidate, Fuse, Target
from workers.comm.ipc import HeadSwapped, SwapHead
from workers.settings import HeadAction
from workers.types import HeadProgress, HeadState, NewHead, as_bytes, as_text

LOST = "the drafter is lost; ask again when /health says ok"
LoadFuse = Callable[[str], Fuse]
"""Reads a head's fusion from its folder; raises ValueError, OSError."""


class HeadSwap:
    """At most one swap at a time. load_fuse: None = the drafter is no head with weights of its own."""

    def __init__(self, drafter: DrafterPeer, target: Target, load_fuse: LoadFuse | None) -> None:
        self._drafter, self._target, self._load_fuse = drafter, target, load_fuse
        self._thread = ThreadPoolExecutor(1, "fusion")
        self._asked: SwapHead | None = None
        self._fuse: Future[Fuse]

    @property
    def is_under_way(self) -> bool:
        """Return whether a head is being loaded."""
        return self._asked is not None

    def begin(self, asked: SwapHead, step: int) -> HeadSwapped | None:
        """Begin a swap; return why it cannot begin, or what was asked of the head being scored."""
        if self._load_fuse is None:
            return _ended(asked, "the drafter is no head with weights of its own")
        if asked.action in (HeadAction.TELL, HeadAction.END):
            if asked.action == HeadAction.END:
                self._target.candidate = None
            state = self._ask(asked, step)
            return _ended(asked, LOST) if state is None else _ended(asked, None, state)
        if self._asked is not None:
            return _ended(asked, f"a swap to {self._asked.path} is under way; ask again when it has ended")
        self._asked, self._fuse = asked, self._thread.submit(self._load_fuse, asked.path)
        return None

    def advance(self, step: int) -> HeadSwapped | None:
        """Go on with the swap, if there is one, between two steps; return its end. Never waits for a file."""
        if (asked := self._asked) is None or not self._fuse.done():
            return None
        if error := self._fuse.exception():
            return self._end(asked, str(error))
        state = self._ask(asked, step)
        if state is None:
            return self._end(asked, LOST)
        if state.progress == HeadProgress.LOADING:
            return None
        if state.progress == HeadProgress.FAILED:
            return self._end(asked, as_text(state.reason_U))
        fuse, self._target.candidate = self._fuse.result(), None
        if asked.action == HeadAction.SCORE:
            self._target.candidate = Candidate(fuse, asked.num_steps)
        else:
            self._target.fuse = fuse
        return self._end(asked, None, state)

    def _ask(self, asked: SwapHead, step: int) -> HeadState | None:
        message = NewHead(path_U=as_bytes(asked.path), action=asked.action, num_steps=asked.num_steps)
        return self._drafter.swap(message, step)

    def _end(self, asked: SwapHead, error: str | None, state: HeadState | None = None) -> HeadSwapped:
        self._asked = None
        return _ended(asked, error, state)


def _ended(asked: SwapHead, error: str | None, state: HeadState | None = None) -> HeadSwapped:
    scores = "" if state is None or state.scores_U is None else as_text(state.scores_U)
    return HeadSwapped(id=asked.id, path=asked.path, action=asked.action, error=error, scores=scores)
