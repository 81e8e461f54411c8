"""GGUF files as checkpoints: a file is converted once into the layout that Hugging Face publishes.

The folder is then a checkpoint like any other. Quantised weights are dequantised: the model takes the memory of
`dtype`, and what the quantisation lost stays lost. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import fcntl
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.models.config_json import read_json

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from torch import Tensor

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Ours by GGUF's names; Mistral models are "llama" there."""

INDEX = "model.safetensors.index.json"
"""Is written last: a folder that has it has all weights."""

_SHARD_BYTES = 2 << 30
_CHECKSUMS = "checksums.json"
_SOURCE = "gguf_source.json"

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, [head_dim / 2]: how GGUF stores Llama 3's scaling."""

_SMOLLM_SPLIT = [
    {"type": "Digits", "individual_digits": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
]
"""The pre-tokenizer of SmolLM's published tokenizer.json, which transformers' own conversion does not know."""

_KNOWN_SPLITS = ("default", "gpt-2", "llama-bpe", "llama3", "llama-v3", "qwen2", "deepseek-r1-qwen", "tekken", "smollm")
"""Values of `tokenizer.ggml.pre` whose splitting rule is known; any other would tokenize text in another way."""


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file."""
    return path.suffix == ".gguf" and path.is_file()


def bytes_per_weight(file: Path) -> float:
    """Return the mean size of a weight in a GGUF file, with the scales of quantised ones. Raises ValueError."""
    tensors = _open(file).tensors
    return sum(int(tensor.n_bytes) for tensor in tensors) / sum(int(tensor.n_elements) for tensor in tensors)


def describe(file: Path, cache: Path) -> Path:
    """Return the folder that stands for a GGUF file, with config.json and tokenizer; write it on first use.

    Args:
        file: the GGUF file.
        cache: where converted files are kept, one folder for each file and modification time.

    Raises:
        ModuleNotFoundError: the package gguf is not installed.
        ValueError: a model that we cannot run, with its reason.
    """
    stat = file.stat()
    key = sha256(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache / f"{file.stem}-{key}"
    if folder.is_dir():
        return folder
    reader = _open(file)
    config = _config(reader, file)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".new-") as name:
        new = Path(name) / "model"
        new.mkdir()
        _write_json(new / "config.json", config)
        _write_json(new / "generation_config.json", _generation_config(reader))
        _write_tokenizer(reader, file, new)
        _write_json(new / _SOURCE, {"file": str(file.resolve()), "bytes": stat.st_size})
        try:
            new.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def convert_weights(file: Path, folder: Path) -> None:
    """Write a file's weights into the folder that `describe` gave for it; check those that are there already.

    A conversion that was interrupted begins again; a second process waits for the first. Raises ValueError for tensors
    that have no place in the model, by their names.
    """
    with _locked(folder):
        if (folder / INDEX).exists() and _are_whole(folder):
            return
        (folder / INDEX).unlink(missing_ok=True)
        reader = _open(file)
        names = _names(reader, file)
        config = read_json(folder / "config.json")
        weight_map: dict[str, str] = {}
        checksums: dict[str, str] = {}
        shards = _shards(reader.tensors, names)
        with _progress(file.name, sum(len(shard) for shard in shards)) as advance:
            for number, shard in enumerate(shards, start=1):
                target = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
                tensors = {}
                for tensor in shard:
                    tensors[names[tensor.name]] = _values(tensor, config)
                    advance(1)
                checksums[target.name] = _save(tensors, target)
                weight_map |= dict.fromkeys(tensors, target.name)
        _write_json(folder / _CHECKSUMS, checksums)
        _write_json(folder / INDEX, {"metadata": {"source": file.name}, "weight_map": weight_map})


def _open(file: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        return GGUFReader(file)
    except (ValueError, IndexError, OSError) as error:
        raise ValueError(f"{file} is not a GGUF file that can be read ({error}): fetch or copy it again") from None


def _config(reader: GGUFReader, file: Path) -> dict[str, Any]:
    """Return config.json's content. Raises ValueError for what we do not run."""
    architecture = str(_value(reader, "general.architecture"))
    if architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ValueError(f"{file}: GGUF models of architecture {architecture!r} are not supported; use {supported}")
    _names(reader, file)

    def read(key: str, default: Any = None) -> Any:
        value = _value(reader, f"{architecture}.{key}", default)
        if value is None:
            raise ValueError(f"{file} lacks {architecture}.{key}; fetch it again, or convert the model anew")
        if isinstance(value, list):
            raise ValueError(f"{file}: layers that differ in {architecture}.{key} are not supported")
        return value

    shapes = {tensor.name: _shape(tensor) for tensor in reader.tensors}
    hidden_size, num_heads = int(read("embedding_length")), int(read("attention.head_count"))
    head_dim = int(read("attention.key_length", hidden_size // num_heads))
    if int(read("rope.dimension_count", head_dim)) != head_dim:
        raise ValueError(f"{file}: rotating a part of each head is not supported")
    return {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_size": hidden_size,
        "intermediate_size": int(read("feed_forward_length")),
        "num_hidden_layers": int(read("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(read("attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "vocab_size": shapes["token_embd.weight"][0],
        "max_position_embeddings": int(read("context_length")),
        "rms_norm_eps": round(float(read("attention.layer_norm_rms_epsilon")), 12),  # stored in float32
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": architecture == "llama" and "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "rope_parameters": _rope(reader, architecture, head_dim, file),
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        "dtype": _dtype_of(reader),
    }


def _rope(reader: GGUFReader, architecture: str, head_dim: int, file: Path) -> dict[str, Any]:
    theta = float(_value(reader, f"{architecture}.rope.freq_base", 10000.0))
    kind = _value(reader, f"{architecture}.rope.scaling.type", "none")
    factor = float(_value(reader, f"{architecture}.rope.scaling.factor", 1.0))
    original = _value(reader, f"{architecture}.rope.scaling.original_context_length")
    factors = [tensor for tensor in reader.tensors if tensor.name == _ROPE_FACTORS]
    if factors and kind == "none":
        return _llama3_rope(factors[0].data.tolist(), theta, head_dim, file)
    match kind:
        case "none":
            return {"rope_type": "default", "rope_theta": theta}
        case "linear":
            return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
        case "yarn" if original is not None:
            scaling = {"factor": factor, "original_max_position_embeddings": int(original)}
            return {"rope_type": "yarn", "rope_theta": theta, **scaling}
        case _:
            raise ValueError(f"{file}: rope scaling {kind!r} is not supported in GGUF files; use linear or yarn")


def _llama3_rope(factors: list[float], theta: float, head_dim: int, file: Path) -> dict[str, Any]:
    """Return the parameters of Llama 3's scaling that give these factors. Raises ValueError if none do.

    A file holds the factors and not the parameters; all published models share all of these but the largest factor.
    """
    import math

    largest, low, high, original = max(factors), 1.0, 4.0, 8192
    for factor, expected in zip(factors, (theta ** (2 * i / head_dim) for i in range(head_dim // 2)), strict=True):
        wavelength = 2 * math.pi * expected
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        if not math.isclose(factor, 1 / ((1 - smooth) / largest + smooth), rel_tol=1e-4):
            raise ValueError(f"{file}: the factors in {_ROPE_FACTORS} are not Llama 3's and are not supported")
    scaling = {"factor": largest, "low_freq_factor": low, "high_freq_factor": high}
    return {"rope_type": "llama3", "rope_theta": theta, **scaling, "original_max_position_embeddings": original}


def _generation_config(reader: GGUFReader) -> dict[str, Any]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [_value(reader, f"tokenizer.ggml.{key}") for key in keys]
    return {"eos_token_id": list(dict.fromkeys(int(end) for end in ends if end is not None))}


def _write_tokenizer(reader: GGUFReader, file: Path, folder: Path) -> None:
    """Let transformers convert the tokenizer; then mend the splitting rule that it does not know."""
    kind, split = (_value(reader, f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind == "gpt2" and (split or "default") not in _KNOWN_SPLITS:
        known = ", ".join(_KNOWN_SPLITS)
        message = f"{file}: the tokenizer's splitting rule {split!r} is not supported; supported: {known}"
        raise ValueError(f"{message}; or name a folder with its tokenizer.json (--tokenizer)")
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    if split == "smollm":
        path = folder / "tokenizer.json"
        _write_json(path, read_json(path) | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": _SMOLLM_SPLIT}})


def _names(reader: GGUFReader, file: Path) -> dict[str, str]:
    """Return the published name of every tensor. Raises ValueError for tensors that have none."""
    names, unknown = {}, []
    for tensor in reader.tensors:
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor.name)
        other = re.fullmatch(r"(\w+)\.(weight)", tensor.name)
        if layer and layer[2] in _LAYER_TENSORS:
            names[tensor.name] = f"model.layers.{layer[1]}.{_LAYER_TENSORS[layer[2]]}.{layer[3]}"
        elif other and other[1] in _TENSORS:
            names[tensor.name] = f"{_TENSORS[other[1]]}.{other[2]}"
        elif tensor.name != _ROPE_FACTORS:
            unknown.append(tensor.name)
    if unknown:
        raise ValueError(f"{file}: {len(unknown)} tensors are not supported: {', '.join(unknown[:8])}")
    return names


def _values(tensor: ReaderTensor, config: dict[str, Any]) -> Tensor:
    """Dequantise one tensor. Matrices get the checkpoint's dtype; vectors, which take no space, stay in float32."""
    import torch
    from gguf import dequantize

    values = torch.tensor(dequantize(tensor.data, tensor.tensor_type)).reshape(_shape(tensor))
    part = re.search(r"attn_([qk])\.", tensor.name)
    if config["model_type"] == "llama" and part:
        num_heads = config["num_attention_heads" if part[1] == "q" else "num_key_value_heads"]
        values = _unpermuted(values, num_heads)
    return values.to(torch.float32 if values.dim() == 1 else getattr(torch, config["dtype"])).contiguous()


def _unpermuted(values: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of rotary dimensions: it pairs neighbours, published checkpoints pair halves of a head."""
    return values.reshape(num_heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _dtype_of(reader: GGUFReader) -> str:
    """Return the type that the matrices are converted to: their own, or bfloat16 for quantised ones."""
    kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "bfloat16")


def _shards(tensors: list[ReaderTensor], names: dict[str, str]) -> list[list[ReaderTensor]]:
    """Split the tensors of the model into files of about `_SHARD_BYTES`."""
    shards: list[list[ReaderTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if tensor.name not in names:
            continue
        if shards[-1] and size + 2 * int(tensor.n_elements) > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += 2 * int(tensor.n_elements)
    return shards


def _save(tensors: dict[str, Tensor], target: Path) -> str:
    """Write one safetensors file, whole or not at all, and return its SHA-256."""
    from safetensors.torch import save_file

    new = target.with_suffix(".new")
    save_file(tensors, new, metadata={"format": "pt"})
    checksum = _checksum(new)
    new.replace(target)
    return checksum


def _are_whole(folder: Path) -> bool:
    """Return whether all weight files are as they were written."""
    checksums = read_json(folder / _CHECKSUMS)
    files = set(read_json(folder / INDEX)["weight_map"].values())
    return files == checksums.keys() and all(
        (folder / name).exists() and _checksum(folder / name) == checksums[name] for name in files
    )


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def _value(reader: GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """Return the shape as torch has it; GGUF names the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    new.replace(path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _progress(name: str, count: int) -> Iterator[Any]:
    """Show a bar as the hub's downloads do."""
    from tqdm.auto import tqdm

    with tqdm(total=count, desc=f"Converting {name}", unit="tensor", mininterval=1.0) as bar:
        yield bar.update
