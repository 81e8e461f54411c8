"""The benchmark of a whole service, on servers that give known streams."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

import bench.service
from bench.service import ServiceProcesses, ask


@contextmanager
def streaming(last: str = "[DONE]", text: str = "b") -> Iterator[ServiceProcesses]:
    """Serve streams of two events with three tokens, and a third with their number."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert asked["stream"] and asked["temperature"] == 0 and asked["colour"] == "red"
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            events: list[dict[str, Any]] = [{"choices": [{"text": part}]} for part in ("a", text)]
            events.append({"choices": [], "usage": {"completion_tokens": 3}})
            for data in (*map(json.dumps, events), last):
                line = f"data: {data}\n\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.write(b"0\r\n\r\n")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield ServiceProcesses(f"http://127.0.0.1:{server.server_port}", psutil.Process())
    finally:
        server.shutdown()
        server.server_close()


def test_streams_are_counted_and_their_texts_joined() -> None:
    with streaming() as served:
        answers = ask(served.url, 3, 3, "name", {"colour": "red"})
    assert (answers.tokens, answers.events, answers.texts) == (9, 9, ["ab"] * 3) and answers.seconds > 0


def test_a_stream_that_breaks_off_ends_the_measurement() -> None:
    with streaming(last="{}") as served, pytest.raises(SystemExit, match="a stream broke off"):
        ask(served.url, 1, 3, "name", {"colour": "red"})


def run(monkeypatch: pytest.MonkeyPatch, *options: str, before: str) -> None:
    """Run the command on this checkout and on another one whose streams end with that text."""

    @contextmanager
    def service(root: Path, args: dict[str, Any], http: str) -> Iterator[ServiceProcesses]:
        with streaming(text="b" if root == bench.service.ROOT else before) as served:
            yield served

    monkeypatch.setattr(bench.service, "service", service)
    given = ["--requests", "2", "--rounds", "2", "--before", ".", "--body", '{"colour": "red"}', *options]
    monkeypatch.setattr(sys, "argv", ["bench.service", *given])
    bench.service.main()


def test_two_checkouts_take_turns_and_each_has_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    run(monkeypatch, before="b")
    told = capsys.readouterr().out
    rows = [line.split("|") for line in told.splitlines() if "none" in line]
    assert [(row[1].strip(), row[2].strip()) for row in rows] == [("2", "before"), ("2", "now")]
    assert all(f"{role} us" in told for role in ("front", "proxy", "engine", "rest"))


def test_other_texts_end_the_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="answered the same prompts differently"):
        run(monkeypatch, before="c")
