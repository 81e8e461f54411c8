"""Hybrids and models with latents equal transformers' classes: prompts, chunks, nodes of trees, what follows a path.

Two correct orders of float32 sums differ by 1e-4 of a hybrid's logits up to 10, since the borders of chunks move.
Transformers computes the keys and values of all heads of a latent, and this decoder none of them.
"""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import checkpoints
from tests.support.attention_cases import paths_of
from tests.support.model_runs import PAGE, SEATS, Oracle, Run, some_tokens
from workers.models.base import BaseDecoder
from workers.models.layers import Runtime
from workers.models.load import load_decoder
from workers.models.readers import read_spec

torch.set_num_threads(1)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("qwen3_5_text", {}),
    "qwen3.5-moe": ("qwen3_5_moe_text", checkpoints.HYBRID_MOE),
    "qwen3-next": ("qwen3_next", checkpoints.HYBRID_MOE),
    "deepseek-v3": ("deepseek_v3", {"rope_parameters": checkpoints.YARN_ROPE}),
    "deepseek-v3 (plain)": (
        "deepseek_v3",
        {"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1},
    ),
    "yarn with two scales": (
        "deepseek_v3",
        {"rope_parameters": checkpoints.YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
    "glm-4.7-flash": ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "dense"]}),
    "youtu": ("youtu", {}),
}


def write(path: Path, name: str, **options: Any) -> Path:
    family, config = MODELS[name]
    if family in checkpoints.LATENT:
        return checkpoints.write_model(path, family, **checkpoints.LATENT[family] | config | options)
    return checkpoints.write_hybrid(path, family, **config | options)


@pytest.fixture(scope="module", params=MODELS)
def any_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module", params=["qwen3.5", "deepseek-v3"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"), request.param)


def assert_close(model: BaseDecoder, actual: Tensor, expected: Tensor) -> None:
    assert (actual - expected).abs().max().item() < (1e-4 if model.spec.delta is None else 5e-4)


def test_prompts_and_chunks_have_the_logits_of_transformers(any_path: Path) -> None:
    rng, oracle, model = random.Random(0), Oracle(any_path), load_decoder(any_path, read_spec(any_path))
    tokens = some_tokens(rng, 200)
    expected = oracle.logits(tokens)
    assert expected.std() > 1, "logits too flat to tell models apart"
    assert_close(model, Run(model).forward([[]], [tokens])[0], expected)
    for sizes in ([1] * 12 + [188], [64, 65, 71], [3, 2, 130, 65]):
        run, ends = Run(model), np.cumsum([0, *sizes]).tolist()
        assert_close(model, torch.cat([run.forward([[]], [tokens[a:b]])[0] for a, b in pairwise(ends)]), expected)


def test_every_node_has_the_logits_of_its_path_whatever_was_accepted_before(path: Path) -> None:
    """Trees of 1 to 64 rows of two requests, some only a root, beside the chunks of a third."""
    rng, oracle, model = random.Random(1), Oracle(path), load_decoder(path, read_spec(path))
    run = Run(model, 3)
    run.forward([[], []], [some_tokens(rng, 5), some_tokens(rng, 70)])
    for step in range(8):
        sizes = [rng.choice([1, 2, 9, 64]), rng.choice([1, 5, 30])]
        trees = [[-1, *(rng.randrange(max(0, row - 6), row) for row in range(1, size))] for size in sizes]
        tokens = [some_tokens(rng, size) for size in sizes]
        before = [list(text) for text in run.texts]
        chunk = some_tokens(rng, rng.choice([1, 7, 20]))
        logits = run.forward([*trees, []], [*tokens, chunk])
        paths = []
        for request, parents in enumerate(trees):
            of_rows = paths_of(parents)
            for row in {0, rng.randrange(len(parents)), len(parents) - 1} if step % 2 else {len(parents) - 1}:
                text = before[request] + [tokens[request][r] for r in of_rows[row]]
                assert_close(model, logits[request][row], oracle.logits(text)[-1])
            paths.append(rng.choice(of_rows))
        assert_close(model, logits[2], oracle.logits(before[2] + chunk)[len(before[2]) :])
        run.accept(paths, tokens)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3.5", {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}),
        ("deepseek-v3", {"num_hidden_layers": 2, "max_position_embeddings": 4096}),
    ],
)
def test_states_and_latents_are_exact_after_a_thousand_trees(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    """Paths of trees, folded or moved step by step, leave what the whole text leaves in few chunks."""
    path = write(tmp_path, name, **options)
    rng, model = random.Random(3), load_decoder(path, read_spec(path))
    run, whole = Run(model, num_pages=200), Run(model, num_pages=200)
    run.forward([[]], [some_tokens(rng, 3)])
    for _ in range(1000):
        parents = [-1, *(rng.randrange(row) for row in range(1, rng.choice([1, 2, 4, 7])))]
        tokens = some_tokens(rng, len(parents))
        run.forward([parents], [tokens])
        run.accept([rng.choice(paths_of(parents))], [tokens])
    last = some_tokens(rng, 1)
    logits = run.forward([[-1]], [last])[0]
    text = run.texts[0]
    for begin in range(0, len(text), 300):
        whole.forward([[]], [text[begin : begin + 300]])
    assert len(text) > 1700
    assert_close(model, logits, whole.forward([[-1]], [last])[0])
    one, other = held(run), held(whole)
    assert (one - other).abs().max() < 1e-5 * other.abs().max()


def held(run: Run) -> Tensor:
    """Return what a run of one sequence holds of its text: its states, or its latents."""
    if run.kv.states is not None:
        return run.kv.states.states[:, SEATS]
    return run.kv.data[:, PAGE : PAGE + len(run.texts[0])]


def test_sixteen_bits_are_near_the_exact_logits(path: Path) -> None:
    rng, exact = random.Random(8), load_decoder(path, read_spec(path))
    half = load_decoder(path, read_spec(path), Runtime(dtype=torch.bfloat16))
    tokens, parents, drafts = some_tokens(rng, 20), [-1, 0, 0, 2], some_tokens(rng, 4)
    logits = []
    for model in (exact, half):
        run = Run(model)
        run.forward([[]], [tokens])
        run.forward([parents], [drafts])
        run.accept([[0, 2, 3]], [drafts])
        logits.append(run.forward([[-1, 0]], [[5, 6]])[0])
        assert run.kv.states is None or run.kv.states.states.dtype == torch.float32, "states keep their bits"
    assert (logits[1] - logits[0]).abs().mean() < 0.1 * logits[0].std()


@pytest.mark.parametrize("name", ["qwen3.5", "deepseek-v3"])
def test_fp8_blocks_are_read_by_section_head_and_pair(tmp_path: Path, name: str) -> None:
    """Rows of rotated widths change their places, which no block of rows survives."""
    path = write(tmp_path / "exact", name, hidden_size=128)
    checkpoints.dequantize_fp8(checkpoints.quantize_fp8(path, (32, 64)), tmp_path / "whole")
    tokens = some_tokens(random.Random(9), 12)
    model, whole = (load_decoder(at, read_spec(at)) for at in (path, tmp_path / "whole"))
    assert_close(model, *(Run(one).forward([[]], [tokens])[0] for one in (model, whole)))
