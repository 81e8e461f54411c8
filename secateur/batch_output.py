"""What a batch run writes: an answer per line, and beside them, in OUT.digests, which request each of them answers.

The rule: both files are append-only and flushed per line, a request's digest before its answer. So whatever kills the
run, it loses at most the line being written, and no answer is without its digest. A run first rewrites the output,
atomically, to hold just the answers that it need not ask for again. The digests are rewritten after it: there may be
too many of them, never too few.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from pydantic import BaseModel, ValidationError

from secateur.batch_lines import BatchInputLine, BatchOutputLine
from secateur.errors import BatchError

if sys.platform != "win32":
    import fcntl

_BEGINNING = b'{"id"'
"""Of every line that is written here; what begins otherwise is somebody else's."""


def digest_of(line: BatchInputLine) -> str:
    """SHA-256 of what a line asks for; its custom_id and the order of keys do not count."""
    asked = json.dumps([line.method, line.url, line.body], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(asked.encode()).hexdigest()


class RequestDigest(BaseModel):
    """A line of OUT.digests: the digest of the request that the answer of this id and custom_id belongs to."""

    id: str
    custom_id: str
    digest: str


class Output:
    """The output and its digests, open and locked."""

    def __init__(self, answers: IO[bytes], digests: IO[bytes], found: _Found) -> None:
        self._answers, self._digests = answers, digests
        self.done = frozenset(found.kept)
        """custom_ids whose answers an earlier run has written."""
        self.num_changed = len(found.changed)
        """Answers that were put aside, because their lines have changed since."""
        self.num_unchecked = len(found.kept.keys() - found.current.keys())
        """Answers that were kept without a digest; now they have those of the lines as they are."""

    def append(self, answer: BatchOutputLine, digest: str) -> None:
        """Write the answer to the request of this digest."""
        for file, line in (
            (self._digests, RequestDigest(id=answer.id, custom_id=answer.custom_id, digest=digest)),
            (self._answers, answer),
        ):
            file.write(_encoded(line))
            file.flush()


def digests_path(output: Path) -> Path:
    return output.with_name(output.name + ".digests")


def superseded_path(output: Path) -> Path:
    """Where answers to lines that have changed since are put aside."""
    return output.with_name(output.name + ".superseded")


@contextlib.contextmanager
def open_output(path: Path, requests: Mapping[str, str], *, resume: bool) -> Iterator[Output]:
    """Open `path` for answers to `requests` (custom_id -> digest), holding those it need not be asked for again.

    Dropped are torn and failed lines and answers to lines that have changed; without `resume`, all. Raises BatchError,
    with the file as it was, if another run writes to it, or if it holds answers to other requests or something else.
    """
    with contextlib.ExitStack() as stack:
        try:
            output = _opened(stack, path, requests, resume)
        except OSError as error:
            raise BatchError(f"cannot write {path}: {error.strerror}") from None
        yield output


def _opened(stack: contextlib.ExitStack, path: Path, requests: Mapping[str, str], resume: bool) -> Output:
    answers: IO[bytes] = stack.enter_context(path.open("a+b"))
    _lock(answers, path)
    found = _sort(answers, path, requests, _read_digests(digests_path(path)))
    if not resume:
        found = _Found(num_lines=found.num_lines)
    elif found.foreign:
        raise BatchError(
            f"{path} holds {len(found.foreign)} answers to lines that the input does not have "
            f"(custom_id {found.foreign[0]!r} is one): name another output, or start over with --no-resume"
        )
    if found.changed:
        _put_aside(superseded_path(path), _lines(answers, found.changed))
    if found.num_lines != len(found.kept) or not found.ends_whole:
        kept = _lines(answers, {answer.number for answer in found.kept.values()})
        answers = _replaced(stack, path, kept)
    digests = (RequestDigest(id=a.id, custom_id=name, digest=requests[name]) for name, a in found.kept.items())
    return Output(answers, _replaced(stack, digests_path(path), map(_encoded, digests)), found)


class _Answer(NamedTuple):
    number: int
    """Of its line."""
    id: str


@dataclass(slots=True)
class _Found:
    """What an output holds that succeeded."""

    num_lines: int = 0
    ends_whole: bool = True
    """Whether its last line has its newline."""
    current: dict[str, _Answer] = field(default_factory=dict)
    """By custom_id: the answer to the line as it is."""
    unchecked: dict[str, _Answer] = field(default_factory=dict)
    """By custom_id: an answer of which nobody wrote what it answers."""
    changed: set[int] = field(default_factory=set)
    """Numbers of lines that answer what their custom_id asked for earlier."""
    foreign: list[str] = field(default_factory=list)
    """custom_ids that the input does not have."""

    @property
    def kept(self) -> dict[str, _Answer]:
        return self.unchecked | self.current


def _sort(answers: IO[bytes], path: Path, requests: Mapping[str, str], known: Mapping[tuple[str, str], str]) -> _Found:
    """Which lines are what; only the last one may be torn. An output may be large: no line is held in memory."""
    found = _Found()
    answers.seek(0)
    for number, raw in enumerate(answers, 1):
        found.num_lines, found.ends_whole = number, raw.endswith(b"\n")
        try:
            line = BatchOutputLine.model_validate_json(raw)
        except ValidationError:
            if _is_torn(raw):
                continue
            raise BatchError(f"{path} line {number} is no batch output; name another output file") from None
        if not line.succeeded:
            continue
        answer, digest = _Answer(number, line.id), known.get((line.id, line.custom_id))
        if line.custom_id not in requests:
            found.foreign.append(line.custom_id)
        elif digest == requests[line.custom_id]:
            found.current.setdefault(line.custom_id, answer)
        elif digest is None:
            found.unchecked.setdefault(line.custom_id, answer)
        else:
            found.changed.add(number)
    return found


def _read_digests(path: Path) -> dict[tuple[str, str], str]:
    """(answer's id, custom_id) -> digest. What is torn was written last: its answer never was."""
    found: dict[tuple[str, str], str] = {}
    if not path.exists():
        return found
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line = RequestDigest.model_validate_json(raw)
            except ValidationError:
                if _is_torn(raw):
                    continue
                raise BatchError(f"{path} line {number} is no digest of a request; name another output file") from None
            found[line.id, line.custom_id] = line.digest
    return found


def _is_torn(raw: bytes) -> bool:
    """Whether a line that cannot be read is one of ours, cut short."""
    return not raw.endswith(b"\n") and (raw.startswith(_BEGINNING) or _BEGINNING.startswith(raw))


# -- files -----------------------------------------------------------------------------------------------------------


def _encoded(line: BaseModel) -> bytes:
    return line.model_dump_json().encode() + b"\n"


def _lines(file: IO[bytes], numbers: set[int]) -> Iterator[bytes]:
    """The lines of these numbers, each with its newline."""
    file.seek(0)
    return (raw.removesuffix(b"\n") + b"\n" for number, raw in enumerate(file, 1) if number in numbers)


def _replaced(stack: contextlib.ExitStack, path: Path, lines: Iterable[bytes]) -> IO[bytes]:
    """The file, atomically replaced by these lines, locked and open for more."""
    temporary = path.with_name(path.name + ".tmp")
    file = stack.enter_context(temporary.open("wb"))
    _lock(file, path)
    file.writelines(lines)
    file.flush()
    os.fsync(file.fileno())
    temporary.replace(path)
    return file


def _put_aside(path: Path, lines: Iterable[bytes]) -> None:
    with path.open("a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":  # an earlier run was killed here
                file.write(b"\n")
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


def _lock(file: IO[bytes], path: Path) -> None:
    """Two runs on one output would answer lines twice. The lock ends with the process, however it ends."""
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BatchError(f"another run is writing {path}; wait for it or name another output") from None
