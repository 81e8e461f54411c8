"""The SQLite database that replicas share: its tables, and transactions in a thread of their own.

The functions of `files`, `batches` and `lines` take the connection first and run inside one transaction. Times are Unix
seconds.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from cluster.errors import HttpError
from secateur.responses import ErrorResponse

P = ParamSpec("P")
T = TypeVar("T")

Table = Literal["files", "batches"]
_MISSING: dict[Table, str] = {"files": "No such File object: {}", "batches": "No batch found with id {!r}."}
VERSION = 2
BUSY_S = 30.0
"""How long a transaction waits for those of other replicas."""

_SCHEMA = (
    """CREATE TABLE files (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        purpose TEXT NOT NULL,
        expires_at INTEGER,
        object TEXT NOT NULL -- JSON of a FileObject
    )""",
    """CREATE TABLE batches (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        model TEXT NOT NULL,
        input_file_id TEXT NOT NULL,
        output_seconds INTEGER, -- life of the files with the answers; null = unlimited
        expires_at INTEGER NOT NULL,
        status TEXT NOT NULL,
        object TEXT NOT NULL, -- JSON of a BatchObject
        worker TEXT, -- the replica's runner that validates it, answers it, or writes its files
        lease_until REAL -- when others may take it from its worker
    )""",
    "CREATE INDEX open_batches ON batches (seq) "
    "WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling')",
    # What has become of requests of batches that have not ended. The requests stay in the input file.
    """CREATE TABLE lines (
        batch_id TEXT NOT NULL,
        number INTEGER NOT NULL, -- of the line, from 1
        num_losses INTEGER NOT NULL DEFAULT 0, -- how often an engine was lost with it
        answer TEXT, -- a line of the output or error file
        is_error INTEGER,
        PRIMARY KEY (batch_id, number)
    )""",
)


class Page(NamedTuple):
    """Which part of a list to return. `after` is the id before its first entry."""

    limit: int
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"


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

    @contextmanager
    def reader(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for long reads in another thread, which keep no transaction waiting."""
        with closing(sqlite3.connect(self._path, timeout=BUSY_S)) as connection:
            yield connection

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
        for statement in _SCHEMA:
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {VERSION}")
    elif found != VERSION:
        raise RuntimeError(f"the batch folder has version {found}, this service reads {VERSION}; name another folder")


def find_row(db: sqlite3.Connection, table: Table, id: str, owner: str | None, param: str = "id") -> sqlite3.Row:
    """Return a row of this owner (None = anybody). Raises HttpError (404), which names `param`."""
    row = db.execute(f"SELECT * FROM {table} WHERE id = ? AND owner = coalesce(?, owner)", (id, owner)).fetchone()
    if row is None:
        raise no_row(table, id, param)
    return row


def no_row(table: Table, id: str, param: str) -> HttpError:
    """Return the 404 for an id that there is not."""
    return HttpError(HTTPStatus.NOT_FOUND, ErrorResponse.of(_MISSING[table].format(id), param=param))


def find_page(
    db: sqlite3.Connection,
    table: Table,
    part: Page,
    owner: str | None,
    where: str = "TRUE",
    values: Sequence[object] = (),
) -> list[str]:
    """Return the objects of a page, and one more if there are more. Raises HttpError (404) without an entry `after`."""
    after = None if part.after is None else find_row(db, table, part.after, owner, "after")["seq"]
    sign, order = ("<", "DESC") if part.order == "desc" else (">", "ASC")
    rows = db.execute(
        f"SELECT object FROM {table} WHERE {where} AND owner = coalesce(?, owner) AND coalesce(seq {sign} ?, TRUE) "
        f"ORDER BY seq {order} LIMIT ?",
        (*values, owner, after, part.limit + 1),
    )
    return [row["object"] for row in rows]
