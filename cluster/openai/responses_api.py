"""/v1/responses: the chat that answers a request, and its answer as items, whole or as events."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

from pydantic import ValidationError

from cluster.errors import BadRequest, HttpError
from cluster.openai.failures import to_http_error
from cluster.openai.openai_format import chat_logprobs, total_usage
from cluster.openai.output_processor import Generation, ScoredToken, TextDelta
from cluster.text.answer_parts import CallPart, TextPart
from cluster.text.answer_reader import AnswerReader
from cluster.text.tokenizer import Tokenizer
from secateur.requests import ChatCompletionRequest
from secateur.responses import new_id
from secateur.responses_api import (
    InputTokensDetails,
    OutputCall,
    OutputCustomCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    ReasoningText,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from secateur.schema import problems_of
from secateur.speculative import Speculative

_ANY_TEXT = {"format": {"type": "text"}}


class Builder(Protocol):
    """Builds an answer of several parts from its deltas; the methods return the events of a stream that tell of it."""

    def begin(self) -> list[dict[str, Any]]:
        """Open the answer."""

    def feed(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Add one delta."""

    def end(self, generation: Generation) -> list[dict[str, Any]]:
        """Close the answer."""

    def fail(self, error: HttpError) -> list[dict[str, Any]]:
        """Close the answer with an error."""


@contextmanager
def in_words(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors about a chat speak of the request that it was made from. names: what the chat's words are there."""
    try:
        yield
    except HttpError as error:
        told = error.body.error
        for name in names.keys() - {"messages"}:  # which is also a word of English
            told.message = told.message.replace(name, names[name])
        told.param = names.get(told.param or "", told.param)
        raise


def chat_of(fields: dict[str, Any]) -> ChatCompletionRequest:
    """Return the chat that answers a request. Raises BadRequest."""
    try:
        return ChatCompletionRequest.model_validate(fields)
    except ValidationError as error:
        problem = problems_of(error, Speculative.model_fields)[0]
        raise BadRequest(str(problem), param=problem.field.partition(".")[0]) from None


class ResponseBuilder:
    """Builds a response from its deltas. The public methods return the events of a stream that tell what they did."""

    def __init__(
        self,
        body: ResponsesRequest,
        chat: ChatCompletionRequest,
        model: str,
        tokenizer: Tokenizer,
        new_reader: Callable[[], AnswerReader] | None,
        replica: str,
    ) -> None:
        self.response = ResponseObject(
            id=f"{new_id('resp')}-{replica}",  # for the proxy, which sends what refers to the response to the replica
            created_at=int(time.time()),
            model=model,
            instructions=body.instructions,
            previous_response_id=body.previous_response_id,
            max_output_tokens=body.max_output_tokens,
            temperature=chat.temperature,
            top_p=chat.top_p,
            text=_ANY_TEXT if body.text is None else body.text.model_dump(by_alias=True, exclude_none=True),
            tools=[tool.told() for tool in body.tools or ()],
            tool_choice=body.model_dump(include={"tool_choice"}, exclude_none=True).get("tool_choice", "auto"),
            parallel_tool_calls=body.parallel_tool_calls,
            store=body.store,
            metadata=body.metadata or {},
        )
        self._tokenizer = tokenizer
        self._as_ids, self._has_reasoning = chat.return_tokens_as_token_ids, chat.include_reasoning
        self._reader = AnswerReader() if new_reader is None else new_reader()
        self._num_chars = 0  # of all text
        self._scored: deque[ScoredToken] = deque()  # tokens of which it is not known yet whether they are a message's
        self._item: OutputItem | None = None  # the open one
        self._num_calls = self._num_events = 0
        self._events: list[dict[str, Any]] = []

    def begin(self) -> list[dict[str, Any]]:
        """Open the response."""
        self._tell_response("created")
        self._tell_response("in_progress")
        return self._take_events()

    def feed(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Add one delta."""
        self._scored += delta.scored
        self._num_chars += len(delta.text)
        is_last = delta.finish_reason is not None
        for part in self._reader.feed(delta.text, is_last=is_last):
            if isinstance(part, CallPart):
                self._add_call(part)
            elif not part.is_reasoning:
                self._add_text(part, self._take_scored(part))
            elif self._has_reasoning:
                if not isinstance(self._item, OutputReasoning):
                    self._open(OutputReasoning(id=new_id("rs"), content=[ReasoningText()]))
                self._add(part.text)
        if is_last and isinstance(self._item, OutputMessage):
            if without_text := [token for token in self._scored if token.offset >= self._num_chars]:
                self._add_text(TextPart("", self._num_chars), without_text)
        return self._take_events()

    def end(self, generation: Generation) -> list[dict[str, Any]]:
        """Close the response."""
        is_cut = generation.last.finish_reason == "length"
        if not self.response.output:
            self._open_message()
        self._close(is_cut=is_cut)
        usage = total_usage([generation])
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        self.response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=cached),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=generation.last.num_reasoning_tokens or 0),
            total_tokens=usage.total_tokens,
        )
        self.response.status = "incomplete" if is_cut else "completed"
        if is_cut:
            self.response.incomplete_details = {"reason": "max_output_tokens"}
        self._tell_response(self.response.status)
        return self._take_events()

    def fail(self, error: HttpError) -> list[dict[str, Any]]:
        """Close the response with an error."""
        told = error.body.error
        self.response.status = "failed"
        self.response.error = {"code": told.code or told.type, "message": told.message}
        self._events = []
        self._tell_response("failed")
        return self._take_events()

    def _take_scored(self, part: TextPart) -> list[ScoredToken]:
        """Return the tokens that have some of a part's text; those before them are dropped."""
        taken = []
        while self._scored and self._scored[0].offset < part.end:
            token = self._scored.popleft()
            end = self._scored[0].offset if self._scored else part.end
            if token.offset >= part.start or end > part.start:
                taken.append(token)
        return taken

    def _add_text(self, added: TextPart, scored: Sequence[ScoredToken]) -> None:
        text = added.text
        if not isinstance(self._item, OutputMessage):
            self._open_message()
        elif added.is_behind_call:  # of a call that was dropped
            text = "\n" + text
        assert isinstance(self._item, OutputMessage)
        scores = chat_logprobs(self._tokenizer, scored, as_ids=self._as_ids).content or []
        self._item.content[0].logprobs += scores
        self._add(text, logprobs=[score.model_dump() for score in scores])

    def _add_call(self, call: CallPart) -> None:
        if call.id is not None:
            self._num_calls += 1
            if call.is_custom:
                self._open(OutputCustomCall(id=new_id("ctc"), call_id=call.id, name=call.name or ""))
            else:
                self._open(OutputCall(id=new_id("fc"), call_id=call.id, name=call.name or ""))
        if call.arguments:
            self._add(call.arguments)

    def _open_message(self) -> None:
        message, part = OutputMessage(id=new_id("msg"), content=[]), OutputText()
        self._open(message)
        message.content = [part]
        self._tell("content_part.added", **self._place(message), part=part.model_dump())

    def _open(self, item: OutputItem) -> None:
        """Add an item behind the open one, which is complete."""
        self._close(is_cut=False)
        self._item = item
        self.response.output = [*self.response.output, item]
        self._tell("output_item.added", output_index=self._index, item=item.model_dump())

    def _add(self, text: str, **fields: Any) -> None:
        """Add to the text of the open item."""
        item = self._item
        assert item is not None
        holder, (stem, name) = _holder(item), _TEXTS[item.type]
        setattr(holder, name, getattr(holder, name) + text)
        self._tell(f"{stem}.delta", **self._place(item), delta=text, **fields)

    def _close(self, *, is_cut: bool) -> None:
        """Close the open item, if there is one. As at OpenAI, a call that was cut stays, but is never told as done."""
        if (item := self._item) is None:
            return
        is_call = isinstance(item, OutputCall | OutputCustomCall)
        is_whole = not is_cut or (is_call and self._reader.has_whole_call)
        if isinstance(item, OutputCustomCall) and is_whole and (rest := self._reader.rest(self._num_calls - 1)):
            self._add(rest)
        stem, name = _TEXTS[item.type]
        place, text = self._place(item), {name: getattr(_holder(item), name)}
        match item:
            case OutputMessage(content=[part]):
                scores = [score.model_dump() for score in part.logprobs]
                self._tell("output_text.done", **place, **text, logprobs=scores)
                self._tell("content_part.done", **place, part=part.model_dump())
            case OutputCall() if is_whole:
                self._tell(f"{stem}.done", **place, name=item.name, **text)
            case OutputReasoning() | OutputCustomCall() if is_whole or not is_call:
                self._tell(f"{stem}.done", **place, **text)
        item.status, self._item = "completed" if is_whole else "incomplete", None
        self._tell("output_item.done", output_index=self._index, item=item.model_dump())

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _place(self, item: OutputItem) -> dict[str, Any]:
        """Return where the text of the latest item is."""
        part = {"content_index": 0} if isinstance(item, OutputMessage | OutputReasoning) else {}
        return {"item_id": item.id, "output_index": self._index, **part}

    def _tell_response(self, what: str) -> None:
        self._tell(what, response=self.response.model_dump())

    def _tell(self, what: str, **fields: Any) -> None:
        self._events.append({"type": f"response.{what}", "sequence_number": self._num_events, **fields})
        self._num_events += 1

    def _take_events(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events


_TEXTS = {
    "message": ("output_text", "text"),
    "reasoning": ("reasoning_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""Type of an item -> what the events of its text are called, and the field that has the text."""


def _holder(item: OutputItem) -> Any:
    """Return what has the text: a call, or the only part of another item."""
    return item.content[0] if isinstance(item, OutputMessage | OutputReasoning) else item


def sse(event: dict[str, Any]) -> str:
    """Return an event as OpenAI sends it: its type, then its data."""
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"


async def events_of(
    builder: Builder,
    generation: Generation,
    first: tuple[int, TextDelta],
    rest: AsyncGenerator[tuple[int, TextDelta]],
    on_end: Callable[[], None] = lambda: None,
) -> AsyncGenerator[str]:
    """Yield the events of a stream; `on_end` is called before the last one."""
    try:
        async with aclosing(rest):
            for event in builder.begin():
                yield sse(event)
            item: tuple[int, TextDelta] | None = first
            while item is not None:
                for event in builder.feed(item[1]):
                    yield sse(event)
                item = await anext(rest, None)
        last = builder.end(generation)
        on_end()
    except Exception as error:
        last = builder.fail(to_http_error(error))
    for event in last:
        yield sse(event)


async def build(
    builder: Builder,
    generation: Generation,
    first: tuple[int, TextDelta],
    rest: AsyncGenerator[tuple[int, TextDelta]],
) -> None:
    """Build a whole answer."""
    builder.feed(first[1])
    async with aclosing(rest):
        async for _, delta in rest:
            builder.feed(delta)
    builder.end(generation)
