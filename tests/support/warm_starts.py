"""Engines' and tokenizers' processes as forks of a process that has imported what they need, for tests.

    with warm_starts():
        ...     # local engines, services and tokenizer pools start as always, without the seconds of their imports

A test sees the same processes: they run the same module with the same arguments, environment and files, in a group of
their own, and die with this process. What has an environment that imports could depend on starts anew.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from cluster.system.child import die_with_parent, run, start_child
from cluster.system.fork_server import ForkedProcess

_FORK_TIMEOUT_S = 120.0  # with the imports, on a busy machine
_MAX_BYTES = 1 << 18
_CHILD_SIGNALS = {signal.SIGCHLD}
_READ_BY_IMPORTS = ("CUDA", "GLIBC", "HF_", "HOME", "LD_", "MALLOC", "MKL", "OMP", "OPENBLAS", "PYTHON", "THP", "TOKEN")
_READ_BY_IMPORTS += ("TRANSFORMERS", "TRITON", "XDG")
"""Beginnings of the environment's variables that the imported modules or the C library read."""
_RANKS, _TOKENIZERS = "cluster.system.fork_server", "cluster.text.tokenizer_worker"


def _key(module: str, env: Mapping[str, str]) -> tuple[str, frozenset[tuple[str, str]]]:
    return module, frozenset(item for item in env.items() if item[0].startswith(_READ_BY_IMPORTS))


class _Zygote:
    """The owner's end of the process that imports and forks."""

    def __init__(self, module: str, env: Mapping[str, str]) -> None:
        self._control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with remote:
            arguments = [str(remote.fileno()), module]
            self._process = start_child(__name__, arguments, env=dict(env), pass_fds=[remote.fileno()])
        self._starting = threading.Lock()
        self._forked: queue.SimpleQueue[ForkedProcess] = queue.SimpleQueue()
        self._children: dict[int, ForkedProcess] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def is_down(self) -> bool:
        return self._process.poll() is not None

    def fork(self, arguments: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int]) -> ForkedProcess:
        message = {"arguments": list(arguments), "env": dict(env), "cwd": os.getcwd(), "fds": [1, 2, *pass_fds]}
        with self._starting:
            socket.send_fds(self._control, [json.dumps(message).encode()], [1, 2, *pass_fds])
            return self._forked.get(timeout=_FORK_TIMEOUT_S)

    def close(self) -> None:
        self._process.kill()  # the kernel kills its forks with it
        self._process.wait()
        self._reader.join()
        self._control.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._control.recv(_MAX_BYTES):
                message = json.loads(data)
                if "forked" in message:
                    child = self._children[message["forked"]] = ForkedProcess(message["forked"])
                    self._forked.put(child)
                else:
                    self._children.pop(message["ended"]).end(message["code"])


@contextlib.contextmanager
def warm_starts() -> Iterator[None]:
    """Start engines' and tokenizers' processes of this process as forks. They end with this context."""
    import cluster.system.child
    import cluster.text.tokenizer_pool
    from cluster.engine.process_host import ONE_THREAD, python_path
    from cluster.engine.rank_placement import worker_env
    from workers.config import EngineConfig

    ranks = os.environ | worker_env(EngineConfig(model_path="")) | {"PYTHONPATH": python_path()} | ONE_THREAD
    tokenizers = cluster.text.tokenizer_pool._environment()
    zygotes = {_key(module, env): _Zygote(module, env) for module, env in ((_RANKS, ranks), (_TOKENIZERS, tokenizers))}

    def popen(command: Any, **options: Any) -> Any:
        env = options.get("env") or os.environ
        if command[:4] != [sys.executable, "-P", "-m", "cluster.system.child"] or {"stdout", "stderr"} & options.keys():
            return subprocess.Popen(command, **options)
        if (zygote := zygotes.get(_key(command[5], env))) is None or zygote.is_down:
            return subprocess.Popen(command, **options)
        return zygote.fork(command[6:], env, options.get("pass_fds", ()))

    stand_in = SimpleNamespace(**vars(subprocess) | {"Popen": popen})
    try:
        with mock.patch.object(cluster.system.child, "subprocess", stand_in):
            yield
    finally:
        for zygote in zygotes.values():
            zygote.close()


def main(control: socket.socket, module: str) -> None:
    """Import what the module needs, then fork a process that runs it for each message, and report the ends."""
    _import_for(module)
    gc.collect()
    gc.freeze()
    me = os.getpid()
    signal.signal(signal.SIGCHLD, lambda *_: _report_ends(control))
    while True:
        data, fds, _, _ = socket.recv_fds(control, _MAX_BYTES, 16)
        if not data:
            return
        message = json.loads(data)
        signal.pthread_sigmask(signal.SIG_BLOCK, _CHILD_SIGNALS)  # its end must not be reported before its begin
        if (pid := os.fork()) == 0:
            control.close()
            _become(me, fds, message["fds"], module, message["arguments"], message["env"], message["cwd"])
        for fd in fds:
            os.close(fd)
        control.send(json.dumps({"forked": pid}).encode())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _CHILD_SIGNALS)


def _import_for(module: str) -> None:
    """Import all but the module itself, which runs as __main__."""
    if module == _RANKS:
        from cluster.engine.process_host import PRELOADED

        for name in PRELOADED:
            importlib.import_module(name)
        sys.modules.pop(_RANKS)
    else:
        sys.modules["torch"] = None  # type: ignore[assignment]  # hidden, as in the module itself
        import msgpack  # noqa: F401

        import workers.sampling.grammar  # noqa: F401
        from cluster.text.tokenizer import Tokenizer

        bundled = Path(importlib.import_module("secateur").__file__ or "").parent / "bundled" / "target"
        Tokenizer(str(bundled)).encode_chat([{"role": "user", "content": "a"}])


def _become(
    parent: int, fds: list[int], numbers: list[int], module: str, arguments: list[str], env: dict[str, str], cwd: str
) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _CHILD_SIGNALS)
        high = [os.dup(fd) if fd in numbers else fd for fd in fds]
        while any(fd in numbers for fd in high):
            high = [os.dup(fd) if fd in numbers else fd for fd in high]
        for fd, number in zip(high, numbers, strict=True):
            os.dup2(fd, number)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        tempfile.tempdir = None
        code = run(module, arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _report_ends(control: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            pid, status = ended
            control.send(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
