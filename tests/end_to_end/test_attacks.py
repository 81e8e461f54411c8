"""Hostile requests to a real service with a real engine, which keeps serving all others."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from cluster.local_service import local_service
from cluster.system.processes import descendants
from secateur.config import EngineArgs
from tests.support.looping import FOREVER, looping_model

CHAT = "/v1/chat/completions"
NESTED = "{% for a in range(90000) %}" * 3 + "{% endfor %}" * 3
NUM_CLIENTS = 8  # the threads that a service of two cores shares among all its work are six


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = str(looping_model(tmp_path_factory.mktemp("looping")))
    args = {"model": model, "no_speculation": True, "port": 0, "device": "cpu", "max_model_len": 256}
    with local_service(EngineArgs.load(args)) as url:
        yield url


def ask(url: str, path: str, body: Any, wait_s: float = 60.0) -> int | None:
    """Return the response's status; None if the client disconnected after `wait_s`."""
    try:
        return httpx2.post(url + path, json=body, timeout=httpx2.Timeout(60, read=wait_s)).status_code
    except httpx2.ReadTimeout:
        return None


def all_at_once(url: str, path: str, body: Any, wait_s: float = 60.0) -> list[int | None]:
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        return list(clients.map(lambda _: ask(url, path, body, wait_s), range(NUM_CLIENTS)))


def check_serves(url: str) -> None:
    """Check that a short prompt, a chat and a text are answered and that the service is healthy."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert ask(url, "/v1/completions", {"prompt": "a", "max_tokens": 1}) == 200
    assert ask(url, CHAT, chat) == 200
    assert ask(url, "/tokenize", {"prompt": "a"}) == 200
    assert httpx2.get(url + "/health", timeout=20).status_code == 200


def test_a_clients_own_template_is_rejected(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"chat_template": NESTED}}
    assert all_at_once(url, CHAT, body, wait_s=3) == [400] * NUM_CLIENTS
    check_serves(url)


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_looping_templates_of_disconnected_clients_block_nobody(url: str, path: str) -> None:
    assert all_at_once(url, path, {"messages": [FOREVER]}, wait_s=1) == [None] * NUM_CLIENTS
    check_serves(url)


def test_looping_templates_of_waiting_clients_are_killed(url: str) -> None:
    assert all_at_once(url, CHAT, {"messages": [FOREVER]}) == [400] * NUM_CLIENTS
    check_serves(url)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "def f(x): " * ((15 << 20) // 10)}),
        ("/tokenize", {"messages": [{"role": "a" * (15 << 20), "content": "hi"}]}),
        (CHAT, {"messages": [{"role": "a" * (15 << 20), "content": "hi"}]}),
    ],
    ids=["text", "role", "chat"],
)
def test_texts_of_15_mib_take_little_memory(url: str, path: str, body: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert all_at_once(url, path, body) == [400] * NUM_CLIENTS
    # Clients and front are this process; each of the sixteen holds the body a few times over.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    assert max(peak_of(pid) for pid in descendants() if is_tokenizing(pid)) < 200 << 10
    check_serves(url)


def is_tokenizing(pid: int) -> bool:
    return b"cluster.text.tokenizer_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def peak_of(pid: int) -> int:
    """Return the peak resident memory in KiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])
