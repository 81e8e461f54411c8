"""Works on the batches of a folder, beside the runners of other replicas: claims, answers, records.

Answers come from the service's own routes, called in this process. Interactive requests go first: a line begins only
while the engine has fewer than `max_running` requests, whoever sent them, but for one line, which lets every batch end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

from cluster.batches import batches, files, lines
from cluster.batches.answer_lines import answered, unanswered
from cluster.batches.database import BatchDatabase
from cluster.batches.files import FileFolder
from cluster.batches.input_lines import BadLine, body_at
from cluster.batches.lines import LineAnswer, LineClaim
from cluster.batches.writing import validate, write_files
from secateur.responses import IGNORED_HEADER

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""How soon a runner notices batches that another replica has created."""
ROOM_POLL_S = 0.05
"""How soon it notices that interactive requests have ended."""
RETRY_S = 2.0
"""Pause after a failure of the disk, and after a 429 or 503 that names none."""
SWEEP_S = 600.0
MAX_LOSSES = 10
"""How often a line may be with a lost engine or replica before it gets an error: it may be what kills them."""


class PostedAnswer(NamedTuple):
    """The response of a route."""

    status: int
    headers: dict[str, str]
    """By lower-case names."""
    body: str


class Post(Protocol):
    """Sends a JSON body to a route of this process."""

    async def __call__(self, path: str, body: bytes, *, request_id: str, owner: str) -> PostedAnswer:
        """Return the response; cancelling it aborts the request in the engine. What it stores is the owner's."""


class _Running(NamedTuple):
    task: asyncio.Task[None]
    num_choices: int


class BatchRunner:
    """One worker. `run` works until it is cancelled; `wake` says that there is something new."""

    def __init__(
        self,
        database: BatchDatabase,
        folder: FileFolder,
        *,
        models: Sequence[str],
        post: Post,
        num_pending: Callable[[], int],
        is_healthy: Callable[[], bool],
        max_running: int,
        on_recorded: Callable[[int, int], None],
    ) -> None:
        """`num_pending`: the engine's requests; `on_recorded` is told how many answers and errors were recorded."""
        self._database, self._folder, self._models, self._post = database, folder, models, post
        self._num_pending, self._is_healthy, self._max_running = num_pending, is_healthy, max_running
        self._on_recorded = on_recorded
        self._worker = f"worker-{uuid.uuid4().hex}"
        self._claimed: deque[LineClaim] = deque()
        self._running: dict[LineClaim, _Running] = {}
        self._answers: list[LineAnswer] = []  # not recorded yet
        self._returned: dict[bool, list[LineClaim]] = {False: [], True: []}  # not released yet; by whether it is a loss
        self._swept = 0.0
        self._news, self._beat, self._more, self._freed, self._written = (asyncio.Event() for _ in range(5))

    def wake(self) -> None:
        """Look for work now."""
        for event in (self._news, self._beat, self._more):
            event.set()

    async def run(self) -> None:
        """Work until cancelled, then free what is claimed; other replicas, or the next process, go on with it."""
        loops = (self._keep_alive, self._work_on_batches, self._start_lines, self._write)
        try:
            async with asyncio.TaskGroup() as tasks:
                for step in loops:
                    tasks.create_task(self._again_and_again(step))
        finally:
            await self._stop(lambda line: True)
            with suppress(Exception):  # the lease ends by itself
                await self._record()
                await self._database.run(batches.retire, self._worker)

    async def _again_and_again(self, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await step()
            except Exception:  # a full disk, for example
                logger.exception("batches: trying again in %g s", RETRY_S)
                await asyncio.sleep(RETRY_S)

    # The lease

    async def _keep_alive(self) -> None:
        """Renew the lease; drop the lines of batches that were cancelled or have expired."""
        active = await self._database.run(batches.keep_alive, self._worker, time.time())
        await self._stop(lambda line: line.batch_id not in active)
        await _wait(self._beat, batches.LEASE_S / 4)

    async def _stop(self, is_over: Callable[[LineClaim], bool]) -> None:
        ended = [line for line in self._running if is_over(line)]
        tasks = [self._running[line].task for line in ended]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        ended += [line for line in self._claimed if is_over(line)]
        self._claimed = deque(line for line in self._claimed if not is_over(line))
        self._give_back(ended, is_loss=False)

    # Batches

    async def _work_on_batches(self) -> None:
        batch = await self._database.run(batches.claim, self._worker, self._models[0])
        if batch is None:
            if time.monotonic() > self._swept + SWEEP_S:
                self._swept = time.monotonic()
                await sweep(self._database, self._folder)
            await _wait(self._news, POLL_S)
            return
        try:
            if batch.status == "validating":
                await validate(self._database, self._folder, batch, self._worker, self._models)
                self._more.set()
            else:
                await write_files(self._database, self._folder, batch, self._worker)
        except Exception:
            await self._database.run(batches.release, batch, self._worker)
            raise

    # Lines

    async def _start_lines(self) -> None:
        """Start one line, or wait."""
        if not self._is_healthy():
            await self._stop(lambda line: line not in self._running)  # other replicas may have them
            await _wait(self._more, POLL_S)
            return
        if not self._claimed:
            claims = await self._database.run(lines.claim, self._worker, self._models[0], self._max_running)
            self._claimed.extend(claims)  # in its own statement: `_stop` may put another deque there meanwhile
        if not self._claimed:
            await _wait(self._more, POLL_S)
            return
        line = self._claimed[0]
        try:
            path = self._folder.path(line.input_file_id)
            body = await asyncio.to_thread(body_at, path, line.offset, line.length)
        except (OSError, BadLine, KeyError) as error:
            body, problem = {}, unanswered(line.custom_id, "input_file_changed", f"The line cannot be read: {error}.")
        else:
            problem = ""
        if line.num_losses >= MAX_LOSSES:
            message = f"The engine or the replica was lost {MAX_LOSSES} times while it had this request."
            problem = unanswered(line.custom_id, "request_lost", message)
        while not self._has_room(num_choices := choices_of(body)):
            await _wait(self._freed, ROOM_POLL_S)
        if not self._claimed or self._claimed[0] is not line:
            return  # its batch has ended meanwhile
        self._claimed.popleft()
        if problem:
            self._finish(LineAnswer(line, problem, is_error=True))
            return
        task = asyncio.create_task(self._answer(line, body))
        self._running[line] = _Running(task, num_choices)
        task.add_done_callback(lambda done: self._ended(line, done))

    def _has_room(self, num_choices: int) -> bool:
        if len(self._answers) > self._max_running:
            return False  # the disk does not keep up
        if not self._running:
            return True
        own = sum(running.num_choices for running in self._running.values())
        return max(own, self._num_pending()) + num_choices <= self._max_running

    async def _answer(self, line: LineClaim, body: dict[str, Any]) -> None:
        request_id = f"{line.batch_id}-{line.number}"
        content = json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass")
        while True:
            answer = await self._post(line.endpoint, content, request_id=request_id, owner=line.owner)
            if answer.status != HTTPStatus.TOO_MANY_REQUESTS:
                break
            await asyncio.sleep(_retry_after_s(answer) * random.uniform(1, 2))
        if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
            self._give_back([line], is_loss=True)
            await asyncio.sleep(RETRY_S)  # or a dying engine would be asked again and again
            return
        text = answered(
            line.custom_id,
            status=answer.status,
            request_id=request_id,
            body=answer.body,
            ignored=answer.headers.get(IGNORED_HEADER, ""),
        )
        self._finish(LineAnswer(line, text, is_error=answer.status != HTTPStatus.OK))

    def _finish(self, answer: LineAnswer) -> None:
        self._answers.append(answer)
        self._written.set()

    def _give_back(self, claims: Sequence[LineClaim], *, is_loss: bool) -> None:
        self._returned[is_loss] += claims
        self._written.set()

    def _ended(self, line: LineClaim, task: asyncio.Task[None]) -> None:
        del self._running[line]
        self._freed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("batches: line %d of %s failed", line.number, line.batch_id, exc_info=error)
            self._finish(LineAnswer(line, unanswered(line.custom_id, "server_error", repr(error)), is_error=True))

    async def _write(self) -> None:
        """Record answers, or wait for some."""
        if not (self._answers or any(self._returned.values())):
            await _wait(self._written, POLL_S)
        await self._record()

    async def _record(self) -> None:
        """Record all answers and release all returned lines in one transaction; after a failure they are kept."""
        answers, returned = list(self._answers), {is_loss: list(some) for is_loss, some in self._returned.items()}
        if not (answers or any(returned.values())):
            return
        recorded = await self._database.run(lines.settle, self._worker, answers, returned, time.time())
        del self._answers[: len(answers)]
        for is_loss, some in returned.items():
            del self._returned[is_loss][: len(some)]
        num_errors = sum(answer.is_error for answer in recorded)
        self._on_recorded(len(recorded) - num_errors, num_errors)
        self._freed.set()
        self._news.set()  # it may have been a batch's last line


async def sweep(database: BatchDatabase, folder: FileFolder) -> None:
    """Delete expired files, and content that belongs to no file."""
    folder.delete(await database.run(files.delete_expired, time.time()))
    folder.delete(await database.run(files.without_row, await asyncio.to_thread(folder.old_names)))


def choices_of(body: dict[str, Any]) -> int:
    """Return how many answers a body asks for; 1 if it is not valid, since the route refuses it then."""
    num, prompt = body.get("n"), body.get("prompt")
    num_prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return num_prompts * (num if type(num) is int and num > 0 else 1)


def _retry_after_s(answer: PostedAnswer) -> float:
    given = answer.headers.get("retry-after", "")
    return float(given) if given.isdecimal() else RETRY_S


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, which it no longer is afterwards, or until the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    event.clear()
