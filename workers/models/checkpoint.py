"""Checkpoints: what a model is, from config.json, and where its tensors are (`Weights`, slice by slice).

    read_spec(path) -> ModelSpec                       see `workers.models.specs`; ValueError for what we cannot run
    check_parallel(spec, size) -> None                 ValueError unless `size` ranks can share the model
    Weights(path, dtype=None, device="cpu")
        .get(name, dim=None, rank=0, size=1) -> Tensor   .get_range(name, dim, start, end)   .has(name)   .names()
        .are_equal(one, other, start, end)             of two matrices' rows
        .finish(allowed=...)                           ValueError naming tensors that nobody asked for
    split(total, rank, size) -> (start, end)           the range of a dimension that a rank owns

Importing this file imports neither torch nor transformers: both wait until a checkpoint is opened, so that the rules
which need no model files can be checked first.
"""

from __future__ import annotations

import json
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.models.specs import ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SUPPORTED_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MiMoForCausalLM": "mimo",  # Qwen2 with a multi-token prediction layer
}

MTP_PREFIXES = ("mtp.", "model.mtp_layers.")
"""Multi-token prediction layers in a target's checkpoint: the drafter's, see `workers.models.fc_head_format`."""

FP8_SCALE = "_scale_inv"
"""Ends the name of the block scales of a float8 tensor, as DeepSeek, Qwen and others publish them."""

_COMPARED_ROWS = 4096
"""Rows of two matrices that are compared at a time."""

_DEQUANTISED_ITEMS = 1 << 22
"""Values that are dequantised at a time: the float32 copies of them and of their scales come and go."""


def split(total: int, rank: int, size: int) -> tuple[int, int]:
    """The contiguous part of `total` items that a rank owns; parts differ by at most one item."""
    return total * rank // size, total * (rank + 1) // size


def check_parallel(spec: ModelSpec, size: int) -> None:
    """Raise ValueError unless `size` tensor-parallel ranks can share this model's attention heads.

    Intermediate and vocabulary dimensions may be uneven, so heads are the only limit (but for `can_split`).
    """
    if size > 1 and not spec.can_split:
        raise ValueError(f"tensor_parallel_size {size} does not fit a {spec.family} model: it runs on one rank only")
    check_heads(spec.num_heads, spec.num_kv_heads, size)


def check_heads(heads: int, kv_heads: int, size: int) -> None:
    """`check_parallel` for bare head counts (draft heads have no ModelSpec)."""
    legal = [t for t in range(1, heads + 1) if heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)]
    if size not in legal:
        raise ValueError(
            f"tensor_parallel_size {size} does not fit a model with {heads} attention heads and {kv_heads} key-value "
            f"heads: it must divide the attention heads, and divide the key-value heads or be a multiple of them; "
            f"use one of {', '.join(map(str, legal))}"
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file as a dict, {} if it does not exist. Raises ValueError for any other content."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON or of UTF-8
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object but a {type(found).__name__}")
    return found


def read_spec(path: Path | str) -> ModelSpec:
    """Read a target's or a draft model's config.json (and the end-of-text ids of generation_config.json).

    Raises:
        FileNotFoundError: no config.json.
        ValueError: an architecture, activation, quantisation or rope variant that we do not run; it says what we do.

    Returns:
        ModelSpec: of an architecture other than SUPPORTED_ARCHITECTURES a `TransformersSpec`.
    """
    path = Path(path)
    raw = read_json(path / "config.json")
    if not raw:
        raise FileNotFoundError(f"no config.json in {path}")
    _check_kind(raw, path)
    family = _family(raw)
    if family is None:
        from workers.models.transformers_spec import read_transformers_spec

        return read_transformers_spec(path, raw)
    from transformers import AutoConfig, Qwen2Config

    from workers.models.rope import reach, rope_spec

    try:
        if family == "mimo":  # transformers does not know it; its own code derives from Qwen2's
            config = Qwen2Config(**raw)
        else:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # whatever transformers' own validation raises, KeyError included
        raise ValueError(f"{path}/config.json is not a valid {family} configuration: {error}") from error
    if config.hidden_act != "silu":
        raise ValueError(f"{path}: activation {config.hidden_act!r} is not supported; supported: silu")
    bias, positions = bool(getattr(config, "attention_bias", False)), reach(config)
    return ModelSpec(
        family=family,
        num_layers=config.num_hidden_layers,
        num_mtp_layers=raw.get("num_nextn_predict_layers") or raw.get("mtp_num_hidden_layers") or 0,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        tie_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=bias or family in ("qwen2", "mimo"),  # Qwen2 has biases on q, k, v and no flag for them
        o_bias=bias and family not in ("qwen2", "mimo"),
        mlp_bias=bool(getattr(config, "mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        rope=rope_spec(config),
        windows=_windows(config, family),
        max_position_embeddings=positions.default,
        max_scaled_positions=positions.most,
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=eos_ids(raw, read_json(path / "generation_config.json")),
    )


def _check_kind(raw: dict[str, Any], path: Path) -> None:
    """Raise ValueError for a checkpoint that is no model by itself, or that is quantised otherwise than in FP8 blocks.

    Checked on the raw JSON: transformers' own error for a stranger would not say what we do support.
    """
    quantization = raw.get("quantization_config")
    if quantization:
        fp8_block(quantization, path)
    if "draft_vocab_size" in raw or "speculators_model_type" in raw:
        raise ValueError(f"{path} is an EAGLE-3 draft head, not a model that can run by itself")


def _family(raw: dict[str, Any]) -> str | None:
    """The family of `workers.models.decoder` that a config belongs to; None = none of them."""
    architectures = raw.get("architectures") or []
    by_type = {family: family for family in SUPPORTED_ARCHITECTURES.values()}
    family = SUPPORTED_ARCHITECTURES.get(architectures[0]) if architectures else by_type.get(raw.get("model_type", ""))
    return family if raw.get("model_type", family) == family else None


def fp8_block(quantization: dict[str, Any], path: Path) -> tuple[int, int]:
    """(rows, columns) that share one scale in a float8 checkpoint, from config.json's `quantization_config`.

    Raises:
        ValueError: any other quantisation, by its name.
    """
    method, block = quantization.get("quant_method", "unknown"), quantization.get("weight_block_size")
    if method != "fp8" or not block:
        kind = f"{method} without weight_block_size" if method == "fp8" else method
        raise ValueError(
            f"{path}: quantized checkpoints are not supported (quantization_config: {kind}), except fp8 with "
            "weight_block_size: use such a one, or the original weights"
        )
    return int(block[0]), int(block[1])


def _windows(config: Any, family: str) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if family == "mistral":
        return (window,) * config.num_hidden_layers
    if family == "llama" or window is None:
        return (None,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def eos_ids(*configs: dict[str, Any]) -> tuple[int, ...]:
    """End-of-text ids of config.json and generation_config.json together: chat models name theirs in either.

    Raises ValueError for what is neither a token id nor a list of them.
    """
    ids: dict[int, None] = {}
    for config in configs:
        value = config.get("eos_token_id")
        own = value if isinstance(value, list) else [] if value is None else [value]
        if strange := [item for item in own if type(item) is not int]:
            raise ValueError(f"eos_token_id: {strange[0]!r} is no token id; write a number or a list of numbers")
        ids.update(dict.fromkeys(own))
    return tuple(ids)


class Weights:
    """The tensors of one checkpoint folder: safetensors (single, sharded) or, failing that, pytorch_model.bin.

    Files are memory-mapped and only the slices asked for are read, then cast and moved one tensor at a time; a rank
    never holds more than its own share plus one tensor. Every returned tensor owns its memory.
    Tensors quantised in FP8 blocks are dequantised as they are read, so a model takes the memory of `dtype` (in
    bfloat16 twice its files) and runs at the speed of `dtype`; the rounding of its weights is all that stays of FP8.

    Args:
        path: the checkpoint folder.
        dtype: floating tensors are cast to it (None = as stored); integer and boolean ones keep theirs.
        device: where the slices go.
        rename: applied to every stored name first, so that formats differing by a prefix load alike.
    """

    def __init__(
        self,
        path: Path | str,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rename: Callable[[str], str] = str,
    ) -> None:
        import torch
        from safetensors import SafetensorError, safe_open

        self.path = Path(path)
        self.dtype = dtype
        self.device = torch.device(device)
        self._slices: dict[str, Any] = {}
        self._used: set[str] = set()
        quantization = read_json(self.path / "config.json").get("quantization_config")
        self._fp8_block = fp8_block(quantization, self.path) if quantization else None
        for file in _weight_files(self.path):
            if file.suffix == ".bin":
                self._slices.update({rename(name): tensor for name, tensor in _read_pickle(file).items()})
                continue
            try:
                handle = safe_open(file, framework="pt", device="cpu")
            except SafetensorError as error:
                raise _damaged(file, error) from error
            self._slices.update({rename(name): handle.get_slice(name) for name in handle.keys()})  # noqa: SIM118

    def has(self, name: str) -> bool:
        return name in self._slices

    def names(self) -> list[str]:
        """All tensors but the scales of others."""
        scales = {name + FP8_SCALE for name in self._slices}
        return [name for name in self._slices if name not in scales]

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a stored tensor. Raises ValueError if it is missing."""
        stored = self._find(name)
        return tuple(stored.shape if hasattr(stored, "shape") else stored.get_shape())

    def get(self, name: str, dim: int | None = None, rank: int = 0, size: int = 1) -> Tensor:
        """A tensor, or the `rank`-th of `size` parts of it along `dim`. Raises ValueError if it is missing."""
        if dim is None or size == 1:
            return self.get_range(name, 0, 0, None)
        return self.get_range(name, dim, *split(self.shape(name)[dim], rank, size))

    def get_range(self, name: str, dim: int, start: int, end: int | None, dtype: torch.dtype | None = None) -> Tensor:
        """Items start:end along `dim` of a tensor, in `dtype` (None = ours). Raises ValueError if it is missing."""
        import torch

        stored = self._find(name)
        self._used.add(name)
        part = stored[(slice(None),) * dim + (slice(start, end),)] if self.shape(name) else stored[...]
        is_float8 = part.dtype is torch.float8_e4m3fn
        own_dtype = torch.float32 if is_float8 else part.dtype
        dtype = (dtype or self.dtype or own_dtype) if part.is_floating_point() else own_dtype
        # A fresh tensor: the mapped file may be misaligned, and one slice would keep all of it mapped.
        values = torch.empty(part.shape, dtype=dtype, device=self.device)
        if not is_float8:
            return values.copy_(part)
        step = max(1, _DEQUANTISED_ITEMS // max(1, part[:1].numel()))
        first = [start if axis == dim else 0 for axis in range(part.dim())]
        for row in range(0, part.shape[0], step):
            piece = part[row : row + step].to(self.device)
            values[row : row + step] = self._dequantise(name, piece, [first[0] + row, *first[1:]])
        return values

    def _dequantise(self, name: str, part: Tensor, first: list[int]) -> Tensor:
        """float32 values of a float8 slice [..., R, C] that begins at `first`, an index along every dimension.

        A block of rows x columns shares the factor `name`_scale_inv[..., row // rows, column // columns].
        """
        import torch

        scale_name = name + FP8_SCALE
        if self._fp8_block is None or scale_name not in self._slices:
            raise ValueError(f"{self.path}: float8 tensor {name!r} has no block scales {scale_name!r}")
        scale = self._find(scale_name)[...].to(self.device, torch.float32)
        self._used.add(scale_name)
        for axis in range(part.dim()):
            block = self._fp8_block[axis - part.dim() + 2] if axis >= part.dim() - 2 else 1
            index = torch.arange(first[axis], first[axis] + part.shape[axis], device=self.device) // block
            scale = scale.index_select(axis, index)
        return scale.mul_(part.to(torch.float32))

    def are_equal(self, one: str, other: str, start: int, end: int) -> bool:
        """Whether rows start:end of two stored matrices are the same, as they are stored. Both count as asked for.

        Read block by block, up to the first that differs. float8 matrices, which torch does not compare and whose
        scales may differ, count as different. Raises ValueError if one is missing.
        """
        import torch

        first, second = self._find(one), self._find(other)
        self._used.update((one, other))
        if self.shape(one) != self.shape(other):
            return False
        for row in range(start, end, _COMPARED_ROWS):
            rows = slice(row, min(end, row + _COMPARED_ROWS))
            one_part, other_part = first[rows], second[rows]
            if one_part.dtype != other_part.dtype or one_part.dtype is torch.float8_e4m3fn:
                return False
            if not torch.equal(one_part, other_part):
                return False
        return True

    def finish(self, allowed: Callable[[str], bool] | Iterable[str] = ()) -> None:
        """Raise ValueError if the checkpoint holds tensors that were never asked for, other than the allowed names.

        A tensor that nobody reads means a model that is not the one we built: silently skipping it would only show
        as bad text.
        """
        known = allowed if callable(allowed) else set(allowed).__contains__
        unknown = sorted(name for name in self._slices if name not in self._used and not known(name))
        if unknown:
            raise ValueError(f"{self.path}: {len(unknown)} unknown tensors: {', '.join(unknown[:8])}")

    def _find(self, name: str) -> Any:
        if name not in self._slices:
            raise ValueError(f"{self.path}: tensor {name!r} is missing")
        return self._slices[name]


def weight_names(path: Path, present: Collection[str]) -> list[str]:
    """The files that a checkpoint's tensors are read from, of those in its folder (or in its repository): sharded or
    single safetensors, else pickles. Raises ValueError for an index that names none.

    Of other safetensors files all are read but "consolidated" ones: they repeat the weights under Mistral's own names.
    """
    if "model.safetensors.index.json" in present:
        return _indexed(path / "model.safetensors.index.json")
    if "model.safetensors" in present:
        return ["model.safetensors"]
    if "pytorch_model.bin.index.json" in present:
        return _indexed(path / "pytorch_model.bin.index.json")
    others = [name for name in present if Path(name).name == name and name.endswith(".safetensors")]
    found = sorted(name for name in others if not name.startswith("consolidated"))
    return found or ["pytorch_model.bin" if "pytorch_model.bin" in present else "model.safetensors"]


def _indexed(index: Path) -> list[str]:
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{index} has no weight_map, which says in which file each tensor is")
    return sorted(set(files.values()))


def _weight_files(path: Path) -> list[Path]:
    present = {file.name for file in path.iterdir()} if path.is_dir() else set()
    files = [path / name for name in weight_names(path, present)]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise FileNotFoundError(f"no weights in {path}: {', '.join(missing)} not found")
    return files


def _damaged(file: Path, error: Exception) -> ValueError:
    return ValueError(f"{file} cannot be read ({str(error) or type(error).__name__}): fetch or copy it again")


def _read_pickle(file: Path) -> dict[str, Tensor]:
    """The tensors of a pytorch_model.bin, mapped. Raises ValueError for one that holds anything else."""
    import torch

    convert = "convert it: write its tensors with safetensors.torch.save_file(tensors, 'model.safetensors')"
    try:
        # Before torch 1.6 files were no zip archives, and such cannot be mapped.
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|global) ([\w.]+)", str(error))
        what = f"more than tensors ({found[1]})" if found else "no tensors that can be read"
        raise ValueError(
            f"{file} is a pickle with {what}, and reading such a file would run code of its author's; take a "
            f"checkpoint with safetensors, or, where you trust it, {convert}"
        ) from None  # torch's own advice is to read it all the same
    except (EOFError, OSError, RuntimeError, struct.error) as error:
        raise _damaged(file, error) from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ValueError(f"{file} is no plain mapping of names to tensors; {convert}")
    return tensors
