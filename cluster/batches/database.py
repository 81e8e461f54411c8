"""The SQLite database that replicas share: its tables, and transactions in a thread of their own.

The functions of `files`, `batches` and `lines` take the connection first and run inside one transaction. Times are Unix
seconds.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

VERSION = 1
BUSY_S = 30.0
"""How long a transaction waits for those of other replicas."""

_SCHEMA = """
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER
);
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    model TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    status TEXT NOT NULL,
    metadata TEXT,
    errors TEXT,
    output_seconds INTEGER, -- life of the files with the answers; null = unlimited
    output_file_id TEXT,
    error_file_id TEXT,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    in_progress_at INTEGER,
    finalizing_at INTEGER,
    completed_at INTEGER,
    failed_at INTEGER,
    expired_at INTEGER,
    cancelling_at INTEGER,
    cancelled_at INTEGER,
    total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    worker TEXT -- who validates it, or writes its files
);
CREATE INDEX open_batches ON batches (seq) WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling');
-- The requests of batches that have not ended; their text stays in the input file.
CREATE TABLE lines (
    batch_id TEXT NOT NULL,
    number INTEGER NOT NULL, -- of the line, from 1
    custom_id TEXT NOT NULL,
    offset INTEGER NOT NULL, -- in bytes
    length INTEGER NOT NULL,
    num_losses INTEGER NOT NULL DEFAULT 0, -- how often a worker or an engine was lost with it
    worker TEXT, -- who answers it
    answer TEXT, -- a line of the output or error file
    is_error INTEGER,
    UNIQUE (batch_id, number),
    UNIQUE (batch_id, custom_id)
);
CREATE INDEX open_lines ON lines (batch_id, number) WHERE answer IS NULL AND worker IS NULL;
CREATE INDEX claimed_lines ON lines (worker) WHERE worker IS NOT NULL;
-- A worker is a replica's runner. What it has claimed is free again when its lease has ended.
CREATE TABLE workers (id TEXT PRIMARY KEY, lease_until REAL NOT NULL);
"""


class BatchDatabase:
    """One connection, in one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch-database")
        self._connection: sqlite3.Connection

    async def open(self) -> None:
        """Connect; make the tables if there are none. Raises sqlite3.Error, RuntimeError for another version."""
        await self._in_thread(self._open)

    async def run(
        self, action: Callable[Concatenate[sqlite3.Connection, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run an action as one transaction. It is durable when this returns, and undone if it raises."""
        return await self._in_thread(lambda: self._run(lambda connection: action(connection, *args, **kwargs)))

    async def close(self) -> None:
        """Close the connection, after the actions that run."""
        await self._in_thread(lambda: self._connection.close())
        self._thread.shutdown()

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _open(self) -> None:
        self._connection = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        self._connection.row_factory = sqlite3.Row
        deadline = time.monotonic() + BUSY_S
        while True:  # changing the mode does not wait for other replicas that start now
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        self._connection.execute("PRAGMA synchronous = FULL")  # acknowledged means on the disk
        self._run(_make_tables)

    def _run(self, action: Callable[[sqlite3.Connection], T]) -> T:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            result = action(self._connection)
            self._connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # a full disk has ended it already
                self._connection.execute("ROLLBACK")
            raise
        return result


def _make_tables(db: sqlite3.Connection) -> None:
    [found] = db.execute("PRAGMA user_version").fetchone()
    if found == 0:
        for statement in _statements(_SCHEMA):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {VERSION}")
    elif found != VERSION:
        raise RuntimeError(f"the batch folder has version {found}, this service reads {VERSION}; name another folder")


def _statements(script: str) -> list[str]:
    found, pending = [], ""
    for line in script.splitlines():
        pending += f"{line}\n"
        if sqlite3.complete_statement(pending):
            found.append(pending)
            pending = ""
    return found
