"""Uploaded files and files of answers: a row each in the database, and their content in the folder."""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from secateur.batches_api import FileObject
from secateur.responses import new_id

ORPHAN_S = 3600
"""Content without a row is deleted at this age: an upload or a replica ended before it made the row."""
_IN_USE = """SELECT id, status FROM batches WHERE input_file_id = ?
    AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"""


class Page(NamedTuple):
    """Which part of a list to return. `after` is the id before its first entry."""

    limit: int
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"


class FileInUse(Exception):
    """The file is the input of a batch that has not ended."""


class FileFolder:
    """The content of files, by id."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(self) -> None:
        """Make the folder."""
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def path(self, id: str) -> Path:
        """Return where the content of a file is."""
        return self._folder / id

    def draft_path(self) -> Path:
        """Return a new path for content that is being written."""
        return self._folder / f"{uuid.uuid4().hex}.part"

    def keep(
        self, draft: Path, filename: str, purpose: Literal["batch", "batch_output"], expires_s: int | None
    ) -> FileObject:
        """Make a draft the content of a new file; it is on the disk when this returns. expires_s: None = never."""
        now = int(time.time())
        kept = FileObject(
            id=new_id("file"),
            bytes=draft.stat().st_size,
            created_at=now,
            expires_at=None if expires_s is None else now + expires_s,
            filename=filename,
            purpose=purpose,
        )
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.rename(self.path(kept.id))
        directory = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return kept

    def delete(self, ids: Iterable[str]) -> None:
        """Delete content."""
        for id in ids:
            self.path(id).unlink(missing_ok=True)

    def old_names(self) -> list[str]:
        """Return the names of what is older than `ORPHAN_S`."""
        before, found = time.time() - ORPHAN_S, []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                try:
                    if entry.stat().st_mtime < before:
                        found.append(entry.name)
                except FileNotFoundError:
                    continue  # another replica has just deleted it
        return found


def insert(db: sqlite3.Connection, file: FileObject, owner: str) -> None:
    """Add a row."""
    db.execute(
        "INSERT INTO files (id, owner, filename, purpose, bytes, created_at, expires_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (file.id, owner, file.filename, file.purpose, file.bytes, file.created_at, file.expires_at),
    )


def find(db: sqlite3.Connection, id: str, owner: str | None, now: float) -> FileObject | None:
    """Return a file; None if there is none, or not of this owner (None = anybody)."""
    row = db.execute(
        "SELECT * FROM files WHERE id = ? AND owner = coalesce(?, owner) AND coalesce(expires_at > ?, TRUE)",
        (id, owner, now),
    ).fetchone()
    return None if row is None else _file_of(row)


def page(
    db: sqlite3.Connection, part: Page, owner: str | None, now: float, purpose: str | None
) -> list[FileObject] | None:
    """Return one entry more than the page has, if there are more; None if there is no file `after`."""
    seq = None
    if part.after is not None:
        found = db.execute("SELECT seq FROM files WHERE id = ? AND owner = coalesce(?, owner)", (part.after, owner))
        if (row := found.fetchone()) is None:
            return None
        [seq] = row
    sign, order = ("<", "DESC") if part.order == "desc" else (">", "ASC")
    rows = db.execute(
        "SELECT * FROM files WHERE owner = coalesce(?, owner) AND coalesce(expires_at > ?, TRUE) "
        f"AND purpose = coalesce(?, purpose) AND coalesce(seq {sign} ?, TRUE) ORDER BY seq {order} LIMIT ?",
        (owner, now, purpose, seq, part.limit + 1),
    )
    return [_file_of(row) for row in rows]


def delete(db: sqlite3.Connection, id: str, owner: str | None, now: float) -> bool:
    """Delete a row and return whether there was one. Raises FileInUse."""
    if find(db, id, owner, now) is None:
        return False
    if (row := db.execute(_IN_USE, (id,)).fetchone()) is not None:
        raise FileInUse(f"the file is the input of batch {row['id']}, which is {row['status']}; cancel the batch first")
    db.execute("DELETE FROM files WHERE id = ?", (id,))
    return True


def delete_expired(db: sqlite3.Connection, now: float) -> list[str]:
    """Delete the rows of files whose time is over and that no batch reads; return their ids."""
    rows = db.execute("SELECT id FROM files WHERE expires_at <= ?", (now,)).fetchall()
    ids = [row["id"] for row in rows if db.execute(_IN_USE, (row["id"],)).fetchone() is None]
    db.executemany("DELETE FROM files WHERE id = ?", [(id,) for id in ids])
    return ids


def without_row(db: sqlite3.Connection, names: Sequence[str]) -> list[str]:
    """Return the names that are no file's id."""
    return [name for name in names if db.execute("SELECT 1 FROM files WHERE id = ?", (name,)).fetchone() is None]


def _file_of(row: sqlite3.Row) -> FileObject:
    columns = ("id", "bytes", "created_at", "expires_at", "filename", "purpose")
    return FileObject.model_validate({name: row[name] for name in columns})
