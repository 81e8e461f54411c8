"""The processes that render chat templates and tokenize.

A parent loads the tokenizer once; whenever the front asks for a worker it forks one, in milliseconds and with nearly no
memory of its own. So killing a worker is a cheap way to end a job, and the only one that ends any: a template runs in
Jinja, a text in Rust, and a thread in either cannot be stopped. Neither process imports torch.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from dataclasses import asdict, dataclass
from typing import Any

import msgpack

from cluster.http.errors import PromptError
from cluster.http.tokenizer import TextLimit, Tokenizer
from cluster.system.child import die_with_parent

logger = logging.getLogger(__name__)

COMMAND = struct.Struct("<i")
"""From the front to the parent: the pid of a worker to kill, or 0 with a socket for a new worker to serve."""
LENGTH = struct.Struct("<I")
"""Before every frame between the front and a worker."""
READY = b"ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """What one job may take before the kernel ends its worker."""

    render_s: float = 2.0
    """A chat template takes milliseconds; on a busy machine some tens of them."""
    tokenize_s: float = 10.0
    """About a million tokens."""
    memory_bytes: int = 1 << 30
    """Beyond what the tokenizer takes: a megabyte of text needs up to 220."""

    def to_json(self) -> str:
        """Return the limits as JSON, for a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> JobLimits:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))


def main(fd: int, path: str, revision: str | None, limits: JobLimits) -> None:
    """The parent's life: loads the tokenizer, says READY, then forks and kills as it is told. Ends with the front."""
    control = socket.socket(fileno=fd)
    tokenizer = Tokenizer(path, revision=revision)
    with contextlib.suppress(PromptError):
        tokenizer.render([{"role": "user", "content": "a"}])  # compiles the template, once for all workers
    gc.collect()
    gc.freeze()  # what the workers share is not touched by their collections, so it stays shared
    control.sendall(READY)
    parent, children = os.getpid(), set[int]()
    while True:
        command, fds, _, _ = socket.recv_fds(control, COMMAND.size, 1)
        if not command:
            return
        children -= {child for child in children if os.waitpid(child, os.WNOHANG) != (0, 0)}  # ended by themselves
        (pid,) = COMMAND.unpack(command)
        if pid in children:  # not yet waited for, so nobody else has this pid
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            children.remove(pid)
        elif fds:
            if (child := os.fork()) == 0:
                control.close()
                _worker(socket.socket(fileno=fds[0]), tokenizer, limits, parent)
                os._exit(0)
            os.close(fds[0])
            children.add(child)


def _worker(front: socket.socket, tokenizer: Tokenizer, limits: JobLimits, parent: int) -> None:
    """A worker's life: one job after the other, until the front hangs up or a limit is passed."""
    die_with_parent(parent)
    most = _address_space() + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an allocation that fails in Rust aborts the process
    jobs = _Jobs(tokenizer, limits)
    send_frame(front, COMMAND.pack(os.getpid()))
    while (frame := receive_frame(front)) is not None:
        send_frame(front, msgpack.packb(_reply(jobs, frame), unicode_errors="surrogatepass"))


def _reply(jobs: _Jobs, frame: bytes) -> dict[str, Any]:
    method, arguments = pickle.loads(frame)  # from the front, which this process belongs to
    del frame
    try:
        return {"value": getattr(jobs, method)(**arguments)}
    except PromptError as error:
        return {"refused": [str(error), error.param, error.code]}
    except MemoryError:
        os._exit(1)  # what is left of this process is not to be relied on
    except Exception as error:
        logger.exception("%s failed", method)
        return {"failed": f"{type(error).__name__}: {error}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class _Jobs:
    """What a worker can do, each part under an alarm that nobody handles: the kernel ends the process."""

    def __init__(self, tokenizer: Tokenizer, limits: JobLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        self._alarm(self._limits.tokenize_s)
        return [self._tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def encode_chat(self, limit: TextLimit, add_special_tokens: bool, **chat: Any) -> list[int]:
        self._alarm(self._limits.render_s)
        text = self._tokenizer.render(**chat)
        limit.check(len(text), param="messages")
        self._alarm(self._limits.tokenize_s)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def bad_words(self, words: list[str]) -> list[list[int]]:
        self._alarm(self._limits.tokenize_s)
        return self._tokenizer.bad_words(words)

    def token_strings(self, ids: list[int]) -> list[str]:
        self._alarm(self._limits.tokenize_s)
        return self._tokenizer.token_strings(ids)

    def decode(self, ids: list[int]) -> str:
        self._alarm(self._limits.tokenize_s)
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _alarm(self, seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)


def send_frame(to: socket.socket, payload: bytes) -> None:
    """Send one frame: its length, then its bytes."""
    to.sendall(LENGTH.pack(len(payload)) + payload)


def receive_frame(source: socket.socket) -> bytes | None:
    """The next frame, None if the other end has hung up."""
    if (head := _receive(source, LENGTH.size)) is None:
        return None
    return _receive(source, LENGTH.unpack(head)[0])


def _receive(source: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        if (received := source.recv_into(view[filled:])) == 0:
            return None
        filled += received
    return bytes(data)


def _address_space() -> int:
    """Of this process, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _hide(package: str) -> None:
    """Python's own sign for "not installed". Importing torch, as transformers does where it can, takes five times the
    time and memory of all the rest."""
    sys.modules[package] = None  # type: ignore[assignment]  # documented: None raises ModuleNotFoundError


if __name__ == "__main__":
    _hide("torch")
    _fd, _path, _revision, _limits = sys.argv[1:]
    main(int(_fd), _path, _revision or None, JobLimits.from_json(_limits))
