"""The socket between front and engine carries every message in pieces of any size and never blocks the step loop."""

from __future__ import annotations

import socket
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.comm import ipc
from workers.comm.ipc import (
    Abort,
    DrafterLost,
    EngineStats,
    FrameDecoder,
    FrameSocket,
    FrontGone,
    Ready,
    RequestStats,
    Resumption,
    Speculation,
    StepOutput,
    Submit,
    TokenChunk,
    TokenLogprobs,
    TreeRecord,
    encode,
)
from workers.settings import SamplingSettings

TREE = TreeRecord(
    tokens=[7, 5, -1],
    parents=[-1, 0, 1],
    depths=[0, 1, 2],
    probs=[None, 0.5, None],
    weights=[1.0, 0.25, None],
    reasons=[0, 0, 2],
    path=[1],
    draft_ms=None,
    verify_ms=1.5,
)
MESSAGES = [
    Submit(id=0, prompt=[], max_tokens=1),
    Submit(
        id=2**40,
        prompt=[0, 2**31 - 1],
        max_tokens=7,
        sampling=SamplingSettings(temperature=0.7, top_k=3, top_p=0.9, min_p=0.05, seed=2**64 - 1),
        stop_token_ids=[4, 5],
        ignore_eos=True,
        has_trees=True,
        num_prompt_logprobs=0,
        speculation=Speculation(enabled=False, num_speculative_tokens=0, rules={"min_prob": 0.1, "path_prob": 0.0}),
    ),
    Submit(
        id=6,
        prompt=[1],
        max_tokens=7,
        resumption=Resumption(
            output=[4, 2], num_prompt_logprobs=3, stats=RequestStats(num_drafts=2, accepted_per_depth=[1])
        ),
    ),
    Abort(id=3),
    StepOutput(chunks=[], stats=EngineStats()),
    StepOutput(
        chunks=[
            TokenChunk(id=1, tokens=[1, 2]),
            TokenChunk(id=2, tokens=[9], finish_reason="stop", stop_token=9, stats=RequestStats(num_drafts=4)),
            TokenChunk(id=4, tokens=[5, 6], num_accepted=1, tree=TREE),
            TokenChunk(id=5, tokens=[], prompt_logprobs=[TokenLogprobs(logprob=-0.5, rank=2, top=[(3, -0.25)])]),
            TokenChunk(id=3, tokens=[], finish_reason="error", error="prompt too long: 7 > 5: ü"),
        ],
        stats=EngineStats(steps=5, accepted_per_depth=[3, 2, 1], kv_usage=0.25, step_seconds=1.5),
    ),
    DrafterLost(reason="verifier 0 lost drafter 0 at step 7: it closed the link", link='{"port": 1}'),
    Ready(topology=[{"role": "verifier", "rank": 0}], max_model_len=2048, vocab_size=512, num_pages=9),
]


@pytest.fixture
def ends():
    engine, front = socket.socketpair()
    yield FrameSocket(engine), front
    engine.close()
    front.close()


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_message_survives_byte_by_byte(message):
    decoder = FrameDecoder()
    got = [m for byte in encode(message) for m in decoder.feed(bytes([byte]))]
    assert got == [message]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(MESSAGES), max_size=6), st.lists(st.integers(1, 200), min_size=1))
def test_a_stream_decodes_the_same_in_any_pieces(messages, sizes):
    stream, decoder, got = b"".join(map(encode, messages)), FrameDecoder(), []
    for i in range(len(stream)):
        if not stream:
            break
        size = sizes[i % len(sizes)]
        got += decoder.feed(stream[:size])
        stream = stream[size:]
    assert got == messages


def test_a_frame_of_another_protocol_is_an_error():
    with pytest.raises(ValueError, match="protocol"):
        FrameDecoder().feed(b"GET / HTTP/1.1\r\n\r\n")


def test_a_frame_too_long_to_be_read_is_not_written():
    with pytest.raises(ValueError, match="a Submit of 67108"):
        encode(Submit(id=1, prompt=[], max_tokens=1, cache_salt="a" * ipc.MAX_FRAME_BYTES))


def test_poll_returns_at_once_when_nothing_has_arrived(ends):
    assert ends[0].poll(0.0) == [], "otherwise it would wait forever"


def test_poll_waits_for_the_first_message(ends):
    engine, front = ends
    front.sendall(encode(Abort(id=1)) + encode(Abort(id=2)))
    assert engine.poll(5.0) == [Abort(id=1), Abort(id=2)]


def test_a_front_that_does_not_read_never_blocks_the_engine(ends):
    engine, front = ends
    big = StepOutput(chunks=[TokenChunk(id=1, tokens=[1], error="x" * 200_000)], stats=EngineStats())
    for _ in range(20):
        engine.send(big)
        assert engine.poll(0.0) == [], "otherwise it would wait forever"

    front.setblocking(False)
    decoder, got = FrameDecoder(), []
    deadline = time.monotonic() + 20
    while len(got) < 20 and time.monotonic() < deadline:
        engine.poll(0.0)  # flushes the rest
        try:
            got += decoder.feed(front.recv(1 << 20))
        except BlockingIOError:
            pass
    assert got == [big] * 20


def test_messages_still_arrive_while_the_other_way_is_full(ends):
    engine, front = ends
    for _ in range(50):
        engine.send(StepOutput(chunks=[TokenChunk(id=0, tokens=[], error="x" * 100_000)], stats=EngineStats()))
    front.sendall(encode(Abort(id=8)))
    assert engine.poll(1.0) == [Abort(id=8)]


def test_end_of_file_raises_front_gone(ends):
    engine, front = ends
    front.close()
    with pytest.raises(FrontGone):
        engine.poll(1.0)


def test_messages_before_a_disconnect_are_read(ends):
    engine, front = ends
    front.sendall(encode(Abort(id=4)))
    front.close()
    assert engine.poll(1.0) == [Abort(id=4)]
    with pytest.raises(FrontGone):
        engine.poll(1.0)


def test_writing_to_a_closed_front_raises_front_gone(ends):
    engine, front = ends
    front.close()
    with pytest.raises(FrontGone):
        for _ in range(3):
            engine.send(Abort(id=1))


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
def test_the_engine_connects_to_either_kind_of_address(scheme, tmp_path):
    listener = socket.socket(socket.AF_UNIX if scheme == "unix" else socket.AF_INET)
    listener.bind(str(tmp_path / "s") if scheme == "unix" else ("127.0.0.1", 0))
    listener.listen()
    address = f"unix:{tmp_path}/s" if scheme == "unix" else f"tcp:127.0.0.1:{listener.getsockname()[1]}"
    with ipc.connect(address) as engine, listener, listener.accept()[0] as front:
        FrameSocket(engine).send(Abort(id=6))
        assert FrameDecoder().feed(front.recv(100)) == [Abort(id=6)]


def test_an_unknown_address_raises_an_error_with_the_valid_forms():
    with pytest.raises(ValueError, match="unix:/path or tcp:host:port"):
        ipc.connect("http://host")


def test_unix_paths_have_107_bytes():
    assert ipc.unix_path_fits("a" * 107) and not ipc.unix_path_fits("a" * 108) and not ipc.unix_path_fits("ü" * 54)


def test_a_frame_opens_with_its_length():
    frame = encode(Abort(id=1))
    assert struct.unpack("<I", frame[:4]) == (len(frame) - 4,)


def test_accepted_tokens_that_are_cut_off_are_subtracted() -> None:
    stats = RequestStats(
        num_drafts=2,
        verified_per_depth=[3, 2, 2],
        accepted_per_depth=[2, 2, 1],
        num_copied_tokens=4,
        num_accepted_copied_tokens=3,
    )
    kept = stats.truncate(3, 1, is_copied=True)  # the last step's path was three deep
    assert (kept.accepted_per_depth, kept.num_accepted_copied_tokens) == ([2, 1, 0], 1)
    assert (kept.num_drafts, kept.verified_per_depth, kept.num_copied_tokens) == (2, [3, 2, 2], 4)
    assert stats.truncate(3, 1, is_copied=False).num_accepted_copied_tokens == 3
    assert stats.truncate(3, 3, is_copied=True) == stats == stats.truncate(0, 5, is_copied=True)
    assert stats.accepted_per_depth == [2, 2, 1]  # the engine's statistics are unchanged


def step(*ids: int, size: int = 1) -> StepOutput:
    return StepOutput(chunks=[TokenChunk(id=id, tokens=[], error="x" * size) for id in ids], stats=EngineStats())


def chunk_ids(front: socket.socket) -> list[int]:
    front.settimeout(5)
    decoder, messages = FrameDecoder(), list[object]()
    while not messages or decoder._buffer:
        messages += decoder.feed(front.recv(1 << 20))
    return [chunk.id for message in messages if isinstance(message, StepOutput) for chunk in message.chunks]


def test_an_engine_is_behind_while_its_front_does_not_read(ends):
    engine, front = ends
    while not engine.is_behind:
        engine.send(step(0, size=1 << 20))
    assert ipc.MAX_UNREAD_BYTES < len(engine._unsent) < ipc.MAX_UNREAD_BYTES + (2 << 20)
    front.setblocking(False)
    while engine.is_behind:
        front.recv(1 << 22)
        assert engine.poll(1.0) == []


def test_each_front_has_its_own_chunks_and_one_that_does_not_read_loses_its_requests(ends, tmp_path, monkeypatch):
    monkeypatch.setattr(ipc, "MAX_FRAME_BYTES", 2 << 20)
    plain, first = ends
    ready = Ready(topology=[], max_model_len=8, vocab_size=8, num_pages=8)
    engine = ipc.FrontSockets(plain._sock, ready)
    others = []
    for number in (1, 2):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / str(number)))
            listener.listen()
            told = ipc.Connect(number=number, address=f"unix:{tmp_path}/{number}")
            first.sendall(encode(told) * 2)  # it is named again and again
            assert engine.poll(5) == []
            others.append(listener.accept()[0])
    for number, other in enumerate(others, 1):
        assert FrameDecoder().feed(other.recv(1 << 20)) == [ready]
        other.sendall(encode(Submit(id=number, prompt=[1], max_tokens=9)))
        assert [message.id for message in engine.poll(5)] == [number]
    engine.send(step(1, 2, 65))
    assert [chunk_ids(other) for other in others] == [[1], [2]], "65 was never submitted"
    while len(engine._others) == 2:
        engine.send(step(1, size=1 << 20))
    assert engine.poll(5) == [Abort(id=1)] and not engine.is_behind
    engine.send(step(1, 2))
    assert chunk_ids(others[1]) == [2]
    others[1].close()
    assert engine.poll(5) == [Abort(id=2)]
    for other in others:
        other.close()
