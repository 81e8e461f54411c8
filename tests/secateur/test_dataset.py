"""Rows of a table are answered in their order; the recipe of the guide runs on a local Ray."""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from secateur import dataset
from secateur.dataset import COLUMNS, AnswerRows
from secateur.endpoints import EndpointPool
from secateur.errors import APIConnectionError, AuthenticationError, ConfigError
from secateur.responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletionResponse,
    CompletionChoice,
    CompletionResponse,
    Usage,
)

ROOT = Path(__file__).parents[2]


def answer_to(body: dict, text: str) -> str:
    """Return the JSON of a completion or chat with this text and three tokens."""
    if "prompt" in body:
        choices = [CompletionChoice(text=text, finish_reason="stop")]
        return CompletionResponse(model="m", choices=choices, usage=Usage.of(2, 3)).model_dump_json()
    choices = [ChatChoice(message=AssistantMessage(content=text), finish_reason="length")]
    return ChatCompletionResponse(model="m", choices=choices, usage=Usage.of(2, 3)).model_dump_json()


@pytest.fixture
def service(monkeypatch):
    """Answers with the prompt in capitals; "bad" is refused, "denied" has no access, "gone" breaks off."""
    bodies = []

    async def answer(request: httpx2.Request) -> httpx2.Response:
        body = json.loads(request.content)
        bodies.append(body)
        text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        if text == "gone":
            raise httpx2.ConnectError("refused")
        if status := {"bad": 400, "denied": 401}.get(text):
            return httpx2.Response(status, json={"error": {"message": "no", "code": "c"}})
        return httpx2.Response(200, text=answer_to(body, text.upper()))

    def pool(urls, **settings):
        return EndpointPool(urls, transport=httpx2.MockTransport(answer), **settings)

    monkeypatch.setattr(dataset, "EndpointPool", pool)
    return bodies


def test_answers_stand_beside_their_rows(service):
    rows = AnswerRows("http://a", max_tokens=4, seed=1)({"id": [1, 2, 3], "prompt": ["x", "bad", "y"]})
    assert rows["id"] == [1, 2, 3] and rows["prompt"] == ["x", "bad", "y"]
    assert rows["text"] == ["X", None, "Y"] and rows["finish_reason"] == ["stop", None, "stop"]
    assert rows["prompt_tokens"] == [2, None, 2] and rows["completion_tokens"] == [3, None, 3]
    assert [error and "no" in error for error in rows["error"]] == [None, True, None]
    assert all((body["max_tokens"], body["seed"]) == (4, 1) for body in service)


def test_conversations_and_single_messages_are_chats(service):
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    rows = AnswerRows()({"messages": [turns, "hi"]})
    assert rows["text"] == ["HELLO", "HI"] and rows["finish_reason"] == ["length", "length"]
    assert [len(body["messages"]) for body in service] == [2, 1]


def test_an_empty_batch_has_all_columns():
    assert AnswerRows()({"prompt": []}) == {"prompt": [], **{column: [] for column in COLUMNS}}


@pytest.mark.parametrize("batch", [{}, {"text": ["x"]}, {"prompt": ["x"], "messages": ["y"]}])
def test_a_table_without_questions_is_an_error(batch):
    with pytest.raises(ConfigError, match="needs a column 'prompt' or 'messages'"):
        AnswerRows()(batch)


@pytest.mark.parametrize(("text", "error"), [("denied", AuthenticationError), ("gone", APIConnectionError)])
def test_what_every_row_would_meet_ends_the_batch(text, error, service):
    with pytest.raises(error):
        AnswerRows(retries=0, outage_timeout=0)({"prompt": ["x", text]})


@pytest.fixture
def wire() -> Iterator[tuple[str, Counter[str]]]:
    """A service on a real socket: its address, and how often each prompt came."""
    answered: Counter[str] = Counter()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answered[body["prompt"]] += 1
            data = answer_to(body, "x").encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", answered
    server.shutdown()
    server.server_close()


@pytest.mark.serve
@pytest.mark.slow
def test_the_recipe_of_the_guide_runs_on_a_local_ray(tmp_path, wire):
    url, answered = wire
    guide = (ROOT / "docs/guides/batch.md").read_text()
    [code] = re.findall(r"```python\n(import ray\n.*?)```", guide, re.DOTALL)
    assert "http://127.0.0.1:8000" in code
    questions = [{"id": n, "prompt": f"q-{n}"} for n in range(150)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    start = "import ray; ray.init(num_cpus=2, include_dashboard=False)\n"
    done = subprocess.run(
        [sys.executable, "-c", start + code.replace("http://127.0.0.1:8000", url)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for file in (tmp_path / "answers").iterdir() for line in file.read_text().splitlines()]
    assert sorted(row["id"] for row in rows) == list(range(150))
    assert {(row["text"], row["completion_tokens"], row["error"]) for row in rows} == {("x", 3, None)}
    assert answered == {f"q-{n}": 1 for n in range(150)}
