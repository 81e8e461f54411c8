"""Claims and leases: whatever workers do and wherever they are lost, every line is recorded exactly once."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from cluster.batches import batches, files, lines
from cluster.batches.batches import LEASE_S, BatchClaim
from cluster.batches.database import BatchDatabase
from cluster.batches.input_lines import InputLine
from cluster.batches.lines import LineAnswer, LineClaim
from secateur.batches_api import CreateBatchRequest, FileObject

NUM_LINES, MODEL = 40, "model"


@pytest.fixture
async def database(tmp_path: Path):
    opened = BatchDatabase(tmp_path / "batches.sqlite3")
    await opened.open()
    yield opened
    await opened.close()


def started(db: sqlite3.Connection, num_lines: int = NUM_LINES, now: float = 0.0) -> str:
    """Return the id of a batch in progress."""
    file = FileObject(id=f"file-{random.random()}", bytes=1, created_at=0, filename="a", purpose="batch")
    files.insert(db, file, "")
    body = CreateBatchRequest(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    batch = batches.create(db, body, None, MODEL, now)
    assert batch is not None and batch.status == "validating"
    claim = batches.claim(db, "validator", MODEL)
    assert claim is not None and claim.id == batch.id
    lines.add(db, claim, "validator", [InputLine(n, f"id-{n}", n, 1) for n in range(1, num_lines + 1)])
    batches.start(db, claim, "validator", now)
    return batch.id


def answer(line: LineClaim, text: str) -> LineAnswer:
    return LineAnswer(line, text, is_error=line.number % 3 == 0)


@pytest.mark.parametrize("seed", range(20))
async def test_every_line_is_recorded_once(database: BatchDatabase, seed: int) -> None:
    """Workers claim, answer, hang, come back, die and are replaced in a random order."""
    rng, now = random.Random(seed), 0.0
    batch_id = await database.run(started)
    held: dict[str, list[LineClaim]] = {"w0": [], "w1": [], "w2": []}
    recorded: list[tuple[int, str]] = []
    for step in range(10_000):
        worker = rng.choice(list(held))
        now += rng.choice([0.0, 1.0, LEASE_S / 2])
        match rng.choice(["beat", "claim", "claim", "record", "record", "return", "die"]):
            case "beat":
                await database.run(batches.keep_alive, worker, now)
            case "claim":
                await database.run(batches.keep_alive, worker, now)
                held[worker] += await database.run(lines.claim, worker, MODEL, rng.randint(1, 4))
            case "record" if held[worker]:  # perhaps long after the lease
                done = [answer(line, f"{worker} {step}") for line in held[worker][:2]]
                recorded += [
                    (each.line.number, each.text) for each in await database.run(lines.record, worker, done, now)
                ]
                held[worker] = held[worker][2:]
            case "return":
                returned = {False: held[worker][:1], True: held[worker][1:2]}
                await database.run(lines.settle, worker, [], returned, now)
                held[worker] = held[worker][2:]
            case "die":
                del held[worker]
                held[f"w{step}"] = []
        if len(recorded) == NUM_LINES:
            break
    assert sorted(number for number, _ in recorded) == list(range(1, NUM_LINES + 1))
    stored = await database.run(lines.stored, batch_id, 0, 1 << 20)
    assert [(line.number, line.text) for line in stored] == sorted(recorded)
    batch = await database.run(batches.find, batch_id, None)
    assert batch is not None and batch.status == "finalizing"
    counts = batch.request_counts
    assert (counts.total, counts.failed, counts.completed) == (NUM_LINES, NUM_LINES // 3, NUM_LINES - NUM_LINES // 3)
    assert await database.run(lines.claim, "w", MODEL, 5) == []


async def test_a_line_has_one_worker_until_the_lease_ends(database: BatchDatabase) -> None:
    await database.run(started, 3)
    await database.run(batches.keep_alive, "a", 0.0)
    mine = await database.run(lines.claim, "a", MODEL, 3)
    await database.run(batches.keep_alive, "b", LEASE_S)
    assert await database.run(lines.claim, "b", MODEL, 3) == []
    await database.run(batches.keep_alive, "b", LEASE_S + 1)
    theirs = await database.run(lines.claim, "b", MODEL, 3)
    assert [line.number for line in theirs] == [1, 2, 3] and {line.num_losses for line in theirs} == {1}
    assert await database.run(lines.record, "a", [answer(mine[0], "late")], LEASE_S + 2) == []
    assert len(await database.run(lines.record, "b", [answer(theirs[0], "right")], LEASE_S + 2)) == 1
    assert len(await database.run(lines.record, "b", [answer(theirs[0], "twice")], LEASE_S + 2)) == 0
    [first, *_] = await database.run(lines.stored, theirs[0].batch_id, 0, 1 << 20)
    assert first.text == "right"


async def test_nothing_is_recorded_once_a_batch_is_being_cancelled(database: BatchDatabase) -> None:
    batch_id = await database.run(started, 2)
    [line, _] = await database.run(lines.claim, "a", MODEL, 2)
    await database.run(batches.cancel, batch_id, None, 1.0)
    assert await database.run(lines.record, "a", [answer(line, "late")], 2.0) == []
    assert await database.run(lines.claim, "b", MODEL, 2) == []


async def test_a_batch_with_all_answers_cannot_be_cancelled(database: BatchDatabase) -> None:
    batch_id = await database.run(started, 2)
    done = [answer(line, "") for line in await database.run(lines.claim, "a", MODEL, 2)]
    assert await database.run(lines.record, "a", done, 1.0) == done
    with pytest.raises(batches.NotCancellable, match="finalizing"):
        await database.run(batches.cancel, batch_id, None, 2.0)


async def test_a_lost_validator_begins_anew_and_cannot_start_the_batch(database: BatchDatabase) -> None:
    def validating(db: sqlite3.Connection) -> BatchClaim:
        files.insert(db, FileObject(id="f", bytes=1, created_at=0, filename="a", purpose="batch"), "")
        body = CreateBatchRequest(input_file_id="f", endpoint="/v1/completions", completion_window="24h")
        assert batches.create(db, body, None, MODEL, 0.0)
        batches.keep_alive(db, "a", 0.0)
        claim = batches.claim(db, "a", MODEL)
        assert claim is not None and lines.add(db, claim, "a", [InputLine(1, "x", 0, 1)]) == []
        assert batches.claim(db, "b", MODEL) is None
        return claim

    old = await database.run(validating)
    await database.run(batches.keep_alive, "b", LEASE_S + 1)
    new = await database.run(batches.claim, "b", MODEL)
    assert new is not None and await database.run(lines.add, old, "a", [InputLine(2, "y", 5, 1)]) is None
    await database.run(batches.start, old, "a", 1.0)
    assert await database.run(lines.add, new, "b", [InputLine(1, "x", 0, 1), InputLine(2, "z", 0, 1)]) == []
    await database.run(batches.start, new, "b", 1.0)
    found = await database.run(lines.claim, "b", MODEL, 9)
    assert [(line.number, line.custom_id) for line in found] == [(1, "x"), (2, "z")]


async def test_a_batch_waits_for_its_model_and_anybody_ends_it(database: BatchDatabase) -> None:
    batch_id = await database.run(started, 2)
    assert await database.run(lines.claim, "other", "another model", 9) == []
    await database.run(batches.cancel, batch_id, None, 1.0)
    ending = await database.run(batches.claim, "other", "another model")
    assert ending is not None and ending.id == batch_id

    def create(db: sqlite3.Connection) -> None:
        files.insert(db, FileObject(id="f", bytes=1, created_at=0, filename="a", purpose="batch"), "")
        body = CreateBatchRequest(input_file_id="f", endpoint="/v1/completions", completion_window="24h")
        assert batches.create(db, body, None, MODEL, 0.0)

    await database.run(create)
    assert await database.run(batches.claim, "other", "another model") is None
    assert await database.run(batches.claim, "own", MODEL) is not None


async def test_a_transaction_that_fails_changes_nothing(database: BatchDatabase) -> None:
    batch_id = await database.run(started, 2)

    def breaks(db: sqlite3.Connection) -> None:
        lines.claim(db, "a", MODEL, 2)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        await database.run(breaks)
    assert len(await database.run(lines.claim, "b", MODEL, 9)) == 2 and batch_id


async def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "other.sqlite3") as other:
        other.execute("PRAGMA user_version = 9")
    other.close()
    with pytest.raises(RuntimeError, match="version 9, this service reads 1; name another folder"):
        await BatchDatabase(tmp_path / "other.sqlite3").open()
