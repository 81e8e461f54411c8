"""Clients that never read: what waits for them is bounded, and others notice nothing."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from cluster.engine import engine_client
from cluster.text.tokenizer import Tokenizer
from tests.support.fake_service import fake_service, stream, wait_for

NUM_TOKENS = 1900
CHUNKS = 2_000
"""That may wait for all readers together."""


def test_clients_that_never_read_lose_their_own_streams_alone(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "MAX_UNREAD", CHUNKS)
    token = tokenizer.encode("a", add_special_tokens=False)
    waiting = []

    with fake_service(
        tokenizer, tmp_path, lambda own: [token] * own.max_tokens, engine={"before_step": lambda: None}
    ) as service:
        service.service.admission.max_pending = 64
        put = engine_client._Inboxes.added

        def counted(self: engine_client._Inboxes, inbox: engine_client._Inbox, size: int) -> None:
            put(self, inbox, size)
            waiting.append(self.size)

        monkeypatch.setattr(engine_client._Inboxes, "added", counted)
        body = json.dumps({"prompt": "a", "max_tokens": NUM_TOKENS, "stream": True, "logprobs": 5, "n": 4}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        idle = []
        for _ in range(8):
            own = socket.socket()
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            own.connect(("127.0.0.1", int(service.url.rsplit(":", 1)[1])))
            own.sendall(f"{head}\r\n\r\n".encode() + body)
            idle.append(own)
        wait_for(lambda: len(service.engine.submitted) == 32)
        with service.http() as http:
            events = stream(http, "/v1/completions", prompt="a", max_tokens=50)
            assert events[-1] == "[DONE]" and "".join(own["choices"][0]["text"] for own in events[:-1]) == "a" * 50
        wait_for(lambda: len(service.engine.aborted) >= 4 and not service.client.num_pending)
        assert max(waiting) < CHUNKS + 33 * 6, "the limit, and one step of all"
        for own in idle:
            own.close()
