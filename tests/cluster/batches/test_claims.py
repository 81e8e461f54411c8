"""Claims and leases: whatever workers do and wherever they are lost, every line is recorded exactly once."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from cluster.batches import batches, files
from cluster.batches import database as database_module
from cluster.batches.batches import LEASE_S, Claim, LineAnswer
from cluster.batches.database import BatchDatabase
from cluster.errors import HttpError
from secateur.batches_api import CreateBatchRequest, FileObject

NUM_LINES, MODEL = 40, "model"


def created(db: sqlite3.Connection) -> str:
    """Return the id of a new batch."""
    file = FileObject(id=f"file-{random.random()}", bytes=1, created_at=0, filename="a", purpose="batch")
    files.insert(db, file, "")
    body = CreateBatchRequest(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    batch = batches.create(db, body, None, MODEL, 0.0)
    assert batch.status == "validating"
    return batch.id


def started(db: sqlite3.Connection, num_lines: int = NUM_LINES) -> str:
    """Return the id of a batch in progress."""
    id = created(db)
    claim = batches.claim(db, "validator", MODEL, 0.0, ["validating"])
    assert claim is not None and claim.batch.id == id
    batches.start(db, claim, num_lines, 0.0)
    return id


def claimed(db: sqlite3.Connection, worker: str, now: float = 0.0, model: str = MODEL) -> Claim | None:
    """Claim a batch that is to be answered."""
    return batches.claim(db, worker, model, now, ["in_progress"])


@pytest.mark.parametrize("seed", range(8))
async def test_every_line_is_recorded_once(database: BatchDatabase, seed: int) -> None:
    """Workers claim, answer, hang, come back, die and are replaced in a random order."""
    rng, now = random.Random(seed), 0.0
    batch_id = await database.run(started)
    held: dict[str, tuple[Claim, list[int]] | None] = {"w0": None, "w1": None, "w2": None}
    recorded: list[tuple[int, str]] = []
    for step in range(10_000):
        worker = rng.choice(list(held))
        now += rng.choice([0.0, 1.0, LEASE_S / 2])
        match rng.choice(["claim", "claim", "renew", "record", "record", "lose", "release", "die"]), held[worker]:
            case "claim", None:
                if claim := await database.run(claimed, worker, now):
                    done = await database.run(batches.answered, batch_id)
                    held[worker] = claim, [n for n in range(1, NUM_LINES + 1) if n not in done]
            case "renew", (claim, _):
                await database.run(batches.renew, claim, now)
            case "record", (claim, [number, *rest]):  # perhaps long after the lease
                answer = LineAnswer(number, f"{worker} {step}", number % 3 == 0)
                is_held = await database.run(batches.record, claim, answer, now)
                held[worker] = (claim, rest) if is_held else None
                recorded += [(number, answer.text)] if is_held else []
            case "lose", (claim, [number, *_]):
                await database.run(batches.lose, claim, number)
            case "release", (claim, _):
                await database.run(batches.release, claim)
                held[worker] = None
            case "die", _:
                del held[worker]
                held[f"w{step}"] = None
        if len(recorded) == NUM_LINES:
            break
    assert sorted(number for number, _ in recorded) == list(range(1, NUM_LINES + 1))
    with database.reader() as db:
        stored = db.execute("SELECT number, answer FROM lines ORDER BY number").fetchall()
    assert stored == sorted(recorded)
    batch = await database.run(batches.find, batch_id, None)
    assert batch.status == "finalizing" and batches.is_answered(batch)
    counts = batch.request_counts
    assert (counts.total, counts.failed, counts.completed) == (NUM_LINES, NUM_LINES // 3, NUM_LINES - NUM_LINES // 3)
    assert await database.run(claimed, "w", now + 2 * LEASE_S) is None


async def test_a_batch_has_one_worker_until_the_lease_ends(database: BatchDatabase) -> None:
    await database.run(started, 3)
    mine = await database.run(claimed, "a")
    assert mine is not None and await database.run(claimed, "b", LEASE_S) is None
    assert await database.run(batches.renew, mine, LEASE_S)
    assert await database.run(claimed, "b", LEASE_S + 1) is None
    theirs = await database.run(claimed, "b", 2 * LEASE_S + 1)
    assert theirs is not None and not await database.run(batches.renew, mine, 2 * LEASE_S + 1)
    assert not await database.run(batches.record, mine, LineAnswer(1, "late", False), 2 * LEASE_S + 2)
    assert await database.run(batches.lose, mine, 1) == 0 and await database.run(batches.lose, theirs, 1) == 1
    assert await database.run(batches.record, theirs, LineAnswer(1, "right", False), 2 * LEASE_S + 2)
    await database.run(batches.release, mine)
    assert await database.run(claimed, "c", 2 * LEASE_S + 2) is None, "it was not this worker's any more"
    assert await database.run(batches.answered, mine.batch.id) == {1}


async def test_nothing_is_recorded_once_a_batch_is_being_cancelled(database: BatchDatabase) -> None:
    batch_id = await database.run(started, 2)
    claim = await database.run(claimed, "a")
    await database.run(batches.cancel, batch_id, None, 1.0)
    assert not await database.run(batches.record, claim, LineAnswer(1, "late", False), 2.0)
    assert not await database.run(batches.renew, claim, 2.0) and await database.run(claimed, "b", 2.0) is None


async def test_a_batch_with_all_answers_cannot_be_cancelled(database: BatchDatabase) -> None:
    batch_id = await database.run(started, 2)
    claim = await database.run(claimed, "a")
    for number in (1, 2):
        assert await database.run(batches.record, claim, LineAnswer(number, "", False), 1.0)
    with pytest.raises(HttpError, match="finalizing"):
        await database.run(batches.cancel, batch_id, None, 2.0)


async def test_a_lost_validator_cannot_start_the_batch(database: BatchDatabase) -> None:
    id = await database.run(created)
    old = await database.run(batches.claim, "a", MODEL, 0.0, ["validating"])
    new = await database.run(batches.claim, "b", MODEL, LEASE_S + 1, ["validating"])
    assert new is not None
    await database.run(batches.start, old, 1, 1.0)
    await database.run(batches.fail, old, [], 1.0)
    assert (await database.run(batches.find, id, None)).status == "validating"
    await database.run(batches.start, new, 2, 1.0)
    batch = await database.run(batches.find, id, None)
    assert (batch.status, batch.request_counts.total) == ("in_progress", 2)


async def test_a_batch_waits_for_its_model_and_anybody_ends_it(database: BatchDatabase) -> None:
    batch_id = await database.run(started, 2)
    assert await database.run(claimed, "other", model="another model") is None
    await database.run(batches.cancel, batch_id, None, 1.0)
    everything = ["validating", "in_progress", "finalizing", "cancelling"]
    ending = await database.run(batches.claim, "other", "another model", 1.0, everything)
    assert ending is not None and ending.batch.id == batch_id
    await database.run(created)
    assert await database.run(batches.claim, "other", "another model", 1.0, everything) is None
    assert await database.run(batches.claim, "own", MODEL, 1.0, everything) is not None


async def test_a_transaction_that_fails_changes_nothing(database: BatchDatabase) -> None:
    await database.run(started, 2)

    def breaks(db: sqlite3.Connection) -> None:
        assert claimed(db, "a") is not None
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        await database.run(breaks)
    assert await database.run(claimed, "b") is not None


async def test_a_long_read_keeps_no_transaction_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "BUSY_S", 0.1)
    database = BatchDatabase(tmp_path / "batches.sqlite3")
    await database.open()
    for _ in range(3):
        await database.run(created)
    with database.reader() as db:
        rows = db.execute("SELECT id FROM batches")
        assert next(rows)
        await database.run(created)
    await database.close()


async def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "other.sqlite3") as other:
        other.execute("PRAGMA user_version = 9")
    other.close()
    with pytest.raises(RuntimeError, match="version 9, this service reads 2; name another folder"):
        await BatchDatabase(tmp_path / "other.sqlite3").open()
