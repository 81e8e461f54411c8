"""A DeepSeek-V3 and its kin equal transformers' classes: prompts, chunks, every node of trees, and what follows them.

Transformers computes the keys and values of all heads, and this decoder none of them.
"""

from __future__ import annotations

import json
import random
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from drafter.proposers.eagle import FcHead
from tests.support import checkpoints
from tests.support.attention_cases import paths_of
from tests.workers.models.test_hybrid import PAGE, Oracle, Run, some_tokens
from workers.kv_cache import FP8, KVPool
from workers.models.draft_methods import check_kinds
from workers.models.fc_head_format import read_mtp_spec
from workers.models.layers import Runtime
from workers.models.load import load_decoder
from workers.models.quantization import read_quantization
from workers.models.readers import read_spec
from workers.models.specs import Specs
from workers.types import AttentionMetadata

torch.set_num_threads(1)

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
YARN |= {"beta_fast": 32, "beta_slow": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek-v3 (plain)": (
        "deepseek_v3",
        {"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1},
    ),
    "yarn with two scales": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    "glm-4.7-flash": ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "dense"]}),
    "youtu": ("youtu", {}),
}


def write(path: Path, name: str = "deepseek-v3") -> Path:
    family, config = MODELS[name]
    return checkpoints.write_model(path, family, **checkpoints.LATENT[family] | config)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("latent"))


@pytest.fixture(scope="module", params=MODELS)
def any_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("latent"), request.param)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual - expected).abs().max().item() < 1e-4


def test_prompts_and_chunks_have_the_logits_of_transformers(any_path: Path) -> None:
    rng, oracle, model = random.Random(0), Oracle(any_path), load_decoder(any_path, read_spec(any_path))
    tokens = some_tokens(rng, 200)
    expected = oracle.logits(tokens)
    assert expected.std() > 1, "logits too flat to tell models apart"
    assert_close(Run(model).forward([[]], [tokens])[0], expected)
    for sizes in ([1] * 12 + [188], [3, 2, 130, 65]):
        run, ends = Run(model), [0, *torch.tensor(sizes).cumsum(0).tolist()]
        assert_close(torch.cat([run.forward([[]], [tokens[a:b]])[0] for a, b in pairwise(ends)]), expected)


def test_every_node_has_the_logits_of_its_path(path: Path) -> None:
    """Trees of 1 to 64 rows of two requests, some only a root, beside the chunks of a third."""
    rng, oracle, model = random.Random(1), Oracle(path), load_decoder(path, read_spec(path))
    run = Run(model, 3)
    run.forward([[], []], [some_tokens(rng, 5), some_tokens(rng, 70)])
    for _ in range(6):
        sizes = [rng.choice([1, 2, 9, 64]), rng.choice([1, 5, 30])]
        trees = [[-1, *(rng.randrange(max(0, row - 6), row) for row in range(1, size))] for size in sizes]
        tokens = [some_tokens(rng, size) for size in sizes]
        before = [list(text) for text in run.texts]
        chunk = some_tokens(rng, rng.choice([1, 7, 20]))
        logits = run.forward([*trees, []], [*tokens, chunk])
        for request, parents in enumerate(trees):
            of_rows = paths_of(parents)
            for row in {0, rng.randrange(len(parents)), len(parents) - 1}:
                text = before[request] + [tokens[request][r] for r in of_rows[row]]
                assert_close(logits[request][row], oracle.logits(text)[-1])
        assert_close(logits[2], oracle.logits(before[2] + chunk)[len(before[2]) :])
        run.accept([rng.choice(paths_of(parents)) for parents in trees], tokens)


def test_a_token_takes_one_latent_and_nothing_for_each_head(path: Path) -> None:
    model = load_decoder(path, read_spec(path))
    kv = model.new_kv_pool(32)
    assert kv.data.shape == (3, 32, 1, 1, 32 + 8) and model.bytes_per_slot(torch.float32) == 3 * 40 * 4
    assert model.bytes_per_slot(FP8) == 3 * 40 == KVPool(3, 1, 1, 40, FP8, "cpu", num_parts=1).data.nbytes


def test_kimis_have_the_network_of_deepseek(path: Path, tmp_path: Path) -> None:
    """Kimi-K2 has a model_type of its own, which transformers does not know; Kimi-K2.5 adds eyes and prefixes."""
    config = json.loads((path / "config.json").read_text()) | {"model_type": "kimi_k2"}
    tensors = load_file(path / "model.safetensors")
    tokens = some_tokens(random.Random(4), 20)
    expected = Run(load_decoder(path, read_spec(path))).forward([[]], [tokens])[0]
    wrapper = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": config}
    prefixed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    prefixed |= {name: torch.ones(4) for name in ("vision_tower.patch_embed.proj.bias", "mm_projector.proj.0.bias")}
    code = {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    for name, own, stored in (("k2", config | code, tensors), ("k25", wrapper | code, prefixed)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(own))
        save_file(stored, folder / "model.safetensors")
        spec = read_spec(folder)
        assert Specs.from_json(Specs(target=spec).to_json()).target == spec and spec.eos_token_ids == (1,)
        assert torch.equal(Run(load_decoder(folder, spec)).forward([[]], [tokens])[0], expected)


def test_a_kimi_says_of_its_text_model_that_it_is_quantized(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    group = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"0": {"weights": weights}},
    }
    how = read_quantization(tmp_path, {"model_type": "kimi_k25", "text_config": {"quantization_config": group}})
    assert how is not None and (how.method, how.block) == ("compressed-tensors W4", (1, 32))


def test_latents_in_8_bits_are_near_the_exact_ones(path: Path) -> None:
    model, tokens, logits = load_decoder(path, read_spec(path)), some_tokens(random.Random(5), 60), []
    for dtype in (torch.float32, FP8):
        run = Run(model)
        run.kv = model.new_kv_pool(run.kv.num_slots, dtype)
        logits.append(run.forward([[]], [tokens])[0])
    assert 0 < (logits[1] - logits[0]).abs().mean() < 0.15 * logits[0].std()


def test_fp8_blocks_are_read_by_head_and_pair(tmp_path: Path) -> None:
    """Rows of rotated widths change their places, which no block of rows survives."""
    path = write(tmp_path / "exact")
    checkpoints.dequantize_fp8(checkpoints.quantize_fp8(path, (32, 64)), tmp_path / "whole")
    tokens = some_tokens(random.Random(9), 12)
    one, other = (Run(load_decoder(at, read_spec(at))).forward([[]], [tokens])[0] for at in (path, tmp_path / "whole"))
    assert_close(one, other)


def test_sixteen_bits_are_near_the_exact_logits(path: Path) -> None:
    exact, tokens = load_decoder(path, read_spec(path)), some_tokens(random.Random(8), 30)
    half = load_decoder(path, read_spec(path), Runtime(dtype=torch.bfloat16))
    one, other = (Run(model).forward([[]], [tokens])[0] for model in (exact, half))
    assert (one - other).abs().mean() < 0.1 * one.std()


GLM = {
    **checkpoints.ARCHITECTURES["glm-4-moe"][1],
    "attention_bias": True,
    "use_qk_norm": True,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_the_prediction_layer_has_the_states_of_transformers(tmp_path: Path, family: str) -> None:
    """The last layer of another model of transformers has its tensors. GLM-4.5 has the layout, but no latents."""
    config = GLM if family == "glm4_moe" else checkpoints.LATENT[family] | MODELS["deepseek-v3"][1]
    path = checkpoints.add_mtp(checkpoints.write_model(tmp_path / "own", family, **config), "deepseek_v3")
    own, last, stored = "model.layers.3.", "model.layers.2.", load_file(path / "model.safetensors")
    names = [name for name in stored if name.startswith(own) and ("_proj" in name or "norm" in name)]
    stored |= {name: stored[name].roll(1, 0) for name in names}  # add_mtp copied the last layer
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    other = shutil.copytree(path, tmp_path / "other")
    moved = {name.replace(own, last): tensor for name, tensor in stored.items() if name.startswith(own)}
    kept = {name: moved.get(name, tensor) for name, tensor in stored.items() if not name.startswith(own)}
    save_file(kept, other / "model.safetensors", metadata={"format": "pt"})
    model: Any
    model, its_last = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        for folder in (path, other)
    )
    tokens = torch.tensor([some_tokens(random.Random(7), 40)])
    num_rows = tokens.shape[1] - 1

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], stored[f"{own}{name}.weight"], 1e-6)

    with torch.no_grad():
        features = model.model(tokens).last_hidden_state[:, :-1]
        parts = norm(model.model.embed_tokens(tokens[:, 1:]), "enorm"), norm(features, "hnorm")
        x = torch.cat(parts, dim=-1) @ stored[f"{own}eh_proj.weight"].T
        mask = torch.full((num_rows, num_rows), -torch.inf).triu(1)[None, None]
        rotation = model.model.rotary_emb(x, torch.arange(num_rows)[None])
        out = its_last.model.layers[-1](x, attention_mask=mask, position_embeddings=rotation)
        expected = norm(out, "shared_head.norm")[0]

    head = FcHead.load(read_mtp_spec(path, read_spec(path)), path, path)
    slot_N = np.arange(1, 1 + num_rows, dtype=np.int32)
    attention = AttentionMetadata(
        query_offsets=np.array([0, num_rows], dtype=np.int32),
        page_table_BP=np.array([[2, 1, 3]], dtype=np.int32),
        base_B=np.zeros(1, dtype=np.int32),
        slot_N=slot_N,
        visible_N=slot_N + 1,
        ancestors_N=np.zeros(num_rows, dtype=np.int64),
    )
    plan, positions = head.plan(attention, PAGE), torch.from_numpy(slot_N - 1)
    actual = head.forward(tokens[0, 1:], features[0], positions, plan, head.new_kv_pool(4 * PAGE))
    assert_close(actual, expected)
    assert_close(head.logits(actual), model.lm_head(expected).detach())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v32"}, "deepseek_v32 is not supported: attention to keys that an indexer selects"),
        ({"model_type": "glm_moe_dsa"}, "take a DeepSeek-V3, R1"),
        ({"attention_bias": True}, "attention_bias True is not implemented"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
    ],
)
def test_other_models_are_refused_by_name_before_anything_is_imported(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"} | change))
    with pytest.raises(ValueError, match=message):
        check_kinds(tmp_path, None)
