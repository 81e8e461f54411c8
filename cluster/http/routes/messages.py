"""/v1/messages: a chat in Anthropic's words, which coding agents speak."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request
from fastapi.responses import Response

from cluster.http.openapi import STREAM, WITH_BODY_OF_MESSAGES
from cluster.http.replies import ignored_header, json_reply
from cluster.http.service import Service
from cluster.openai.messages_api import MessageBuilder
from cluster.openai.request_params import ineffective_settings
from cluster.openai.responses_api import build, chat_of, events_of, in_words
from cluster.openai.streaming import EventStream, cancel_on_disconnect
from cluster.text.answer_reader import AnswerReader
from secateur.messages_api import NAMES, CountTokensRequest, Message, MessagesRequest, MessageTokens


def add_message_routes(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.post("/v1/messages", response_model=Message, responses={200: STREAM, **WITH_BODY_OF_MESSAGES})
    @cancel_on_disconnect
    async def messages(body: MessagesRequest, request: Request) -> Response:
        arrival = time.perf_counter()
        with in_words(NAMES):
            service.check_body(body)
            chat = service.accept(chat_of(body.chat()))
            with service.ticket(chat) as ids:
                head = await service.head_of(request, chat, arrival=arrival)
                [prompt] = await service.tokenize(chat)
                room = max(1, service.limits.max_model_len - len(prompt))
                # Agents ask for as much as the largest models write.
                fills_context = body.max_tokens > room
                chat = chat.model_copy(update={"max_completion_tokens": min(body.max_tokens, room)})
                [generation] = await service.prepare(chat, [prompt], head, ids)
                new_reader = service.answers.of(chat, prompt)
                deltas = service.deltas([generation], head, is_streamed=body.stream)
                # Errors before the first delta get their own HTTP status.
                first = await service.admission.first(deltas, head.wait_s(chat))
            reader = AnswerReader() if new_reader is None else new_reader()
            builder = MessageBuilder(chat, service.model_id, reader, generation, fills_context=fills_context)
            unread = [*body.ignored(), *service.unread_effort(chat, "output_config.effort")]
            unread += ineffective_settings(body.speculative, service.limits)
            headers = ignored_header(request, unread)
            if body.stream:
                return EventStream(events_of(builder, generation, first, deltas), deltas, headers)
            await build(builder, generation, first, deltas)
            return json_reply(builder.message, headers)

    @app.post("/v1/messages/count_tokens", response_model=MessageTokens, responses=WITH_BODY_OF_MESSAGES)
    @cancel_on_disconnect
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        with in_words(NAMES):
            service.check_body(body)
            chat = service.accept(chat_of(body.chat()))
            service.admission.admit(1, priority=chat.priority, wait_s=chat.first_token_timeout_s)
            [prompt] = await service.tokenize(chat)
        return json_reply(MessageTokens(input_tokens=len(prompt)), ignored_header(request, body.ignored()))
