"""Secateur on Ray Serve: one deployment, one replica = one engine = one placement group.

`build` is the builder a Serve config names (`import_path: cluster.app:build`); `serve` is the command.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import httpx2
import ray
import ray._private.ray_constants
import ray._private.utils
import ray.serve._private.replica
from ray import serve as ray_serve
from ray.exceptions import TaskCancelledError
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.convert import (
    engine_config,
    fetch_weights,
    placement_config,
    resolve_devices,
    visible_gpus,
    with_tokenizer,
)
from cluster.engine_client import EngineClient
from cluster.http.server import PENDING_PER_SEQUENCE, create_app
from cluster.http.tokenizer_pool import TokenizerPool
from cluster.local_service import build_service
from cluster.serve import proxy
from cluster.serve.actors import packages_folder
from cluster.serve.nodes import may_grow, nodes_of_cluster
from cluster.serve.placement import REPLICA_CPUS, gpus_for, group_bundles, lacking, no_node_holds
from cluster.serve.progress import Progress, forget, tell, told
from cluster.serve.signals import StopSignals
from cluster.serve.worker_group import WorkerGroup
from cluster.system.listening import base_url, check_port, listening_socket
from cluster.system.processes import descendants, is_running, name_of, wait_gone
from secateur.api_keys import check_api_keys
from secateur.config import AppArgs, EngineArgs
from secateur.errors import ConfigError, Problem, SecateurError

__all__ = ["APP_NAME", "Replica", "build", "local_cluster", "running", "serve"]

logger = logging.getLogger(__name__)

APP_NAME = "secateur"
EXIT_GRACE_S = 1.0
"""Between the death of an engine and that of its replica: time for the in-flight answers to say so."""
OBJECT_STORE_BYTES = 128 << 20  # nothing of ours goes through it
END_TIMEOUT_S = 5.0
DRAIN_S = 20.0
"""Serve lets running answers end for so long before it ends a replica; its own default."""
DELETE_TIMEOUT_S = DRAIN_S + 10.0
CHECK_PERIOD_S = 5.0
STATUS_TIMEOUT_S = 30.0
MOST_CHECKS_FAILED = 3
"""So many times in a row Serve must say that the application is gone or has failed: it may be loading its own state."""
PROXY_CHECK_PERIOD_S = 1
"""Serve checks its proxy so often, and starts another after three failed checks. By itself it takes half a minute."""
RAY_ITSELF = {"raylet", "gcs_server"}
"""The processes without which a Ray of one machine does nothing."""
TARGET_SHARE = 0.6
"""Autoscaling aims at so many of an engine's places in use: a further engine takes minutes to come."""
SERVE_HEADROOM = 64
"""Requests Serve lets through beyond what the ingress admits, so that the ingress answers, in OpenAI's shape."""


class Replica:
    """The engine's front: a CPU-only driver that places the ranks, feeds them and answers HTTP. Never touches CUDA."""

    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        _log_through_serve()
        _bind_replica_to_its_node()
        tell("reading the model's configuration and tokenizer")
        key = None if args.get("api_key_file") else os.environ.get("SECATEUR_API_KEY") or None
        self._args = EngineArgs.load({"api_key": key, **args})
        if self._args.api_key_file:
            check_api_keys(self._args.api_key_file)
        self._client = EngineClient()
        config = await asyncio.to_thread(engine_config, self._args)
        self._config, self._tokenizer = await asyncio.to_thread(with_tokenizer, self._args, config)
        await asyncio.to_thread(fetch_weights, self._args, self._config)
        self._tokenizing = TokenizerPool(self._tokenizer)
        self._worker_group = WorkerGroup(self._config, self._client, on_death=self._engine_died)
        self._serving = False
        self._tokenizing.begin()  # while the ranks import torch
        try:
            await self._worker_group.start(ray.util.get_current_placement_group())
            await self._tokenizing.ready()
        except BaseException:
            self._worker_group.close()
            await self._tokenizing.close()
            raise
        self._serving = True

    async def __serve_build_asgi_app__(self) -> Any:
        replica = ray_serve.get_replica_context().replica_tag  # what Serve's own metrics call `replica` too
        service = build_service(
            self._args, self._config, self._client, self._tokenizer, self._tokenizing, replica=replica
        )
        app = create_app(service, echo_request_id=False)
        app.add_middleware(ClientDisconnects)
        return app

    async def check_health(self) -> None:
        """Raises when the engine is gone or hangs, or no text can be tokenized; Serve replaces the replica then.

        An engine that hangs is ended here. Otherwise Serve would drain the replica first: its clients would wait that
        long for answers that cannot come, only to be cut off, and a new engine would wait for the GPUs.
        """
        ok, reason = self._client.health()
        if not ok:
            if self._serving and self._client.dead is None:
                self._worker_group.close()
                self._engine_died(reason)
            raise RuntimeError(reason)
        ok, reason = self._tokenizing.health()
        if not ok:
            raise RuntimeError(reason)

    async def __del__(self) -> None:
        self._worker_group.close()
        await self._tokenizing.close()
        await self._client.close()

    def _engine_died(self, reason: str) -> None:
        """In-flight requests end with an error, then this process ends: Serve replaces a dead replica in about half
        the time it takes to find one unhealthy (three failed checks and a drain)."""
        self._client.fail(reason)
        if self._serving:
            asyncio.get_running_loop().call_later(EXIT_GRACE_S, os._exit, 1)


class ClientDisconnects:
    """Says of a client that left what ASGI has for it.

    Serve's proxy cancels the request, and with it the call that waits for the client's next message. When that is
    noticed first `receive` raises, and a stream would end as if by a bug of ours: with tracebacks in the log, some of
    them errors in Serve's metrics.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_gone = False

        async def receive_or_gone() -> Message:
            nonlocal is_gone
            if not is_gone:  # afterwards Serve's would wait for ever
                try:
                    return await receive()
                except TaskCancelledError:
                    is_gone = True
            return {"type": "http.disconnect"}

        await self._app(scope, receive_or_gone, send)


def build(args: AppArgs | Mapping[str, Any]) -> ray_serve.Application:
    """The Serve application of one model. Raises ConfigError.

    Validates for itself: Serve converts the dict of a config file only if the annotation is a class at run time.
    """
    app = args if isinstance(args, AppArgs) else AppArgs.load(args)
    engine_args = app.engine_args()
    if engine_args.device == "auto":
        engine_args = engine_args.model_copy(update={"device": _cluster_device(app)})
    group, nodes = app.placement_group_config, nodes_of_cluster()
    on_one = group.strategy == "STRICT_PACK"
    num_gpus = gpus_for(nodes, on_one=on_one, accelerator_type=app.accelerator_type)
    if group.bundles is None:  # which say where the drafter goes
        engine_args = _colocated_where_needed(engine_args, num_gpus, on_one)
    engine_args = resolve_devices(engine_args, num_gpus=None)
    config = placement_config(engine_args)
    options: dict[str, Any] = {
        "name": APP_NAME,
        "max_ongoing_requests": PENDING_PER_SEQUENCE * config.max_num_seqs + SERVE_HEADROOM,
        "health_check_period_s": 5,
        "health_check_timeout_s": 30,
        **app.deployment_config,
        **_autoscaling(app.deployment_config, config.max_num_seqs),
    }
    actor_options = {"num_cpus": REPLICA_CPUS, "num_gpus": 0, **options.pop("ray_actor_options", {})}
    if actor_options["num_gpus"]:
        raise ConfigError("deployment_config.ray_actor_options.num_gpus: the replica itself uses no GPU; remove it")
    if not on_one:
        _warn_of_other_nodes(engine_args)
    bundles = group_bundles(
        config,
        per_worker=group.bundle_per_worker,
        given=group.bundles,
        replica_cpus=actor_options["num_cpus"],
        accelerator_type=app.accelerator_type,
    )
    need = sum(bundle.get("GPU", 0) for bundle in bundles)
    if nodes and need > 0 and (num_gpus == 0 or (not on_one and need > num_gpus)):  # no error: nodes may still join
        kind = f"{app.accelerator_type} GPUs" if app.accelerator_type else "GPUs"
        logger.warning("a replica needs %g %s, the cluster has %g: it waits until there are more", need, kind, num_gpus)
    if on_one and (short := lacking(bundles, nodes)):
        told = no_node_holds(bundles, nodes, short, config)
        if group.bundles is None and not may_grow():
            raise ConfigError(told)
        logger.warning("%s. It waits for such a node", told)
    deployment = ray_serve.deployment(
        **options,
        ray_actor_options=actor_options,
        placement_group_strategy=group.strategy,
        placement_group_bundles=bundles,
    )
    return deployment(ray_serve.ingress()(Replica)).bind(engine_args.model_dump(exclude_unset=True))


def _colocated_where_needed(args: EngineArgs, num_gpus: int, on_one: bool) -> EngineArgs:
    """The drafter on the verifier's GPUs, if nobody has said where it goes and devices of its own are too many."""
    spec, size = args.speculative_config, args.tensor_parallel_size
    if args.device != "cuda" or spec is None or spec.draft_placement is not None or spec.method == "ngram":
        return args
    both = size + spec.draft_tensor_parallel_size
    if not size <= num_gpus < both:
        return args
    logger.warning(
        "draft_placement: colocated, since %s has %d GPUs: with devices of its own for the drafter an engine takes %d",
        "the largest node" if on_one else "the cluster",
        num_gpus,
        both,
    )
    return args.model_copy(update={"speculative_config": spec.model_copy(update={"draft_placement": "colocated"})})


def _warn_of_other_nodes(args: EngineArgs) -> None:
    """The replica resolves names to folders, for all ranks: on another node a download's folder may not be there."""
    drafter = args.speculative_config.model if args.speculative_config else None
    names = [name for name in (args.model, drafter) if name and not name.startswith(("/", "bundled:"))]
    if names:
        logger.warning(
            "strategy PACK may place ranks on several nodes, and all look for %s where the replica's node has it: "
            "write the absolute path of a folder that every node sees",
            " and ".join(names),
        )


def _autoscaling(options: Mapping[str, Any], max_num_seqs: int) -> dict[str, Any]:
    """The autoscaling asked for, with a target that fits an engine that batches: Serve's own is 2 requests a replica,
    so that the third one would start another engine's GPUs."""
    given = options.get("autoscaling_config")
    if not given and options.get("num_replicas") != "auto":
        return {}
    target = max(1, round(TARGET_SHARE * max_num_seqs))
    return {"autoscaling_config": {"target_ongoing_requests": target, **dict(given or {})}}


def serve(args: EngineArgs) -> None:
    """Serves until SIGINT or SIGTERM, on a Ray of its own or on the cluster RAY_ADDRESS names; then cleans up.

    Raises ConfigError before anything is started, SecateurError if the engine does not come up or is lost. On a
    cluster the arguments are settled by `build`: this machine's devices say nothing about it, nor do the models'
    folders here.
    """
    remote, progress = os.environ.get("RAY_ADDRESS"), Progress()
    try:
        if not remote:
            with progress.during("reading the model's configuration and tokenizer"):
                args = resolve_devices(args, num_gpus=visible_gpus())
                config, _ = with_tokenizer(args, engine_config(args))  # what cannot be served is told now
            with progress.during("fetching weights that are not here yet"):
                fetch_weights(args, config)
        with running(args, address=remote, progress=progress) as url:
            print(f"Secateur serves {args.model_id} at {url}/v1 (Ctrl-C stops it)", flush=True)
            if remote:  # watched there; from here its address may not even be reachable
                signal.pause()
            stay(url)
    except KeyboardInterrupt:
        progress.say("stopped")


@contextmanager
def running(args: EngineArgs, *, address: str | None = None, progress: Progress | None = None) -> Iterator[str]:
    """The service on Ray as long as the context lasts; gives its base URL. Without `address` on a Ray of its own.

    SIGINT and SIGTERM end the context with KeyboardInterrupt.
    """
    progress = progress or Progress()
    with StopSignals() as signals, _cluster(address, signals, progress):
        yield from _deployed(args, address, signals, progress)


def _deployed(args: EngineArgs, address: str | None, signals: StopSignals, progress: Progress) -> Iterator[str]:
    app = AppArgs.from_engine_args(args)
    # A wrong configuration does not get better by trying it twenty times, Serve's default.
    options = {"max_constructor_retry_count": 1, "graceful_shutdown_timeout_s": DRAIN_S}
    application = build(app.model_copy(update={"deployment_config": options}))  # before Serve, which may stay
    with progress.during("starting Ray Serve"):
        url = _start_own_serve(args) if address is None else _find_or_start_serve(args)
    controller, is_ready = _controller(), False
    try:
        try:
            with progress.during("starting the service's process", stage=told):
                ray_serve.run(application, name=APP_NAME, route_prefix="/")
        except RuntimeError as error:
            raise SecateurError(f"the service did not start: {_reason() or error}") from error
        is_ready = True
        progress.say("ready")
        yield url
    finally:
        signals.clean_up()
        if is_ready or address is not None:  # what never answered need not end by itself where its Ray ends
            with progress.during("letting running answers end"):
                _delete(controller)  # what else runs on a cluster that is not ours stays


def stay(url: str) -> None:
    """Returns never. Raises SecateurError when this process's Ray has ended, or Serve has lost the application.

    The proxy may come and go: Serve starts another in place of one that died.
    """
    # Serve's proxy is no proof: it outlives its raylet, and goes on saying that it is well.
    ray_itself = [pid for pid in descendants() if name_of(pid) in RAY_ITSELF]
    controller, failed, is_answering = _controller(), 0, True
    while True:
        time.sleep(CHECK_PERIOD_S)
        if not all(map(is_running, ray_itself)):
            raise SecateurError(f"the service at {url} is lost: its Ray has ended; start it again")
        if is_answering != (is_answering := _answers(url)):
            logger.warning("Serve's proxy %s", "answers again" if is_answering else f"does not answer at {url}")
        reason = _lost(controller)
        failed = failed + 1 if reason else 0
        if failed == MOST_CHECKS_FAILED:
            raise SecateurError(f"the service at {url} is lost: {reason}; start it again")


def _lost(controller: Any) -> str | None:
    """Why Serve will not bring the application back, None if it may or says nothing."""
    try:
        application = _applications(controller).get(APP_NAME)
    except (ray.exceptions.RayError, TimeoutError):  # the controller may be on its way back
        return None
    if application is None:
        return "its application was deleted"
    return f"its application failed, {application['message']}" if application["status"] == "DEPLOY_FAILED" else None


def _controller() -> Any:
    """The handle of Serve's controller, the actor that holds its state.

    It is asked without Serve's own client, which starts another Ray when it finds this one ended.
    """
    return _get_global_client()._controller


def _applications(controller: Any) -> dict[str, dict[str, Any]]:
    """What Serve says of each application. Raises RayError."""
    details: dict[str, Any] = ray.get(controller.get_serve_instance_details.remote(), timeout=STATUS_TIMEOUT_S)
    return details["applications"]


def _answers(url: str) -> bool:
    """Whether Serve's proxy does, whatever it says: replicas come and go."""
    try:
        httpx2.get(f"{url}/-/healthz", timeout=10, trust_env=False)  # a proxy of the environment is for other machines
    except httpx2.HTTPError:
        return False
    return True


def _start_own_serve(args: EngineArgs) -> str:
    port = args.port or _free_port(args.host)
    check_port(args.host, port)  # again: starting Ray took a while
    ray_serve.start(proxy_location="HeadOnly", http_options={"host": args.host, "port": port})
    return base_url(args.host, port)


def _find_or_start_serve(args: EngineArgs) -> str:
    """Where a cluster's Serve answers. One that runs already keeps the address it has: Serve heeds its first caller's.

    Raises ConfigError if another port was asked for.
    """
    found = _serve_address()
    if found is None:
        port = args.port or _free_port(args.host)
        ray_serve.start(
            proxy_location="HeadOnly",
            http_options={"host": args.host, "port": port},
            controller_options={"runtime_env": {"env_vars": proxy.environment()}},  # its proxies inherit it
        )
        return base_url(_seen_from_outside(args.host), port)
    if "port" in args.model_fields_set and args.port not in (0, found.port):
        told = f"Serve runs on this cluster already and listens on {found.port}; write that or leave the port out"
        raise ConfigError(Problem("port", told))
    return base_url(_seen_from_outside(str(found.host)), found.port)


def _serve_address() -> HTTPOptions | None:
    """Of the Serve that runs on the connected cluster, None if none does.

    Serve's private way: the public one is the dashboard's API, which need not run or let us in.
    """
    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client.http_config


def _seen_from_outside(host: str) -> str:
    """The head's address where its proxy listens on all."""
    if host not in ("0.0.0.0", "::"):
        return host
    return next(node["NodeManagerAddress"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"])


def _delete(controller: Any) -> None:
    """Ends the application. In a thread, and not longer than draining takes: a call to a dead Ray never returns."""
    given_up = threading.Event()
    thread = threading.Thread(target=_wait_deleted, args=(controller, given_up), name="serve-delete", daemon=True)
    thread.start()
    thread.join(DELETE_TIMEOUT_S)
    given_up.set()
    if thread.is_alive():
        logger.warning("Serve has not ended the application within %.0f s", DELETE_TIMEOUT_S)


def _wait_deleted(controller: Any, given_up: threading.Event) -> None:
    try:
        ray.get(controller.delete_apps.remote([APP_NAME]), timeout=STATUS_TIMEOUT_S)
        while not given_up.wait(0.2) and APP_NAME in _applications(controller):
            pass
    except Exception:
        logger.warning("Serve could not end the application", exc_info=True)


@contextmanager
def _cluster(address: str | None, signals: StopSignals, progress: Progress) -> Iterator[None]:
    """The cluster at `address`, or a Ray of this machine's own that ends with the context."""
    with _our_signals():
        with local_cluster(signals, progress) if address is None else _remote_cluster(address, signals, progress):
            yield


@contextmanager
def local_cluster(signals: StopSignals, progress: Progress) -> Iterator[None]:
    """A Ray of this machine's own, which ends with the context. Never joins one that is there already."""
    environment = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        # The workers import what we imported, from whatever folder this was started.
        "PYTHONPATH": os.pathsep.join(filter(None, [packages_folder(), os.environ.get("PYTHONPATH")])),
        **proxy.environment(),
    }
    if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        # Ray turns token authentication on by itself and would write a token to the user's home without this one.
        environment |= {"RAY_AUTH_TOKEN": _token()}
    if (period := "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S") not in os.environ:
        environment |= {period: str(PROXY_CHECK_PERIOD_S)}
    saved = {name: os.environ.get(name) for name in (*environment, "RAY_AUTH_MODE")}
    os.environ.update(environment)
    others = set(descendants())
    try:
        with progress.during("starting Ray"), _on_loopback():
            try:
                ray.init(
                    address="local",
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=OBJECT_STORE_BYTES,
                )
            except OSError as error:  # its sockets need a short path, for one
                raise SecateurError(f"Ray did not start: {error}; set TMPDIR to a folder with a short path") from error
        signals.take()
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        yield
    finally:
        signals.clean_up()
        ours = set(descendants()) - others
        with progress.during("stopping Ray"):
            _shut_down(signals)  # takes Serve's controller and proxy along
            _sweep(ours)
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Lets Ray listen on 127.0.0.1, where its processes meet; the HTTP proxy alone listens on --host.

    By itself Ray listens on every interface. `ray.init` takes no loopback address but where it does not expect a
    cluster, as on macOS: it makes the machine's address of it.
    """
    constants = ray._private.ray_constants
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _our_signals() -> Iterator[None]:
    """Keeps Ray from handling SIGTERM in this process: it would exit, in the midst of a clean-up too."""
    utils = ray._private.utils
    before, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = before


def _sweep(pids: set[int]) -> None:
    """Ends what a Ray that was interrupted while it started leaves behind (its agents live on for half a minute)."""
    for pid in wait_gone(pids, timeout_s=END_TIMEOUT_S):
        logger.warning("process %d had not ended and is killed", pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@cache
def _token() -> str:
    """One per process: Ray reads it once and keeps it."""
    return secrets.token_hex(32)


@contextmanager
def _remote_cluster(address: str, signals: StopSignals, progress: Progress) -> Iterator[None]:
    with progress.during(f"connecting to the Ray cluster at {address}"):
        ray.init(address=address, logging_level=logging.WARNING)
    try:
        signals.take()
        forget()
        yield
    finally:
        signals.clean_up()
        _shut_down(signals)


def _shut_down(signals: StopSignals) -> None:
    """ray.shutdown, in a thread of its own: in its midst it gives SIGTERM back to the system, which would end this
    process with half of Ray still running. Meanwhile this thread takes the signal again and again."""
    thread = threading.Thread(target=ray.shutdown, name="ray-shutdown")
    thread.start()
    while thread.is_alive():
        thread.join(0.005)
        signals.take()


def _reason() -> str:
    """Why the deployment failed: the last exception in what Serve kept of its constructor's traceback."""
    application = ray_serve.status().applications.get(APP_NAME)
    texts = [deployment.message for deployment in application.deployments.values()] if application else []
    lines = [line.strip() for text in texts for line in text.splitlines()]
    found = [line for line in lines if re.match(r"[\w.]*(Error|EngineDead|Exception)\b.*: ", line)]
    return found[-1] if found else "\n".join(texts)


def _cluster_device(app: AppArgs) -> str:
    """Where `auto` runs in a cluster: the builder's own node (often a head without GPU) says nothing about it."""
    return "cuda" if app.accelerator_type or _cluster_gpus() else "cpu"


def _cluster_gpus() -> float:
    """How many the connected cluster has now; 0 without one."""
    return ray.cluster_resources().get("GPU", 0) if ray.is_initialized() else 0


def _free_port(host: str) -> int:
    with listening_socket(host, 0) as sock:
        return sock.getsockname()[1]


def _bind_replica_to_its_node() -> None:
    """Serve lets each replica listen on every interface, for calls that it unpickles. Whoever may call it, calls the
    node's address; on a Ray of this machine's own that is 127.0.0.1. Called before Serve opens the port."""
    module = ray.serve._private.replica
    host = ray.util.get_node_ip_address()
    address = f"[{host}]:0" if ":" in host else f"{host}:0"
    bind = module.add_port_to_grpc_server
    module.add_port_to_grpc_server = lambda server, _: bind(server, address)


def _log_through_serve() -> None:
    """Our log lines go where Serve's go, with its request ids and format."""
    serve_logger = logging.getLogger("ray.serve")
    for name in ("cluster", "secateur"):
        ours = logging.getLogger(name)
        ours.setLevel(logging.INFO)
        ours.handlers = serve_logger.handlers
        ours.propagate = False
