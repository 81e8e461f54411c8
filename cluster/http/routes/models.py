"""The models that the service has, and their tokenizer: /v1/models, /tokenize, /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from cluster.errors import BadRequest
from cluster.http.openapi import WITH_BODY, errors
from cluster.http.replies import ignored_header, json_reply
from cluster.http.service import Service
from cluster.openai.request_params import truncate
from cluster.openai.streaming import cancel_on_disconnect
from secateur.requests import (
    DetokenizeRequest,
    TokenizeRequest,
)
from secateur.responses import (
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
)


def add_model_routes(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.get("/v1/models", response_model=ModelList)
    async def models() -> Response:
        return json_reply(ModelList(data=[service.card(name) for name in service.model_ids]))

    @app.get("/v1/models/{model:path}", response_model=ModelCard, responses=errors(404))
    async def model(model: str) -> Response:
        service.check_model(model)
        return json_reply(service.card(model))

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
        return json_reply(answer, ignored_header(request, body.ignored()))

    @app.post("/detokenize", response_model=DetokenizeResponse, responses=WITH_BODY)
    @cancel_on_disconnect
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        service.check_body(body)
        if body.tokens and max(body.tokens) >= service.limits.vocab_size:
            raise BadRequest(f"token id {max(body.tokens)} is not in the vocabulary", param="tokens")
        text = await service.tokenizer_pool.decode(body.tokens)
        return json_reply(DetokenizeResponse(prompt=text), ignored_header(request, body.ignored()))

    if service.has_tokenizer_info:

        @app.get("/tokenizer_info")
        async def tokenizer_info() -> dict[str, Any]:
            return service.tokenizer.info()
