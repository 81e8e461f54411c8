"""End to end on a real Ray: HTTP -> Serve -> replica -> engine with two verifier ranks and a drafter, and back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx2
import psutil
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from cluster.convert import read_engine, with_tokenizer
from cluster.serve.launch import running
from cluster.system.processes import descendants, wait_gone
from secateur import Client
from secateur.config import EngineArgs
from secateur.errors import APIError
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.run import Chaos, upgrade

PROMPT = "def read_lines(path):\n    with open(path) as"
STRUCK = ("drafter-hangs", "controller")
"""Those of `make chaos`'s faults that strike here. The other tests have some of the rest."""
GREEDY = {"max_tokens": 32, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def args() -> EngineArgs:
    """The arguments of the service."""
    front = {"port": 0, "allowed_origins": ["https://app.example"], "root_path": "/llm"}
    return EngineArgs.load({"tensor_parallel_size": 2, "device": "cpu", "max_num_seqs": 8, **front})


@pytest.fixture(scope="module")
def url(args: EngineArgs) -> Iterator[str]:
    """The service of `secateur serve -tp 2`. Afterwards no process may be left.

    For this module alone: an idle Ray with Serve takes a seventh of a core. As the command does, it reads the models
    here, so that no replica imports torch.
    """
    os.environ.pop("RAY_ADDRESS", None)
    before = set(descendants())
    config, specs = read_engine(args)
    read = {"config": with_tokenizer(args, config)[0].to_json(), "specs": specs.to_json()}
    with running(args, read=read) as base_url:
        yield base_url
        ours = set(descendants()) - before
    assert ours, "the service ran in no process of its own"
    assert wait_gone(ours, timeout_s=15) == []


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


def topology(url: str) -> list[dict[str, Any]]:
    return httpx2.get(f"{url}/server_info", timeout=10).raise_for_status().json()["topology"]


def metric(url: str, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples with these labels."""
    families = text_string_to_metric_families(httpx2.get(f"{url}/metrics", timeout=10).text)
    samples = [sample for family in families for sample in family.samples if sample.name == f"secateur_{name}"]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def replica(url: str) -> str:
    """Return the only value of the label `replica`."""
    families = text_string_to_metric_families(httpx2.get(f"{url}/metrics", timeout=10).text)
    [only] = {sample.labels["replica"] for family in families for sample in family.samples}
    return only


def serve_replicas() -> set[str]:
    """Return the ids of live replicas, from their actors' names (SERVE_REPLICA::application#deployment#id)."""
    actors = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return {name.rpartition("#")[2] for name in actors if name.startswith("SERVE_REPLICA::")}


@contextmanager
def suspended(process: psutil.Process | None) -> Iterator[None]:
    assert process is not None
    process.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def test_metrics_name_the_replica_as_serve_does(url: str) -> None:
    assert {replica(url)} == serve_replicas()


def test_every_rank_is_a_process_of_its_own(url: str) -> None:
    ranks = topology(url)
    assert [entry["role"].split()[0] for entry in ranks] == ["verifier", "verifier", "drafter"]
    assert len({entry["pid"] for entry in ranks} | {os.getpid()}) == 4


def test_no_process_of_the_service_is_nicer_than_what_started_it(url: str) -> None:
    """Ray starts its workers at nice 15, unless told otherwise: beside anything else they would get what is left."""
    nice = {str(process): process.nice() for process in psutil.Process().children(recursive=True)}
    assert any("verifier" in name for name in nice)
    assert set(nice.values()) == {psutil.Process().nice()}


def test_speculation_changes_no_greedy_answer(url: str) -> None:
    with Client(url) as client:
        always = {"tree_prune": "off"}  # `auto` may know that drafts cost more than they gain here
        drafted = client.complete(PROMPT, **GREEDY, return_speculative_stats=True, speculative=always)
        plain = client.complete(PROMPT, **GREEDY, speculative={"enabled": False})
    assert drafted.text == plain.text
    assert drafted.usage.completion_tokens == 32
    assert drafted.speculative.num_drafts > 0
    assert drafted.speculative.acceptance_length > 1


def test_a_seeded_answer_is_the_same_with_and_without_drafts(url: str) -> None:
    params = {"max_tokens": 32, "temperature": 0.8, "top_p": 0.9, "seed": 42, "ignore_eos": True}
    with Client(url) as client:
        texts = {client.complete(PROMPT, **params, speculative={"enabled": on}).text for on in (True, False, True)}
    assert len(texts) == 1


def test_a_stream_is_the_whole_answer_in_pieces(url: str) -> None:
    with Client(url) as client:
        asked = GREEDY | {"max_tokens": 200}  # steps that wait for a busy front become one event
        whole = client.chat("Write a loop.", **asked)
        chunks = list(client.stream_chat("Write a loop.", **asked))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert len(chunks) > 1
    assert chunks[-1].choices[0].finish_reason == "length"


def test_the_proxy_leaves_our_errors_and_ids_alone(url: str) -> None:
    with pytest.raises(APIError, match="best_of"), Client(url) as client:
        client.complete(PROMPT, best_of=2)
    response = httpx2.get(f"{url}/health", headers={"X-Request-ID": "mine"})
    assert response.headers.get_list("x-request-id") == ["mine"]
    assert httpx2.get(f"{url}/nowhere").json()["error"]["type"] == "not_found_error"


def test_the_proxy_passes_head_preflight_requests_and_prefixes(url: str) -> None:
    head = httpx2.head(f"{url}/v1/models/", timeout=10)
    assert (head.status_code, head.content) == (200, b"")
    assert httpx2.get(f"{url}/llm/openapi.json", timeout=10).json()["servers"] == [{"url": "/llm"}]
    asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    preflight = httpx2.options(f"{url}/v1/completions", headers=asked, timeout=10)
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == asked["Origin"]
    refused = httpx2.post(f"{url}/llm/v1/completions/", json={"prompt": 1}, headers=asked, timeout=10)
    assert refused.status_code == 400 and refused.headers["access-control-allow-origin"] == asked["Origin"]


@pytest.mark.parametrize("path", ["/v1/completions", "/llm/v1/chat/completions/"])
def test_a_full_replica_refuses_with_429_until_it_has_room(url: str, path: str) -> None:
    """A request for as many answers as the service holds has no room while a single other one is pending."""
    rejected, many = metric(url, "requests_rejected_total"), {"max_tokens": 1500, "ignore_eos": True, "n": 64}
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    filling = prompt | many | {"stream": True}
    with httpx2.stream("POST", f"{url}{path}", json=filling, timeout=60) as response:
        lines = response.iter_lines()  # held, because dropping it closes the response
        next(lines)
        refused = httpx2.post(f"{url}{path}", json=prompt | many, headers={"X-Request-ID": "mine"}, timeout=60)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.headers.get_list("x-request-id") == ["mine"]
    error = refused.json()["error"]
    assert error["type"] == "rate_limit_error" and "requests are pending" in error["message"]
    assert metric(url, "requests_rejected_total") == rejected + 1
    wait_for(lambda: metric(url, "num_requests_running") + metric(url, "num_requests_waiting") == 0, 60)
    wait_for(lambda: httpx2.post(f"{url}{path}", json=prompt | {"max_tokens": 1}, timeout=60).is_success, 60)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_disconnect_aborts_the_request(url: str, streamed: bool) -> None:
    aborted = metric(url, "request_success_total", finished_reason="abort")
    body = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": streamed}
    if streamed:
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(f"{url}/v1/completions", json=body, timeout=httpx2.Timeout(20, read=1))
    wait_for(lambda: metric(url, "request_success_total", finished_reason="abort") == aborted + 1, 60)
    wait_for(lambda: metric(url, "num_requests_running") == 0, 60)


def test_clients_do_not_notice_a_killed_drafter_and_another_one_takes_its_place(url: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    ranks, before = topology(url), replica(url)
    wanted = httpx2.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(httpx2.post, f"{url}/v1/completions", json=body, timeout=60) for _ in range(8)]
        wait_for(lambda: metric(url, "num_requests_running") == 8, 60)
        drafter = psutil.Process(ranks[2]["pid"])
        with suspended(drafter.parent()):  # who would start the next drafter within half a second
            drafter.kill()
            wait_for(lambda: metric(url, "num_drafter_losses_total") == 1, 60)
            health = httpx2.get(f"{url}/health", timeout=10)
        assert health.status_code == 200 and health.json()["status"] == "degraded"
        assert "lost drafter 0" in health.json()["reason"]
        for answer in (future.result() for future in answers):
            assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == wanted
    wait_for(lambda: metric(url, "drafter_connected") == 1, 60)
    assert httpx2.get(f"{url}/health", timeout=10).json() == {"status": "ok"}
    assert replica(url) == before
    assert [entry.get("pid") for entry in topology(url)] == [ranks[0]["pid"], ranks[1]["pid"], None]
    drafted = metric(url, "spec_decode_num_accepted_tokens_total")
    assert httpx2.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"] == wanted
    assert metric(url, "spec_decode_num_accepted_tokens_total") > drafted


def pid_of_proxy(url: str) -> int:
    """Return the process that listens on the service's port."""
    port = urlsplit(url).port
    [pid] = {
        process.pid
        for process in psutil.process_iter()
        if any(c.status == "LISTEN" and c.laddr.port == port for c in _connections(process))
    }
    return pid


def _connections(process: psutil.Process) -> list[Any]:
    try:
        return process.net_connections("tcp")
    except psutil.Error:
        return []


def test_our_clients_see_only_a_pause_when_the_proxy_and_the_replica_are_killed(url: str) -> None:
    """Nothing of a request is left then but its event id. A plain client sees its stream break."""
    greedy = {"max_tokens": 250, "temperature": 0, "ignore_eos": True}
    drawn = {"max_tokens": 250, "temperature": 0.8, "ignore_eos": True, "n": 2}
    ids = {"return_token_ids": True, "stream_options": {"include_usage": True}}

    def stream(client: Client, params: dict[str, Any], begun: threading.Barrier | None) -> list[Any]:
        chunks = []
        for chunk in client.stream_complete(PROMPT, **params, **ids):
            chunks.append(chunk)
            if len(chunks) == 2 and begun is not None:
                begun.wait(60)
        return chunks

    def told(chunks: list[Any]) -> Any:
        tokens: dict[int, list[int]] = {}
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            tokens.setdefault(choice.index, []).extend(choice.token_ids or [])
        reasons = sorted(choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason)
        [usage] = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
        return tokens, reasons, usage, len({chunk.id for chunk in chunks})

    with Client(url) as client, ThreadPoolExecutor(4) as pool:
        client.models()
        wanted = [told(stream(client, greedy, None)), told(stream(client, drawn | {"seed": 3}, None))]
        whole = client.complete(PROMPT, **greedy).text
        for process in (pid_of_proxy(url), httpx2.get(f"{url}/server_info").json()["front"]["pid"]):
            begun = threading.Barrier(3)
            streams = [pool.submit(stream, client, params, begun) for params in (greedy, drawn | {"seed": 3})]
            answer = pool.submit(client.complete, PROMPT, **greedy)
            with httpx2.stream(
                "POST", f"{url}/v1/completions", json={"prompt": PROMPT, **greedy, "stream": True}, timeout=60
            ) as response:
                lines = response.iter_lines()
                next(lines)
                begun.wait(60)
                os.kill(process, signal.SIGKILL)
                with pytest.raises(httpx2.TransportError):
                    for _ in lines:
                        pass
            assert [told(future.result()) for future in streams] == wanted
            assert answer.result().text == whole
    assert httpx2.get(f"{url}/health", timeout=10).json() == {"status": "ok"}


NINE = [
    {"prompt": PROMPT, "max_tokens": 300, "temperature": 0.8 * (seed % 2), "seed": seed, "ignore_eos": True}
    for seed in range(9)
]
"""Of so many requests eight run and one waits."""


def ask(url: str, body: dict[str, Any]) -> str:
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    choice, usage = answer.json()["choices"][0], answer.json()["usage"]
    assert (choice["finish_reason"], usage["completion_tokens"]) == ("length", 300)
    return choice["text"]


def test_clients_see_only_a_pause_when_a_verifier_hangs(url: str) -> None:
    """One that dies is the same from then on; `make chaos` kills each rank."""
    with ThreadPoolExecutor(9) as pool:
        nine_texts = list(pool.map(partial(ask, url), NINE))
    ranks, before = topology(url), replica(url)
    with ThreadPoolExecutor(9) as pool:
        events: list[dict[str, Any]] = []
        streamed = NINE[0] | {"stream": True}
        with httpx2.stream("POST", f"{url}/v1/completions", json=streamed, timeout=120) as response:
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
            events.append(json.loads(next(lines)))
            answers = [pool.submit(ask, url, body) for body in NINE[1:]]
            wait_for(lambda: metric(url, "num_requests_waiting") > 0, 60)
            os.kill(ranks[1]["pid"], signal.SIGSTOP)
            wait_for(lambda: "wait for a new engine" in httpx2.get(f"{url}/health", timeout=10).text, 60)
            late = pool.submit(ask, url, NINE[0])
            events += [json.loads(line) for line in lines if line != "[DONE]"]
        assert "".join(event["choices"][0]["text"] for event in events) == nine_texts[0]
        assert [future.result() for future in answers] == nine_texts[1:] and late.result() == nine_texts[0]
    assert httpx2.get(f"{url}/health", timeout=10).json() == {"status": "ok"}
    assert replica(url) == before
    assert {entry["pid"] for entry in topology(url)}.isdisjoint({entry.get("pid") for entry in ranks})
    with Client(url) as client:
        assert client.complete(PROMPT, **GREEDY).usage.completion_tokens == 32


# The bounded part of `make chaos`: every token comes, once, when a process of the service is lost or hangs


@pytest.fixture(scope="module")
def chaos(url: str) -> Chaos:
    found = Chaos(url, num_streams=8, max_tokens=150)
    asyncio.run(found.learn())
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, id=each.name, marks=() if each.name in STRUCK else pytest.mark.full) for each in FAULTS],
)
def test_no_request_fails_and_no_token_is_wrong_repeated_or_missing(chaos: Chaos, fault: Fault) -> None:
    done = asyncio.run(chaos.strike(fault))
    assert done.problems == []
    assert done.num_running > 0 and done.pauses_s, "a fault after the last token proves nothing"


@pytest.mark.timeout(900)
def test_no_request_fails_while_replicas_are_replaced_by_two_and_these_by_one(url: str, args: EngineArgs) -> None:
    one_rank = {"tensor_parallel_size": 1, "no_speculation": True}  # whose tokens are the same, and who starts sooner
    # With pauses, or the requests would take what the new replicas need to start.
    asked = {"num_requests": 60, "concurrency": 3, "pause_s": 0.1}
    ends = asyncio.run(upgrade(url, args.model_copy(update=one_rank), **asked))
    assert ends.keys() == {"done"} and ends["done"] >= 60
