"""Another head in place of the serving one: loaded beside it in a thread, and taken over between two steps.

A head that is only to be scored is loaded alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist

from drafter.learning.canary import Canary
from drafter.proposers.feature_head import DraftHead
from workers.comm.groups import World
from workers.settings import HeadAction
from workers.types import HeadProgress, HeadState, NewHead, as_bytes, as_text

logger = logging.getLogger(__name__)


class HeadLoader:
    """Answers NewHead, on every drafter rank alike.

    load: reads this rank's share of a head, given its folder. take: puts it in the place of the serving one. For as
    long as a head is loaded, and until it is taken over, a rank holds both. score: loads a head to be scored, given the
    folders of the serving one and its own, and a number of messages. serving: the folder of the serving head.
    """

    def __init__(
        self,
        world: World,
        load: Callable[[str], DraftHead],
        take: Callable[[DraftHead], None],
        score: Callable[[str, str, int], Canary] | None = None,
        serving: str = "",
    ) -> None:
        self._world, self._load, self._take, self._score, self._serving = world, load, take, score, serving
        self._thread = ThreadPoolExecutor(1, "head")
        self._loading: Future[DraftHead | Canary] | None = None
        self.canary: Canary | None = None

    def answer(self, message: NewHead) -> HeadState:
        """Begin to load the head, or take it over if every rank has it; or tell how the one being scored does."""
        if message.action in (HeadAction.TELL, HeadAction.END):
            state = self._state(HeadProgress.TAKEN)
            if message.action == HeadAction.END:
                self.canary = None
            return state
        if self._loading is None:
            self._loading = self._thread.submit(self._loaded, as_text(message.path_U), message.num_steps)
        progress, reason = HeadProgress.LOADING, ""
        if self._loading.done():
            error = self._loading.exception()
            progress, reason = (HeadProgress.FAILED, str(error)) if error else (HeadProgress.TAKEN, "")
        agreed = self._agreed(progress)
        if agreed == HeadProgress.TAKEN:
            try:
                self._begin(self._loading.result(), as_text(message.path_U))
            except ValueError as error:
                agreed, reason = HeadProgress.FAILED, str(error)
        if agreed == HeadProgress.FAILED and not reason:
            reason = "another drafter rank could not load it; its log says why"
        if agreed != HeadProgress.LOADING:
            done = "drafts from now on" if self.canary is None else "is scored from now on"
            logger.info("%s: %s: %s", self._world.role, as_text(message.path_U), reason or done)
            self._loading = None
        return self._state(agreed, reason)

    def _state(self, progress: HeadProgress, reason: str = "") -> HeadState:
        told = None if self.canary is None else as_bytes(self.canary.told())
        return HeadState(progress=progress, reason_U=as_bytes(reason), scores_U=told)

    def _loaded(self, path: str, num_steps: int) -> DraftHead | Canary:
        if not num_steps:
            return self._load(path)
        assert self._score is not None, "others are refused before"
        return self._score(self._serving, path, num_steps)

    def _begin(self, head: DraftHead | Canary, path: str) -> None:
        """Draft with a head, or score it. Scores against another head than the one that drafts end."""
        if isinstance(head, Canary):
            self.canary = head
            return
        self._take(head)
        self._serving, self.canary = path, None

    def _agreed(self, progress: HeadProgress) -> HeadProgress:
        tp = self._world.tp
        if tp.size == 1:
            return progress
        least = torch.tensor([progress], dtype=torch.int64, device=self._world.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=tp.group)
        return HeadProgress(int(least))
