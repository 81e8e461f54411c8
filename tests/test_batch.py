"""Batch files: checked whole before anything is sent, and every custom_id answered exactly once, whatever happens."""

import asyncio
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import httpx2
import pytest

from secateur.batch import BatchSummary, open_output, read_job, run_batch, run_batch_async
from secateur.client import AsyncClient
from secateur.errors import APIConnectionError, AuthenticationError, BatchError
from secateur.protocol import BatchOutputLine, CompletionChoice, CompletionResponse, ModelList, Usage

ROOT = Path(__file__).parent.parent
ANSWER = CompletionResponse(
    model="m", choices=[CompletionChoice(text="x", finish_reason="stop")], usage=Usage.of(2, 3)
).model_dump_json()
MODELS = ModelList().model_dump_json()


def line(custom_id: str, **fields) -> dict:
    body = {"prompt": custom_id, "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body, **fields}


def write(path: Path, *lines: dict | str) -> Path:
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in lines))
    return path


def read_output(path: Path) -> dict[str, BatchOutputLine]:
    lines = [BatchOutputLine.model_validate_json(text) for text in path.read_text().splitlines()]
    assert len({item.custom_id for item in lines}) == len(lines), "a custom_id is there twice"
    return {item.custom_id: item for item in lines}


class Service:
    """In-process service: `fails` maps a prompt to the status it gets. Counts what is in flight."""

    def __init__(self, fails: dict[str, int] | None = None) -> None:
        self.fails = fails or {}
        self.asked: list[str] = []
        self.request_ids: list[str] = []
        self.in_flight = self.most_in_flight = 0

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/models":
            return httpx2.Response(200, text=MODELS)
        prompt = json.loads(request.content)["prompt"]
        self.asked.append(prompt)
        self.request_ids.append(request.headers["x-request-id"])
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0.001)
        self.in_flight -= 1
        if status := self.fails.get(prompt):
            return httpx2.Response(status, json={"error": {"message": "no", "code": "bad"}})
        return httpx2.Response(200, text=ANSWER)

    def run(self, source: Path, output: Path, **settings) -> BatchSummary:
        client = AsyncClient(transport=httpx2.MockTransport(self), retries=0)
        return run_batch(source, output, client=client, progress=False, **settings)


@pytest.fixture
def source(tmp_path) -> Path:
    return write(tmp_path / "in.jsonl", *[line(f"q-{n}") for n in range(30)])


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "out.jsonl"


# -- the run ---------------------------------------------------------------------------------------------------------


def test_every_line_is_answered_once(source, output):
    summary = Service().run(source, output)
    assert read_output(output).keys() == {f"q-{n}" for n in range(30)}
    assert (summary.succeeded, summary.failed, summary.exit_code) == (30, 0, 0)
    assert (summary.prompt_tokens, summary.completion_tokens) == (60, 90)


def test_an_output_line_has_openais_shape(source, output):
    Service().run(source, output)
    first = json.loads(output.read_text().splitlines()[0])
    assert first.keys() == {"id", "custom_id", "response", "error"} and first["error"] is None
    assert first["response"]["status_code"] == 200
    assert first["response"]["body"]["choices"][0]["text"] == "x"
    assert first["response"]["request_id"].endswith(first["custom_id"])


@pytest.mark.parametrize("concurrency", [1, 4])
def test_concurrency_is_bounded_and_used(source, output, concurrency):
    service = Service()
    service.run(source, output, concurrency=concurrency)
    assert service.most_in_flight == concurrency


def test_request_ids_are_stable_and_fit_a_header(tmp_path, source, output):
    first, second = Service(), Service()
    first.run(source, output)
    second.run(source, tmp_path / "again.jsonl")
    assert sorted(first.request_ids) == sorted(second.request_ids)
    odd = Service()
    odd.run(write(tmp_path / "odd.jsonl", line("ein Lied\n für dich")), tmp_path / "odd-out.jsonl")
    assert odd.request_ids[0].isascii() and "\n" not in odd.request_ids[0]


def test_an_answer_is_in_the_file_before_the_next_question_is_asked(source, output):
    seen: list[int] = []

    class Watching(Service):
        async def __call__(self, request: httpx2.Request) -> httpx2.Response:
            seen.append(output.read_bytes().count(b"\n"))
            return await super().__call__(request)

    Watching().run(source, output, concurrency=1)
    assert seen == [0, *range(30)]  # the models, then line by line


def test_a_failed_line_is_written_with_its_error_and_fails_the_run(source, output):
    summary = Service({"q-3": 400, "q-5": 500}).run(source, output)
    failed = {key: item for key, item in read_output(output).items() if not item.succeeded}
    assert failed.keys() == {"q-3", "q-5"}
    assert failed["q-3"].error and failed["q-3"].error.code == "bad"
    assert failed["q-3"].response and failed["q-3"].response.status_code == 400
    assert (summary.failed, summary.exit_code) == (2, 1)


def test_a_run_tells_its_first_failure(source, output):
    summary = Service({"q-3": 400, "q-5": 500}).run(source, output, concurrency=1)
    assert str(summary).splitlines()[1:] == ["first failure: 'q-3': 400: no"]


def test_failed_lines_and_only_they_are_sent_again(source, output):
    Service({"q-3": 400}).run(source, output)
    again = Service()
    summary = again.run(source, output)
    assert again.asked == ["q-3"]
    assert (summary.resumed, summary.succeeded, summary.exit_code) == (29, 1, 0)
    assert len(read_output(output)) == 30 and all(item.succeeded for item in read_output(output).values())


def test_a_finished_job_sends_nothing(source, output):
    Service().run(source, output)
    before, idle = output.read_bytes(), Service()
    assert idle.run(source, output).resumed == 30
    assert idle.asked == [] and output.read_bytes() == before


def test_without_resume_everything_is_sent_again(source, output):
    Service().run(source, output)
    again = Service()
    assert again.run(source, output, resume=False).succeeded == 30
    assert len(again.asked) == 30 and len(read_output(output)) == 30


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_torn_last_line_is_dropped_and_sent_again(source, output, cut):
    Service().run(source, output)
    output.write_bytes(output.read_bytes()[:-cut])
    again = Service()
    again.run(source, output)
    assert len(again.asked) == (0 if cut == 1 else 1)  # without its newline alone, the line is whole
    assert len(read_output(output)) == 30


def test_a_torn_multibyte_character_is_no_obstacle(source, output):
    output.write_bytes('{"id": "é'.encode()[:-1])
    assert Service().run(source, output).succeeded == 30


def test_a_refused_key_ends_the_run_and_keeps_what_was_answered(source, output):
    with pytest.raises(AuthenticationError):
        Service({"q-9": 401}).run(source, output, concurrency=1)
    assert len(read_output(output)) == 9


def test_a_service_that_is_not_there_is_one_error(source, output):
    with pytest.raises(APIConnectionError):
        run_batch(source, output, base_url="http://127.0.0.1:9", retries=0)


async def test_a_caller_with_a_loop_awaits_the_run(source, output):
    client = AsyncClient(transport=httpx2.MockTransport(Service()))
    assert (await run_batch_async(source, output, client=client)).succeeded == 30


# -- what is refused before anything is sent -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: "),
        (json.dumps(line("b")).replace("4", "NaN"), "line 2: not JSON"),
        (line("b", body={"prompt": "half a \ud83c tree"}), "line 2: not JSON"),
        (line("a"), "line 2: custom_id 'a' is already on line 1"),
        (line(""), "line 2: custom_id: "),
        ({key: value for key, value in line("b").items() if key != "custom_id"}, "line 2: custom_id: is required"),
        (line("b", method="GET"), "line 2: method: must be 'POST' (got 'GET')"),
        (line("b", url="/v1/embeddings"), "line 2: url: must be"),
        (line("b", body={"prompt": "x", "stream": True}), "line 2: body.stream: "),
        (line("b", body=3), "line 2: body: "),
        (line("b", extra=1), "line 2: unknown key 'extra'"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_sent(tmp_path, output, bad, says):
    service = Service()
    with pytest.raises(BatchError) as caught:
        service.run(write(tmp_path / "in.jsonl", line("a"), bad), output)
    assert says in str(caught.value)
    assert service.asked == [] and not output.exists()


def test_all_bad_lines_are_counted_and_some_shown(tmp_path):
    with pytest.raises(BatchError, match="and 10 more"):
        read_job(write(tmp_path / "in.jsonl", *["{"] * 30))


def test_blank_lines_are_no_lines(tmp_path):
    assert read_job(write(tmp_path / "in.jsonl", line("a"), "", line("b"), "")).custom_ids == {"a", "b"}


def test_a_missing_or_empty_input_is_refused(tmp_path, output):
    with pytest.raises(BatchError, match="cannot read"):
        Service().run(tmp_path / "none.jsonl", output)
    with pytest.raises(BatchError, match="no requests"):
        Service().run(write(tmp_path / "in.jsonl"), output)


def test_the_input_cannot_be_the_output(source):
    with pytest.raises(BatchError, match="same file"):
        Service().run(source, source)
    assert len(source.read_text().splitlines()) == 30


def test_a_file_that_is_no_batch_output_is_left_alone(source, output):
    output.write_text("my thesis\nis here\n")
    with pytest.raises(BatchError, match="no batch output"):
        Service().run(source, output)
    assert output.read_text() == "my thesis\nis here\n"


def test_two_runs_cannot_share_an_output(source, output):
    with open_output(output, resume=True), pytest.raises(BatchError, match="another run"):
        Service().run(source, output)


# -- the real wire: kill and resume ----------------------------------------------------------------------------------


class Wire(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: 40 ms per answer otherwise
    answered: Counter[str]
    delay = 0.02

    def do_GET(self) -> None:
        self._reply(MODELS)

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["content-length"])))["prompt"]
        time.sleep(self.delay)
        self.answered[prompt] += 1
        self._reply(ANSWER)

    def _reply(self, text: str) -> None:
        data = text.encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class QuietServer(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A killed client is the point of these tests."""


@pytest.fixture
def wire():
    handler = type("Handler", (Wire,), {"answered": Counter()})
    server = QuietServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.answered
    server.shutdown()
    server.server_close()
    thread.join()


def start(source: Path, output: Path, url: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "secateur", "batch", "run", str(source), "-o", str(output), "--base-url", url]
    return subprocess.Popen(
        [*command, "--concurrency", "4"], cwd=ROOT, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def wait_for_lines(output: Path, number: int) -> None:
    deadline = time.monotonic() + 30
    while not output.exists() or output.read_bytes().count(b"\n") < number:
        assert time.monotonic() < deadline, "the batch makes no progress"
        time.sleep(0.005)


def test_killed_half_way_and_run_again_every_line_is_there_once(tmp_path, output, wire):
    url, answered = wire
    source = write(tmp_path / "in.jsonl", *[line(f"q-{n}") for n in range(300)])
    run = start(source, output, url)
    wait_for_lines(output, 100)
    run.send_signal(signal.SIGKILL)
    assert run.wait(10) == -signal.SIGKILL
    run.communicate()
    kept = output.read_bytes().count(b"\n")
    assert 100 <= kept < 300
    again = start(source, output, url)
    _, errors = again.communicate(timeout=60)
    assert again.returncode == 0, errors
    assert f"{kept} already done" in errors
    assert read_output(output).keys() == {f"q-{n}" for n in range(300)}
    assert sum(answered.values()) <= 300 + 4 + 1  # only what was in flight when it was killed was asked twice


def test_ctrl_c_drains_what_is_in_flight(tmp_path, output, wire):
    url, answered = wire
    source = write(tmp_path / "in.jsonl", *[line(f"q-{n}") for n in range(300)])
    run = start(source, output, url)
    wait_for_lines(output, 50)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=30)
    assert run.returncode == 130 and "not sent (interrupted)" in errors
    assert read_output(output).keys() == answered.keys() and len(answered) < 300


def test_where_all_bad_lines_are_shown_no_more_are_counted(tmp_path):
    with pytest.raises(BatchError) as caught:
        read_job(write(tmp_path / "in.jsonl", *["{"] * 20))
    assert "line 20: " in str(caught.value) and "and 0 more" not in str(caught.value)


def test_answers_without_usage_add_no_tokens(monkeypatch, source, output):
    monkeypatch.setitem(globals(), "ANSWER", json.dumps({**json.loads(ANSWER), "usage": None}))
    summary = Service().run(source, output)
    assert (summary.succeeded, summary.prompt_tokens, summary.completion_tokens) == (30, 0, 0)
