"""Two API keys on one service: what one of them stores, the other can neither read nor use nor delete."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

from tests.support.fake_service import error_of, wait_for
from tests.support.service_process import service_process

RESPONSES, BATCHES = "/v1/responses", "/v1/batches"
SECRET, MINE = "the secret of key one", "a text of key two"
END_S = 300.0


class Tenants(NamedTuple):
    pid: int
    one: httpx2.Client
    two: httpx2.Client
    keys: Path


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    folder = tmp_path_factory.mktemp("tenants")
    keys = folder / "keys"
    keys.write_text("key-1 name=team\nkey-2 name=team\n")
    settings = {"api_key_file": str(keys), "batch_dir": str(folder / "batches")}
    with ExitStack() as stack:
        process, url = stack.enter_context(service_process(folder / "service", **settings))
        headers = [{"Authorization": f"Bearer key-{n}"} for n in (1, 2)]
        clients = [stack.enter_context(httpx2.Client(base_url=url, timeout=120, headers=each)) for each in headers]
        yield Tenants(process.pid, *clients, keys)


def ask(http: httpx2.Client, **body: Any) -> httpx2.Response:
    return http.post(RESPONSES, json={"max_output_tokens": 1, "temperature": 0, **body})


def message(text: str) -> list[dict[str, str]]:
    return [{"type": "message", "id": "msg_1", "role": "user", "content": text}]


def reference(id: str) -> list[dict[str, str]]:
    return [{"type": "item_reference", "id": id}]


def run_batch(http: httpx2.Client, *bodies: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a batch of responses; return it and its answers, in the order of the bodies."""
    line = {"method": "POST", "url": RESPONSES}
    lines = [
        json.dumps({"custom_id": f"{n}", **line, "body": {"max_output_tokens": 1, **body}})
        for n, body in enumerate(bodies)
    ]
    form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", "\n".join(lines).encode())}}
    file = http.post("/v1/files", **form).raise_for_status().json()
    batch = http.post(BATCHES, json=batch_of(file["id"])).raise_for_status().json()
    wait_for(lambda: http.get(f"{BATCHES}/{batch['id']}").json()["status"] == "completed", END_S)
    batch = http.get(f"{BATCHES}/{batch['id']}").json()
    files = [id for id in (batch["output_file_id"], batch["error_file_id"]) if id]
    texts = [http.get(f"/v1/files/{id}/content").raise_for_status().text for id in files]
    answers = [json.loads(line) for text in texts for line in text.splitlines()]
    return batch, [answer["response"] for answer in sorted(answers, key=lambda answer: int(answer["custom_id"]))]


def batch_of(file: str) -> dict[str, str]:
    return {"input_file_id": file, "endpoint": RESPONSES, "completion_window": "24h"}


def items_of(http: httpx2.Client, response: str) -> list[str]:
    listed = http.get(f"{RESPONSES}/{response}/input_items").raise_for_status().json()["data"]
    return [item["content"][0]["text"] for item in listed]


def test_every_route_that_takes_a_stored_id_keeps_two_keys_apart(tenants: Tenants) -> None:
    _, one, two, _ = tenants
    stored = ask(one, input=message(SECRET)).raise_for_status().json()
    batch, [answered] = run_batch(one, {"input": message(SECRET)})
    ids = {
        "response": [stored["id"], answered["body"]["id"]],
        "item": ["msg_1", stored["output"][0]["id"]],
        "file": [batch["input_file_id"], batch["output_file_id"]],
        "batch": [batch["id"]],
    }
    walk: list[tuple[str, str, str, Any]] = [
        ("response", "GET", RESPONSES + "/{id}", None),
        ("response", "DELETE", RESPONSES + "/{id}", None),
        ("response", "POST", RESPONSES + "/{id}/cancel", None),
        ("response", "GET", RESPONSES + "/{id}/input_items", None),
        ("response", "POST", RESPONSES, {"input": "a", "previous_response_id": "{id}"}),
        ("item", "POST", RESPONSES, {"input": reference("{id}")}),
        ("file", "GET", "/v1/files/{id}", None),
        ("file", "DELETE", "/v1/files/{id}", None),
        ("file", "GET", "/v1/files/{id}/content", None),
        ("file", "GET", "/v1/files?after={id}", None),
        ("file", "POST", BATCHES, batch_of("{id}")),
        ("batch", "GET", BATCHES + "/{id}", None),
        ("batch", "POST", BATCHES + "/{id}/cancel", None),
        ("batch", "GET", BATCHES + "?after={id}", None),
    ]
    routes = {
        (method.upper(), path)
        for path, methods in one.get("/openapi.json").json()["paths"].items()
        for method in methods
        if "{" in path and "{model}" not in path
    }
    assert routes <= {(method, path) for _, method, path, _ in walk}, "a route with an id is not walked"

    def sent(http: httpx2.Client, method: str, path: str, body: Any, id: str) -> httpx2.Response:
        content = None if body is None else json.loads(json.dumps(body).replace("{id}", id))
        return http.request(method, path.replace("{id}", id), json=content)

    for kind, method, path, body in walk:
        for id in ids[kind]:
            strange, unknown = sent(two, method, path, body, id), sent(two, method, path, body, "nothing-0")
            assert strange.status_code == unknown.status_code == 404, (method, path, strange.text)
            assert strange.text.replace(id, "nothing-0") == unknown.text, "the answer tells that there is one"
    for path in ("/v1/files", BATCHES):
        assert two.get(path).json()["data"] == []
    for kind, method, path, body in walk:  # all is still there for its own key
        if method == "GET":
            assert all(sent(one, method, path, body, id).status_code == 200 for id in ids[kind]), path
    assert ask(one, input="a", previous_response_id=stored["id"]).status_code == 200
    assert items_of(one, ask(one, input=reference("msg_1")).json()["id"]) == [SECRET]


def test_both_keys_may_give_an_item_the_same_id(tenants: Tenants) -> None:
    ask(tenants.one, input=message(SECRET)).raise_for_status()
    assert ask(tenants.two, input=reference("msg_1")).status_code == 404
    ask(tenants.two, input=message(MINE)).raise_for_status()
    assert items_of(tenants.two, ask(tenants.two, input=reference("msg_1")).json()["id"]) == [MINE]
    assert items_of(tenants.one, ask(tenants.one, input=reference("msg_1")).json()["id"]) == [SECRET]


def test_the_lines_of_a_batch_are_requests_of_its_key(tenants: Tenants) -> None:
    stored = ask(tenants.one, input=[{**message(SECRET)[0], "id": "msg_2"}]).raise_for_status().json()
    asked = [{"input": reference("msg_2")}, {"input": "a", "previous_response_id": stored["id"]}]
    _, answers = run_batch(tenants.two, *asked)
    assert [answer["status_code"] for answer in answers] == [404, 404]
    _, answers = run_batch(tenants.one, *asked)
    assert [answer["status_code"] for answer in answers] == [200, 200]
    assert items_of(tenants.one, answers[0]["body"]["id"]) == [SECRET]


def test_what_a_key_stored_stays_its_own_under_another_name(tenants: Tenants) -> None:
    _, one, two, keys = tenants
    stored = ask(one, input="a").raise_for_status().json()
    file = one.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"{}\n")}).raise_for_status().json()
    keys.write_text("key-1 name=renamed\nkey-2\n")
    for path in (f"{RESPONSES}/{stored['id']}", f"/v1/files/{file['id']}"):
        assert one.get(path).status_code == 200
        assert two.get(path).status_code == 404 and error_of(two.get(path))["type"]


def resident_mib(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def test_large_fields_of_stored_responses_are_counted_and_metadata_has_openais_limits(tenants: Tenants) -> None:
    refused = ask(tenants.one, input="a", metadata={"k": "v" * (8 << 20)})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "metadata")
    text = {"format": {"type": "text", "description": "d" * (8 << 20)}}
    ids = [ask(tenants.one, input="a", text=text).raise_for_status().json()["id"] for _ in range(4)]
    before = resident_mib(tenants.pid)
    ids += [ask(tenants.one, input="a", text=text).raise_for_status().json()["id"] for _ in range(20)]
    assert resident_mib(tenants.pid) - before < 112, "20 of 8 MiB would be 160"
    kept = [tenants.one.get(f"{RESPONSES}/{id}").status_code for id in ids]
    assert kept == [404] * 17 + [200] * 7, "64 MiB are kept"
