"""One worker rank as a Ray actor. It imports torch late: torch reads the environment once, when it is imported."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import ray

import workers
from cluster.rank_placement import interface_env
from cluster.serve.progress import report_stage
from workers.config import PULSE_VARIABLE, EngineConfig
from workers.logs import log_as
from workers.models.specs import Specs
from workers.pulse import send_beats_if_asked

logger = logging.getLogger(__name__)


class Worker:
    """One rank in one process. It sets the environment before anything imports torch."""

    def __init__(self, config: str, specs: str, rank: int, packages: str, env: Mapping[str, str]) -> None:
        os.environ.update(env)
        for name, value in interface_env(ray.util.get_node_ip_address()).items():
            os.environ.setdefault(name, value)
        check_packages(packages)
        self._config = EngineConfig.from_json(config)
        self._specs = Specs.from_json(specs)
        self._rank = rank
        log_as(self._config.role_of(rank))
        send_beats_if_asked(PULSE_VARIABLE, rank)
        self._stop_listening: Callable[[], None] = lambda: None

    def node_id(self) -> str:
        """Return the id of the Ray node that this actor runs on."""
        return ray.get_runtime_context().get_node_id()

    def open_store(self) -> str:
        """Open the rendezvous store on the first rank, keep it alive and return its address."""
        from workers.comm.groups import open_store

        store, address = open_store(ray.util.get_node_ip_address())
        self._stop_listening = store.stop_listening
        return address

    def run(self, store: str, front: str | None, link: str | None = None) -> None:
        """Run this rank until the engine is told to stop. Raises if the engine dies.

        link: for a rank that replaces one of a lost drafter, the address at which verifier 0 offers a link.
        """
        if self._rank < self._config.tensor_parallel_size:
            from verifier.worker import run as run_verifier

            on_joined = self._joined if front is not None else None
            run_verifier(self._config, self._specs, self._rank, store, front=front, on_joined=on_joined)
        else:
            from drafter.worker import run as run_drafter

            run_drafter(self._config, self._specs, self._rank, store, link=link, on_joined=self._stop_listening)

    def _joined(self) -> None:
        self._stop_listening()
        report_stage("warming up")


def packages_folder() -> str:
    """Return the folder that holds the top-level packages."""
    return str(Path(workers.__file__).resolve().parents[1])


def check_packages(expected: str) -> None:
    """Raise ImportError if `workers` is not Secateur's package.

    Ray puts the current folder first on a worker's path, so a folder named `workers` there would shadow ours. Another
    location of our package (another node, another checkout) is only logged.
    """
    found = packages_folder()
    if not (Path(found) / "workers" / "comm" / "ipc.py").exists():
        raise ImportError(
            f"'workers' is imported from {found}, which is not Secateur's (expected {expected}); "
            f"start Ray from another folder. sys.path begins with {sys.path[:3]}"
        )
    if found != expected:
        logger.warning("the packages come from %s here and from %s on the replica", found, expected)
