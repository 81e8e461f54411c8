"""The HTTP service without Ray: uvicorn in a background thread or several fronts, the engine in processes here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import uvicorn

from cluster.convert import fetch_weights, read_engine, sampling_defaults, visible_gpus, with_tokenizer
from cluster.engine.engine_client import EngineClient
from cluster.engine.local_engine import LocalEngine
from cluster.fronts import Fronts
from cluster.http.api_keys import KeyFile
from cluster.http.limits import LimitedProtocol
from cluster.http.middleware import Cors
from cluster.http.server import create_app
from cluster.http.service import Service
from cluster.pairs import settled
from cluster.system.listening import base_url, listening_socket, listening_sockets
from cluster.system.progress import Progress
from cluster.system.shared import Shared
from cluster.text.tokenizer import Tokenizer
from cluster.text.tokenizer_pool import TokenizerPool
from secateur.config import EngineArgs
from secateur.local_files import check_files
from workers.config import EngineConfig

logger = logging.getLogger(__name__)

_GRACE_S = 5


def build_service(
    args: EngineArgs,
    config: EngineConfig,
    engine: EngineClient,
    tokenizer: Tokenizer,
    tokenizer_pool: TokenizerPool,
    *,
    replica: str,
    shared: Shared | None = None,
) -> Service:
    """Return the service of a running engine, with the settings of `args`."""
    if defaults := sampling_defaults(args, config.model_path):
        settings = ", ".join(f"{name}={value}" for name, value in defaults.items())
        logger.info("default sampling parameters of the model: %s (generation_config: none = OpenAI's)", settings)
    return Service(
        engine=engine,
        tokenizer=tokenizer,
        tokenizer_pool=tokenizer_pool,
        config=config,
        model_ids=args.model_ids,
        replica=replica,
        api_key=args.api_key,
        api_keys=KeyFile(args.api_key_file) if args.api_key_file else None,
        admin_api_key=args.admin_api_key,
        seed=args.seed,
        sampling_defaults=defaults,
        cors=_cors(args),
        batch_dir=Path(args.batch_dir) if args.batch_dir else None,
        root_path=args.root_path,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        has_tokenizer_info=args.enable_tokenizer_info_endpoint,
        forces_usage=args.enable_force_include_usage,
        stream_interval=args.stream_interval,
        names_tokens_by_id=args.return_tokens_as_token_ids,
        closes_objects=args.disable_additional_properties,
        unsupported_content=args.unsupported_content,
        model_root=args.model,
        shared=shared or Shared(),
    )


def _cors(args: EngineArgs) -> Cors | None:
    """Return the settings of cross-origin requests; None if no origin is allowed."""
    if not args.allowed_origins:
        return None
    return Cors(
        origins=args.allowed_origins,
        methods=args.allowed_methods,
        headers=args.allowed_headers,
        credentials=args.allow_credentials,
    )


def http_server(args: EngineArgs, service: Service, *, grace_s: float) -> uvicorn.Server:
    """Return a server of the application. grace_s: how long running answers may still take when it stops."""
    return uvicorn.Server(
        uvicorn.Config(
            create_app(service),
            http=LimitedProtocol,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=math.ceil(grace_s),
            ssl_certfile=args.ssl_certfile,
            ssl_keyfile=args.ssl_keyfile,
        )
    )


@contextmanager
def local_service(args: EngineArgs, *, shows_progress: bool = False) -> Iterator[str]:
    """Run a service on this machine, without Ray, and yield its base URL. On exit all its processes have ended.

    With `api_server_count` HTTP is spoken by processes of their own, and an engine that is lost for good ends this
    process as SIGTERM does.
    Raises ConfigError before anything starts, EngineDead if the engine does not start, or is lost for good.
    """
    progress = Progress(is_shown=shows_progress)
    check_files(args)
    with ExitStack() as held:
        # First, because the rest takes seconds, or a download.
        if args.api_server_count is None:
            socks = [listening_socket(args.host, args.port)]
        else:
            socks = listening_sockets(args.host, args.port, args.api_server_count)
        url = base_url(args.host, socks[0].getsockname()[1], tls=args.ssl_certfile is not None)
        for sock in socks:
            held.enter_context(sock)
        with progress.during("reading the model's configuration and tokenizer"):
            args = settled(args)
            config, specs = read_engine(args, num_gpus=visible_gpus())
            config, tokenizer = with_tokenizer(args, config)
        fetch_weights(args, config, progress)
        thread = _ServiceThread(args, LocalEngine(config, specs, restarts=True), tokenizer, socks)
        thread.start()
        try:
            with progress.during(thread.stage(), stage=thread.stage):
                thread.wait_started()
            progress.say("ready")
            yield url
        finally:
            thread.stop()


class _ServiceThread(threading.Thread):
    """Runs the event loop of the engine client and the HTTP server. The engine's processes die with this thread."""

    def __init__(self, args: EngineArgs, engine: LocalEngine, tokenizer: Tokenizer, socks: list[socket.socket]) -> None:
        super().__init__(name="secateur-service", daemon=True)
        self._args = args
        self._engine = engine
        self._tokenizer = tokenizer
        self._socks = socks
        self._up = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._server: uvicorn.Server | Fronts | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass  # stopped while it started
        except BaseException as error:
            self._failure = error
            if self._up.is_set() and self._args.api_server_count is not None:
                os.kill(os.getpid(), signal.SIGTERM)
        finally:
            self._up.set()

    def stage(self) -> str:
        """Return what the start is doing."""
        return self._engine.stage

    def wait_started(self) -> None:
        """Wait until the service has started; raise the error that prevented it."""
        self._up.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop the service and wait for it; running requests have a few seconds to finish."""
        if self._server is not None:
            self._server.should_exit = True
        elif self._loop is not None and self._main is not None:
            with contextlib.suppress(RuntimeError):  # the loop is already closed
                self._loop.call_soon_threadsafe(self._main.cancel)
        was_up = self._up.is_set()
        self.join()
        if was_up and self._failure is not None and self._args.api_server_count is not None:
            raise self._failure

    async def _serve(self) -> None:
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        if self._args.api_server_count is not None:
            async with self._engine as client:
                self._server = Fronts(self._args, self._engine.config, client, self._socks)
                await self._server.serve(self._up.set)
            return
        async with (
            TokenizerPool(self._tokenizer) as tokenizer_pool,  # starts while the ranks import torch
            self._engine as client,
        ):
            await tokenizer_pool.ready()
            service = build_service(
                self._args, self._engine.config, client, self._tokenizer, tokenizer_pool, replica="local"
            )
            server = http_server(self._args, service, grace_s=_GRACE_S)
            serving = asyncio.create_task(server.serve(sockets=self._socks))
            while not (server.started or serving.done()):
                await asyncio.sleep(0.01)
            if serving.done():
                serving.result()
                raise RuntimeError("the HTTP server ended while it started")
            self._server = server
            self._up.set()
            await serving
