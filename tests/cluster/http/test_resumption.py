"""Streams that go on where they broke off: the text, calls and numbers that follow, and what is refused."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import BadRequest, HttpError
from cluster.openai import streaming
from cluster.openai.output_processor import Generation
from cluster.openai.request_params import SeedSource
from cluster.openai.resumption import EventId, EventIds, Origin, Place, Replay, split
from cluster.text.answer_reader import AnswerReader
from cluster.text.reasoning import ReasoningReader
from cluster.text.tokenizer import Tokenizer
from cluster.text.tool_calls import ToolCallReader
from secateur import Client
from tests.support.fake_engine import score
from tests.support.fake_service import FakeService, error_of
from workers.comm.ipc import Submit, TokenChunk

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("order", "stop")]
TEXT = "naïve 🌳🌳 日本語, then x + 1\nand the end of it"
CALLS = (
    'I do.\n<tool_call>\n{"name": "order", "arguments": {"what": "🌳"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)
LISTED = '[{"name": "order", "parameters": {"what": "tea"}}, {"name": "stop", "parameters": {}}]'
THOUGHT = "<think>\nWhat is 🌳 < </thin?\n\n</think>\n\nA tree."
TOTALS = {"stream_options": {"include_usage": True}}
RUNNING = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


class Event(NamedTuple):
    id: str | None
    data: str


DONE = Event(None, "[DONE]")


def read(http: httpx2.Client, path: str, body: dict[str, Any], last: str | None = None) -> list[Event]:
    """Return the events of a stream, or of its rest behind the event `last`."""
    headers = {} if last is None else {"Last-Event-ID": last}
    response = http.post(path, json={**body, "stream": True}, headers=headers)
    assert response.status_code == 200, response.text
    return events_of(response.text)


def events_of(wire: str) -> list[Event]:
    events = []
    for block in wire.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if fields:
            events.append(Event(fields.get("id"), fields["data"]))
    return events


def assembled(events: list[Event]) -> dict[str, Any]:
    """Return all that a stream told, without its boundaries."""
    assert events[-1].data == "[DONE]"
    told: dict[str, Any] = {"heads": set(), "closing": []}
    for event in events[:-1]:
        chunk = json.loads(event.data)
        told["heads"].add((chunk["id"], chunk["created"], chunk["model"]))
        if not chunk["choices"]:
            told["closing"].append(counts(chunk["usage"]))
        for choice in chunk["choices"]:
            own = told.setdefault(choice["index"], {"text": "", "reasoning": "", "roles": 0, "reasons": []})
            delta = choice.get("delta", {})
            own["text"] += choice.get("text") or delta.get("content") or ""
            own["reasoning"] += delta.get("reasoning_content") or ""
            own["roles"] += "role" in delta
            own["reasons"] += [(choice["finish_reason"], choice["stop_reason"])] * (choice["finish_reason"] is not None)
            own["ids"] = own.get("ids", []) + (choice["token_ids"] or [])
            own["prompt"] = own.get("prompt", []) + [choice.get("prompt_token_ids"), chunk.get("prompt_token_ids")]
            own["prompt"] = [ids for ids in own["prompt"] if ids]
            for part in delta.get("tool_calls", ()):
                calls = own.setdefault("calls", [])
                if "id" in part:
                    assert part["index"] == len(calls)
                    calls.append([part["function"]["name"], ""])
                calls[part["index"]][1] += part["function"]["arguments"]
            for name, values in (choice.get("logprobs") or {}).items():
                own[name] = own.get(name, []) + (values or [])
            if chunk.get("usage"):
                own["usage"] = counts(chunk["usage"])
    return told


def counts(usage: dict[str, Any]) -> dict[str, int]:
    """Return the numbers of tokens; which of them were drafted is a matter of the run."""
    reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {key: value for key, value in usage.items() if not key.endswith("details")} | {"reasoning": reasoning}


@pytest.fixture
def answers() -> dict[str, str]:
    return {"text": TEXT}


@pytest.fixture
def resumable(own: Callable[..., FakeService], tokenizer: Tokenizer, answers: dict[str, str]) -> FakeService:
    """A service whose engine writes the text `answers["text"]`, and behind it the request's seed, each time in other
    steps. Behind this text there are ten end tokens, of which the first one ends the answer unless it is ignored."""
    rng = random.Random(0)

    def script(submit: Submit) -> list[list[int]]:
        text = answers["text"] + (str(submit.sampling.seed % 1000) if answers["text"] == TEXT else "")
        ids = [*tokenizer.encode(text, add_special_tokens=False), *[0] * 10]
        num_steps = rng.randint(1, 4) if "coarse" in answers else len(ids) * 2 // 3  # steps take time
        cuts = sorted(rng.sample(range(1, len(ids)), num_steps - 1))
        return [ids[start:end] for start, end in itertools.pairwise([0, *cuts, len(ids)])]

    return own(script=script, engine={"drafts": True}, reasoning_parser="think")


CASES: list[tuple[str, str, dict[str, Any]]] = [
    (TEXT, COMPLETIONS, {"prompt": "a", "max_tokens": 64, **TOTALS}),
    (TEXT, COMPLETIONS, {"prompt": ["a", "b c"], "n": 2, "max_tokens": 64, **RUNNING}),
    (TEXT, COMPLETIONS, {"prompt": "a", "max_tokens": 9, "echo": True, "logprobs": 1}),
    (TEXT, COMPLETIONS, {"prompt": "a", "max_tokens": 64, "ignore_eos": True, "return_token_ids": True}),
    (TEXT, COMPLETIONS, {"prompt": "a", "max_tokens": 64, "stop": ["x + 2", " + 1\nand"], **TOTALS}),
    (TEXT, COMPLETIONS, {"prompt": "a", "max_tokens": 64, "stop": "end of it?", "seed": 5, "logprobs": 2}),
    (TEXT, COMPLETIONS, {"prompt": "a", "max_tokens": 0, "echo": True, **TOTALS}),
    (THOUGHT, CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 1, "n": 2}),
    (THOUGHT, CHAT, {"messages": HI, "include_reasoning": False, **TOTALS}),
    (CALLS, CHAT, {"messages": HI, "tools": TOOLS, "n": 2, **TOTALS}),
    (CALLS, CHAT, {"messages": HI, "tools": TOOLS, "parallel_tool_calls": False, "return_token_ids": True}),
    (CALLS, CHAT, {"messages": HI, "tools": TOOLS, "max_tokens": 20, "logprobs": True}),
    (LISTED, CHAT, {"messages": HI, "tools": TOOLS, "tool_choice": "required"}),
]


@pytest.mark.parametrize(("text", "path", "body"), CASES)
def test_a_stream_cut_behind_any_event_goes_on_as_if_it_was_not(
    resumable: FakeService, answers: dict[str, str], text: str, path: str, body: dict[str, Any]
) -> None:
    answers["text"] = text
    with resumable.http() as http:
        whole = read(http, path, body)
        wanted = assembled(whole)
        assert len(whole) >= 3 and all(event.id for event in whole)
        answers["coarse"] = "yes"
        for cut in range(1, len(whole)):
            rest = read(http, path, body, whole[cut - 1].id)
            assert assembled(whole[:cut] + rest) == wanted
            seeds = [submit.sampling.seed for submit in resumable.engine.submitted]
        assert len(set(seeds)) == body.get("n", 1) * len(
            body["prompt"] if isinstance(body.get("prompt"), list) else "a"
        )


def test_the_rest_of_a_stream_that_was_whole_is_its_end_with_the_same_headers(resumable: FakeService) -> None:
    body = {"prompt": "Hi", "stream": True, "colour": "red"}
    with resumable.http() as http:
        whole = http.post("/v1/completions", json=body)
        last = {"Last-Event-ID": events_of(whole.text)[-1].id or ""}
        rest = http.post("/v1/completions", json=body, headers=last)
    assert [event.data for event in events_of(rest.text)] == ["[DONE]"]
    assert rest.headers["x-secateur-ignored"] == whole.headers["x-secateur-ignored"] == "colour"


def test_a_stream_may_break_off_many_times(resumable: FakeService, answers: dict[str, str]) -> None:
    answers["text"] = CALLS
    body = {"messages": HI, "tools": TOOLS, "n": 2, "temperature": 1, "logprobs": True, **TOTALS}
    with resumable.http() as http:
        wanted, got = assembled(read(http, CHAT, body)), read(http, CHAT, body)[:4]
        answers["coarse"] = "yes"
        while got[-1].data != "[DONE]":
            got += read(http, CHAT, body, got[-1].id)[:3]
    told = assembled(got)
    assert {key: told[key] for key in (0, 1, "closing")} == {key: wanted[key] for key in (0, 1, "closing")}
    assert len(told["heads"]) == 1


def test_an_id_outlives_its_service(own: Callable[..., FakeService], tokenizer: Tokenizer) -> None:
    """The seed and the request id are those of the first service; the second one would draw others."""

    def script(submit: Submit) -> list[list[int]]:
        return [[id] for id in tokenizer.encode(f"the seed is {submit.sampling.seed}")]

    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 64}
    with own(script=script).http() as http:
        whole = read(http, COMPLETIONS, body)
    second = own(script=script)
    with second.http() as http:
        rest = read(http, COMPLETIONS, body, whole[9].id)
    assert assembled(whole[:10] + rest) == assembled(whole)
    assert EventId.parse(rest[0].id or "").origin == EventId.parse(whole[0].id or "").origin


def test_a_replay_keeps_the_connection_alive(own: Callable[..., FakeService], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that shows two seconds more whenever it is read."""
    monkeypatch.setattr(streaming, "time", SimpleNamespace(monotonic=itertools.count(0.0, 2.0).__next__))
    body = {"prompt": "a", "max_tokens": 12, "stream": True, "ignore_eos": True}
    with own(script=lambda submit: [[5]] * 12).http() as http:
        whole = http.post(COMPLETIONS, json=body).text
        rest = http.post(COMPLETIONS, json=body, headers={"Last-Event-ID": events_of(whole)[-3].id or ""}).text
    assert rest.startswith(": replaying\n\n") and 1 < rest.count(": replaying") < 5 and ": replaying" not in whole
    assert len(events_of(rest)) == 2


class CuttingTransport(httpx2.HTTPTransport):
    """Breaks the connection of every stream after some bytes: at first after few, later after more."""

    def __init__(self) -> None:
        super().__init__()
        self.num_cuts = 0

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        response = super().handle_request(request)
        data = response.read()
        if request.url.path == "/health" or len(data) <= (cut := 97 * self.num_cuts):
            return httpx2.Response(response.status_code, content=data)
        self.num_cuts += 1
        return httpx2.Response(response.status_code, stream=Cut(data[:cut]))


class Cut(httpx2.SyncByteStream):
    def __init__(self, data: bytes) -> None:
        self.data = data

    def __iter__(self) -> Iterator[bytes]:
        yield self.data
        raise httpx2.ReadError("cut")


@pytest.mark.parametrize("text", [THOUGHT, CALLS])
def test_our_client_yields_the_same_over_a_connection_that_breaks(
    resumable: FakeService, answers: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secateur.client.time.sleep", lambda _: None)
    answers |= {"text": text, "coarse": "yes"}
    params: dict[str, Any] = {"tools": TOOLS, "n": 2, "seed": 7, "temperature": 1, "logprobs": True, **TOTALS}
    transport = CuttingTransport()
    with Client(resumable.url) as plain, Client(resumable.url, transport=transport) as cut:
        told = [
            assembled([Event(None, chunk.model_dump_json()) for chunk in client.stream_chat("Hi", **params)] + [DONE])
            for client in (plain, cut)
        ]
    assert transport.num_cuts > 10
    assert len(told[1].pop("heads")) == len(told[0].pop("heads")) == 1
    assert told[0] == told[1]


# ---- refusals


def refused(http: httpx2.Client, path: str, body: dict[str, Any], last: str) -> tuple[str, str]:
    response = http.post(path, json=body, headers={"Last-Event-ID": last})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    return error["code"], error["message"]


def test_ids_that_are_none_are_refused(http: httpx2.Client) -> None:
    body = {"prompt": "a", "stream": True}
    id = read(http, COMPLETIONS, body)[0].id or ""
    for wrong in ("", "42", id[1:], id + "x", id.replace("~", ""), id.replace(":", ";"), id + ",", f"{id}:end:end"):
        code, message = refused(http, COMPLETIONS, body, wrong)
        assert code == "invalid_event_id" and "send the last one as it came" in message


def test_an_id_of_another_request_is_refused(own: Callable[..., FakeService], http: httpx2.Client) -> None:
    body = {"prompt": "a", "stream": True}
    id = read(http, COMPLETIONS, body)[0].id or ""
    others: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {**body, "prompt": "b"}),
        (COMPLETIONS, {**body, "user": "b"}),
        (COMPLETIONS, {**body, "n": 2}),
        (CHAT, {"messages": HI, "stream": True}),
    ]
    for path, other in others:
        assert refused(http, path, other, id)[0] == "event_id_of_another_request"
    assert refused(http, COMPLETIONS, body, f"{id},-")[0] == "event_id_of_another_request"
    with own(sampling_defaults={"temperature": 0.5}).http() as changed:
        assert refused(changed, COMPLETIONS, body, id)[0] == "event_id_of_another_request"
    code, message = refused(http, COMPLETIONS, {**body, "stream": False}, id)
    assert code is None and 'add "stream": true' in message


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"speculative": {"acceptance": "rejection", "tree_prune": "auto"}}, 'ask for "coupled"'),
        ({"speculative": {"acceptance": "rejection", "tree_prune_min_prob": 0.1}}, 'ask for "coupled"'),
        ({"speculative": {"acceptance": "rejection", "tree_prune": "off"}}, 'ask for "coupled"'),
        ({"return_speculative_trees": True}, "the trees of a run do not repeat"),
    ],
)
def test_a_stream_that_does_not_repeat_has_no_ids(http: httpx2.Client, asked: dict[str, Any], why: str) -> None:
    body = {"prompt": "a", "temperature": 1, **asked}
    assert {event.id for event in read(http, COMPLETIONS, body)} == {None}
    plain = http.post(COMPLETIONS, json={**body, "stream": True}, headers={"X-Request-ID": "r"})
    assert "id: " not in plain.text
    id = read(http, COMPLETIONS, {"prompt": "a"})[0].id or ""
    own_id = id.replace(id.split(":")[1], server_digest(http, body))
    code, message = refused(http, COMPLETIONS, {**body, "stream": True}, own_id)
    assert code == "not_resumable" and why in message
    told = http.post(COMPLETIONS, json={**body, "stream": True}, headers={"Last-Event-ID": own_id})
    assert told.json()["error"]["param"] in asked


def server_digest(http: httpx2.Client, body: dict[str, Any]) -> str:
    """Return the digest of a streamed completion whose ids are left out."""
    from cluster.openai.resumption import digest_of

    request = http.build_request("POST", COMPLETIONS, json={**body, "stream": True})
    return digest_of("completion", "fake-model", {}, request.read())


def test_under_rejection_streams_without_sampled_drafts_have_ids(http: httpx2.Client) -> None:
    for asked in (
        {"speculative": {"acceptance": "rejection", "enable_draft_probs": False}},
        {"speculative": {"acceptance": "rejection", "enabled": False}},
        {"speculative": {"acceptance": "rejection"}, "temperature": 0},
    ):
        assert all(event.id for event in read(http, COMPLETIONS, {"prompt": "a", "temperature": 1, **asked}))


def test_streams_of_responses_do_not_go_on(http: httpx2.Client) -> None:
    code, message = refused(http, "/v1/responses", {"input": "a", "stream": True}, "1")
    assert code == "not_resumable" and "/v1/chat/completions" in message


def test_another_answer_is_an_error_and_not_spliced(own: Callable[..., FakeService]) -> None:
    tokens = [5, 6, 7, 8, 9, 10]
    running = own(script=lambda submit: [[token] for token in tokens])
    body = {"prompt": "a", "max_tokens": 6, "ignore_eos": True}
    with running.http() as http:
        whole = read(http, COMPLETIONS, body)
        tokens[1] = 66
        assert len(read(http, COMPLETIONS, body, whole[0].id)) == 6  # the first token is the same
        [error, done] = read(http, COMPLETIONS, body, whole[2].id)
        tokens[1:] = [0]
        body["ignore_eos"] = False
        first = http.post(COMPLETIONS, json={**body, "stream": True})
        assert first.status_code == 200
    told = json.loads(error.data)["error"]
    assert (told["code"], told["type"]) == ("answer_changed", "conflict_error")
    assert "its first 3 tokens are not those" in told["message"] and done.data == "[DONE]"
    assert told["message"].endswith("Send the request without Last-Event-ID")


# ---- parts


@given(
    st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 9), st.booleans())), min_size=1), st.booleans(), st.text()
)
def test_an_id_is_read_as_it_was_written(places: list[Any], is_closed: bool, name: str) -> None:
    origin = Origin(
        digest="0" * 16,
        created=1,
        response_id="cmpl-" + "a" * 32,
        seeds=(-(2**63), 2**63 - 1),
        request_id="r" + "".join(char for char in name if char.isprintable())[:500],
    )
    own = tuple(place and Place().after(range(place[0]), is_finished=place[1]) for place in places)
    id = EventId(origin=origin, places=own, is_closed=is_closed)
    assert EventId.parse(str(id)) == id
    assert str(id).isascii() and str(id).isprintable() and " " not in str(id)
    with pytest.raises(BadRequest):
        EventId.parse(str(id).replace(str(2**63 - 1), str(2**63)))


def test_a_chunk_is_split_with_what_belongs_to_its_tokens() -> None:
    chunk = TokenChunk(
        id=1, tokens=[5, 6, 7], num_accepted=2, logprobs=[score(each, 1) for each in (5, 6, 7)], finish_reason="stop"
    )
    first, rest = split(chunk, 1)
    assert (first.tokens, first.num_accepted, first.finish_reason, len(first.logprobs or ())) == ([5], 1, None, 1)
    assert (rest.tokens, rest.num_accepted, rest.finish_reason, len(rest.logprobs or ())) == ([6, 7], 1, "stop", 2)
    assert split(chunk, 3)[1].num_accepted == 0


def test_the_end_of_an_answer_is_told_to_a_reader_who_has_all_its_tokens() -> None:
    """The engine may tell the last token and the end in one step, where it told them in two before."""

    def process(chunk: TokenChunk) -> SimpleNamespace:
        return SimpleNamespace(token_ids=chunk.tokens, finish_reason=chunk.finish_reason, is_replayed=False)

    chunk = TokenChunk(id=1, tokens=[5, 6], num_accepted=0, finish_reason="stop")
    generation: Any = SimpleNamespace(process=process)
    told = [
        (delta.token_ids, delta.finish_reason, delta.is_replayed)
        for delta in Replay(Place().after([5, 6])).deltas(chunk, generation)
    ]
    assert told == [([5, 6], None, True), ([], "stop", False)]


def test_a_stream_is_over_when_every_choice_has_ended_and_the_totals_are_sent() -> None:
    origin = Origin(digest="d", created=1, response_id="cmpl-1", seeds=(7,), request_id="r")
    ids = EventIds(origin, 2)
    for index, is_finished in ((0, True), (1, False), (1, True)):
        assert not ids.is_over(has_totals=False)
        ids.process(index, [5], is_finished=is_finished)
        ids.sent(index)
    assert ids.is_over(has_totals=False) and not ids.is_over(has_totals=True)
    ids.closed()
    assert ids.is_over(has_totals=True)


@pytest.mark.parametrize(
    ("place", "runs"),
    [
        (Place().after([1, 2]), [([1, 2, 3], False)]),  # one token too many, which `split` prevents
        (Place().after([1, 2]), [([1], False), ([3], False)]),
        (Place().after([1, 2]), [([1], True)]),
        (Place().after([1, 2]), [([1, 2], True)]),
        (Place().after([1, 2], is_finished=True), [([1, 2], False), ([3], True)]),
        (Place().after([1, 2], is_finished=True), [([1], True)]),
    ],
)
def test_a_replay_notices_other_tokens(place: Place, runs: list[tuple[list[int], bool]]) -> None:
    replay = Replay(place)
    for tokens, is_finished in runs[:-1]:
        replay.process(tokens, is_finished=is_finished)
        assert not replay.is_over
    with pytest.raises(HttpError, match="first 2 tokens"):
        replay.process(runs[-1][0], is_finished=runs[-1][1])


def test_an_end_without_tokens_may_follow_or_be_known(tokenizer: Tokenizer) -> None:
    """Engines end an answer with its last token, but nothing depends on it."""
    chunks = [TokenChunk(id=1, tokens=[5, 6]), TokenChunk(id=1, tokens=[], finish_reason="length")]
    for is_finished, replayed in ((False, [True, False]), (True, [True, True])):
        replay = Replay(Place().after([5, 6], is_finished=is_finished))
        generation = Generation(submit=Submit(id=1, prompt=[3], max_tokens=2), tokenizer=tokenizer)
        deltas = [delta for chunk in chunks for delta in replay.deltas(chunk, generation)]
        assert [delta.is_replayed for delta in deltas] == replayed


def test_a_key_repeats_seeds_unless_the_server_has_one() -> None:
    assert SeedSource(None).draw(3, "k") == SeedSource(None).draw(3, "k")
    assert len({*SeedSource(None).draw(3, "k"), *SeedSource(None).draw(3, "other"), *SeedSource(None).draw(3)}) == 9
    source = SeedSource(1)
    assert source.draw(2, "k") + source.draw(1, "k") == SeedSource(1).draw(3)


def test_a_key_repeats_an_answer(service: FakeService, http: httpx2.Client) -> None:
    for key in ("a", "a", "b"):
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI}), ("/v1/responses", {"input": "a"})):
            http.post(path, json=body, headers={"Idempotency-Key": key}).raise_for_status()
    seeds = [submit.sampling.seed for submit in service.engine.submitted[-9:]]
    assert seeds[0] == seeds[1] == seeds[2] == seeds[3] != seeds[6]


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"]
PIECES = [
    *MARKS,
    '{"name": "f"',
    '"arguments": {"a": 1}',
    '"name": 3',
    '"',
    "{",
    "}",
    "[",
    "]",
    ", ",
    ":",
    "\n",
    " ",
    "a",
]
FORMATS: list[Any] = ["hermes", "llama3_json", "mistral", "list", "arguments"]


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=9).map("".join), st.sampled_from(FORMATS), st.booleans())
def test_the_parts_of_an_answer_do_not_depend_on_how_its_text_is_split(
    text: str, format: Any, begins_inside: bool
) -> None:
    def read_in(pieces: list[str]) -> tuple[str, str, dict[int, str]]:
        reader = AnswerReader(ReasoningReader(begins_inside=begins_inside), ToolCallReader(format, name="f"))
        parts, calls = [reader.feed(piece, is_last=False) for piece in pieces], dict[int, str]()
        for call in (call for part in parts for call in part.calls):
            calls[call.number] = calls.get(call.number, "") + (call.name or "") + call.arguments
        return "".join(part.reasoning for part in parts), "".join(part.content for part in parts), calls

    assert read_in([text]) == read_in(list(text))
