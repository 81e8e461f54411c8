"""A fork server starts processes at once, tells how they end, and leaves none behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import cluster.system.fork_server as module
from cluster.system.fork_server import ForkedProcess, ForkServer, ForkServerDown
from cluster.system.processes import is_running, wait_gone

TOLD = """
import os, sys
print(sys.argv[1:], os.environ["COLOUR"], "csv" in sys.modules, __name__)
print("an error", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""
SLEEPS = "import time\nprint('here', flush=True)\ntime.sleep(60)\n"
OWNER = """
import os, sys, time
from cluster.system.fork_server import ForkServer
server = ForkServer([], os.environ)
process = server.start("sleeps", [], {})
process.stdout.readline()
print(server.pid, process.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment in which the modules `told` and `sleeps` are found."""
    (tmp_path / "told.py").write_text(TOLD)
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])}


@pytest.fixture
def server(env: dict[str, str]) -> Iterator[ForkServer]:
    with ForkServer(["csv"], env) as started:
        yield started
    assert wait_gone([started.pid], timeout_s=30) == []


@contextmanager
def running(server: ForkServer, module: str = "sleeps", *arguments: str, **env: str) -> Iterator[ForkedProcess]:
    process = server.start(module, arguments, env)
    with process.stdout, process.stderr:
        if module == "sleeps":
            assert process.stdout.readline() == "here\n"
        yield process


def test_a_process_has_its_arguments_environment_output_and_exit_code(server: ForkServer) -> None:
    with running(server, "told", "0", COLOUR="red") as first, running(server, "told", "7", COLOUR="blue") as second:
        for process, code, colour in ((first, 0, "red"), (second, 7, "blue")):
            assert process.wait(30) == process.poll() == code
            assert process.stdout.read() == f"['{code}'] {colour} True __main__\n"
            assert process.stderr.read() == "an error\n"
    assert "COLOUR" not in os.environ


def test_a_process_is_forked_by_one_thread_and_has_a_group_and_signals_of_its_own(server: ForkServer) -> None:
    assert "Threads:\t1\n" in Path(f"/proc/{server.pid}/status").read_text()
    with running(server) as process:
        assert os.getpgid(process.pid) == process.pid
        assert "SigBlk:\t0000000000000000\n" in Path(f"/proc/{process.pid}/status").read_text()
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM
        assert not Path(f"/proc/{process.pid}").exists(), "not even a zombie"


def test_imports_are_waited_for_once(env: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "slow.py").write_text(f"import time; time.sleep(1); open({str(log)!r}, 'a').write('imported ')\n")
    with ForkServer(["slow"], env) as server:
        for _ in range(2):
            with running(server):
                assert log.read_text() == "imported "


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_processes_end_with_a_server_that_ends(server: ForkServer, number: signal.Signals) -> None:
    with running(server) as process:
        os.kill(server.pid, number)
        assert process.wait(30) == -signal.SIGKILL
        assert wait_gone([process.pid], timeout_s=30) == []
    assert server.is_down
    for _ in range(2):
        with pytest.raises(ForkServerDown, match=rf"\(pid {server.pid}\) has ended"):
            server.start("sleeps", [], {})


def test_a_stopped_server_hides_no_end_and_is_killed_when_it_does_not_fork(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FORK_TIMEOUT_S", 0.5)
    with running(server) as first, running(server) as second:
        os.kill(server.pid, signal.SIGSTOP)
        assert first.poll() is None
        os.kill(first.pid, signal.SIGKILL)
        assert first.wait(30) == first.poll() == -signal.SIGKILL
        with pytest.raises(ForkServerDown):
            server.start("sleeps", [], {})
        assert second.wait(30) == -signal.SIGKILL
        assert wait_gone([server.pid, first.pid, second.pid], timeout_s=30) == []


def test_a_server_that_cannot_import_is_down(env: dict[str, str]) -> None:
    with ForkServer(["no_such_module"], env) as server, pytest.raises(ForkServerDown):
        server.start("sleeps", [], {})


def test_server_and_processes_end_with_a_killed_owner(env: dict[str, str]) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], env=env, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = list(map(int, owner.stdout.readline().split()))
        assert len(pids) == 2 and all(map(is_running, pids))
        owner.kill()
    assert wait_gone(pids, timeout_s=30) == []
