"""Serves the routes of /v1/files and /v1/batches from one folder, its database, and this replica's runner.

An `owner` is what identifies an API key; None sees everything, and is what services without keys pass.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from cluster.batches import batches, files
from cluster.batches.batches import NotCancellable, WrongPurpose
from cluster.batches.database import BatchDatabase
from cluster.batches.files import FileFolder, FileInUse, Page
from cluster.batches.runner import BatchRunner, Post
from cluster.errors import BadRequest, HttpError
from secateur.batches_api import BatchList, BatchObject, CreateBatchRequest, FileList, FileObject
from secateur.responses import ErrorResponse

CONFLICT = 409


class BatchService:
    """Files and batches in a folder. Use it inside `running`."""

    def __init__(self, path: Path, *, models: Sequence[str]) -> None:
        self._path, self._models = path, models
        self.folder = FileFolder(path / "files")
        self._database = BatchDatabase(path / "batches.sqlite3")
        self._runner: BatchRunner | None = None

    @asynccontextmanager
    async def running(
        self,
        *,
        post: Post,
        num_pending: Callable[[], int],
        is_healthy: Callable[[], bool],
        max_running: int,
        on_recorded: Callable[[int, int], None],
    ) -> AsyncIterator[None]:
        """Open the folder and answer batches in the background. For the arguments see `BatchRunner`."""
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)  # only its owner may read what users send
        self.folder.make()
        await self._database.open()
        self._runner = BatchRunner(
            self._database,
            self.folder,
            models=self._models,
            post=post,
            num_pending=num_pending,
            is_healthy=is_healthy,
            max_running=max_running,
            on_recorded=on_recorded,
        )
        work = asyncio.create_task(self._runner.run())
        try:
            yield
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await self._database.close()

    async def add_file(self, draft: Path, filename: str, expires_s: int | None, owner: str | None) -> FileObject:
        """Keep an uploaded draft as a file."""
        file = await asyncio.to_thread(self.folder.keep, draft, filename, "batch", expires_s)
        await self._database.run(files.insert, file, owner or "")
        return file

    async def list_files(self, part: Page, purpose: str | None, owner: str | None) -> FileList:
        """Return a page of files, the newest first. Raises HttpError."""
        found = await self._database.run(files.page, part, owner, time.time(), purpose)
        if found is None:
            raise _no_file(part.after, "after")
        return FileList.page(found, part.limit)

    async def file(self, id: str, owner: str | None) -> FileObject:
        """Return a file. Raises HttpError."""
        found = await self._database.run(files.find, id, owner, time.time())
        if found is None:
            raise _no_file(id, "id")
        return found

    async def delete_file(self, id: str, owner: str | None) -> None:
        """Delete a file. Raises HttpError, also if a batch reads it."""
        try:
            if not await self._database.run(files.delete, id, owner, time.time()):
                raise _no_file(id, "id")
        except FileInUse as error:
            raise HttpError(CONFLICT, ErrorResponse.of(str(error), param="id", code="file_in_use")) from None
        self.folder.delete([id])

    async def create_batch(self, body: CreateBatchRequest, owner: str | None) -> BatchObject:
        """Create a batch; its lines are checked later. Raises HttpError."""
        try:
            found = await self._database.run(batches.create, body, owner, self._models[0], time.time())
        except WrongPurpose as error:
            raise BadRequest(str(error), param="input_file_id") from None
        if found is None:
            raise _no_file(body.input_file_id, "input_file_id")
        self._wake()
        return found

    async def list_batches(self, part: Page, owner: str | None) -> BatchList:
        """Return a page of batches, the newest first. Raises HttpError."""
        found = await self._database.run(batches.page, part, owner)
        if found is None:
            raise _no_batch(part.after, "after")
        return BatchList.page(found, part.limit)

    async def batch(self, id: str, owner: str | None) -> BatchObject:
        """Return a batch. Raises HttpError."""
        found = await self._database.run(batches.find, id, owner)
        if found is None:
            raise _no_batch(id, "id")
        return found

    async def cancel_batch(self, id: str, owner: str | None) -> BatchObject:
        """Begin to cancel a batch. Raises HttpError."""
        try:
            found = await self._database.run(batches.cancel, id, owner, time.time())
        except NotCancellable as error:
            raise HttpError(CONFLICT, ErrorResponse.of(str(error), code="batch_not_cancellable")) from None
        if found is None:
            raise _no_batch(id, "id")
        self._wake()
        return found

    def _wake(self) -> None:
        if self._runner is not None:
            self._runner.wake()


def _no_file(id: str | None, param: Literal["id", "after", "input_file_id"]) -> HttpError:
    message = f"No such File object: {id}"
    return HttpError(404, ErrorResponse.of(message, param=param))


def _no_batch(id: str | None, param: Literal["id", "after"]) -> HttpError:
    return HttpError(404, ErrorResponse.of(f"No batch found with id {id!r}.", param=param))
