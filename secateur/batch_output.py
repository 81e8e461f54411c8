"""The output of a batch run: OUT holds the answers, and OUT.digests the digest of the request behind each answer.

The rule: both files are append-only and flushed after every line, and a digest is written before its answer. A crash
therefore loses at most the line being written, and every answer has its digest. A run begins by atomically rewriting
the output to the answers that it keeps. It rewrites the digests afterwards: a crash in between leaves spare digests,
but never drops one that is needed.
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
"""Every line of an output begins with this; other lines were not written here."""


def digest_of(line: BatchInputLine) -> str:
    """Return the SHA-256 of a line's request; its custom_id and the order of keys do not matter."""
    request = json.dumps([line.method, line.url, line.body], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(request.encode()).hexdigest()


class RequestDigest(BaseModel):
    """A line of OUT.digests: the digest of the request that the answer with this id and custom_id belongs to."""

    id: str
    custom_id: str
    digest: str


class Output:
    """An output and its digests, open and locked."""

    def __init__(
        self, path: Path, stack: contextlib.ExitStack, answers: IO[bytes], digests: IO[bytes], found: _OutputScan
    ) -> None:
        self._path, self._stack = path, stack
        self._answers, self._digests = answers, digests
        self.done = frozenset(found.kept)
        """The custom_ids that an earlier run answered."""
        self.num_changed = len(found.changed)
        """Number of answers moved to OUT.superseded because their lines changed."""
        self.num_unchecked = len(found.kept.keys() - found.current.keys())
        """Number of answers kept although they had no digest; they get the digests of the current lines."""

    def append(self, answer: BatchOutputLine, digest: str) -> None:
        """Write an answer and the digest of its request."""
        for file, line in (
            (self._digests, RequestDigest(id=answer.id, custom_id=answer.custom_id, digest=digest)),
            (self._answers, answer),
        ):
            file.write(_encoded(line))
            file.flush()

    def put_in_order(self, custom_ids: Iterable[str]) -> None:
        """Rewrite the answers atomically in the order of these custom_ids, all that the output may have.

        Raises BatchError if that fails; the answers stay in the order in which they came.
        """
        places, place = dict[str, int](), 0
        try:
            with self._path.open("rb") as file:
                for raw in file:
                    places[json.loads(raw)["custom_id"]] = place
                    place += len(raw)
                order = [places[custom_id] for custom_id in custom_ids if custom_id in places]
                if order != sorted(order):
                    self._answers = _replaced(self._stack, self._path, _lines_at(file, order))
        except OSError as error:
            raise BatchError(f"cannot put {self._path} into the order of the input: {error.strerror}") from None


def digests_path(output: Path) -> Path:
    """Return the path of OUT.digests."""
    return output.with_name(output.name + ".digests")


def superseded_path(output: Path) -> Path:
    """Return the path of OUT.superseded, which keeps answers to lines that changed."""
    return output.with_name(output.name + ".superseded")


@contextlib.contextmanager
def open_output(path: Path, requests: Mapping[str, str], *, resume: bool) -> Iterator[Output]:
    """Open `path` for answers to `requests` (custom_id -> digest), keeping the answers that are still valid.

    Truncated lines, failed lines and answers to changed lines are dropped; without `resume`, every line is. Raises
    BatchError and leaves the file unchanged if another run writes to it, if it answers lines that the input does not
    have, or if it is not a batch output.
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
        found = _OutputScan(num_lines=found.num_lines)
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
    return Output(path, stack, answers, _replaced(stack, digests_path(path), map(_encoded, digests)), found)


class _AnswerLine(NamedTuple):
    number: int
    """The line's number in the output."""
    id: str


@dataclass(slots=True)
class _OutputScan:
    """The successful answers of an output, classified."""

    num_lines: int = 0
    ends_whole: bool = True
    """True if the last line ends with a newline."""
    current: dict[str, _AnswerLine] = field(default_factory=dict)
    """Answers to current lines, by custom_id."""
    unchecked: dict[str, _AnswerLine] = field(default_factory=dict)
    """Answers without a digest, by custom_id."""
    changed: set[int] = field(default_factory=set)
    """Numbers of the output lines that answer an earlier version of their input line."""
    foreign: list[str] = field(default_factory=list)
    """The custom_ids that the input does not have."""

    @property
    def kept(self) -> dict[str, _AnswerLine]:
        return self.unchecked | self.current


def _sort(
    answers: IO[bytes], path: Path, requests: Mapping[str, str], known: Mapping[tuple[str, str], str]
) -> _OutputScan:
    """Classify the lines; only the last may be truncated. Outputs may be large, so no line stays in memory."""
    found = _OutputScan()
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
        answer, digest = _AnswerLine(number, line.id), known.get((line.id, line.custom_id))
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
    """Return (answer id, custom_id) -> digest. A truncated last line is skipped: its answer was never written."""
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
    """Return whether an invalid line is the truncated beginning of an output line."""
    return not raw.endswith(b"\n") and (raw.startswith(_BEGINNING) or _BEGINNING.startswith(raw))


# -- files -----------------------------------------------------------------------------------------------------------


def _encoded(line: BaseModel) -> bytes:
    return line.model_dump_json().encode() + b"\n"


def _lines(file: IO[bytes], numbers: set[int]) -> Iterator[bytes]:
    """Return the lines with these numbers, each with a newline."""
    file.seek(0)
    return (raw.removesuffix(b"\n") + b"\n" for number, raw in enumerate(file, 1) if number in numbers)


def _lines_at(file: IO[bytes], places: Iterable[int]) -> Iterator[bytes]:
    """Return the lines that begin at these places."""
    for place in places:
        file.seek(place)
        yield file.readline()


def _replaced(stack: contextlib.ExitStack, path: Path, lines: Iterable[bytes]) -> IO[bytes]:
    """Replace a file atomically by these lines; return it locked and open for appending."""
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
    """Lock an output, so that two runs do not answer its lines twice. The lock ends with the process."""
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BatchError(f"another run is writing {path}; wait for it or name another output") from None
