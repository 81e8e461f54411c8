"""Batch files: validated before anything is sent, and every custom_id is answered exactly once in all cases."""

import hashlib
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest

from secateur import batch, endpoints
from secateur.batch import read_job, run_batch, run_batch_async
from secateur.batch_lines import BatchInputLine
from secateur.batch_output import digest_of, digests_path, open_output
from secateur.batch_progress import BatchSummary, progress_bar, progress_line, progress_lines
from secateur.client import AsyncClient
from secateur.errors import APIConnectionError, AuthenticationError, BatchError
from tests.support.batch_runs import ANSWER, MODELS, Service, line, read_output, write

pytestmark = pytest.mark.filterwarnings("error::UserWarning")
ROOT = Path(__file__).parents[2]


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


def test_a_run_reports_its_first_failure(source, output):
    summary = Service({"q-3": 400, "q-5": 500}).run(source, output, concurrency=1)
    assert str(summary).splitlines()[1:] == ["first failure: 'q-3': 400: no"]


def test_an_interrupted_run_reports_the_lines_not_sent():
    summary = BatchSummary(total=10, resumed=2, succeeded=3, failed=1, interrupted=True)
    assert "2 already done, 3 succeeded, 1 failed, 4 not sent (interrupted);" in str(summary)
    assert summary.exit_code == 130


def test_a_concurrency_of_zero_is_an_error(source, output):
    with pytest.raises(BatchError, match="concurrency must be at least 1"):
        Service().run(source, output, concurrency=0)


def test_only_failed_lines_are_sent_again(source, output):
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
def test_a_truncated_last_line_is_dropped_and_sent_again(source, output, cut):
    Service().run(source, output)
    output.write_bytes(output.read_bytes()[:-cut])
    again = Service()
    again.run(source, output)
    assert len(again.asked) == (0 if cut == 1 else 1)  # without its newline alone, the line is whole
    assert len(read_output(output)) == 30


def test_a_truncated_multibyte_character_is_dropped(source, output):
    output.write_bytes('{"id": "é'.encode()[:-1])
    assert Service().run(source, output).succeeded == 30


def test_a_refused_key_ends_the_run_and_keeps_what_was_answered(source, output):
    with pytest.raises(AuthenticationError):
        Service({"q-9": 401}).run(source, output, concurrency=1)
    assert len(read_output(output)) == 9


def test_an_unreachable_service_is_one_error(source, output):
    with pytest.raises(APIConnectionError):
        run_batch(source, output, base_url="http://127.0.0.1:9", retries=0)


async def test_run_batch_async_runs_in_the_callers_loop(source, output):
    client = AsyncClient(transport=httpx2.MockTransport(Service()))
    assert (await run_batch_async(source, output, client=client)).succeeded == 30


def test_requests_and_answers_may_contain_any_character(tmp_path, output):
    odd = "a\u2028b\u2029c\x85d\x0ce\rf"

    class Echo(Service):
        async def __call__(self, request: httpx2.Request) -> httpx2.Response:
            done = await super().__call__(request)
            return httpx2.Response(200, text=done.text.replace('"x"', json.dumps(odd, ensure_ascii=False)))

    source = tmp_path / "in.jsonl"
    raw = [json.dumps(line(f"{odd}-{n}"), ensure_ascii=False) for n in range(3)]
    source.write_bytes("\r\n".join(raw).encode())
    service = Echo()
    assert service.run(source, output, concurrency=1).succeeded == 3
    assert service.asked == [f"{odd}-{n}" for n in range(3)]
    assert {item.response.body["choices"][0]["text"] for item in read_output(output).values()} == {odd}
    assert Service().run(source, output).resumed == 3


MEMORY = """
import json, resource, sys
from secateur.batch import run_batch
from secateur.responses import CompletionChoice, CompletionResponse, ModelList, Usage
from pathlib import Path

size, folder = int(sys.argv[1]), Path(sys.argv[2])
with (folder / "in.jsonl").open("w") as file:
    for number in range(5_000):
        body = {"prompt": "x" * size, "seed": number}
        line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}
        file.write(json.dumps(line) + "\\n")

class Service:
    async def models(self):
        return ModelList()

    async def call(self, call):
        choice = CompletionChoice(text="y" * size, finish_reason="stop")
        return CompletionResponse(model="m", choices=[choice], usage=Usage.of(2, 3))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

before = peak()
summary = run_batch(folder / "in.jsonl", folder / "out.jsonl", client=Service(), progress=False, ordered=True)
print(summary.succeeded, peak() - before)
"""


@pytest.mark.slow
def test_lines_take_the_same_memory_whatever_their_size(tmp_path):
    """About 300 bytes a line for ids and digests, and as much again for the order."""
    size = 10_000
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(size), str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    succeeded, megabytes = map(int, done.stdout.split())
    assert succeeded == 5_000
    assert megabytes < 10 < (tmp_path / "out.jsonl").stat().st_size / 1e6


async def test_lines_go_to_the_least_busy_of_several_services(source, output, monkeypatch):
    """With the pool's own client for each; one of them refuses connections."""
    asked: Counter[str] = Counter()

    class Host(Service):
        async def __call__(self, request: httpx2.Request) -> httpx2.Response:
            if request.url.host == "gone":
                raise httpx2.ConnectError("refused")
            asked[request.url.host] += request.method == "POST"
            assert request.headers["authorization"] == "Bearer key"
            return await super().__call__(request)

    monkeypatch.setattr(endpoints, "AsyncClient", partial(AsyncClient, transport=httpx2.MockTransport(Host())))
    urls = ["http://a", "http://gone", "http://b"]
    summary = await run_batch_async(source, output, base_url=urls, api_key="key", progress=False, concurrency=6)
    assert (summary.succeeded, summary.failed) == (30, 0) and asked == {"a": 15, "b": 15}
    assert len(read_output(output)) == 30


def test_no_body_is_held_in_memory(tmp_path, output):
    source = write(tmp_path / "in.jsonl", *[line(f"q-{n}") for n in range(200)])
    Service().run(source, output)
    long = b"y" * 100_000
    output.write_bytes(output.read_bytes().replace(b'"text":"x"', b'"text":"' + long + b'"') + b'{"id":"torn')
    requests = read_job(source).digests
    tracemalloc.start()
    with open_output(output, requests, resume=True) as opened:
        assert len(opened.done) == 200
        assert tracemalloc.get_traced_memory()[1] < 4_000_000 < output.stat().st_size
    tracemalloc.stop()


def test_an_input_that_changes_during_the_run_is_an_error(tmp_path, output):
    source = write(tmp_path / "in.jsonl", *[line(f"q-{n}") for n in range(300)])  # more than is read at a time

    class Rewriting(Service):
        async def __call__(self, request: httpx2.Request) -> httpx2.Response:
            if len(self.asked) == 5:
                source.write_bytes(source.read_bytes().replace(b'{"prompt": "q-299"', b'{"prompt": "other"'))
            return await super().__call__(request)

    with pytest.raises(BatchError, match=r"changed while(.|\n)*line 300: has a different request now"):
        Rewriting().run(source, output, concurrency=1)
    assert read_output(output).keys() == {f"q-{n}" for n in range(299)}
    again = Service()
    assert again.run(source, output).exit_code == 0 and again.asked == ["other"]


# -- what is refused before anything is sent -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: "),
        (json.dumps(line("b")).replace("4", "NaN"), "line 2: not JSON"),
        (line("b", body={"prompt": "half a \ud83c tree"}), "line 2: not JSON"),
        *[('{"a":' * n + "1" + "}" * n, "line 2: not JSON: nested more than 202 levels deep") for n in (203, 700, 960)],
        *[("[" * n + "]" * n, "line 2: not JSON: nested ") for n in (203, 980, 990, 3000, 100_000)],
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
def test_an_invalid_line_is_reported_and_nothing_is_sent(tmp_path, output, bad, says):
    service = Service()
    with pytest.raises(BatchError) as caught:
        service.run(write(tmp_path / "in.jsonl", line("a"), bad), output)
    assert says in str(caught.value)
    assert service.asked == [] and not output.exists()


def test_all_invalid_lines_are_counted_and_some_shown(tmp_path):
    with pytest.raises(BatchError, match="and 10 more"):
        read_job(write(tmp_path / "in.jsonl", *["{"] * 30))


def test_blank_lines_are_skipped(tmp_path):
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


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize(
    "text", ["my thesis\nis here\n", "my thesis, without a newline", '{"custom_id": "q-1"}', "[1]\n"]
)
def test_a_file_that_is_not_a_batch_output_is_unchanged(source, output, text, resume):
    output.write_text(text)
    with pytest.raises(BatchError, match="line 1 is no batch output; name another output file"):
        Service().run(source, output, resume=resume)
    assert output.read_text() == text and not digests_path(output).exists()


def test_an_invalid_digests_file_is_unchanged(source, output):
    digests_path(output).write_text("my thesis\n")
    with pytest.raises(BatchError, match=r"out.jsonl.digests line 1 is no digest of a request; name another"):
        Service().run(source, output)
    assert digests_path(output).read_text() == "my thesis\n"


@pytest.mark.parametrize("torn", [b"", b'{"id'], ids=["as it is", "rewritten"])
def test_two_runs_cannot_share_an_output(source, output, torn):
    output.write_bytes(torn)
    with open_output(output, {}, resume=True), pytest.raises(BatchError, match="another run"):
        Service().run(source, output)


# -- the real wire: kill and resume ----------------------------------------------------------------------------------


class Wire(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: 40 ms per answer otherwise
    answered: Counter[str]
    answers_on: threading.Event
    """Clear: it answers no more than HELD_FROM prompts."""

    def do_GET(self) -> None:
        self._reply(MODELS)

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["content-length"])))["prompt"]
        if len(self.answered) >= HELD_FROM:
            self.answers_on.wait(60)
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


HELD_FROM = 150


class QuietServer(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A killed client is the point of these tests."""


@pytest.fixture
def wire():
    answered = Counter()
    answers_on = threading.Event()
    handler = type("Handler", (Wire,), {"answered": answered, "answers_on": answers_on})
    server = QuietServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answered, answers_on
    answers_on.set()
    server.shutdown()
    server.server_close()
    thread.join()


def start(source: Path, output: Path, url: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "secateur", "batch", "run", str(source), "-o", str(output), "--base-url", url]
    return subprocess.Popen(
        [*command, "--concurrency", "4"], cwd=ROOT, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def wait_for_lines(output: Path, number: int) -> None:
    deadline = time.monotonic() + 120
    while not output.exists() or output.read_bytes().count(b"\n") < number:
        assert time.monotonic() < deadline, "the batch makes no progress"
        time.sleep(0.005)


def test_a_killed_and_resumed_run_answers_every_line_once(tmp_path, output, wire):
    url, answered, answers_on = wire
    source = write(tmp_path / "in.jsonl", *[line(f"q-{n}") for n in range(300)])
    run = start(source, output, url)
    wait_for_lines(output, 100)
    run.send_signal(signal.SIGKILL)
    assert run.wait(60) == -signal.SIGKILL
    run.communicate()
    answers_on.set()
    kept = output.read_bytes().count(b"\n")
    assert 100 <= kept < 300
    assert kept <= digests_path(output).read_bytes().count(b"\n") <= kept + 1
    again = start(source, output, url)
    _, errors = again.communicate(timeout=60)
    assert again.returncode == 0, errors
    assert f"{kept} already done" in errors
    assert read_output(output).keys() == {f"q-{n}" for n in range(300)}
    assert sum(answered.values()) <= 300 + 4 + 1  # only what was in flight when it was killed was asked twice


def test_ctrl_c_waits_for_requests_in_flight(tmp_path, output, wire):
    url, answered, answers_on = wire
    source = write(tmp_path / "in.jsonl", *[line(f"q-{n}") for n in range(300)])
    run = start(source, output, url)
    wait_for_lines(output, HELD_FROM)
    run.send_signal(signal.SIGINT)
    answers_on.set()
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130 and "not sent (interrupted)" in errors
    assert read_output(output).keys() == answered.keys() and len(answered) < 300


def test_a_short_list_of_invalid_lines_has_no_remainder(tmp_path):
    with pytest.raises(BatchError) as caught:
        read_job(write(tmp_path / "in.jsonl", *["{"] * 20))
    assert "line 20: " in str(caught.value) and "and 0 more" not in str(caught.value)


def test_answers_without_usage_add_no_tokens(source, output):
    summary = Service(answer=json.dumps({**json.loads(ANSWER), "usage": None})).run(source, output)
    assert (summary.succeeded, summary.prompt_tokens, summary.completion_tokens) == (30, 0, 0)


# -- what is told ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_run_ended_by_a_signal_reports_the_lines_left(source, output, concurrency):
    class Interrupting(Service):
        async def __call__(self, request):
            if len(self.asked) == 10:
                os.kill(os.getpid(), signal.SIGINT)
            return await super().__call__(request)

    summary = Interrupting().run(source, output, concurrency=concurrency)
    assert summary.interrupted and 10 < summary.succeeded < 30
    assert len(read_output(output)) == summary.succeeded


def test_a_successful_run_reports_its_duration_and_no_failure(source, output, monkeypatch):
    service = Service()
    monkeypatch.setattr(batch, "time", SimpleNamespace(monotonic=lambda: 7.0 + 0.5 * len(service.asked)))
    summary = service.run(source, output)
    assert summary.seconds == 15.0 and str(summary).endswith("in 15.0 s")


def test_the_progress_bar_starts_at_the_lines_already_done():
    bar = progress_bar(BatchSummary(total=30, resumed=12), True)
    [task] = bar.tasks
    assert (task.description, task.completed, task.total) == ("batch", 12, 30)
    assert bar.columns[0].render(task).plain == "batch"


def test_without_a_terminal_a_line_tells_of_the_progress(source, output, monkeypatch, capsys):
    service = Service(fails={"q-3": 400})
    monkeypatch.setattr(batch, "progress_lines", partial(progress_lines, period_s=0.002))
    run_batch(source, output, client=AsyncClient(transport=httpx2.MockTransport(service), retries=0), concurrency=2)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(re.fullmatch(r"secateur: batch: \d+ of 30 lines(, 1 failed)?, .*", line) for line in lines)
    Service().run(source, tmp := output.with_name("other.jsonl"))
    assert tmp.exists() and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("counts", "seconds", "line"),
    [
        ({}, 10.0, "0 of 5000 lines, 0.0 lines/s"),
        ({"succeeded": 100}, 10.0, "100 of 5000 lines, 10.0 lines/s, 8 min left"),
        (
            {"resumed": 4000, "succeeded": 490, "failed": 10},
            50.0,
            "4500 of 5000 lines, 10 failed, 10.0 lines/s, 50 s left",
        ),
        ({"succeeded": 1}, 10.0, "1 of 5000 lines, 0.1 lines/s, 13.9 h left"),
    ],
)
def test_a_progress_line_estimates_the_rest_from_this_run(counts, seconds, line):
    assert progress_line(BatchSummary(total=5000, **counts), seconds) == f"secateur: batch: {line}"


def test_digests_equal_those_of_earlier_versions():
    """Another encoding would answer every line of every batch again."""
    asked = BatchInputLine.model_validate(line("a", body={"prompt": "世", "max_tokens": 4}))
    same = BatchInputLine.model_validate(line("b", body={"max_tokens": 4, "prompt": "世"}))
    spelled = '["POST","/v1/completions",{"max_tokens":4,"prompt":"世"}]'
    assert digest_of(asked) == digest_of(same) == hashlib.sha256(spelled.encode()).hexdigest()
