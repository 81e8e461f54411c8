"""/v1/batches over a fake engine: objects, errors, the life of a batch, services that share a folder."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai.types
import pytest

from cluster.batches import input_lines, runner
from cluster.batches.runner import Post
from secateur.api_keys import ApiKey
from secateur.batches_api import BatchObject
from tests.support.fake_engine import Script
from tests.support.fake_service import ANSWER, FakeService, error_of, fake_service, wait_for
from workers.comm.ipc import Submit

Own = Callable[..., FakeService]
COMPLETIONS = "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    body = body or {"prompt": "a", "max_tokens": 3}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def upload(http: httpx2.Client, content: bytes, **fields: str) -> httpx2.Response:
    return http.post("/v1/files", data={"purpose": "batch", **fields}, files={"file": ("in.jsonl", content)})


def create(http: httpx2.Client, content: bytes, endpoint: str = COMPLETIONS, **more: Any) -> dict[str, Any]:
    id = upload(http, content).raise_for_status().json()["id"]
    body = {"input_file_id": id, "endpoint": endpoint, "completion_window": "24h", **more}
    response = http.post("/v1/batches", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def ended(http: httpx2.Client, id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while (batch := http.get(f"/v1/batches/{id}").raise_for_status().json())["status"] not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def content(http: httpx2.Client, id: str) -> list[dict[str, Any]]:
    text = http.get(f"/v1/files/{id}/content").raise_for_status().text
    assert text.endswith("\n")
    return [json.loads(each) for each in text.removesuffix("\n").split("\n")]


def change(folder: Path, statement: str, *values: Any) -> None:
    with sqlite3.connect(folder / "batches.sqlite3") as database:
        database.execute(statement, values)
    database.close()


def test_a_batch_answers_every_line_in_openais_form(api: httpx2.Client) -> None:
    wrong = line("wrong", prompt="a", temperature=-1)
    created = create(api, jsonl(*[line(f"é{n}") for n in range(20)], wrong), metadata={"a": "b"})
    assert created["object"] == "batch" and created["id"].startswith("batch_")
    assert (created["status"], created["errors"], created["output_file_id"]) == ("validating", None, None)
    assert created["expires_at"] == created["created_at"] + 24 * 3600 and created["metadata"] == {"a": "b"}
    batch = ended(api, created["id"])
    assert (batch["status"], batch["model"]) == ("completed", "fake-model")
    assert batch["request_counts"] == {"total": 21, "completed": 20, "failed": 1}
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
    assert batch["failed_at"] is batch["expired_at"] is batch["cancelling_at"] is batch["cancelled_at"] is None
    answers = content(api, batch["output_file_id"])
    assert [answer["custom_id"] for answer in answers] == [f"é{n}" for n in range(20)]
    for answer in answers:
        assert answer.keys() == {"id", "custom_id", "response", "error"} and answer["error"] is None
        assert answer["response"].keys() == {"status_code", "request_id", "body"}
        assert answer["response"]["status_code"] == 200 and answer["id"].startswith("batch_req_")
        assert ANSWER.startswith(answer["response"]["body"]["choices"][0]["text"])
    [failed] = content(api, batch["error_file_id"])
    assert (failed["custom_id"], failed["error"], failed["response"]["status_code"]) == ("wrong", None, 400)
    assert failed["response"]["body"]["error"]["param"] == "temperature"
    assert len({answer["id"] for answer in [*answers, failed]}) == 21
    made = api.get(f"/v1/files/{batch['output_file_id']}").json()
    assert made["id"].startswith("file-")
    assert (made["purpose"], made["filename"]) == ("batch_output", f"{batch['id']}_output.jsonl")
    assert api.get(f"/v1/files/{batch['error_file_id']}").json()["filename"] == f"{batch['id']}_error.jsonl"
    assert len(api.get(f"/v1/files/{made['id']}/content").content) == made["bytes"]
    [old] = [each for each in api.get("/v1/batches").json()["data"] if each["id"] == batch["id"]]
    assert openai.types.Batch.model_validate(batch, strict=True).request_counts.total == 21
    assert openai.types.FileObject.model_validate(made, strict=True).filename == made["filename"]
    assert old == batch and BatchObject.model_validate(batch).model_dump() == batch


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        (COMPLETIONS, {"prompt": "a"}, "text_completion"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "chat.completion"),
        ("/v1/responses", {"input": "a"}, "response"),
    ],
)
def test_every_endpoint_is_the_route_of_that_name(api: httpx2.Client, endpoint: str, body: Any, kind: str) -> None:
    batch = ended(api, create(api, jsonl(line("a", endpoint, **body)), endpoint)["id"])
    [answer] = content(api, batch["output_file_id"])
    assert answer["response"]["body"]["object"] == kind and batch["error_file_id"] is None


def test_ignored_fields_are_named_with_the_answer(api: httpx2.Client) -> None:
    batch = ended(api, create(api, jsonl(line("a", prompt="a", zeta=1)))["id"])
    [answer] = content(api, batch["output_file_id"])
    assert answer["response"]["headers"] == {"x-secateur-ignored": "zeta"}


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize("first", [b"", BOM + b"\n", BOM + b" \r\n", BOM])
def test_every_line_may_begin_with_a_byte_order_mark_and_be_blank_behind_it(api: httpx2.Client, first: bytes) -> None:
    text = first + jsonl(line("a")) + b"\r\n \n" + BOM + b"\n" + BOM + jsonl(line("b")).replace(b"\n", b"\r\n")
    batch = ended(api, create(api, text.removesuffix(b"\r\n"))["id"])
    assert batch["status"] == "completed", batch["errors"]
    assert [answer["custom_id"] for answer in content(api, batch["output_file_id"])] == ["a", "b"]
    assert [error["code"] for error in ended(api, create(api, BOM)["id"])["errors"]["data"]] == ["empty_file"]


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_the_limit_of_a_line_counts_neither_its_end_nor_its_byte_order_mark(
    api: httpx2.Client, monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    [text] = jsonl(line("a")).splitlines()
    monkeypatch.setattr(input_lines, "MAX_LINE_BYTES", len(text))
    for start in (b"", BOM):
        assert ended(api, create(api, start + text + end)["id"])["status"] == "completed"
        batch = ended(api, create(api, start + text.replace(b"{", b"{ ", 1) + end + b"\n{")["id"])
        problems = [(error["code"], error["line"]) for error in batch["errors"]["data"]]
        assert problems == [("invalid_request", 1), ("invalid_json_line", 2 + end.count(b"\n"))]


def test_a_line_of_16_mib_is_answered_however_its_numbers_are_written(api: httpx2.Client) -> None:
    begin, end = jsonl(line("a", prompt="a", max_tokens=3)).removesuffix(b"}}\n") + b',"x":[', b"1]}}"
    numbers = b"1e15," * ((input_lines.MAX_LINE_BYTES - len(begin) - len(end)) // 5)
    text = begin + numbers + end
    batch = ended(api, create(api, text + b" " * (input_lines.MAX_LINE_BYTES - len(text)) + b"\n")["id"])
    assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}, batch["errors"]


def test_lines_are_nested_as_deep_as_requests_or_their_batch_names_them(api: httpx2.Client) -> None:
    def nested(levels: int) -> bytes:
        return b"[" * levels + b"]" * levels

    lines = [jsonl(line("a", prompt="a", x=0)).replace(b"0", nested(levels)) for levels in (200, 201, 700, 970, 3000)]
    assert ended(api, create(api, lines[0])["id"])["request_counts"]["completed"] == 1
    batch = ended(api, create(api, b"".join(lines))["id"])
    found = [(error["line"], error["code"]) for error in batch["errors"]["data"]]
    assert found == [(number, "invalid_json_line") for number in (2, 3, 4, 5)]


def test_texts_reach_the_route_as_they_are(api: httpx2.Client, batching: FakeService, tokenizer: Any) -> None:
    text = jsonl(line("good", prompt="木 é \u2028", max_tokens=3), line("half", prompt="\ud800"))
    before = len(batching.engine.submitted)
    batch = ended(api, create(api, text)["id"])
    [submitted] = batching.engine.submitted[before:]
    assert tokenizer.decode(submitted.prompt) == "木 é \u2028"
    [failed] = content(api, batch["error_file_id"])
    assert failed["custom_id"] == "half" and failed["response"]["status_code"] == 400


def test_wrong_lines_are_listed_by_number_and_nothing_runs(api: httpx2.Client, batching: FakeService) -> None:
    good = line("good")
    wrong: list[tuple[Any, str, str | None]] = [
        (b"{", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (
            b'{"custom_id": "n", "method": "POST", "url": "/v1/completions", "body": {"n": NaN}}',
            "invalid_json_line",
            None,
        ),
        (b"\xff", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (good, "duplicate_custom_id", "custom_id"),
        ({**good, "custom_id": 5}, "invalid_type", "custom_id"),
        ({**good, "custom_id": "\ud800"}, "invalid_type", "custom_id"),
        ({**good, "custom_id": "x" * 513}, "invalid_type", "custom_id"),
        ({"method": "POST", "url": COMPLETIONS, "body": {}}, "missing_required_parameter", "custom_id"),
        ({**line("m"), "method": "GET"}, "invalid_method", "method"),
        (line("u", "/v1/chat/completions"), "url_mismatch", "url"),
        ({**line("b"), "body": []}, "invalid_type", "body"),
        (line("s", prompt="a", stream=True), "invalid_request", "body.stream"),
        (line("o", prompt="a", model="other"), "model_not_found", "body.model"),
        ({**line("k"), "extra": 1}, "unknown_parameter", "extra"),
        ({**line("l"), "\ud800": 1}, "unknown_parameter", "\\ud800"),
        ({**line("v"), "k" * 100_000: 1}, "unknown_parameter", "k" * 512),
        (line("w", "/" * 100_000), "url_mismatch", "url"),
    ]
    before = len(batching.engine.submitted)
    text = jsonl(good) + b"".join(
        (each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each, *_ in wrong
    )
    batch = ended(api, create(api, text)["id"])
    assert batch["status"] == "failed" and batch["failed_at"] and batch["errors"]["object"] == "list"
    found = [(error["line"], error["code"], error["param"]) for error in batch["errors"]["data"]]
    assert found == [(number, code, param) for number, (_, code, param) in enumerate(wrong, start=2)]
    assert all(10 < len(error["message"]) < 1000 for error in batch["errors"]["data"])
    assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert batch["output_file_id"] is batch["error_file_id"] is None and len(batching.engine.submitted) == before


def test_files_without_requests_with_too_many_and_with_too_long_lines_fail(
    api: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def codes(content: bytes) -> list[tuple[str, int | None]]:
        batch = ended(api, create(api, content)["id"])
        return [(error["code"], error["line"]) for error in batch["errors"]["data"]]

    assert codes(b"\n \n") == [("empty_file", None)]
    assert codes(b"{\n" * 300)[99:] == [("invalid_json_line", 100), ("too_many_errors", None)]
    monkeypatch.setattr(input_lines, "MAX_LINES", 2)
    assert codes(jsonl(*map(line, "abcd"))) == [("too_many_tasks", 3)]
    monkeypatch.setattr(input_lines, "MAX_LINE_BYTES", 200)
    assert codes(jsonl(line("a"), line("b", prompt="x" * 500), line("a"))) == [
        ("invalid_request", 2),
        ("too_many_tasks", 3),
    ]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"endpoint": COMPLETIONS, "completion_window": "24h"}, "input_file_id", "required"),
        ({"endpoint": "/v1/embeddings"}, "endpoint", "/v1/completions"),
        ({"completion_window": "1h"}, "completion_window", "24h"),
        ({"metadata": {"a": 1}}, "metadata", "string"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "16"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after", "3600"),
    ],
)
def test_a_wrong_batch_gets_an_error_that_names_the_field(
    api: httpx2.Client, body: Any, param: str, words: str
) -> None:
    valid = {"input_file_id": "file-a", "endpoint": COMPLETIONS, "completion_window": "24h"}
    response = api.post("/v1/batches", json=body if "endpoint" in body and len(body) == 2 else valid | body)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param) and words in error["message"]


def test_what_does_not_exist_is_not_found(api: httpx2.Client) -> None:
    batch = {"input_file_id": "file-x", "endpoint": COMPLETIONS, "completion_window": "24h"}
    for method, path, param in (
        ("GET", "/v1/files/file-x", "id"),
        ("GET", "/v1/files/file-x/content", "id"),
        ("DELETE", "/v1/files/file-x", "id"),
        ("GET", "/v1/files?after=file-x", "after"),
        ("GET", "/v1/batches/batch_x", "id"),
        ("POST", "/v1/batches/batch_x/cancel", "id"),
        ("GET", "/v1/batches?after=batch_x", "after"),
        ("POST", "/v1/batches", "input_file_id"),
    ):
        response = api.request(method, path, json=batch if method == "POST" else None)
        assert (response.status_code, error_of(response)["param"]) == (404, param), path
        assert "_x" in error_of(response)["message"] or "file-x" in error_of(response)["message"]


def test_fields_of_a_batch_without_effect_are_named(api: httpx2.Client) -> None:
    id = upload(api, jsonl(line("a"))).json()["id"]
    body = {"input_file_id": id, "endpoint": COMPLETIONS, "completion_window": "24h", "priority": 1, "é\n": 2}
    response = api.post("/v1/batches", json=body).raise_for_status()
    assert response.headers["x-secateur-ignored"] == "priority, ??"


def test_batches_are_listed_by_pages_the_newest_first(own: Own, tmp_path: Path) -> None:
    with own(batch_dir=tmp_path).http() as http:
        ids = [create(http, jsonl(line("a")))["id"] for _ in range(3)]
        for id in ids:
            ended(http, id)
        page = http.get("/v1/batches?limit=2").json()
        assert [batch["id"] for batch in page["data"]] == [ids[2], ids[1]] and page["has_more"] is True
        assert (page["first_id"], page["last_id"], page["object"]) == (ids[2], ids[1], "list")
        page = http.get(f"/v1/batches?after={ids[1]}").json()
        assert [batch["id"] for batch in page["data"]] == [ids[0]] and page["has_more"] is False


def test_without_a_folder_the_routes_say_how_to_get_one(http: httpx2.Client) -> None:
    for method, path in (("GET", "/v1/files"), ("GET", "/v1/batches"), ("POST", "/v1/batches/b/cancel")):
        response = http.request(method, path)
        error = error_of(response)
        assert (response.status_code, error["code"]) == (404, "batches_not_enabled")
        assert "--batch-dir DIR" in error["message"]
    assert upload(http, b"a").status_code == 404


@pytest.mark.parametrize("keys", [("one", "two"), ("clà", "clÅ")])
def test_files_and_batches_belong_to_their_key(own: Own, tmp_path: Path, keys: tuple[str, str]) -> None:
    valid = tuple(ApiKey(key=key) for key in keys)
    running = own(batch_dir=tmp_path, api_keys=lambda: valid)
    one, two = ({"Authorization": f"Bearer {key}".encode()} for key in keys)
    with running.http(headers=one) as mine, running.http(headers=two) as other:
        batch = ended(mine, create(mine, jsonl(line("a")))["id"])
        assert batch["request_counts"]["completed"] == 1
        for path in (
            f"/v1/batches/{batch['id']}",
            f"/v1/files/{batch['input_file_id']}",
            f"/v1/files/{batch['output_file_id']}/content",
        ):
            assert (mine.get(path).status_code, other.get(path).status_code) == (200, 404)
        assert other.delete(f"/v1/files/{batch['input_file_id']}").status_code == 404
        assert other.get("/v1/files").json()["data"] == other.get("/v1/batches").json()["data"] == []
        assert other.get(f"/v1/files?after={batch['input_file_id']}").status_code == 404
        body = {"input_file_id": batch["input_file_id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        assert other.post("/v1/batches", json=body).status_code == 404
        assert mine.get("/v1/files", headers={"Authorization": f"bearer  {keys[0]}".encode()}).json()["data"]


def test_a_cancelled_batch_keeps_its_answers(own: Own, tmp_path: Path, script: Script) -> None:
    def hold(submit: Submit) -> list[list[int]]:
        if len(running.engine.submitted) == 10:
            running.engine.hold.set()
        return script(submit)

    running = own(batch_dir=tmp_path, script=hold)
    with running.http() as http:
        ids = [f"r{n}" for n in range(200)]
        batch = create(http, jsonl(*[line(id, prompt="a") for id in ids]))
        wait_for(lambda: http.get(f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"] > 5)
        wait_for(running.engine.hold.is_set)
        held = http.delete(f"/v1/files/{batch['input_file_id']}")
        error = error_of(held)
        assert (held.status_code, error["code"], error["param"]) == (409, "file_in_use", "id")
        assert batch["id"] in error["message"]
        cancelling = http.post(f"/v1/batches/{batch['id']}/cancel").raise_for_status().json()
        assert cancelling["status"] == "cancelling" and cancelling["cancelling_at"]
        done = ended(http, batch["id"])
        assert done["status"] == "cancelled" and done["cancelled_at"] and done["completed_at"] is None
        wait_for(lambda: running.client.num_pending == 0)  # those that ran are aborted
        running.engine.hold.clear()
        good, failed = content(http, done["output_file_id"]), content(http, done["error_file_id"])
        assert len(good) == done["request_counts"]["completed"] < 200 == done["request_counts"]["total"]
        assert {answer["error"]["code"] for answer in failed} == {"batch_cancelled"}
        assert sorted(answer["custom_id"] for answer in good + failed) == sorted(ids)
        again = http.post(f"/v1/batches/{batch['id']}/cancel")
        error = error_of(again)
        assert (again.status_code, error["code"]) == (409, "batch_not_cancellable") and "cancelled" in error["message"]
        assert http.delete(f"/v1/files/{batch['input_file_id']}").status_code == 200


def test_a_batch_expires(own: Own, tmp_path: Path) -> None:
    running = own(batch_dir=tmp_path)
    with running.http() as http:
        running.engine.hold.set()
        batch = create(
            http, jsonl(*map(line, "abcdefgh")), output_expires_after={"anchor": "created_at", "seconds": 3600}
        )
        wait_for(lambda: running.client.num_pending == 3)
        change(tmp_path, "UPDATE batches SET expires_at = 0")
        done = ended(http, batch["id"])
        assert (done["status"], done["completed_at"], done["output_file_id"]) == ("expired", None, None)
        assert done["expired_at"] and done["request_counts"] == {"total": 8, "completed": 0, "failed": 0}
        failed = content(http, done["error_file_id"])
        assert [(each["custom_id"], each["response"], each["error"]["code"]) for each in failed] == [
            (id, None, "batch_expired") for id in "abcdefgh"
        ]
        file = http.get(f"/v1/files/{done['error_file_id']}").json()
        assert file["expires_at"] == file["created_at"] + 3600
        change(tmp_path, "UPDATE files SET expires_at = ? WHERE id = ?", 5, file["id"])
        assert http.get(f"/v1/files/{file['id']}").status_code == 404


def clients(http: httpx2.Client) -> float:
    """Return how many requests of clients the metrics tell of."""
    [found] = re.findall(r"^secateur_client_requests_running{.*} (.*)$", http.get("/metrics").text, re.MULTILINE)
    return float(found)


def test_interactive_requests_find_room_beside_a_batch(own: Own, tmp_path: Path) -> None:
    running = own(batch_dir=tmp_path, engine={"step_s": 0.005})
    most = num_asked = 0
    with running.http() as http:
        batch = create(http, jsonl(*[line(str(n)) for n in range(120)]))
        while http.get(f"/v1/batches/{batch['id']}").json()["status"] not in ENDED:
            assert clients(http) == 0
            most = max(most, running.client.num_pending)
            assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200
            num_asked += 1
        assert 1 < most <= 4 == running.service.config.max_num_seqs
        metrics = http.get("/metrics").text
        assert (
            'secateur_batch_lines_total{model_name="fake-model",replica="fake-replica",result="completed"} 120.0'
            in metrics
        )
        [answered] = re.findall(r'^secateur_http_requests_total{.*"/v1/completions".*} (.*)$', metrics, re.MULTILINE)
        assert float(answered) == num_asked, "a batch's lines are no requests of clients"


def test_too_many_requests_are_tried_again_and_not_recorded(own: Own, tmp_path: Path) -> None:
    running = own(batch_dir=tmp_path, max_pending=1)
    with running.http() as http:
        batch = ended(http, create(http, jsonl(*[line(str(n)) for n in range(12)]))["id"])
        assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
        rejected = [each for each in http.get("/metrics").text.splitlines() if "requests_rejected_total{" in each]
        assert [each.split()[-1] for each in rejected] == ["0.0"]


def test_what_an_engine_was_lost_with_is_answered_by_another_service_exactly_once(own: Own, tmp_path: Path) -> None:
    dying, other = own(batch_dir=tmp_path), own(batch_dir=tmp_path)
    dying.engine.hold.set()
    other.engine.hold.set()
    with dying.http() as http:
        batch = create(http, jsonl(*[line(str(n)) for n in range(50)]))
        wait_for(lambda: dying.client.num_pending + other.client.num_pending == 3)
        assert not dying.client.num_pending or not other.client.num_pending, "a batch has one worker"
        if other.client.num_pending:
            dying, other = other, dying
        dying.fail("a rank was killed")
        other.engine.hold.clear()
        done = ended(http, batch["id"])
        assert done["request_counts"] == {"total": 50, "completed": 50, "failed": 0}
        answers = content(http, done["output_file_id"])
        assert [answer["custom_id"] for answer in answers] == [str(n) for n in range(50)]


@contextmanager
def posting(running: FakeService, post: Post) -> Iterator[None]:
    """Let a service's runner send its lines to this function."""
    assert running.service.batches is not None
    batch_runner = running.service.batches._runner
    assert batch_runner is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_runner, "_backend", batch_runner._backend._replace(post=post))
        yield


@pytest.mark.parametrize(
    ("failure", "code"), [(None, "request_lost"), (RuntimeError("a bug"), "server_error")], ids=["lost", "raised"]
)
def test_a_line_that_gets_no_answer_gets_an_error(
    own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception | None, code: str
) -> None:
    """Engines are lost with it again and again, or the route raises."""
    monkeypatch.setattr(runner, "RETRY_S", 0.01)
    running = own(batch_dir=tmp_path)

    async def lost(*_: Any, **__: Any) -> Any:
        if failure is not None:
            raise failure
        return httpx2.Response(503, text="{}")

    with posting(running, lost), running.http() as http:
        batch = ended(http, create(http, jsonl(line("a"), line("b")))["id"])
        assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
        assert [each["error"]["code"] for each in content(http, batch["error_file_id"])] == [code] * 2


@pytest.mark.parametrize(("headers", "retry_s"), [({"retry-after": "0"}, 3600.0), ({}, 0.01)], ids=["told", "untold"])
def test_a_line_that_is_refused_is_sent_again_after_the_time_that_the_refusal_names(
    own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], retry_s: float
) -> None:
    monkeypatch.setattr(runner, "RETRY_S", retry_s)
    running = own(batch_dir=tmp_path)
    refusals = [httpx2.Response(429, headers=headers) for _ in range(3)]

    async def busy(*_: Any, **__: Any) -> httpx2.Response:
        return refusals.pop() if refusals else httpx2.Response(200, text="{}")

    with posting(running, busy), running.http() as http:
        batch = ended(http, create(http, jsonl(line("a")))["id"])
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0} and not refusals


@pytest.mark.parametrize(
    ("body", "num_choices"),
    [
        ({"prompt": "ab"}, 1),
        ({"prompt": [5, 6]}, 1),
        ({"prompt": ["ab", "c"], "n": 3}, 6),
        ({"prompt": [[5], [6, 7]]}, 2),
        ({"messages": [{}, {}, {}], "n": 2}, 2),
        ({"prompt": [], "n": -1}, 1),
        ({"n": True}, 1),
    ],
)
def test_a_line_takes_the_place_of_all_its_answers(body: dict[str, Any], num_choices: int) -> None:
    assert runner.choices_of(body) == num_choices


def test_the_next_batch_begins_when_all_lines_of_the_first_have_begun(
    own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And at once: a runner that looked for work now and then, or had to try again, would look in an hour."""
    monkeypatch.setattr(runner, "POLL_S", 3600.0)
    monkeypatch.setattr(runner, "RETRY_S", 3600.0)
    running = own(batch_dir=tmp_path)
    with running.http() as http:
        running.engine.hold.set()
        ids = [create(http, jsonl(line("a")))["id"] for _ in range(2)]
        wait_for(lambda: running.client.num_pending == 2)
        running.engine.hold.clear()
        assert [ended(http, id)["request_counts"]["completed"] for id in ids] == [1, 1]


@pytest.mark.parametrize("left", [None, b"", b"{"])
def test_a_batch_whose_input_cannot_be_read_again_fails(own: Own, tmp_path: Path, left: bytes | None) -> None:
    running = own(batch_dir=tmp_path)
    with running.http() as http:
        running.engine.hold.set()
        batch = create(http, jsonl(*map(line, "abcdefgh")))
        wait_for(lambda: running.client.num_pending == 3)
        path = tmp_path / "files" / batch["input_file_id"]
        path.unlink()
        if left is not None:
            path.write_bytes(left)
        change(tmp_path, "UPDATE batches SET worker = NULL")
        failed = ended(http, batch["id"])
        assert (failed["status"], failed["errors"]["data"][0]["code"]) == ("failed", "missing_file")


def test_a_service_that_stops_leaves_its_work_to_the_next(
    own: Own, tmp_path: Path, tokenizer: Any, script: Script
) -> None:
    def hold(submit: Submit) -> list[list[int]]:
        if len(first.engine.submitted) == 10:
            first.engine.hold.set()
        return script(submit)

    folder = tmp_path / "batches"
    (tmp_path / "a").mkdir()
    with fake_service(tokenizer, tmp_path / "a", hold, batch_dir=folder) as first, first.http() as http:
        batch = create(http, jsonl(*[line(str(n)) for n in range(300)]))
        wait_for(lambda: http.get(f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"] > 5)
    with sqlite3.connect(folder / "batches.sqlite3") as database:
        assert database.execute("SELECT count(*) FROM batches WHERE worker IS NOT NULL").fetchone() == (0,)
        assert database.execute("SELECT max(num_losses) FROM lines").fetchone() == (0,)
        [before] = database.execute("SELECT count(*) FROM lines").fetchone()
    database.close()
    assert 5 < before < 300
    with own(batch_dir=folder).http() as http:
        done = ended(http, batch["id"])
        assert done["request_counts"] == {"total": 300, "completed": 300, "failed": 0}
        assert [answer["custom_id"] for answer in content(http, done["output_file_id"])] == [str(n) for n in range(300)]
