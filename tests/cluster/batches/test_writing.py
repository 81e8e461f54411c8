"""Any number of lines is checked and written in constant memory; expired and orphaned files are swept."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from pathlib import Path

import pytest

from cluster.batches import batches, files, writing
from cluster.batches.database import BatchDatabase
from cluster.batches.files import FileFolder
from cluster.batches.runner import sweep
from cluster.errors import HttpError
from secateur.batches_api import CreateBatchRequest, FileObject

NUM_LINES, FILLER = 20_000, "y" * 2000


@pytest.fixture
def folder(tmp_path: Path) -> FileFolder:
    made = FileFolder(tmp_path / "files")
    made.make()
    return made


@pytest.mark.slow
async def test_a_large_batch_takes_no_memory(database: BatchDatabase, folder: FileFolder) -> None:
    with folder.path("input").open("w") as file:
        for n in range(NUM_LINES):
            request = {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": {"prompt": FILLER}}
            file.write(json.dumps(request) + "\n")
    size = folder.path("input").stat().st_size
    await database.run(
        files.insert, FileObject(id="input", bytes=size, created_at=0, filename="a", purpose="batch"), ""
    )
    body = CreateBatchRequest(input_file_id="input", endpoint="/v1/completions", completion_window="24h")
    created = await database.run(batches.create, body, None, "model", time.time())
    claim = await database.run(batches.claim, "w", "model", 0.0, ["validating"])
    assert claim is not None
    tracemalloc.start()
    await writing.validate(database, folder, claim, ["model"])
    answering = await database.run(batches.claim, "w", "model", 0.0, ["in_progress"])
    assert answering is not None
    texts = ((n, json.dumps({"n": n, "text": FILLER})) for n in range(1, NUM_LINES))
    insert = "INSERT INTO lines (batch_id, number, answer, is_error) VALUES (?, ?, ?, FALSE)"
    await database.run(lambda db: db.executemany(insert, ((created.id, *each) for each in texts)))
    await database.run(batches.cancel, created.id, None, 0.0)
    ending = await database.run(batches.claim, "w", "model", 0.0, ["cancelling"])
    assert ending is not None
    await writing.write_files(database, folder, ending)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    batch = await database.run(batches.find, created.id, None)
    assert batch.output_file_id is not None and batch.error_file_id is not None and batch.status == "cancelled"
    assert batch.request_counts.total == NUM_LINES
    with folder.path(batch.output_file_id).open() as file:
        assert [json.loads(line)["n"] for line in file] == list(range(1, NUM_LINES))
    [missing] = folder.path(batch.error_file_id).read_text().splitlines()
    assert json.loads(missing)["custom_id"] == f"r{NUM_LINES - 1}"
    assert peak < 20 << 20 < size, f"{peak >> 20} MiB"


async def test_expired_files_and_content_without_a_file_are_swept(database: BatchDatabase, folder: FileFolder) -> None:
    now, long_ago = int(time.time()), time.time() - files.ORPHAN_S - 5
    for id, expires_at in (("kept", None), ("future", now + 100), ("over", now - 1), ("used", now - 1)):
        folder.path(id).write_bytes(b"a")
        file = FileObject(id=id, bytes=1, created_at=0, filename=id, purpose="batch", expires_at=expires_at)
        await database.run(files.insert, file, "")
    for name, age in (("old-orphan", long_ago), ("old.part", long_ago), ("new.part", now), ("kept", long_ago)):
        folder.path(name).touch()
        os.utime(folder.path(name), (age, age))
    body = CreateBatchRequest(input_file_id="used", endpoint="/v1/completions", completion_window="24h")
    assert await database.run(batches.create, body, None, "model", now - 100)
    await sweep(database, folder)
    assert {path.name for path in folder.path("x").parent.iterdir()} == {"kept", "future", "used", "new.part"}
    with pytest.raises(HttpError, match="over"):
        await database.run(files.find, "over", None, 0.0)
