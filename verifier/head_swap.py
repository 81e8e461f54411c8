"""The engine's part of a swap: the drafter loads another head, and both sides take it over between the same two steps.

The verifier has a part of most heads, the fusion of the target's layers, which it loads first.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from verifier.drafter_peer import DrafterPeer
from verifier.target import Fuse, Target
from workers.comm.ipc import HeadSwapped, SwapHead
from workers.types import HeadProgress, NewHead, as_bytes, as_text

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

    def begin(self, asked: SwapHead) -> HeadSwapped | None:
        """Begin a swap; return why it cannot begin."""
        if self._load_fuse is None:
            return _ended(asked, "the drafter is no head with weights of its own")
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
        state = self._drafter.swap(NewHead(path_U=as_bytes(asked.path)), step)
        if state is None:
            return self._end(asked, "the drafter is lost; ask again when /health says ok")
        if state.progress == HeadProgress.LOADING:
            return None
        if state.progress == HeadProgress.FAILED:
            return self._end(asked, as_text(state.reason_U))
        self._target.fuse = self._fuse.result()
        return self._end(asked, None)

    def _end(self, asked: SwapHead, error: str | None) -> HeadSwapped:
        self._asked = None
        return _ended(asked, error)


def _ended(asked: SwapHead, error: str | None) -> HeadSwapped:
    return HeadSwapped(id=asked.id, path=asked.path, error=error)
