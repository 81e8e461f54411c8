"""The HTTP service: OpenAI's routes over one engine. Knows FastAPI, not Ray: the same app runs under both.

A request's walk: model -> unsupported parameters -> admission -> length of its texts -> tokens -> limits -> engine ->
text -> answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from cluster.http import metrics, middleware
from cluster.http.api_keys import ApiKeys
from cluster.http.openai_format import (
    Answer,
    ChatShape,
    CompletionShape,
    Shape,
    speculative_stats,
    usage_of,
    usage_of_one,
)
from cluster.http.output_processor import Engine, Piece, Prompt, generate
from cluster.http.request_params import (
    BadRequest,
    RequestLimits,
    SeedSource,
    further_answer,
    submit_from,
    without_effect,
)
from cluster.http.streaming import ClientLeft, EventStream, merged, prepended, unless_client_leaves
from cluster.http.tokenizer import TextLimit, Tokenizer, text_size
from cluster.http.tokenizer_pool import TokenizerPool, TokenizerPoolFull
from secateur import __version__
from secateur.errors import ConfigError
from secateur.requests import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    DetokenizeRequest,
    Rendered,
    SamplingRequest,
    TokenizeRequest,
)
from secateur.responses import (
    IGNORED_HEADER,
    SSE_DONE,
    ChatCompletionResponse,
    CompletionResponse,
    DetokenizeResponse,
    ErrorResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
    Usage,
)
from workers.comm.ipc import Submit
from workers.config import EngineConfig

logger = logging.getLogger(__name__)

PENDING_PER_SEQUENCE = 8
"""Requests the service holds per place in the running batch before it answers 429."""
CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody is left to read it

Body = TypeVar("Body", bound=SamplingRequest)
T = TypeVar("T")

_Indexed = tuple[int, Piece]


@dataclass(kw_only=True)
class Service:
    """What the routes need: one engine, one tokenizer, one model name."""

    engine: Engine
    tokenizer: Tokenizer
    """For what comes out, a few tokens at a time."""
    tokenizer_pool: TokenizerPool
    """For what comes in, whatever its size."""
    config: EngineConfig
    model_id: str
    replica: str
    """Which of the replicas of this model, for the metrics."""
    api_key: str | None = None
    api_keys: ApiKeys | None = None
    """Keys that may change; None: `api_key` alone, or none at all."""
    seed: int | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of requests that do not say how to sample, see `SamplingRequest.filled`; `max_tokens` is that of chats."""
    max_pending: int | None = None
    """Answers at work or waiting before new ones get a 429; None = 8 per running sequence."""
    created: int = field(default_factory=lambda: int(time.time()))
    seeds: SeedSource = field(init=False)
    metrics: metrics.Metrics = field(init=False)

    def __post_init__(self) -> None:
        if self.api_keys is None and (key := self.api_key) is not None:
            self.api_keys = lambda: (key,)
        self.seeds = SeedSource(self.seed)
        self.metrics = metrics.Metrics(self.model_id, self.replica, lambda: self.engine.stats)
        self.max_pending = self.max_pending or PENDING_PER_SEQUENCE * self.config.max_num_seqs

    @property
    def limits(self) -> RequestLimits:
        """The engine's own word, once it is ready: it may have less room than its configuration asked for."""
        ready = self.engine.ready
        return RequestLimits.of(
            self.config,
            max_model_len=ready.max_model_len if ready else self.config.max_model_len,
            vocab_size=ready.vocab_size if ready else self.tokenizer.vocab_size,
            default_max_tokens=self.sampling_defaults.get("max_tokens"),
        )

    @property
    def text_limit(self) -> TextLimit:
        """What may be tokenized at all."""
        context = self.limits.max_model_len
        return TextLimit(tokens=context, chars=context * self.tokenizer.longest_token)

    def health(self) -> tuple[bool, str]:
        """Whether requests can be served: an engine that makes progress, and workers that tokenize."""
        engine = self.engine.health()
        return self.tokenizer_pool.health() if engine[0] else engine

    def admit(self, num_prompts: int, answers_each: int = 1) -> None:
        """Raises Refused if the engine or the tokenizing workers are down (503) or the engine has enough to do (429).
        Every answer counts."""
        assert self.max_pending is not None
        if not (health := self.engine.health())[0]:
            raise middleware.unavailable(f"the engine is not available: {health[1].splitlines()[0]}")
        if not (health := self.tokenizer_pool.health())[0]:
            raise middleware.unavailable(health[1])
        num_answers = num_prompts * answers_each
        if num_answers > self.max_pending:
            raise BadRequest(
                f"{num_prompts} x {answers_each} answers (prompts x n) are more than the {self.max_pending} that this "
                "service holds at once; split the request",
                param="prompt" if answers_each == 1 else "n",
            )
        if self.engine.num_pending + num_answers > self.max_pending:
            self.metrics.request_rejected()
            pending = self.engine.num_pending
            raise middleware.too_many(f"{pending} of at most {self.max_pending} requests are pending; try later")

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_id:
            raise middleware.not_found(
                f"the model {name!r} does not exist; this service has {self.model_id!r}",
                code="model_not_found",
                param="model",
            )


def create_app(service: Service, *, echo_request_id: bool = True) -> FastAPI:
    """The HTTP application of one engine. `echo_request_id=False` where a proxy in front does it (Ray Serve's)."""
    app = FastAPI(title="Secateur", version=__version__)
    middleware.install(app, api_keys=service.api_keys, echo_request_id=echo_request_id)

    @app.exception_handler(ClientLeft)
    async def client_left(_: Request, error: ClientLeft) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.post("/v1/completions", response_model=CompletionResponse)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        arrival = time.perf_counter()
        body = checked(service, body)
        service.admit(len(body.prompts), body.n)  # before the work on their texts, and again after it
        ids = await _prompt_ids(service, body, request)
        prompts = await _prompts(service, body, ids, request, arrival)
        shape = CompletionShape(body, service.model_id, service.tokenizer)
        return await answer(service, shape, body, prompts, request)

    @app.post("/v1/chat/completions", response_model=ChatCompletionResponse)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        arrival = time.perf_counter()
        body = checked(service, body)
        service.admit(1, body.n)
        ids = await _chat_ids(service, body, request, body.messages, add_special_tokens=body.add_special_tokens)
        prompts = await _prompts(service, body, [ids], request, arrival)
        shape = ChatShape(body, service.model_id, service.tokenizer)
        return await answer(service, shape, body, prompts, request)

    @app.get("/v1/models", response_model=ModelList)
    async def models() -> Response:
        return _json(ModelList(data=[_card(service)]))

    @app.get("/v1/models/{model:path}", response_model=ModelCard)
    async def model(model: str) -> Response:
        service.check_model(model)
        return _json(_card(service))

    @app.post("/tokenize", response_model=TokenizeResponse)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        check_known(service, body)
        service.admit(1)
        special, strings = body.with_special_tokens, None
        if body.messages is not None:
            ids = await _chat_ids(service, body, request, body.messages, tools=body.tools, add_special_tokens=special)
        else:
            [ids] = await _text_ids(service, request, [body.prompt or ""], special)
        if body.return_token_strs:
            strings = await _while_client_waits(service, request, service.tokenizer_pool.token_strings(ids))
        limit = service.limits.max_model_len
        answer = TokenizeResponse(tokens=ids, count=len(ids), max_model_len=limit, token_strs=strings)
        return _json(answer, _naming(request, body.ignored()))

    @app.post("/detokenize", response_model=DetokenizeResponse)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        check_known(service, body)
        if body.tokens and max(body.tokens) >= service.limits.vocab_size:
            raise BadRequest(f"token id {max(body.tokens)} is not in the vocabulary", param="tokens")
        text = await _while_client_waits(service, request, service.tokenizer_pool.decode(body.tokens))
        return _json(DetokenizeResponse(prompt=text), _naming(request, body.ignored()))

    @app.get("/health")
    async def health() -> Response:
        ok, reason = service.health()
        return JSONResponse({"status": "ok"}) if ok else middleware.write(middleware.unavailable(reason))

    @app.get("/metrics")
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
            "topology": ready.topology if ready else [],
            "num_pages": ready.num_pages if ready else 0,
            "sampling_defaults": dict(service.sampling_defaults),
            "config": asdict(service.config),
        }

    return app


def check_known(service: Service, body: SamplingRequest | TokenizeRequest | DetokenizeRequest) -> None:
    """Refuses another model and whatever is valid but not implemented."""
    service.check_model(body.model)
    if found := body.unsupported():
        raise middleware.Refused(400, ErrorResponse.from_unsupported(found))


def checked(service: Service, body: Body) -> Body:
    """The request with the service's defaults, if it is one that this service answers."""
    check_known(service, body)
    try:
        return body.filled(service.sampling_defaults)
    except ConfigError as error:
        problem = error.problems[0]
        raise BadRequest(
            f"{problem} (left out, a parameter is as the model's makers say)", param=problem.field
        ) from None


async def answer(
    service: Service, shape: Shape, body: SamplingRequest, prompts: Sequence[Prompt], request: Request
) -> Response:
    """Generates all choices and writes them, whole or as a stream. A client that leaves ends them in the engine."""
    headers = _naming(request, [*body.ignored(), *without_effect(body.speculative, service.limits)])
    answers = [Answer(prompt.submit.prompt, index % body.n) for index, prompt in enumerate(prompts)]
    pieces = merged([generate(service.engine, service.tokenizer, service.metrics, prompt) for prompt in prompts])
    if not body.stream:
        whole = await unless_client_leaves(request, _collect(pieces, answers))
        if whole is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        if body.num_logprobs is None:
            return _json(shape.whole(answers), headers)
        # 4096 tokens with 20 alternatives are 10^5 objects: a second that the other streams need not wait for.
        return await asyncio.to_thread(lambda: _json(shape.whole(answers), headers))
    # Waiting for the first piece lets what goes wrong before it have a status of its own.
    first = await unless_client_leaves(request, anext(pieces))
    if first is None:
        await pieces.aclose()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return EventStream(_events(shape, body, answers, first, pieces), pieces, headers)


async def _events(
    shape: Shape, body: SamplingRequest, answers: list[Answer], first: _Indexed, rest: AsyncGenerator[_Indexed]
) -> AsyncGenerator[str]:
    """Server-sent events: openings, one per piece, the totals, [DONE]; an error ends them as an event of its own."""
    options = body.stream_options
    running_usage = options is not None and options.usage_in_chunks
    told_empty = running_usage or body.return_token_ids
    try:
        async with aclosing(rest):
            for index, empty in enumerate(answers):
                if (opening := shape.opening(index, empty)) is not None:
                    if running_usage:
                        opening.usage = Usage.of(len(empty.prompt_ids), 0)
                    yield opening.sse()
            async for index, piece in prepended(first, rest):
                answers[index].add(piece)
                if not piece.text and piece.finish_reason is None and not told_empty:
                    continue  # half a character or the beginning of a stop string: nothing to tell yet
                chunk = shape.chunk(index, answers[index], piece)
                if running_usage:
                    chunk.usage = usage_of_one(answers[index])
                yield chunk.sse()
        usage = usage_of(answers) if options is not None and options.usage_at_end else None
        stats = speculative_stats(answers) if body.return_speculative_stats else None
        if usage is not None or stats is not None:
            yield shape.closing(usage, stats).sse()
    except Exception as error:
        yield middleware.refusal_of(error).body.sse()
    yield SSE_DONE


async def _collect(pieces: AsyncGenerator[_Indexed], answers: list[Answer]) -> bool:
    async with aclosing(pieces):
        async for index, piece in pieces:
            answers[index].add(piece)
    return True


async def _prompts(
    service: Service, body: SamplingRequest, ids: Sequence[list[int]], request: Request, arrival: float
) -> list[Prompt]:
    """One Prompt per choice, admitted: the `n` answers to the first prompt, then those to the next.

    Raises BadRequest, Refused, PromptError.
    """
    bad_words: list[list[int]] = []
    if body.bad_words:
        bad_words = await _while_client_waits(service, request, service.tokenizer_pool.bad_words(body.bad_words))
    service.admit(len(ids), body.n)
    limits, new_id = service.limits, service.engine.new_id
    submits: list[Submit] = []
    for prompt in ids:
        first = submit_from(body, prompt, id=new_id(), seed=service.seeds.next(), limits=limits, bad_words=bad_words)
        submits += [first, *(further_answer(first, number, id=new_id()) for number in range(1, body.n))]
    return [
        Prompt(
            submit=submit,
            request_id=body.request_id or request.state.request_id,
            arrival=arrival,
            stop=body.stop_strings,
            include_stop=body.include_stop_str_in_output,
            skip_special_tokens=body.skip_special_tokens,
        )
        for submit in submits
    ]


async def _prompt_ids(service: Service, body: CompletionRequest, request: Request) -> list[list[int]]:
    """The ids of each prompt: all are texts, or all are ids already, whose number `submit_from` looks at."""
    texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
    if not texts:
        return [list(prompt) for prompt in body.prompts if not isinstance(prompt, str)]
    return await _text_ids(service, request, texts, body.add_special_tokens)


async def _text_ids(
    service: Service, request: Request, texts: Sequence[str], add_special_tokens: bool
) -> list[list[int]]:
    service.text_limit.check(max(map(len, texts)), param="prompt")
    work = service.tokenizer_pool.encode(texts, add_special_tokens=add_special_tokens)
    return await _while_client_waits(service, request, work)


async def _chat_ids(
    service: Service,
    body: Rendered,
    request: Request,
    messages: Sequence[ChatMessage],
    *,
    add_special_tokens: bool,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """The ids of a conversation. Its texts are bounded before they are rendered, and what comes of them before that is
    tokenized: a template may repeat them."""
    variables = body.chat_template_kwargs
    service.tokenizer.check_template_variables(variables)
    rendered = [_message(message) for message in messages]
    limit = service.text_limit
    limit.check(text_size([rendered, variables, tools]), param="messages")
    work = service.tokenizer_pool.encode_chat(
        rendered,
        limit=limit,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=variables,
        tools=tools,
        add_special_tokens=add_special_tokens,
    )
    return await _while_client_waits(service, request, work)


async def _while_client_waits(service: Service, request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of a job of the tokenizing workers, which ends when its client leaves. Raises ClientLeft."""
    try:
        done = await unless_client_leaves(request, work)
    except TokenizerPoolFull:
        service.metrics.request_rejected()
        raise
    if done is None:
        raise ClientLeft
    return done


def _message(message: ChatMessage) -> dict[str, Any]:
    """Templates get text: parts are joined, fields such as `name` stay."""
    return message.model_dump(exclude={"content"}, exclude_none=True) | {"content": message.text}


def _naming(request: Request, ignored: Sequence[str]) -> dict[str, str]:
    """The header that names what was ignored, if anything was."""
    if not ignored:
        return {}
    logger.info("request %s: ignored fields %s", request.state.request_id, ", ".join(map(repr, ignored)))
    return {IGNORED_HEADER: _header_text(", ".join(ignored))}


def _header_text(text: str) -> str:
    """Names are the caller's: nothing that could end a header or make it endless."""
    return "".join(char if char.isascii() and char.isprintable() else "?" for char in text[:1024])


def _card(service: Service) -> ModelCard:
    return ModelCard(
        id=service.model_id,
        created=service.created,
        root=service.config.model_path,
        max_model_len=service.limits.max_model_len,
    )


def _json(model: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(model.model_dump_json(), media_type="application/json", headers=headers)
