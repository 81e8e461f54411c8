"""Small random checkpoints in the published formats, for tests: config.json + model.safetensors, EAGLE-3 heads.

write_model(path, model_type, legacy_rope=False, shards=1, seed=0, **config) -> path      ARCHITECTURES: types to write
write_multimodal(path, prefix, **config) -> path                    Gemma-3's text model as in its vision checkpoints
write_hybrid(path, family="qwen3_5_text", seed=0, is_wrapped=False, **config) -> path      a Qwen3.5, alone or as in
                                                                    its vision checkpoints; or with HYBRID_MOE
quantize_fp8(path, block) -> path                                   its layers' matrices, with block scales
dequantize_fp8(path, to) -> to                                      the same checkpoint in float32
write_eagle3(path, style="safeailab" | "specforge" | "speculators", seed=0, bin_file=False, **config) -> path
load_eagle3(path, target) -> Eagle3Head                              as its config.json describes it
write_eagle(path, bias=True, with_embedding=False, with_head=False, seed=0, **config) -> path      EAGLE-1/2
write_block(path, style="deepspec" | "z-lab" | "specforge" | "speculators", seed=0, **config) -> path
                                                                    DSpark, DFlash
write_bigrams(path, target) -> path                                 DSpark that drafts what each token alone predicts
load_block(path, target) -> BlockHead                               as its config.json describes it
add_mtp(path, "qwen3" | "qwen3_5" | "mimo", seed=0) -> path         to a "qwen3" or "qwen2" model or a hybrid
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter.proposers.block import BlockHead
from drafter.proposers.eagle3 import Eagle3Head
from workers.models.block_format import read_block_spec
from workers.models.eagle3_format import read_eagle3_spec
from workers.models.layers import ON_CPU, Runtime
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.types import AttentionMetadata

BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def randomise(shape: tuple[int, ...], name: str, generator: torch.Generator) -> Tensor:
    """Initialize weights so that every part of the model matters: norms near 1, biases and matrices far from 0.

    Gates of delta nets last from one token to hundreds.
    """
    value = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        return torch.rand(shape, generator=generator).mul_(15.9).add_(0.1).log_()
    if name.endswith("dt_bias"):
        return value - 3
    if "norm" in name:
        return 1 + 0.2 * value
    if len(shape) == 1:
        return 0.3 * value
    return value if "embed" in name else value * (1.5 / shape[-1] ** 0.5)


def write_model(
    path: Path, family: str, *, legacy_rope: bool = False, shards: int = 1, seed: int = 0, **overrides: Any
) -> Path:
    """Save a random model of a family with transformers; `legacy_rope` writes rope_theta and rope_scaling."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**BASE, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(randomise(tuple(parameter.shape), name, generator))
        for name in model.state_dict().keys() & dict(model.named_buffers()).keys():  # a router's correction bias
            if (buffer := model.get_buffer(name)).dim() == 1:
                buffer.copy_(randomise(tuple(buffer.shape), name, generator))
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    model.save_pretrained(path, max_shard_size=size // shards + 4096)
    if legacy_rope:
        raw = json.loads((path / "config.json").read_text())
        rope = raw.pop("rope_parameters")
        raw["rope_theta"] = rope.pop("rope_theta")
        raw["rope_scaling"] = rope if rope["rope_type"] != "default" else None
        (path / "config.json").write_text(json.dumps(raw))
    return path


HYBRID = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}


HYBRID_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}
"""For "qwen3_5_moe_text" and "qwen3_next"."""


def write_hybrid(
    path: Path, family: str = "qwen3_5_text", *, seed: int = 0, is_wrapped: bool = False, **overrides: Any
) -> Path:
    """Save a random hybrid, whose norms multiply by 1 + weight; `is_wrapped` adds a vision tower and its prefixes."""
    write_model(path, family, seed=seed, **HYBRID | overrides)
    tensors = {
        name: tensor - 1 if "norm" in name and "linear_attn" not in name else tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    if is_wrapped:
        tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
        tensors["model.visual.patch_embed.proj.bias"] = torch.ones(4)
        text = json.loads((path / "config.json").read_text()) | {"dtype": "bfloat16"}
        config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
        vision = {"hidden_size": 16, "num_heads": 1, "depth": 1, "intermediate_size": 16, "out_hidden_size": 64}
        (path / "config.json").write_text(json.dumps(config | {"vision_config": vision}))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


_LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_LATENT_MOE = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 40}

LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_LATENT, **_LATENT_MOE, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**_LATENT, **_LATENT_MOE, "rms_norm_eps": 1e-3},
    "youtu": {**_LATENT, "tie_word_embeddings": True},
}
"""Test models with multi-head latent attention: their configurations, by model_type."""


_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 56}
_GROUPED_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 56, "n_shared_experts": 1}
_GROUPED_MOE |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_TIED = {"tie_word_embeddings": True, "head_dim": 16}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "aria": ("aria_text", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "pad_token_id": 0}),
    "afmoe": ("afmoe", {**_MOE, "sliding_window": 7, "head_dim": 8, "num_dense_layers": 1, "num_shared_experts": 1}),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "beam": ("beam", {**_MOE, "head_dim": 8, "sliding_window": 7}),
    "biogpt": ("biogpt", {}),
    "bitnet": ("bitnet", {}),
    "cohere": ("cohere", {"logit_scale": 0.2}),
    "cohere (norms of heads)": ("cohere", {"use_qk_norm": True, "logit_scale": 0.2}),
    "cohere-2": ("cohere2", {"logit_scale": 0.2, "sliding_window": 7, "num_hidden_layers": 4, "head_dim": 8}),
    "cohere-2-moe": ("cohere2_moe", {**_MOE, "logit_scale": 0.2, "sliding_window": 7, "head_dim": 8}),
    "cwm": ("cwm", {"head_dim": 8, "sliding_window": 7}),
    "dots1": ("dots1", {**_GROUPED_MOE, "head_dim": 8}),
    "ernie-4.5": ("ernie4_5", {"head_dim": 16}),
    "ernie-4.5-moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 56, "moe_num_shared_experts": 1},
    ),
    "exaone-4": ("exaone4", {"sliding_window": 7, "sliding_window_pattern": 2}),
    "exaone-moe": ("exaone_moe", {**_GROUPED_MOE, "num_experts": 4, "sliding_window": 7, "num_shared_experts": 1}),
    "flex-olmo": ("flex_olmo", {**_MOE, "pad_token_id": 0}),
    "flint": ("flint", {**_MOE, "head_dim": 8, "sliding_window": 7}),
    "gemma": ("gemma", {**_TIED, "num_key_value_heads": 1}),
    "gemma-2": (
        "gemma2",
        {
            **_TIED,
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma-3": ("gemma3_text", {**_TIED, "sliding_window": 7, "query_pre_attn_scalar": 24, "num_hidden_layers": 6}),
    "gemma-3n": (
        "gemma3n_text",
        {
            **_TIED,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 7,
            "vocab_size_per_layer_input": 96,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        },
    ),
    "glm": ("glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm-4": ("glm4", {"head_dim": 16, "pad_token_id": 0}),
    "glm-4-moe": ("glm4_moe", {**_GROUPED_MOE, "head_dim": 16, "pad_token_id": 0}),
    "gpt-2": ("gpt2", {"n_positions": 512}),
    "gpt-bigcode": ("gpt_bigcode", {"n_positions": 512}),
    "gpt-neox": ("gpt_neox", {}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7, "head_dim": 8}),
    "granite": (
        "granite",
        {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2},
    ),
    "granite-4 (no state space)": (
        "granitemoehybrid",
        {
            "layer_types": ["attention"] * 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 40,
            "position_embedding_type": "rope",
            "logits_scaling": 4.0,
        },
    ),
    "granite-moe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite-moe-shared": (
        "granitemoeshared",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
    ),
    "granite-moe-swa": ("granitemoe_swa", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7}),
    "granite-swa (sinks)": ("granite_swa", {"sliding_window": 7}),
    "helium": ("helium", {"head_dim": 8}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 8}),
    "hunyuan-moe": ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, "head_dim": 8}),
    "hy-v3": ("hy_v3", {**_MOE, "head_dim": 8}),
    "hyperclovax": ("hyperclovax", {}),
    "internlm-3": ("internlm3", {"head_dim": 8}),
    "iquest-coder": ("iquestcoder", {"head_dim": 8}),
    "jais-2": ("jais2", {"head_dim": 8}),
    "kolibri": ("kolibri1", {**_MOE, "head_dim": 8}),
    "laguna": ("laguna", {**_MOE, "head_dim": 8, "sliding_window": 7}),
    "mellum": ("mellum", {**_MOE, "head_dim": 8}),
    "minimax-m2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "modernbert-decoder": ("modernbert-decoder", {"local_attention": 14, "pad_token_id": 0}),
    "ministral": ("ministral", {"head_dim": 8, "sliding_window": 7}),
    "ministral-3": ("ministral3", {"head_dim": 8}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": 7, "intermediate_size": 56}),
    "nanochat": ("nanochat", {}),
    "nemotron": ("nemotron", {"head_dim": 8}),
    "olmo": ("olmo", {"clip_qkv": 2.0}),
    "olmo-2": ("olmo2", {}),
    "olmo-3": ("olmo3", {"sliding_window": 7, "num_hidden_layers": 4}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "persimmon": ("persimmon", {}),
    "phi": ("phi", {"vocab_size": 97}),
    "phi-3": ("phi3", {"pad_token_id": 0, "sliding_window": 7, "vocab_size": 97}),
    "phi-3.5-moe": ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": ("qwen2_moe", {**_MOE, "shared_expert_intermediate_size": 56}),
    "qwen3-moe": ("qwen3_moe", {**_MOE, "head_dim": 16}),
    "seed-oss": ("seed_oss", {"head_dim": 16}),
    "smollm-3": ("smollm3", {"pad_token_id": 0, "num_hidden_layers": 4}),
    "solar-open": ("solar_open", {**_GROUPED_MOE, "head_dim": 8}),
    "stablelm": ("stablelm", {}),
    "starcoder-2": ("starcoder2", {"sliding_window": 7}),
    "vaultgemma": ("vaultgemma", {"head_dim": 16, "sliding_window": 7}),
}
"""Test models that run in transformers' own classes: (model_type, configuration)."""


def write_multimodal(path: Path, prefix: str, **overrides: Any) -> Path:
    """Write a Gemma-3 text model as in its vision checkpoints, with `prefix` for "model." and a tensor of a tower."""
    write_model(path, "gemma3_text", **_TIED, **overrides)
    stored = load_file(path / "model.safetensors")
    tensors = {prefix + name.removeprefix("model."): tensor for name, tensor in stored.items()}
    tensors["vision_tower.vision_model.post_layernorm.weight"] = torch.ones(4)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((path / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    config |= {"vision_config": {"model_type": "siglip_vision_model", "hidden_size": 4, "num_attention_heads": 1}}
    (path / "config.json").write_text(json.dumps(config))
    return path


def quantize_fp8(path: Path, block: tuple[int, int]) -> Path:
    """Quantize the layers' matrices of a single-file checkpoint in float8 blocks, as DeepSeek and Qwen do."""
    rows, columns = block
    tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if tensor.dim() != 2 or ".layers." not in name or "gate.weight" in name:
            tensors[name] = tensor
            continue
        scale = torch.stack(
            [
                torch.stack(
                    [part.abs().max() / torch.finfo(torch.float8_e4m3fn).max for part in band.split(columns, 1)]
                )
                for band in tensor.split(rows)
            ]
        )
        tensors[name] = (tensor / _spread(scale, block, tensor.shape)).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(
        path,
        quantization_config={
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)
        },
    )  # fmt: skip
    return path


def dequantize_fp8(path: Path, to: Path) -> Path:
    """Write the checkpoint of `quantize_fp8` with dequantized matrices to another folder."""
    raw = json.loads((path / "config.json").read_text())
    block = tuple(raw.pop("quantization_config")["weight_block_size"])
    stored = load_file(path / "model.safetensors")
    tensors = {
        name: tensor.float() * _spread(stored[f"{name}_scale_inv"], block, tensor.shape)
        if tensor.dtype == torch.float8_e4m3fn
        else tensor
        for name, tensor in stored.items()
        if not name.endswith("_scale_inv")
    }
    to.mkdir(parents=True)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    (to / "config.json").write_text(json.dumps(raw))
    return to


def _spread(scale: Tensor, block: tuple[int, ...], shape: torch.Size) -> Tensor:
    """Expand block scales to one scale per element."""
    whole = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return whole[: shape[0], : shape[1]]


def edit_config(path: Path, **changes: Any) -> None:
    """Overwrite fields of a checkpoint's config.json."""
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | changes))


def edit_weights(path: Path, *, remove: tuple[str, ...] = (), add: dict[str, Tensor] | None = None) -> None:
    """Remove and add tensors of a single-file checkpoint."""
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor.clone() for name, tensor in tensors.items() if name not in remove}
    save_file(kept | (add or {}), path / "model.safetensors", metadata={"format": "pt"})


def sliding(window: int, *layer_types: str) -> dict[str, Any]:
    """Return the config.json fields in which speculators' trainer writes the windows of a head's layers."""
    return {"sliding_window": window, "use_sliding_window": True, "layer_types": list(layer_types)}


def write_eagle3(
    path: Path,
    *,
    style: str = "safeailab",
    seed: int = 0,
    bin_file: bool = False,
    with_embedding: bool = True,
    draft_vocab_size: int | None = 40,
    target_hidden_size: int | None = None,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    norm_output: bool = False,
    norm_before_residual: bool = False,
    qk_norm: bool = False,
    num_hidden_layers: int = 1,
    aux_layer_ids: tuple[int, ...] | None = None,
    parallel: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Write a random EAGLE-3 head whose config fields default to those of `write_model`.

    aux_layer_ids: of the target's layers whose features it reads, three by default. parallel: fields that only a
    P-EAGLE head has; None = EAGLE-3.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = {**BASE, **overrides}
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    inner, vocab = config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // heads
    draft_vocab, num_taps = draft_vocab_size or vocab, len(aux_layer_ids or range(3))
    layer = "layers.0" if style == "speculators" else "midlayer"
    shapes = {
        "fc.weight": (hidden, num_taps * (target_hidden_size or hidden)),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.hidden_norm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (heads * head_dim, 2 * hidden),
        f"{layer}.self_attn.k_proj.weight": (kv_heads * head_dim, 2 * hidden),
        f"{layer}.self_attn.v_proj.weight": (kv_heads * head_dim, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, heads * head_dim),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
    }
    if with_embedding:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if qk_norm:
        shapes |= {f"{layer}.self_attn.q_norm.weight": (head_dim,), f"{layer}.self_attn.k_norm.weight": (head_dim,)}
    for index in range(1, num_hidden_layers):
        shapes |= _layer_shapes(f"layers.{index}.", config, qk_norm=qk_norm)
    target_hidden = target_hidden_size or hidden
    if fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (target_hidden,) for i in range(num_taps)}
    if norm_before_fc:
        shapes["input_norm.weight"] = (num_taps * target_hidden,)
    if parallel is not None:
        shapes["mask_hidden"] = (1, 1, num_taps * target_hidden)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: randomise(shape, name, generator) for name, shape in shapes.items()}
    if draft_vocab < vocab:
        kept = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = kept - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, kept, True)
    if bin_file:
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        save_file(tensors, path / "model.safetensors")
    config |= {"num_hidden_layers": num_hidden_layers, "model_type": "llama", "hidden_act": "silu"}
    config |= {"draft_vocab_size": draft_vocab_size}
    if target_hidden_size:
        config["target_hidden_size"] = target_hidden_size
    flags = {
        "norm_before_residual": norm_before_residual,
        "norm_before_fc": norm_before_fc,
        "fc_norm": fc_norm,
        "norm_output": norm_output,
    }
    match style:
        case "safeailab":
            config["architectures"] = ["LlamaForCausalLM"]
            config |= {name: value for name, value in flags.items() if value}
        case "specforge":
            config["architectures"] = ["LlamaForCausalLMEagle3"]
            config |= {name: value for name, value in flags.items() if value}
            if aux_layer_ids:
                ids = list(aux_layer_ids)
                config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
        case "speculators":
            model_type = "qwen3" if qk_norm else "llama"
            names = ("vocab_size", "draft_vocab_size", "target_hidden_size")
            layer_config = {name: value for name, value in config.items() if name not in names}
            config = {
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "speculators_version": "0.3.0",
                "draft_vocab_size": draft_vocab_size,
                "transformer_layer_config": layer_config | {"model_type": model_type, "vocab_size": vocab},
                "target_hidden_size": target_hidden_size,
                "eagle_aux_hidden_state_layer_ids": list(aux_layer_ids) if aux_layer_ids else None,
                **flags,
            }
    config |= parallel or {}
    (path / "config.json").write_text(json.dumps(config))
    return path


def load_eagle3(path: Path, target: Path, runtime: Runtime = ON_CPU) -> Eagle3Head:
    """Load a head as its config.json describes it."""
    return Eagle3Head.load(read_eagle3_spec(path, read_spec(target)), path, target, runtime)


def write_block(
    path: Path,
    *,
    style: str = "deepspec",
    seed: int = 0,
    block_size: int = 7,
    mask_token_id: int = 2,
    taps: tuple[int, ...] = (1, 2),
    markov_rank: int = 12,
    markov_head_type: str = "vanilla",
    from_anchor: bool | None = None,
    draft_vocab_size: int | None = None,
    target_hidden_size: int | None = None,
    num_hidden_layers: int = 2,
    **overrides: Any,
) -> Path:
    """Write a random DSpark head, or DFlash with markov_rank 0, in a published layout, for a target of `write_model`.

    taps: the layers before which the target's states are captured. from_anchor: only written in speculators' layout;
    the others tell it by their names.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = {"head_dim": 8, **BASE, "num_hidden_layers": num_hidden_layers, "model_type": "qwen3", **overrides}
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    draft_vocab = draft_vocab_size or vocab
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(taps) * (target_hidden_size or hidden)),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(num_hidden_layers):
        shapes |= _layer_shapes(f"layers.{index}.", config, qk_norm=True)
    if style in ("deepspec", "speculators"):
        shapes |= {"embed_tokens.weight": (vocab, hidden), "lm_head.weight": (draft_vocab, hidden)}
    markov: dict[str, Any] = {"markov_rank": markov_rank, "markov_head_type": markov_head_type}
    if markov_rank:
        shapes |= {f"markov_head.markov_w{i}.weight": (rows, markov_rank) for i, rows in ((1, vocab), (2, draft_vocab))}
        shapes |= {"confidence_head.proj.weight": (1, hidden + markov_rank), "confidence_head.proj.bias": (1,)}
        markov |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    if markov_rank and markov_head_type == "gated":
        shapes["markov_head.gate_proj.weight"] = (markov_rank, hidden + markov_rank)
        shapes["markov_head.gate_proj.bias"] = (markov_rank,)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: randomise(shape, name, generator) for name, shape in shapes.items()}
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        if name in tensors:  # a bias as large as the logits
            tensors[name] = torch.randn(shapes[name], generator=generator) * (1.5 if "w1" in name else 1.0)
    if draft_vocab < vocab:
        kept = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = kept - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, kept, True)
    save_file(tensors, path / "model.safetensors")
    before = [tap - 1 for tap in taps]  # the layers after which the states are captured
    ids = {"mask_token_id": mask_token_id, "target_layer_ids": before}
    match style:
        case "deepspec":
            config |= {"architectures": ["Qwen3DSparkModel"], "block_size": block_size, **ids, **markov}
        case "z-lab":
            config |= {"architectures": ["DFlashDraftModel"], "block_size": block_size, "dflash_config": ids}
        case "specforge":
            own = ids | markov | {"projector_type": "dspark" if markov_rank else "dflash", "attention_mode": "gqa"}
            config |= {"architectures": ["DSparkDraftModel"], "block_size": block_size, "dflash_config": own}
        case "speculators":
            kind = "dspark" if markov_rank else "dflash"
            config = {
                "architectures": ["DSparkDraftModel" if markov_rank else "DFlashDraftModel"],
                "speculators_model_type": kind,
                "block_size": block_size,
                "aux_hidden_state_layer_ids": list(taps),
                "mask_token_id": mask_token_id,
                "sliding_window_non_causal": False,
                "transformer_layer_config": config,
                **(markov if markov_rank else {}),
                **({} if from_anchor is None else {"sample_from_anchor": from_anchor}),
            }
    if target_hidden_size:
        config["target_hidden_size"] = target_hidden_size
    if draft_vocab_size:
        config["draft_vocab_size"] = draft_vocab_size
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_bigrams(path: Path, target: Path, *, rank: int = 96, block_size: int = 7) -> Path:
    """Write a DSpark head that drafts a target's own bigrams: its Markov head has what each token alone predicts.

    Its layers are random and small, so drafts depend on them, but hardly.
    """
    model = load_decoder(target, read_spec(target))
    spec = model.spec
    token_V = torch.arange(spec.vocab_size)
    kv = model.new_kv_pool(spec.vocab_size)
    alone = AttentionMetadata(
        query_offsets=np.arange(spec.vocab_size + 1, dtype=np.int32),
        page_table_BP=np.arange(spec.vocab_size, dtype=np.int32)[:, None],
        base_B=np.zeros(spec.vocab_size, dtype=np.int32),
        slot_N=np.zeros(spec.vocab_size, dtype=np.int32),
        visible_N=np.ones(spec.vocab_size, dtype=np.int32),
        ancestors_N=np.zeros(spec.vocab_size, dtype=np.int64),
    )
    logits_VV = model.full_logits(model.forward(token_V, 0 * token_V, model.plan(alone, 1), kv).final_ND)
    left_VV, size_V, right_VV = torch.linalg.svd(logits_VV - logits_VV.mean(1, keepdim=True))
    write_block(
        path,
        markov_rank=rank,
        block_size=block_size,
        mask_token_id=3,
        taps=(2, 5),
        vocab_size=spec.vocab_size,
        hidden_size=64,
        target_hidden_size=spec.hidden_size,
    )
    tensors = load_file(path / "model.safetensors")
    markov = {
        "markov_head.markov_w1.weight": left_VV[:, :rank] * size_V[:rank],
        "markov_head.markov_w2.weight": right_VV[:rank].T,
        "lm_head.weight": 0.05 * tensors["lm_head.weight"],
    }
    edit_weights(path, add={name: tensor.contiguous() for name, tensor in markov.items()})
    return path


def load_block(path: Path, target: Path) -> BlockHead:
    """Load a head as its config.json describes it."""
    return BlockHead.load(read_block_spec(path, read_spec(target)), path, target)


def write_eagle(
    path: Path,
    *,
    seed: int = 0,
    bias: bool = True,
    with_embedding: bool = False,
    with_head: bool = False,
    num_hidden_layers: int = 1,
    **overrides: Any,
) -> Path:
    """Write a random EAGLE-1/2 head in SafeAILab's layout, for a target of `write_model`."""
    path.mkdir(parents=True, exist_ok=True)
    config = {**BASE, "num_hidden_layers": num_hidden_layers, **overrides}
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes = {"fc.weight": (hidden, 2 * hidden)} | ({"fc.bias": (hidden,)} if bias else {})
    for index in range(num_hidden_layers):
        shapes |= _layer_shapes(f"layers.{index}.", config, qkv_bias=config.get("qkv_bias", False))
    del shapes["layers.0.input_layernorm.weight"]
    shapes |= {"embed_tokens.weight": (vocab, hidden)} if with_embedding else {}
    shapes |= {"lm_head.weight": (vocab, hidden)} if with_head else {}
    generator = torch.Generator().manual_seed(seed)
    save_file({name: randomise(shape, name, generator) for name, shape in shapes.items()}, path / "model.safetensors")
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "bias": bias}
    (path / "config.json").write_text(json.dumps(config))
    return path


def add_mtp(path: Path, layout: str, *, seed: int = 0) -> Path:
    """Add an MTP layer to a single-file model; "mimo" turns a Qwen2 model into a MiMo model.

    That of a hybrid is a copy of the layer that has attention, that of a DeepSeek-V3 one of the last layer.
    """
    config = json.loads((path / "config.json").read_text())
    hidden = config["hidden_size"]
    match layout:
        case "qwen3":
            names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
            shapes = {"mtp.fc.weight": (hidden, 2 * hidden)} | {f"mtp.{name}.weight": (hidden,) for name in names}
            shapes |= _layer_shapes("mtp.layers.0.", config, qk_norm=True)
            edit_config(path, mtp_num_hidden_layers=1)
        case "qwen3_5":
            names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
            shapes = {"mtp.fc.weight": (hidden, 2 * hidden)} | {f"mtp.{name}.weight": (hidden,) for name in names}
            edit_config(path, mtp_num_hidden_layers=1)
        case "deepseek_v3":
            own = f"model.layers.{config['num_hidden_layers']}."
            shapes = {f"{own}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
            shapes[f"{own}eh_proj.weight"] = (hidden, 2 * hidden)
            edit_config(path, num_nextn_predict_layers=1)
        case "mimo":
            own = "model.mtp_layers.0."
            names = ("token_layernorm", "hidden_layernorm", "final_layernorm")
            shapes = {f"{own}input_proj.weight": (hidden, 2 * hidden)} | {
                f"{own}{name}.weight": (hidden,) for name in names
            }
            shapes |= _layer_shapes(own, config, qkv_bias=True)
            auto_map = {"AutoConfig": "configuration_mimo.MiMoConfig"}
            edit_config(
                path,
                architectures=["MiMoForCausalLM"],
                model_type="mimo",
                auto_map=auto_map,
                num_nextn_predict_layers=1,
            )
    generator = torch.Generator().manual_seed(seed + 1)
    tensors = {name: randomise(shape, name, generator) for name, shape in shapes.items()}
    if layout == "qwen3_5":
        tensors = {name: tensor - 1 if "norm" in name else tensor for name, tensor in tensors.items()}
        own = f"model.layers.{config['layer_types'].index('full_attention')}."
        stored = load_file(path / "model.safetensors").items()
        tensors |= {name.replace(own, "mtp.layers.0."): tensor for name, tensor in stored if name.startswith(own)}
    if layout == "deepseek_v3":
        last, whole = f"model.layers.{config['num_hidden_layers'] - 1}.", load_file(path / "model.safetensors")
        tensors |= {name.replace(last, own): tensor for name, tensor in whole.items() if name.startswith(last)}
        tensors[f"{own}embed_tokens.weight"] = whole["model.embed_tokens.weight"].clone()
        tensors[f"{own}shared_head.head.weight"] = whole["lm_head.weight"].clone()
    edit_weights(path, add=tensors)
    return path


def _layer_shapes(
    prefix: str, config: dict[str, Any], *, qkv_bias: bool = False, qk_norm: bool = False
) -> dict[str, tuple[int, ...]]:
    """Create the tensors of a plain decoder layer."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    rows = {"q": heads * head_dim, "k": config["num_key_value_heads"] * head_dim}
    rows["v"] = rows["k"]
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{n}_proj.weight": (rows[n], hidden) for n in rows}
    shapes |= {f"self_attn.{n}_proj.bias": (rows[n],) for n in rows} if qkv_bias else {}
    shapes |= {f"self_attn.{n}_norm.weight": (head_dim,) for n in "qk"} if qk_norm else {}
    shapes |= {
        "self_attn.o_proj.weight": (hidden, rows["q"]),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}
