"""The Ray Serve deployment: one replica is one engine, and owns one placement group.

The replica reads the configuration, starts the worker group in its placement group and answers HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import ray
import ray.serve._private.replica
from ray import serve as ray_serve
from ray.exceptions import TaskCancelledError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.convert import (
    fetch_weights,
    load_tokenizer,
    placement_config,
    read_engine,
    resolve_devices,
    with_tokenizer,
)
from cluster.engine.engine_client import EngineClient
from cluster.engine.supervisor import Supervisor
from cluster.http.server import create_app
from cluster.local_service import build_service
from cluster.pairs import settled_as_placed
from cluster.serve.actors import warn_if_nice
from cluster.serve.progress import report_stage
from cluster.serve.ray_host import RayHost
from cluster.text.tokenizer_pool import TokenizerPool
from secateur.config import EngineArgs
from secateur.local_files import check_files
from secateur.logs import VARIABLE as LOG_LEVEL
from workers.config import EngineConfig
from workers.models.specs import Specs

logger = logging.getLogger(__name__)

TOKENIZER_GRACE_S = 15.0
"""How long no text may be tokenized before Serve replaces the replica, which cuts its streams. Dead tokenizer processes
are back within seconds."""
EVENT_S = 0.001
"""See `Service.event_s`. An event takes half of this from the processors: Serve's proxy and the replica share that."""
EXIT_GRACE_S = 1.0
"""Delay between the last engine's death and the replica's exit, so that running requests can report the error."""


class Replica:
    """The Serve deployment: starts the engine's ranks, submits requests to them and answers HTTP. Never uses CUDA."""

    _serving = False  # until the constructor has succeeded

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, args: dict[str, Any], read: Mapping[str, str] | None = None
    ) -> None:
        """Start. read: `EngineConfig` and `Specs` as JSON, if this machine has read and fetched the models already."""
        _log_through_serve()
        warn_if_nice()
        _bind_replica_to_its_node()
        report_stage("reading the model's configuration and tokenizer")
        key = None if args.get("api_key_file") else os.environ.get("SECATEUR_API_KEY") or None
        admin_key = os.environ.get("SECATEUR_ADMIN_API_KEY") or None
        self._args = EngineArgs.load({"api_key": key, "admin_api_key": admin_key, **args})
        check_files(self._args)
        self._client = EngineClient()
        self._cannot_tokenize_since = math.inf
        placed = placement_config(resolve_devices(self._args, num_gpus=None))
        group = ray.util.get_current_placement_group()
        self._supervisor = Supervisor(
            RayHost(placed, group), self._client, restarts=True, report=report_stage, on_failure=self._give_up
        )
        try:
            await asyncio.to_thread(self._read_models, read)
            self._tokenizing = TokenizerPool(self._tokenizer)
            self._tokenizing.begin()  # while the ranks still import torch
            try:
                await self._supervisor.start(self._config, self._specs)
                await self._tokenizing.ready()
            except BaseException:
                await self._tokenizing.close()
                raise
        except BaseException:
            self._supervisor.close()
            raise
        self._serving = True

    async def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI application; Serve calls this once."""
        replica = ray_serve.get_replica_context().replica_tag  # the `replica` label of Serve's own metrics
        service = build_service(
            self._args, self._config, self._client, self._tokenizer, self._tokenizing, replica=replica
        )
        service.event_s = EVENT_S
        app = create_app(service, echo_request_id=False)
        app.add_middleware(ClientDisconnects)
        return app

    async def check_health(self) -> None:
        """Raise RuntimeError when the engine is dead or tokenization fails for long. Serve then replaces it."""
        ok, reason = self._client.health()
        if not ok:
            raise RuntimeError(reason)
        ok, reason = self._tokenizing.health()
        self._cannot_tokenize_since = math.inf if ok else min(self._cannot_tokenize_since, time.monotonic())
        if time.monotonic() - self._cannot_tokenize_since >= TOKENIZER_GRACE_S:
            raise RuntimeError(reason)

    async def __del__(self) -> None:
        if not self._serving:  # the constructor has ended what it had started
            return
        self._supervisor.close()
        await self._tokenizing.close()
        await self._client.close()

    def _read_models(self, read: Mapping[str, str] | None) -> None:
        if read is not None:
            self._config, self._specs = EngineConfig.from_json(read["config"]), Specs.from_json(read["specs"])
            self._tokenizer = load_tokenizer(self._args, self._config)
            return
        self._args = settled_as_placed(self._args)
        config, self._specs = read_engine(self._args)
        self._config, self._tokenizer = with_tokenizer(self._args, config)
        fetch_weights(self._args, self._config)

    def _give_up(self) -> None:
        """Exit, because no engine starts.

        Serve replaces a dead replica sooner than an unhealthy one, which it notices after three checks.
        """
        self._supervisor.close()
        asyncio.get_running_loop().call_later(EXIT_GRACE_S, os._exit, 1)


class ClientDisconnects:
    """Middleware that turns Serve's TaskCancelledError into ASGI's `http.disconnect`.

    When a client disconnects, Serve's proxy cancels the request and with it the pending `receive`. Without this
    middleware the error would look like a bug of the application: a traceback in the log, an error in Serve's metrics.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        is_gone = False

        async def receive_or_disconnect() -> Message:
            nonlocal is_gone
            if not is_gone:  # a second call of Serve's `receive` would never return
                try:
                    return await receive()
                except TaskCancelledError:
                    is_gone = True
            return {"type": "http.disconnect"}

        await self._app(scope, receive_or_disconnect, send)


def _bind_replica_to_its_node() -> None:
    """Make the replica's gRPC server listen on the node's address only. Call it before Serve opens the port.

    Serve listens on every interface, and unpickles what it receives. Its own callers use the node's address, which is
    127.0.0.1 on a Ray that this machine started.
    """
    module = ray.serve._private.replica
    host = ray.util.get_node_ip_address()
    address = f"[{host}]:0" if ":" in host else f"{host}:0"
    bind = module.add_port_to_grpc_server
    module.add_port_to_grpc_server = lambda server, _: bind(server, address)


def _log_through_serve() -> None:
    """Send our log lines to Serve's handlers, which add request ids and Serve's format."""
    serve_logger = logging.getLogger("ray.serve")
    for name in ("cluster", "secateur"):
        ours = logging.getLogger(name)
        ours.setLevel(os.environ.get(LOG_LEVEL, "info").upper())
        ours.handlers = serve_logger.handlers
        ours.propagate = False
