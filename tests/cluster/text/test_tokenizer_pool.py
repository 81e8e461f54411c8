"""Processes that render and tokenize: their results, and the end of endless jobs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import cluster.text.tokenizer_pool
from cluster.system.processes import is_running, wait_gone
from cluster.text.tokenizer import Conversation, PromptError, TextLimit, Tokenizer
from cluster.text.tokenizer_pool import (
    JobTooCostly,
    TokenizerForkServer,
    TokenizerPool,
    TokenizerPoolDown,
    TokenizerPoolFull,
)
from cluster.text.tokenizer_worker import JobLimits
from tests.support.looping import FOREVER, MODEL, looping_model

LIMITS = JobLimits(render_s=0.5, tokenize_s=1.0, memory_bytes=256 << 20)
LIMIT = TextLimit(tokens=2048, chars=65536)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße, 世界! 🌳"}]
LONG = "def f(x):\n    return x + 1\n" * 40_000  # a megabyte: several seconds, 220 MB


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(str(looping_model(tmp_path_factory.mktemp("looping"))))


@pytest.fixture(scope="module")
def parent(tokenizer: Tokenizer) -> Iterator[TokenizerForkServer]:
    parent = TokenizerForkServer(tokenizer, LIMITS)
    parent.wait_loaded()
    yield parent
    parent.close()


@pytest.fixture
async def pool(tokenizer: Tokenizer, parent: TokenizerForkServer) -> AsyncIterator[TokenizerPool]:
    async with TokenizerPool(tokenizer, num_workers=2, parent=parent) as pool:
        await pool.ready()
        yield pool


def workers_of(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [pid for pid in map(int, children) if is_running(pid)]


@contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Stop these workers, which keep their jobs until they go on."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def begin(*jobs: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Start these jobs: each has a worker now, or its place in the queue."""
    tasks = [asyncio.create_task(job) for job in jobs]
    await asyncio.sleep(0)
    return tasks


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def render(pool: TokenizerPool, *messages: dict[str, Any], **options: Any) -> list[int]:
    return await pool.encode_chat(Conversation(messages, **options), LIMIT)


# What they answer


async def test_workers_return_what_the_tokenizer_returns(pool: TokenizerPool, tokenizer: Tokenizer) -> None:
    texts = ["", "a", "  x\n\t", "Grüße, 世界! 🌳", "<|im_start|>", "def f(x):\n    return x\n" * 50]
    for special in (True, False):
        found = await pool.encode(texts, add_special_tokens=special)
        assert found == [tokenizer.encode(text, add_special_tokens=special) for text in texts]
    for ids in found:
        assert await pool.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)
        assert await pool.token_strings(ids) == tokenizer.token_strings(ids)
    assert await pool.bad_words(["return", " x"]) == tokenizer.bad_words(["return", " x"])


async def test_workers_render_what_the_tokenizer_renders() -> None:
    own = Tokenizer(str(MODEL))
    async with TokenizerPool(own, num_workers=1) as pool:
        await pool.ready()
        for options in (
            {"add_generation_prompt": True},
            {"add_generation_prompt": False, "continue_final_message": True},
            {"add_generation_prompt": True, "variables": {"thinking": False}, "add_special_tokens": True},
        ):
            assert await pool.encode_chat(Conversation(CHAT, **options), LIMIT) == own.encode_chat(CHAT, **options)
        (parent,) = pool.pids
        assert "libtorch" not in Path(f"/proc/{parent}/maps").read_text()  # five times the time and memory of the rest
        assert "Threads:\t1\n" in Path(f"/proc/{parent}/status").read_text()  # what forking needs
        pids = [parent, *workers_of(parent)]
    assert wait_gone(pids, timeout_s=60) == []


async def test_a_workers_prompt_error_is_raised_unchanged(pool: TokenizerPool) -> None:
    with pytest.raises(PromptError, match="not valid Unicode") as caught:
        await pool.encode(["a", "\ud800"], add_special_tokens=True)
    assert caught.value.param == "prompt"
    with pytest.raises(PromptError, match="chat template refused") as caught:
        await render(pool, {"role": "user", "content": "x", "turns": "many"})
    assert caught.value.param == "messages"
    with pytest.raises(PromptError, match="not valid Unicode"):
        await render(pool, {"role": "user", "content": "\ud800"})
    with pytest.raises(PromptError, match=r"chat_template_kwargs.chat_template"):
        await render(pool, *CHAT, variables={"chat_template": "X {{ 7*7 }}"})
    assert pool.health().ok


async def test_the_rendered_text_is_checked_before_it_is_tokenized(pool: TokenizerPool) -> None:
    with pytest.raises(
        PromptError, match="65536 characters fit into at the most, and the prompt has 1000009"
    ) as caught:
        await render(pool, {"role": "user", "content": "hi", "times": 1_000_000})
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


# How jobs end


async def test_a_looping_template_is_killed_and_other_jobs_continue(pool: TokenizerPool, tokenizer: Tokenizer) -> None:
    looping = await begin(*(render(pool, FOREVER) for _ in range(4)))
    (ids,) = await pool.encode(["a"], add_special_tokens=True)
    assert ids == tokenizer.encode("a")
    for task in looping:
        with pytest.raises(JobTooCostly, match=r"took more than 0.5 s to render, 1 s to tokenize or 256 MiB") as caught:
            await task
        assert (caught.value.param, caught.value.code) == ("messages", "prompt_too_costly")


async def test_a_job_that_takes_too_long_is_killed(pool: TokenizerPool) -> None:
    with pytest.raises(JobTooCostly) as caught:
        await pool.encode([LONG * 2], add_special_tokens=True)
    assert caught.value.param == "prompt"
    assert await pool.encode(["a"], add_special_tokens=True)


async def test_a_job_that_takes_too_much_memory_is_killed(tokenizer: Tokenizer) -> None:
    limits = JobLimits(tokenize_s=300.0, memory_bytes=32 << 20)
    async with TokenizerPool(tokenizer, num_workers=1, limits=limits) as pool:
        await pool.ready()
        for work in (
            pool.encode([LONG], add_special_tokens=True),  # Rust's memory
            render(pool, {"role": "user", "content": "hi", "times": 100_000_000}),  # Python's
        ):
            with pytest.raises(JobTooCostly, match="32 MiB of memory"):
                await asyncio.wait_for(work, 60)
        assert await pool.encode(["a"], add_special_tokens=True)


async def test_a_cancelled_job_is_killed(pool: TokenizerPool) -> None:
    (parent,) = pool.pids
    before = set(workers_of(parent))
    leaving = await begin(*(render(pool, FOREVER) for _ in range(2)))
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    await until(lambda: len(workers_of(parent)) == 2 and not before & set(workers_of(parent)))
    assert not any(map(is_running, before))
    assert await pool.encode(["a"], add_special_tokens=True)


async def test_a_job_cancelled_in_the_queue_kills_no_worker(pool: TokenizerPool, parent: TokenizerForkServer) -> None:
    workers = workers_of(parent.pid)
    with stopped(workers):
        *running, waiting = await begin(*(pool.encode(["a"], add_special_tokens=True) for _ in range(3)))
        waiting.cancel()
        await asyncio.wait([waiting])
    await asyncio.gather(*running)
    assert await asyncio.gather(*(pool.encode(["a"], add_special_tokens=True) for _ in range(20)))
    assert workers_of(parent.pid) == workers


async def test_the_queue_is_bounded(
    pool: TokenizerPool, parent: TokenizerForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.text.tokenizer_pool, "MAX_WAITING", 3)
    monkeypatch.setattr(cluster.text.tokenizer_pool, "MAX_WAITING_BYTES", 10_000)

    def encode(text: str) -> Coroutine[Any, Any, Any]:
        return pool.encode([text], add_special_tokens=True)

    with stopped(workers_of(parent.pid)):
        accepted = await begin(encode("a"), encode("a"), encode("a" * 9000))  # two run
        with pytest.raises(TokenizerPoolFull, match="1 requests wait"):
            await encode("a" * 9000)
        accepted += await begin(encode("a"), encode("a"))
        with pytest.raises(TokenizerPoolFull, match="3 requests wait"):
            await encode("a")
    assert all(await asyncio.gather(*accepted))


# How they end


async def test_a_killed_idle_worker_is_replaced(pool: TokenizerPool) -> None:
    (parent,) = pool.pids
    victims = workers_of(parent)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not any(map(is_running, victims)))
    await asyncio.sleep(0.1)
    assert await asyncio.gather(*(pool.encode(["a"], add_special_tokens=True) for _ in range(4)))


async def test_a_killed_fork_server_is_restarted(tokenizer: Tokenizer) -> None:
    async with TokenizerPool(tokenizer, num_workers=2, limits=JobLimits(render_s=60.0)) as pool:
        await pool.ready()
        (first,) = pool.pids
        (caught,) = await begin(render(pool, FOREVER))
        os.kill(first, signal.SIGKILL)
        with pytest.raises(TokenizerPoolDown):
            await caught
        assert pool.health() == (False, "the tokenizing workers do not run: they were lost")
        with pytest.raises(TokenizerPoolDown, match="do not run"):
            await pool.encode(["a"], add_special_tokens=True)
        await until(lambda: pool.health().ok)
        assert await asyncio.gather(*(pool.encode(["a"], add_special_tokens=True) for _ in range(4)))
        assert pool.pids != [first]


async def test_a_fork_server_that_cannot_start_raises_an_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    own = Tokenizer(tokenizer.path)
    own.path = str(tmp_path)
    pool = TokenizerPool(own, num_workers=1)
    pool.begin()
    with pytest.raises(TokenizerPoolDown, match="ended with code 1"):
        await pool.ready()
    assert not pool.health().ok


async def test_stuck_workers_are_unhealthy(tokenizer: Tokenizer, parent: TokenizerForkServer) -> None:
    async with TokenizerPool(tokenizer, num_workers=2, parent=parent, stuck_s=0.3) as pool:
        await pool.ready()
        with stopped(workers_of(parent.pid)):
            waiting = await begin(*(pool.encode(["a"], add_special_tokens=True) for _ in range(3)))
            await until(lambda: not pool.health().ok)
            assert "the tokenizing workers are stuck: 3 jobs" in pool.health().reason
        await asyncio.gather(*waiting)
        assert pool.health().ok
        await asyncio.sleep(0.5)
        assert pool.health().ok  # nothing to do is no reason
