"""Another head in place of the serving one: loaded beside it in a thread, and taken over between two steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist

from drafter.proposers.feature_head import DraftHead
from workers.comm.groups import World
from workers.types import HeadProgress, HeadState, NewHead, as_bytes, as_text

logger = logging.getLogger(__name__)


class HeadLoader:
    """Answers NewHead, on every drafter rank alike.

    load: reads this rank's share of a head, given its folder. take: puts it in the place of the serving one. For as
    long as a head is loaded, and until it is taken over, a rank holds both.
    """

    def __init__(self, world: World, load: Callable[[str], DraftHead], take: Callable[[DraftHead], None]) -> None:
        self._world, self._load, self._take = world, load, take
        self._thread = ThreadPoolExecutor(1, "head")
        self._loading: Future[DraftHead] | None = None

    def answer(self, message: NewHead) -> HeadState:
        """Begin to load the head, or take it over if every rank has it."""
        if self._loading is None:
            self._loading = self._thread.submit(self._load, as_text(message.path_U))
        progress, reason = HeadProgress.LOADING, ""
        if self._loading.done():
            error = self._loading.exception()
            progress, reason = (HeadProgress.FAILED, str(error)) if error else (HeadProgress.TAKEN, "")
        agreed = self._agreed(progress)
        if agreed == HeadProgress.TAKEN:
            try:
                self._take(self._loading.result())
            except ValueError as error:
                agreed, reason = HeadProgress.FAILED, str(error)
        if agreed == HeadProgress.FAILED and not reason:
            reason = "another drafter rank could not load it; its log says why"
        if agreed != HeadProgress.LOADING:
            logger.info("%s: %s: %s", self._world.role, as_text(message.path_U), reason or "drafts from now on")
            self._loading = None
        return HeadState(progress=agreed, reason_U=as_bytes(reason))

    def _agreed(self, progress: HeadProgress) -> HeadProgress:
        tp = self._world.tp
        if tp.size == 1:
            return progress
        least = torch.tensor([progress], dtype=torch.int64, device=self._world.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=tp.group)
        return HeadProgress(int(least))
