"""The rows of batches, and who works on them.

A batch is `validating`, then `in_progress` until every line has an answer, then `finalizing` while its files are
written. One worker at a time validates a batch or writes its files; the lines are shared among all (`lines`). A batch
that expires becomes `finalizing` with `expired_at`; a cancelled one is `cancelling` until its files are written.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from cluster.batches import files
from cluster.batches.files import Page
from secateur.batches_api import BatchObject, CreateBatchRequest, FileObject, InvalidLine, RequestCounts
from secateur.responses import new_id

LEASE_S = 10.0
"""A worker that has not renewed its lease for this long is lost."""
WINDOW_S = 24 * 3600
_COLUMNS = BatchObject.model_fields.keys() - {"object", "errors", "request_counts", "metadata"}


class NotCancellable(Exception):
    """The batch has ended, or is about to."""


class WrongPurpose(Exception):
    """The file is no input."""


class BatchClaim(NamedTuple):
    """A batch that a worker validates (`status` is validating), or whose files it writes."""

    id: str
    owner: str
    status: str
    endpoint: str
    input_file_id: str
    was_started: bool
    is_expired: bool
    output_seconds: int | None


def create(
    db: sqlite3.Connection, body: CreateBatchRequest, owner: str | None, model: str, now: float
) -> BatchObject | None:
    """Add a batch; None if there is no such input file. Raises WrongPurpose."""
    if (file := files.find(db, body.input_file_id, owner, now)) is None:
        return None
    if file.purpose != "batch":
        raise WrongPurpose(f"the file has the purpose {file.purpose!r}; upload the requests with purpose 'batch'")
    id, expires = new_id("batch").replace("-", "_"), body.output_expires_after
    db.execute(
        "INSERT INTO batches (id, owner, endpoint, model, input_file_id, completion_window, status, metadata, "
        "output_seconds, created_at, expires_at) VALUES (?, ?, ?, ?, ?, ?, 'validating', ?, ?, ?, ?)",
        (
            id,
            owner or "",
            body.endpoint,
            model,
            body.input_file_id,
            body.completion_window,
            None if body.metadata is None else json.dumps(body.metadata),
            None if expires is None else expires.seconds,
            int(now),
            int(now) + WINDOW_S,
        ),
    )
    return _batch_of(db.execute("SELECT * FROM batches WHERE id = ?", (id,)).fetchone())


def find(db: sqlite3.Connection, id: str, owner: str | None) -> BatchObject | None:
    """Return a batch; None if there is none, or not of this owner (None = anybody)."""
    row = db.execute("SELECT * FROM batches WHERE id = ? AND owner = coalesce(?, owner)", (id, owner)).fetchone()
    return None if row is None else _batch_of(row)


def page(db: sqlite3.Connection, part: Page, owner: str | None) -> list[BatchObject] | None:
    """Return one entry more than the page has, if there are more; None if there is no batch `after`."""
    seq = None
    if part.after is not None:
        found = db.execute("SELECT seq FROM batches WHERE id = ? AND owner = coalesce(?, owner)", (part.after, owner))
        if (row := found.fetchone()) is None:
            return None
        [seq] = row
    rows = db.execute(
        "SELECT * FROM batches WHERE owner = coalesce(?, owner) AND coalesce(seq < ?, TRUE) ORDER BY seq DESC LIMIT ?",
        (owner, seq, part.limit + 1),
    )
    return [_batch_of(row) for row in rows]


def cancel(db: sqlite3.Connection, id: str, owner: str | None, now: float) -> BatchObject | None:
    """Begin to cancel a batch; None if there is none. Raises NotCancellable."""
    if (batch := find(db, id, owner)) is None:
        return None
    if batch.status not in ("validating", "in_progress", "cancelling"):
        raise NotCancellable(f"cannot cancel a batch with status {batch.status!r}")
    db.execute(
        "UPDATE batches SET status = 'cancelling', cancelling_at = ?, worker = NULL "
        "WHERE id = ? AND status IN ('validating', 'in_progress')",
        (int(now), id),
    )
    return find(db, id, owner)


def keep_alive(db: sqlite3.Connection, worker: str, now: float) -> set[str]:
    """Renew a worker's lease, free what lost workers had, end batches whose time is over or whose lines are answered.

    Returns the ids of the batches in progress.
    """
    db.execute(
        "INSERT INTO workers VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET lease_until = excluded.lease_until",
        (worker, now + LEASE_S),
    )
    for row in db.execute("SELECT id FROM workers WHERE lease_until < ?", (now,)).fetchall():
        db.execute("UPDATE lines SET num_losses = num_losses + 1 WHERE worker = ?", (row["id"],))
        retire(db, row["id"])
    db.execute(
        "UPDATE batches SET status = 'finalizing', finalizing_at = :now, expired_at = :now, worker = NULL "
        "WHERE status IN ('validating', 'in_progress') AND expires_at <= :now",
        {"now": int(now)},
    )
    end_answered(db, now)
    return {row["id"] for row in db.execute("SELECT id FROM batches WHERE status = 'in_progress'")}


def end_answered(db: sqlite3.Connection, now: float) -> None:
    """Begin to finalize the batches whose lines have all been answered."""
    db.execute(
        "UPDATE batches SET status = 'finalizing', finalizing_at = ? "
        "WHERE status = 'in_progress' AND completed + failed = total",
        (int(now),),
    )


def release(db: sqlite3.Connection, batch: BatchClaim, worker: str) -> None:
    """Let another worker have a batch."""
    db.execute("UPDATE batches SET worker = NULL WHERE id = ? AND worker = ?", (batch.id, worker))


def retire(db: sqlite3.Connection, worker: str) -> None:
    """Free all that a worker had claimed."""
    db.execute("UPDATE lines SET worker = NULL WHERE worker = ?", (worker,))
    db.execute("UPDATE batches SET worker = NULL WHERE worker = ?", (worker,))
    db.execute("DELETE FROM workers WHERE id = ?", (worker,))


def claim(db: sqlite3.Connection, worker: str, model: str) -> BatchClaim | None:
    """Claim the oldest batch of a model that nobody validates, or of any model whose files nobody writes.

    The lines of an earlier validation are gone.
    """
    row = db.execute(
        "SELECT * FROM batches WHERE status IN ('validating', 'finalizing', 'cancelling') AND worker IS NULL "
        "AND (model = ? OR status != 'validating') ORDER BY seq LIMIT 1",
        (model,),
    ).fetchone()
    if row is None:
        return None
    db.execute("UPDATE batches SET worker = ? WHERE id = ?", (worker, row["id"]))
    if row["in_progress_at"] is None:
        db.execute("DELETE FROM lines WHERE batch_id = ?", (row["id"],))
    return BatchClaim(
        id=row["id"],
        owner=row["owner"],
        status=row["status"],
        endpoint=row["endpoint"],
        input_file_id=row["input_file_id"],
        was_started=row["in_progress_at"] is not None,
        is_expired=row["expired_at"] is not None,
        output_seconds=row["output_seconds"],
    )


def is_claimed(db: sqlite3.Connection, batch: BatchClaim, worker: str) -> bool:
    """Return whether a claim still holds: the batch has the status that it had, and the worker was not lost."""
    found = db.execute(
        "SELECT 1 FROM batches WHERE id = ? AND worker = ? AND status = ?", (batch.id, worker, batch.status)
    )
    return found.fetchone() is not None


def start(db: sqlite3.Connection, batch: BatchClaim, worker: str, now: float) -> None:
    """Begin to answer the lines of a valid batch."""
    if is_claimed(db, batch, worker):
        db.execute(
            "UPDATE batches SET status = 'in_progress', in_progress_at = ?, worker = NULL, "
            "total = (SELECT count(*) FROM lines WHERE batch_id = id) WHERE id = ?",
            (int(now), batch.id),
        )


def fail(db: sqlite3.Connection, batch: BatchClaim, worker: str, errors: Sequence[InvalidLine], now: float) -> None:
    """End a batch whose input is wrong."""
    if is_claimed(db, batch, worker):
        db.execute(
            "UPDATE batches SET status = 'failed', failed_at = ?, worker = NULL, errors = ? WHERE id = ?",
            (int(now), json.dumps([error.model_dump() for error in errors]), batch.id),
        )
        db.execute("DELETE FROM lines WHERE batch_id = ?", (batch.id,))


def finish(
    db: sqlite3.Connection,
    batch: BatchClaim,
    worker: str,
    output: FileObject | None,
    errors: FileObject | None,
    now: float,
) -> bool:
    """End a batch whose files are written; None = it has no such lines. Returns False if the claim has been lost."""
    if not is_claimed(db, batch, worker):
        return False
    for file in (output, errors):
        if file is not None:
            files.insert(db, file, batch.owner)
    status = "cancelled" if batch.status == "cancelling" else "expired" if batch.is_expired else "completed"
    db.execute(
        "UPDATE batches SET status = :status, output_file_id = :output, error_file_id = :errors, worker = NULL, "
        "cancelled_at = iif(:status = 'cancelled', :now, NULL), completed_at = iif(:status = 'completed', :now, NULL), "
        "expired_at = iif(:status = 'expired', :now, NULL) WHERE id = :id",
        {
            "status": status,
            "output": output and output.id,
            "errors": errors and errors.id,
            "now": int(now),
            "id": batch.id,
        },
    )
    db.execute("DELETE FROM lines WHERE batch_id = ?", (batch.id,))
    return True


def _batch_of(row: sqlite3.Row) -> BatchObject:
    fields = {name: row[name] for name in _COLUMNS}
    if row["errors"] is not None:
        fields["errors"] = {"data": json.loads(row["errors"])}
    if row["status"] == "finalizing":
        fields["expired_at"] = None  # it is set while an expired batch's files are written
    counts = RequestCounts(total=row["total"], completed=row["completed"], failed=row["failed"])
    metadata = None if row["metadata"] is None else json.loads(row["metadata"])
    return BatchObject.model_validate({**fields, "request_counts": counts, "metadata": metadata})
