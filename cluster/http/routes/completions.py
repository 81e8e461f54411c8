"""/v1/completions and /v1/chat/completions: generated text, whole or as events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing

from fastapi import FastAPI, Request
from fastapi.responses import Response

from cluster.http.openapi import RESUMABLE, STREAM, WITH_BODY, errors
from cluster.http.replies import ignored_header, json_reply
from cluster.http.service import RequestHead, Service
from cluster.openai.direct import direct_writer
from cluster.openai.openai_format import ChatFormat, CompletionFormat, ResponseFormat
from cluster.openai.output_processor import Generation
from cluster.openai.request_params import ineffective_settings
from cluster.openai.resumption import EventIds, Origin, why_not_resumable
from cluster.openai.streaming import DeltaEvents, EventStream, cancel_on_disconnect, events_of, with_id
from secateur.requests import ChatCompletionRequest, CompletionRequest
from secateur.responses import SSE_DONE, ChatCompletionResponse, CompletionResponse

logger = logging.getLogger(__name__)


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
        return await answer(service, "completion", body, request)

    @app.post(
        "/v1/chat/completions",
        response_model=ChatCompletionResponse,
        responses={200: STREAM, **WITH_BODY, **errors(409)},
        openapi_extra=RESUMABLE,
    )
    @cancel_on_disconnect
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        return await answer(service, "chat", body, request)


async def answer(
    service: Service, kind: str, body: CompletionRequest | ChatCompletionRequest, request: Request
) -> Response:
    """Return the whole response, or an event stream. kind: the endpoint, in event ids."""
    arrival = time.perf_counter()
    body = service.accept(body)
    with service.ticket(body) as ids:
        head = await service.head_of(request, body, arrival=arrival, kind=kind)
        prompts = await service.tokenize(body)
        generations = await service.prepare(body, prompts, head, ids)
        response_format: ResponseFormat
        if isinstance(body, ChatCompletionRequest):
            new_reader = service.answers.of(body, prompts[0])
            response_format = ChatFormat(body, service.model_id, service.tokenizer, new_reader)
        else:
            response_format = CompletionFormat(body, service.model_id, service.tokenizer)
        unread = [*service.ignored(body), *ineffective_settings(body.speculative, service.limits)]
        headers = ignored_header(request, unread)
        event_ids = _event_ids(service, response_format, generations, head) if body.stream else None
        if event_ids is not None and event_ids.is_over(has_totals=response_format.has_totals):
            return Response(with_id(SSE_DONE, event_ids.last), media_type=EventStream.media_type, headers=headers)
        writer = direct_writer(request.scope) if body.stream else None
        events = DeltaEvents(response_format, generations, event_ids, writer)
        deltas = service.deltas(generations, head, is_streamed=body.stream, sink=events if writer else None)
        # Errors before the first delta get their own HTTP status.
        first = await service.admission.first(deltas, head.wait_s(body))
    if body.stream:
        return EventStream(events_of(response_format, generations, first, deltas, events), deltas, headers)
    async with aclosing(deltas):
        async for _ in deltas:
            pass
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
    resumed = head.resumed
    problem = why_not_resumable(
        response_format.body, generations[0].submit, service.config.draft, num_choices=len(generations)
    )
    if problem is not None:
        if resumed is not None:
            raise problem
        return None
    if resumed is not None:
        origin = resumed.origin
        response_format.head.update(id=origin.response_id, created=origin.created)
        places = [place.num_tokens if place else 0 for place in resumed.places]
        logger.info("request %s: goes on after tokens %s of its stream", origin.request_id, places)
    else:
        origin = Origin(
            digest=head.digest,
            created=response_format.head["created"],
            response_id=response_format.head["id"],
            seeds=tuple(each.submit.sampling.seed for each in generations if each.number == 0),
            request_id=head.request_id,
        )
    return EventIds(origin, len(generations), resumed)
