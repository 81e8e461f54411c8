"""The HTTP service: OpenAI's routes over one engine. It uses FastAPI and not Ray, so the same app runs under both.

The walk of a generation request, from the HTTP body to the engine and back to the event:

1. `limits.LimitedProtocol` (uvicorn's protocol) bounds the size and the arrival time of the HTTP request.
2. `middleware` assigns the request id, checks the API key, and refuses what the full queue will not take anyway;
   FastAPI validates the body into a request model.
3. The route calls `Service.accept`: model name, unsupported parameters, the model's sampling defaults, `admission`.
4. `Service.tokenize_*` renders and tokenizes the prompt in a worker process (`tokenizer_pool`).
5. `Service.prepare` has its grammar compiled there, too, and builds one `Submit` per choice (`request_params`), with
   limits and seed, and its `Generation`.
6. `Generation.stream` hands the `Submit` to `EngineClient.submit`, which sends it to rank 0 and yields `TokenChunk`s.
7. `Generation.process` turns each chunk into a `TextDelta`: detokenizer, stop strings, log probabilities.
8. `generate` writes the deltas as server-sent events, or the finished generations as one response (`openai_format`).

`streaming.cancel_on_disconnect` cancels the route if the client disconnects before step 8, `EventStream` closes the
generators afterwards; both abort the requests in the engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from cluster.errors import BadRequest, not_found, unavailable
from cluster.http import in_process, middleware, openapi
from cluster.http.batch_routes import After, NumEntries, Order, add_batch_routes
from cluster.http.inspector import inspector_page
from cluster.http.openapi import RESUMABLE, STREAM, WITH_BODY, errors
from cluster.http.service import RequestHead, Service, batch_share
from cluster.observe import metrics
from cluster.observe.rate_limits import Caller, Callers
from cluster.openai.failures import to_http_error
from cluster.openai.openai_format import (
    ChatFormat,
    CompletionFormat,
    ResponseFormat,
    opening_usage,
    running_usage,
    total_stats,
    total_usage,
)
from cluster.openai.output_processor import Generation, TextDelta
from cluster.openai.request_params import ineffective_settings, truncate
from cluster.openai.responses_api import (
    ResponseBuilder,
    StoredResponse,
    chat_of,
    events_of,
    in_words_of_responses,
)
from cluster.openai.resumption import EventIds, Origin, why_not_resumable
from cluster.openai.streaming import EventStream, cancel_on_disconnect, merge, prepend, with_id
from secateur import __version__
from secateur.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingRequest,
    TokenizeRequest,
)
from secateur.responses import (
    IDEMPOTENCY_HEADER,
    IGNORED_HEADER,
    LAST_EVENT_ID_HEADER,
    SSE_DONE,
    ChatCompletionResponse,
    CompletionResponse,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
)
from secateur.responses_api import DeletedResponse, InputItems, InputTokens, ResponseObject, ResponsesRequest

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 5.0
"""While a stream goes through what its client has, a comment this often keeps proxies from closing the connection."""


def create_app(service: Service, *, echo_request_id: bool = True) -> FastAPI:
    """Return the HTTP application of one engine. Behind Ray Serve's proxy, which echoes request ids itself, pass
    `echo_request_id=False`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if service.batches is None:
            yield
            return
        async with service.batches.running(
            post=partial(in_process.post, app),
            num_pending=lambda: service.engine.num_pending,
            is_healthy=lambda: service.health().ok,
            max_running=batch_share(service.config.max_num_seqs),
            on_recorded=service.metrics.observe_batch_lines,
        ):
            yield

    app = FastAPI(
        title="Secateur",
        version=__version__,
        lifespan=lifespan,
        dependencies=[Depends(middleware.check_json)],
    )
    middleware.install(
        app,
        api_keys=service.api_keys,
        callers=Callers(service.metrics),
        echo_request_id=echo_request_id,
        refusal=service.admission.refusal,
        on_rejected=service.metrics.observe_rejected,
        client_request=service.metrics.client_request,
        on_response=service.metrics.observe_http,
        root_path=service.root_path,
        cors=service.cors,
    )

    @app.post(
        "/v1/completions",
        response_model=CompletionResponse,
        responses={200: STREAM, **WITH_BODY, **errors(409)},
        openapi_extra=RESUMABLE,
    )
    @cancel_on_disconnect
    async def completions(body: CompletionRequest, request: Request) -> Response:
        arrival = time.perf_counter()
        body = service.accept(body, num_prompts=len(body.prompts))
        head = await service.head_of(request, "completion", body, arrival=arrival, num_prompts=len(body.prompts))
        prompts = await service.tokenize_prompts(body)
        generations = await service.prepare(body, prompts, head)
        response_format = CompletionFormat(body, service.model_id, service.tokenizer)
        return await generate(service, response_format, generations, head, request)

    @app.post(
        "/v1/chat/completions",
        response_model=ChatCompletionResponse,
        responses={200: STREAM, **WITH_BODY, **errors(409)},
        openapi_extra=RESUMABLE,
    )
    @cancel_on_disconnect
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        arrival = time.perf_counter()
        body = service.accept(body)
        head = await service.head_of(request, "chat", body, arrival=arrival)
        prompt = await service.tokenize_chat(body, add_special_tokens=body.add_special_tokens)
        new_reader = service.answers.of(body, prompt)
        generations = await service.prepare(body, [prompt], head)
        response_format = ChatFormat(body, service.model_id, service.tokenizer, new_reader)
        return await generate(service, response_format, generations, head, request)

    async def prompt_of(
        body: ResponsesRequest, request: Request
    ) -> tuple[ResponsesRequest, list[dict[str, Any]], ChatCompletionRequest, list[int]]:
        """Return a request without references, the conversation before it, the chat that answers it, and its prompt."""
        owner = service.owner(request)
        body = service.responses.resolve(body, owner)
        history = service.responses.history(body.previous_response_id, owner)
        chat = service.accept(chat_of(body, history))
        return body, history, chat, await service.tokenize_chat(chat, add_special_tokens=chat.add_special_tokens)

    @app.post("/v1/responses", response_model=ResponseObject, responses={200: STREAM, **WITH_BODY})
    @cancel_on_disconnect
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        arrival = time.perf_counter()
        with in_words_of_responses():
            service.check_body(body)
            if LAST_EVENT_ID_HEADER in request.headers:
                raise BadRequest(
                    "Last-Event-ID: streams of /v1/responses cannot be continued; leave the header out, or use "
                    "/v1/chat/completions",
                    param=None,
                    code="not_resumable",
                )
            body, history, chat, prompt = await prompt_of(body, request)
            new_reader = service.answers.of(chat, prompt)
            key = request.headers.get(IDEMPOTENCY_HEADER)
            head = RequestHead(request_id=request.state.request_id, arrival=arrival, idempotency_key=key)
            [generation] = await service.prepare(chat, [prompt], head)
        builder = ResponseBuilder(body, chat, service.model_id, service.tokenizer, new_reader, service.replica)
        return await respond(service, body, builder, generation, history, head.wait_s(chat), request)

    @app.post("/v1/responses/input_tokens", response_model=InputTokens, responses=WITH_BODY)
    @cancel_on_disconnect
    async def input_tokens(body: ResponsesRequest, request: Request) -> Response:
        with in_words_of_responses():
            service.check_body(body)
            _, _, _, prompt = await prompt_of(body, request)
        return _json(InputTokens(input_tokens=len(prompt)), _ignored_header(request, body.ignored()))

    @app.post("/v1/responses/compact", include_in_schema=False)
    async def compact() -> Response:
        raise not_found(
            "compaction is not implemented: no item here stands for a conversation that only this service could read; "
            "let /v1/responses write a summary, and begin a new conversation with it",
            code="not_implemented",
        )

    @app.get("/v1/responses/{id}", response_model=ResponseObject, responses=errors(404))
    async def response(id: str, request: Request) -> Response:
        stored = service.responses.get(id, service.owner(request))
        return Response(stored.response, media_type="application/json")

    @app.delete("/v1/responses/{id}", response_model=DeletedResponse, responses=errors(404))
    async def delete_response(id: str, request: Request) -> Response:
        service.responses.delete(id, service.owner(request))
        return _json(DeletedResponse(id=id))

    @app.post("/v1/responses/{id}/cancel", response_model=ResponseObject, responses=errors(400, 404))
    async def cancel_response(id: str, request: Request) -> Response:
        service.responses.get(id, service.owner(request))
        raise BadRequest("Cannot cancel a synchronous response. To end a running one, close its connection", param=None)

    @app.get("/v1/responses/{id}/input_items", response_model=InputItems, responses=errors(400, 404))
    async def input_items(
        id: str, request: Request, limit: NumEntries = 20, after: After = None, order: Order = "desc"
    ) -> Response:
        owner = service.owner(request)
        return _json(service.responses.input_items(id, owner, limit=limit, after=after, order=order))

    @app.get("/v1/models", response_model=ModelList)
    async def models() -> Response:
        return _json(ModelList(data=[service.card(name) for name in service.model_ids]))

    @app.get("/v1/models/{model:path}", response_model=ModelCard, responses=errors(404))
    async def model(model: str) -> Response:
        service.check_model(model)
        return _json(service.card(model))

    @app.post("/tokenize", response_model=TokenizeResponse, responses=WITH_BODY)
    @cancel_on_disconnect
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        service.check_body(body)
        service.admission.admit(1)
        special, strings = body.with_special_tokens, None
        if body.messages is not None:
            ids = await service.tokenize_chat(body, add_special_tokens=special)
        else:
            [ids] = await service.tokenize_texts([body.prompt or ""], add_special_tokens=special)
        ids = truncate(ids, body.truncate_prompt_tokens, service.limits)
        if body.return_token_strs:
            strings = await service.tokenizer_pool.token_strings(ids)
        limit = service.limits.max_model_len
        answer = TokenizeResponse(tokens=ids, count=len(ids), max_model_len=limit, token_strs=strings)
        return _json(answer, _ignored_header(request, body.ignored()))

    @app.post("/detokenize", response_model=DetokenizeResponse, responses=WITH_BODY)
    @cancel_on_disconnect
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        service.check_body(body)
        if body.tokens and max(body.tokens) >= service.limits.vocab_size:
            raise BadRequest(f"token id {max(body.tokens)} is not in the vocabulary", param="tokens")
        text = await service.tokenizer_pool.decode(body.tokens)
        return _json(DetokenizeResponse(prompt=text), _ignored_header(request, body.ignored()))

    if service.has_tokenizer_info:

        @app.get("/tokenizer_info")
        async def tokenizer_info() -> dict[str, Any]:
            return service.tokenizer.info()

    @app.get("/", include_in_schema=False)
    async def inspector() -> Response:
        return inspector_page()

    @app.get("/health", responses=errors(503))
    async def health() -> Response:
        health = service.health()
        if not health.ok:
            return middleware.error_response(unavailable(health.reason))
        return JSONResponse({"status": "degraded", "reason": health.reason} if health.reason else {"status": "ok"})

    @app.get("/ping", responses=errors(503))
    @app.post("/ping", responses=errors(503))
    async def ping() -> Response:
        return await health()

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": service.engine.num_pending}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        return Response(service.metrics.render(), media_type=metrics.CONTENT_TYPE)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        ready = service.engine.ready
        return {
            "version": __version__,
            "model": service.model_id,
            "front": {"role": "front", "pid": os.getpid()},
            "topology": service.topology,
            "num_pages": ready.num_pages if ready else 0,
            "sampling_defaults": dict(service.sampling_defaults),
            "config": asdict(service.config),
        }

    add_batch_routes(app, service)
    openapi.complete(app, has_keys=service.api_keys is not None)
    return app


async def generate(
    service: Service,
    response_format: ResponseFormat,
    generations: Sequence[Generation],
    head: RequestHead,
    request: Request,
) -> Response:
    """Run all choices in the engine; return the whole response, or an event stream."""
    body = response_format.body
    unread = [*service.ignored(body), *ineffective_settings(body.speculative, service.limits)]
    headers = _ignored_header(request, unread)
    caller, trace = _caller(request), service.tracing.of(request.headers)
    deltas = merge([generation.stream(service.engine, service.metrics, caller, trace) for generation in generations])
    try:
        if body.stream:
            ids = _event_ids(service, response_format, generations, head)
            if ids is not None and ids.is_over(has_totals=_has_totals(body)):
                return Response(with_id(SSE_DONE, ids.last), media_type=EventStream.media_type, headers=headers)
        # Errors before the first delta get their own HTTP status.
        first = await service.admission.first(deltas, head.wait_s(body))
        if body.stream:
            return EventStream(_events(response_format, generations, first, deltas, ids), deltas, headers)
        async with aclosing(deltas):
            async for _ in deltas:
                pass
    finally:
        service.engine.release(generation.submit.id for generation in generations)
    scores = body.num_logprobs is not None or body.num_prompt_logprobs is not None
    if not (scores or body.return_speculative_trees or response_format.reads_prompts):
        return _json(response_format.response(generations), headers)
    # 4096 tokens with 20 alternatives are 10^5 objects: a second during which other streams must not wait.
    return await asyncio.to_thread(lambda: _json(response_format.response(generations), headers))


async def respond(
    service: Service,
    body: ResponsesRequest,
    builder: ResponseBuilder,
    generation: Generation,
    history: list[dict[str, Any]],
    wait_s: float | None,
    request: Request,
) -> Response:
    """Run the request in the engine; return the whole response, or its events. Store the conversation at its end.

    wait_s: how long the first token may take.
    """

    def finished() -> StoredResponse:
        return StoredResponse.of(service.owner(request), body, history, builder.response)

    def keep(finished: StoredResponse) -> None:
        if body.store:
            service.responses.put(finished)

    headers = _ignored_header(request, [*body.ignored(), *ineffective_settings(body.speculative, service.limits)])
    caller, trace = _caller(request), service.tracing.of(request.headers)
    deltas = merge([generation.stream(service.engine, service.metrics, caller, trace)])
    try:
        first = await service.admission.first(deltas, wait_s)  # errors before it get their own HTTP status
        if body.stream:
            return EventStream(events_of(builder, generation, first, deltas, lambda: keep(finished())), deltas, headers)
        async with aclosing(deltas):
            async for _, delta in prepend(first, deltas):
                builder.feed(delta)
    finally:
        service.engine.release([generation.submit.id])
    builder.end(generation)
    stored = await asyncio.to_thread(finished) if body.has_logprobs else finished()  # as in `generate`
    keep(stored)
    return Response(stored.response, media_type="application/json", headers=headers)


def _event_ids(
    service: Service, response_format: ResponseFormat, generations: Sequence[Generation], head: RequestHead
) -> EventIds | None:
    """Return what writes a stream's event ids; None if it has none. A stream that goes on keeps its id and its time.

    Raises BadRequest if it cannot go on.
    """
    problem = why_not_resumable(
        response_format.body, generations[0].submit, service.config.draft, num_choices=len(generations)
    )
    if head.resumed is None:
        origin = Origin(
            digest=head.digest,
            created=response_format.head["created"],
            response_id=response_format.head["id"],
            seeds=tuple(each.submit.sampling.seed for each in generations if each.number == 0),
            request_id=generations[0].request_id,
        )
        return None if problem else EventIds(origin, len(generations))
    if problem is not None:
        raise problem
    origin = head.resumed.origin
    response_format.head.update(id=origin.response_id, created=origin.created)
    places = [place.num_tokens if place else 0 for place in head.resumed.places]
    logger.info("request %s: goes on behind tokens %s of its stream", origin.request_id, places)
    return EventIds(origin, len(generations), head.resumed)


def _has_totals(body: SamplingRequest) -> bool:
    """Return whether a stream ends with a chunk of totals."""
    return body.return_speculative_stats or (body.stream_options is not None and body.stream_options.usage_at_end)


async def _events(
    response_format: ResponseFormat,
    generations: Sequence[Generation],
    first: tuple[int, TextDelta],
    rest: AsyncGenerator[tuple[int, TextDelta]],
    ids: EventIds | None,
) -> AsyncGenerator[str]:
    """Yield server-sent events: opening chunks, one chunk per delta, totals, [DONE]; an error is an event, too.

    Replayed deltas go the same way, so that what they leave behind is the same, but the client has their events.
    """
    body = response_format.body
    options = body.stream_options
    running = options is not None and options.usage_in_chunks
    told_at = time.monotonic()
    try:
        async with aclosing(rest):
            if response_format.reads_prompts:
                await asyncio.to_thread(response_format.read_prompts, generations)
            for index, generation in enumerate(generations):
                if generation.replay is not None:
                    continue
                if (opening := response_format.opening_chunk(index, generation)) is not None:
                    if running:
                        opening.usage = opening_usage(generation)
                    yield with_id(opening.sse(), ids.sent(index) if ids else None)
            async for index, delta in prepend(first, rest):
                if ids is not None:
                    ids.process(index, delta.token_ids, is_finished=delta.finish_reason is not None)
                if delta.is_replayed and time.monotonic() - told_at > KEEP_ALIVE_S:
                    told_at = time.monotonic()
                    yield ": replaying\n\n"
                has_more = running or body.return_token_ids or body.return_speculative_trees
                if not (delta.text or delta.finish_reason or has_more):
                    continue  # the text is held back: half a character, or the beginning of a stop string
                chunk = response_format.chunk(index, generations[index], delta)
                if chunk is None or delta.is_replayed:
                    continue
                if running:
                    chunk.usage = running_usage(generations[index], delta)
                yield with_id(chunk.sse(), ids.sent(index) if ids else None)
        if _has_totals(body) and not (ids and ids.is_closed):
            usage = total_usage(generations) if options is not None and options.usage_at_end else None
            stats = total_stats(generations) if body.return_speculative_stats else None
            yield with_id(response_format.closing_chunk(usage, stats).sse(), ids.closed() if ids else None)
    except Exception as error:
        yield to_http_error(error).body.sse()
        yield SSE_DONE
    else:
        yield with_id(SSE_DONE, ids.last if ids else None)


def _caller(request: Request) -> Caller | None:
    """Return whose API key the request came with; None if the service needs no keys."""
    return getattr(request.state, "caller", None)


def _ignored_header(request: Request, ignored: Sequence[str]) -> dict[str, str]:
    """Return the header that names ignored fields, if there are any."""
    if not ignored:
        return {}
    logger.info("request %s: ignored fields %s", request.state.request_id, ", ".join(map(repr, ignored)))
    # The client chose these names: remove what could end the header, and bound its length.
    names = (char if char.isascii() and char.isprintable() else "?" for char in ", ".join(ignored)[:1024])
    return {IGNORED_HEADER: "".join(names)}


def _json(model: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(model.model_dump_json(), media_type="application/json", headers=headers)
