"""/v1/responses that are stored: conversations that go on, items, owners and what a store holds."""

from __future__ import annotations

import gc
import json
import tracemalloc
from functools import partial
from typing import Any

import httpx2
import pytest

from cluster.errors import HttpError
from cluster.openai import response_store
from cluster.text.tokenizer import Tokenizer
from secateur.responses_api import OutputMessage, OutputText, ResponseObject, ResponsesRequest
from tests.cluster.http.test_responses_api import CALL, PATH, RESULT, USER, create, events, rendered
from tests.support.fake_service import ANSWER, FakeService, error_of


def test_a_stored_response_cannot_be_cancelled(http: httpx2.Client) -> None:
    answer = create(http, input="Hi")
    refused = http.post(f"{PATH}/{answer['id']}/cancel")
    assert refused.status_code == 400 and "Cannot cancel a synchronous response" in error_of(refused)["message"]
    assert http.post(f"{PATH}/resp-0/cancel").status_code == 404


def test_a_conversation_goes_on(http: httpx2.Client, service: FakeService, tokenizer: Tokenizer) -> None:
    first = create(http, input="One", instructions="Be short.")
    second = create(http, input="Two", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert rendered(tokenizer, service) == (
        f"<|im_start|>user\nOne<|im_end|>\n<|im_start|>assistant\n{ANSWER}<|im_end|>\n"
        "<|im_start|>user\nTwo<|im_end|>\n<|im_start|>assistant\n"
    ), "instructions do not carry over"
    streamed = events(http, input="Three", previous_response_id=second["id"])[-1]["response"]
    create(http, input="Four", previous_response_id=streamed["id"])
    assert rendered(tokenizer, service).count(ANSWER) == 3
    assert http.get(f"{PATH}/{first['id']}").json() == first
    [given] = http.get(f"{PATH}/{second['id']}/input_items").json()["data"]
    assert given["role"] == "user" and given["content"] == [{"type": "input_text", "text": "Two"}]
    assert http.delete(f"{PATH}/{first['id']}").json() == {"id": first["id"], "object": "response", "deleted": True}
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        gone = http.request(method, f"{PATH}/{first['id']}{path}")
        assert gone.status_code == 404 and first["id"] in error_of(gone)["message"]
    lost = http.post(PATH, json={"input": "a", "previous_response_id": first["id"]})
    assert (lost.status_code, error_of(lost)["param"]) == (404, "previous_response_id")


SAID = {"role": "assistant", "content": [{"type": "output_text", "text": "It is done."}]}


def test_a_responses_input_is_listed_as_items_page_by_page(http: httpx2.Client) -> None:
    given = [USER, {"type": "reasoning", "summary": []}, CALL, RESULT, SAID]
    path = f"{PATH}/{create(http, input=given)['id']}/input_items"
    listed = http.get(path, params={"order": "asc"}).json()
    ids = [item.pop("id") for item in listed["data"]]
    assert len(set(ids)) == 5 and ids[2] == "fc-1"
    assert listed == {
        "object": "list",
        "data": [
            {
                "type": "message",
                "status": "completed",
                "role": "user",
                "content": [{"type": "input_text", "text": "Hi"}],
            },
            {"type": "reasoning", "status": "completed", "summary": []},
            {"type": "function_call", "status": "completed", **{name: CALL[name] for name in list(CALL)[2:]}},
            {"type": "function_call_output", "status": "completed", "call_id": "call-1", "output": "done"},
            {
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "It is done."}],
            },
        ],
        "first_id": ids[0],
        "last_id": ids[4],
        "has_more": False,
    }
    first = http.get(path, params={"limit": 3}).json()
    assert [item["id"] for item in first["data"]] == ids[:1:-1] and first["has_more"] is True
    rest = http.get(path, params={"limit": 3, "after": first["last_id"]}).json()
    assert [item["id"] for item in rest["data"]] == ids[1::-1] and rest["has_more"] is False
    assert [item["id"] for item in http.get(path, params={"order": "asc", "after": ids[3]}).json()["data"]] == ids[4:]
    lost = http.get(path, params={"after": "msg-0"})
    assert (lost.status_code, error_of(lost)["param"]) == (404, "after")
    assert http.get(path, params={"limit": 0}).status_code == 400


def test_items_of_stored_responses_may_be_named_instead_of_repeated(
    http: httpx2.Client, service: FakeService, tokenizer: Tokenizer
) -> None:
    def named(id: str) -> dict[str, str]:
        return {"type": "item_reference", "id": id}

    first = create(http, input=[USER, CALL, RESULT])
    [answer] = first["output"]
    ids = [item["id"] for item in http.get(f"{PATH}/{first['id']}/input_items").json()["data"][::-1]]
    whole = [USER, CALL, RESULT, {"type": "message", "role": "assistant", "content": ANSWER}, USER]
    create(http, input=whole)
    expected = rendered(tokenizer, service)
    second = create(http, input=[*map(named, ids), named(answer["id"]), USER])
    assert rendered(tokenizer, service) == expected
    http.delete(f"{PATH}/{first['id']}")
    third = create(http, input=[*map(named, ids), named(answer["id"]), USER])
    assert rendered(tokenizer, service) == expected, "the second response still has the items"
    for response in (second, third):
        http.delete(f"{PATH}/{response['id']}")
    lost = http.post(PATH, json={"input": [USER, named(answer["id"])]})
    assert (lost.status_code, error_of(lost)["param"]) == (404, "input") and answer["id"] in error_of(lost)["message"]
    unstored = create(http, input="Hi", store=False)["output"][0]["id"]
    assert http.post(PATH, json={"input": [named(unstored)]}).status_code == 404


def test_an_item_keeps_the_content_that_it_was_stored_with(
    http: httpx2.Client, service: FakeService, tokenizer: Tokenizer
) -> None:
    create(http, input=[{**USER, "id": "msg-1"}])
    create(http, input=[{**USER, "id": "msg-1", "content": "Another text"}])
    create(http, input=[{"type": "item_reference", "id": "msg-1"}])
    assert "Another text" not in rendered(tokenizer, service)


def test_another_owner_s_responses_and_items_are_not_found() -> None:
    body = ResponsesRequest.model_validate({"input": [{**USER, "id": "msg-1"}]})
    response = ResponseObject(
        id="resp-1", created_at=0, model="m", output=[OutputMessage(id="msg-2", content=[OutputText(text="a")])]
    )
    store = response_store.ResponseStore()
    store.put(response_store.StoredResponse.of("mine", body, [], response))
    named = [
        ResponsesRequest.model_validate({"input": [{"type": "item_reference", "id": id}]}) for id in ("msg-1", "msg-2")
    ]
    for ask in (
        *(partial(store.resolve, each) for each in named),
        partial(store.history, "resp-1"),
        partial(store.input_items, "resp-1", limit=1, after=None, order="asc"),
        partial(store.get, "resp-1"),
        partial(store.delete, "resp-1"),
    ):
        for owner in ("other", None):
            with pytest.raises(HttpError) as refused:
                ask(owner)
            assert refused.value.status == 404
        ask("mine")


def test_what_is_not_to_be_stored_is_not(http: httpx2.Client) -> None:
    answer = create(http, input="One", store=False)
    assert answer["store"] is False and http.get(f"{PATH}/{answer['id']}").status_code == 404


def test_the_oldest_responses_give_way(http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_STORED", 2)
    ids = [create(http, input="a")["id"] for _ in range(4)]
    assert [http.get(f"{PATH}/{id}").status_code for id in ids] == [404, 404, 200, 200]
    monkeypatch.setattr(response_store, "MAX_STORED", 1024)
    monkeypatch.setattr(response_store, "MAX_STORED_BYTES", 10_000)
    ids = [create(http, input="a" * 1000)["id"] for _ in range(4)]
    assert [http.get(f"{PATH}/{id}").status_code for id in ids[::3]] == [404, 200]
    unkept = create(http, input="a", text={"format": {"type": "text", "description": "a" * 10_000}})["id"]
    assert [http.get(f"{PATH}/{id}").status_code for id in (unkept, ids[3])] == [404, 200]


TEXT = "é" * 20_000
MUCH: list[dict[str, Any]] = [
    {"input": TEXT},
    {"input": "a", "instructions": TEXT},
    {"input": "a", "tools": [{"type": "function", "name": "f", "description": TEXT, "parameters": {"a": [1] * 1000}}]},
    {"input": "a", "tools": [{"type": "function", "name": "f", "unknown": [[]] * 5_000}]},
    {"input": "a", "text": {"format": {"type": "text", "description": TEXT}, "unknown": {TEXT: TEXT}}},
    {"input": [{"role": "user", "content": "a"}] * 60},
    {"input": [{"role": "user", "content": "a", "id": f"é{n:<255}"} for n in range(50)]},
    {"input": [{"type": "function_call", "call_id": TEXT, "name": "f", "arguments": TEXT}]},
    {"input": "a", "metadata": {str(n): "é" * 512 for n in range(16)}},
]


def held_by_a_store(fields: dict[str, Any]) -> int:
    """Return the memory that is freed with a store that was given 150 responses; other threads may free more."""
    response = ResponseObject(id="", created_at=0, model="m")
    told = {name: fields[name] for name in ("instructions", "tools", "text", "metadata") if name in fields}
    output = [OutputMessage(id="msg_1", content=[OutputText(text=TEXT)])]
    tracemalloc.start()
    try:
        store = response_store.ResponseStore()
        for n in range(150):
            body = ResponsesRequest.model_validate(json.loads(json.dumps(fields)))
            made = response.model_copy(update={**body.model_dump(include=set(told)), "id": f"resp-{n}"})
            made.output = output if n % 2 else []
            store.put(response_store.StoredResponse.of("key", body, [{"role": "user", "content": "a"}], made))
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        del store
        gc.collect()
        return before - tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("fields", MUCH, ids=lambda fields: next(reversed(fields)))
def test_stored_responses_take_no_more_memory_than_their_limit(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "MAX_STORED_BYTES", limit := 1 << 20)
    assert any(0.5 * limit < held_by_a_store(fields) <= limit for _ in range(3))
