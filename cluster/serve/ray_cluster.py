"""The Ray cluster that a service runs on: one that this process starts and stops, or one that it connects to."""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import ray
import ray._private.ray_constants
import ray._private.services
import ray._private.utils

from cluster.serve import proxy
from cluster.serve.actors import packages_folder
from cluster.serve.progress import clear_stage
from cluster.serve.signals import StopSignals
from cluster.system.gpus import VARIABLE, gpu_names
from cluster.system.processes import descendants, is_running, name_of, wait_gone
from cluster.system.progress import Progress
from secateur.errors import ConfigError, Problem, SecateurError

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 128 << 20  # Secateur stores no objects
PROCESS_EXIT_TIMEOUT_S = 5.0
START_VARIABLE, START_S = "RAY_raylet_start_wait_time_s", 300
"""The variable that sets how long each of Ray's processes may take to start, and its default here. Ray's own limits, 5
to 60 seconds, are too short on a busy machine."""
CHECKS = {
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}
"""Serve's controller checks its proxies at this interval and replaces one after three failures; by default that takes
30 s. And it kills a replica that fails three checks, as one that hangs does. By default it would wait for its running
answers, up to `graceful_shutdown_timeout_s`, and the next replica might wait for its GPUs as long."""

DEAD_PEER = {
    "RAY_core_worker_rpc_server_reconnect_timeout_base_s": "0",
    "RAY_grpc_client_check_connection_status_interval_milliseconds": "50",
}
"""Ray's processes ask after 50 ms whether a peer that they cannot reach is dead. When a proxy dies, a replica's event
loop waits for the answer, for one stream after the other. By default each wait takes a second, and with 15 streams
Serve would take the replica for dead, too."""

PRIORITY = {"RAY_worker_niceness": "0"}
"""Ray's workers, and so replicas and ranks, get Ray's own priority. By default they run at nice 15, and get what other
processes leave of the processor."""


@contextmanager
def ray_cluster(address: str | None, signals: StopSignals, progress: Progress) -> Iterator[None]:
    """Connect to the cluster at `address`, or start a Ray on this machine that ends with the context."""
    # Ray's SIGTERM handler exits at once, even during a clean-up.
    with _replaced(ray._private.utils, "set_sigterm_handler", lambda handler: None):
        with local_cluster(signals, progress) if address is None else _remote_cluster(address, signals, progress):
            yield


@contextmanager
def local_cluster(signals: StopSignals, progress: Progress) -> Iterator[None]:
    """Start a Ray on this machine that ends with the context. Never joins a Ray that is already running."""
    environment = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        # Workers import the same packages as this process, whatever the current folder is.
        "PYTHONPATH": os.pathsep.join(filter(None, [packages_folder(), os.environ.get("PYTHONPATH")])),
        **proxy.environment(),
    }
    if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        # Ray enables token authentication by default, and would write a token to the user's home without this one.
        environment |= {"RAY_AUTH_TOKEN": _token()}
    defaults = {**_start_limits(), **CHECKS, **DEAD_PEER, **PRIORITY}
    environment |= {name: value for name, value in defaults.items() if name not in os.environ}
    names = gpu_names()
    if any(name.startswith("MIG-") for name in names):  # Ray would count cards, and name slices by an index
        environment[VARIABLE] = ",".join(names)
    saved = {name: os.environ.get(name) for name in (*environment, "RAY_AUTH_MODE")}
    os.environ.update(environment)
    others = set(descendants())
    try:
        # By default Ray listens on every interface: it replaces a loopback address by the machine's address, unless
        # clusters are disabled, as they are on macOS. The HTTP proxy listens on --host.
        on_loopback = _replaced(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", False)
        with progress.during("starting Ray"), on_loopback, _asking_longer():
            _start(signals, progress, others, num_gpus=len(names))
        signals.install()
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        yield
    finally:
        signals.clean_up()
        ours = set(descendants()) - others
        with progress.during("stopping Ray"):
            _shut_down(signals)  # also stops Serve's controller and proxy
            _kill_leftovers(ours)
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _remote_cluster(address: str, signals: StopSignals, progress: Progress) -> Iterator[None]:
    with progress.during(f"connecting to the Ray cluster at {address}"):
        ray.init(address=address, logging_level=logging.WARNING)
    try:
        signals.install()
        clear_stage()
        yield
    finally:
        signals.clean_up()
        _shut_down(signals)


def _start(signals: StopSignals, progress: Progress, others: set[int], *, num_gpus: int) -> None:
    """Start Ray, and once more if it fails. others: this process's descendants that are not Ray's."""
    for is_last in (False, True):
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                num_gpus=num_gpus,
                logging_level=logging.ERROR,
                object_store_memory=OBJECT_STORE_BYTES,
            )
            return
        except Exception as error:  # Ray raises many kinds, even Exception itself
            reason = first_sentence(error)
            if isinstance(error, OSError) and not isinstance(error, TimeoutError | ConnectionError):
                # For example, the path of its sockets is too long.
                told = f"Ray did not start: {reason}; set TMPDIR to a folder with a short path"
                raise SecateurError(told) from error
            if is_last:
                raise SecateurError(f"Ray did not start: {reason}; {wait_longer()}") from error
            progress.say(f"Ray did not start, and is started once more: {reason}")
            _shut_down(signals)
            _kill_leftovers(set(descendants()) - others)


def start_limit_s() -> int:
    """Return how long each of Ray's processes may take to start."""
    written = os.environ.get(START_VARIABLE, str(START_S))
    if not written.isdecimal():
        told = f"must be a number of seconds, such as {START_S} (got {written!r})"
        raise ConfigError(Problem(START_VARIABLE, told))
    return int(written)


def wait_longer() -> str:
    """Return the advice for a start that took too long."""
    now = start_limit_s()
    return (
        "if this machine is busy, try again when it is less busy, or allow more time: set "
        f"{START_VARIABLE}={3 * now} in the environment (seconds; now {now})"
    )


def first_sentence(error: Exception) -> str:
    """Return the beginning of an error of Ray, which may go on for pages."""
    return re.split(r"\.?\s*\n|\.\s+|\.$", str(error).strip() or type(error).__name__, maxsplit=1)[0]


def _start_limits() -> dict[str, str]:
    seconds = start_limit_s()
    return {
        "RAY_gcs_server_port_wait_time_s": f"{seconds}",
        "RAY_agent_register_timeout_ms": f"{1000 * seconds}",
        "RAY_worker_register_timeout_seconds": f"{seconds}",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": f"{seconds}",
    }


@contextmanager
def _asking_longer() -> Iterator[None]:
    """Let Ray wait for its node as long as for other processes. It waits 30 s, whatever is set."""
    ask = ray._private.services.get_node

    def get_node(*address: str) -> Any:
        deadline = time.monotonic() + start_limit_s()
        while True:
            try:
                return ask(*address)
            except RuntimeError:  # it is not known yet
                if time.monotonic() >= deadline:
                    raise
                if not any(name_of(pid) == "raylet" and is_running(pid) for pid in descendants()):
                    # After 15 s without a sign of an agent, a time that cannot be set.
                    raise ConnectionError("its raylet has ended") from None
            time.sleep(0.1)

    with _replaced(ray._private.services, "get_node", get_node):
        yield


@contextmanager
def _replaced(module: Any, name: str, value: object) -> Iterator[None]:
    """Let a module of Ray have another value in the context, where no setting changes it."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _shut_down(signals: StopSignals) -> None:
    """Run ray.shutdown in a thread, and keep our signal handlers installed meanwhile.

    ray.shutdown restores the default SIGTERM handler halfway through. A SIGTERM would then end this process while half
    of Ray still runs.
    """
    thread = threading.Thread(target=ray.shutdown, name="ray-shutdown")
    thread.start()
    while thread.is_alive():
        thread.join(0.005)
        signals.install()


def _kill_leftovers(pids: set[int]) -> None:
    """Kill the processes that remain of a Ray that was interrupted while starting; its agents live for 30 s more."""
    for pid in wait_gone(pids, timeout_s=PROCESS_EXIT_TIMEOUT_S):
        logger.warning("process %d had not ended and is killed", pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@cache
def _token() -> str:
    """Return the authentication token of this process; Ray reads it once and caches it."""
    return secrets.token_hex(32)
