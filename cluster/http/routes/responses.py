"""/v1/responses: an answer as items, and what is stored of it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from cluster.errors import BadRequest, not_found
from cluster.http.openapi import STREAM, WITH_BODY, errors
from cluster.http.replies import ignored_header, json_reply
from cluster.http.routes.batches import After, NumEntries, Order
from cluster.http.service import Service
from cluster.openai.request_params import ineffective_settings
from cluster.openai.response_store import StoredResponse
from cluster.openai.responses_api import ResponseBuilder, build, chat_of, events_of, in_words
from cluster.openai.streaming import EventStream, cancel_on_disconnect
from secateur.requests import ChatCompletionRequest
from secateur.responses import LAST_EVENT_ID_HEADER
from secateur.responses_api import NAMES, DeletedResponse, InputItems, InputTokens, ResponseObject, ResponsesRequest


def add_response_routes(app: FastAPI, service: Service) -> None:
    """Add the routes that answer and count."""

    def resolved(
        body: ResponsesRequest, request: Request
    ) -> tuple[ResponsesRequest, list[dict[str, Any]], ChatCompletionRequest]:
        """Return a request without references, the conversation before it, and the chat that answers it."""
        owner = service.owner(request)
        body = service.responses.resolve(body, owner)
        history = service.responses.history(body.previous_response_id, owner)
        return body, history, service.accept(chat_of(body.chat(history)))

    @app.post("/v1/responses", response_model=ResponseObject, responses={200: STREAM, **WITH_BODY})
    @cancel_on_disconnect
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        arrival = time.perf_counter()
        with in_words(NAMES):
            service.check_body(body)
            if LAST_EVENT_ID_HEADER in request.headers:
                raise BadRequest(
                    "Last-Event-ID: streams of /v1/responses cannot be continued; leave the header out, or use "
                    "/v1/chat/completions",
                    param=None,
                    code="not_resumable",
                )
            body, history, chat = resolved(body, request)
            with service.ticket(chat) as ids:
                head = await service.head_of(request, chat, arrival=arrival)
                [prompt] = await service.tokenize(chat)
                [generation] = await service.prepare(chat, [prompt], head, ids)
                new_reader = service.answers.of(chat, prompt)
                builder = ResponseBuilder(body, chat, service.model_id, service.tokenizer, new_reader, service.replica)
                unread = [*body.ignored(), *service.unread_effort(chat, "reasoning.effort")]
                unread += ineffective_settings(body.speculative, service.limits)
                headers = ignored_header(request, unread)
                deltas = service.deltas([generation], head, is_streamed=body.stream)
                # Errors before the first delta get their own HTTP status.
                first = await service.admission.first(deltas, head.wait_s(chat))

            def finished() -> StoredResponse:
                return StoredResponse.of(service.owner(request), body, history, builder.response)

            def keep(finished: StoredResponse) -> None:
                if body.store:
                    service.responses.put(finished)

            if body.stream:
                events = events_of(builder, generation, first, deltas, lambda: keep(finished()))
                return EventStream(events, deltas, headers)
            await build(builder, generation, first, deltas)
            stored = await asyncio.to_thread(finished) if body.has_logprobs else finished()  # as of chats
            keep(stored)
            return Response(stored.response, media_type="application/json", headers=headers)

    @app.post("/v1/responses/input_tokens", response_model=InputTokens, responses=WITH_BODY)
    @cancel_on_disconnect
    async def input_tokens(body: ResponsesRequest, request: Request) -> Response:
        with in_words(NAMES):
            service.check_body(body)
            _, _, chat = resolved(body, request)
            service.admission.admit(1, priority=chat.priority, wait_s=chat.first_token_timeout_s)
            [prompt] = await service.tokenize(chat)
        return json_reply(InputTokens(input_tokens=len(prompt)), ignored_header(request, body.ignored()))


def add_stored_response_routes(app: FastAPI, service: Service) -> None:
    """Add the routes of what is stored."""

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
        return json_reply(DeletedResponse(id=id))

    @app.post("/v1/responses/{id}/cancel", response_model=ResponseObject, responses=errors(400, 404))
    async def cancel_response(id: str, request: Request) -> Response:
        service.responses.get(id, service.owner(request))
        raise BadRequest("Cannot cancel a synchronous response. To end a running one, close its connection", param=None)

    @app.get("/v1/responses/{id}/input_items", response_model=InputItems, responses=errors(400, 404))
    async def input_items(
        id: str, request: Request, limit: NumEntries = 20, after: After = None, order: Order = "desc"
    ) -> Response:
        owner = service.owner(request)
        return json_reply(service.responses.input_items(id, owner, limit=limit, after=after, order=order))
