"""Tests what only a model with latents has: its cache, the names of Kimi, its own prediction layer, and its limits."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from drafter.proposers.eagle import FcHead
from tests.support import checkpoints
from tests.support.model_runs import PAGE, Run, some_tokens
from workers.kv_cache import FP8, KVPool
from workers.models.draft_methods import check_kinds
from workers.models.fc_head_format import read_mtp_spec
from workers.models.load import load_decoder
from workers.models.quantization import read_quantization
from workers.models.readers import read_spec
from workers.models.specs import Specs
from workers.types import AttentionMetadata

torch.set_num_threads(1)

CONFIG = checkpoints.LATENT["deepseek_v3"] | {"rope_parameters": checkpoints.YARN_ROPE}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_model(tmp_path_factory.mktemp("latent"), "deepseek_v3", **CONFIG)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual - expected).abs().max().item() < 1e-4


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
    config = GLM if family == "glm4_moe" else CONFIG
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
