"""Small random checkpoints in the published formats, for tests: config.json + model.safetensors, EAGLE-3 heads.

write_model(path, "llama" | "mistral" | "qwen2" | "qwen3", legacy_rope=False, shards=1, seed=0, **config) -> path
write_eagle3(path, style="safeailab" | "specforge" | "speculators", seed=0, bin_file=False, **config) -> path
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

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


def randomise(shape: tuple[int, ...], name: str, generator: torch.Generator) -> Tensor:
    """Weights large enough that every part of the model matters: norms near 1, biases and matrices far from 0."""
    value = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.2 * value
    if len(shape) == 1:
        return 0.3 * value
    return value if "embed" in name else value * (1.5 / shape[-1] ** 0.5)


def write_model(
    path: Path, family: str, *, legacy_rope: bool = False, shards: int = 1, seed: int = 0, **overrides: Any
) -> Path:
    """A random model of a family, saved by transformers itself; `legacy_rope` writes rope_theta and rope_scaling."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**BASE, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(randomise(tuple(parameter.shape), name, generator))
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    model.save_pretrained(path, max_shard_size=size // shards + 4096)
    if legacy_rope:
        raw = json.loads((path / "config.json").read_text())
        rope = raw.pop("rope_parameters")
        raw["rope_theta"] = rope.pop("rope_theta")
        raw["rope_scaling"] = rope if rope["rope_type"] != "default" else None
        (path / "config.json").write_text(json.dumps(raw))
    return path


def edit_config(path: Path, **changes: Any) -> None:
    """Overwrite fields of a checkpoint's config.json."""
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | changes))


def edit_weights(path: Path, *, remove: tuple[str, ...] = (), add: dict[str, Tensor] | None = None) -> None:
    """Remove from and add tensors to a single-file checkpoint."""
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor.clone() for name, tensor in tensors.items() if name not in remove}
    save_file(kept | (add or {}), path / "model.safetensors", metadata={"format": "pt"})


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
    aux_layer_ids: tuple[int, ...] | None = None,
    **overrides: Any,
) -> Path:
    """A random EAGLE-3 head whose config fields default to those of `write_model`."""
    path.mkdir(parents=True, exist_ok=True)
    config = {**BASE, **overrides}
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    inner, vocab = config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // heads
    draft_vocab = draft_vocab_size or vocab
    layer = "layers.0" if style == "speculators" else "midlayer"
    shapes = {
        "fc.weight": (hidden, 3 * (target_hidden_size or hidden)),
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
    target_hidden = target_hidden_size or hidden
    if fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (target_hidden,) for i in range(3)}
    if norm_before_fc:
        shapes["input_norm.weight"] = (3 * target_hidden,)
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
    config |= {"num_hidden_layers": 1, "model_type": "llama", "hidden_act": "silu"}
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
    (path / "config.json").write_text(json.dumps(config))
    return path
