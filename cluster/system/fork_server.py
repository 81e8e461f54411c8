"""A process that has imported what other processes need, and becomes them by forking, in milliseconds.

with ForkServer(["verifier.worker"], os.environ) as server:
    process = server.start("verifier", ["--rank", "0", ...], {"CUDA_VISIBLE_DEVICES": "0"})

A module that prepares more than imports calls `serve` itself, as `cluster.text.tokenizer_worker` does. Forking is safe
because the server has one thread and touches no device. Its memory is shared with its children until they write to it.
The kernel kills it with this process, and its children with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO, Any, Self

from cluster.system.child import die_with_parent, run, start_child
from cluster.system.processes import is_running
from secateur.errors import SecateurError

IMPORT_TIMEOUT_S = 120.0
"""Time to import the modules, from a cold disk at worst."""
FORK_TIMEOUT_S = 20.0
"""A server that has not forked in this time is stopped itself. It is killed then."""
REPORT_S = 1.0
"""Time to report the end of a process, after which the process counts as killed."""
_MAX_BYTES = 1 << 17  # of a message, which Linux takes whole (SOCK_SEQPACKET); no longer than an argument of a command
_MAX_FILES = 16
_CHILD_SIGNALS = {signal.SIGCHLD}


class ForkServerDown(SecateurError, RuntimeError):
    """The fork server could not start, or it has died with its processes."""


class ForkedProcess:
    """A process that a fork server started, with the part of `subprocess.Popen`'s interface that is needed here."""

    stdout: IO[str] | None = None
    stderr: IO[str] | None = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._has_ended = threading.Event()

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        if self._code is None and not is_running(self.pid) and not self._has_ended.wait(REPORT_S):
            self.end(-signal.SIGKILL)  # the server hangs
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code. Raises subprocess.TimeoutExpired."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if not self._has_ended.wait(min(REPORT_S, max(0.0, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def kill(self) -> None:
        """Kill it, unless its end has been reported."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def end(self, code: int) -> None:
        """Note its end, if that is news. The fork server's owner calls it."""
        self._code = code if self._code is None else self._code
        self._has_ended.set()


class ForkServer:
    """The owner's end. Thread-safe. Starts importing at once; `start` waits for that.

    module: what runs as the server, and gets the descriptor of its socket and these arguments; by default this module,
    whose arguments are the modules to import.
    """

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], *, module: str = __spec__.name) -> None:
        self._control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with remote:
            arguments = [str(remote.fileno()), *arguments]
            self._process = start_child(module, arguments, env=env, pass_fds=[remote.fileno()])
        self._starting = threading.Lock()
        self._forked: queue.SimpleQueue[ForkedProcess | None] = queue.SimpleQueue()  # None = the server has died
        self._children: dict[int, ForkedProcess] = {}
        self._has_imported = threading.Event()
        threading.Thread(target=self._read, name="fork-server", daemon=True).start()

    @property
    def pid(self) -> int:
        """Return the process id of the server."""
        return self._process.pid

    @property
    def is_down(self) -> bool:
        """Return whether the server has ended."""
        return not is_running(self.pid)

    @property
    def exit_code(self) -> int | None:
        """Return the exit code of the server, negative for a signal; None while it runs."""
        return self._process.wait() if self.is_down else None

    def start(self, module: str, arguments: Sequence[str], env: Mapping[str, str]) -> ForkedProcess:
        """Run a module as `python -m` does, in a process group of its own, with these additions to the environment.

        Raises ForkServerDown.
        """
        with contextlib.ExitStack() as remotes:
            ends = [os.pipe() for _ in range(2)]
            stdout, stderr = (os.fdopen(end, errors="replace") for end, _ in ends)
            for _, end in ends:
                remotes.callback(os.close, end)
            try:
                process = self.fork([end for _, end in ends], module=module, arguments=arguments, env=dict(env))
            except ForkServerDown:
                stdout.close()
                stderr.close()
                raise
        process.stdout, process.stderr = stdout, stderr
        return process

    def fork(self, fds: Sequence[int], **message: Any) -> ForkedProcess:
        """Fork a process that gets these open files and a message that JSON can hold. Raises ForkServerDown."""
        self.wait_imported()
        with self._starting:
            try:
                socket.send_fds(self._control, [json.dumps(message).encode()], fds)
                forked = self._forked.get(timeout=FORK_TIMEOUT_S)
            except (OSError, queue.Empty):
                self._process.kill()
                forked = None
        if forked is None:
            raise ForkServerDown(f"the fork server (pid {self.pid}) has ended")
        return forked

    def wait_imported(self) -> None:
        """Wait until the modules are imported, or the server has ended. Raises ForkServerDown if it takes too long."""
        if not self._has_imported.wait(IMPORT_TIMEOUT_S):
            self._process.kill()
            raise ForkServerDown(f"the fork server had not imported its modules after {IMPORT_TIMEOUT_S:.0f} s")

    def close(self) -> None:
        """Kill the server and its processes. May be called twice."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._control.recv(_MAX_BYTES):
                self._take(**json.loads(data))
        self._process.wait()
        self._forked.put(None)
        self._has_imported.set()
        for child in self._children.values():
            child.end(-signal.SIGKILL)
        self._control.close()

    def _take(self, has_imported: bool = False, forked: int = 0, ended: int = 0, code: int = 0) -> None:
        if has_imported:
            self._has_imported.set()
        elif forked:
            self._children[forked] = ForkedProcess(forked)
            self._forked.put(self._children[forked])
        else:
            self._children.pop(ended).end(code)


def serve(control: socket.socket, run_child: Callable[..., int]) -> None:
    """Tell that all is prepared, then fork a process for each message, and report the ends of processes.

    run_child: what a process does; it gets the open files and the message, and returns the exit code.
    """
    gc.collect()
    gc.freeze()  # the children's garbage collections would write to shared pages, and so copy them
    server = os.getpid()
    signal.signal(signal.SIGCHLD, lambda *_: _report_ends(control))
    _send(control, has_imported=True)
    while True:
        message, fds, _, _ = socket.recv_fds(control, _MAX_BYTES, _MAX_FILES)
        if not message:
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, _CHILD_SIGNALS)  # its end must not be reported before its begin
        if (pid := os.fork()) == 0:
            control.close()
            _become(server, partial(run_child, fds, **json.loads(message)))
        for fd in fds:
            os.close(fd)
        _send(control, forked=pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _CHILD_SIGNALS)


def _become(server: int, run_child: Callable[[], int]) -> None:
    code = 1
    try:
        os.setpgid(0, 0)  # as for every child: the owner stops it, not the terminal's Ctrl-C
        die_with_parent(server)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _CHILD_SIGNALS)
        code = run_child()
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def _run_module(fds: Sequence[int], module: str, arguments: list[str], env: Mapping[str, str]) -> int:
    for fd, standard in zip(fds, (1, 2), strict=True):
        os.dup2(fd, standard)
        os.close(fd)
    os.environ.update(env)
    return run(module, arguments)


def _report_ends(control: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            pid, status = ended
            _send(control, ended=pid, code=os.waitstatus_to_exitcode(status))


def _send(control: socket.socket, **message: int) -> None:
    control.send(json.dumps(message).encode())


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    serve(socket.socket(fileno=int(sys.argv[1])), _run_module)
