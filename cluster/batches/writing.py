"""Validates batches and writes the files of batches that end. Everything is read and written line by line."""

from __future__ import annotations

import asyncio
import heapq
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from cluster.batches import batches
from cluster.batches.answer_lines import unanswered
from cluster.batches.batches import Claim, LineAnswer
from cluster.batches.database import BatchDatabase
from cluster.batches.files import FileFolder
from cluster.batches.input_lines import BadLine, check, requests_in
from secateur.batches_api import BatchObject, FileObject, InvalidLine

MAX_PROBLEMS = 100
"""How many wrong lines a batch names."""
MISSING = InvalidLine(
    code="missing_file",
    message="The content of the input file is missing or has changed; upload it again.",
    param="input_file_id",
)
_NOT_ANSWERED = {
    "batch_cancelled": "This request was not executed because the batch was cancelled.",
    "batch_expired": "This request could not be executed before the completion window expired.",
}


async def validate(database: BatchDatabase, folder: FileFolder, claim: Claim, models: Sequence[str]) -> None:
    """Check the input of a batch; start it, or end it with the list of wrong lines."""
    batch = claim.batch
    try:
        path = folder.path(batch.input_file_id)
        found = await asyncio.to_thread(check, path, batch.endpoint, models, MAX_PROBLEMS)
    except FileNotFoundError:
        found = [MISSING]
    if isinstance(found, int):
        await database.run(batches.start, claim, found, time.time())
        return
    if len(found) > MAX_PROBLEMS:
        more = InvalidLine(code="too_many_errors", message=f"These are the first {MAX_PROBLEMS} errors of more.")
        found = [*found[:MAX_PROBLEMS], more]
    await database.run(batches.fail, claim, found, time.time())


async def write_files(database: BatchDatabase, folder: FileFolder, claim: Claim) -> None:
    """Write the output and the error file of a batch, in the order of its input, and end it."""
    drafts = folder.draft_path(), folder.draft_path()
    try:
        await asyncio.to_thread(_write, database, folder, claim.batch, drafts)
        output, errors = [
            await asyncio.to_thread(_keep, folder, draft, f"{claim.batch.id}_{kind}.jsonl", claim.output_seconds)
            for draft, kind in zip(drafts, ("output", "error"), strict=True)
        ]
        if not await database.run(batches.finish, claim, output, errors, time.time()):
            folder.delete(file.id for file in (output, errors) if file is not None)
    finally:  # after an error, the files may belong to the batch all the same; if not, `sweep` deletes them
        for draft in drafts:
            draft.unlink(missing_ok=True)


def _write(database: BatchDatabase, folder: FileFolder, batch: BatchObject, drafts: tuple[Path, Path]) -> None:
    output, errors = drafts
    with (
        output.open("w", encoding="utf-8", newline="") as good,
        errors.open("w", encoding="utf-8", newline="") as bad,
        database.reader() as db,
    ):
        rows = db.execute(
            "SELECT number, answer, is_error FROM lines WHERE batch_id = ? AND answer IS NOT NULL ORDER BY number",
            (batch.id,),
        )
        has_all = batches.is_answered(batch) or batch.in_progress_at is None
        for _, text, is_error in heapq.merge(rows, () if has_all else _missing(folder, batch, db)):
            (bad if is_error else good).write(f"{text}\n")


def _missing(folder: FileFolder, batch: BatchObject, db: sqlite3.Connection) -> Iterator[LineAnswer]:
    """Yield an error for each request without an answer."""
    code = "batch_cancelled" if batch.status == "cancelling" else "batch_expired"
    with suppress(FileNotFoundError, BadLine):
        for request in requests_in(folder.path(batch.input_file_id), batches.answered(db, batch.id)):
            yield LineAnswer(request.number, unanswered(request.custom_id, code, _NOT_ANSWERED[code]), is_error=True)


def _keep(folder: FileFolder, draft: Path, filename: str, seconds: int | None) -> FileObject | None:
    """Keep what has been written; None if there is nothing."""
    return folder.keep(draft, filename, "batch_output", seconds) if draft.stat().st_size else None
