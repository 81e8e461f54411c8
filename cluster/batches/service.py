"""Holds what the routes of /v1/files and /v1/batches share: a folder, its database, and this replica's runner.

An `owner` is what identifies an API key; None sees everything, and is what services without keys pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from cluster.batches import files
from cluster.batches.database import BatchDatabase
from cluster.batches.files import FileFolder
from cluster.batches.runner import Backend, BatchRunner
from secateur.batches_api import FileObject


class BatchService:
    """Files and batches in a folder. Use it inside `running`."""

    def __init__(self, path: Path, *, models: Sequence[str]) -> None:
        self._path, self._models = path, models
        self.folder = FileFolder(path / "files")
        self.database = BatchDatabase(path / "batches.sqlite3")
        self._runner: BatchRunner | None = None

    @asynccontextmanager
    async def running(self, backend: Backend) -> AsyncIterator[None]:
        """Open the folder and answer batches in the background."""
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)  # only its owner may read what users send
        self.folder.make()
        await self.database.open()
        self._runner = BatchRunner(self.database, self.folder, self._models, backend)
        work = asyncio.create_task(self._runner.run())
        try:
            yield
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await self.database.close()

    async def add_file(self, draft: Path, filename: str, expires_s: int | None, owner: str | None) -> FileObject:
        """Keep an uploaded draft as a file."""
        file = await asyncio.to_thread(self.folder.keep, draft, filename, "batch", expires_s)
        await self.database.run(files.insert, file, owner or "")
        return file

    def wake(self) -> None:
        """Work now on what has changed."""
        if self._runner is not None:
            self._runner.wake()
