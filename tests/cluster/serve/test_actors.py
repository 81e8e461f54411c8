"""A rank's actor, without Ray: the environment of its ranks, and ranks that come and go."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import cluster.engine.process_host
import cluster.serve.actors
from cluster.engine.rank_exits import EngineDead, ExitKind
from cluster.engine.rank_placement import interface_of
from cluster.serve.actors import Worker, packages_folder
from cluster.system.processes import is_running
from tests.support.engines import bundled
from workers.config import EngineConfig
from workers.models.draft_methods import read_specs

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The node's address that Ray reports; a test may change it."""
    reported = ["127.0.0.1"]
    for name in INTERFACES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("cluster.system.child.subprocess", subprocess)  # no warm start, as /proc tells who was started
    monkeypatch.setattr(cluster.serve.actors.ray.util, "get_node_ip_address", lambda: reported[0])
    return reported


def worker(config: EngineConfig) -> Worker:
    return Worker(config.to_json(), 0, packages_folder())


@pytest.fixture
def standby_env(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment that a worker gives its standby process."""
    given: dict[str, str] = {}

    class Server:
        pid, is_down = 0, False

        def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
            given.update(env)

    monkeypatch.setattr(cluster.engine.process_host, "ForkServer", Server)
    return given


@pytest.mark.parametrize("is_configured", [False, True])
def test_ranks_use_the_interface_of_their_nodes_address_or_the_configured_one(
    address: list[str], standby_env: dict[str, str], is_configured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default gloo and NCCL choose one; if the host name resolves to 127.0.1.1, other nodes cannot reach gloo's."""
    if is_configured:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    worker(bundled())
    name = interface_of(address[0])
    assert name is not None and name.startswith("lo")
    assert [standby_env[variable] for variable in INTERFACES] == ["ib0" if is_configured else name, f"={name}"]


def test_an_address_without_an_interface_sets_none(address: list[str], standby_env: dict[str, str]) -> None:
    address[0] = "203.0.113.9"
    worker(bundled())
    assert standby_env and not set(INTERFACES) & standby_env.keys()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_rank_sees_the_device_that_ray_has_assigned_to_its_actor(
    address: list[str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES Ray leaves the variable alone: every rank would take GPU 0."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assigned = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ["2"]})
    monkeypatch.setattr(cluster.serve.actors.ray, "get_runtime_context", lambda: assigned)
    config = bundled()
    specs = read_specs(config).to_json()
    config = replace(config, device=device, standby=False)
    seen: list[dict[str, str]] = []

    def start_child(*_: Any, env: dict[str, str], **options: Any) -> None:
        seen.append(env)
        raise EngineDead("this is far enough")

    monkeypatch.setattr(cluster.engine.process_host, "start_child", start_child)
    with pytest.raises(EngineDead, match="far enough"):
        asyncio.run(worker(config).start(config.to_json(), specs, env={"A": "b"}, flags={"store": "127.0.0.1:1"}))
    [env] = seen
    assert (env["A"], env["CUDA_VISIBLE_DEVICES"]) == ("b", "2" if device == "cuda" else "0,1,2,3")


@pytest.mark.parametrize(("nice", "is_told"), [(15, True), (5, False)], ids=["nicer", "as Ray"])
def test_an_actor_that_is_nicer_than_its_ray_says_what_to_set(
    address: list[str], nice: int, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "getpriority", lambda which, pid: nice if pid == 0 else 5)
    worker(bundled()).host.close()
    assert ("at nice 15" in caplog.text and "set RAY_worker_niceness=0" in caplog.text) == is_told


@pytest.fixture
def front() -> Iterator[str]:
    """The address of a front that never says anything: a rank that gets so far waits for it."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/front")
        listener.listen()
        yield f"unix:{folder}/front"


@pytest.mark.parametrize("has_standby", [True, False])
def test_a_rank_starts_again_after_each_end_and_its_end_is_told(
    address: list[str],
    has_standby: bool,
    capfd: pytest.CaptureFixture[str],
    front: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster.serve.actors, "report_stage", lambda stage: None)  # it needs Ray
    config = replace(bundled(), standby=has_standby)
    specs = read_specs(config).to_json()

    async def main() -> None:
        own = worker(config)
        assert (own.host.standby_pid is not None) == has_standby
        pids = []
        for why in (None, "verifier 0 gave no sign of life", "unused"):
            store = await own.start(config.to_json(), specs, env={}, flags={"front": front})
            assert store.startswith("127.0.0.1:")
            pids += own.host.pids
            ended = asyncio.create_task(own.wait())
            await asyncio.sleep(0.1)
            if why == "unused":
                os.kill(pids[-1], signal.SIGTERM)
            else:
                assert not ended.done()
                await own.kill(why)
            exit = await asyncio.wait_for(ended, 60)
            if why is None:
                assert exit.kind is ExitKind.KILLED and f"(pid {pids[-1]}) was ended by SIGKILL" in exit.message
            elif why == "unused":
                assert exit.kind is ExitKind.STOPPED
            else:
                assert exit.kind is ExitKind.KILLED and exit.message.startswith(f"{why} and was killed")
        with pytest.raises(EngineDead, match="exited with code 2 before it named a rendezvous store"):
            await own.start(config.to_json(), specs, env={}, flags={})  # without its front
        own.host.close()
        assert not any(map(is_running, pids)) and len(set(pids)) == 3

    asyncio.run(main())
    assert "[verifier 0] " in capfd.readouterr().err, "its log is the actor's"


@pytest.mark.parametrize("module", ["cluster.serve.actors", "cluster.serve.replica", "cluster.app"])
def test_an_actor_and_the_front_s_modules_import_no_torch(module: str) -> None:
    """An actor would take as much memory as a rank, and none of its own needs it."""
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False\n"
