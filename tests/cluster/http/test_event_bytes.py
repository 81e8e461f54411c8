"""Events are what pydantic writes of their chunks, byte for byte, and the steps that a delta joins do not show."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from cluster.observe.answer_record import AnswerRecord
from cluster.openai.deltas import deltas_of
from cluster.openai.direct import DirectWriter
from cluster.openai.openai_format import ChatFormat, CompletionFormat, running_usage
from cluster.openai.output_processor import Generation, TextDelta
from cluster.text.answer_reader import AnswerReaders
from cluster.text.tokenizer import Tokenizer
from secateur.requests import ChatCompletionRequest, CompletionRequest
from tests.support.fake_engine import STATS, score, tree_of
from tests.support.fake_service import FakeService
from workers.comm.ipc import EngineStats, Submit, TokenChunk

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "order", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "order", "arguments": {"what": "🌳"}}</tool_call>'
TEXT = 'a "quoted" \\path\\\t</script>\r\n世界 🌳 \u2028 é \x7f\x00 '
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several answers": {"n": 3},
    "log probabilities": {"logprobs": True, "top_logprobs": 2},
    "token ids": {"return_token_ids": True},
    "usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "trees": {"return_speculative_trees": True, "return_speculative_stats": True},
    "echo": {"echo": True, "add_generation_prompt": False, "continue_final_message": True},
    "no reasoning": {"include_reasoning": False},
    "tools": {"tools": [TOOL]},
    "stop strings": {"stop": ["世"]},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several answers": {"n": 3},
    "log probabilities": {"logprobs": 2},
    "token ids": {"return_token_ids": True},
    "echo": {"echo": True, "logprobs": 1},
    "trees": {"return_speculative_trees": True},
}


def chunks_of(tokenizer: Tokenizer, text: str, body: Any, size: int) -> list[TokenChunk]:
    """Return an answer's chunks of `size` tokens."""
    ids, num = tokenizer.encode(text, add_special_tokens=False), body.num_logprobs
    parts = [ids[at : at + size] for at in range(0, len(ids), size)]
    return [
        TokenChunk(
            id=1,
            tokens=part,
            logprobs=None if num is None else [score(token, num) for token in part],
            finish_reason="length" if part is parts[-1] else None,
            stats=STATS,
            tree=tree_of(part, len(part) - 1) if body.return_speculative_trees else None,
        )
        for part in parts
    ]


def formats(
    kind: str, fields: dict[str, Any], tokenizer: Tokenizer
) -> tuple[Any, list[CompletionFormat] | list[ChatFormat]]:
    """Return a request, and the same format of its answers twice."""
    body: Any
    twins: list[CompletionFormat] | list[ChatFormat]
    if kind == "completion":
        body = CompletionRequest.model_validate({"prompt": "a", "stream": True, **fields})
        twins = [CompletionFormat(body, "m", tokenizer) for _ in range(2)]
    else:
        last = [{"role": "assistant", "content": "so "}] if fields.get("echo") else []
        body = ChatCompletionRequest.model_validate({"messages": MESSAGES + last, "stream": True, **fields})
        parser: Any = "none" if kind == "chat" else "think"
        new_reader = AnswerReaders(tokenizer, parser).of(body, [5])
        twins = [ChatFormat(body, "m", tokenizer, new_reader) for _ in range(2)]
    twins[1].head = twins[0].head
    return body, twins


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *itertools.product(["completion"], COMPLETIONS),
        *itertools.product(["chat", "reasoning chat"], CHATS),
    ],
)
def test_an_event_is_what_pydantic_writes(
    kind: str, shape: str, size: int, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * size)  # the ids of calls
    body, twins = formats(kind, (COMPLETIONS if kind == "completion" else CHATS)[shape], tokenizer)
    text = f"<think>why{TEXT}</think>\n{TEXT}{CALL}" if kind == "reasoning chat" else TEXT
    has_usage = bool(body.stream_options and body.stream_options.usage_in_chunks)
    submit = Submit(id=1, prompt=[5, 6], max_tokens=999)
    choices = [Generation(submit=submit, tokenizer=tokenizer, stop=body.stop_strings) for _ in range(body.n)]
    for choice in choices:
        choice.prompt_scores = [score(6, 1)]
    for twin in twins:
        if twin.reads_prompts:
            twin.read_prompts(choices)
    num_events = 0
    for index, choice in enumerate(choices):
        for chunk in chunks_of(tokenizer, text, body, size):
            delta = choice.process(chunk)
            event = twins[0].event(index, choice, delta)
            expected = twins[1].chunk(index, choice, delta)
            if expected is not None and has_usage:
                expected.usage = running_usage(choice, delta)
            if delta.text or delta.finish_reason:  # `events_of` asks for no other ones
                assert event == (None if expected is None else expected.sse())
            num_events += event is not None
            if delta.finish_reason is not None:
                break
    assert num_events >= body.n


class Steps:
    """An engine whose reader is behind: `size` steps have come at a time."""

    def __init__(self, chunks: list[TokenChunk], size: int) -> None:
        self._chunks, self._size = chunks, size

    async def arrivals(self, submit: Submit, direct: object = None) -> Any:
        for at in range(0, len(self._chunks), self._size):
            yield self._chunks[at : at + self._size]

    def abort(self, id: int) -> None: ...


async def answer(
    tokenizer: Tokenizer, service: FakeService, size: int, interval: int = 1, stop: tuple[str, ...] = ()
) -> tuple[Generation, list[TextDelta]]:
    """Return an answer, and its deltas when `size` steps come at a time."""
    submit = Submit(id=1, prompt=[5], max_tokens=999)
    generation = Generation(submit=submit, tokenizer=tokenizer, stop=stop)
    body = ChatCompletionRequest.model_validate({"messages": MESSAGES, "logprobs": True})
    record = AnswerRecord(submit, "r", 0.0, service.service.metrics)
    engine: Any = Steps(chunks_of(tokenizer, TEXT, body, 2), size)
    return generation, [delta async for _, delta in deltas_of(engine, [generation], [record], (), interval)]


@pytest.mark.parametrize("stop", [(), ("世界",), ("🌳", "quoted")])
async def test_steps_that_wait_are_one_delta_and_leave_the_answer_as_it_is(
    stop: tuple[str, ...], tokenizer: Tokenizer, service: FakeService
) -> None:
    alone, deltas = await answer(tokenizer, service, 1, stop=stop)
    for size in (2, 3, 99):
        other, joined = await answer(tokenizer, service, size, stop=stop)
        assert len(joined) == -(-len(deltas) // size)
        assert (other.text, other.token_ids, other.scored, other.last) == (
            alone.text,
            alone.token_ids,
            alone.scored,
            alone.last,
        )
        for name in ("text", "token_ids", "scored"):
            whole: Any = "" if name == "text" else []
            for delta in joined:
                whole += getattr(delta, name)
            assert whole == getattr(alone, name)
        assert joined[-1].finish_reason == alone.last.finish_reason
        assert (joined[-1].stop_reason, joined[-1].stats) == (alone.last.stop_reason, alone.last.stats)


async def test_an_interval_holds_tokens_back_but_neither_the_first_ones_nor_the_end(
    tokenizer: Tokenizer, service: FakeService
) -> None:
    alone, _ = await answer(tokenizer, service, 1)
    _, deltas = await answer(tokenizer, service, 1, interval=5)
    num = len(alone.token_ids)
    sizes = [len(delta.token_ids) for delta in deltas]
    assert sizes[:-1] == [2, *[6] * ((num - 3) // 6)] and sum(sizes) == num
    assert "".join(delta.text for delta in deltas) == alone.text


def test_a_stream_pauses_for_as_long_as_the_others_take(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    assert service.service._pause_s() == 0
    monkeypatch.setattr(service.service, "event_s", 0.5)
    for num_running, pause_s in ((0, 0.0), (1, 0.0), (3, 1.0)):
        monkeypatch.setattr(service.client, "stats", EngineStats(num_running=num_running))
        assert service.service._pause_s() == pause_s


async def test_a_pause_comes_behind_a_delta_and_never_behind_the_last_one(
    tokenizer: Tokenizer, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []

    async def sleep(seconds: float) -> None:
        told.append(seconds)

    monkeypatch.setattr("cluster.openai.deltas.asyncio.sleep", sleep)
    submit = Submit(id=1, prompt=[5], max_tokens=999)
    record = AnswerRecord(submit, "r", 0.0, service.service.metrics)
    steps = [TokenChunk(id=1, tokens=[id], finish_reason="length" if id == 302 else None) for id in (300, 301, 302)]
    engine: Any = Steps(steps, 1)
    generation = Generation(submit=submit, tokenizer=tokenizer)
    async for _, delta in deltas_of(engine, [generation], [record], pause_s=lambda: 0.25):
        told.append(list(delta.token_ids))
    assert told == [[300], 0.25, [301], 0.25, [302]]


@pytest.mark.parametrize(
    ("path", "shape"),
    [*itertools.product(["/v1/completions"], COMPLETIONS), *itertools.product(["/v1/chat/completions"], CHATS)],
)
def test_what_is_written_past_the_streams_task_is_what_the_task_writes(
    path: str, shape: str, own: Callable[..., FakeService], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * size)
    monkeypatch.setattr("uuid.uuid4", lambda: UUID(int=7))
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.0)
    service = own()
    body: dict[str, Any] = {"seed": 7, "stream": True, "max_tokens": 64, "request_id": "r"}
    if path == "/v1/completions":
        body |= {"prompt": "a", **COMPLETIONS[shape]}
    else:
        last = [{"role": "assistant", "content": "so "}] if shape == "echo" else []
        body |= {"messages": MESSAGES + last, **CHATS[shape]}
    parts: list[bytes] = []
    write = DirectWriter.write

    def counted(self: DirectWriter, part: bytes) -> None:
        parts.append(part)
        write(self, part)

    monkeypatch.setattr(DirectWriter, "write", counted)
    with service.http() as http:
        both = []
        for is_direct in (True, False):
            if not is_direct:
                monkeypatch.setattr(DirectWriter, "is_open", False)
            response = http.post(path, json=body)
            assert response.status_code == 200
            both.append(response.content)
            assert bool(parts) == (is_direct and not (body.get("stop") or body.get("return_speculative_trees")))
            parts.clear()
    if "n" in body:  # which answers a step adds to differs from run to run, and ids tell of all of them
        both = [b"".join(sorted(re.sub(rb"\nid: .*", b"", each).split(b"\n\n"))) for each in both]
    assert both[0] == both[1] and both[0].count(b"[DONE]") == 1
