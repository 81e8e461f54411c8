"""A larger target that computes the same function as the bundled one, to measure speculation at a larger model's cost.

    write_target(base, folder, size, dtype)          a Llama checkpoint, zero-padded from `base`
    write_head(head, base, folder, size, dtype)      the EAGLE-3 head that reads it
    scaled_pair(target, head, size, cache, dtype)    both, or those an earlier run left in `cache`

Logits and features, and so drafts and acceptance, are those of the bundled pair. Time and memory are those of a trained
model of `size`. Weights that have no effect on the result are random, so that no kernel can skip the work.

    width   The residual stream is [x, 0]. Rows D.. of o_proj and down_proj are zero, so the added part stays zero.
    norm    mean(x'^2) = D/D' mean(x^2), so with eps' = eps D/D' the root is sqrt(D/D') of the old one: weight' =
            weight sqrt(D/D') compensates exactly.
    heads   A pair of rotary dimensions (i, i + d/2) moves to (s i, s i + d'/2) with s = d'/d, where d' wide heads have
            its frequency, theta^(-2 s i / d') = theta^(-2 i / d). The other query dimensions are zero; queries grow by
            sqrt(d'/d) because scores are divided by sqrt(d'). o_proj ignores added heads and dimensions.
    MLP     down_proj ignores added columns.
    depth   Added layers have zero o_proj and down_proj; they are spread between the old ones, and the layers whose
            input the head reads are renumbered.
    vocabulary (only if asked for)
            The last added channel of the stream is _MARK in every row: embeddings write it, nothing else reads or
            writes it but the rows of added tokens in the vocabulary head, whose logits it makes the lowest. It adds
            _MARK^2 / D to mean(x^2). The head is as wide as the target then, with a draft vocabulary of a quarter: its
            fc passes the channel on.

Legend: D hidden, I intermediate, H heads, d head width, O outputs, V vocabulary; a prime marks the wide one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from workers.models.checkpoint import Weights
from workers.models.config_json import read_json
from workers.models.eagle3_format import read_eagle3_spec
from workers.models.readers import read_spec
from workers.models.specs import Eagle3Spec, ModelSpec

_NOISE_VALUES = 1_000_003  # prime, so that no two rows of a matrix are equal
_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")

Noise = Callable[[int, int], Tensor]

TARGET_COSTS = {"300m": (1024, 22), "8b": (4096, 32)}
"""Hidden width and number of layers by model size; '8b' has those of Llama-3-8B, whose vocabulary is '+v128256'."""
_MARK, _LOWEST = 1e-3, -1e8
"""The value of every row in the marked channel, and the weight of added tokens there."""
_WIDTH_STEP = 256
_POSITIONS = 16_384
"""The longest context of a pair with a wide vocabulary: more than its base was trained for, whose text means little."""


@dataclass(frozen=True, slots=True)
class TargetSize:
    """The size of a padded target with the proportions of Llama-3."""

    hidden_size: int
    num_layers: int
    vocab_size: int = 0
    """0 = the base's, and a head of unchanged size."""

    @staticmethod
    def parse(text: str) -> TargetSize:
        """Parse '300m', '8b' or HIDDENxLAYERS such as '512x12', and behind it +vTOKENS. Raises ValueError."""
        size, _, vocab = text.partition("+v")
        hidden, _, layers = size.partition("x")
        if "+v" in text and not vocab.isdecimal():
            raise ValueError(f"+v is followed by the number of tokens, as in 8b+v128256 (got {text!r})")
        if size in TARGET_COSTS:
            return TargetSize(*TARGET_COSTS[size], int(vocab or 0))
        if not (hidden.isdecimal() and layers.isdecimal() and int(layers) > 0):
            raise ValueError(f"must be 300m, 8b or HIDDENxLAYERS such as 512x12 (got {text!r})")
        if int(hidden) % _WIDTH_STEP or int(hidden) == 0:
            raise ValueError(f"the hidden width must be a multiple of {_WIDTH_STEP} (got {hidden})")
        return TargetSize(int(hidden), int(layers), int(vocab or 0))

    def __str__(self) -> str:
        return f"{self.hidden_size}x{self.num_layers}" + (f"+v{self.vocab_size}" if self.vocab_size else "")

    @property
    def intermediate_size(self) -> int:
        """Return the width of the MLP."""
        return self.hidden_size * 7 // 2

    @property
    def head_dim(self) -> int:
        """Return the width of an attention head."""
        return 128 if self.hidden_size >= 2048 else 64 if self.hidden_size >= 1024 else 32

    @property
    def num_heads(self) -> int:
        """Return the number of query heads."""
        return self.hidden_size // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        """Return a quarter of the query heads, or half of them where a quarter is too few or uneven."""
        return self.num_heads // 4 if self.num_heads % 4 == 0 and self.num_heads >= 16 else self.num_heads // 2

    @property
    def draft_vocab_size(self) -> int:
        """Return a quarter of the vocabulary, as published EAGLE-3 heads have."""
        return self.vocab_size // 4

    @property
    def layer_parameters(self) -> int:
        """Return the number of weights that every forward reads: all but the embedding and the LM head."""
        attention = 2 * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * self.hidden_size * (attention + 3 * self.intermediate_size)


class ScaledPair(NamedTuple):
    """Two checkpoint folders."""

    target: Path
    head: Path


def scaled_pair(target: Path, head: Path, size: TargetSize, cache: Path, dtype: torch.dtype) -> ScaledPair:
    """Return the wide target and its head under `cache`; write them if they are missing. Raises ValueError."""
    name = f"{size}-{str(dtype).removeprefix('torch.')}-{_digest(target, head)}"
    pair = ScaledPair(cache / f"target-{name}", cache / f"eagle3-{name}")
    _write_once(pair.target, lambda folder: write_target(target, folder, size, dtype))
    _write_once(pair.head, lambda folder: write_head(head, target, folder, size, dtype))
    return pair


def _digest(*bases: Path) -> str:
    """Return a digest of the base files' sizes and times and of this module, so that a stale cache is not used."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(path.resolve() for base in bases for path in base.iterdir()):
        status = path.stat()
        digest.update(f"{path} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:8]


def _write_once(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder under another name and rename it, so that it exists only when complete."""
    if folder.exists():
        return
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write(unfinished)
    unfinished.rename(folder)


def write_target(base: Path, folder: Path, size: TargetSize, dtype: torch.dtype) -> None:
    """Write the checkpoint `base`, as wide and deep as `size`, with one shard per layer to save memory.

    Raises ValueError if the base is not a plain Llama, or is larger than `size`.
    """
    spec = read_spec(base)
    _check(base, spec, size)
    for file in _TEXT_FILES:
        if (base / file).exists():
            shutil.copy(base / file, folder)
    widening = _Widening(Weights(base, torch.float32).get, spec, size, dtype)
    embedding = "model.embed_tokens.weight"
    old = {new: index for index, new in enumerate(_layer_positions(spec.num_layers, size.num_layers))}
    files: dict[str, str] = {}
    for index in range(size.num_layers + 1):
        if index < size.num_layers:
            tensors = widening.layer(index, old.get(index))
        else:
            head = embedding if spec.tie_embeddings else "lm_head.weight"
            tensors = widening.ends("model.", embedding, head, size.vocab_size)
        file = f"model-{index + 1:05}-of-{size.num_layers + 1:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    config = (
        read_json(base / "config.json")
        | {
            "hidden_size": size.hidden_size,
            "intermediate_size": size.intermediate_size,
            "num_hidden_layers": size.num_layers,
            "num_attention_heads": size.num_heads,
            "num_key_value_heads": size.num_kv_heads,
            "head_dim": size.head_dim,
            "rms_norm_eps": spec.rms_norm_eps * spec.hidden_size / size.hidden_size,
            "tie_word_embeddings": False,
            "dtype": str(dtype).removeprefix("torch."),
        }
        | ({"vocab_size": size.vocab_size, "max_position_embeddings": _POSITIONS} if size.vocab_size else {})
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_head(head: Path, base: Path, folder: Path, size: TargetSize, dtype: torch.dtype) -> None:
    """Write an EAGLE-3 head that reads the wide target's features: of unchanged size, or of a wide vocabulary's.

    It gets its own copy of the embedding and vocabulary head that it shared with the base. Raises ValueError.
    """
    target = read_spec(base)
    spec = read_eagle3_spec(head, target)
    if spec.input_norm or spec.fc_norm:
        raise ValueError(f"{head}: a head that norms the target's features cannot be given wider ones")
    tensors = {name: tensor for file in head.glob("*.safetensors") for name, tensor in load_file(file).items()}
    shared = Weights(base)
    if "embed_tokens.weight" not in tensors:
        tensors["embed_tokens.weight"] = shared.get("model.embed_tokens.weight")
    if "lm_head.weight" not in tensors:
        name = "lm_head.weight" if shared.has("lm_head.weight") else "model.embed_tokens.weight"
        tensors["lm_head.weight"] = shared.get(name)
    wider: dict[str, object] = {}
    if size.vocab_size:
        tensors, wider = _wide_head(tensors, spec, size, dtype)
    else:
        fc = _noise(torch.float32)(spec.layers.hidden_size, 3 * size.hidden_size)
        old_H3D = tensors["fc.weight"].view(-1, 3, target.hidden_size)
        fc.view(-1, 3, size.hidden_size)[:, :, : target.hidden_size] = old_H3D
        tensors["fc.weight"] = fc
    cast = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in cast.items()}, folder / "model.safetensors")
    positions = [*_layer_positions(target.num_layers, size.num_layers), size.num_layers]
    config = (
        read_json(head / "config.json")
        | {
            "target_hidden_size": size.hidden_size,
            "eagle_aux_hidden_state_layer_ids": [positions[tap] for tap in spec.tap_layers],
        }
        | wider
    )
    config.pop("eagle_config", None)  # may name layers too, counted otherwise
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _wide_head(
    tensors: dict[str, Tensor], spec: Eagle3Spec, size: TargetSize, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return the tensors of a head as wide as the target, and the fields of its config.json that differ."""
    H, V, layers = spec.layers.hidden_size, size.draft_vocab_size, spec.layers
    widening = _Widening(lambda name: tensors[name].float(), layers, size, dtype)
    fc = torch.zeros(size.hidden_size, 3 * size.hidden_size, dtype=dtype)
    fc[:H] = widening.reader(tensors["fc.weight"], H, torch.arange(H), inputs=3)
    fc[-1, size.hidden_size - 1] = 1  # the mark of the lowest layer's features
    added = torch.full((V - spec.draft_vocab_size,), layers.vocab_size - spec.draft_vocab_size)
    wide = {f"midlayer.{name}": tensor for name, tensor in widening.old_layer("midlayer.", inputs=2).items()}
    wide |= widening.ends("", "embed_tokens.weight", "lm_head.weight", V, num_embeddings=size.vocab_size)
    wide |= {"fc.weight": fc, "midlayer.hidden_norm.weight": widening.norm("midlayer.hidden_norm.weight")}
    wide["d2t"] = torch.cat([tensors["d2t"], added])  # of the first added tokens
    fields: dict[str, object] = {
        "vocab_size": size.vocab_size,
        "max_position_embeddings": _POSITIONS,
        "draft_vocab_size": V,
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "rms_norm_eps": layers.rms_norm_eps * H / size.hidden_size,
    }
    return wide, fields


def _layer_positions(num_old: int, num_new: int) -> list[int]:
    """Return the positions of the old layers among the new ones."""
    return [index * num_new // num_old for index in range(num_old)]


def _check(base: Path, spec: ModelSpec, size: TargetSize) -> None:
    rope = read_json(base / "config.json").get("rope_parameters") or {}
    if spec.family != "llama" or spec.qkv_bias or spec.mlp_bias or rope.get("rope_type", "default") != "default":
        raise ValueError(f"{base}: only a plain Llama can be scaled up (no biases or rope scaling): the bundled target")
    if size.head_dim % spec.head_dim:
        raise ValueError(f"{base}: heads of {spec.head_dim} do not fit evenly into heads of {size.head_dim}")
    pairs = {
        "hidden width": (spec.hidden_size, size.hidden_size),
        "number of layers": (spec.num_layers, size.num_layers),
        "MLP width": (spec.intermediate_size, size.intermediate_size),
        "number of key-value heads": (spec.num_kv_heads, size.num_kv_heads),
        "number of queries per key-value head": (
            spec.num_heads // spec.num_kv_heads,
            size.num_heads // size.num_kv_heads,
        ),
    }
    if size.vocab_size:
        pairs["vocabulary"] = (4 * spec.vocab_size, size.vocab_size)  # of which the head has a quarter
        pairs["hidden width with a marked channel"] = (spec.hidden_size + 1, size.hidden_size)
    for name, (old, new) in pairs.items():
        if old > new:
            raise ValueError(f"{base}: its {name} is {old}, a target of {size} has only {new}; ask for a larger one")


def _noise(dtype: torch.dtype) -> Noise:
    """Return a source of random matrices that repeats one block of numbers.

    Drawing every weight of a large model takes minutes. The numbers have 16 bits, as published weights have.
    """
    block = torch.randn(_NOISE_VALUES, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16().to(dtype)

    def noise(num_rows: int, num_columns: int) -> Tensor:
        count = num_rows * num_columns
        return block.repeat(-(-count // _NOISE_VALUES))[:count].clone().view(num_rows, num_columns)

    return noise


class _Widening:
    """Pads the base's tensors."""

    def __init__(self, get: Callable[[str], Tensor], spec: ModelSpec, size: TargetSize, dtype: torch.dtype) -> None:
        self._get, self._spec, self._size, self._dtype = get, spec, size, dtype
        self._noise = _noise(dtype)
        group, wide_group = spec.num_heads // spec.num_kv_heads, size.num_heads // size.num_kv_heads
        head_H = torch.arange(spec.num_heads)
        self._head_H = head_H // group * wide_group + head_H % group
        self._query_rows = self._rows(self._head_H)
        self._kv_rows = self._rows(torch.arange(spec.num_kv_heads))

    def _rows(self, head_H: Tensor) -> Tensor:
        """Return the rows of a wide projection that hold the old heads' dimensions, given the heads' positions."""
        stride = self._size.head_dim // self._spec.head_dim
        return (head_H[:, None] * self._size.head_dim + stride * torch.arange(self._spec.head_dim)).flatten()

    def ends(
        self, prefix: str, embedding: str, head: str, num_tokens: int, num_embeddings: int | None = None
    ) -> dict[str, Tensor]:
        """Return the embedding, the final norm and the vocabulary head.

        embedding, head: the tensors that they come from. num_tokens: of the head, and of the embedding if it has not
        as many as `num_embeddings`; 0 = as before.
        """
        embedding_VD, head_VD = self._get(embedding), self._get(head)
        wide = self._writer(embedding_VD.T, len(embedding_VD), torch.arange(len(embedding_VD))).T
        if num_tokens:
            more = self._noise((num_embeddings or num_tokens) - len(wide), self._size.hidden_size)
            wide = torch.cat([wide, more])
            wide[:, -1] = _MARK
        tokens = self.reader(head_VD, num_tokens or len(head_VD), torch.arange(len(head_VD)))
        if num_tokens:
            tokens[len(head_VD) :, -1] = _LOWEST
        return {
            f"{prefix}embed_tokens.weight": wide.contiguous(),
            f"{prefix}norm.weight": self.norm(f"{prefix}norm.weight"),
            "lm_head.weight": tokens,
        }

    def layer(self, index: int, old: int | None) -> dict[str, Tensor]:
        """Return layer `index`: the base's layer `old`, or an identity layer if `old` is None."""
        tensors = self._idle_layer() if old is None else self.old_layer(f"model.layers.{old}.")
        return {f"model.layers.{index}.{name}": tensor for name, tensor in tensors.items()}

    def _idle_layer(self) -> dict[str, Tensor]:
        size, noise = self._size, self._noise
        width, queries, keys = size.hidden_size, size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
        return {
            "input_layernorm.weight": torch.ones(width, dtype=self._dtype),
            "self_attn.q_proj.weight": noise(queries, width),
            "self_attn.k_proj.weight": noise(keys, width),
            "self_attn.v_proj.weight": noise(keys, width),
            "self_attn.o_proj.weight": torch.zeros(width, queries, dtype=self._dtype),
            "post_attention_layernorm.weight": torch.ones(width, dtype=self._dtype),
            "mlp.gate_proj.weight": noise(size.intermediate_size, width),
            "mlp.up_proj.weight": noise(size.intermediate_size, width),
            "mlp.down_proj.weight": torch.zeros(width, size.intermediate_size, dtype=self._dtype),
        }

    def old_layer(self, prefix: str, inputs: int = 1) -> dict[str, Tensor]:
        """Return a layer of the base, whose attention reads so many streams side by side."""
        spec, size = self._spec, self._size
        queries, keys = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
        inner, inner_rows = size.intermediate_size, torch.arange(spec.intermediate_size)

        def old(name: str) -> Tensor:
            return self._get(f"{prefix}{name}.weight")

        query_old = old("self_attn.q_proj") * (size.head_dim / spec.head_dim) ** 0.5
        query = self.reader(query_old, queries, self._query_rows, inputs)
        is_old = torch.zeros(size.num_heads, size.head_dim, 1, dtype=torch.bool)
        is_old.view(-1)[self._query_rows] = True
        query.view(size.num_heads, size.head_dim, -1)[self._head_H] *= is_old[self._head_H]  # added keys are noise
        return {
            "input_layernorm.weight": self.norm(f"{prefix}input_layernorm.weight"),
            "self_attn.q_proj.weight": query,
            "self_attn.k_proj.weight": self.reader(old("self_attn.k_proj"), keys, self._kv_rows, inputs),
            "self_attn.v_proj.weight": self.reader(old("self_attn.v_proj"), keys, self._kv_rows, inputs),
            "self_attn.o_proj.weight": self._writer(old("self_attn.o_proj"), queries, self._query_rows),
            "post_attention_layernorm.weight": self.norm(f"{prefix}post_attention_layernorm.weight"),
            "mlp.gate_proj.weight": self.reader(old("mlp.gate_proj"), inner, inner_rows),
            "mlp.up_proj.weight": self.reader(old("mlp.up_proj"), inner, inner_rows),
            "mlp.down_proj.weight": self._writer(old("mlp.down_proj"), inner, inner_rows),
        }

    def norm(self, name: str) -> Tensor:
        """Rescale norm weights for a mean over more values; the added weights multiply zeros."""
        wide = torch.ones(self._size.hidden_size)
        old_D = self._get(name)
        wide[: len(old_D)] = old_D * (len(old_D) / len(wide)) ** 0.5
        return wide.to(self._dtype)

    def reader(self, old_OD: Tensor, num_rows: int, rows_O: Tensor, inputs: int = 1) -> Tensor:
        """Return [num_rows, inputs D'] weights that read `inputs` streams; the old outputs are at `rows_O`."""
        wide = self._noise(num_rows, inputs * self._size.hidden_size)
        of_stream, old = wide.view(num_rows, inputs, -1), old_OD.view(len(old_OD), inputs, -1)
        of_stream[rows_O, :, : old.shape[2]] = old.to(self._dtype)
        if self._size.vocab_size:
            of_stream[:, :, -1] = 0
        return wide

    def _writer(self, old_DI: Tensor, num_columns: int, columns_I: Tensor) -> Tensor:
        """Return [D', num_columns] weights that write the old part of the stream from the inputs at `columns_I`."""
        wide = torch.zeros(self._size.hidden_size, num_columns, dtype=self._dtype)
        wide[: len(old_DI), columns_I] = old_DI.to(self._dtype)
        return wide
