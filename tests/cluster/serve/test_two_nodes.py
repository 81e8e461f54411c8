"""An engine across two nodes: two Rays in network namespaces of this machine, with a link between them that can be cut.

It takes the rights to make network namespaces.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.system.processes import descendants, name_of

ROOT = Path(__file__).parents[3]
WAIT_FOR_RAY = """
import socket, sys, time
while socket.socket().connect_ex((sys.argv[1], 6379)):
    time.sleep(0.5)
"""
ADDRESSES = {"head": "10.199.77.1", "other": "10.199.77.2"}
START_S = 400.0
CUT_S = 30.0


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


class TwoNodes:
    """Namespaces `head` and `other`. In this process's own namespace nothing of them can be reached."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._name = {node: f"secateur-{os.getpid()}-{node}" for node in ADDRESSES}
        self._nodes: dict[str, subprocess.Popen[str]] = {}
        for node in ADDRESSES:
            ip("netns", "add", self._name[node])
            stack.callback(subprocess.run, ["ip", "netns", "delete", self._name[node]], capture_output=True)
        ip(
            "-n",
            self._name["head"],
            "link",
            "add",
            "pair",
            "type",
            "veth",
            "peer",
            "pair",
            "netns",
            self._name["other"],
        )
        for node, address in ADDRESSES.items():
            ip("-n", self._name[node], "address", "add", f"{address}/24", "dev", "pair")
            for link in ("lo", "pair"):
                ip("-n", self._name[node], "link", "set", link, "up")

    def run(self, node: str, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command on a node."""
        env = os.environ | {
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ADDRESS": f"{ADDRESSES['head']}:6379",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # on a busy machine 5 s are too few
            "TMPDIR": str(self._folder),
        }
        inside = ["ip", "netns", "exec", self._name[node], sys.executable, *command]
        process = subprocess.Popen(inside, env=env, text=True, cwd=ROOT, **options)
        self._stack.callback(end, process)
        return process

    def start(self, node: str) -> None:
        """Start a Ray node."""
        command = ["-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={ADDRESSES[node]}"]
        command += ["--num-cpus=4", f'--resources={{"{node}": 1}}', "--object-store-memory=100000000"]
        if node == "head":
            command += ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self._folder}"]
        else:
            command += [f"--address={ADDRESSES['head']}:6379"]
        self._nodes[node] = self.run(node, *command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        assert self.run(node, "-c", WAIT_FOR_RAY, ADDRESSES["head"]).wait(START_S) == 0

    def kill(self, node: str) -> None:
        """Kill all processes of a node."""
        end(self._nodes[node])

    def set_link(self, state: str) -> None:
        """Cut the link ("down") or heal it ("up")."""
        ip("-n", self._name["other"], "link", "set", "pair", state)

    def node_of(self, pid: int) -> str:
        """Return the node that a process runs on; "" for neither."""
        for node, process in self._nodes.items():
            if os.readlink(f"/proc/{pid}/ns/net") == os.readlink(f"/proc/{process.pid}/ns/net"):
                return node
        return ""


class Deployed:
    """The process that deploys a service and asks it."""

    def __init__(self, nodes: TwoNodes) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = nodes.run("head", "-m", "tests.cluster.serve.deploy_across", **pipes)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self.line() == "ready"

    def ask(self) -> None:
        """Send a request, and wait until its answer has begun."""
        assert self._process.stdin is not None
        self._process.stdin.write("ask\n")
        self._process.stdin.flush()
        assert self.line() == "begun"

    def answer(self) -> list[int]:
        """Return the tokens of the request that was sent."""
        tokens: list[int] = json.loads(self.line())
        return tokens

    def line(self) -> str:
        """Return the next line that it prints; "" when it has ended."""
        return self._lines.get(timeout=START_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                if line.startswith(("ready", "begun", "[")):
                    self._lines.put(line.strip())
        self._lines.put("")


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process with all that it has started."""
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(process.pid)
        for each in [found, *found.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces can be made by root alone")
    try:
        probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare, of util-linux")
    if probe.returncode:
        pytest.skip(f"no network namespace can be made here: {probe.stderr.strip()}")
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="s", ignore_cleanup_errors=True) as folder,
        ExitStack() as stack,
    ):
        yield TwoNodes(Path(folder), stack)


def ranks(nodes: TwoNodes) -> dict[str, tuple[int, str]]:
    """Return the process id and the node of each rank on the two nodes, by its role."""
    found = {}
    for pid in descendants():
        with suppress(OSError):  # it has just ended
            # Ranks on neither node belong to services that other tests have left running.
            if (name := name_of(pid)).startswith("verifier") and (node := nodes.node_of(pid)):
                found[name] = pid, node
    return found


@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_engine_across_two_nodes_outlives_a_cut_link_and_the_loss_of_a_node(nodes: TwoNodes) -> None:
    nodes.start("head")
    nodes.start("other")
    service = Deployed(nodes)
    first = ranks(nodes)
    assert {name: node for name, (_, node) in first.items()} == {"verifier 0": "head", "verifier 1": "other"}
    service.ask()
    wanted = service.answer()
    assert len(wanted) == 400

    service.ask()
    nodes.set_link("down")
    time.sleep(CUT_S)
    nodes.set_link("up")
    assert service.answer() == wanted

    service.ask()
    nodes.kill("other")
    time.sleep(1.0)
    nodes.start("other")
    assert service.answer() == wanted
    last = ranks(nodes)
    assert {name: node for name, (_, node) in last.items()} == {"verifier 0": "head", "verifier 1": "other"}
    assert {pid for pid, _ in last.values()}.isdisjoint({pid for pid, _ in first.values()})
