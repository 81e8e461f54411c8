"""Draft heads that are swapped while requests run: no token changes, whatever else happens to them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.engine import process_host
from cluster.engine.engine_client import EngineClient
from cluster.engine.local_engine import LocalEngine
from cluster.head_check import checked_head
from cluster.local_service import local_service
from drafter.learning.learner import learnt_heads
from secateur.cli import main
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from tests.support.engines import BUNDLED, DYNAMIC, bundled, prompts
from workers.comm.ipc import Speculation, Submit
from workers.config import EngineConfig
from workers.sampling.grammar import grammar_text
from workers.settings import Constraints, HeadAction, SamplingSettings

pytestmark = pytest.mark.slow

LENGTH = 60
NUM_SWAPS = 10
SERVING = BUNDLED / "eagle3"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a head whose weights differ so much that it drafts other tokens."""
    folder = copytree(SERVING, tmp_path_factory.mktemp("head") / "other")
    generator = torch.Generator().manual_seed(1)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if weight.is_floating_point():
                noise = torch.randn(weight.shape, generator=generator) * weight.float().std()
                weights[name] = (weight.float() + 0.3 * noise).to(weight.dtype)
        save_file(weights, file)
    return folder


def submits() -> list[Submit]:
    """Return greedy, seeded and constrained requests."""
    grammar = Constraints(grammar=grammar_text("regex", r"[a-z ]{40,200}"))
    kinds = [
        SamplingSettings(temperature=0.0),
        SamplingSettings(seed=5),
        SamplingSettings(seed=6, temperature=0.7, top_p=0.9, constraints=Constraints(frequency_penalty=0.5)),
        SamplingSettings(seed=7, constraints=grammar),
    ]
    return [
        Submit(id=0, prompt=prompt, max_tokens=LENGTH, sampling=kinds[i % 4], ignore_eos=i % 4 != 3)
        for i, prompt in enumerate(prompts(8))
    ]


async def replace_drafter(client: EngineClient, local: LocalEngine) -> None:
    """Kill the drafter, and wait for its successor."""
    os.kill(local.pids[-1], signal.SIGKILL)
    while client.drafter_lost is None:
        await asyncio.sleep(0.1)
    while client.drafter_lost is not None:
        await asyncio.sleep(0.1)


async def answer(client: EngineClient, submit: Submit) -> list[int]:
    chunks = [chunk async for chunk in client.submit(replace(submit, id=client.new_id()))]
    assert chunks[-1].finish_reason != "error", chunks[-1].error
    return [token for chunk in chunks for token in chunk.tokens]


def engine(tp: int, num_pages: int | None = None, learnt: Path | None = None) -> EngineConfig:
    """Return the configuration of an engine whose drafter learns, if there is a folder for what it learnt."""
    config = bundled(DYNAMIC, tp=tp, draft_tp=1 if learnt else tp, num_pages=num_pages)
    if learnt is not None and config.draft is not None:
        config = replace(config, draft=replace(config.draft, learning_path=str(learnt)))
    return replace(config, tokenizer_path=str(BUNDLED / "target"), eos_token_ids=(0, 2))


def few_pages(tp: int) -> int:
    """Return too few pages for all requests at once, so that some are preempted."""
    return 3 * engine(tp).pages_for(max(len(submit.prompt) for submit in submits()) + LENGTH)


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.full), 2])
def test_ten_swaps_in_mid_stream_change_no_token(other: Path, tp: int) -> None:
    asked = submits()

    async def run() -> None:
        local = LocalEngine(engine(tp, few_pages(tp)))
        async with local as client:
            plain = [await answer(client, replace(own, speculation=Speculation(enabled=False))) for own in asked]
            accepted = client.stats.num_accepted_tokens
            in_flight = 0

            async def swaps() -> None:
                nonlocal in_flight
                while len(client.swaps) < NUM_SWAPS:
                    ended = await client.swap_head(str(SERVING if len(client.swaps) % 2 else other))
                    assert ended.error is None
                    in_flight += client.num_pending > 0

            swapping = asyncio.create_task(swaps())
            while not swapping.done():
                assert await asyncio.gather(*(answer(client, own) for own in asked)) == plain
            await swapping
            assert in_flight >= NUM_SWAPS - 1
            assert client.stats.num_accepted_tokens > accepted and client.stats.num_preemptions > 0

    asyncio.run(run())


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 2])
def test_heads_that_learn_and_a_drafter_that_dies_while_it_learns_change_no_token(
    other: Path, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost with the drafter but its copy: the next one goes on from the head that drafted last."""
    monkeypatch.setattr(process_host, "PRELOADED", (*process_host.PRELOADED, "tests.support.hasty_learning"))
    asked = submits()

    async def run() -> None:
        local = LocalEngine(engine(tp, few_pages(tp), learnt=tmp_path))
        async with local as client:
            off = [replace(own, speculation=Speculation(enabled=False)) for own in asked]
            plain = await asyncio.gather(*(answer(client, own) for own in off))
            by_request = 0

            async def swap_until(num_swaps: int) -> None:
                nonlocal by_request
                while client.num_swaps < num_swaps or by_request < num_swaps // 5:
                    if client.num_swaps >= 4 * (by_request + 1):  # so most are of what was learnt
                        by_request += (await client.swap_head(str(SERVING if by_request % 2 else other))).error is None
                    await asyncio.sleep(0.01)

            async def ask_until(num_swaps: int) -> None:
                swapping = asyncio.create_task(swap_until(num_swaps))
                while not swapping.done():
                    assert await asyncio.gather(*(answer(client, own) for own in asked)) == plain
                await swapping

            await ask_until(NUM_SWAPS)
            running = [asyncio.create_task(answer(client, own)) for own in asked]
            while not client.num_pending:
                await asyncio.sleep(0.01)
            os.kill(local.pids[-1], signal.SIGKILL)
            assert await asyncio.gather(*running) == plain
            while client.drafter_lost is not None or not client.stats.has_drafter:
                await asyncio.sleep(0.1)
            for folder in learnt_heads(tmp_path):
                assert load_file(folder / "model.safetensors").keys() == load_file(SERVING / "model.safetensors").keys()
            await ask_until(2 * NUM_SWAPS)
            assert client.num_swaps >= 2 * NUM_SWAPS and client.num_swaps - by_request >= NUM_SWAPS
            assert client.stats.num_preemptions > 0 and client.stats.num_accepted_tokens > 0

    asyncio.run(run())


def test_a_drafter_that_dies_while_it_loads_costs_the_swap_alone(other: Path) -> None:
    """The drafter that takes its place has the head that drafted last."""
    asked = submits()[:4]

    async def run() -> None:
        local = LocalEngine(engine(1))
        async with local as client:
            plain = [await answer(client, replace(own, speculation=Speculation(enabled=False))) for own in asked]
            running = [asyncio.create_task(answer(client, own)) for own in asked]
            os.kill(local.pids[-1], signal.SIGSTOP)  # so that it does not load first
            swapping = asyncio.create_task(client.swap_head(str(other)))
            await asyncio.sleep(0.1)
            os.kill(local.pids[-1], signal.SIGKILL)
            ended = await swapping
            assert ended.error is not None and "lost" in ended.error and not client.swaps
            assert await asyncio.gather(*running) == plain
            while client.drafter_lost is not None:
                await asyncio.sleep(0.1)
            assert (await client.swap_head(str(other))).error is None
            assert [await answer(client, own) for own in asked] == plain
            await replace_drafter(client, local)
            assert [await answer(client, own) for own in asked] == plain

    asyncio.run(run())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = {"port": 0, "device": "cpu", "admin_api_key": "boss", "api_key": "user"}
    with local_service(EngineArgs.load(settings)) as url:
        yield url


def swap(url: str, body: dict[str, Any], key: str = "boss") -> httpx2.Response:
    return httpx2.post(f"{url}/admin/drafter", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)


def test_over_http_the_answer_has_both_heads_and_what_was_accepted(url: str, other: Path) -> None:
    body = {"prompt": "def f(x):\n", "max_tokens": 40, "temperature": 0, "speculative": {"tree_prune": "off"}}
    user = {"Authorization": "Bearer user"}

    def text() -> str:
        answered = httpx2.post(f"{url}/v1/completions", json=body, headers=user, timeout=60).json()
        told: str = answered["choices"][0]["text"]
        return told

    assert swap(url, {"model": None}).status_code == 400
    first = text()
    there = swap(url, {"model": str(other)}).json()
    assert (there["old"]["model"], there["new"]["model"]) == (str(SERVING), str(other))
    assert there["old"]["accepted_per_draft"] > 1 and there["new"]["num_drafts"] == 0
    assert text() == first
    back = swap(url, {"model": None}).json()
    assert (back["old"]["model"], back["new"]["model"]) == (str(other), str(SERVING))
    assert back["old"]["accepted_per_draft"] < there["old"]["accepted_per_draft"]
    assert text() == first
    heads = httpx2.get(f"{url}/server_info", headers=user).json()["draft_heads"]
    assert [head["version"] for head in heads] == [0, 1, 2] and heads[2]["num_drafts"] > 0


def test_a_head_that_does_not_fit_is_refused_by_name(url: str, other: Path, tmp_path: Path) -> None:
    assert swap(url, {"model": str(other)}, key="user").status_code == 401
    broken = copytree(other, tmp_path / "broken")
    [file] = broken.glob("*.safetensors")
    weights = load_file(file)
    del weights["norm.weight"]
    save_file(weights, file)
    for folder, told in (
        (BUNDLED / "draft", "is not an EAGLE-3 head"),
        (BUNDLED / "smollm2-eagle3", "vocabulary of 49152"),
        (broken, "norm.weight"),
        (tmp_path / "none", "no model at"),
    ):
        refused = swap(url, {"model": str(folder)})
        assert refused.status_code == 400 and told in refused.json()["error"]["message"], refused.text


def test_the_command_swaps_and_rolls_back(
    url: str, other: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECATEUR_ADMIN_API_KEY", "boss")
    assert main(["drafter", "swap", str(other), "--url", url]) == 0
    assert f"{other} drafts now" in capsys.readouterr().out
    assert main(["drafter", "rollback", "--base-url", url]) == 0
    assert f"before: {other}" in capsys.readouterr().out
    assert main(["drafter", "swap", str(BUNDLED / "draft"), "--url", url]) == 1
    assert "is not an EAGLE-3 head" in capsys.readouterr().err


def test_a_drafter_that_dies_forgets_the_head_that_it_scored(other: Path) -> None:
    asked = submits()[:4]

    async def run() -> None:
        local = LocalEngine(engine(1))
        async with local as client:
            plain = [await answer(client, own) for own in asked]
            assert (await client.swap_head(str(other), HeadAction.SCORE, 1000)).error is None
            assert [await answer(client, own) for own in asked] == plain
            told = json.loads((await client.swap_head("", HeadAction.TELL)).scores)
            assert told["model"] == str(other) and told["steps_left"] < 1000 and not client.swaps
            await replace_drafter(client, local)
            assert [await answer(client, own) for own in asked] == plain
            ended = await client.swap_head("", HeadAction.TELL)
            assert (ended.error, ended.scores) == (None, "")

    asyncio.run(run())


def canary(url: str, *words: str) -> int:
    return main(["drafter", "canary", *words, "--url", url])


def test_a_candidate_is_scored_on_live_requests_and_drafts_nothing(
    url: str, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the serving head makes no difference, one with a noised fusion is worse, and no token changes.

    The fusion is the verifier's part, so the scores are of the candidate's own features.
    """
    noised = copytree(SERVING, tmp_path / "noised")
    [file] = noised.glob("*.safetensors")
    weights = load_file(file)
    fc_HX = weights["fc.weight"]
    noise = torch.randn(fc_HX.shape, generator=torch.Generator().manual_seed(1))
    save_file(weights | {"fc.weight": (fc_HX + fc_HX.float().std() * noise).to(fc_HX.dtype)}, file)
    monkeypatch.setenv("SECATEUR_ADMIN_API_KEY", "boss")
    user, admin = {"Authorization": "Bearer user"}, {"Authorization": "Bearer boss"}

    def texts() -> list[str]:
        told = []
        for text in ("def f(x):\n", "import os\n", "class A:\n"):
            body: dict[str, Any] = {"prompt": text, "max_tokens": 150, "temperature": 0, "ignore_eos": True}
            body["speculative"] = {"tree_prune": "off"}  # so that every step drafts
            answered = httpx2.post(f"{url}/v1/completions", json=body, headers=user, timeout=60).json()
            told.append(answered["choices"][0]["text"])
        return told

    def scored(until: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        for _ in range(60):
            assert texts() == plain
            told: dict[str, Any] = httpx2.get(f"{url}/admin/drafter", headers=admin).json()
            if until(told):
                return told
        raise AssertionError(told)

    plain, heads = texts(), len(httpx2.get(f"{url}/server_info", headers=user).json()["draft_heads"])
    assert canary(url) == 1 and "no head is being scored" in capsys.readouterr().err
    for folder, verdict in ((SERVING, "no difference"), (noised, "worse")):
        assert canary(url, str(folder), "--steps", "100000") == 0
        assert "drafts nothing; 100000 steps to go" in capsys.readouterr().out
        told = scored(lambda told: told["verdict"] != "too few tokens")
        assert (told["model"], told["verdict"]) == (str(folder), verdict) and told["num_tokens"] > 300
        assert 0 < told["steps_left"] < 100000 and 0 < told["serving"]["acceptance"][0] < 1
        assert canary(url) == 0 and f"tokens: {verdict}" in capsys.readouterr().out
    assert canary(url, "--stop") == 0 and "tokens: worse" in capsys.readouterr().out
    assert canary(url) == 1 and "no head is being scored" in capsys.readouterr().err
    assert canary(url, str(other), "--steps", "5") == 0
    assert scored(lambda told: told["steps_left"] == 0)["model"] == str(other)
    assert len(httpx2.get(f"{url}/server_info", headers=user).json()["draft_heads"]) == heads, "none was taken over"
    assert swap(url, {"model": str(other)}).status_code == 200
    assert canary(url) == 1, "scores against another head than the one that drafts are gone"
    assert swap(url, {"model": None}).status_code == 200 and texts() == plain


def test_a_candidate_that_cannot_be_scored_is_refused_by_name(url: str) -> None:
    refused = swap(url, {"model": str(BUNDLED / "draft"), "canary_steps": 10})
    assert refused.status_code == 400 and "is not an EAGLE-3 head" in refused.json()["error"]["message"]
    assert canary(url, str(SERVING), "--stop") == 2
    serving = engine(1).draft
    assert serving is not None
    for config, told in (
        (replace(engine(1), draft=replace(serving, learning_path="/heads")), "leave canary_steps out"),
        (replace(engine(1), device="cuda"), "canary_steps is implemented on CPUs"),
        (engine(2), "write draft_tensor_parallel_size 1"),
    ):
        with pytest.raises(ConfigError, match=told):
            checked_head(config, str(SERVING), str(SERVING))
