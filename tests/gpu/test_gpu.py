"""On a CUDA machine: drafter and verifier as plain processes, and the numbers of bfloat16.

One GPU is enough, because the drafter is colocated with the verifier. Two ranks on one device also test NCCL, which is
made to believe that they are on two machines. Run with `make gpu`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import numpy as np
import pytest
import torch

from cluster.engine.local_engine import LocalEngine
from cluster.engine.process_host import ProcessHost
from cluster.engine.rank_placement import num_bundles
from tests.end_to_end.test_batch_invariance import (
    test_texts_do_not_depend_on_drafts_or_on_other_requests as assert_independent_texts,
)
from tests.support import checkpoints
from tests.support.engines import (
    AUTO,
    BUNDLED,
    CHAIN,
    DYNAMIC,
    STATIC,
    GenerationJob,
    Runner,
    bundled,
    prompts,
    transformers_greedy,
)
from tests.support.fakes import in_processes
from tests.workers.comm.test_channel import exchange_features
from workers.comm import channel, lent_memory
from workers.comm.groups import World
from workers.comm.ipc import Submit
from workers.config import DraftConfig, EngineConfig, TreeConfig
from workers.kernels.select import TORCH, Kernels, kernels_for
from workers.models.layers import Runtime
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.settings import SamplingSettings
from workers.types import AttentionMetadata

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing was shown about GPUs here"),
]
NUM_TOKENS = 64
needs_float8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="a GPU that does not convert float8",
)


def on_cuda(tree: TreeConfig | None, **options: Any) -> EngineConfig:
    config = bundled(tree, device="cuda", dtype="float32", memory_utilization=0.5, **options)
    if config.draft is None or torch.cuda.device_count() >= config.world_size:
        return config
    return replace(config, draft=replace(config.draft, placement="colocated"))


@pytest.fixture(scope="module")
def truth() -> list[list[int]]:
    return transformers_greedy(prompts(12), NUM_TOKENS, device="cuda")


@pytest.mark.parametrize(
    "tree", [None, CHAIN, STATIC, DYNAMIC, AUTO], ids=["off", "chain", "static", "dynamic", "auto"]
)
def test_greedy_tokens_equal_transformers_generate(tree: TreeConfig | None, truth: list[list[int]]) -> None:
    jobs = [GenerationJob(prompt=prompt, max_tokens=NUM_TOKENS) for prompt in prompts(12)]
    with Runner(on_cuda(tree)) as runner:
        for concurrency in (1, 8):
            assert [answer.tokens for answer in runner.run(jobs, concurrency)] == truth


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"kernels": "torch"}], ids=["eager", "torch"])
def test_neither_graphs_nor_kernels_change_a_token(options: dict[str, object], truth: list[list[int]]) -> None:
    """The other tests run Triton kernels from graphs."""
    assert tokens_of(on_cuda(DYNAMIC, **options)) == truth


def test_seeded_tokens_do_not_depend_on_speculation() -> None:
    sampling = SamplingSettings(temperature=1.0, top_p=0.9, seed=5)
    jobs = [GenerationJob(prompt=prompt, sampling=sampling) for prompt in prompts(12)]
    with Runner(on_cuda(None)) as plain, Runner(on_cuda(DYNAMIC)) as drafted:
        alone = [answer.tokens for answer in plain.run(jobs)]
        assert [answer.tokens for answer in drafted.run(jobs, concurrency=8)] == alone


@pytest.mark.parametrize("options", [{}, {"kernels": "torch"}], ids=["triton", "torch"])
def test_a_kv_cache_in_8_bits_gives_the_same_tokens_with_and_without_drafts(options: dict[str, object]) -> None:
    if not options and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton converts no e4m3 on this GPU")
    samplings = [SamplingSettings(temperature=0.0), SamplingSettings(top_p=0.9, seed=5)]
    jobs = [
        GenerationJob(prompt=prompt, max_tokens=NUM_TOKENS, sampling=samplings[i % 2])
        for i, prompt in enumerate(prompts(12))
    ]
    answers = []
    for tree in (None, CHAIN, DYNAMIC, AUTO):
        with Runner(on_cuda(tree, kv_cache_dtype="fp8", **options)) as runner:
            answers.append([answer.tokens for answer in runner.run(jobs, concurrency=8)])
    assert answers[1:] == answers[:1] * 3
    with Runner(on_cuda(None, **options)) as runner:
        assert answers[0] != [answer.tokens for answer in runner.run(jobs, concurrency=8)], "nothing was rounded"


def test_batch_invariant_texts_in_bfloat16_do_not_depend_on_drafts_or_on_other_requests() -> None:
    assert_independent_texts(replace(on_cuda(DYNAMIC, batch_invariant=True), dtype="bfloat16"))


def show_gpus(monkeypatch: pytest.MonkeyPatch, config: EngineConfig) -> None:
    """Show an engine as many GPUs as it needs.

    If there are fewer they are the same ones again, as parts of different machines, or NCCL would refuse them.
    """
    count, need = torch.cuda.device_count(), num_bundles(config)
    if count >= need:
        return
    start = ProcessHost.start

    async def start_elsewhere(*args: Any, env: Mapping[str, str], **options: Any) -> str:
        own_machine = {"NCCL_HOSTID": str(uuid4()), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        return await start(*args, env={**env, **own_machine}, **options)

    monkeypatch.setattr(ProcessHost, "start", start_elsewhere)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(str(index % count) for index in range(need)))


@pytest.mark.parametrize("link", ["nccl", "auto", "host"])
@pytest.mark.parametrize("tree", [CHAIN, AUTO], ids=["chain", "auto"])
def test_nccl_and_the_host_carry_the_same_tokens(
    tree: TreeConfig, link: Any, truth: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_gpus(tree, link=link)
    show_gpus(monkeypatch, config)
    assert tokens_of(config) == truth


@pytest.mark.parametrize(("draft_tp", "placement"), [(1, "colocated"), (2, "colocated"), (1, "dedicated")])
def test_a_split_target_gives_the_same_tokens(
    draft_tp: int, placement: Any, truth: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_gpus(AUTO, tp=2, draft_tp=draft_tp, placement=placement)
    show_gpus(monkeypatch, config)
    assert tokens_of(config) == truth


def test_a_drafter_that_dies_while_it_is_fed_over_nccl_costs_no_token(
    truth: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages to it wait on the verifier's device, and must not hold up the next forward pass."""
    config = on_gpus(CHAIN, link="nccl")
    show_gpus(monkeypatch, config)

    async def main() -> list[list[int]]:
        engine = LocalEngine(config)
        async with engine as client:

            async def answer(prompt: list[int]) -> list[int]:
                greedy = SamplingSettings(temperature=0.0)
                submit = Submit(
                    id=client.new_id(), prompt=prompt, max_tokens=NUM_TOKENS, sampling=greedy, ignore_eos=True
                )
                return [token async for chunk in client.submit(submit) for token in chunk.tokens]

            os.kill(engine.pids[-1], signal.SIGSTOP)  # it takes nothing more
            waiting = asyncio.gather(*map(answer, prompts(12)))
            await asyncio.sleep(1.0)
            os.kill(engine.pids[-1], signal.SIGKILL)
            return await asyncio.wait_for(waiting, 60)

    assert asyncio.run(main()) == truth


def test_features_stay_on_a_gpu_that_drafter_and_verifier_share() -> None:
    """The memory that they fit into is opened once, and once again where some need more."""
    draft = DraftConfig(method="eagle3", model_path="", placement="colocated")
    said = dict(in_processes(share_a_gpu, EngineConfig(model_path="", device="cuda", draft=draft)))
    assert said == {0: "opened 0 times", 1: "opened 2 times"}


def share_a_gpu(world: World) -> str:
    channel._LARGE = 1  # or few rows would take the host
    with patch.object(lent_memory, "borrow", wraps=lent_memory.borrow) as borrow:
        assert world.link is not None
        exchange_features(world.link, world.rank)
        return f"opened {borrow.call_count} times"


def on_gpus(tree: TreeConfig, placement: Any = "dedicated", link: Any = "auto", **options: Any) -> EngineConfig:
    """Return an engine whose ranks have a GPU each, or few enough pages for all to share one."""
    config = bundled(tree, device="cuda", dtype="float32", num_pages=1000, **options)
    assert config.draft is not None
    return replace(config, draft=replace(config.draft, placement=placement, link=link))


def tokens_of(config: EngineConfig) -> list[list[int]]:
    jobs = [GenerationJob(prompt=prompt, max_tokens=NUM_TOKENS) for prompt in prompts(12)]
    with Runner(config) as runner:
        return [answer.tokens for answer in runner.run(jobs, concurrency=8)]


def test_bfloat16_logits_stay_within_five_percent_of_float32() -> None:
    logits = [prompt_logits(dtype) for dtype in (torch.float32, torch.bfloat16)]
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert error < 5e-2


@pytest.fixture(scope="module")
def in_8_bits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the bundled target in FP8 blocks, and its dequantized copy."""
    root = tmp_path_factory.mktemp("fp8")
    shutil.copytree(BUNDLED / "target", root / "kept")
    checkpoints.quantize_fp8(root / "kept", (128, 128))
    return root / "kept", checkpoints.dequantize_fp8(root / "kept", root / "plain")


@needs_float8
def test_weights_in_8_bits_give_the_logits_of_the_dequantized_ones(in_8_bits: tuple[Path, Path]) -> None:
    kept, plain = (prompt_logits(torch.bfloat16, path, kernels_for("cuda")) for path in in_8_bits)
    assert (kept - plain).norm() < 2e-2 * plain.norm()


@needs_float8
def test_engines_in_8_bits_begin_as_the_dequantized_ones(in_8_bits: tuple[Path, Path]) -> None:
    """In bfloat16 sums in another order may decide a near-tie, so a few prompts may go on otherwise."""
    config = on_cuda(DYNAMIC)
    kept, plain = (tokens_of(replace(config, model_path=str(path), dtype="bfloat16")) for path in in_8_bits)
    same = [one[:8] == other[:8] for one, other in zip(kept, plain, strict=True)]
    assert sum(same) >= 0.75 * len(same)


def prompt_logits(dtype: torch.dtype, path: Path = BUNDLED / "target", kernels: Kernels = TORCH) -> torch.Tensor:
    """Return the logits [N, V] of one prompt, run as a single chunk."""
    tokens = torch.tensor(prompts(6)[0], dtype=torch.int32)
    model = load_decoder(path, read_spec(path), Runtime(device="cuda", dtype=dtype, kernels=kernels))
    count, page_size = len(tokens), 16
    position = torch.arange(count, dtype=torch.int32)
    num_pages = -(-count // page_size)
    metadata = AttentionMetadata(
        query_offsets=np.array([0, count], dtype=np.int32),
        page_table_BP=np.arange(1, 1 + num_pages, dtype=np.int32)[None],
        base_B=np.zeros(1, dtype=np.int32),
        slot_N=position.numpy(),
        visible_N=position.numpy() + 1,
        ancestors_N=np.zeros(count, dtype=np.int64),
    )
    pool = model.new_kv_pool((1 + num_pages) * page_size)
    hidden = model.forward(tokens.cuda(), position.cuda(), model.plan(metadata, page_size), pool)
    return model.logits(hidden.final_ND)
