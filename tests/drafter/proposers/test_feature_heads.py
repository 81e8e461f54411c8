"""EAGLE-1/2 and MTP heads behind their proposer equal a straightforward float32 implementation of the published rules.

The proposer is fed as the engine feeds it (scattered pages, chunks, two requests), then asked for two tree levels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafter.proposers.base import FeatureProposer
from drafter.proposers.eagle import FcHead
from drafter.proposers.eagle3 import Eagle3Head
from drafter.tree.frontier import Frontier
from tests.support import checkpoints
from workers.kernels.block_scaled import BlockScaled
from workers.models.decoder import Decoder
from workers.models.fc_head_format import read_eagle_spec, read_mtp_spec
from workers.models.layers import RankWeights, Runtime
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.types import DraftRequest

torch.set_num_threads(1)

PAGE = 4
TOLERANCE = 2e-5


# ---- the oracle: dense causal attention over one whole sequence, every weight by its published name


class PlainLayers:
    """Norms, rotary embedding and Llama layers, written from their formulas."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        self.w, self.config = tensors, config
        self.head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        rope = config.get("rope_parameters") or config
        self.theta = rope.get("rope_theta", 10000.0)
        self.rotated = int(self.head_dim * rope.get("partial_rotary_factor", 1.0))
        self.is_hybrid = config.get("model_type") == "qwen3_5_text"
        kinds = enumerate(config.get("layer_types") or [])
        self.windowed = [f"layers.{index}." for index, kind in kinds if kind == "sliding_attention"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", torch.zeros(()))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (self.w[f"{name}.weight"] + self.is_hybrid)

    def rotate(self, x: Tensor) -> Tensor:
        half = self.rotated // 2
        angle = torch.arange(len(x))[:, None, None] / self.theta ** (torch.arange(half) / half)
        low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin(), rest], dim=-1)

    def layer(self, x: Tensor, prefix: str) -> Tensor:
        """Without the input norm's weight, apply no norm."""
        has_norm = f"{prefix}input_layernorm.weight" in self.w
        y = self.norm(x, f"{prefix}input_layernorm") if has_norm else x
        return self.mlp(x + self.attention(y, prefix), prefix)

    def attention(self, x: Tensor, prefix: str) -> Tensor:
        """Row i has rotary position i."""
        q, k, v = (self.linear(x, f"{prefix}self_attn.{n}_proj").view(len(x), -1, self.head_dim) for n in "qkv")
        gate = None
        if self.is_hybrid:  # each head's query, then its gate
            q, gate = q[:, ::2], q[:, 1::2]
        if f"{prefix}self_attn.q_norm.weight" in self.w:
            q, k = self.norm(q, f"{prefix}self_attn.q_norm"), self.norm(k, f"{prefix}self_attn.k_norm")
        q, k = self.rotate(q), self.rotate(k)
        distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
        hidden = distance < 0
        if prefix in self.windowed:
            hidden |= distance >= self.config["sliding_window"]
        mixed = []
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            score = (q[:, head] @ k[:, kv_head].T / self.head_dim**0.5).masked_fill(hidden, float("-inf"))
            mixed.append(score.softmax(-1) @ v[:, kv_head])
        out = torch.cat(mixed, dim=-1) * (1.0 if gate is None else gate.sigmoid().flatten(1))
        return self.linear(out, f"{prefix}self_attn.o_proj")

    def mlp(self, x: Tensor, prefix: str) -> Tensor:
        y = self.norm(x, f"{prefix}post_attention_layernorm")
        gate, up = (self.linear(y, f"{prefix}mlp.{n}_proj") for n in ("gate", "up"))
        return x + self.linear(gate * gate.sigmoid() * up, f"{prefix}mlp.down_proj")


class PlainHead:
    """(tokens, features) of one sequence -> (what the next step is fed, logits), both for its last row."""

    def __init__(self, rule: str, path: Path, target: Path) -> None:
        # float64, so the only difference is the head's own rounding.
        own, shared = (
            {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
            for folder in (path, target)
        )
        config = json.loads((path / "config.json").read_text())
        self.rule = rule
        self.layers = PlainLayers(own, config.get("transformer_layer_config", config))
        self.embedding = own.get("embed_tokens.weight", shared["model.embed_tokens.weight"])
        self.head = own.get("lm_head.weight", shared.get("lm_head.weight", shared["model.embed_tokens.weight"]))
        self.num_layers = self.layers.config["num_hidden_layers"]

    def __call__(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        n, e, f = self.layers, self.embedding[tokens], features.double()
        match self.rule:
            case "eagle3":
                y = torch.cat([n.norm(e, "layers.0.input_layernorm"), n.norm(f, "layers.0.hidden_norm")], dim=-1)
                x = n.mlp(f + n.attention(y, "layers.0."), "layers.0.")
                for index in range(1, self.num_layers):
                    x = n.layer(x, f"layers.{index}.")
                return x[-1], n.norm(x[-1], "norm") @ self.head.T
            case "eagle":
                x = n.linear(torch.cat([e, f], dim=-1), "fc")
                for index in range(self.num_layers):
                    x = n.layer(x, f"layers.{index}.")
                fed = x[-1]
            case "qwen3" | "qwen3_5":
                e, f = n.norm(e, "mtp.pre_fc_norm_embedding"), n.norm(f, "mtp.pre_fc_norm_hidden")
                fed = n.norm(n.layer(n.linear(torch.cat([e, f], dim=-1), "mtp.fc"), "mtp.layers.0."), "mtp.norm")[-1]
            case "mimo":
                own = "model.mtp_layers.0."
                e, f = n.norm(e, f"{own}token_layernorm"), n.norm(f, f"{own}hidden_layernorm")
                x = n.layer(n.linear(torch.cat([f, e], dim=-1), f"{own}input_proj"), own)
                fed = n.norm(x, f"{own}final_layernorm")[-1]
        return fed, fed @ self.head.T

    def path(self, tokens: list[int], features: Tensor, path: list[int]) -> Tensor:
        """Logits at the end of `path` below the root tokens[-1]: each node is fed its parent's result."""
        tokens = tokens[1:]  # a feature comes with the token after it
        fed, logits = self(torch.tensor(tokens), features)
        for i in range(len(path)):
            features = torch.cat([features, fed[None]])
            fed, logits = self(torch.tensor(tokens + path[: i + 1]), features)
        return logits


# ---- the heads under test


def eagle(folder: Path, **options: Any) -> tuple[PlainHead, FcHead]:
    target_options = {"tie_word_embeddings": options.pop("tied", False)}
    target = checkpoints.write_model(folder / "target", "llama", **target_options)
    path = checkpoints.write_eagle(folder / "head", **options)
    spec = read_eagle_spec(path, read_spec(target))
    return PlainHead("eagle", path, target), FcHead.load(spec, path, target)


def mtp(folder: Path, layout: str, **options: Any) -> tuple[PlainHead, FcHead]:
    if layout == "qwen3_5":
        checkpoints.write_hybrid(folder, **options)
    else:
        checkpoints.write_model(folder, "qwen2" if layout == "mimo" else "qwen3", **options)
    path = checkpoints.add_mtp(folder, layout)
    return PlainHead(layout, path, path), FcHead.load(read_mtp_spec(path, read_spec(path)), path, path)


def eagle3(folder: Path, **options: Any) -> tuple[PlainHead, Eagle3Head]:
    target = checkpoints.write_model(folder / "target", "llama")
    path = checkpoints.write_eagle3(folder / "head", style="speculators", **options)
    return PlainHead("eagle3", path, target), checkpoints.load_eagle3(path, target)


HEADS: dict[str, Callable[[Path], tuple[PlainHead, FcHead | Eagle3Head]]] = {
    "eagle3": eagle3,
    "eagle3 of three layers": lambda folder: eagle3(folder, num_hidden_layers=3, qk_norm=True, head_dim=24),
    "eagle3 of a sliding and a full layer": lambda folder: eagle3(
        folder, num_hidden_layers=2, **checkpoints.sliding(4, "sliding_attention", "full_attention")
    ),
    "eagle": eagle,
    "eagle without bias": lambda folder: eagle(folder, bias=False, with_embedding=True),
    "eagle of two layers": lambda folder: eagle(folder, num_hidden_layers=2, qkv_bias=True, with_head=True),
    "eagle of a full and a sliding layer": lambda folder: eagle(
        folder, num_hidden_layers=2, **checkpoints.sliding(4, "full_attention", "sliding_attention")
    ),
    "eagle, tied target": lambda folder: eagle(folder, tied=True, head_dim=20, rope_theta=5e4),
    "mtp of a Qwen3": lambda folder: mtp(folder, "qwen3", head_dim=24),
    "mtp of a Qwen3 with windows": lambda folder: mtp(
        folder, "qwen3", head_dim=16, sliding_window=4, use_sliding_window=True, max_window_layers=0
    ),
    "mtp of a tied Qwen3": lambda folder: mtp(folder, "qwen3", head_dim=16, tie_word_embeddings=True),
    "mtp of a Qwen3.5": lambda folder: mtp(folder, "qwen3_5"),
    "mtp of a MiMo": lambda folder: mtp(
        folder, "mimo", rope_parameters={"rope_type": "default", "rope_theta": 640000.0}
    ),
}


def feed(histories: list[list[int]], features: list[Tensor], start: list[int], stop: list[int]) -> DraftRequest:
    """Feed tokens start .. stop - 1 of each request, each with the feature of the token before it."""
    nothing = {name: torch.empty(0) for name in DraftRequest.__dataclass_fields__}
    spans = list(zip(histories, features, start, stop, strict=True))
    is_root = [end == len(history) for history, _, _, end in spans]
    return DraftRequest(
        **nothing
        | {
            "offsets": torch.tensor(np.cumsum([0, *(b - a for *_, a, b in spans)]), dtype=torch.int32),
            "start_B": torch.tensor(start, dtype=torch.int32),
            "token_M": torch.tensor([t for history, _, a, b in spans for t in history[a:b]], dtype=torch.int32),
            "page_table_BP": torch.tensor([[9, 2, 11, 5, 1], [4, 8, 3, 10, 6]], dtype=torch.int32),
            "num_nodes_B": torch.tensor(is_root, dtype=torch.int32) * 4,
            "features_MH": torch.cat([f[a - 1 : b - 1] for _, f, a, b in spans]),
        }
    )


@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS.keys())
def test_a_head_equals_a_straightforward_implementation(tmp_path: Path, make: Any) -> None:
    """Two steps of committed tokens, in the second of which both requests grow a tree of two levels."""
    plain, head = make(tmp_path)
    generator = torch.Generator().manual_seed(3)
    histories = [torch.randint(0, 96, (n,), generator=generator).tolist() for n in (12, 8)]
    features = [torch.randn(len(history) - 1, 64, generator=generator) for history in histories]
    kv = head.new_kv_pool(12 * PAGE)
    with torch.inference_mode():
        kv.data.fill_(7.0)  # reading slot 0 or an unwritten slot changes the result
    proposer = FeatureProposer(head, kv, PAGE, tree_rows=5)

    proposer.extend(feed(histories, features, [1, 1], [7, 3]))
    roots = proposer.extend(feed(histories, features, [7, 3], [12, 8]))
    for g in range(2):
        assert_close(roots[g], plain.path(histories[g], features[g], []), TOLERANCE)
    # Request 0: root -> 1, 2; 2 -> 3; 1 -> 4. Request 1: root -> 1 -> 2.
    frontier = Frontier(1, *(np.array(x) for x in ([0, 0, 1], [1, 2, 1], [0, 0, 0], [17, 60, 5], [0b11, 0b101, 0b11])))
    first = proposer.expand(frontier)
    for row, (g, path) in enumerate([(0, [17]), (0, [60]), (1, [5])]):
        assert_close(first[row], plain.path(histories[g], features[g], path), 2 * TOLERANCE)
    frontier = Frontier(
        2, *(np.array(x) for x in ([0, 0, 1], [3, 4, 2], [2, 1, 1], [41, 3, 90], [0b1101, 0b10011, 0b111]))
    )
    second = proposer.expand(frontier)
    for row, (g, path) in enumerate([(0, [60, 41]), (0, [17, 3]), (1, [5, 90])]):
        assert_close(second[row], plain.path(histories[g], features[g], path), 2 * TOLERANCE)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Random weights give logits of about 20, so the tolerance is relative to the largest."""
    scale = expected.abs().max()
    torch.testing.assert_close(actual.double() / scale, expected / scale, atol=tolerance, rtol=0)


# ---- targets and loaders


def test_a_mimo_target_equals_its_qwen2_part(tmp_path: Path) -> None:
    plain = checkpoints.write_model(tmp_path / "qwen2", "qwen2")
    mimo = checkpoints.add_mtp(checkpoints.write_model(tmp_path / "mimo", "qwen2"), "mimo")
    spec = read_spec(mimo)
    assert (spec.family, spec.num_mtp_layers) == ("mimo", 1)
    head = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    both = [Decoder(RankWeights(path), read_spec(path)) for path in (plain, mimo)]
    assert torch.equal(both[0].logits(head), both[1].logits(head))
    assert torch.equal(both[0]._layers[2].attention.qkv(head), both[1]._layers[2].attention.qkv(head))


def test_the_layer_of_an_mtp_head_stays_in_8_bits_and_its_fc_does_not(tmp_path: Path) -> None:
    fused = pytest.importorskip("workers.kernels.fused")
    path = checkpoints.add_mtp(checkpoints.write_model(tmp_path, "qwen3"), "qwen3")
    spec = read_mtp_spec(checkpoints.quantize_fp8(path, (32, 32)), read_spec(path))
    head = FcHead.load(spec, path, path, Runtime(dtype=torch.bfloat16, kernels=fused))
    [layer] = head._layers
    for linear in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down):
        assert isinstance(linear.weight, BlockScaled)
    assert isinstance(head._fc.weight, Tensor)


def test_prediction_layers_beyond_the_configuration_are_unknown_tensors(tmp_path: Path) -> None:
    path = checkpoints.add_mtp(checkpoints.write_model(tmp_path, "qwen3"), "qwen3")
    checkpoints.edit_config(path, mtp_num_hidden_layers=0)
    with pytest.raises(ValueError, match=r"unknown tensors: mtp\.fc\.weight"):
        load_decoder(path, read_spec(path))


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("output", [None, "lm_head.weight", "language_model.lm_head.weight"])
def test_a_head_shares_the_embeddings_of_a_target_with_a_vision_tower(
    tmp_path: Path, prefix: str, output: str | None
) -> None:
    target = checkpoints.write_multimodal(tmp_path / "target", prefix)
    embedding_VH = load_file(target / "model.safetensors")[f"{prefix}embed_tokens.weight"]
    output_VH = torch.randn(96, 64) if output else embedding_VH
    if output:
        checkpoints.edit_weights(target, add={output: output_VH})
        text = json.loads((target / "config.json").read_text())["text_config"]
        checkpoints.edit_config(target, text_config=text | {"tie_word_embeddings": False})
    eagle3 = checkpoints.write_eagle3(tmp_path / "eagle3", with_embedding=False, draft_vocab_size=None)
    drop("lm_head.weight")(eagle3)
    eagle = checkpoints.write_eagle(tmp_path / "eagle")
    spec = read_eagle_spec(eagle, read_spec(target))
    x = torch.randn(2, 64)
    for head in (checkpoints.load_eagle3(eagle3, target), FcHead.load(spec, eagle, target)):
        assert torch.equal(head._embedding_VH, embedding_VH)
        torch.testing.assert_close(head._head(x), x @ output_VH.T)


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("LlamaForCausalLM", "mixtral"),  # SafeAILab's head for Mixtral
        ("LlamaForCausalLMEagle", "llama"),  # SGLang's for Llama 3
        ("Qwen2ForCausalLM", "qwen2"),
        ("MistralForCausalLM", "mistral"),
    ],
)
def test_an_eagle_head_has_llamas_layers_for_any_model_type(tmp_path: Path, architecture: str, model_type: str) -> None:
    target = checkpoints.write_model(tmp_path / "target", "mixtral", num_local_experts=4)
    path = checkpoints.write_eagle(tmp_path / "head", qkv_bias=model_type == "qwen2")
    expected = read_eagle_spec(path, read_spec(target))
    checkpoints.edit_config(path, architectures=[architecture], model_type=model_type, sliding_window=7)
    spec = read_eagle_spec(path, read_spec(target))
    assert spec == expected
    assert len(spec.layers.rope.inv_freq) == 4
    FcHead.load(spec, path, target)


def drop(*names: str) -> Callable[[Path], None]:
    return lambda path: checkpoints.edit_weights(path, remove=names)


def add(name: str, *shape: int) -> Callable[[Path], None]:
    return lambda path: checkpoints.edit_weights(path, add={name: torch.ones(shape or (3,))})


def configure(**changes: Any) -> Callable[[Path], None]:
    return lambda path: checkpoints.edit_config(path, **changes)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop("fc.bias"), "'fc.bias' is missing"),
        (drop("layers.0.mlp.up_proj.weight"), r"'layers.0.mlp.up_proj.weight' is missing"),
        (configure(bias=False), "unknown tensors: fc.bias"),
        (add("layers.0.input_layernorm.weight"), r"unknown tensors: layers\.0\.input_layernorm\.weight"),
        (add("layers.1.mlp.up_proj.weight"), r"unknown tensors: layers\.1\.mlp\.up_proj\.weight"),
        (configure(num_hidden_layers=2), r"'layers.1.input_layernorm.weight' is missing"),
        (configure(vocab_size=97), "a vocabulary of 97, this one has 96"),
        (configure(hidden_size=32), "a hidden size of 32, this one has 64"),
        (configure(draft_vocab_size=40), "is an EAGLE-3 head: write method 'eagle3'"),
        (configure(hidden_act="relu"), "activation 'relu'"),
        (configure(head_dim=4), r"layers.0.self_attn.q_proj.weight is \(64, 64\), config.json asks for \(32, 64\)"),
        (configure(speculators_model_type="eagle"), "type 'eagle' in the format of speculators"),
        (configure(speculators_model_type="eagle3"), "is an EAGLE-3 head: write method 'eagle3'"),
        (configure(quantization_config={"quant_method": "hqq"}), "quantized by hqq are not supported"),
        (lambda path: add("fc.weight", 64, 192)(path), r"fc.weight is \(64, 192\), the head needs \(64, 128\)"),
    ],
)
def test_an_eagle_head_that_does_not_fit_is_refused_by_name(tmp_path: Path, damage: Any, message: str) -> None:
    target = checkpoints.write_model(tmp_path / "target", "llama")
    path = checkpoints.write_eagle(tmp_path / "head")
    damage(path)
    with pytest.raises(ValueError, match=message):
        FcHead.load(read_eagle_spec(path, read_spec(target)), path, target)


@pytest.mark.parametrize(
    ("layout", "damage", "message"),
    [
        ("qwen3", drop("mtp.norm.weight"), "'mtp.norm.weight' is missing"),
        ("qwen3", drop("mtp.layers.0.self_attn.q_norm.weight"), "'mtp.layers.0.self_attn.q_norm.weight' is missing"),
        ("qwen3", add("mtp.layers.0.mlp.gate.weight"), r"unknown tensors: mtp\.layers\.0\.mlp\.gate\.weight"),
        ("qwen3", configure(mtp_num_hidden_layers=0), "must natively support multi-token prediction"),
        ("qwen3", configure(mtp_num_hidden_layers=2), "2 multi-token prediction layers are not supported"),
        ("mimo", drop("model.mtp_layers.0.input_proj.weight"), "'model.mtp_layers.0.input_proj.weight' is missing"),
        ("mimo", drop("model.mtp_layers.0.self_attn.q_proj.bias"), "self_attn.q_proj.bias' is missing"),
        ("mimo", add("model.mtp_layers.1.input_proj.weight"), r"unknown tensors: model\.mtp_layers\.1\.input_proj"),
    ],
)
def test_an_mtp_head_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, layout: str, damage: Any, message: str
) -> None:
    path = checkpoints.write_model(tmp_path, "qwen3" if layout == "qwen3" else "qwen2")
    damage(checkpoints.add_mtp(path, layout))
    with pytest.raises(ValueError, match=message):
        FcHead.load(read_mtp_spec(path, read_spec(path)), path, path)
