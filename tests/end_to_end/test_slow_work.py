"""A forward that takes longer than the step timeout does not count as a lost peer."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from typing import Any

import drafter.worker
import verifier.worker
from cluster.engine.engine_client import EngineClient
from tests.support.engines import AUTO, bundled
from tests.support.fakes import in_processes
from verifier.target import Target
from workers.comm import groups
from workers.comm.groups import World
from workers.comm.ipc import Submit
from workers.models.draft_methods import read_specs
from workers.types import TargetStep

STEP_TIMEOUT_S = 3.0
PROMPT = [300 + i % 7 for i in range(150)]
SAID = 24


def run_slowly(world: World) -> str:
    """Each rank as its worker runs it, but the target takes its time over one forward of the start-up profile and over
    the prompt. In rank 0's process a front asks one thing and leaves."""
    groups.join, specs = lambda *_: world, read_specs(world.config)
    if world.rank > 0:
        drafter.worker.run(world.config, specs, world.rank, "")
        return "drafted to the end"
    execute, slow = Target._execute, []

    def executed(self: Target, step: TargetStep, *more: Any) -> list[int] | None:
        rows = len(step.token_N)
        if rows not in slow and rows in (2, len(PROMPT)):
            slow.append(rows)
            time.sleep(1.5 * STEP_TIMEOUT_S)
        return execute(self, step, *more)

    Target._execute = executed  # type: ignore[method-assign]
    answers: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/engine.sock"
        is_open = threading.Event()
        front = threading.Thread(target=lambda: asyncio.run(ask(address, is_open, answers)))
        front.start()
        is_open.wait()
        verifier.worker.run(world.config, specs, 0, "", front=address)
        front.join()
    return f"said {len(answers)} tokens, slow at {slow}"


async def ask(address: str, is_open: threading.Event, answers: list[int]) -> None:
    client = EngineClient()
    await client.listen(address)
    is_open.set()
    await client.wait_ready(60)
    async for chunk in client.submit(Submit(id=1, prompt=PROMPT, max_tokens=SAID, ignore_eos=True)):
        answers += chunk.tokens
    await client.close()


def test_a_drafter_waits_for_a_slow_profile_and_a_slow_prompt():
    config = bundled(AUTO, step_timeout_s=STEP_TIMEOUT_S)
    said = dict(in_processes(run_slowly, config, seconds=120.0))
    assert said == {0: f"said {SAID} tokens, slow at [2, {len(PROMPT)}]", 1: "drafted to the end"}
