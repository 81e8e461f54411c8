"""/v1/completions and /v1/chat/completions: generated text, whole or as events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi import FastAPI, Request
from fastapi.responses import Response

from cluster.http.openapi import RESUMABLE, STREAM, WITH_BODY, errors
from cluster.http.replies import caller_of, ignored_header, json_reply
from cluster.http.service import RequestHead, Service
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
from cluster.openai.request_params import ineffective_settings
from cluster.openai.resumption import EventIds, Origin, why_not_resumable
from cluster.openai.streaming import EventStream, cancel_on_disconnect, merge, prepend, with_id
from secateur.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    SamplingRequest,
)
from secateur.responses import (
    SSE_DONE,
    ChatCompletionResponse,
    CompletionResponse,
)

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 5.0
"""While a stream goes through what its client has, a comment this often keeps proxies from closing the connection."""


def add_completion_routes(app: FastAPI, service: Service) -> None:
    """Add the routes."""

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
    headers = ignored_header(request, unread)
    caller, trace = caller_of(request), service.tracing.of(request.headers)
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
        return json_reply(response_format.response(generations), headers)
    # 4096 tokens with 20 alternatives are 10^5 objects: a second during which other streams must not wait.
    return await asyncio.to_thread(lambda: json_reply(response_format.response(generations), headers))


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
