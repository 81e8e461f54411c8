"""`secateur top` reads the service's real /metrics: figures of the last interval and since the start."""

import http.server
import json
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

import pytest

from cluster.observe.metrics import Metrics, RequestTimes
from secateur import cli
from secateur.errors import SecateurError
from secateur.top import Watch, lines_of_view, readings_of, view_of
from workers.comm.ipc import EngineStats

TOP = import_module("secateur.cli.top")  # the package has the command under this name


def metrics_text(model: str = "m", replica: str = "r1", **counts) -> str:
    """Return the text of /metrics of a service whose engine has these counts; its answers accept 3 tokens."""
    metrics = Metrics(model, replica, lambda: EngineStats(**counts))
    metrics.observe_tokens(2, 1, is_copied=False)
    metrics.observe_tokens(3, 2, is_copied=False)
    times = RequestTimes(submitted=0.1, scheduled=0.2, first_token=0.25, last_token=1.0, end=1.0)
    metrics.observe_finished("stop", times, prompt_tokens=4, generation_tokens=5, max_tokens=8)
    return metrics.render().decode()


FIRST = {
    "steps": 10,
    "generation_tokens": 20,
    "num_drafts": 6,
    "pruned_per_depth": [4, 2],
    "verified_per_depth": [10, 4],
    "step_seconds": 0.1,
    "draft_seconds": 0.03,
    "transfer_seconds": 0.01,
    "verify_seconds": 0.05,
    "num_running": 2,
    "num_waiting": 1,
    "kv_usage": 0.25,
    "has_drafter": True,
}
SECOND = FIRST | {
    "steps": 30,
    "generation_tokens": 120,
    "prompt_tokens": 60,
    "pruned_per_depth": [24, 12],
    "verified_per_depth": [60, 24],
    "step_seconds": 0.5,
    "draft_seconds": 0.11,
    "transfer_seconds": 0.05,
    "verify_seconds": 0.25,
    "num_running": 4,
}


def test_figures_since_the_start_are_ratios_of_the_counters():
    [reading] = readings_of(metrics_text(**FIRST), at=5.0)
    view = view_of(reading, None)
    assert (view.model, view.replica, view.now, view.seconds) == ("m", "r1", None, None)
    assert (view.requests_running, view.requests_waiting, view.kv_cache_usage, view.has_drafter) == (2, 1, 0.25, True)
    start = view.since_start
    assert start["acceptance_length"] == pytest.approx(1 + 3 / 6)
    assert (start["drafted_per_token"], start["pruned_per_token"], start["verified_per_token"]) == (1.0, 0.3, 0.7)
    assert (start["step_ms"], start["draft_ms"], start["verify_ms"]) == pytest.approx((10.0, 3.0, 5.0))
    assert start["other_ms"] == pytest.approx(1.0) and start["ttft_ms"] == pytest.approx(250.0)
    assert start["tokens_per_s"] is None and start["prefix_cache_hits"] is None
    assert (start["requests_finished"], start["requests_rejected"]) == (1, 0)


def test_figures_of_the_interval_are_of_the_differences():
    [first], [second] = readings_of(metrics_text(**FIRST), 5.0), readings_of(metrics_text(**SECOND), 7.0)
    view = view_of(second, first)
    now = view.now
    assert view.seconds == 2.0 and (now["tokens_per_s"], now["prompt_tokens_per_s"], now["steps_per_s"]) == (
        50.0,
        30.0,
        10.0,
    )
    assert now["verified_per_token"] == pytest.approx(0.7) and now["draft_ms"] == pytest.approx(4.0)
    assert now["acceptance_length"] is None, "no draft was counted in between"
    assert now["requests_finished"] == 0 and view.since_start["requests_finished"] == 1


def test_a_restarted_engine_has_no_interval():
    [first], [second] = readings_of(metrics_text(**SECOND), 5.0), readings_of(metrics_text(**FIRST), 7.0)
    assert view_of(second, first).now is None


def test_replicas_are_kept_until_they_are_silent():
    watch = Watch(keep_s=10)
    watch.take(readings_of(metrics_text(replica="a", **FIRST), 0.0))
    views = watch.take(readings_of(metrics_text(replica="b", **FIRST), 2.0))
    assert [view.replica for view in views] == ["a", "b"]
    [view] = watch.take(readings_of(metrics_text(replica="b", **SECOND), 11.0))
    assert view.replica == "b" and view.seconds == 9.0


@pytest.mark.parametrize("text", ["", "# nothing\n", "vllm_num_requests_running 1\n", "<html>no</html>"])
def test_another_services_metrics_are_an_error(text):
    with pytest.raises(SecateurError, match="/metrics"):
        readings_of(text)


def test_a_view_is_a_table():
    [first], [second] = readings_of(metrics_text(**FIRST), 5.0), readings_of(metrics_text(**SECOND), 7.0)
    lines = lines_of_view(view_of(second, first))
    assert lines[0] == "m  (replica r1)"
    assert lines[1] == "  running 4   waiting 1   KV pages 25.0 %   drafter connected"
    assert lines[2].split() == ["last", "2", "s", "since", "start"]
    rows = {line[:28].strip(): line[28:].split() for line in lines[3:]}
    assert rows["tokens/s"] == ["50.0", "-"] and rows["acceptance length"] == ["-", "1.50"]
    assert rows["verified"] == ["0.70", "0.70"] and rows["draft"] == ["4.00", "3.67"]
    assert len({len(line) for line in lines[2:]}) == 1


@contextmanager
def serving(texts: Callable[[], str | None]) -> Iterator[str]:
    """Answer /metrics with the next text; None closes the connection."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            text = texts() if self.path == "/metrics" else None
            if text is not None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def service() -> Iterator[str]:
    texts = iter([metrics_text(**FIRST)])
    with serving(lambda: next(texts, metrics_text(**SECOND))) as url:
        yield url


def test_once_prints_one_view_and_ends(service, capsys):
    assert cli.main(["top", "--base-url", service, "--once", "--interval", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("(replica r1)") == 1 and "running 4" in shown


def test_once_as_json_is_one_object(service, capsys):
    assert cli.main(["top", "--base-url", service, "--once", "--json", "--interval", "0.1"]) == 0
    [view] = json.loads(capsys.readouterr().out)["replicas"]
    assert view["requests_running"] == 4 and view["now"]["tokens_per_s"] > 0
    assert view["since_start"]["verified_per_token"] == pytest.approx(84 / 120)


def test_it_goes_on_until_it_is_interrupted_and_over_a_lost_service(capsys, monkeypatch):
    texts = iter([metrics_text(**FIRST), None, metrics_text(**SECOND)])
    sleeps = iter([None, None, None, KeyboardInterrupt])

    def sleep(seconds):
        assert seconds == 0.5
        if next(sleeps) is KeyboardInterrupt:
            raise KeyboardInterrupt

    monkeypatch.setattr(TOP, "time", types.SimpleNamespace(sleep=sleep))
    with serving(lambda: next(texts, metrics_text(**SECOND))) as url:
        assert cli.main(["top", "--base-url", url, "--interval", "0.5"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("(replica r1)") == 4 and shown.count("trying again") == 1 and "running 4" in shown


def test_a_terminal_shows_the_latest_view(service, capsys, monkeypatch):
    sleeps = iter([None])

    def sleep(_):
        if next(sleeps, KeyboardInterrupt) is KeyboardInterrupt:
            raise KeyboardInterrupt

    monkeypatch.setattr(TOP, "time", types.SimpleNamespace(sleep=sleep))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert cli.main(["top", "--base-url", service]) == 0
    assert "running 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--base-url", "h:1"], 2, "must begin with http://"),
        (["--base-url", "http://127.0.0.1:9"], 1, "no answer from http://127.0.0.1:9"),
        (["--interval", "0"], 2, "--interval"),
    ],
)
def test_a_wrong_address_is_one_error(args, code, says, capsys):
    assert cli.main(["top", "--once", *args]) == code
    assert says in capsys.readouterr().err


def test_another_service_is_one_error(capsys):
    with serving(lambda: "up 1\n") as url:
        assert cli.main(["top", "--base-url", url]) == 1
    assert "is this another service?" in capsys.readouterr().err
