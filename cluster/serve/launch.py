"""`secateur serve`: run the application on a Ray of this machine or on a cluster, watch it, and clean up."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx2
import ray
import ray.serve._private.api
import ray.serve._private.client
from ray import serve as ray_serve
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client

from cluster.convert import fetch_weights, read_engine, resolve_devices, visible_gpus, with_tokenizer
from cluster.pairs import settled
from cluster.serve import proxy
from cluster.serve.app import application_of
from cluster.serve.controller import APP_NAME, delete_application, get_controller, loss_reason, start_failure
from cluster.serve.progress import current_stage
from cluster.serve.ray_cluster import first_sentence, ray_cluster, start_limit_s, wait_longer
from cluster.serve.signals import StopSignals
from cluster.system.listening import base_url, check_port, listening_socket
from cluster.system.processes import descendants, is_running, name_of
from cluster.system.progress import Progress
from secateur.config import AppArgs, EngineArgs
from secateur.errors import ConfigError, Problem, SecateurError

logger = logging.getLogger(__name__)

CHECK_PERIOD_S = 5.0
MAX_FAILED_CHECKS = 3
"""Serve must report the application as lost this many times in a row: it may still be loading its own state."""
RAY_PROCESSES = {"raylet", "gcs_server"}
"""Ray on one machine does not work without these."""


class RayEnded(SecateurError):
    """The Ray of this process has ended, so Serve's controller does not reply any more."""


def serve(args: EngineArgs) -> None:
    """Serve until SIGINT or SIGTERM, then clean up.

    Starts a Ray on this machine, or uses the cluster that RAY_ADDRESS names. On a cluster `build` resolves the
    arguments, because this machine's devices and model folders say nothing about the cluster's.

    Raises ConfigError before anything is started, SecateurError if the engine does not start or is lost.
    """
    remote, progress, read = os.environ.get("RAY_ADDRESS"), Progress(), None
    try:
        if not remote:
            with progress.during("reading the model's configuration and tokenizer"):
                args = resolve_devices(settled(args), num_gpus=visible_gpus())
                config, specs = read_engine(args)  # reports an unsupported model early
                config, _ = with_tokenizer(args, config)
            fetch_weights(args, config, progress)
            read = {"config": config.to_json(), "specs": specs.to_json()}
        with running(args, address=remote, progress=progress, read=read) as url:
            print(f"Secateur serves {args.model_id} at {url}/v1 (Ctrl-C stops it)", flush=True)
            if remote:  # Serve watches it there; the URL may not be reachable
                signal.pause()
            watch(url)
    except KeyboardInterrupt:
        progress.say("stopped")


@contextmanager
def running(
    args: EngineArgs,
    *,
    address: str | None = None,
    progress: Progress | None = None,
    read: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Run the service while the context lasts, and yield its base URL.

    Starts a Ray on this machine unless `address` names a cluster. SIGINT and SIGTERM raise KeyboardInterrupt inside
    the context. read: see `Replica`.
    """
    progress = progress or Progress()
    with StopSignals() as signals, ray_cluster(address, signals, progress):
        yield from _deploy(args, address, signals, progress, read)


def _deploy(
    args: EngineArgs,
    address: str | None,
    signals: StopSignals,
    progress: Progress,
    read: Mapping[str, str] | None,
) -> Iterator[str]:
    app = AppArgs.from_engine_args(args)
    # Serve retries a failed constructor 20 times by default; that does not help a wrong configuration.
    options = {"max_constructor_retry_count": 1, "graceful_shutdown_timeout_s": args.shutdown_timeout}
    # An error here leaves no Serve behind: on a cluster a Serve that was started keeps running.
    application = application_of(app.model_copy(update={"deployment_config": options}), read=read)
    with progress.during("starting Ray Serve"), _naming_slow_starts():
        url = _start_own_serve(args) if address is None else _find_or_start_serve(args)
    controller = get_controller()
    must_delete = address is not None  # other applications on a shared cluster stay; the end of our Ray ends ours
    try:
        try:
            with progress.during("starting the service's process", stage=current_stage), _naming_slow_starts():
                ray_serve.run(application, name=APP_NAME, route_prefix="/")
        except RuntimeError as error:
            raise SecateurError(f"the service did not start: {start_failure() or error}") from error
        must_delete = True
        progress.say("ready")
        yield url
    except RayEnded as error:
        must_delete = False
        progress.say(str(error))  # at once; the error's own line comes after the end of all processes
        raise
    finally:
        signals.clean_up()
        if must_delete:
            with progress.during("letting running answers end"):
                delete_application(controller, args.shutdown_timeout)


@contextmanager
def _naming_slow_starts() -> Iterator[None]:
    """Let Serve wait for its processes as long as Ray does, and say what to set if it still gives up."""
    for module in (ray.serve._private.api, ray.serve._private.client):  # no setting changes it
        module.HTTP_PROXY_TIMEOUT = start_limit_s()
    try:
        yield
    except (TimeoutError, ray.exceptions.RayError) as error:
        raise SecateurError(f"Ray Serve did not start: {first_sentence(error)}; {wait_longer()}") from error


def watch(url: str) -> None:
    """Never return. Raise SecateurError when this process's Ray has ended or Serve has lost the application.

    A missing proxy is only logged: Serve replaces a proxy that died.
    """
    # The proxy's health check proves nothing: the proxy outlives its raylet and keeps reporting that it is healthy.
    ray_pids = [pid for pid in descendants() if name_of(pid) in RAY_PROCESSES]
    controller, failed, is_answering = get_controller(), 0, True
    while True:
        time.sleep(CHECK_PERIOD_S)
        if not all(map(is_running, ray_pids)):
            raise RayEnded(f"the service at {url} is lost: its Ray has ended; start it again")
        if is_answering != (is_answering := _answers(url)):
            logger.warning("Serve's proxy %s", "answers again" if is_answering else f"does not answer at {url}")
        reason = loss_reason(controller)
        failed = failed + 1 if reason else 0
        if failed == MAX_FAILED_CHECKS:
            raise SecateurError(f"the service at {url} is lost: {reason}; start it again")


def _answers(url: str) -> bool:
    """Return whether Serve's proxy responds at all; its status depends on replicas, which come and go."""
    try:
        # Ignore HTTP_PROXY and the like; and the certificate, which need not name this machine's own address.
        httpx2.get(f"{url}/-/healthz", timeout=10, trust_env=False, verify=False)
    except httpx2.HTTPError:
        return False
    return True


def _start_own_serve(args: EngineArgs) -> str:
    port = args.port or _free_port(args.host)
    check_port(args.host, port)  # checked again, because starting Ray takes a while
    ray_serve.start(proxy_location="HeadOnly", http_options={"host": args.host, "port": port, **_tls(args)})
    return base_url(args.host, port, tls=args.ssl_certfile is not None)


def _find_or_start_serve(args: EngineArgs) -> str:
    """Return the base URL of the cluster's Serve, and start Serve if it is not running.

    A running Serve keeps its address: Serve takes the options of its first caller. Raises ConfigError if the
    arguments ask for another port or certificate.
    """
    found = _serve_address()
    if found is None:
        port = args.port or _free_port(args.host)
        ray_serve.start(
            proxy_location="HeadOnly",
            http_options={"host": args.host, "port": port, **_tls(args)},
            controller_options={"runtime_env": {"env_vars": proxy.environment()}},  # the proxies inherit it
        )
        return base_url(_seen_from_outside(args.host), port, tls=args.ssl_certfile is not None)
    if args.ssl_certfile not in (None, found.ssl_certfile):
        has = f"with the certificate {found.ssl_certfile}" if found.ssl_certfile else "without a certificate"
        told = f"Serve runs on this cluster already, {has}; leave it out, or shut Serve down first"
        raise ConfigError(Problem("ssl_certfile", told))
    if "port" in args.model_fields_set and args.port not in (0, found.port):
        told = f"Serve runs on this cluster already and listens on {found.port}; write that or leave the port out"
        raise ConfigError(Problem("port", told))
    return base_url(_seen_from_outside(str(found.host)), found.port, tls=found.ssl_certfile is not None)


def _tls(args: EngineArgs) -> dict[str, str]:
    """Return the HTTP options of Serve that make it speak HTTPS, {} for plain HTTP."""
    if args.ssl_certfile is None or args.ssl_keyfile is None:
        return {}
    if RAY_SERVE_ENABLE_HA_PROXY:
        told = "Ray Serve's HAProxy speaks no HTTPS; unset RAY_SERVE_ENABLE_HA_PROXY, or leave the certificate out"
        raise ConfigError(Problem("ssl_certfile", told))
    return {"ssl_certfile": args.ssl_certfile, "ssl_keyfile": args.ssl_keyfile}


def _serve_address() -> HTTPOptions | None:
    """Return the HTTP options of the connected cluster's Serve, or None if it is not running.

    This uses a private function of Serve. The public one is the dashboard's API, which may be off or closed to us.
    """
    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client.http_config


def _seen_from_outside(host: str) -> str:
    """Return the head node's address for a proxy that listens on all interfaces."""
    if host not in ("0.0.0.0", "::"):
        return host
    return next(node["NodeManagerAddress"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"])


def _free_port(host: str) -> int:
    with listening_socket(host, 0) as sock:
        return sock.getsockname()[1]
