"""Small GGUF files as llama.cpp writes them, made from checkpoints of `tests.support.checkpoints`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType, quantize
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from torch import Tensor

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in OTHER_NAMES:
        return f"{OTHER_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"


def interleaved(values: Tensor, num_heads: int) -> Tensor:
    """Return llama.cpp's order of rotary dimensions: it pairs neighbours, where Hugging Face pairs halves of a head."""
    return values.reshape(num_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    file: Path, model: Path, architecture: str, *, kind: str = "F32", pre: str = "default", **metadata: Any
) -> Path:
    """Write a single-file checkpoint as GGUF.

    kind: the type of its matrices. metadata: settings of the architecture, instead of or beside the checkpoint's.
    """
    config = json.loads((model / "config.json").read_text())
    writer = GGUFWriter(file, architecture)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}" if kind != "F32" else "ALL_F32"])
    settings: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        **metadata,
    }
    for key, value in settings.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        if value is not None:
            add[type(value)](f"{architecture}.{key}", value)
    add_tokenizer(writer, config["vocab_size"], pre)
    for name, values in load_file(model / "model.safetensors").items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleaved(values, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        array = values.float().numpy()
        own = GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        if own.name in ("F32", "F16"):
            writer.add_tensor(gguf_name(name), array.astype({"F32": np.float32, "F16": np.float16}[own.name]))
        else:
            writer.add_tensor(gguf_name(name), quantize(array, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_tokenizer(writer: GGUFWriter, size: int, pre: str) -> None:
    """Add a byte-level tokenizer with letters, two special tokens, two merges and as many tokens as the model has."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - 4]
    tokens = ["<s>", "</s>", *letters, "ab", "12"]
    tokens += [f"<unused{i}>" for i in range(size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL, TokenType.CONTROL, *[TokenType.NORMAL] * (size - 2)])
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
