"""The HTTP service: OpenAI's routes over one engine. It uses FastAPI and not Ray, so the same app runs under both.

The walk of a generation request, from the HTTP body to the engine and back to the event:

1. `limits.LimitedProtocol` (uvicorn's protocol) bounds the size and the arrival time of the HTTP request.
2. `middleware` assigns the request id and checks the API key; FastAPI validates the body into a request model.
3. The route calls `Service.accept`: model name, unsupported parameters, the model's sampling defaults, admission.
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
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from cluster.engine_client import EngineClient, Health
from cluster.http import metrics, middleware, openapi
from cluster.http.answer_reader import AnswerReader
from cluster.http.api_keys import ApiKeys
from cluster.http.errors import BadRequest, HttpError, not_found, too_many_requests, unavailable
from cluster.http.inspector import inspector_page
from cluster.http.openai_format import (
    ChatFormat,
    CompletionFormat,
    ResponseFormat,
    running_usage,
    total_stats,
    total_usage,
)
from cluster.http.openapi import STREAM, WITH_BODY, errors
from cluster.http.output_processor import Generation, TextDelta
from cluster.http.reasoning import ReasoningReader, teaches_reasoning
from cluster.http.request_params import RequestLimits, SeedSource, build_submits, ineffective_settings, truncate
from cluster.http.responses_api import (
    ResponseBuilder,
    ResponseStore,
    chat_of,
    events_of,
    in_words_of_responses,
)
from cluster.http.streaming import EventStream, cancel_on_disconnect, merge, prepend
from cluster.http.tokenizer import TextLimit, Tokenizer, text_size
from cluster.http.tokenizer_pool import TokenizerPool
from cluster.http.tool_calls import (
    TAUGHT_FORMAT,
    ToolCallFormat,
    ToolCallReader,
    decoded_calls,
    format_of_template,
    reader_of_calls,
    shows_special_tokens,
    tools_of,
)
from secateur import __version__
from secateur.errors import ConfigError
from secateur.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
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
from secateur.responses_api import DeletedResponse, InputItems, ResponseObject, ResponsesRequest
from workers.config import EngineConfig

logger = logging.getLogger(__name__)

_END_TOKENS = 16  # of a prompt, enough for the mark with which it may end
PENDING_PER_SEQUENCE = 8
"""Pending requests per place in the running batch beyond which the service answers 429."""

Body = TypeVar("Body", bound=SamplingRequest)


@dataclass(kw_only=True)
class Service:
    """Holds what the routes share: one engine, one tokenizer, one model name; admission and tokenization."""

    engine: EngineClient
    tokenizer: Tokenizer
    """Detokenizes answers, a few tokens at a time, in this process."""
    tokenizer_pool: TokenizerPool
    """Tokenizes prompts of any size in worker processes."""
    config: EngineConfig
    model_id: str
    replica: str
    """The replica's id, a label of its metrics."""
    api_key: str | None = None
    api_keys: ApiKeys | None = None
    """Returns the keys valid now; None = `api_key` alone, or no keys."""
    seed: int | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """The model's sampling parameters for requests that leave them out; its `max_tokens` applies to chats alone."""
    max_pending: int | None = None
    """Choices running or waiting beyond which the service answers 429; None = 8 per running sequence."""
    cors: middleware.Cors | None = None
    """None = browsers let no script of another origin use the service."""
    has_tokenizer_info: bool = False
    """Serve /tokenizer_info."""
    root_path: str = ""
    """The prefix under which clients see the service, such as /llm."""
    reasoning_parser: Literal["auto", "none", "think"] = "auto"
    """Whether answers begin with reasoning; auto: if the chat template has its marks."""
    tool_call_parser: Literal["auto"] | ToolCallFormat = "auto"
    """How the model writes tool calls; auto: as its chat template teaches."""
    created: int = field(default_factory=lambda: int(time.time()))
    responses: ResponseStore = field(init=False, default_factory=ResponseStore)
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
        """The running engine's limits; it may have less room than its configuration asked for."""
        ready = self.engine.ready
        return RequestLimits.of(
            self.config,
            max_model_len=ready.max_model_len if ready else self.config.max_model_len,
            vocab_size=ready.vocab_size if ready else self.tokenizer.vocab_size,
            default_max_tokens=self.sampling_defaults.get("max_tokens"),
        )

    @property
    def text_limit(self) -> TextLimit:
        """The longest text that is tokenized at all."""
        context = self.limits.max_model_len
        return TextLimit(tokens=context, chars=context * self.tokenizer.longest_token)

    @property
    def topology(self) -> list[dict[str, str | int]]:
        """The engine's ranks, as they were when it started; a drafter that was lost since has no process id."""
        ready = self.engine.ready
        return [
            {key: value for key, value in entry.items() if key != "pid"}
            if entry["role"] == "drafter" and self.engine.stats.num_drafter_losses
            else entry
            for entry in (ready.topology if ready else [])
        ]

    def health(self) -> Health:
        """Check that the engine makes progress and that the tokenizer workers run."""
        engine, tokenizing = self.engine.health(), self.tokenizer_pool.health()
        return engine if tokenizing.ok or not engine.ok else tokenizing

    def check_body(self, body: SamplingRequest | ResponsesRequest | TokenizeRequest | DetokenizeRequest) -> None:
        """Raise HttpError for another model (404) and for valid parameters that are not implemented (400)."""
        self.check_model(body.model)
        if found := body.unsupported():
            raise HttpError(400, ErrorResponse.from_unsupported(found))

    def check_model(self, name: str | None) -> None:
        """Raise HttpError (404) for another model than the one served."""
        if name is not None and name != self.model_id:
            message = f"the model {name!r} does not exist; this service has {self.model_id!r}"
            raise not_found(message, code="model_not_found", param="model")

    def accept(self, body: Body, *, num_prompts: int = 1) -> Body:
        """Check and admit a generation request; return it with the model's sampling defaults filled in."""
        self.check_body(body)
        try:
            body = body.filled(self.sampling_defaults)
        except ConfigError as error:
            problem = error.problems[0]
            message = f"{problem} (parameters left out come from the model's generation_config.json)"
            raise BadRequest(message, param=problem.field) from None
        self.admit(num_prompts, body.n)
        return body

    def admit(self, num_prompts: int, choices_each: int = 1) -> None:
        """Raise HttpError if engine or tokenizer workers are down (503) or too many choices are pending (429)."""
        assert self.max_pending is not None
        if not (health := self.engine.health()).ok:
            raise unavailable(f"the engine is not available: {health.reason.splitlines()[0]}")
        if not (health := self.tokenizer_pool.health()).ok:
            raise unavailable(health.reason)
        num_choices, num_pending = num_prompts * choices_each, self.engine.num_pending
        if num_choices > self.max_pending:
            raise BadRequest(
                f"{num_prompts} x {choices_each} answers (prompts x n) are more than the {self.max_pending} that this "
                "service holds at once; split the request",
                param="prompt" if choices_each == 1 else "n",
            )
        if num_pending + num_choices > self.max_pending:
            raise too_many_requests(f"{num_pending} of at most {self.max_pending} requests are pending; try later")

    async def tokenize_prompts(self, body: CompletionRequest) -> list[list[int]]:
        """Return the token ids of a completion's prompts, which are all texts or all token ids."""
        texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
        if not texts:
            return [list(prompt) for prompt in body.prompts if not isinstance(prompt, str)]
        return await self.tokenize_texts(texts, add_special_tokens=body.add_special_tokens)

    async def tokenize_texts(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Tokenize texts that are short enough to fit. Raises PromptError."""
        self.text_limit.check(max(map(len, texts)), param="prompt")
        return await self.tokenizer_pool.encode(texts, add_special_tokens=add_special_tokens)

    async def tokenize_chat(
        self, body: ChatCompletionRequest | TokenizeRequest, *, add_special_tokens: bool
    ) -> list[int]:
        """Render and tokenize a conversation. Raises PromptError.

        The text limit applies to the messages and again to the rendered text, which may repeat them.
        """
        variables, tools = body.chat_template_kwargs, tools_of(body)
        self.tokenizer.check_template_variables(variables)
        if isinstance(body, ChatCompletionRequest) and body.reasoning_effort is not None:
            variables = {"reasoning_effort": body.reasoning_effort, **variables}
        # Templates expect text: content parts are joined. Other fields, such as `name`, are kept.
        messages = [
            message.model_dump(exclude={"content"}, exclude_none=True) | {"content": message.text}
            for message in body.messages or ()
        ]
        limit = self.text_limit
        limit.check(text_size([messages, variables, tools]), param="messages")
        for number, message in enumerate(messages):
            if calls := message.get("tool_calls"):
                message["tool_calls"] = decoded_calls(calls, number)
        return await self.tokenizer_pool.encode_chat(
            messages,
            limit=limit,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=variables,
            tools=tools,
            add_special_tokens=add_special_tokens,
        )

    @cached_property
    def tool_call_format(self) -> ToolCallFormat | None:
        """How the model writes calls; None = in no way that is known."""
        if self.tool_call_parser != "auto":
            return self.tool_call_parser
        tokenizer = self.tokenizer
        return format_of_template(tokenizer.template_source) if tokenizer.has_tools_template else TAUGHT_FORMAT

    @cached_property
    def reasons(self) -> bool:
        """Whether the model writes reasoning before its answers."""
        return self.reasoning_parser == "think" or (
            self.reasoning_parser == "auto" and teaches_reasoning(self.tokenizer.template_source)
        )

    def answer_reader(
        self, prompt: Sequence[int], new_call_reader: Callable[[], ToolCallReader] | None
    ) -> Callable[[], AnswerReader] | None:
        """Return what makes the readers of a chat's answers; None if they are content alone."""
        if not self.reasons:
            return None if new_call_reader is None else lambda: AnswerReader(None, new_call_reader())
        end = self.tokenizer.decode(prompt[-_END_TOKENS:], skip_special_tokens=False).rstrip()
        begins_inside = end.endswith("<think>")
        return lambda: AnswerReader(
            ReasoningReader(begins_inside=begins_inside), None if new_call_reader is None else new_call_reader()
        )

    async def prepare(
        self, body: SamplingRequest, prompts: Sequence[list[int]], *, request_id: str, arrival: float
    ) -> list[Generation]:
        """Return a Generation for each choice: the `n` choices of the first prompt, then those of the next.

        Admits the request again, since others may have come while it was tokenized, and reserves its places until
        `generate` submits it. Raises BadRequest, HttpError.
        """
        bad_words = await self.tokenizer_pool.bad_words(body.bad_words) if body.bad_words else []
        limits = self.limits
        grammar = ""
        if (structure := body.structure) is not None:
            grammar = await self.tokenizer_pool.grammar(
                structure, end_token_ids=limits.eos_token_ids, vocab_size=limits.vocab_size
            )
        self.admit(len(prompts), body.n)
        submits = [
            build_submits(
                body,
                prompt,
                new_id=self.engine.new_id,
                seed=self.seeds.next(),
                limits=limits,
                bad_words=bad_words,
                grammar=grammar,
            )
            for prompt in prompts
        ]
        self.engine.reserve(submit.id for choices in submits for submit in choices)
        return [
            Generation(
                submit=submit,
                tokenizer=self.tokenizer,
                request_id=body.request_id or request_id,
                arrival=arrival,
                number=number,
                stop=body.stop_strings,
                include_stop=body.include_stop_str_in_output,
                skip_special_tokens=body.skip_special_tokens and not self._reads_special_tokens(body),
                is_empty=body.max_output_tokens == 0,
            )
            for choices in submits
            for number, submit in enumerate(choices)
        ]

    def _reads_special_tokens(self, body: SamplingRequest) -> bool:
        """Return whether special tokens of the answer mark its calls."""
        may_call = isinstance(body, ChatCompletionRequest) and body.calls == "auto"
        return may_call and shows_special_tokens(self.tool_call_format)

    def ignored(self, body: SamplingRequest) -> list[str]:
        """Return fields without effect, also those that this model's chat template does not read."""
        asks = isinstance(body, ChatCompletionRequest) and body.reasoning_effort is not None
        unread = ["reasoning_effort"] if asks and "reasoning_effort" not in self.tokenizer.template_source else []
        return sorted([*body.ignored(), *unread])

    def card(self) -> ModelCard:
        """Return the model's entry in /v1/models."""
        return ModelCard(
            id=self.model_id,
            created=self.created,
            root=self.config.model_path,
            max_model_len=self.limits.max_model_len,
        )


def create_app(service: Service, *, echo_request_id: bool = True) -> FastAPI:
    """Return the HTTP application of one engine. Behind Ray Serve's proxy, which echoes request ids itself, pass
    `echo_request_id=False`."""
    app = FastAPI(title="Secateur", version=__version__)
    middleware.install(
        app,
        api_keys=service.api_keys,
        echo_request_id=echo_request_id,
        on_rejected=service.metrics.observe_rejected,
        root_path=service.root_path,
        cors=service.cors,
    )

    @app.post("/v1/completions", response_model=CompletionResponse, responses={200: STREAM, **WITH_BODY})
    @cancel_on_disconnect
    async def completions(body: CompletionRequest, request: Request) -> Response:
        arrival = time.perf_counter()
        body = service.accept(body, num_prompts=len(body.prompts))
        prompts = await service.tokenize_prompts(body)
        generations = await service.prepare(body, prompts, request_id=request.state.request_id, arrival=arrival)
        return await generate(
            service, CompletionFormat(body, service.model_id, service.tokenizer), generations, request
        )

    @app.post("/v1/chat/completions", response_model=ChatCompletionResponse, responses={200: STREAM, **WITH_BODY})
    @cancel_on_disconnect
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        arrival = time.perf_counter()
        body = service.accept(body)
        new_call_reader = reader_of_calls(body, service.tool_call_format)
        prompt = await service.tokenize_chat(body, add_special_tokens=body.add_special_tokens)
        new_reader = service.answer_reader(prompt, new_call_reader)
        generations = await service.prepare(body, [prompt], request_id=request.state.request_id, arrival=arrival)
        response_format = ChatFormat(body, service.model_id, service.tokenizer, new_reader)
        return await generate(service, response_format, generations, request)

    @app.post("/v1/responses", response_model=ResponseObject, responses={200: STREAM, **WITH_BODY})
    @cancel_on_disconnect
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        arrival = time.perf_counter()
        with in_words_of_responses():
            service.check_body(body)
            history: list[dict[str, Any]] = []
            if (id := body.previous_response_id) is not None:
                history = service.responses.get(id, param="previous_response_id").messages
            chat = service.accept(chat_of(body, history))
            new_call_reader = reader_of_calls(chat, service.tool_call_format)
            prompt = await service.tokenize_chat(chat, add_special_tokens=chat.add_special_tokens)
            new_reader = service.answer_reader(prompt, new_call_reader)
            [generation] = await service.prepare(chat, [prompt], request_id=request.state.request_id, arrival=arrival)
        builder = ResponseBuilder(body, chat, service.model_id, service.tokenizer, new_reader)
        return await respond(service, body, builder, generation, history, request)

    @app.get("/v1/responses/{id}", response_model=ResponseObject, responses=errors(404))
    async def response(id: str) -> Response:
        return _json(service.responses.get(id).response)

    @app.delete("/v1/responses/{id}", response_model=DeletedResponse, responses=errors(404))
    async def delete_response(id: str) -> Response:
        service.responses.delete(id)
        return _json(DeletedResponse(id=id))

    @app.get("/v1/responses/{id}/input_items", response_model=InputItems, responses=errors(404))
    async def input_items(id: str) -> Response:
        return _json(InputItems(data=service.responses.get(id).input))

    @app.get("/v1/models", response_model=ModelList)
    async def models() -> Response:
        return _json(ModelList(data=[service.card()]))

    @app.get("/v1/models/{model:path}", response_model=ModelCard, responses=errors(404))
    async def model(model: str) -> Response:
        service.check_model(model)
        return _json(service.card())

    @app.post("/tokenize", response_model=TokenizeResponse, responses=WITH_BODY)
    @cancel_on_disconnect
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        service.check_body(body)
        service.admit(1)
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

    openapi.complete(app, has_keys=service.api_keys is not None)
    return app


async def generate(
    service: Service, response_format: ResponseFormat, generations: Sequence[Generation], request: Request
) -> Response:
    """Run all choices in the engine; return the whole response, or an event stream."""
    body = response_format.body
    unread = [*service.ignored(body), *ineffective_settings(body.speculative, service.limits)]
    headers = _ignored_header(request, unread)
    deltas = merge([generation.stream(service.engine, service.metrics) for generation in generations])
    try:
        if body.stream:
            # Errors before the first delta get their own HTTP status.
            first = await anext(deltas)
            return EventStream(_events(response_format, generations, first, deltas), deltas, headers)
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
    request: Request,
) -> Response:
    """Run the request in the engine; return the whole response, or its events. Store the conversation at its end."""

    def keep() -> None:
        if body.store:
            service.responses.put(body, history, builder.response)

    headers = _ignored_header(request, [*body.ignored(), *ineffective_settings(body.speculative, service.limits)])
    deltas = merge([generation.stream(service.engine, service.metrics)])
    try:
        if body.stream:
            first = await anext(deltas)  # errors before the first delta get their own HTTP status
            return EventStream(events_of(builder, generation, first, deltas, keep), deltas, headers)
        async with aclosing(deltas):
            async for _, delta in deltas:
                builder.feed(delta)
    finally:
        service.engine.release([generation.submit.id])
    builder.end(generation)
    keep()
    return _json(builder.response, headers)


async def _events(
    response_format: ResponseFormat,
    generations: Sequence[Generation],
    first: tuple[int, TextDelta],
    rest: AsyncGenerator[tuple[int, TextDelta]],
) -> AsyncGenerator[str]:
    """Yield server-sent events: opening chunks, one chunk per delta, totals, [DONE]; an error is an event, too."""
    body = response_format.body
    options = body.stream_options
    running = options is not None and options.usage_in_chunks
    try:
        async with aclosing(rest):
            if response_format.reads_prompts:
                await asyncio.to_thread(response_format.read_prompts, generations)
            for index, generation in enumerate(generations):
                if (opening := response_format.opening_chunk(index, generation)) is not None:
                    if running:
                        opening.usage = Usage.of(len(generation.submit.prompt), 0)
                    yield opening.sse()
            async for index, delta in prepend(first, rest):
                has_more = running or body.return_token_ids or body.return_speculative_trees
                if not (delta.text or delta.finish_reason or has_more):
                    continue  # the text is held back: half a character, or the beginning of a stop string
                chunk = response_format.chunk(index, generations[index], delta)
                if chunk is None:
                    continue
                if running:
                    chunk.usage = running_usage(generations[index], delta)
                yield chunk.sse()
        usage = total_usage(generations) if options is not None and options.usage_at_end else None
        stats = total_stats(generations) if body.return_speculative_stats else None
        if usage is not None or stats is not None:
            yield response_format.closing_chunk(usage, stats).sse()
    except Exception as error:
        yield middleware.to_http_error(error).body.sse()
    yield SSE_DONE


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
