"""Any number of lines is checked and written in constant memory; expired and orphaned files are swept."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from pathlib import Path

import pytest

from cluster.batches import batches, files, writing
from cluster.batches.batches import Claim
from cluster.batches.database import BatchDatabase
from cluster.batches.files import FileFolder
from cluster.batches.runner import sweep
from cluster.errors import HttpError
from secateur.batches_api import BatchStatus, CreateBatchRequest, FileObject

NUM_LINES, FILLER = 20_000, "y" * 2000
REQUEST = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}'
INPUT = FileObject(id="input", bytes=1, created_at=0, filename="a", purpose="batch")


@pytest.fixture
def folder(tmp_path: Path) -> FileFolder:
    made = FileFolder(tmp_path / "files")
    made.make()
    return made


async def created(database: BatchDatabase, file_id: str, now: float = 0.0) -> str:
    """Return the id of a new batch with this input."""
    body = CreateBatchRequest(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h")
    return (await database.run(batches.create, body, None, "model", now)).id


async def claimed(database: BatchDatabase, status: BatchStatus) -> Claim:
    """Claim the only batch, which has this status."""
    claim = await database.run(batches.claim, "w", "model", 0.0, [status])
    assert claim is not None
    return claim


@pytest.mark.slow
async def test_a_large_batch_takes_no_memory(database: BatchDatabase, folder: FileFolder) -> None:
    with folder.path("input").open("w") as file:
        for n in range(NUM_LINES):
            request = {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": {"prompt": FILLER}}
            file.write(json.dumps(request) + "\n")
    size = folder.path("input").stat().st_size
    await database.run(files.insert, INPUT, "")
    id = await created(database, "input")
    claim = await claimed(database, "validating")
    tracemalloc.start()
    await writing.validate(database, folder, claim, ["model"])
    await claimed(database, "in_progress")
    texts = ((n, json.dumps({"n": n, "text": FILLER})) for n in range(1, NUM_LINES))
    insert = "INSERT INTO lines (batch_id, number, answer, is_error) VALUES (?, ?, ?, FALSE)"
    await database.run(lambda db: db.executemany(insert, ((id, *each) for each in texts)))
    await database.run(batches.cancel, id, None, 0.0)
    ending = await claimed(database, "cancelling")
    await writing.write_files(database, folder, ending)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    batch = await database.run(batches.find, id, None)
    assert batch.output_file_id is not None and batch.error_file_id is not None and batch.status == "cancelled"
    assert batch.request_counts.total == NUM_LINES
    with folder.path(batch.output_file_id).open() as file:
        assert [json.loads(line)["n"] for line in file] == list(range(1, NUM_LINES))
    [missing] = folder.path(batch.error_file_id).read_text().splitlines()
    assert json.loads(missing)["custom_id"] == f"r{NUM_LINES - 1}"
    assert peak < 20 << 20 < size, f"{peak >> 20} MiB"


async def test_a_batch_whose_input_is_gone_when_it_is_validated_fails(
    database: BatchDatabase, folder: FileFolder
) -> None:
    await database.run(files.insert, INPUT, "")
    id = await created(database, "input")
    await writing.validate(database, folder, await claimed(database, "validating"), ["model"])
    batch = await database.run(batches.find, id, None)
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data == [writing.MISSING]


@pytest.mark.parametrize(
    ("has_begun", "left", "num_errors"),
    [(False, REQUEST, 0), (True, REQUEST, 1), (True, "{", 0), (True, None, 0)],
    ids=["before it began", "unchanged", "its input has changed", "its input is gone"],
)
async def test_a_cancelled_batch_ends_whatever_has_become_of_its_input(
    database: BatchDatabase, folder: FileFolder, has_begun: bool, left: str | None, num_errors: int
) -> None:
    """Lines without an answer get an error if the batch has begun and they can be read."""
    await database.run(files.insert, INPUT, "")
    if left is not None:
        folder.path("input").write_text(left)
    id = await created(database, "input")
    if has_begun:
        await database.run(batches.start, await claimed(database, "validating"), 1, 0.0)
    await database.run(batches.cancel, id, None, 0.0)
    await writing.write_files(database, folder, await claimed(database, "cancelling"))
    batch = await database.run(batches.find, id, None)
    assert batch.status == "cancelled" and batch.output_file_id is None
    errors = folder.path(batch.error_file_id).read_text().splitlines() if batch.error_file_id else []
    assert len(errors) == num_errors


async def test_expired_files_and_content_without_a_file_are_swept(database: BatchDatabase, folder: FileFolder) -> None:
    now, long_ago = int(time.time()), time.time() - files.ORPHAN_S - 5
    for id, expires_at in (("kept", None), ("future", now + 100), ("over", now - 1), ("used", now - 1), ("lost", 1)):
        if id != "lost":
            folder.path(id).write_bytes(b"a")
        file = FileObject(id=id, bytes=1, created_at=0, filename=id, purpose="batch", expires_at=expires_at)
        await database.run(files.insert, file, "")
    for name, age in (("old-orphan", long_ago), ("old.part", long_ago), ("new.part", now), ("kept", long_ago)):
        folder.path(name).touch()
        os.utime(folder.path(name), (age, age))
    await created(database, "used", now - 100)
    for number in range(9):  # names of what another replica deletes while this one looks
        folder.path(f"gone-{number}").symlink_to("nowhere")
    await sweep(database, folder)
    left = {path.name for path in folder.path("x").parent.iterdir() if not path.is_symlink()}
    assert left == {"kept", "future", "used", "new.part"}
    with pytest.raises(HttpError, match="over"):
        await database.run(files.find, "over", None, 0.0)
