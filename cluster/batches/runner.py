"""Works on the batches of a folder, as the runners of other replicas do: validates, answers, writes files.

Answers come from the service's own routes, called in this process. A runner answers the oldest batch that nobody has,
and begins the next one when all its lines have begun. Interactive requests go first: a line begins only while the
engine has fewer than `max_running` requests, whoever sent them, but for one line, which lets every batch end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

import httpx2

from cluster.batches import batches, files
from cluster.batches.answer_lines import answered, unanswered
from cluster.batches.batches import Claim, LineAnswer
from cluster.batches.database import BatchDatabase
from cluster.batches.files import FileFolder
from cluster.batches.input_lines import BadLine, LineRequest, requests_in
from cluster.batches.writing import MISSING, validate, write_files
from secateur.batches_api import BatchStatus
from secateur.responses import IGNORED_HEADER

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""How soon a runner notices what other replicas were asked for: new batches, and the end of its own."""
ROOM_POLL_S = 0.05
"""How soon it notices that interactive requests have ended."""
RETRY_S = 2.0
"""Pause after a failure of the disk, and after a 429 or 503 that names none."""
SWEEP_S = 600.0
MAX_LOSSES = 10
"""How often a line may be with a lost engine before it gets an error: it may be what kills them."""
_FILE_WORK: tuple[BatchStatus, ...] = ("validating", "finalizing", "cancelling")


class Post(Protocol):
    """Sends a JSON body to a route of this process."""

    async def __call__(self, path: str, body: bytes, *, request_id: str, owner: str) -> httpx2.Response:
        """Return the response; cancelling it aborts the request in the engine. What it stores is the owner's."""


class Backend(NamedTuple):
    """The service that answers the lines."""

    post: Post
    num_pending: Callable[[], int]
    """The engine's requests, whoever sent them."""
    is_healthy: Callable[[], bool]
    max_running: int
    on_recorded: Callable[[int, int], None]
    """Is told how many answers and errors were recorded."""


class Over(Exception):
    """The work on a batch ends here: it was cancelled, is another worker's now, or its engine was lost."""


class BatchRunner:
    """One worker. `run` works until it is cancelled; `wake` says that there is something new."""

    def __init__(self, database: BatchDatabase, folder: FileFolder, models: Sequence[str], backend: Backend) -> None:
        self._database, self._folder, self._models, self._backend = database, folder, models, backend
        self._worker = f"worker-{uuid.uuid4().hex}"
        self._num_running = 0  # choices of lines
        self._beginning: Claim | None = None
        """The batch that has lines which have not begun."""
        self._swept = 0.0
        self._news, self._freed = asyncio.Event(), asyncio.Event()

    def wake(self) -> None:
        """Look for work now, and for the end of work."""
        self._news.set()

    async def run(self) -> None:
        """Work until cancelled, then free what is claimed; other replicas, or the next process, go on with it."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    await self._take_batch(tasks)
                except Exception:
                    await self._pause_after_failure()

    async def _pause_after_failure(self) -> None:
        logger.exception("batches: trying again in %g s", RETRY_S)  # a full disk, for example
        await asyncio.sleep(RETRY_S)

    async def _take_batch(self, tasks: asyncio.TaskGroup) -> None:
        """Validate a batch, write its files, or begin to answer it; if there is none, delete old files, and wait."""
        may_answer = self._backend.is_healthy() and self._beginning is None
        statuses = (*_FILE_WORK, "in_progress") if may_answer else _FILE_WORK
        claim = await self._database.run(batches.claim, self._worker, self._models[0], time.time(), statuses)
        if claim is None:
            if time.monotonic() > self._swept + SWEEP_S:
                self._swept = time.monotonic()
                await sweep(self._database, self._folder)
            await _wait(self._news, POLL_S)
        elif claim.batch.status == "in_progress":
            self._beginning = claim
            tasks.create_task(self._work_on(claim))
        else:
            await self._work_on(claim)

    async def _work_on(self, claim: Claim) -> None:
        """Do what the batch's status asks for, until it is done or the claim is lost."""
        try:
            async with asyncio.TaskGroup() as work:
                lease = work.create_task(self._keep_alive(claim))
                if claim.batch.status == "validating":
                    await validate(self._database, self._folder, claim, self._models)
                elif claim.batch.status == "in_progress":
                    await self._answer_lines(claim)
                else:
                    await write_files(self._database, self._folder, claim)
                lease.cancel()
        except* Over:
            pass
        except* Exception:
            await self._pause_after_failure()
        finally:
            self._all_begun(claim)
            with suppress(Exception):  # the lease ends by itself
                await self._database.run(batches.release, claim)
            self.wake()  # the batch may have files to write, or others may be answered

    async def _keep_alive(self, claim: Claim) -> None:
        """Renew the lease until the claim is lost, then raise Over."""
        while await self._database.run(batches.renew, claim, time.time()):
            await asyncio.sleep(POLL_S)
        raise Over

    # Lines

    async def _answer_lines(self, claim: Claim) -> None:
        """Answer the lines that have no answer. Raises Over."""
        try:
            done = await self._database.run(batches.answered, claim.batch.id)
            todo = requests_in(self._folder.path(claim.batch.input_file_id), done)
            async with asyncio.TaskGroup() as lines:
                while (line := await asyncio.to_thread(next, todo, None)) is not None:
                    await self._wait_for_room(num_choices := choices_of(line.body))
                    self._num_running += num_choices
                    task = lines.create_task(self._answer(claim, line))
                    task.add_done_callback(partial(self._free, num_choices))
                self._all_begun(claim)
        except* (FileNotFoundError, BadLine):
            logger.exception("batches: cannot read the input of %s", claim.batch.id)
        # It is still in progress if the file lacks lines that it had.
        await self._database.run(batches.fail, claim, [MISSING], time.time())

    def _all_begun(self, claim: Claim) -> None:
        if self._beginning is claim:
            self._beginning = None
            self.wake()

    async def _wait_for_room(self, num_choices: int) -> None:
        """Wait until a line with so many choices may begin. Raises Over if the engine is not healthy."""
        engine = self._backend
        while self._num_running and max(self._num_running, engine.num_pending()) + num_choices > engine.max_running:
            await _wait(self._freed, ROOM_POLL_S)
        if not engine.is_healthy():
            await asyncio.sleep(RETRY_S)  # meanwhile, the lines that run learn that their engine was lost
            raise Over

    def _free(self, num_choices: int, _: asyncio.Task[None]) -> None:
        self._num_running -= num_choices
        self._freed.set()

    async def _answer(self, claim: Claim, line: LineRequest) -> None:
        """Answer a line and record it. Raises Over."""
        request_id, is_error = f"{claim.batch.id}-{line.number}", True
        try:
            posted = await self._send(claim, line, request_id)
        except Exception as error:
            logger.exception("batches: line %d of %s failed", line.number, claim.batch.id)
            text = unanswered(line.custom_id, "server_error", repr(error))
        else:
            if posted.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
                text = await self._lost(claim, line)
            else:
                is_error = posted.status_code != HTTPStatus.OK
                text = answered(
                    line.custom_id,
                    status=posted.status_code,
                    request_id=request_id,
                    body=posted.text,
                    ignored=posted.headers.get(IGNORED_HEADER, ""),
                )
        if not await self._database.run(batches.record, claim, LineAnswer(line.number, text, is_error), time.time()):
            raise Over
        self._backend.on_recorded(int(not is_error), int(is_error))

    async def _lost(self, claim: Claim, line: LineRequest) -> str:
        """Return the answer to a line that was lost with its engine too often. Raises Over for one that was not."""
        if await self._database.run(batches.lose, claim, line.number) < MAX_LOSSES:
            await asyncio.sleep(RETRY_S)  # or a dying engine would be asked again and again
            raise Over
        message = f"The engine was lost {MAX_LOSSES} times while it had this request."
        return unanswered(line.custom_id, "request_lost", message)

    async def _send(self, claim: Claim, line: LineRequest, request_id: str) -> httpx2.Response:
        """Post a line until it is not refused for want of room."""
        content = json.dumps(line.body, ensure_ascii=False).encode(errors="surrogatepass")
        while True:
            answer = await self._backend.post(claim.batch.endpoint, content, request_id=request_id, owner=claim.owner)
            if answer.status_code != HTTPStatus.TOO_MANY_REQUESTS:
                return answer
            await asyncio.sleep(_retry_after_s(answer) * random.uniform(1, 2))


async def sweep(database: BatchDatabase, folder: FileFolder) -> None:
    """Delete expired files, and content that belongs to no file."""
    folder.delete(await database.run(files.delete_expired, time.time()))
    folder.delete(await database.run(files.without_row, await asyncio.to_thread(folder.old_names)))


def choices_of(body: dict[str, Any]) -> int:
    """Return how many answers a body asks for; 1 if it is not valid, since the route refuses it then."""
    num, prompt = body.get("n"), body.get("prompt")
    num_prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return num_prompts * (num if type(num) is int and num > 0 else 1)


def _retry_after_s(answer: httpx2.Response) -> float:
    given = answer.headers.get("retry-after", "")
    return float(given) if given.isdecimal() else RETRY_S


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, which it no longer is afterwards, or until the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    event.clear()
