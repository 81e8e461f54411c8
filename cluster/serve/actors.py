"""One worker rank as a Ray actor. Imports no torch: the actor sets its environment first, and torch reads it once."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import ray

import workers
from cluster.rank_placement import interface_env
from cluster.serve.progress import tell
from workers.config import EngineConfig
from workers.logs import log_as
from workers.models.specs import Specs

logger = logging.getLogger(__name__)


class Worker:
    """One rank in one process. The environment is set before anything imports torch, which reads it only then."""

    def __init__(self, config: str, specs: str, rank: int, packages: str, env: Mapping[str, str]) -> None:
        os.environ.update(env)
        for name, value in interface_env(ray.util.get_node_ip_address()).items():
            os.environ.setdefault(name, value)
        check_packages(packages)
        self._config = EngineConfig.from_json(config)
        self._specs = Specs.from_json(specs)
        self._rank = rank
        log_as(self._config.role_of(rank))
        self._stop_listening: Callable[[], None] = lambda: None

    def node_id(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def open_store(self) -> str:
        """Rank 0: opens the rendezvous store and keeps it alive; its address."""
        from workers.comm.groups import open_store

        store, address = open_store(ray.util.get_node_ip_address())
        self._stop_listening = store.stop_listening
        return address

    def run(self, store: str, front: str | None) -> None:
        """The engine's life, or this rank's part in it. Returns when the engine was told to stop; raises if it died."""
        if self._rank < self._config.tensor_parallel_size:
            from verifier.worker import run as run_verifier

            on_joined = self._joined if front is not None else None
            run_verifier(self._config, self._specs, self._rank, store, front=front, on_joined=on_joined)
        else:
            from drafter.worker import run as run_drafter

            run_drafter(self._config, self._specs, self._rank, store)

    def _joined(self) -> None:
        self._stop_listening()
        tell("warming up")


def packages_folder() -> str:
    """Where the flat packages are imported from."""
    return str(Path(workers.__file__).resolve().parents[1])


def check_packages(expected: str) -> None:
    """Ray puts the current folder first on a worker's path: a folder named `workers` there would shadow ours.

    Only a warning when just the place differs (another node, another checkout): what must hold is that it is ours.
    """
    found = packages_folder()
    if not (Path(found) / "workers" / "comm" / "ipc.py").exists():
        raise ImportError(
            f"'workers' is imported from {found}, which is not Secateur's (expected {expected}); "
            f"start Ray from another folder. sys.path begins with {sys.path[:3]}"
        )
    if found != expected:
        logger.warning("the packages come from %s here and from %s on the replica", found, expected)
