"""The session that the proxy names for a request, and the order in which its router tries replicas."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from ray.serve.config import RequestRouterConfig
from starlette.types import Message, Receive, Scope, Send

from cluster.serve.routing import SessionRouter, preferred_order, router_config
from cluster.serve.sessions import MAX_BODY, Sessions, session_of

SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = {"role": "user", "content": "What is a tree?"}
ANSWER = {"role": "assistant", "content": "A plant."}
SECOND = {"role": "user", "content": "And a graph?"}


def session(**body: Any) -> str | None:
    return session_of(json.dumps(body).encode())


def test_a_conversation_keeps_its_session_and_others_have_their_own() -> None:
    first = session(model="m", messages=[SYSTEM, FIRST])
    assert first == session(messages=[SYSTEM, FIRST, ANSWER, SECOND], temperature=1)
    assert first != session(messages=[SYSTEM, SECOND])
    assert first != session(messages=[FIRST])


@pytest.mark.parametrize("start", ["text", "items"])
def test_a_response_and_the_conversation_that_goes_on_after_it_share_a_session(start: str) -> None:
    history = [FIRST, ANSWER, SECOND]
    first = session(input=FIRST["content"] if start == "text" else [FIRST], instructions="Be brief.")
    assert first == session(input=history, instructions="Be brief.")
    assert first != session(input=history)


def test_completions_share_a_session_by_how_their_prompts_begin() -> None:
    assert session(prompt="x" * 512 + "a") == session(prompt="x" * 512 + "b") == session(prompt=["x" * 600, "y"])
    assert session(prompt="a") != session(prompt="b")
    assert session(prompt=[1] * 128 + [2]) == session(prompt=[1] * 128 + [3]) == session(prompt=[[1] * 130])


def test_the_client_may_name_the_session() -> None:
    assert session(prompt="a", prompt_cache_key="k") == session(prompt="b", prompt_cache_key="k")
    assert session(prompt="a", prompt_cache_key="k") != session(prompt="a", prompt_cache_key="l")


def test_what_names_a_stored_response_has_the_session_of_its_replica() -> None:
    assert session(input="go on", previous_response_id="resp-0123-ab1z") == "replica:ab1z"
    assert session(input="go on", previous_response_id="resp-0123") is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"messages": 3}',
        b'{"prompt": null}',
        b'{"prompt": "' + b"x" * MAX_BODY,
        b"[" * 100_000,
    ],
)
def test_a_body_that_tells_of_no_session_has_none(body: bytes) -> None:
    assert session_of(body) is None


async def forwarded(path: str, body: bytes, *, method: str = "POST", header: str | None = None) -> tuple[str, bytes]:
    """Send a request in pieces of 100 KB through the middleware; return the session and the body that come out."""
    pieces = [body[start : start + 100_000] for start in range(0, len(body), 100_000)] or [b""]
    incoming = [{"type": "http.request", "body": piece, "more_body": piece is not pieces[-1]} for piece in pieces]
    found: list[tuple[str, bytes]] = []

    async def receive() -> Message:
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        parts = []
        while (message := await receive())["type"] == "http.request":
            parts.append(message["body"])
        found.append((dict(scope["headers"]).get(b"x-session-id", b"").decode(), b"".join(parts)))

    async def send(message: Message) -> None:
        raise AssertionError

    headers = [] if header is None else [(b"x-session-id", header.encode())]
    await Sessions(app)({"type": "http", "method": method, "path": path, "headers": headers}, receive, send)
    return found[0]


async def test_the_proxy_names_the_session_and_forwards_the_whole_body() -> None:
    body = json.dumps({"prompt": "a" * 300_000}).encode()
    assert await forwarded("/v1/completions", body) == (session_of(body), body)
    assert await forwarded("/llm/v1/completions/", body) == (session_of(body), body)
    assert await forwarded("/v1/completions", body, header="mine") == ("mine", body)
    large = json.dumps({"prompt": "a" * 2 * MAX_BODY}).encode()
    assert await forwarded("/v1/completions", large) == ("", large)
    assert await forwarded("/tokenize", body) == ("", body)
    counted = b'{"input": "a", "previous_response_id": "resp-0123-ab1z"}'
    assert await forwarded("/v1/responses/input_tokens", counted) == ("replica:ab1z", counted)
    assert await forwarded("/v1/responses/resp-0123-ab1z/input_items", b"", method="GET") == ("replica:ab1z", b"")


def test_sessions_spread_evenly_and_a_lost_replica_moves_only_its_own() -> None:
    idle = dict.fromkeys(["a", "b", "c", "d"], 0)
    before = {f"{n}": preferred_order(f"{n}", idle, slack=1) for n in range(2000)}
    assert all(sorted(order) == sorted(idle) for order in before.values())
    assert min(Counter(order[0] for order in before.values()).values()) > 400
    without = {"a": 0, "b": 0, "d": 0}
    for session, order in before.items():
        assert preferred_order(session, without, slack=1) == [id for id in order if id != "c"]


def test_a_busy_replica_is_passed_over_until_it_has_time_again() -> None:
    preferred, second, *_ = preferred_order("s", {"a": 4, "b": 4, "c": 4}, slack=2)
    others = {"a": 4, "b": 4, "c": 4}
    assert preferred_order("s", others | {preferred: 8}, slack=2)[0] == preferred  # the bound is 1.25 * 16 / 3 + 2
    busy = preferred_order("s", others | {preferred: 13}, slack=2)
    assert (busy[0], busy[-1]) == (second, preferred)


def test_a_stored_response_is_looked_for_where_it_was_made_however_busy() -> None:
    assert preferred_order("replica:b", {"a": 0, "b": 100, "c": 0}, slack=1)[0] == "b"
    assert sorted(preferred_order("replica:gone", {"a": 0, "b": 0}, slack=1)) == ["a", "b"]


def test_serve_can_send_the_router_to_a_proxy() -> None:
    config = RequestRouterConfig(**router_config(slack=3))
    config._serialize_request_router_cls()
    assert config.request_router_kwargs == {"slack": 3}
    sent = config.get_request_router_class()
    assert sent.__name__ == SessionRouter.__name__ and issubclass(sent, SessionRouter.__bases__)
