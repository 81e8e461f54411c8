"""Generated text as OpenAI objects: one class for completions and one for chats, each whole and streamed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, ClassVar, Literal, NamedTuple, cast

from pydantic import TypeAdapter

from cluster.observe.engine_metrics import by_depth
from cluster.openai.output_processor import Generation, ScoredToken, StepTree, TextDelta
from cluster.text.answer_parts import AnswerParts, CallPart, TextPart
from cluster.text.answer_reader import AnswerReader
from cluster.text.detokenizer import IncrementalDetokenizer
from cluster.text.tokenizer import Tokenizer
from secateur.requests import ChatCompletionRequest, CompletionRequest, SamplingRequest
from secateur.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprobs,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CompletionResponse,
    CustomCall,
    FunctionCall,
    PromptLogprob,
    PromptLogprobs,
    PrunedBy,
    SpeculativeStats,
    SpeculativeTree,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    TreeNode,
    TreeToken,
    Usage,
    new_id,
)
from workers.comm.ipc import RequestStats, TokenLogprobs
from workers.settings import PruneReason

_write_text = TypeAdapter(str).serializer.to_json
MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express (the number that OpenAI and vLLM use)."""


class ResponseFormat(ABC):
    """Builds the response objects of one endpoint for one request."""

    id_prefix: ClassVar[str]
    chunk_type: ClassVar[type[CompletionChunk] | type[ChatCompletionChunk]]

    def __init__(self, body: SamplingRequest, model: str, tokenizer: Tokenizer) -> None:
        self.body = body
        self.tokenizer = tokenizer
        # As at OpenAI, all chunks of a stream have one creation time.
        self.head: dict[str, Any] = {"id": new_id(self.id_prefix), "created": int(time.time()), "model": model}
        options = body.stream_options
        self._has_running_usage = options is not None and options.usage_in_chunks
        self._has_usage_at_end = options is not None and options.usage_at_end
        self._has_more = self._has_running_usage or body.return_token_ids or body.return_speculative_trees
        self._around: dict[tuple[int, str], list[str]] = {}  # by choice and kind of text: an event without its text

    @property
    def reads_prompts(self) -> bool:
        """Return whether `read_prompts` must be called before `chunk`."""
        return False

    def read_prompts(self, generations: Sequence[Generation]) -> None:
        """Prepare what answers repeat of the prompts. It may take a second: call it in another thread."""
        return

    @abstractmethod
    def response(self, generations: Sequence[Generation]) -> CompletionResponse | ChatCompletionResponse:
        """Build the whole response."""

    def opening_event(self, index: int, generation: Generation) -> str | None:
        """Return the event that precedes a choice's first token, if the endpoint has one."""
        return None

    @abstractmethod
    def event(self, index: int, generation: Generation, delta: TextDelta) -> str | None:
        """Return the event of one delta of choice `index`; None if its text is held back."""

    def has_event(self, delta: TextDelta) -> bool:
        """Return whether a delta has an event even if it adds no text, as half a character does not."""
        return bool(delta.text or delta.finish_reason or self._has_more)

    def _event(self, chunk: CompletionChunk | ChatCompletionChunk, generation: Generation, delta: TextDelta) -> str:
        if self._has_running_usage:
            chunk.usage = running_usage(generation, delta)
        return chunk.sse()

    def _adds_text_alone(self, delta: TextDelta) -> bool:
        """Return whether a delta's chunk is that of any other one, apart from the text."""
        more = delta.finish_reason or delta.scored or delta.tree or self.body.return_token_ids
        return not (more or self._has_running_usage)

    def _text_event(
        self, index: int, kind: str, text: str, chunk_of: Callable[[str], CompletionChunk | ChatCompletionChunk]
    ) -> str:
        """Return the event of `chunk_of(text)`. Building and writing the objects takes 30 times as long as this."""
        if (around := self._around.get((index, kind))) is None:
            mark = new_id("text")
            around = self._around[index, kind] = chunk_of(mark).sse().split(f'"{mark}"')
        return _write_text(text).decode().join(around)

    @property
    def has_totals(self) -> bool:
        """Return whether a stream ends with an event of totals."""
        return self.body.return_speculative_stats or self._has_usage_at_end

    def closing_event(self, generations: Sequence[Generation]) -> str:
        """Return the event of totals, which has no choices."""
        totals = self.totals(generations, has_usage=self._has_usage_at_end)
        return self.chunk_type(**self.head, choices=[], **totals).sse()

    def totals(self, generations: Sequence[Generation], *, has_usage: bool = True) -> dict[str, Any]:
        """Return the usage and, on request, the speculative statistics of all choices."""
        stats = total_stats(generations) if self.body.return_speculative_stats else None
        return {"usage": total_usage(generations) if has_usage else None, "speculative": stats}

    def choice_fields(
        self, index: int, delta: TextDelta, ids: Sequence[int], trees: Sequence[StepTree]
    ) -> dict[str, Any]:
        """Return the fields that the choices of all endpoints have."""
        asks = self.body.return_speculative_trees
        return {
            "index": index,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": list(ids) if self.body.return_token_ids else None,
            "speculative_trees": [speculative_tree(self.tokenizer, tree) for tree in trees] if asks else None,
        }

    def prompt_logprobs(self, generation: Generation) -> PromptLogprobs | None:
        """Return the log probabilities of the prompt's tokens if the request asked for them."""
        num = self.body.prompt_logprobs
        return None if num is None else prompt_logprobs(self.tokenizer, generation, num)

    def prompt_ids(self, generation: Generation) -> list[int] | None:
        """Return the prompt's token ids if the request asked for them."""
        return generation.submit.prompt if self.body.return_token_ids else None


class _EchoedPrompt(NamedTuple):
    """The beginning of an answer that repeats its prompt: the text, and where each of the prompt's tokens begins."""

    text: str
    offsets: list[int]


def echoed_prompt(tokenizer: Tokenizer, ids: Sequence[int], given: str | None) -> _EchoedPrompt:
    """Return the echo of a prompt: the text that was given; None = the text of the ids, special tokens included."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    parts = [detokenizer.feed([id]) for id in ids]
    if given is not None and not tokenizer.is_visible(ids[0]) and not given.startswith(parts[0]):
        parts[0] = ""  # the tokenizer has put this token before the text
    offsets = list(accumulate(map(len, parts[:-1]), initial=0))
    return _EchoedPrompt("".join([*parts, detokenizer.flush()]) if given is None else given, offsets)


class CompletionFormat(ResponseFormat):
    """Responses of /v1/completions."""

    id_prefix = "cmpl"
    chunk_type = CompletionChunk

    def __init__(self, body: CompletionRequest, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(body, model, tokenizer)
        self._texts = [None if body.truncate_prompt_tokens else prompt for prompt in body.prompts]
        self._echoes: list[_EchoedPrompt] = []  # by choice
        self._echoed: set[int] = set()  # choices of the stream whose first chunk has been built
        self._num_logprobs = body.logprobs
        self._is_echo = body.echo

    @property
    def reads_prompts(self) -> bool:
        """Return whether answers begin with their prompts."""
        return self._is_echo

    def read_prompts(self, generations: Sequence[Generation]) -> None:
        """Compute the texts and offsets of the prompts, once for all answers to a prompt."""
        for index, generation in enumerate(generations):
            if generation.number == 0:
                given = self._texts[index // self.body.n]
                echo = echoed_prompt(
                    self.tokenizer, generation.submit.prompt, given if isinstance(given, str) else None
                )
            self._echoes.append(echo)

    def response(self, generations: Sequence[Generation]) -> CompletionResponse:
        """Build the whole response."""
        if self._is_echo:
            self.read_prompts(generations)
        choices = [
            CompletionChoice(
                text=self._echo_text(index) + generation.text,
                logprobs=self._logprobs(index, generation.scored, generations[index - generation.number]),
                prompt_token_ids=self.prompt_ids(generation),
                prompt_logprobs=self.prompt_logprobs(generations[index - generation.number]),
                **self.choice_fields(index, generation.last, generation.token_ids, generation.trees),
            )
            for index, generation in enumerate(generations)
        ]
        return CompletionResponse(**self.head, choices=choices, **self.totals(generations))

    def chunk(self, index: int, generation: Generation, delta: TextDelta) -> CompletionChunk:
        """Build the chunk of one delta; a choice's first one has the prompt's ids, and the prompt if it is echoed."""
        is_first = delta.num_tokens == len(delta.token_ids)
        is_echo = self._is_echo and index not in self._echoed
        self._echoed.add(index)
        has_logprobs = is_echo or delta.scored
        choice = CompletionChoice(
            text=self._echo_text(index) + delta.text if is_echo else delta.text,
            logprobs=self._logprobs(index, delta.scored, generation if is_echo else None) if has_logprobs else None,
            prompt_token_ids=self.prompt_ids(generation) if is_first else None,
            **self.choice_fields(index, delta, delta.token_ids, [delta.tree] if delta.tree else []),
        )
        return CompletionChunk(**self.head, choices=[choice])

    def event(self, index: int, generation: Generation, delta: TextDelta) -> str:
        """Return the event of `chunk`."""
        if self._is_echo or not self._adds_text_alone(delta):
            return self._event(self.chunk(index, generation, delta), generation, delta)

        def chunk_of(text: str) -> CompletionChunk:
            return self.chunk(index, generation, TextDelta(text=text))

        return self._text_event(index, "text", delta.text, chunk_of)

    def _echo_text(self, index: int) -> str:
        return self._echoes[index].text if self._is_echo else ""

    def _logprobs(
        self, index: int, scored: Sequence[ScoredToken], prompt: Generation | None
    ) -> CompletionLogprobs | None:
        """Return the log probabilities of these tokens of a choice, behind those of its `prompt` if it is echoed."""
        if self._num_logprobs is None:
            return None
        as_ids = self.body.return_tokens_as_token_ids
        lists = completion_logprobs(self.tokenizer, scored, as_ids=as_ids, start=len(self._echo_text(index)))
        if not self._is_echo or prompt is None:
            return lists
        first, *others = prompt.submit.prompt
        _, *offsets = self._echoes[index].offsets
        scores = [replace(score, top=score.top[: self._num_logprobs]) for score in prompt.prompt_scores]
        before = completion_logprobs(self.tokenizer, list(map(ScoredToken, others, scores, offsets)), as_ids=as_ids)
        return CompletionLogprobs(
            tokens=[_token_name(self.tokenizer, first, as_ids), *before.tokens, *lists.tokens],
            token_logprobs=[None, *before.token_logprobs, *lists.token_logprobs],
            top_logprobs=[None, *before.top_logprobs, *lists.top_logprobs],
            text_offset=[0, *before.text_offset, *lists.text_offset],
        )


class ChatFormat(ResponseFormat):
    """Responses of /v1/chat/completions."""

    id_prefix = "chatcmpl"
    chunk_type = ChatCompletionChunk

    def __init__(
        self,
        body: ChatCompletionRequest,
        model: str,
        tokenizer: Tokenizer,
        new_reader: Callable[[], AnswerReader] | None = None,
    ) -> None:
        """`new_reader` makes what reads the parts of one answer; None = all of it is content."""
        super().__init__(body, model, tokenizer)
        self._new_reader = new_reader
        self._ends_with_calls = body.calls != "named"  # as at OpenAI, a call that was demanded by name just stops
        self._readers: dict[int, AnswerReader] = {}  # by choice, of a stream
        self._has_reasoning = body.include_reasoning
        self._echo = body.echoed_text if new_reader is None or not body.begun_text else ""  # the reader repeats it

    def response(self, generations: Sequence[Generation]) -> ChatCompletionResponse:
        """Build the whole response; all choices have the same prompt."""
        has_logprobs = self.body.num_logprobs is not None
        choices = [
            ChatChoice(
                message=message,
                logprobs=self._logprobs(generation.scored) if has_logprobs else None,
                **self.choice_fields(
                    index, self._ended(generation.last, message.tool_calls), generation.token_ids, generation.trees
                ),
            )
            for index, generation in enumerate(generations)
            for message in [self._message(generation)]
        ]
        return ChatCompletionResponse(
            **self.head,
            choices=choices,
            prompt_token_ids=self.prompt_ids(generations[0]),
            prompt_logprobs=self.prompt_logprobs(generations[0]),
            **self.totals(generations),
        )

    def opening_event(self, index: int, generation: Generation) -> str:
        """Return the event that names the role and, on request, repeats the last message or has the prompt's ids."""
        delta = ChatDelta(role="assistant", content=self._echo)
        choice = ChatChunkChoice(index=index, delta=delta, token_ids=[] if self.body.return_token_ids else None)
        usage = opening_usage(generation) if self._has_running_usage else None
        prompt = self.prompt_ids(generation)
        return ChatCompletionChunk(**self.head, choices=[choice], prompt_token_ids=prompt, usage=usage).sse()

    def _message(self, generation: Generation) -> AssistantMessage:
        """Return a whole answer, without a call that was cut: a message cannot mark it as half a call."""
        if self._new_reader is None:
            return AssistantMessage(content=self._echo + generation.text)
        reader = self._new_reader()
        read = reader.feed(generation.text, is_last=True)
        calls: list[ToolCall] = []
        for part in (*read.calls, *reader.rests()):
            if part.id is not None:
                calls.append(ToolCall(**_call_fields(part)))
            elif (custom := calls[part.number].custom) is not None:
                custom.input += part.arguments
            elif (function := calls[part.number].function) is not None:
                function.arguments += part.arguments
        if generation.last.finish_reason == "length" and calls and not reader.has_whole_call:
            calls.pop()
        reasoning = self._shown(read.reasoning)
        return AssistantMessage(
            content=self._echo + read.content or (None if calls else ""),
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=calls or None,
        )

    def _shown(self, reasoning: str) -> str | None:
        return reasoning if reasoning and self._has_reasoning else None

    def _read(self, index: int, delta: TextDelta) -> AnswerParts:
        """Read the next delta of a choice of the stream."""
        if self._new_reader is None:
            return AnswerParts([TextPart(delta.text, 0)])
        if (reader := self._readers.get(index)) is None:
            reader = self._readers[index] = self._new_reader()
        return reader.feed(delta.text, is_last=delta.finish_reason is not None)

    def _parts(self, read: AnswerParts) -> tuple[str, str | None, tuple[CallPart, ...]]:
        """Return the content, the reasoning that is shown, and the calls."""
        return read.content, self._shown(read.reasoning), read.calls

    def _delta(self, index: int, delta: TextDelta, read: AnswerParts) -> ChatDelta:
        """Return what a delta of a stream adds to the message."""
        if self._new_reader is None:
            return ChatDelta(content=delta.text)
        parts = [*read.calls, *(self._readers[index].rests() if delta.finish_reason == "stop" else ())]
        calls = [ToolCallDelta(index=part.number, **_call_fields(part)) for part in parts]
        reasoning = self._shown(read.reasoning)
        return ChatDelta(
            content=read.content or None, reasoning_content=reasoning, reasoning=reasoning, tool_calls=calls or None
        )

    def _ended(self, delta: TextDelta, calls: object) -> TextDelta:
        """Return the last delta, with the reason that an answer with calls has."""
        has_ended = delta.finish_reason == "stop" and calls and self._ends_with_calls
        return replace(delta, finish_reason="tool_calls") if has_ended else delta

    def event(self, index: int, generation: Generation, delta: TextDelta) -> str | None:
        """Return the event of `chunk`."""
        read = None if self._new_reader is None else self._read(index, delta)
        content, reasoning, calls = (delta.text, None, ()) if read is None else self._parts(read)
        if calls or (content and reasoning) or not self._adds_text_alone(delta):
            chunk = self.chunk(index, generation, delta, read)
            return None if chunk is None else self._event(chunk, generation, delta)
        if not (content or reasoning):
            return None

        def chunk_of(text: str) -> ChatCompletionChunk:
            added = ChatDelta(content=text) if content else ChatDelta(reasoning_content=text, reasoning=text)
            choice = ChatChunkChoice(delta=added, **self.choice_fields(index, TextDelta(), (), ()))
            return ChatCompletionChunk(**self.head, choices=[choice])

        return self._text_event(index, "content" if content else "reasoning", content or reasoning or "", chunk_of)

    def chunk(
        self, index: int, generation: Generation, delta: TextDelta, read: AnswerParts | None = None
    ) -> ChatCompletionChunk | None:
        """Build the chunk of one delta; None if all of its text is held back. read: the parts of its text."""
        read = self._read(index, delta) if read is None else read
        added = self._delta(index, delta, read)
        if self._new_reader is not None:
            delta = self._ended(delta, self._readers[index].num_calls)
            has_more = delta.finish_reason or delta.scored or delta.tree or self.body.return_token_ids
            if not (added.content or added.reasoning_content or added.tool_calls or has_more):
                return None
        choice = ChatChunkChoice(
            delta=added,
            logprobs=self._logprobs(delta.scored) if delta.scored else None,
            **self.choice_fields(index, delta, delta.token_ids, [delta.tree] if delta.tree else []),
        )
        return ChatCompletionChunk(**self.head, choices=[choice])

    def _logprobs(self, scored: Sequence[ScoredToken]) -> ChatLogprobs:
        return chat_logprobs(self.tokenizer, scored, as_ids=self.body.return_tokens_as_token_ids)


def _call_fields(part: CallPart) -> dict[str, Any]:
    """Return the fields of a call, or of what a part adds to one."""
    fields: dict[str, Any] = {"id": part.id}
    if part.is_custom:
        type, fields["custom"] = "custom", CustomCall(name=part.name, input=part.arguments)
    else:
        type, fields["function"] = "function", FunctionCall(name=part.name, arguments=part.arguments)
    return fields | ({"type": type} if part.id else {})


def speculative_tree(tokenizer: Tokenizer, tree: StepTree) -> SpeculativeTree:
    """Return one step's tree with its texts."""
    record, accepted = tree.record, set(tree.record.path)
    columns = (record.tokens, record.parents, record.depths, record.probs, record.weights, record.reasons)
    nodes = []
    for i, (token, parent, depth, prob, weight, reason) in enumerate(zip(*columns, strict=True)):
        verified = "root" if parent < 0 else "accepted" if i in accepted else "rejected"
        nodes.append(
            TreeNode(
                parent=parent if parent >= 0 else None,
                depth=depth,
                token_id=token if token >= 0 else None,
                text=tokenizer.token_text(token).text if token >= 0 else None,
                draft_prob=_rounded(prob),
                weight=_rounded(weight),
                status="pruned" if reason else verified,  # type: ignore[arg-type]  # mypy widens the literals
                pruned_by=cast(PrunedBy, PruneReason(reason).name.lower()) if reason else None,
            )
        )
    origin: Literal["accepted", "copied"] = "copied" if tree.is_copied else "accepted"
    tokens = [
        TreeToken(token_id=token, text=text, origin=origin if number < tree.num_accepted else "bonus", depth=number + 1)
        for number, (token, text) in enumerate(zip(tree.token_ids, tree.texts, strict=True))
    ]
    return SpeculativeTree(
        nodes=nodes,
        tokens=tokens,
        is_copied=tree.is_copied,
        draft_ms=_rounded(record.draft_ms),
        verify_ms=round(record.verify_ms, 4),
    )


def _rounded(value: float | None) -> float | None:
    """Four significant digits: more would double the size of a stream."""
    return None if value is None else float(f"{value:.4g}")


def chat_logprobs(tokenizer: Tokenizer, scored: Sequence[ScoredToken], *, as_ids: bool = False) -> ChatLogprobs:
    """Return the log probabilities of a chat's tokens: one object per token. `as_ids` names tokens by their ids."""
    return ChatLogprobs(
        content=[
            TokenLogprob(
                **_logprob_fields(tokenizer, token, score.logprob, as_ids),
                top_logprobs=[TopLogprob(**_logprob_fields(tokenizer, *pair, as_ids)) for pair in score.top],
            )
            for token, score, _ in scored
        ]
    )


def completion_logprobs(
    tokenizer: Tokenizer, scored: Sequence[ScoredToken], *, as_ids: bool = False, start: int = 0
) -> CompletionLogprobs:
    """Return the log probabilities of a completion's tokens: four parallel lists. `as_ids` names tokens by their ids.

    start: offset of the completion in the choice's text.
    As in vLLM, `top_logprobs` begins with the generated token even if it is not one of the most likely.
    """
    lists = CompletionLogprobs()
    for token, score, offset in scored:
        top: dict[str, float] = {}
        for id, logprob in [(token, score.logprob), *score.top]:
            # Two tokens may have the same text; the more likely one stays.
            name = _token_name(tokenizer, id, as_ids)
            top[name] = max(logprob, top.get(name, MIN_LOGPROB))
        lists.tokens.append(_token_name(tokenizer, token, as_ids))
        lists.token_logprobs.append(max(score.logprob, MIN_LOGPROB))
        lists.top_logprobs.append(top)
        lists.text_offset.append(start + offset)
    return lists


def prompt_logprobs(tokenizer: Tokenizer, generation: Generation, num_top: int) -> PromptLogprobs:
    """Return the log probabilities of a prompt in vLLM's format; there is none for the first token."""
    scored = zip(generation.submit.prompt[1:], generation.prompt_scores, strict=True)
    return [None, *(token_logprobs(tokenizer, own, score, num_top) for own, score in scored)]


def token_logprobs(
    tokenizer: Tokenizer, own: int, score: TokenLogprobs, num_top: int | None = None, *, has_ranks: bool = True
) -> dict[int, PromptLogprob]:
    """Return the log probabilities of one token and of the likeliest ones by token id, in vLLM's format.

    `has_ranks=False`: the others are not the likeliest ones but chosen ones, whose ranks are not known.
    """
    ranked: list[tuple[int, float, int | None]] = [(own, score.logprob, score.rank)]
    ranked += [
        (id, logprob, rank if has_ranks else None)
        for rank, (id, logprob) in enumerate(score.top[:num_top], start=1)
        if id != own
    ]
    return {
        id: PromptLogprob(logprob=max(logprob, MIN_LOGPROB), rank=rank, decoded_token=tokenizer.token_text(id).text)
        for id, logprob, rank in ranked
    }


def _token_name(tokenizer: Tokenizer, token: int, as_id: bool) -> str:
    return f"token_id:{token}" if as_id else tokenizer.token_text(token).text


def _logprob_fields(tokenizer: Tokenizer, token: int, logprob: float, as_id: bool) -> dict[str, Any]:
    name, utf8 = _token_name(tokenizer, token, as_id), tokenizer.token_text(token).utf8
    return {"token": name, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(utf8)}


def total_usage(generations: Sequence[Generation]) -> Usage:
    """Return the usage of all choices; each prompt counts once."""
    firsts = [generation for generation in generations if generation.number == 0]
    return _usage(
        sum(len(generation.submit.prompt) for generation in firsts),
        sum(len(generation.token_ids) for generation in generations),
        sum(generation.last.num_cached_tokens for generation in firsts),
        [generation.last for generation in generations],
    )


def running_usage(generation: Generation, delta: TextDelta) -> Usage:
    """Return the usage of one choice up to `delta`, prompt included (vLLM's `continuous_usage_stats`)."""
    return _usage(len(generation.submit.prompt), delta.num_tokens, delta.num_cached_tokens, [delta])


def opening_usage(generation: Generation) -> Usage:
    """Return the usage of one choice before its first token."""
    return Usage.of(len(generation.submit.prompt), 0, reasoning=None if generation.reasoning is None else 0)


def _usage(prompt: int, completion: int, cached: int, last: Sequence[TextDelta]) -> Usage:
    """Return the usage of choices by the last delta of each."""
    stats = _stats_of(last)
    accepted = sum(item.num_accepted_tokens for item in stats)
    reasoning = [delta.num_reasoning_tokens for delta in last if delta.num_reasoning_tokens is not None]
    return Usage.of(
        prompt,
        completion,
        cached=cached,
        accepted=accepted if stats else None,
        rejected=sum(item.num_verified_tokens for item in stats) - accepted,
        reasoning=sum(reasoning) if reasoning else None,
    )


def total_stats(generations: Sequence[Generation]) -> SpeculativeStats:
    """Return the speculative statistics of all choices together."""
    stats = _stats_of(generation.last for generation in generations)
    pruned = by_depth(*(item.pruned_per_depth for item in stats))
    verified = by_depth(*(item.verified_per_depth for item in stats))
    accepted = by_depth(*(item.accepted_per_depth for item in stats))
    drafted = by_depth(pruned, verified)
    return SpeculativeStats(
        num_drafts=sum(item.num_drafts for item in stats),
        num_draft_tokens=sum(drafted),
        num_pruned=sum(pruned),
        num_verified=sum(verified),
        num_accepted_tokens=sum(accepted),
        num_copied_tokens=sum(item.num_copied_tokens for item in stats),
        num_accepted_copied_tokens=sum(item.num_accepted_copied_tokens for item in stats),
        drafted_per_depth=drafted,
        pruned_per_depth=pruned,
        verified_per_depth=verified,
        accepted_per_depth=accepted,
    )


def _stats_of(deltas: Iterable[TextDelta]) -> list[RequestStats]:
    return [delta.stats for delta in deltas if delta.stats is not None]
