"""Validates batches and writes the files of batches that end. Everything is read and written in parts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from cluster.batches import batches, lines
from cluster.batches.answer_lines import unanswered
from cluster.batches.batches import BatchClaim
from cluster.batches.database import BatchDatabase
from cluster.batches.files import FileFolder
from cluster.batches.input_lines import InputLine, read_lines
from cluster.batches.lines import StoredLine
from secateur.batches_api import FileObject, InvalidLine

MAX_PROBLEMS = 100
"""How many wrong lines a batch names."""
LINES_AT_ONCE, CHARS_AT_ONCE = 500, 4 << 20
_NOT_ANSWERED = {
    "batch_cancelled": "This request was not executed because the batch was cancelled.",
    "batch_expired": "This request could not be executed before the completion window expired.",
}


async def validate(
    database: BatchDatabase, folder: FileFolder, batch: BatchClaim, worker: str, models: Sequence[str]
) -> None:
    """Check the input of a batch; start it, or end it with the list of wrong lines."""
    found = read_lines(folder.path(batch.input_file_id), batch.endpoint, models)
    problems: list[InvalidLine] = []
    try:
        while len(problems) <= MAX_PROBLEMS:
            part = await asyncio.to_thread(lambda: list(islice(found, LINES_AT_ONCE)))
            if not part:
                break
            problems += [line for line in part if isinstance(line, InvalidLine)]
            good = [line for line in part if isinstance(line, InputLine)]
            duplicates = await database.run(lines.add, batch, worker, good)
            if duplicates is None:
                return  # the batch was cancelled, or another worker has it
            problems += duplicates
    except FileNotFoundError:
        message = "The content of the input file is missing; upload it again."
        problems = [InvalidLine(code="missing_file", message=message, param="input_file_id")]
    if not problems:
        await database.run(batches.start, batch, worker, time.time())
        return
    problems.sort(key=lambda problem: problem.line or 0)
    if len(problems) > MAX_PROBLEMS:
        more = InvalidLine(code="too_many_errors", message=f"These are the first {MAX_PROBLEMS} errors of more.")
        problems = [*problems[:MAX_PROBLEMS], more]
    await database.run(batches.fail, batch, worker, problems, time.time())


async def write_files(database: BatchDatabase, folder: FileFolder, batch: BatchClaim, worker: str) -> None:
    """Write the output and the error file of a batch, in the order of its input, and end it."""
    code = "batch_cancelled" if batch.status == "cancelling" else "batch_expired"
    drafts = folder.draft_path(), folder.draft_path()
    kept: list[FileObject | None] = []
    try:
        after = 0
        while batch.was_started:
            part = await database.run(lines.stored, batch.id, after, CHARS_AT_ONCE)
            if not part:
                break
            await asyncio.to_thread(_append, drafts, part, code)
            after = part[-1].number
        for draft, kind in zip(drafts, ("output", "error"), strict=True):
            kept.append(await asyncio.to_thread(_keep, folder, draft, f"{batch.id}_{kind}.jsonl", batch.output_seconds))
        output, errors = kept
        if not await database.run(batches.finish, batch, worker, output, errors, time.time()):
            folder.delete(file.id for file in kept if file is not None)
    finally:  # after an error, the files may belong to the batch all the same; if not, `sweep` deletes them
        for draft in drafts:
            draft.unlink(missing_ok=True)


def _append(drafts: tuple[Path, Path], part: Sequence[StoredLine], code: str) -> None:
    texts: tuple[list[str], list[str]] = [], []
    for line in part:
        text = line.text or unanswered(line.custom_id, code, _NOT_ANSWERED[code])
        texts[line.is_error or line.text is None].append(f"{text}\n")
    for draft, own in zip(drafts, texts, strict=True):
        if own:
            with draft.open("a", encoding="utf-8", newline="") as file:
                file.writelines(own)


def _keep(folder: FileFolder, draft: Path, filename: str, seconds: int | None) -> FileObject | None:
    """Keep what has been written; None if there is nothing."""
    if not draft.exists():
        return None
    return folder.keep(draft, filename, "batch_output", seconds)
