"""What ranks hold, and the roofline compared with numbers calculated by hand."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from cluster.planner.memory import (
    ModelShard,
    expected_shapes,
    model_shard,
    model_shards,
    pages_on_device,
    tensor_shapes,
)
from cluster.planner.report import run
from cluster.planner.roofline import StepTime, forward_ms, step_time
from cluster.planner.topology import describe
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from secateur.plan import HARDWARE, Hardware, PlanRequest
from tests.support import checkpoints
from tests.support.engines import BUNDLED, DYNAMIC, bundled
from verifier.hidden_states import max_buffered_states
from workers.config import DraftConfig, EngineConfig, TreeConfig
from workers.models.readers import read_spec

PLAIN = Hardware(
    memory_gb=80,
    bandwidth_gbs=2000,
    tflops=400,
    link_gbs=100,
    link_latency_us=20,
    bandwidth_share=1.0,
    flops_share=1.0,
    layer_us=0,
    host_ms=0,
    host_request_ms=0,
    transfer_ms=0,
)
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def llama_8b(tmp_path: Path) -> EngineConfig:
    """Llama 3 8B, from config.json alone."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return EngineConfig(model_path=str(tmp_path), device="cuda", dtype="bfloat16", max_model_len=8192)


# -- what models hold and compute ------------------------------------------------------------------------------------


def test_matrices_from_a_config_equal_the_checkpoints() -> None:
    stored = {name: shape for name, shape in tensor_shapes(BUNDLED / "target").items() if len(shape) == 2}
    assert expected_shapes(read_spec(BUNDLED / "target"), BUNDLED / "target") == stored


def without_weights(folder: Path) -> Path:
    """Copy a checkpoint's config.json."""
    alone = folder.parent / f"{folder.name}-alone"
    alone.mkdir()
    shutil.copy(folder / "config.json", alone)
    return alone


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "head_dim": 16}),
        ("mixtral", {"num_local_experts": 4}),
        ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
        ("phi3", {"pad_token_id": 0}),
        ("gemma2", {"head_dim": 16}),
        ("gpt_neox", {}),
        ("cohere", {}),
        ("glm4", {"pad_token_id": 0, "head_dim": 16}),
        ("llama", {}),
    ],
)
def test_a_model_has_the_same_size_with_its_config_alone(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    whole = checkpoints.write_model(tmp_path / family, family, **config)
    counted = [
        model_shards(EngineConfig(model_path=str(path), draft=DraftConfig(method="draft_model", model_path=str(path))))
        for path in (whole, without_weights(whole))
    ]
    for stored, told in zip(*counted, strict=True):
        assert told.matmul_items == stored.matmul_items > 0
        assert told.expert_items == stored.expert_items
        # Of the families that we know ourselves, a config tells matrices alone.
        assert stored.weight_bytes * 0.99 < told.weight_bytes <= stored.weight_bytes


@pytest.mark.parametrize("style", ["safeailab", "speculators"])
def test_an_eagle_3_head_has_the_same_size_with_its_config_alone(tmp_path: Path, style: Any) -> None:
    target = checkpoints.write_model(tmp_path / "target", "llama")
    whole = checkpoints.write_eagle3(tmp_path / "head", style=style, draft_vocab_size=40)
    assert_counted_alike(target, "eagle3", whole, without_weights(whole))


def test_heads_with_fc_have_the_same_size_with_their_config_alone(tmp_path: Path) -> None:
    target = checkpoints.write_model(tmp_path / "target", "llama")
    whole = checkpoints.write_eagle(tmp_path / "head")
    assert_counted_alike(target, "eagle", whole, without_weights(whole))
    target = checkpoints.add_mtp(checkpoints.write_model(tmp_path / "mtp", "qwen3"), "qwen3")
    both = [
        model_shards(EngineConfig(model_path=str(path), draft=DraftConfig(method="mtp", model_path=str(path))))[1]
        for path in (target, without_weights(target))
    ]
    assert both[0].matmul_items == both[1].matmul_items > 0


def assert_counted_alike(target: Path, method: Any, *heads: Path) -> None:
    found = [
        model_shards(EngineConfig(model_path=str(target), draft=DraftConfig(method=method, model_path=str(head))))[1]
        for head in heads
    ]
    assert found[0].matmul_items == found[1].matmul_items > 0
    assert found[0].weight_bytes == pytest.approx(found[1].weight_bytes, rel=0.01)


@pytest.mark.slow
def test_plan_predicts_from_a_config_alone_for_every_backend(tmp_path: Path) -> None:
    """Qwen3-30B-A3B has 30.5 billion parameters and uses 3.3 billion per token."""
    published = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
        "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 151936,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    args = EngineArgs.load({"model": str(tmp_path), "no_speculation": True})
    request = PlanRequest.load({"hardware": HARDWARE["h200"], "batches": (1, 8)})
    text = run(args, request)
    assert "PREDICTED" in text and "61.1 GB" in text
    [target] = model_shards(EngineConfig(model_path=str(tmp_path), dtype="bfloat16"))
    assert target.weight_bytes / 2 == pytest.approx(30.5e9, rel=2e-3)
    through = target.matmul_items - target.expert_items * (1 - target.expert_share) + 151936 * 2048
    assert through == pytest.approx(3.3e9, rel=0.03)


def test_llama_3_8b_from_its_config_alone(llama_8b: EngineConfig) -> None:
    [target] = model_shards(llama_8b)
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
    assert target.matmul_items == 32 * layer + 128256 * 4096
    assert target.weight_bytes == 2 * (32 * layer + 2 * 128256 * 4096)
    assert target.weight_bytes / 2 == pytest.approx(8.03e9, rel=1e-3)  # as published
    assert target.token_bytes == 2 * 32 * 8 * 128 * 2
    assert (target.attention_width, target.num_layers) == (32 * 4096, 32)


def test_a_hybrid_of_27b_has_states_beside_keys_and_values(tmp_path: Path) -> None:
    published = {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 5120, "head_dim": 256,
        "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "vocab_size": 248320, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    one, two = (
        EngineConfig(model_path=str(tmp_path), dtype="bfloat16", max_num_seqs=32, tensor_parallel_size=size)
        for size in (1, 2)
    )
    [shard], [half] = model_shards(one), model_shards(two)
    assert shard.weight_bytes / 2 == pytest.approx(27e9, rel=0.02)
    assert shard.token_bytes == 64 * 1024, "16 of 64 layers have keys and values"
    of_row = 48 * (10240 + 2 * 48)  # a bare root waits for its verdict, too
    assert shard.seat_bytes == 2 * half.seat_bytes == 144 * 2**20 + 2 * (48 * 3 * 10240 + of_row)
    of_prefixes = 16 * (144 * 2**20 + 2 * 48 * 3 * 10240)
    assert shard.workspace_bytes > shard.states_bytes == 33 * shard.seat_bytes + of_prefixes
    assert model_shards(replace(one, enable_prefix_caching=False))[0].states_bytes == 33 * shard.seat_bytes
    args = {"model": str(tmp_path), "no_speculation": True, "max_num_seqs": 32, "dtype": "bfloat16"}
    text = run(EngineArgs.load(args), PlanRequest())
    assert "recurrent states take 155 MB of a verifier rank for each running request" in text
    assert "7.58 GB for max_num_seqs 32 and 16 cached prefixes" in text


def test_qwen3_next_80b_uses_3b_for_a_row(tmp_path: Path) -> None:
    published = {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048, "head_dim": 256,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936,
        "num_experts": 512, "num_experts_per_tok": 10, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    [shard] = model_shards(EngineConfig(model_path=str(tmp_path), dtype="bfloat16"))
    assert shard.weight_bytes / 2 == pytest.approx(79.7e9, rel=0.01)
    through = shard.matmul_items - shard.expert_items * (1 - shard.expert_share) + 151936 * 2048
    assert through == pytest.approx(3.9e9, rel=0.03), "3 billion, and 0.6 in the embedding and the head"
    assert shard.token_bytes == 24 * 1024 and 72 * 2**20 < shard.seat_bytes < 76 * 2**20


def test_deepseek_v3_has_671b_weights_and_a_latent_on_every_rank(tmp_path: Path) -> None:
    published = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "q_lora_rank": 1536, "n_routed_experts": 256, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,
        "vocab_size": 129280, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    draft = DraftConfig(method="mtp", model_path=str(tmp_path), tensor_parallel_size=8)
    one = EngineConfig(model_path=str(tmp_path), dtype="bfloat16", draft=draft)
    [target, _], [share, head] = model_shards(one), model_shards(replace(one, tensor_parallel_size=8))
    assert target.weight_bytes / 2 == pytest.approx(671e9, rel=0.002)  # as published
    through = target.matmul_items - target.expert_items * (1 - target.expert_share) + 129280 * 7168
    assert through == pytest.approx(37.5e9, rel=0.02), "37 billion, as published, and the head"
    assert target.token_bytes == share.token_bytes == 61 * 576 * 2, "no rank has a part of a latent"
    whole = 61 * 7168 * (1536 + 576) + 129280 * 7168
    assert share.weight_bytes / 2 == pytest.approx(whole + (671e9 - whole) / 8, rel=0.002)
    assert head.token_bytes == 576 * 2 and head.expert_share == 8 / 256


def test_a_head_stored_as_a_pytorch_file_counts_like_one_in_safetensors(tmp_path: Path) -> None:
    target = checkpoints.write_model(tmp_path / "target", "llama")
    config = EngineConfig(model_path=str(target), dtype="bfloat16")
    found = []
    for is_bin in (False, True):
        head = checkpoints.write_eagle3(tmp_path / str(is_bin), bin_file=is_bin, draft_vocab_size=40)
        found.append(model_shards(replace(config, draft=DraftConfig(method="eagle3", model_path=str(head))))[1])
    # fc; q, k, v of (embedding, state), o; three matrices of the MLP; the head
    matrices = 64 * 192 + 128 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96 + 40 * 64
    assert [shard.matmul_items for shard in found] == [matrices, matrices]
    assert found[0].weight_bytes == found[1].weight_bytes > 2 * (matrices + 96 * 64)


@pytest.mark.parametrize(
    "prefix", ["model.language_model.", pytest.param("language_model.model.", marks=pytest.mark.slow)]
)
def test_a_vision_tower_does_not_count_towards_the_text_model(tmp_path: Path, prefix: str) -> None:
    checkpoints.write_multimodal(tmp_path / "both", prefix)
    checkpoints.write_model(tmp_path / "text", "gemma3_text", tie_word_embeddings=True, head_dim=16)
    head = checkpoints.write_eagle3(tmp_path / "head", with_embedding=False)
    draft = DraftConfig(method="eagle3", model_path=str(head))
    both, text = (model_shards(EngineConfig(model_path=str(tmp_path / kind), draft=draft)) for kind in ("both", "text"))
    assert both == text
    drafts = [DraftConfig(method="draft_model", model_path=str(tmp_path / kind)) for kind in ("both", "text")]
    both, text = (model_shards(EngineConfig(model_path=str(tmp_path / "text"), draft=draft)) for draft in drafts)
    assert both == text


def test_duplicate_weight_files_count_once(tmp_path: Path) -> None:
    """Mistral also publishes consolidated.safetensors, with other tensor names."""
    path = checkpoints.write_model(tmp_path, "mistral", sliding_window=None, shards=3)
    once = tensor_shapes(path)
    save_file({"layers.0.attention.wq.weight": torch.zeros(64, 64)}, path / "consolidated.safetensors")
    assert tensor_shapes(path) == once
    assert tensor_shapes(tmp_path / "nothing") == {}


def test_ranks_share_matrices_but_not_the_embedding_nor_few_kv_heads() -> None:
    shapes, spec = tensor_shapes(BUNDLED / "target"), read_spec(BUNDLED / "target")
    embedding = math.prod(shapes["model.embed_tokens.weight"])
    layers = sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2) - embedding
    assert model_shard(shapes, spec, 1, 4, 4).matmul_items == layers + embedding  # the head is tied to it
    assert model_shard(shapes, spec, 2, 4, 4).matmul_items == (layers + embedding) / 2
    keys = sum(math.prod(shape) for name, shape in shapes.items() if name.endswith(("k_proj.weight", "v_proj.weight")))
    # Four key-value heads on eight ranks: each holds a quarter of them.
    assert model_shard(shapes, spec, 8, 4, 4).matmul_items == (layers - keys + embedding) / 8 + keys / 4


def test_pages_fill_the_memory_that_weights_leave(llama_8b: EngineConfig) -> None:
    [target] = model_shards(llama_8b)
    pages = pages_on_device(llama_8b, [target], 80e9)
    assert target.workspace_bytes > 3 * 4 * 128256 * 64, "the logits, and more"
    assert pages == (0.9 * 80e9 - 2**29 - target.weight_bytes - target.workspace_bytes) // (16 * target.token_bytes)
    assert pages_on_device(llama_8b, [target], 16e9) == 0


def test_a_model_s_whole_context_must_fit_as_in_the_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"max_position_embeddings": 131072}))
    request = PlanRequest.load({"hardware": HARDWARE["l4"], "batches": (1,)})
    with pytest.raises(ConfigError, match=r"l4: the KV cache has room for .* max_model_len 131072 needs"):
        run(EngineArgs.load({"model": str(tmp_path), "no_speculation": True, "max_num_seqs": 8}), request)
    args = EngineArgs.load({"model": str(tmp_path), "no_speculation": True, "max_num_seqs": 8, "max_model_len": 8192})
    assert "PREDICTED" in run(args, request)


def test_fp8_counts_in_8_bits_with_and_without_its_weights(tmp_path: Path, llama_8b: EngineConfig) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"quantization_config": quantization}))
    [target] = model_shards(llama_8b)
    in_layers = 32 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336)
    assert target.weight_bytes == pytest.approx(in_layers * (1 + 4 / 128) + 2 * 2 * 128256 * 4096, rel=1e-9)
    quantization["modules_to_not_convert"] = ["model.layers.0.mlp.down_proj"]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"quantization_config": quantization}))
    [more] = model_shards(llama_8b)
    assert more.weight_bytes - target.weight_bytes == pytest.approx(4096 * 14336 * (1 - 4 / 128), rel=1e-6)


def test_a_kv_cache_in_8_bits_holds_twice_the_pages_of_16(llama_8b: EngineConfig) -> None:
    fp8 = replace(llama_8b, kv_cache_dtype="fp8")
    [target], [small] = model_shards(llama_8b), model_shards(fp8)
    assert (2 * small.token_bytes, small.weight_bytes) == (target.token_bytes, target.weight_bytes)
    pages, twice = pages_on_device(llama_8b, [target], 80e9), pages_on_device(fp8, [small], 80e9)
    assert twice == pytest.approx(2 * pages, rel=1e-3)
    text = describe("plan", fp8, [small])
    assert "bfloat16 with a KV cache in fp8" in text and "65.5 kB" in text
    drafted = bundled(DYNAMIC, kv_cache_dtype="fp8")
    assert [4 * shard.token_bytes for shard in model_shards(drafted)] == [
        shard.token_bytes for shard in model_shards(replace(drafted, kv_cache_dtype="auto"))
    ]


def test_a_block_head_drafts_its_block_in_one_pass(tmp_path: Path) -> None:
    """Its trees are no deeper, and of a reduced vocabulary it multiplies with some of the target's rows."""
    target = checkpoints.write_model(tmp_path / "target", "qwen3")
    head = checkpoints.write_block(tmp_path / "head", style="specforge", block_size=5, draft_vocab_size=40)
    draft = DraftConfig(method="dspark", model_path=str(head), tree=TreeConfig(max_depth=8))
    found = model_shards(EngineConfig(model_path=str(target), draft=draft))
    full = checkpoints.write_block(tmp_path / "full", style="specforge", block_size=5)
    other = replace(draft, model_path=str(full))
    more = model_shards(EngineConfig(model_path=str(target), draft=other))
    assert more[1].matmul_items - found[1].matmul_items == (96 - 40) * (64 + 12)
    assert "nodes, depth 5)" in describe("plan", EngineConfig(model_path=str(target), draft=draft), found)


def test_a_drafter_takes_weights_states_and_pages_if_colocated() -> None:
    config = bundled(DYNAMIC, device="cuda", dtype="bfloat16")
    assert config.draft is not None
    found = model_shards(config)
    together = replace(config, draft=replace(config.draft, placement="colocated"))
    target, head = found
    assert target.state_bytes == 3 * 192 * 2 and head.state_bytes == 0
    assert target.workspace_bytes > 3 * 4 * 2048 * config.max_num_seqs * 17 and head.workspace_bytes > 0
    left = 0.9 * 3e9 - 2**29 - target.weight_bytes - target.workspace_bytes - max_buffered_states(config) * 1152
    page = 16 * target.token_bytes + 1152
    assert pages_on_device(config, found, 3e9) == left // page
    left -= 2**29 + head.weight_bytes + head.workspace_bytes
    assert pages_on_device(together, found, 3e9) == left // (page + 16 * head.token_bytes)


# -- roofline --------------------------------------------------------------------------------------------------------


def test_the_roofline_of_llama_3_8b_by_hand(llama_8b: EngineConfig) -> None:
    """7.50e9 weights: 15.0 GB at 2 TB/s take 7.505 ms; a row's 15.0 GFLOP at 400 TFLOP/s 0.0375 ms, so 200 rows."""
    decode = partial(step_time, llama_8b, model_shards(llama_8b), PLAIN)
    items = 7_504_658_432
    assert decode(1, 0, 0).ms == pytest.approx(2 * items / 2e12 * 1e3)
    assert decode(199, 0, 0).ms == pytest.approx(2 * items / 2e12 * 1e3)
    for rows in (250, 800, 3000):
        assert decode(rows, 0, 0).ms == pytest.approx(2 * items * rows / 400e12 * 1e3)
    # 131 072 bytes per cached token, and 4 x 4096 x 32 operations per row and token.
    more = decode(4, 0, 1000).ms - decode(4, 0, 0).ms
    assert more == pytest.approx(4000 * (131072 / 2e12 + 4 * 4096 * 32 / 400e12) * 1e3)


def test_a_mixture_reads_the_chosen_experts_and_computes_its_share(llama_8b: EngineConfig) -> None:
    """1e9 weights beside 8e9 of experts, a quarter for each row: 2 GB and 4 to 16 GB at 2 TB/s; 6 GFLOP a row."""
    mixture = ModelShard(matmul_items=9 * 10**9, expert_items=8 * 10**9, expert_share=0.25, item_bytes=2)
    assert "a mixture of experts has CUDA graphs at most in bfloat16" in describe("plan", llama_8b, [mixture])
    decode = partial(step_time, llama_8b, [mixture], PLAIN)
    assert decode(1, 0, 0).ms == pytest.approx(1 + 2)
    assert decode(2, 0, 0).ms == pytest.approx(1 + 8 * (1 - 0.75**2))
    assert decode(16, 0, 0).ms == pytest.approx(1 + 8 * (1 - 0.75**16))
    assert decode(300, 0, 0).ms == pytest.approx(9), "all of it, as 600 rows' arithmetic takes"
    assert decode(1200, 0, 0).ms == pytest.approx(1200 * 6 / 400)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "aria", "ernie-4.5-moe", "glm-4-moe"])
def test_experts_are_distinguished_from_other_matrices(tmp_path: Path, name: str) -> None:
    """Four experts, two per row, under several names and in several layouts."""
    model_type, given = checkpoints.ARCHITECTURES[name]
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {model_type}")
    path = checkpoints.write_model(tmp_path, model_type, **given)
    [target] = model_shards(EngineConfig(model_path=str(path)))
    model = AutoModelForCausalLM.from_pretrained(path)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name and p.dim() == 3)
    assert experts > 0
    assert (target.expert_items, target.expert_share) == (experts, 0.5)


def test_two_ranks_halve_the_reading_and_add_two_all_reduces_per_layer(llama_8b: EngineConfig) -> None:
    both = replace(llama_8b, tensor_parallel_size=2)
    [rank] = model_shards(both)
    assert rank.matmul_items == 7_504_658_432 / 2
    reduces = 32 * 2 * (20e-6 + 3 * 4096 * 2 / 100e9) * 1e3  # with two ranks each row travels once
    assert forward_ms(rank, 3, 2, PLAIN) == pytest.approx(7_504_658_432 / 2e12 * 1e3 + reduces)
    assert step_time(both, [rank], PLAIN, 3, 0, 0).ms == pytest.approx(forward_ms(rank, 3, 2, PLAIN))


def test_a_tree_is_drafted_level_by_level() -> None:
    config = bundled(DYNAMIC, device="cuda", dtype="bfloat16")
    found = model_shards(config)
    hardware = PLAIN.model_copy(update={"layer_us": 5.0, "transfer_ms": 0.5, "host_ms": 2.0, "host_request_ms": 0.25})
    decode = partial(step_time, config, found, hardware)
    level_ms = found[1].matmul_items * 2 / 2e12 * 1e3 + 0.005  # a head of one layer, bound by reading
    for nodes, levels in ((1, 1), (4, 4), (8, 8), (32, 8)):
        step = decode(1, nodes, 0)
        assert step.draft_ms == pytest.approx(levels * level_ms, rel=1e-6)
        assert step.transfer_ms == 0.5
        # Each level reads the cached keys and values once.
        assert decode(3, nodes, 100).draft_ms - decode(3, nodes, 0).draft_ms == pytest.approx(
            levels * 300 * found[1].token_bytes / 2e12 * 1e3
        )
    assert decode(3, 0, 0) == StepTime(verify_ms=decode(3, 0, 0).verify_ms, draft_ms=0, transfer_ms=0, host_ms=2.5)


def test_published_devices_have_the_expected_order_of_speed(llama_8b: EngineConfig) -> None:
    found = model_shards(llama_8b)
    speed = {name: 1 / step_time(llama_8b, found, device, 1, 0, 1000).ms for name, device in HARDWARE.items()}
    assert sorted(speed, key=speed.__getitem__) == ["l4", "l40s", "a100", "h100", "h200", "b200"]
