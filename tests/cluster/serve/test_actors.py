"""The environment of a worker actor before it imports torch, tested without Ray."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import cluster.serve.actors
from cluster.rank_placement import interface_of
from cluster.serve.actors import Worker, packages_folder
from tests.support.engines import bundled
from workers.config import EngineConfig
from workers.models.readers import read_specs

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
CONFIG = EngineConfig(model_path="model").to_json()
SPECS = read_specs(bundled()).to_json()


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the node's address that Ray reports; restore the environment afterwards."""
    for name in INTERFACES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setattr(cluster.serve.actors.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    return "127.0.0.1"


def test_ranks_use_the_interface_of_their_nodes_address(address: str) -> None:
    """By default gloo and NCCL choose one; if the host name resolves to 127.0.1.1, other nodes cannot reach gloo's."""
    Worker(CONFIG, SPECS, 0, packages_folder(), {})
    name = interface_of(address)
    assert name is not None and name.startswith("lo")
    assert [os.environ[variable] for variable in INTERFACES] == [name, f"={name}"]


def test_a_configured_interface_is_kept(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    Worker(CONFIG, SPECS, 0, packages_folder(), {})
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_an_address_without_an_interface_sets_none(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.serve.actors.ray.util, "get_node_ip_address", lambda: "203.0.113.9")
    Worker(CONFIG, SPECS, 0, packages_folder(), {})
    assert not set(INTERFACES) & os.environ.keys()


def test_an_actor_logs_what_a_process_logs() -> None:
    code = f"""if True:
        import logging
        from cluster.serve.actors import Worker, packages_folder
        Worker({CONFIG!r}, {SPECS!r}, 0, packages_folder(), {{}})
        logging.getLogger("verifier.worker").info("joined a world")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "verifier 0 INFO verifier.worker: joined a world" in done.stderr
