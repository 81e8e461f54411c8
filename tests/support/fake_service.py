"""The whole HTTP service over a FakeEngine: real sockets on both sides, no model and no process."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import httpx2
import uvicorn.server

from cluster.engine.engine_client import EngineClient
from cluster.http.limits import LimitedProtocol
from cluster.http.server import create_app
from cluster.http.service import Service
from cluster.local_service import listening_socket
from cluster.text.tokenizer import Tokenizer
from cluster.text.tokenizer_pool import TokenizerForkServer, TokenizerPool
from cluster.text.tokenizer_worker import JobLimits
from tests.support.fake_engine import FakeEngine, Script
from workers.config import DraftConfig, EngineConfig

ANSWER = "def f(x):\n    return '🌳', x + 1\n"
"""The engine's output in HTTP tests."""
# uvicorn looks every 0.1 s whether it is to end, and then waits as long: more than most tests take.
uvicorn.server.asyncio = SimpleNamespace(**vars(asyncio) | {"sleep": lambda seconds: asyncio.sleep(seconds / 20)})
CONFIG = EngineConfig(
    model_path="model", max_num_seqs=4, draft=DraftConfig(method="eagle3", model_path="head"), eos_token_ids=(0, 2)
)


@dataclass
class FakeService:
    url: str
    engine: FakeEngine
    client: EngineClient
    service: Service
    loop: asyncio.AbstractEventLoop

    def fail(self, reason: str) -> None:
        """Report the death of a rank, as the watcher of an engine's ranks does."""
        self.loop.call_soon_threadsafe(self.client.fail, reason)

    def leave(self, path: str, body: dict[str, Any], when: Callable[[], bool] | None = None) -> None:
        """Send a request and disconnect `when` something is so; by default, when all its prompts are in the engine."""
        prompt, before = body.get("prompt"), len(self.engine.submitted)
        expected = before + (len(prompt) if isinstance(prompt, list) else 1)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
        with socket.create_connection(("127.0.0.1", int(self.url.rsplit(":", 1)[1]))) as leaver:
            leaver.sendall(f"{head}\r\n\r\n".encode() + content)
            wait_for(when or (lambda: len(self.engine.submitted) == expected))

    def http(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=60, **options)


@contextmanager
def fake_service(
    tokenizer: Tokenizer,
    folder: Path,
    script: Script,
    *,
    config: EngineConfig = CONFIG,
    engine: dict[str, Any] | None = None,
    parent: TokenizerForkServer | Literal["shared"] | None = "shared",
    **settings: Any,
) -> Iterator[FakeService]:
    """Start a service. `engine` goes to the FakeEngine, `settings` to the Service. `parent` None: new workers.

    By default a step waits until the service has read the one before it.
    """
    sock = listening_socket("127.0.0.1", 0)
    if parent == "shared":
        parent = tokenizer_parent(tokenizer)
    started, parts, server_box = threading.Event(), [], []

    async def main() -> None:
        client = EngineClient()
        address = await client.listen(f"unix:{folder}/engine.sock")
        fake = FakeEngine(address, script, eos=config.eos_token_ids, **(engine or {}))
        if "before_step" not in (engine or {}):
            fake.before_step = lambda: wait_read(client, fake)
        await client.wait_ready(60)
        names = {"model_ids": ("fake-model",), "replica": "fake-replica", **settings}
        tokenizer_pool = TokenizerPool(tokenizer, num_workers=2, parent=parent)
        tokenizer_pool.begin()
        await tokenizer_pool.ready()
        service = Service(engine=client, tokenizer=tokenizer, tokenizer_pool=tokenizer_pool, config=config, **names)
        options: dict[str, Any] = {"log_level": "warning", "timeout_graceful_shutdown": 1}
        server = uvicorn.Server(uvicorn.Config(create_app(service), http=LimitedProtocol, **options))
        server_box.append(server)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        parts.append(FakeService(url, fake, client, service, asyncio.get_running_loop()))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:
            await asyncio.sleep(0.005)
        started.set()
        await serving
        await tokenizer_pool.close()
        fake.die()
        await client.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield parts[0]
    finally:
        server_box[0].should_exit = True
        thread.join(10)
        sock.close()


_parents: dict[str, TokenizerForkServer] = {}


def tokenizer_parent(tokenizer: Tokenizer) -> TokenizerForkServer:
    """Return the tokenizer process of all services, because loading takes seconds. It ends with this one."""
    if tokenizer.path not in _parents:
        _parents[tokenizer.path] = TokenizerForkServer(tokenizer, JobLimits())
        _parents[tokenizer.path].wait_loaded()
    return _parents[tokenizer.path]


def stream(http: httpx2.Client, path: str, **body: Any) -> list[Any]:
    """Return the decoded `data:` lines of a stream, with [DONE] unchanged."""
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        payloads = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    return [text if text == "[DONE]" else json.loads(text) for text in payloads]


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """Return the error object and check its keys: Anthropic's, or OpenAI's."""
    body = response.json()
    error = body["error"]
    assert {"message", "type"} <= error.keys() and ("type" in body or {"param", "code"} <= error.keys())
    assert "Traceback" not in response.text
    return error


def wait_read(client: EngineClient, engine: FakeEngine, timeout_s: float = 1.0) -> None:
    """Wait until the service has read what the engine sent, so that each step is an event, or until the timeout."""

    def is_read() -> bool:
        running = [(client._pending.get(id), live) for id, live in engine._live.items()]
        return all(own is None or (len(own.output) >= live.sent and not own.inbox._chunks) for own, live in running)

    deadline = time.monotonic() + timeout_s
    while not is_read() and time.monotonic() < deadline:
        time.sleep(0.001)


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
