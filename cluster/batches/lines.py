"""The lines of batches: claims, and answers that are recorded once.

A worker claims lines, answers them, and records the answers. Only the worker that holds the claim can record, and a
recorded line cannot be claimed again, so every line has exactly one answer, whichever workers were lost on the way.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from cluster.batches import batches
from cluster.batches.batches import BatchClaim
from cluster.batches.input_lines import InputLine
from secateur.batches_api import InvalidLine


class LineClaim(NamedTuple):
    """A line that a worker answers."""

    batch_id: str
    number: int
    custom_id: str
    owner: str
    endpoint: str
    input_file_id: str
    offset: int
    length: int
    num_losses: int


class LineAnswer(NamedTuple):
    """A line of the output file, or of the error file, without its end."""

    line: LineClaim
    text: str
    is_error: bool


class StoredLine(NamedTuple):
    """A line of a batch that is about to end; `text` is None if it has no answer."""

    number: int
    custom_id: str
    text: str | None
    is_error: bool


def add(db: sqlite3.Connection, batch: BatchClaim, worker: str, found: Sequence[InputLine]) -> list[InvalidLine] | None:
    """Add valid lines. Returns the problems, custom_ids that the batch has already, or None if the claim is lost."""
    if not batches.is_claimed(db, batch, worker):
        return None
    problems = []
    for line in found:
        added = db.execute(
            "INSERT INTO lines (batch_id, number, custom_id, offset, length) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT DO NOTHING",
            (batch.id, line.number, line.custom_id, line.offset, line.length),
        )
        if not added.rowcount:
            message = (
                f"The custom_id {line.custom_id!r} for this request is a duplicate of another request. The custom_id "
                "parameter must be unique for each request in a batch."
            )
            problems.append(
                InvalidLine(code="duplicate_custom_id", message=message, param="custom_id", line=line.number)
            )
    return problems


def claim(db: sqlite3.Connection, worker: str, model: str, limit: int) -> list[LineClaim]:
    """Claim up to `limit` lines of batches that were sent to this model, those of the oldest batch first."""
    found: list[LineClaim] = []
    open_batches = db.execute(
        "SELECT id, owner, endpoint, input_file_id FROM batches "
        "WHERE status = 'in_progress' AND model = ? ORDER BY seq",
        (model,),
    )
    for batch in open_batches.fetchall():
        rows = db.execute(
            "SELECT number, custom_id, offset, length, num_losses FROM lines "
            "WHERE batch_id = ? AND answer IS NULL AND worker IS NULL ORDER BY number LIMIT ?",
            (batch["id"], limit - len(found)),
        )
        for number, custom_id, offset, length, num_losses in rows:
            place = (batch["endpoint"], batch["input_file_id"], offset, length)
            found.append(LineClaim(batch["id"], number, custom_id, batch["owner"], *place, num_losses))
        if len(found) == limit:
            break
    db.executemany(
        "UPDATE lines SET worker = ? WHERE batch_id = ? AND number = ?",
        [(worker, line.batch_id, line.number) for line in found],
    )
    return found


def release(db: sqlite3.Connection, worker: str, claims: Iterable[LineClaim], *, is_loss: bool) -> None:
    """Let other workers have lines; `is_loss`: an engine was lost with them."""
    db.executemany(
        "UPDATE lines SET worker = NULL, num_losses = num_losses + ? WHERE batch_id = ? AND number = ? AND worker = ?",
        [(int(is_loss), line.batch_id, line.number, worker) for line in claims],
    )


def settle(
    db: sqlite3.Connection,
    worker: str,
    answers: Sequence[LineAnswer],
    returned: Mapping[bool, Sequence[LineClaim]],
    now: float,
) -> list[LineAnswer]:
    """Record answers, and release lines by whether they are losses; return what `record` does."""
    recorded = record(db, worker, answers, now)
    for is_loss, claims in returned.items():
        release(db, worker, claims, is_loss=is_loss)
    return recorded


def record(db: sqlite3.Connection, worker: str, answers: Sequence[LineAnswer], now: float) -> list[LineAnswer]:
    """Record answers and return them, but for those whose claim was lost or whose batch is no longer in progress."""
    recorded = []
    for answer in answers:
        line = answer.line
        done = db.execute(
            "UPDATE lines SET answer = ?, is_error = ?, worker = NULL WHERE batch_id = ? AND number = ? AND worker = ? "
            "AND answer IS NULL AND (SELECT status FROM batches WHERE id = batch_id) = 'in_progress'",
            (answer.text, int(answer.is_error), line.batch_id, line.number, worker),
        )
        if done.rowcount:
            recorded.append(answer)
            column = "failed" if answer.is_error else "completed"
            db.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", (line.batch_id,))
    batches.end_answered(db, now)
    return recorded


def stored(db: sqlite3.Connection, batch_id: str, after: int, max_chars: int) -> list[StoredLine]:
    """Return the next lines of a batch, by number, until they have `max_chars` characters."""
    rows: Iterator[sqlite3.Row] = db.execute(
        "SELECT number, custom_id, answer, is_error FROM lines WHERE batch_id = ? AND number > ? ORDER BY number",
        (batch_id, after),
    )
    found: list[StoredLine] = []
    num_chars = 0
    for row in rows:
        found.append(StoredLine(row["number"], row["custom_id"], row["answer"], bool(row["is_error"])))
        num_chars += len(row["answer"] or "") + 64
        if num_chars >= max_chars:
            break
    return found
