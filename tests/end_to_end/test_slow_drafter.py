"""Drafter and target take their time, the drafter once very long: no token changes, however their work overlaps."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import threading
import time
from typing import Any

import pytest

import drafter.worker
import verifier.worker
from cluster.engine.engine_client import EngineClient
from drafter.drafter import Drafter
from tests.support.engines import DYNAMIC, bundled, prompts
from tests.support.fakes import in_processes
from verifier.target import Target
from workers.comm import groups
from workers.comm.groups import World
from workers.comm.ipc import Submit
from workers.config import EngineConfig
from workers.models.draft_methods import read_specs
from workers.settings import SamplingSettings
from workers.types import DraftReply, DraftRequest, TargetStep

NUM_REQUESTS, NUM_TOKENS = 6, 32
MOST_LATE_S, STALL_S = 0.05, 2.0
STALLED = 6
"""The message at which the drafter stalls, those of the warm-up included. Later ones queue behind it."""


def run(world: World) -> str:
    """Each rank as its worker runs it, but the drafter and the target are late. In rank 0's process a front asks."""
    groups.join, specs = lambda *_: world, read_specs(world.config)
    if world.rank > 0:
        _draft_late()
        drafter.worker.run(world.config, specs, world.rank, "")
        return ""
    _execute_late()
    said: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        address, is_open = f"unix:{folder}/engine.sock", threading.Event()
        front = threading.Thread(target=lambda: said.update(asyncio.run(_ask(address, is_open))))
        front.start()
        is_open.wait()
        verifier.worker.run(world.config, specs, 0, "", front=address)
        front.join()
    return json.dumps(said)


def _draft_late() -> None:
    draft, late, messages = Drafter.draft, random.Random(1), 0

    def drafted_late(self: Drafter, message: DraftRequest) -> DraftReply:
        nonlocal messages
        messages += 1
        time.sleep(STALL_S if messages == STALLED else late.uniform(0.0, MOST_LATE_S))
        return draft(self, message)

    Drafter.draft = drafted_late  # type: ignore[method-assign]


def _execute_late() -> None:
    execute, late = Target._execute, random.Random(2)

    def executed(self: Target, step: TargetStep, *more: Any) -> list[int] | None:
        time.sleep(late.uniform(0.0, MOST_LATE_S))
        return execute(self, step, *more)

    Target._execute = executed  # type: ignore[method-assign]


async def _ask(address: str, is_open: threading.Event) -> dict[str, Any]:
    client = EngineClient()
    await client.listen(address)
    is_open.set()
    await client.wait_ready(60)

    async def answer(number: int, prompt: list[int]) -> list[int]:
        sampling = SamplingSettings(temperature=float(number % 2), seed=number)
        request = Submit(id=number, prompt=prompt, max_tokens=NUM_TOKENS, ignore_eos=True, sampling=sampling)
        return [token async for chunk in client.submit(request) for token in chunk.tokens]

    answers = await asyncio.gather(*map(answer, range(NUM_REQUESTS), prompts(NUM_REQUESTS)))
    stats = client.stats
    await client.close()
    return {"answers": answers, "drafts": stats.num_drafts}


def said_with(config: EngineConfig) -> dict[str, Any]:
    """Return what the front of an engine with this configuration got."""
    [text] = filter(None, dict(in_processes(run, config, seconds=120.0)).values())
    said: dict[str, Any] = json.loads(text)
    return said


@pytest.fixture(scope="module")
def plain_answers() -> list[list[int]]:
    answers: list[list[int]] = said_with(bundled())["answers"]
    assert [len(answer) for answer in answers] == [NUM_TOKENS] * NUM_REQUESTS
    return answers


def test_late_ranks_change_no_token(plain_answers: list[list[int]]) -> None:
    said = said_with(bundled(DYNAMIC))
    assert said["answers"] == plain_answers
    assert said["drafts"] > 2 * STALLED, "it drafted after the stall"
