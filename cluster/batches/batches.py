"""The rows of batches, their claims, and the answers to their lines.

A batch is `validating`, then `in_progress` until every line has an answer, then `finalizing` while its files are
written. One worker at a time has it: a replica's runner that validates it, answers its lines, or writes its files. The
claim ends when the status changes, or when its lease has ended and another worker takes the batch. Only the worker that
has a batch records answers, and it answers only lines without one, so every line has exactly one answer.

A batch that expires becomes `finalizing` without all answers; a cancelled one is `cancelling` until its files are
written.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from cluster.batches import files
from cluster.batches.database import Page, find_page, find_row
from cluster.errors import BadRequest, HttpError
from secateur.batches_api import (
    BatchList,
    BatchObject,
    BatchStatus,
    CreateBatchRequest,
    FileObject,
    InvalidLine,
    InvalidLines,
    RequestCounts,
)
from secateur.responses import ErrorResponse, new_id

LEASE_S = 10.0
"""A worker that has not renewed its lease for this long is lost."""
WINDOW_S = 24 * 3600


class Claim(NamedTuple):
    """A batch, as it was when a worker claimed it; its status says what the worker does."""

    batch: BatchObject
    worker: str
    owner: str
    output_seconds: int | None


class LineAnswer(NamedTuple):
    """A line of the output file, or of the error file, without its end."""

    number: int
    """The line's number in the input, from 1."""
    text: str
    is_error: bool


def create(db: sqlite3.Connection, body: CreateBatchRequest, owner: str | None, model: str, now: float) -> BatchObject:
    """Add a batch. Raises HttpError (404), BadRequest."""
    file = files.find(db, body.input_file_id, owner, now, param="input_file_id")
    if file.purpose != "batch":
        message = f"the file has the purpose {file.purpose!r}; upload the requests with purpose 'batch'"
        raise BadRequest(message, param="input_file_id")
    id = new_id("batch").replace("-", "_")
    batch = BatchObject(
        id=id,
        endpoint=body.endpoint,
        model=model,
        input_file_id=file.id,
        completion_window=body.completion_window,
        status="validating",
        created_at=int(now),
        expires_at=int(now) + WINDOW_S,
        request_counts=RequestCounts(),
        metadata=body.metadata,
    )
    output_seconds = None if body.output_expires_after is None else body.output_expires_after.seconds
    db.execute(
        "INSERT INTO batches (id, owner, model, input_file_id, output_seconds, expires_at, status, object) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            batch.id,
            owner or "",
            model,
            file.id,
            output_seconds,
            batch.expires_at,
            batch.status,
            batch.model_dump_json(),
        ),
    )
    return batch


def find(db: sqlite3.Connection, id: str, owner: str | None) -> BatchObject:
    """Return a batch of this owner (None = anybody). Raises HttpError (404)."""
    return _batch_of(find_row(db, "batches", id, owner))


def page(db: sqlite3.Connection, part: Page, owner: str | None) -> BatchList:
    """Return a page of batches. Raises HttpError (404)."""
    found = find_page(db, "batches", part, owner)
    return BatchList.page([BatchObject.model_validate_json(each) for each in found], part.limit)


def cancel(db: sqlite3.Connection, id: str, owner: str | None, now: float) -> BatchObject:
    """Begin to cancel a batch. Raises HttpError (404, 409)."""
    batch = find(db, id, owner)
    if batch.status in ("validating", "in_progress"):
        return _change(db, batch, status="cancelling", cancelling_at=int(now))
    if batch.status != "cancelling":
        message = f"cannot cancel a batch with status {batch.status!r}"
        raise HttpError(HTTPStatus.CONFLICT, ErrorResponse.of(message, code="batch_not_cancellable"))
    return batch


def claim(db: sqlite3.Connection, worker: str, model: str, now: float, statuses: Sequence[BatchStatus]) -> Claim | None:
    """Claim the oldest batch with one of these statuses that nobody has; end batches whose time is over.

    Only workers of its model validate and answer a batch; any worker writes its files.
    """
    expired = "SELECT object FROM batches WHERE status IN ('validating', 'in_progress') AND expires_at <= ?"
    for row in db.execute(expired, (now,)).fetchall():
        _change(db, _batch_of(row), status="finalizing", finalizing_at=int(now))
    row = db.execute(
        f"SELECT * FROM batches WHERE status IN ({', '.join('?' * len(statuses))}) "
        "AND (worker IS NULL OR lease_until < ?) "
        "AND (model = ? OR status IN ('finalizing', 'cancelling')) ORDER BY seq LIMIT 1",
        (*statuses, now, model),
    ).fetchone()
    if row is None:
        return None
    found = Claim(_batch_of(row), worker, row["owner"], row["output_seconds"])
    db.execute("UPDATE batches SET worker = ? WHERE id = ?", (worker, row["id"]))
    renew(db, found, now)
    return found


def renew(db: sqlite3.Connection, claim: Claim, now: float) -> bool:
    """Renew a lease; return whether the worker still has the batch."""
    done = db.execute(
        "UPDATE batches SET lease_until = ? WHERE id = ? AND worker = ? AND status = ?",
        (now + LEASE_S, claim.batch.id, claim.worker, claim.batch.status),
    )
    return done.rowcount > 0


def release(db: sqlite3.Connection, claim: Claim) -> None:
    """Let other workers have a batch."""
    db.execute("UPDATE batches SET worker = NULL WHERE id = ? AND worker = ?", (claim.batch.id, claim.worker))


def start(db: sqlite3.Connection, claim: Claim, num_lines: int, now: float) -> None:
    """Let a valid batch be answered."""
    if batch := _held(db, claim):
        _change(db, batch, status="in_progress", in_progress_at=int(now), request_counts=RequestCounts(total=num_lines))


def fail(db: sqlite3.Connection, claim: Claim, errors: Sequence[InvalidLine], now: float) -> None:
    """End a batch whose input is wrong."""
    if batch := _held(db, claim):
        _change(db, batch, status="failed", failed_at=int(now), errors=InvalidLines(data=list(errors)))
        db.execute("DELETE FROM lines WHERE batch_id = ?", (batch.id,))


def answered(db: sqlite3.Connection, batch_id: str) -> set[int]:
    """Return the numbers of the lines that have an answer."""
    rows = db.execute("SELECT number FROM lines WHERE batch_id = ? AND answer IS NOT NULL", (batch_id,))
    return {number for (number,) in rows}


def record(db: sqlite3.Connection, claim: Claim, answer: LineAnswer, now: float) -> bool:
    """Record an answer, of which the last ends the batch; return False if the claim has been lost."""
    if not (batch := _held(db, claim)):
        return False
    db.execute(
        "INSERT INTO lines (batch_id, number, answer, is_error) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (batch_id, number) DO UPDATE SET answer = excluded.answer, is_error = excluded.is_error",
        (batch.id, answer.number, answer.text, answer.is_error),
    )
    counts = batch.request_counts
    if answer.is_error:
        counts.failed += 1
    else:
        counts.completed += 1
    if is_answered(batch):
        _change(db, batch, status="finalizing", finalizing_at=int(now))
    else:
        _change(db, batch)
    return True


def lose(db: sqlite3.Connection, claim: Claim, number: int) -> int:
    """Count that an engine was lost with a line; return how often that has happened. 0 = the claim has been lost."""
    if not _held(db, claim):
        return 0
    db.execute(
        "INSERT INTO lines (batch_id, number, num_losses) VALUES (?, ?, 1) "
        "ON CONFLICT (batch_id, number) DO UPDATE SET num_losses = num_losses + 1",
        (claim.batch.id, number),
    )
    row = db.execute("SELECT num_losses FROM lines WHERE batch_id = ? AND number = ?", (claim.batch.id, number))
    [num_losses] = row.fetchone()
    return num_losses


def finish(
    db: sqlite3.Connection, claim: Claim, output: FileObject | None, errors: FileObject | None, now: float
) -> bool:
    """End a batch whose files are written; None = it has no such lines. Returns False if the claim has been lost."""
    if not (batch := _held(db, claim)):
        return False
    for file in (output, errors):
        if file is not None:
            files.insert(db, file, claim.owner)
    ended = "completed" if is_answered(batch) else "expired"
    status = "cancelled" if batch.status == "cancelling" else ended
    made = {"output_file_id": output and output.id, "error_file_id": errors and errors.id}
    _change(db, batch, status=status, **{f"{status}_at": int(now)}, **made)
    db.execute("DELETE FROM lines WHERE batch_id = ?", (batch.id,))
    return True


def is_answered(batch: BatchObject) -> bool:
    """Return whether a batch has begun and every line has an answer."""
    counts = batch.request_counts
    return batch.in_progress_at is not None and counts.completed + counts.failed == counts.total


def _held(db: sqlite3.Connection, claim: Claim) -> BatchObject | None:
    """Return a claimed batch as it is now; None if it has another status or worker."""
    row = db.execute(
        "SELECT object FROM batches WHERE id = ? AND worker = ? AND status = ?",
        (claim.batch.id, claim.worker, claim.batch.status),
    ).fetchone()
    return None if row is None else _batch_of(row)


def _change(db: sqlite3.Connection, batch: BatchObject, **fields: Any) -> BatchObject:
    """Save a batch with other values of these fields. A new status ends its worker's claim."""
    new = batch.model_copy(update=fields)
    db.execute(
        "UPDATE batches SET worker = iif(status = ?1, worker, NULL), status = ?1, object = ?2 WHERE id = ?3",
        (new.status, new.model_dump_json(), new.id),
    )
    return new


def _batch_of(row: sqlite3.Row) -> BatchObject:
    return BatchObject.model_validate_json(row["object"])
