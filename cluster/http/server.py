"""The HTTP service: OpenAI's routes, and Anthropic's messages, over one engine.

It uses FastAPI and not Ray, so the same app runs under both.

The walk of a generation request, from the HTTP body to the engine and back to the event:

1. `limits.LimitedProtocol` (uvicorn's protocol) bounds the size and the arrival time of the HTTP request.
2. `PathMiddleware`; `Observer`, which assigns the request id and reports the response; `Gate`, which checks the API key
   and refuses what the full queue will not take anyway. FastAPI validates the body into a request model.
3. The route calls `Service.accept`: model name, unsupported parameters, the model's sampling defaults; and
   `Service.ticket`, which admits the request and holds its places in the queue (`admission`).
4. `Service.tokenize` renders and tokenizes the prompt in a worker process (`tokenizer_pool`).
5. `Service.prepare` has its grammar compiled there, too, and builds one `Submit` per choice (`request_params`), with
   limits and seed, and its `Generation`.
6. `deltas_of` hands all of them to `EngineClient.arrivals`, which sends them to rank 0 and yields `TokenChunk`s. An
   `AnswerRecord` keeps the times and tokens of each answer, for metrics, traces and the limits of API keys.
7. `Generation.process` turns each chunk into a `TextDelta`: detokenizer, stop strings, log probabilities. `Replay`
   marks the deltas that the client of a resumed stream has.
8. `events_of` writes the deltas as server-sent events, or the route the finished generations as one response
   (`openai_format`). While a stream waits, its `DeltaEvents` writes what comes to the connection, from within 6.

`streaming.cancel_on_disconnect` cancels the route if the client disconnects before step 8, `EventStream` closes the
generators afterwards; both abort the requests in the engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware

from cluster.batches.runner import Backend
from cluster.http import in_process, openapi
from cluster.http.error_handlers import add_error_handlers
from cluster.http.json_bodies import check_json
from cluster.http.middleware import Gate, Observer
from cluster.http.paths import PathMiddleware
from cluster.http.routes.admin import add_admin_routes
from cluster.http.routes.batches import add_batch_routes, add_file_routes
from cluster.http.routes.completions import add_completion_routes
from cluster.http.routes.messages import add_message_routes
from cluster.http.routes.models import add_model_routes
from cluster.http.routes.operations import add_operation_routes
from cluster.http.routes.responses import add_response_routes, add_stored_response_routes
from cluster.http.service import Service, batch_share
from secateur import __version__
from secateur.responses import IGNORED_HEADER, REQUEST_ID_HEADER

EXPOSED_HEADERS = (REQUEST_ID_HEADER, IGNORED_HEADER, "retry-after")
"""Response headers that scripts of other origins may read, beside those that every script may read."""

ROUTES = (
    add_completion_routes,
    add_message_routes,
    add_response_routes,
    add_stored_response_routes,
    add_model_routes,
    add_operation_routes,
    add_admin_routes,
    add_file_routes,
    add_batch_routes,
)


def create_app(service: Service, *, echo_request_id: bool = True) -> FastAPI:
    """Return the HTTP application of one engine. Behind Ray Serve's proxy, which echoes request ids itself, pass
    `echo_request_id=False`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if service.batches is None:
            yield
            return
        backend = Backend(
            post=partial(in_process.post, app),
            num_pending=lambda: service.engine.num_pending,
            is_healthy=lambda: service.health().ok,
            max_running=batch_share(service.config.max_num_seqs),
            on_recorded=service.metrics.observe_batch_lines,
        )
        async with service.batches.running(backend):
            yield

    app = FastAPI(
        title="Secateur",
        version=__version__,
        lifespan=lifespan,
        dependencies=[Depends(check_json)],
    )
    metrics = service.metrics
    add_error_handlers(app, on_rejected=metrics.observe_rejected)
    # The middleware added last is the outermost: responses to requests without a key have a request id, too.
    refusal = service.admission.refusal
    app.add_middleware(Gate, metrics=metrics, shared=service.shared, keys=service.api_keys, refusal=refusal)
    app.add_middleware(Observer, metrics=metrics, echoes_id=echo_request_id)
    app.add_middleware(PathMiddleware, root_path=service.root_path)
    if (cors := service.cors) is not None:  # it answers preflight requests, which have no API key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors.origins,
            allow_methods=cors.methods,
            allow_headers=cors.headers,
            allow_credentials=cors.credentials,
            expose_headers=EXPOSED_HEADERS,
        )
    for add_routes in ROUTES:
        add_routes(app, service)
    openapi.complete(app, has_keys=service.api_keys is not None)
    return app
