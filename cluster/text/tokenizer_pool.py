"""Renders chat templates, tokenizes and checks grammars in worker processes, so that none can block other requests.

A worker runs one job at a time. The kernel kills a worker whose job exceeds a limit; the pool kills a worker whose
client disconnects. It replaces a killed worker within milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import msgpack

import workers
from cluster.engine.engine_client import Health
from cluster.errors import PromptError
from cluster.system.fork_server import IMPORT_TIMEOUT_S, ForkedProcess, ForkServer, ForkServerDown
from cluster.text.tokenizer import Conversation, TextLimit, Tokenizer
from cluster.text.tokenizer_worker import GRAMMAR_STACK_BYTES, LENGTH, JobLimits
from secateur.bodies import Structure
from secateur.errors import SecateurError

logger = logging.getLogger(__name__)

MAX_WORKERS = 4
"""One worker per core, up to this number: enough for any engine, and each may take `JobLimits.memory_bytes`."""
MAX_WAITING = 512
MAX_WAITING_BYTES = 64 << 20
"""Limits on the number and the size of jobs that wait for a worker; the pool rejects further ones."""
RESTART_S = 1.0
WATCH_PERIOD_S = 0.2
STUCK_S = 30.0
"""The pool is unhealthy if jobs run and none has ended for this long, which exceeds every limit of `JobLimits`."""


class TokenizerPoolFull(SecateurError):
    """Too many jobs are waiting; the client may retry."""


class TokenizerPoolDown(SecateurError):
    """The workers have died or are starting; the pool starts them again."""


class JobTooCostly(PromptError):
    """The kernel killed the worker because the job exceeded a limit."""


class TokenizerForkServer(ForkServer):
    """The process that loads the tokenizer and forks workers.

    It works offline: the tokenizer must be in the local cache.
    """

    def __init__(self, tokenizer: Tokenizer, limits: JobLimits) -> None:
        self.limits = limits
        arguments = [tokenizer.path, tokenizer.revision or "", json.dumps(asdict(limits))]
        super().__init__(arguments, _environment(), module="cluster.text.tokenizer_worker")

    def wait_loaded(self) -> None:
        """Wait until the tokenizer is loaded. Raises TokenizerPoolDown."""
        try:
            self.wait_imported()
        except ForkServerDown:
            raise TokenizerPoolDown(f"the tokenizer was not loaded within {IMPORT_TIMEOUT_S:.0f} s") from None
        if (code := self.exit_code) is not None:
            raise TokenizerPoolDown(f"the process that loads the tokenizer ended with code {code}")

    def fork_worker(self) -> tuple[ForkedProcess, socket.socket]:
        """Fork a worker; return it and the service's end of its socket. Raises ForkServerDown."""
        local, remote = socket.socketpair()
        with remote:
            try:
                return self.fork([remote.fileno()]), local
            except BaseException:
                local.close()
                raise


@dataclass(frozen=True, slots=True)
class _Worker:
    """The service's handle of one worker."""

    parent: TokenizerForkServer
    _process: ForkedProcess
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    @classmethod
    async def forked(cls, parent: TokenizerForkServer) -> Self:
        """Fork a worker. Raises ForkServerDown."""
        process, local = await asyncio.to_thread(parent.fork_worker)
        return cls(parent, process, *await asyncio.open_unix_connection(sock=local))

    @property
    def has_ended(self) -> bool:
        return self._reader.at_eof()

    async def run(self, job: bytes) -> Any:
        """Run a job and return the reply. Raises OSError or EOFError if the worker dies."""
        self._writer.write(LENGTH.pack(len(job)) + job)
        await self._writer.drain()
        (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return msgpack.unpackb(await self._reader.readexactly(size), unicode_errors="surrogatepass")

    def kill(self) -> None:
        self._writer.transport.abort()
        self._process.kill()


class TokenizerPool:
    """Runs a tokenizer's slow methods in workers. An async context manager: it starts the workers; then await `ready`.

    The methods raise PromptError, TokenizerPoolFull and TokenizerPoolDown; cancelling one kills its worker. A running
    fork server may be passed as `parent`; the pool does not close it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        num_workers: int | None = None,
        limits: JobLimits | None = None,
        parent: TokenizerForkServer | None = None,
        stuck_s: float = STUCK_S,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = parent.limits if parent else limits or JobLimits()
        self._num_workers = num_workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))
        self._stuck_s = stuck_s
        self._borrowed = parent
        self._parent: TokenizerForkServer | None = None
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._num_waiting = self._num_waiting_bytes = self._num_unfinished = 0
        self._last_end = time.monotonic()
        self._down = "they are starting"
        self._starting: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._forking: set[asyncio.Task[None]] = set()

    @property
    def pids(self) -> list[int]:
        """Return the fork server's process id; [] while there is none."""
        return [self._parent.pid] if self._parent else []

    async def __aenter__(self) -> Self:
        self.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def begin(self) -> None:
        """Start the processes without waiting for them, as `ready` does. The caller must call `close` afterwards."""
        self._starting = asyncio.create_task(self._start_parent())

    async def ready(self) -> None:
        """Wait until the workers have started. Raises TokenizerPoolDown."""
        assert self._starting is not None
        try:
            await self._starting
        except BaseException:
            await self.close()
            raise
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stop the processes. May be called twice."""
        self._down = "the service is shutting down"
        parent, self._parent = self._parent, None
        tasks = [*filter(None, [self._starting, self._watcher])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if parent is not None and parent is not self._borrowed:
            parent.close()
        await asyncio.gather(*self._forking)
        while not self._idle.empty():
            self._idle.get_nowait().kill()

    def health(self) -> Health:
        """Check that the processes run and that jobs end."""
        if self._parent is None or self._parent.is_down:
            return Health(False, f"the tokenizing workers do not run: {self._down}")
        silent_s = time.monotonic() - self._last_end
        if self._num_unfinished and silent_s > self._stuck_s:
            problem = f"{self._num_unfinished} jobs have waited {silent_s:.0f} s for the first of them to end"
            return Health(False, f"the tokenizing workers are stuck: {problem}")
        return Health(True, "")

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text; see `Tokenizer.encode`."""
        return await self._do("encode", "prompt", texts=list(texts), add_special_tokens=add_special_tokens)

    async def encode_chat(self, chat: Conversation, limit: TextLimit) -> list[int]:
        """Return the token ids of a conversation whose rendered text is within `limit`."""
        return await self._do("encode_chat", "messages", chat=chat, limit=limit)

    async def bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token sequences that spell each word; see `Tokenizer.bad_words`."""
        return await self._do("bad_words", "bad_words", words=list(words))

    async def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary spells them."""
        return await self._do("token_strings", "prompt", ids=list(ids))

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens."""
        return await self._do("decode", "tokens", ids=list(ids), skip_special_tokens=False)

    async def grammar(self, structure: Structure, *, end_token_ids: Sequence[int], vocab_size: int) -> str:
        """Return the grammar of a structure, which can be compiled; see `workers.sampling.grammar`."""
        return await self._do(
            "grammar",
            structure.param,
            structure=tuple(structure),
            end_token_ids=tuple(end_token_ids),
            vocab_size=vocab_size,
        )

    async def _do(self, method: str, param: str, **arguments: Any) -> Any:
        job = pickle.dumps((method, arguments))
        worker = await self._free_worker(len(job))
        try:
            reply = await worker.run(job)
        except (OSError, EOFError):
            self._replace(worker)
            if worker.parent.is_down:
                raise TokenizerPoolDown("the tokenizing workers were lost; try again") from None
            raise self._too_costly(method, param) from None
        except BaseException:  # the client disconnected
            self._replace(worker)
            raise
        else:
            self._idle.put_nowait(worker)
        finally:
            self._num_unfinished -= 1
            self._last_end = time.monotonic()
        match reply:
            case {"value": value}:
                return value
            case {"rejected": [message, at, code]}:
                raise PromptError(message, param=at, code=code)
            case _:
                raise RuntimeError(f"{method} failed in a tokenizing worker: {reply.get('failed')}")

    async def _free_worker(self, num_bytes: int) -> _Worker:
        """Wait for an idle worker, first come, first served. Counts the job as unfinished if it gets one."""
        if not (health := self.health()).ok:
            raise TokenizerPoolDown(health.reason)
        if self._num_waiting >= MAX_WAITING or (
            self._num_waiting and self._num_waiting_bytes + num_bytes > MAX_WAITING_BYTES
        ):
            raise TokenizerPoolFull(f"{self._num_waiting} requests wait to be tokenized; try later")
        if self._num_unfinished == 0:
            self._last_end = time.monotonic()
        self._num_waiting += 1
        self._num_waiting_bytes += num_bytes
        self._num_unfinished += 1
        try:
            while (worker := await self._idle.get()).has_ended:
                self._replace(worker)
        except BaseException:
            self._num_unfinished -= 1
            raise
        finally:
            self._num_waiting -= 1
            self._num_waiting_bytes -= num_bytes
        return worker

    def _replace(self, worker: _Worker) -> None:
        worker.kill()
        if worker.parent is self._parent:
            self._fork_worker(worker.parent)

    def _fork_worker(self, parent: TokenizerForkServer) -> asyncio.Task[None]:
        task = asyncio.create_task(self._add_worker(parent))
        self._forking.add(task)
        task.add_done_callback(self._forking.discard)
        return task

    async def _add_worker(self, parent: TokenizerForkServer) -> None:
        # After the fork server has died, the next one forks its own workers.
        with contextlib.suppress(OSError, ForkServerDown):
            self._idle.put_nowait(await _Worker.forked(parent))

    async def _watch(self) -> None:
        """Restart the fork server whenever it has died."""
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            if self._parent is not None and not self._parent.is_down:
                continue
            logger.error("the tokenizing workers were lost and are started again")
            try:
                await self._start_parent()
            except (OSError, TokenizerPoolDown) as error:
                self._down = str(error)
                logger.error("the tokenizing workers did not start: %s", error)
                await asyncio.sleep(RESTART_S)

    async def _start_parent(self) -> None:
        """Start a fork server and its workers in place of the previous ones."""
        if self._parent is not None and self._parent is not self._borrowed:
            self._parent.close()
        while not self._idle.empty():  # workers of the dead fork server
            self._idle.get_nowait().kill()
        if self._borrowed is not None and not self._borrowed.is_down:
            parent = self._borrowed
        else:
            parent = TokenizerForkServer(self._tokenizer, self._limits)
            try:
                await asyncio.to_thread(parent.wait_loaded)
            except BaseException:
                parent.close()
                raise
        self._parent, self._down = parent, "they were lost"
        forking = [self._fork_worker(parent) for _ in range(self._num_workers)]
        await asyncio.shield(asyncio.gather(*forking))
        self._last_end = time.monotonic()

    def _too_costly(self, method: str, param: str) -> JobTooCostly:
        limits, memory = self._limits, f"{self._limits.memory_bytes >> 20} MiB of memory"
        if method == "grammar":
            limit = f"{limits.grammar_s:g} s, {memory} or {GRAMMAR_STACK_BYTES >> 20} MiB of stack"
            message = f"{param}: it took more than {limit} to compile; simplify it"
            return JobTooCostly(message, param=param, code="grammar_too_costly")
        limit = f"{limits.render_s:g} s to render, {limits.tokenize_s:g} s to tokenize or {memory}"
        return JobTooCostly(f"this prompt took more than {limit}; shorten it", param=param, code="prompt_too_costly")


def _environment() -> dict[str, str]:
    """Return the fork server's environment: one thread, so that forking is safe; no warning about torch; offline."""
    root = str(Path(workers.__file__).parents[1])
    path = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
    }
