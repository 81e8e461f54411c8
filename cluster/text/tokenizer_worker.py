"""The processes that render chat templates, tokenize and check grammars: one fork server and its workers.

They do not import torch.

The fork server loads the tokenizer once and forks a worker in milliseconds and with almost no memory of its own.
Killing a worker is the only way to stop any job, since a thread in Jinja or in the Rust tokenizer cannot be stopped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack

from cluster.errors import PromptError
from cluster.system.fork_server import serve
from cluster.text.tokenizer import Conversation, TextLimit, Tokenizer
from secateur.bodies import Structure
from workers.sampling.grammar import ONE_OF, GrammarError, ThoughtMarks, TokenTable, grammar_text

logger = logging.getLogger(__name__)

LENGTH = struct.Struct("<I")
"""Precedes every frame between the service and a worker."""
GRAMMAR_STACK_BYTES = 2 << 20
"""A quarter of what the ranks have: a grammar that compiles here does not overflow their stacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """The time and memory of one job, beyond which the kernel kills its worker."""

    render_s: float = 2.0
    """A chat template takes milliseconds, on a busy machine tens of milliseconds."""
    tokenize_s: float = 10.0
    """Enough for about a million tokens."""
    grammar_s: float = 2.0
    """A JSON schema of 50 kB takes half a second. Every rank compiles it again, and does nothing else meanwhile."""
    memory_bytes: int = 1 << 30
    """In addition to the tokenizer itself. A megabyte of text needs up to 220 MB."""


def main(control: socket.socket, path: str, revision: str | None, limits: JobLimits) -> None:
    """Run the fork server: load the tokenizer, then fork workers until the socket closes."""
    tokenizer = Tokenizer(path, revision=revision)
    with contextlib.suppress(PromptError):
        # This compiles the template, once for all workers.
        tokenizer.render(Conversation([{"role": "user", "content": "a"}]))
    serve(control, lambda fds: _work(socket.socket(fileno=fds[0]), _Jobs(tokenizer, limits), limits.memory_bytes))


def _work(service: socket.socket, jobs: _Jobs, memory_bytes: int) -> int:
    """Run one job after the other, until the service closes the socket or a job exceeds a limit."""
    max_bytes = _address_space() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an allocation that fails in Rust aborts the process
    with service.makefile("rwb") as stream:
        while head := stream.read(LENGTH.size):
            reply = msgpack.packb(_reply(jobs, stream.read(*LENGTH.unpack(head))), unicode_errors="surrogatepass")
            stream.write(LENGTH.pack(len(reply)) + reply)
            stream.flush()
    return 0


def _reply(jobs: _Jobs, frame: bytes) -> dict[str, Any]:
    method, arguments = pickle.loads(frame)  # the service is trusted
    del frame
    try:
        return {"value": jobs.run(method, arguments)}
    except PromptError as error:
        return {"rejected": [str(error), error.param, error.code]}
    except MemoryError:
        os._exit(1)  # the process may be in an inconsistent state
    except Exception as error:
        logger.exception("%s failed", method)
        return {"failed": f"{type(error).__name__}: {error}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class _Jobs:
    """A worker's jobs. SIGALRM is not handled, so the kernel kills a process that exceeds its time."""

    def __init__(self, tokenizer: Tokenizer, limits: JobLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._table: TokenTable | None = None

    def run(self, method: str, arguments: dict[str, Any]) -> Any:
        """Run a method of this class or else of the tokenizer."""
        self._alarm(self._limits.tokenize_s)
        return getattr(self if hasattr(self, method) else self._tokenizer, method)(**arguments)

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        return [self._tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def encode_chat(self, chat: Conversation, limit: TextLimit) -> list[int]:
        self._alarm(self._limits.render_s)
        text = self._tokenizer.render(chat)
        limit.check(len(text), param="messages")
        self._alarm(self._limits.tokenize_s)
        return self._tokenizer.encode(text, add_special_tokens=chat.add_special_tokens, param="messages")

    def grammar(self, structure: tuple[Any, ...], end_token_ids: tuple[int, ...], vocab_size: int) -> str:
        asked = Structure(*structure)
        try:
            if self._table is None:
                self._table = TokenTable(self._tokenizer.path, vocab_size, end_token_ids)
            self._table.load()
            self._alarm(self._limits.grammar_s)
            return _on_small_stack(partial(_compiled, asked, self._table))
        except GrammarError as error:
            raise PromptError(f"{asked.param}: {error}", param=asked.param) from None

    def _alarm(self, seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _compiled(asked: Structure, table: TokenTable) -> str:
    """Return a grammar that compiles. Raises GrammarError.

    The schemas of a `oneOf` must differ as they are written: closed ones may differ only in what they leave out.
    """
    text = partial(grammar_text, asked.kind, asked.source, whitespace=asked.whitespace)
    grammar = text(closes_objects=asked.closes_objects)
    table.compile(grammar)
    if asked.kind == "json" and asked.closes_objects and '"oneOf"' in grammar:
        try:
            table.compile(text(closes_objects=False))
        except GrammarError as error:
            if str(error) == ONE_OF:
                raise
    if asked.thought is not None:
        grammar = table.behind(ThoughtMarks(*asked.thought), grammar)
        table.compile(grammar)
    return grammar


def _on_small_stack(function: Callable[[], str]) -> str:
    """Call a function on a stack of `GRAMMAR_STACK_BYTES`. A stack that overflows kills the process."""
    threading.stack_size(GRAMMAR_STACK_BYTES)
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


def _address_space() -> int:
    """Return the size of this process's address space in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    # transformers imports torch if it can, which takes five times the time and memory of everything else together.
    sys.modules["torch"] = None  # type: ignore[assignment]  # documented: None raises ModuleNotFoundError
    _fd, _path, _revision, _limits = sys.argv[1:]
    main(socket.socket(fileno=int(_fd)), _path, _revision or None, JobLimits(**json.loads(_limits)))
