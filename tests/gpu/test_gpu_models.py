"""On a CUDA machine: engines of other models and other draft methods than the bundled pair, and quantised weights."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.end_to_end import test_methods as method_cases
from tests.gpu.test_gpu import prompt_logits
from tests.support import checkpoints, quantized
from tests.support.engines import BUNDLED, GenerationJob, Runner
from tests.support.model_runs import Oracle
from workers.comm.ipc import Speculation
from workers.config import DraftConfig, EngineConfig, TreeConfig
from workers.kernels.select import kernels_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing was shown about models there"),
]
DEVICE = "cuda"
VOCAB = 16
"""So few tokens that trees of a random drafter are often right by chance."""
TREE = TreeConfig(num_speculative_tokens=12, max_depth=4, max_children=4)


def on_device(config: EngineConfig) -> EngineConfig:
    """Return an engine on one GPU, with few enough pages for many to share it."""
    assert config.draft is not None
    return replace(config, device=DEVICE, draft=replace(config.draft, placement="colocated"), num_pages=500)  # type: ignore[arg-type]


def hybrid(path: Path) -> DraftConfig:
    """Draft with the hybrid's own layer."""
    checkpoints.add_mtp(checkpoints.write_hybrid(path, vocab_size=VOCAB), "qwen3_5")
    return DraftConfig(method="mtp", model_path=str(path), tree=TREE)


def latent(path: Path) -> DraftConfig:
    config = checkpoints.LATENT["deepseek_v3"] | {"vocab_size": VOCAB}
    checkpoints.add_mtp(checkpoints.write_model(path, "deepseek_v3", **config), "deepseek_v3")
    return DraftConfig(method="mtp", model_path=str(path), tree=TREE)


def capped(path: Path) -> DraftConfig:
    """Draft with the target itself, in a class of transformers with soft caps and windows."""
    family, config = checkpoints.ARCHITECTURES["gemma-2"]
    checkpoints.write_model(path, family, **config | {"vocab_size": VOCAB})
    return DraftConfig(method="draft_model", model_path=str(path), tree=TREE)


@pytest.mark.parametrize("is_drafted", [False, True], ids=["off", "trees"])
@pytest.mark.parametrize("write", [hybrid, latent, capped])
def test_tokens_are_those_that_transformers_finds_most_likely(tmp_path: Path, write: Any, is_drafted: bool) -> None:
    """Prompts are computed in chunks; a hybrid's accepted paths are folded into its states."""
    draft, rng = write(tmp_path), random.Random(5)
    config = on_device(
        EngineConfig(
            model_path=str(tmp_path), draft=draft, max_model_len=256, max_num_seqs=3, max_num_batched_tokens=48
        )
    )
    jobs = [
        GenerationJob(
            prompt=[rng.randrange(VOCAB) for _ in range(length)], max_tokens=18, speculation=Speculation(auto=False)
        )
        for length in (1, 40, 130, 2, 65, 17)
    ]
    with Runner(config if is_drafted else replace(config, draft=None)) as runner:
        answers = runner.run(jobs, concurrency=6)
    oracle = Oracle(tmp_path)
    for job, answer in zip(jobs, answers, strict=True):
        logits = oracle.logits(job.prompt + answer.tokens[:-1])[len(job.prompt) - 1 :]
        best = logits.topk(2).values
        is_clear = best[:, 0] - best[:, 1] > 1e-2
        assert is_clear.sum() > 12 and torch.equal(logits.argmax(-1)[is_clear], torch.tensor(answer.tokens)[is_clear])
    assert (sum(answer.stats.num_accepted_tokens for answer in answers) > 5) is is_drafted


@pytest.mark.parametrize(
    "name", ["dspark of the bundled target", "dspark", "dflash", "p-eagle of the bundled target", "eagle"]
)
def test_tokens_equal_those_without_speculation(tmp_path: Path, name: str) -> None:
    with Runner(on_device(method_cases.METHODS[name](tmp_path))) as runner:
        for temperature in (0.0, 1.0):
            method_cases.test_tokens_equal_those_without_speculation(runner, temperature)


@pytest.mark.parametrize(
    "form",
    [
        "compressed-tensors W4A16",
        "compressed-tensors W4A16, zero points",
        "AWQ",
        "GPTQ",
        "compressed-tensors INT8, a scale per row",
        "GPTQ in 8 bits",
    ],
)
def test_quantised_weights_give_the_logits_of_the_dequantised_ones(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for name in ("kept", "plain"):
        shutil.copytree(BUNDLED / "target", tmp_path / name)
    weights = quantized.quantize(tmp_path / "kept", form)
    save_file(
        {name: w.contiguous() for name, w in weights.items()}, tmp_path / "plain/model.safetensors", {"format": "pt"}
    )
    kept, plain = (prompt_logits(torch.bfloat16, tmp_path / name, kernels_for(DEVICE)) for name in ("kept", "plain"))
    assert "weights are kept in" in caplog.text and (kept - plain).norm() < 2e-2 * plain.norm()
