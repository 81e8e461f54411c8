"""Engines' and tokenizers' processes as forks of a process that has imported what they need, for tests.

    with warm_starts():
        ...     # local engines, services and tokenizer pools start as always, without the seconds of their imports

A test sees the same processes: they run the same module with the same arguments, environment and files, in a group of
their own, and die with this process. What has an environment that imports could depend on starts anew.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from cluster.system.child import run
from cluster.system.fork_server import ForkServer, serve

_READ_BY_IMPORTS = ("CUDA", "GLIBC", "HF_", "HOME", "LD_", "MALLOC", "MKL", "OMP", "OPENBLAS", "PYTHON", "THP", "TOKEN")
_READ_BY_IMPORTS += ("TRANSFORMERS", "TRITON", "XDG")
"""Beginnings of the environment's variables that the imported modules or the C library read."""
_RANKS, _TOKENIZERS = "cluster.system.fork_server", "cluster.text.tokenizer_worker"


def _key(module: str, env: Mapping[str, str]) -> tuple[str, frozenset[tuple[str, str]]]:
    return module, frozenset(item for item in env.items() if item[0].startswith(_READ_BY_IMPORTS))


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
    servers = {
        _key(module, env): ForkServer([module], env, module=__name__)
        for module, env in ((_RANKS, ranks), (_TOKENIZERS, tokenizers))
    }

    def popen(command: Any, **options: Any) -> Any:
        env = options.get("env") or os.environ
        if command[:4] != [sys.executable, "-P", "-m", "cluster.system.child"] or {"stdout", "stderr"} & options.keys():
            return subprocess.Popen(command, **options)
        if (server := servers.get(_key(command[5], env))) is None or server.is_down:
            return subprocess.Popen(command, **options)
        fds = [1, 2, *options.get("pass_fds", ())]
        return server.fork(fds, numbers=fds, arguments=command[6:], env=dict(env), cwd=os.getcwd())

    stand_in = SimpleNamespace(**vars(subprocess) | {"Popen": popen})
    try:
        with mock.patch.object(cluster.system.child, "subprocess", stand_in):
            yield
    finally:
        for server in servers.values():
            server.close()


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
    module: str, fds: list[int], numbers: list[int], arguments: list[str], env: dict[str, str], cwd: str
) -> int:
    high = [os.dup(fd) if fd in numbers else fd for fd in fds]
    while any(fd in numbers for fd in high):
        high = [os.dup(fd) if fd in numbers else fd for fd in high]
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    tempfile.tempdir = None
    return run(module, arguments)


if __name__ == "__main__":
    _import_for(sys.argv[2])
    serve(socket.socket(fileno=int(sys.argv[1])), partial(_become, sys.argv[2]))
