"""Batch jobs in OpenAI's file format, over the online service, that can be stopped and resumed at any moment.

    run_batch("in.jsonl", "out.jsonl", base_url="http://127.0.0.1:8000")

A run sends exactly the lines that the output (see `secateur.batch_output`) does not answer yet. An earlier answer
counts if it has the line's custom_id and the line still holds the same request. So every custom_id ends up in the
output exactly once, with an answer to the current line.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import re
import signal
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Coroutine, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec

from pydantic import ValidationError
from rich.progress import Progress

from secateur.batch_lines import BatchInputLine, BatchLineError, BatchOutputLine, BatchResponse
from secateur.batch_output import Output, digest_of, digests_path, open_output, superseded_path
from secateur.batch_progress import BatchSummary, progress_bar, progress_lines
from secateur.client import DEFAULT_BASE_URL, DEFAULT_TIMEOUT_S, AsyncClient
from secateur.client_http import Call
from secateur.endpoints import EndpointPool
from secateur.errors import APIConnectionError, APIError, AuthenticationError, BatchError
from secateur.jsonl import content_of, value_of
from secateur.responses import IDEMPOTENCY_HEADER, REQUEST_ID_HEADER, ChatCompletionResponse, CompletionResponse
from secateur.retries import OUTAGE_TIMEOUT_S
from secateur.schema import problems_of

MAX_PROBLEMS_SHOWN = 20
Options = ParamSpec("Options")
READS: dict[str, type[CompletionResponse] | type[ChatCompletionResponse]] = {
    "/v1/completions": CompletionResponse,
    "/v1/chat/completions": ChatCompletionResponse,
}


class BatchInput(NamedTuple):
    """A validated input file. `job_id` is a digest of its content: the same file gives the same request ids."""

    path: Path
    job_id: str
    digests: dict[str, str]
    """Maps each custom_id to the digest of its request, see `digest_of`."""

    @property
    def custom_ids(self) -> Set[str]:
        """Return the custom_ids of the input."""
        return self.digests.keys()


async def run_batch_async(
    input_path: str | Path,
    output_path: str | Path,
    *,
    base_url: str | Sequence[str] = DEFAULT_BASE_URL,
    client: AsyncClient | None = None,
    api_key: str | None = None,
    concurrency: int = 16,
    resume: bool = True,
    ordered: bool = False,
    retries: int = 5,
    timeout: float = DEFAULT_TIMEOUT_S,
    outage_timeout: float = OUTAGE_TIMEOUT_S,
    progress: bool | None = None,
) -> BatchSummary:
    """Answer every line of `input_path` into `output_path`, `concurrency` at a time.

    Of several `base_url`, each line goes to the one with the fewest pending requests (see `secateur.endpoints`).
    `client` replaces base_url, api_key, retries, timeout (seconds per read) and outage_timeout (seconds that a service
    which was there may be gone), and is closed by the caller.
    `ordered` puts the answers into the order of the input when the run ends; before, they are in the order in which
    they came.
    `resume=False` starts over; otherwise lines that changed since they were answered are answered again, and a warning
    gives their number. `progress=None` shows a progress bar on a terminal, elsewhere a line every ten seconds. The
    first Ctrl-C waits for the requests in flight; the second stops at once. Raises BatchError, before anything is
    sent, if a file cannot be used, and AuthenticationError or APIConnectionError if the service cannot be used.
    """
    if concurrency < 1:
        raise BatchError(f"concurrency must be at least 1 (got {concurrency})")
    job, output_path = read_job(Path(input_path)), Path(output_path)
    if output_path.exists() and output_path.samefile(job.path):
        raise BatchError(f"input and output are the same file, {output_path}; name another output")
    async with contextlib.AsyncExitStack() as stack:
        output = stack.enter_context(open_output(output_path, job.digests, resume=resume))
        _warn_of(output, job.path, output_path)
        summary = BatchSummary(total=len(job.digests), resumed=len(output.done), changed=output.num_changed)
        if ordered:
            stack.callback(output.put_in_order, job.custom_ids)
        if summary.resumed == summary.total:
            return summary
        service: AsyncClient | EndpointPool
        if client is not None:
            service = client
        else:
            owned = _client_of(
                base_url, api_key=api_key, retries=retries, timeout=timeout, outage_timeout=outage_timeout
            )
            service = await stack.enter_async_context(owned)
        await service.models()  # fail once now rather than once per line
        bar = stack.enter_context(progress_bar(summary, progress))
        if progress is None and bar.disable:
            await stack.enter_async_context(progress_lines(summary))
        stop = stack.enter_context(_stop_on_signal())
        started = time.monotonic()
        await _Run(service, job, output, summary, bar, stop).answer_all(concurrency)
        summary.seconds = time.monotonic() - started
    return summary


def _blocking(run: Callable[Options, Coroutine[Any, Any, BatchSummary]]) -> Callable[Options, BatchSummary]:
    @functools.wraps(run)
    def run_to_its_end(*args: Options.args, **kwargs: Options.kwargs) -> BatchSummary:
        return asyncio.run(run(*args, **kwargs))

    return run_to_its_end


run_batch = _blocking(run_batch_async)
"""`run_batch_async` in an event loop of its own, with the same parameters."""


def _client_of(base_url: str | Sequence[str], **settings: Any) -> AsyncClient | EndpointPool:
    urls = [base_url] if isinstance(base_url, str) else list(base_url)
    return AsyncClient(urls[0], **settings) if len(urls) == 1 else EndpointPool(urls, **settings)


def _warn_of(output: Output, input_path: Path, output_path: Path) -> None:
    if output.num_changed:
        warnings.warn(
            f"{output.num_changed} of the lines in {input_path} changed after they were answered; they are answered "
            f"again, and their old answers are in {superseded_path(output_path)}",
            stacklevel=2,
        )
    if output.num_unchecked:
        warnings.warn(
            f"{output.num_unchecked} of the answers in {output_path} are kept although {digests_path(output_path)} "
            "has no digest of their requests (an older version wrote them, or the file was lost); use --no-resume to "
            "answer them again",
            stacklevel=2,
        )


class _Run:
    """The workers of one run, which share an iterator over unanswered lines and one output."""

    def __init__(
        self,
        client: AsyncClient | EndpointPool,
        job: BatchInput,
        output: Output,
        summary: BatchSummary,
        bar: Progress,
        stop: asyncio.Event,
    ) -> None:
        self._client, self._job, self._output = client, job, output
        self._summary, self._bar, self._stop = summary, bar, stop

    async def answer_all(self, concurrency: int) -> None:
        todo = self._todo()
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(concurrency):
                    workers.create_task(self._work(todo))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    def _todo(self) -> Iterator[BatchInputLine]:
        for number, line in _input_lines(self._job.path):
            if line.custom_id in self._output.done:
                continue
            if self._job.digests.get(line.custom_id) != digest_of(line):
                raise _changed(self._job.path, [f"line {number}: has a different request now"])
            yield line

    async def _work(self, todo: Iterator[BatchInputLine]) -> None:
        for line in todo:
            answer = await self._answer(line)
            self._output.append(answer, self._job.digests[line.custom_id])
            self._count(answer)
            if self._stop.is_set():
                self._summary.interrupted = next(todo, None) is not None or self._summary.interrupted
                return

    async def _answer(self, line: BatchInputLine) -> BatchOutputLine:
        request_id = f"batch-{self._job.job_id}-{_header_safe(line.custom_id)}"
        call: Call[CompletionResponse | ChatCompletionResponse] = Call(
            path=line.url,
            reads=READS[line.url],
            body=line.body,
            headers={REQUEST_ID_HEADER: request_id, IDEMPOTENCY_HEADER: request_id},
        )
        response, error = None, None
        try:
            answer = await self._client.call(call)
            response = BatchResponse(status_code=200, request_id=request_id, body=answer.model_dump(mode="json"))
        except AuthenticationError:
            raise  # every other line would fail the same way
        except APIError as failure:
            if failure.status is not None:
                response = BatchResponse(status_code=failure.status, request_id=request_id, body=failure.body)
            error = BatchLineError(code=str(failure.code or failure.status or "invalid_response"), message=str(failure))
        except APIConnectionError as failure:
            error = BatchLineError(code="connection_error", message=str(failure))
        return BatchOutputLine(
            id=f"batch_req_{uuid.uuid4().hex}", custom_id=line.custom_id, response=response, error=error
        )

    def _count(self, answer: BatchOutputLine) -> None:
        if answer.succeeded and answer.response is not None:
            self._summary.succeeded += 1
            usage = answer.response.body.get("usage") or {}
            self._summary.prompt_tokens += usage.get("prompt_tokens", 0)
            self._summary.completion_tokens += usage.get("completion_tokens", 0)
        else:
            self._summary.failed += 1
            if answer.error is not None and not self._summary.first_failure:
                self._summary.first_failure = f"{answer.custom_id!r}: {answer.error.message}"
        self._bar.advance(self._bar.task_ids[0])


# -- input -----------------------------------------------------------------------------------------------------------


def read_job(path: Path) -> BatchInput:
    """Validate a whole input file. Raises BatchError that lists the problems by line number."""
    digest, line_of, problems = hashlib.sha256(), dict[str, int](), list[str]()
    digests: dict[str, str] = {}
    try:
        for number, line in _input_lines(path, digest, problems):
            digests[line.custom_id] = digest_of(line)
            first = line_of.setdefault(line.custom_id, number)
            if first != number:
                problems.append(f"line {number}: custom_id {line.custom_id!r} is already on line {first}")
    except OSError as error:
        raise BatchError(f"cannot read {path}: {error.strerror}") from None
    if problems:
        more = len(problems) - MAX_PROBLEMS_SHOWN
        shown = problems[:MAX_PROBLEMS_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        raise BatchError(f"{path} is not a valid batch file, nothing was sent:", shown)
    if not line_of:
        raise BatchError(f"{path} holds no requests")
    return BatchInput(path, digest.hexdigest()[:8], digests)


def _input_lines(
    path: Path, digest: Any = None, problems: list[str] | None = None
) -> Iterator[tuple[int, BatchInputLine]]:
    """Yield (line number, line) and skip blank lines. Invalid lines are appended to `problems`, or raise without it."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if digest is not None:
                digest.update(raw)
            if not (content := content_of(raw)).strip():
                continue
            try:
                yield number, BatchInputLine.model_validate(_sendable(value_of(content)))
            except ValidationError as error:
                found = [str(problem) for problem in problems_of(error, BatchInputLine.model_fields)]
            except ValueError as error:
                found = [f"not JSON: {error}"]
            else:
                continue
            if problems is None:
                raise _changed(path, [f"line {number}: {text}" for text in found])
            problems.extend(f"line {number}: {text}" for text in found)


def _changed(path: Path, problems: list[str]) -> BatchError:
    return BatchError(f"{path} changed while its lines were being answered; run it again:", problems)


def _sendable(line: Any) -> Any:
    """Return the line. Raises ValueError for what JSON can spell but not send: 1e999, or a lone surrogate."""
    json.dumps(line, ensure_ascii=False, allow_nan=False).encode()
    return line


def _header_safe(custom_id: str) -> str:
    """Return a custom_id that is valid in an HTTP header: unchanged if possible, else its digest."""
    if re.fullmatch(r"[A-Za-z0-9._:@/+=-]{1,128}", custom_id):
        return custom_id
    return hashlib.sha256(custom_id.encode()).hexdigest()[:32]


# -- signals ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[asyncio.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets; the next signal has its usual effect."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    # Only the main thread receives signals, and Windows' event loop has no handlers: there Ctrl-C stops at once.
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield stop
        return
    signals = (signal.SIGINT, signal.SIGTERM)

    def on_signal() -> None:
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)

    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
