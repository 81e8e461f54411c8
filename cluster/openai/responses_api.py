"""/v1/responses: the chat that answers a request, and its answer as items, whole or as events."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from pydantic import ValidationError

from cluster.errors import BadRequest, HttpError
from cluster.openai.failures import to_http_error
from cluster.openai.openai_format import chat_logprobs, total_usage
from cluster.openai.output_processor import Generation, ScoredToken, TextDelta
from cluster.text.answer_reader import AnswerReader
from cluster.text.tokenizer import Tokenizer
from cluster.text.tool_calls import CallPart, CustomInput, TextPart, is_whole
from secateur.requests import ChatCompletionRequest
from secateur.responses import new_id
from secateur.responses_api import (
    NAMES,
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


@contextmanager
def in_words_of_responses() -> Iterator[None]:
    """Let errors about the chat name the fields of the request that it was made from."""
    try:
        yield
    except BadRequest as error:
        raise BadRequest(
            _renamed(str(error)), param=NAMES.get(error.param or "", error.param), code=error.code
        ) from None
    except HttpError as error:
        error.body.error.message = _renamed(error.body.error.message)
        error.body.error.param = NAMES.get(error.body.error.param or "", error.body.error.param)
        raise


def _renamed(message: str) -> str:
    for name in ("max_completion_tokens", "max_tokens", "response_format"):
        message = message.replace(name, NAMES[name])
    return message


def chat_of(body: ResponsesRequest, history: list[dict[str, Any]]) -> ChatCompletionRequest:
    """Return the chat that answers a request. Raises BadRequest."""
    try:
        return ChatCompletionRequest.model_validate(body.chat(history))
    except ValidationError as error:
        problem = problems_of(error, Speculative.model_fields)[0]
        raise BadRequest(str(problem), param=problem.field.partition(".")[0]) from None


class ResponseBuilder:
    """Builds a response from its deltas. Every method returns the events of a stream that tell what it did."""

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
            text=_text_options(body),
            tools=[tool.told() for tool in body.tools or ()],
            tool_choice="auto" if body.tool_choice is None else _plain(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls,
            store=body.store,
            metadata=body.metadata or {},
        )
        self._tokenizer = tokenizer
        self._as_ids, self._has_reasoning = chat.return_tokens_as_token_ids, chat.include_reasoning
        self._reader = AnswerReader() if new_reader is None else new_reader()
        self._num_chars = 0  # of all text
        self._scored: deque[ScoredToken] = deque()  # tokens of which it is not known yet whether they are a message's
        self._customs = {name for name, tool in chat.offered.items() if tool.type == "custom"}
        self._has_bare_input = chat.custom_call is not None
        self._input: CustomInput | None = None  # of the open call
        self._number = 0
        self._open: OutputItem | None = None

    def begin(self) -> list[dict[str, Any]]:
        """Open the response."""
        return [self._event("response.created"), self._event("response.in_progress")]

    def feed(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Add one delta."""
        events: list[dict[str, Any]] = []
        self._scored += delta.scored
        self._num_chars += len(delta.text)
        is_last = delta.finish_reason is not None
        for part in self._reader.feed(delta.text, is_last=is_last):
            if isinstance(part, CallPart):
                events += self._add_call(part)
            elif not part.is_reasoning:
                events += self._add_text(part, self._take_scored(part))
            elif self._has_reasoning:
                events += self._add_reasoning(part.text)
        if is_last and isinstance(self._open, OutputMessage):
            if without_text := [token for token in self._scored if token.offset >= self._num_chars]:
                events += self._add_text(TextPart("", self._num_chars), without_text)
        return events

    def end(self, generation: Generation) -> list[dict[str, Any]]:
        """Close the response."""
        events: list[dict[str, Any]] = []
        is_cut = generation.last.finish_reason == "length"
        if not self.response.output:
            events += self._open_message()
        events += self._close("incomplete" if is_cut else "completed")
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
        return [*events, self._event(f"response.{self.response.status}")]

    def fail(self, error: HttpError) -> list[dict[str, Any]]:
        """Close the response with an error."""
        told = error.body.error
        self.response.status = "failed"
        self.response.error = {"code": told.code or told.type, "message": told.message}
        return [self._event("response.failed")]

    def _add_reasoning(self, text: str) -> list[dict[str, Any]]:
        events = []
        if not isinstance(self._open, OutputReasoning):
            events = self._close("completed")
            self._open = OutputReasoning(id=new_id("rs"), content=[ReasoningText()])
            events += self._add_item()
        assert isinstance(self._open, OutputReasoning)
        self._open.content[0].text += text
        place = {"item_id": self._open.id, "output_index": self._index, "content_index": 0}
        return [*events, self._told("response.reasoning_text.delta", **place, delta=text)]

    def _take_scored(self, part: TextPart) -> list[ScoredToken]:
        """Return the tokens that have some of a part's text; those before them are dropped."""
        taken = []
        while self._scored and self._scored[0].offset < part.end:
            token = self._scored.popleft()
            end = self._scored[0].offset if self._scored else part.end
            if token.offset >= part.start or end > part.start:
                taken.append(token)
        return taken

    def _add_text(self, added: TextPart, scored: Sequence[ScoredToken]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        text = added.text
        if not isinstance(self._open, OutputMessage):
            events = [*self._close("completed"), *self._open_message()]
        elif added.is_behind_call:  # of a call that was dropped
            text = "\n" + text
        assert isinstance(self._open, OutputMessage)
        part = self._open.content[0]
        scores = chat_logprobs(self._tokenizer, scored, as_ids=self._as_ids).content or []
        part.text += text
        part.logprobs += scores
        place = {"item_id": self._open.id, "output_index": self._index, "content_index": 0}
        told = [score.model_dump() for score in scores]
        return [*events, self._told("response.output_text.delta", **place, delta=text, logprobs=told)]

    def _add_call(self, call: CallPart) -> list[dict[str, Any]]:
        events = []
        if call.id is not None:
            events = self._close("completed")
            if call.name in self._customs:
                self._input = CustomInput(is_bare=self._has_bare_input)
                self._open = OutputCustomCall(id=new_id("ctc"), call_id=call.id, name=call.name or "")
            else:
                self._open = OutputCall(id=new_id("fc"), call_id=call.id, name=call.name or "")
            events += self._add_item()
        if isinstance(self._open, OutputCustomCall) and self._input is not None:
            events += self._add_input(self._open, self._input.feed(call.arguments))
        elif call.arguments:
            assert isinstance(self._open, OutputCall)
            self._open.arguments += call.arguments
            place = {"item_id": self._open.id, "output_index": self._index}
            events.append(self._told("response.function_call_arguments.delta", **place, delta=call.arguments))
        return events

    def _add_input(self, item: OutputCustomCall, added: str) -> list[dict[str, Any]]:
        item.input += added
        place = {"item_id": item.id, "output_index": self._index}
        return [self._told("response.custom_tool_call_input.delta", **place, delta=added)] if added else []

    def _open_message(self) -> list[dict[str, Any]]:
        self._open = OutputMessage(id=new_id("msg"), content=[])
        events = self._add_item()
        part = OutputText()
        self._open.content = [part]
        place = {"item_id": self._open.id, "output_index": self._index, "content_index": 0}
        return [*events, self._told("response.content_part.added", **place, part=part.model_dump())]

    def _add_item(self) -> list[dict[str, Any]]:
        assert self._open is not None
        self.response.output = [*self.response.output, self._open]
        return [self._told("response.output_item.added", output_index=self._index, item=self._open.model_dump())]

    def _close(self, status: Any) -> list[dict[str, Any]]:
        """Close the open item, if there is one. As at OpenAI, a call that was cut stays, but is never told as done."""
        item, self._open = self._open, None
        events = []
        if isinstance(item, OutputCall) and is_whole(item.arguments):
            status = "completed"
        if isinstance(item, OutputCustomCall) and self._input is not None:
            status = "completed" if self._input.is_whole else status
        match item:
            case OutputMessage():
                [part] = item.content
                place = {"item_id": item.id, "output_index": self._index, "content_index": 0}
                scores = [score.model_dump() for score in part.logprobs]
                events = [
                    self._told("response.output_text.done", **place, text=part.text, logprobs=scores),
                    self._told("response.content_part.done", **place, part=part.model_dump()),
                ]
            case OutputReasoning():
                place = {"item_id": item.id, "output_index": self._index, "content_index": 0}
                events = [self._told("response.reasoning_text.done", **place, text=item.content[0].text)]
            case OutputCall() if status == "completed":
                place = {"item_id": item.id, "output_index": self._index, "name": item.name}
                events = [self._told("response.function_call_arguments.done", **place, arguments=item.arguments)]
            case OutputCustomCall() if status == "completed":
                events = self._add_input(item, self._input.finish() if self._input is not None else "")
                place = {"item_id": item.id, "output_index": self._index}
                events.append(self._told("response.custom_tool_call_input.done", **place, input=item.input))
            case None:
                return []
        item.status = status
        return [*events, self._told("response.output_item.done", output_index=self._index, item=item.model_dump())]

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _event(self, type: str) -> dict[str, Any]:
        return self._told(type, response=self.response.model_dump())

    def _told(self, type: str, **fields: Any) -> dict[str, Any]:
        event = {"type": type, "sequence_number": self._number, **fields}
        self._number += 1
        return event


def _text_options(body: ResponsesRequest) -> dict[str, Any]:
    if body.text is None:
        return {"format": {"type": "text"}}
    return body.text.model_dump(by_alias=True, exclude_none=True)


def _plain(choice: Any) -> Any:
    return choice.model_dump(exclude_none=True) if hasattr(choice, "model_dump") else choice


def sse(event: dict[str, Any]) -> str:
    """Return an event as OpenAI sends it: its type, then its data."""
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"


async def events_of(
    builder: ResponseBuilder,
    generation: Generation,
    first: tuple[int, TextDelta],
    rest: AsyncGenerator[tuple[int, TextDelta]],
    on_end: Callable[[], None],
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
