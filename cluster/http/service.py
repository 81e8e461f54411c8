"""Holds what the routes share: one engine, one tokenizer, one model name; admits and tokenizes their requests."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

from fastapi import Request

from cluster.batches.service import BatchService
from cluster.engine.engine_client import EngineClient, Health
from cluster.errors import BadRequest, not_found
from cluster.http import middleware
from cluster.http.admission import Admission
from cluster.http.api_keys import ApiKeys
from cluster.observe import metrics
from cluster.observe.answer_record import AnswerRecord
from cluster.observe.rate_limits import Caller
from cluster.observe.tracing import Trace, Tracing
from cluster.openai.deltas import Sink, deltas_of
from cluster.openai.output_processor import Generation, TextDelta
from cluster.openai.request_params import RequestLimits, SeedSource, build_submits
from cluster.openai.response_store import ResponseStore
from cluster.openai.resumption import EventId, digest_of, read_event_id
from cluster.system.shared import Shared
from cluster.text.answer_reader import AnswerReaders
from cluster.text.tokenizer import Conversation, TextLimit, Tokenizer, text_size
from cluster.text.tokenizer_pool import TokenizerPool
from cluster.text.tool_prompts import decoded_calls, tools_of
from secateur.api_keys import ApiKey
from secateur.bodies import UnsupportedContent
from secateur.errors import ConfigError
from secateur.messages_api import CountTokensRequest
from secateur.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingRequest,
    StreamOptions,
    TokenizeRequest,
)
from secateur.responses import (
    IDEMPOTENCY_HEADER,
    LAST_EVENT_ID_HEADER,
    LEARN_HEADER,
    ModelCard,
)
from secateur.responses_api import ResponsesRequest
from workers.config import EngineConfig

logger = logging.getLogger(__name__)

BATCH_SHARE = 0.75
"""The share of the running batch that batch jobs may fill; interactive requests find the rest free."""

Body = TypeVar("Body", bound=SamplingRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """Holds what a generation request brings beside its body."""

    request_id: str
    """Its answers' name in the log and in traces: the body's, that of the stream which goes on, or the header's."""
    arrival: float
    """time.perf_counter() at its arrival."""
    idempotency_key: str | None = None
    """Requests with the same key and without a seed get the same seed."""
    digest: str = ""
    """The digest of a request whose stream may go on later, see `resumption.digest_of`."""
    resumed: EventId | None = None
    """Where the stream goes on; None = it is new."""
    caller: Caller | None = None
    """The owner of its API key; None = the service needs no keys."""
    trace: Trace | None = None
    may_learn: bool = True
    """True: a drafter that learns may keep its tokens for a while."""
    tenant: int = 0
    """The owner of its API key, see `Submit.tenant`."""

    def wait_s(self, body: SamplingRequest) -> float | None:
        """Return how much longer the answer's first token may take; None = as long as it takes."""
        limit_s = body.first_token_timeout_s
        return None if limit_s is None else max(0.0, self.arrival + limit_s - time.perf_counter())


@dataclass(kw_only=True)
class Service:
    """Holds what the routes share: one engine, one tokenizer, one model name; admission and tokenization."""

    engine: EngineClient
    tokenizer: Tokenizer
    """Detokenizes answers, a few tokens at a time, in this process."""
    tokenizer_pool: TokenizerPool
    """Tokenizes prompts of any size in worker processes."""
    config: EngineConfig
    model_ids: tuple[str, ...]
    """The names of the model; answers have the first."""
    replica: str
    """The replica's id, a label of its metrics."""
    api_key: str | None = None
    api_keys: ApiKeys | None = None
    """Returns the keys valid now; None = `api_key` alone, or no keys."""
    admin_api_key: str | None = None
    """The key of the routes that change the service; None = nobody may."""
    seed: int | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """The model's sampling parameters for requests that leave them out; its `max_tokens` applies to chats alone."""
    max_pending: int | None = None
    """Choices running or waiting beyond which the service answers 429; None = 8 per running sequence."""
    cors: middleware.Cors | None = None
    """None = browsers let no script of another origin use the service."""
    has_tokenizer_info: bool = False
    """Serve /tokenizer_info."""
    forces_usage: bool = False
    """Send usage in every chunk of every stream."""
    names_tokens_by_id: bool = False
    """The default of `return_tokens_as_token_ids`."""
    closes_objects: bool = True
    """The default of `disable_additional_properties`."""
    unsupported_content: UnsupportedContent = "error"
    """The default of the field of this name."""
    stream_interval: int = 1
    """Fewest tokens of a delta, apart from an answer's first and its last one."""
    event_s: float = 0.0
    """Shortest time between two events of all streams together; a stream that runs alone never waits."""
    model_root: str | None = None
    """The model as the configuration names it, which /v1/models tells; None = its path."""
    batch_dir: Path | None = None
    """Folder of /v1/files and /v1/batches; None = they are not served."""
    root_path: str = ""
    """The prefix under which clients see the service, such as /llm."""
    reasoning_parser: str = "auto"
    """See `AnswerReaders`, as for the next one."""
    tool_call_parser: str = "auto"
    shared: Shared = field(default_factory=Shared)
    """Holds what all fronts of the engine count together."""
    tracing: Tracing = field(default_factory=Tracing.from_environment)
    created: int = field(default_factory=lambda: int(time.time()))
    admission: Admission = field(init=False)
    answers: AnswerReaders = field(init=False)
    batches: BatchService | None = field(init=False, default=None)
    responses: ResponseStore = field(init=False)
    seeds: SeedSource = field(init=False)
    metrics: metrics.Metrics = field(init=False)

    def __post_init__(self) -> None:
        if self.api_keys is None and (key := self.api_key) is not None:
            keys = (ApiKey(key=key),)
            self.api_keys = lambda: keys
        self.answers = AnswerReaders(self.tokenizer, self.reasoning_parser, self.tool_call_parser)
        self.seeds = SeedSource(self.seed, self.shared)
        self.responses = ResponseStore(self.shared.folder and self.shared.folder / "responses")
        self.metrics = metrics.Metrics(self.model_id, self.replica, lambda: self.engine.stats, self.shared)
        if self.batch_dir is not None:
            self.batches = BatchService(self.batch_dir, models=self.model_ids)
        self.admission = Admission(
            self.engine,
            self.tokenizer_pool,
            self.config.max_num_seqs,
            self.max_pending,
            has_priorities=self.config.scheduling_policy == "priority",
        )

    @property
    def limits(self) -> RequestLimits:
        """The running engine's limits; it may have less room than its configuration asked for."""
        ready = self.engine.ready
        return RequestLimits(
            config=self.config,
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

    def heads(self) -> list[dict[str, Any]]:
        """Return the last draft heads, in turn, with what the target accepted of each; the last one drafts now."""
        draft, client = self.config.draft, self.engine
        if draft is None:
            return []
        swaps, stats = client.swaps, client.stats
        heads = [(swap.old_path, swap.num_old_trees, swap.num_old_accepted_tokens) for swap in swaps]
        heads.append((client.head_path or draft.model_path, stats.num_head_trees, stats.num_head_accepted_tokens))
        return [
            {
                "version": version,
                "model": path,
                "num_drafts": drafts,
                "num_accepted_tokens": accepted,
                "accepted_per_draft": accepted / drafts if drafts else None,
            }
            for version, (path, drafts, accepted) in enumerate(heads, start=client.num_swaps - len(swaps))
        ]

    def head_before(self) -> str:
        """Return the folder of the head that drafted before this one. Raises BadRequest without one."""
        if not self.engine.swaps:
            raise BadRequest("no head was swapped yet; name one", param="model")
        return self.engine.swaps[-1].old_path

    def owner(self, request: Request) -> str | None:
        """Return what identifies the API key of a request, to which belongs what it stores; None without keys."""
        if self.api_keys is None:
            return None
        owner: str = request.state.owner
        return owner

    def health(self) -> Health:
        """Check that the engine makes progress and that the tokenizer workers run."""
        engine, tokenizing = self.engine.health(), self.tokenizer_pool.health()
        return engine if tokenizing.ok or not engine.ok else tokenizing

    def check_body(
        self, body: SamplingRequest | ResponsesRequest | CountTokensRequest | TokenizeRequest | DetokenizeRequest
    ) -> None:
        """Raise HttpError for another model (404) and for valid parameters that are not implemented (400)."""
        self.check_model(body.model)
        if found := body.unsupported():
            message = "; ".join(f"{param}: {why}" for param, why in found)
            raise BadRequest(message, param=found[0].param, code="unsupported_parameter")
        mode: UnsupportedContent | None = getattr(body, "unsupported_content", None)
        if (parts := body.unread_parts) and (mode or self.unsupported_content) == "error":
            raise BadRequest(
                f'{parts[0]}: nothing but text is understood; write {{"type": "text", "text": ...}}, or '
                'unsupported_content="placeholder", which tells the model that something was left out',
                param=parts[0].partition(".")[0],
            )

    @property
    def model_id(self) -> str:
        """The model's name in answers."""
        return self.model_ids[0]

    def check_model(self, name: str | None) -> None:
        """Raise HttpError (404) for another model than the one served."""
        if name is not None and name not in self.model_ids:
            message = f"the model {name!r} does not exist; this service has {' and '.join(map(repr, self.model_ids))}"
            raise not_found(message, code="model_not_found", param="model")

    def accept(self, body: Body) -> Body:
        """Check a generation request; return it with the defaults of model and service filled in.

        Raises HttpError, BadRequest.
        """
        self.check_body(body)
        try:
            body = body.filled(self.sampling_defaults)
        except ConfigError as error:
            problem = error.problems[0]
            message = f"{problem} (parameters left out come from the model's generation_config.json)"
            raise BadRequest(message, param=problem.field) from None
        return self._with_defaults_of_the_answer(body)

    def ticket(self, body: SamplingRequest) -> AbstractContextManager[list[int]]:
        """Admit an accepted request; see `Admission.ticket`."""
        return self.admission.ticket(
            num_prompts(body), body.n, priority=body.priority, wait_s=body.first_token_timeout_s
        )

    def _with_defaults_of_the_answer(self, body: Body) -> Body:
        """Return a request with what the service's settings say about the form of its answer."""
        update: dict[str, Any] = {}
        if self.forces_usage and body.stream:
            options = body.stream_options or StreamOptions()
            every_chunk = {"include_usage": True, "continuous_usage_stats": True}
            update["stream_options"] = options.model_copy(update=every_chunk)
        is_open = body.num_logprobs is not None and "return_tokens_as_token_ids" not in body.model_fields_set
        if self.names_tokens_by_id and is_open:
            update["return_tokens_as_token_ids"] = True
        if not self.closes_objects and "disable_additional_properties" not in body.model_fields_set:
            update["disable_additional_properties"] = False
        return body.model_copy(update=update)

    async def head_of(self, request: Request, body: SamplingRequest, *, arrival: float, kind: str = "") -> RequestHead:
        """Read the headers of an accepted request. Raises BadRequest for a wrong event id, or a wrong choice to learn.

        kind: its endpoint, if a stream of that may go on later.
        """
        digest, resumed = "", None
        if kind and body.stream:
            digest = digest_of(kind, self.model_id, self.sampling_defaults, await request.body())
        if kind and (header := request.headers.get(LAST_EVENT_ID_HEADER)) is not None:
            resumed = read_event_id(header, body, num_prompts=num_prompts(body), digest=digest)
        if (learn := request.headers.get(LEARN_HEADER, "on").lower()) not in ("on", "off"):
            raise BadRequest(f"header X-Secateur-Learn: {learn[:32]!r} is neither on nor off; write one", param=None)
        return RequestHead(
            request_id=body.request_id or (resumed.origin.request_id if resumed else request.state.request_id),
            arrival=arrival,
            idempotency_key=request.headers.get(IDEMPOTENCY_HEADER),
            digest=digest,
            resumed=resumed,
            caller=getattr(request.state, "caller", None),
            trace=self.tracing.of(request.headers),
            may_learn=learn == "on",
            tenant=crc32(getattr(request.state, "owner", "").encode()) >> 1,
        )

    async def tokenize(self, body: SamplingRequest) -> list[list[int]]:
        """Return the token ids of each prompt: one of a chat; of a completion, all are texts or all token ids.

        Raises PromptError.
        """
        if isinstance(body, ChatCompletionRequest):
            return [await self.tokenize_chat(body, add_special_tokens=body.add_special_tokens)]
        assert isinstance(body, CompletionRequest)
        if texts := [prompt for prompt in body.prompts if isinstance(prompt, str)]:
            return await self.tokenize_texts(texts, add_special_tokens=body.add_special_tokens)
        return [list(prompt) for prompt in body.prompts if not isinstance(prompt, str)]

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
        for message in messages:
            if reasoning := message.get("reasoning") or message.get("reasoning_content"):
                message.update(reasoning=reasoning, reasoning_content=reasoning)  # templates know either name
        limit = self.text_limit
        limit.check(text_size([messages, variables, tools]), param="messages")
        for number, message in enumerate(messages):
            if calls := message.get("tool_calls"):
                message["tool_calls"] = decoded_calls(calls, number)
        chat = Conversation(
            messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=variables,
            tools=tools,
            add_special_tokens=add_special_tokens,
        )
        return await self.tokenizer_pool.encode_chat(chat, limit)

    async def prepare(
        self, body: SamplingRequest, prompts: Sequence[list[int]], head: RequestHead, ids: Sequence[int]
    ) -> list[Generation]:
        """Return a Generation for each choice: the `n` choices of the first prompt, then those of the next.

        ids: those of the request's ticket. Raises BadRequest.
        """
        bad_words = await self.tokenizer_pool.bad_words(body.bad_words) if body.bad_words else []
        limits = self.limits
        grammar = ""
        if (structure := body.structure) is not None:
            grammar = await self.tokenizer_pool.grammar(
                structure._replace(closes_objects=body.closes_objects, thought=self.answers.thought(body, prompts[0])),
                end_token_ids=self.config.eos_token_ids,
                vocab_size=limits.vocab_size,
            )
        seeds = head.resumed.origin.seeds if head.resumed else self.seeds.draw(len(prompts), head.idempotency_key)
        skip_special_tokens = body.skip_special_tokens and not self.answers.read_special_tokens(body)
        return [
            Generation(
                submit=submit,
                tokenizer=self.tokenizer,
                number=number,
                stop=body.stop_strings,
                include_stop=body.include_stop_str_in_output,
                skip_special_tokens=skip_special_tokens,
                reasoning=self.answers.counter(body, submit.prompt),
                scores_all=body.return_token_ids,
                is_empty=body.max_output_tokens == 0,
            )
            for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
            for number, submit in enumerate(
                build_submits(
                    body,
                    prompt,
                    ids=ids[index * body.n : (index + 1) * body.n],
                    seed=seed,
                    limits=limits,
                    bad_words=bad_words,
                    grammar=grammar,
                    may_learn=head.may_learn,
                    tenant=head.tenant,
                )
            )
        ]

    def deltas(
        self,
        generations: Sequence[Generation],
        head: RequestHead,
        *,
        is_streamed: bool = False,
        sink: Sink | None = None,
    ) -> AsyncGenerator[tuple[int, TextDelta]]:
        """Run what `prepare` returned in the engine; see `deltas_of`."""
        records = [
            AnswerRecord(own.submit, head.request_id, head.arrival, self.metrics, head.caller, head.trace)
            for own in generations
        ]
        places = head.resumed.places if head.resumed else ()
        interval, pause_s = (self.stream_interval, self._pause_s) if is_streamed else (1, lambda: 0.0)
        return deltas_of(self.engine, generations, records, places, interval, pause_s, sink)

    def _pause_s(self) -> float:
        """Return the shortest time between two events of a stream."""
        return self.event_s * max(0, self.engine.stats.num_running - 1)

    def ignored(self, body: SamplingRequest) -> list[str]:
        """Return fields without effect, also those that this model's chat template does not read."""
        unread = self.unread_effort(body) if isinstance(body, ChatCompletionRequest) else []
        return sorted([*body.ignored(), *unread])

    def unread_effort(self, chat: ChatCompletionRequest, name: str = "reasoning_effort") -> list[str]:
        """Return the field's name if it is given, and this model's chat template does not read it."""
        is_read = chat.reasoning_effort is None or "reasoning_effort" in self.tokenizer.template_source
        return [] if is_read else [name]

    def card(self, name: str) -> ModelCard:
        """Return the entry of one of the model's names in /v1/models."""
        return ModelCard(
            id=name,
            created=self.created,
            root=self.model_root or self.config.model_path,
            max_model_len=self.limits.max_model_len,
        )


def num_prompts(body: SamplingRequest) -> int:
    """Return how many prompts a request has."""
    return len(body.prompts) if isinstance(body, CompletionRequest) else 1


def batch_share(max_num_seqs: int) -> int:
    """Return how many requests the engine may have when a line of a batch job joins them."""
    return max(1, int(BATCH_SHARE * max_num_seqs))
