"""The EAGLE-3 head equals a plain float32 implementation of the paper; checkpoint formats and their errors."""

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

from drafter.proposers.eagle3 import Eagle3Head
from tests.support import checkpoints
from workers.models.eagle3_format import default_tap_layers, read_eagle3_spec
from workers.models.fusion import load_fusion
from workers.models.readers import read_spec
from workers.types import AttentionMetadata

torch.set_num_threads(1)

PAGE = 4
TOLERANCE = 1e-5


class PlainHead:
    """The paper's code for one dense sequence, with SafeAILab's weight names."""

    def __init__(self, path: Path, **flags: bool) -> None:
        self.w = {k.replace("layers.0.", "midlayer."): v for k, v in load_file(path / "model.safetensors").items()}
        raw = json.loads((path / "config.json").read_text())
        inner = raw.get("transformer_layer_config", raw)
        self.heads, self.kv_heads = inner["num_attention_heads"], inner["num_key_value_heads"]
        self.head_dim = inner.get("head_dim") or inner["hidden_size"] // self.heads
        self.theta = inner.get("rope_theta", 10000.0)
        self.flags = flags

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * self.w[name]

    def fuse(self, taps: Tensor) -> Tensor:
        if self.flags.get("norm_before_fc"):
            taps = self.norm(taps, "input_norm.weight")
        if self.flags.get("fc_norm"):
            parts = taps.split(len(self.w["fc_norm.0.weight"]), dim=-1)
            taps = torch.cat([self.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)], dim=-1)
        return taps @ self.w["fc.weight"].T

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.head_dim // 2
        angle = positions[:, None, None] / self.theta ** (torch.arange(half) / half)
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], dim=-1)

    def __call__(self, tokens: Tensor, features: Tensor, positions: Tensor, sees: Tensor, embedding: Tensor) -> Tensor:
        """Return the output [n, H] of n rows. sees[i, j]: whether row i attends to row j."""
        layer = "midlayer."
        e = self.norm(embedding[tokens], f"{layer}input_layernorm.weight")
        h = self.norm(features, f"{layer}hidden_norm.weight")
        x = torch.cat([e, h], dim=-1)
        q, k, v = (
            (x @ self.w[f"{layer}self_attn.{n}_proj.weight"].T).view(len(tokens), -1, self.head_dim) for n in "qkv"
        )
        if self.flags.get("qk_norm"):
            q, k = self.norm(q, f"{layer}self_attn.q_norm.weight"), self.norm(k, f"{layer}self_attn.k_norm.weight")
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        mixed = []
        for head in range(self.heads):
            kv_head = head // (self.heads // self.kv_heads)
            score = (q[:, head] @ k[:, kv_head].T / self.head_dim**0.5).masked_fill(~sees, float("-inf"))
            mixed.append(score.softmax(-1) @ v[:, kv_head])
        r = torch.cat(mixed, dim=-1) @ self.w[f"{layer}self_attn.o_proj.weight"].T
        r = r + (h if self.flags.get("norm_before_residual") else features)
        y = self.norm(r, f"{layer}post_attention_layernorm.weight")
        gate, up = (y @ self.w[f"{layer}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        return r + (gate * gate.sigmoid() * up) @ self.w[f"{layer}mlp.down_proj.weight"].T

    def logits(self, out: Tensor) -> Tensor:
        return self.norm(out, "norm.weight") @ self.w["lm_head.weight"].T


HEADS: dict[str, dict[str, Any]] = {
    "safeailab": {},
    "head-dim": {"head_dim": 20},
    "full-vocabulary": {"draft_vocab_size": None},
    "embedding-of-the-target": {"with_embedding": False},
    "wide-target": {"hidden_size": 48, "target_hidden_size": 64},
    "specforge": {"style": "specforge", "with_embedding": False, "rope_theta": 5e4},
    "specforge-head-norms": {"style": "specforge", "qk_norm": True},
    "speculators-qwen3": {"style": "speculators", "qk_norm": True, "head_dim": 24},
    "speculators-residual": {"style": "speculators", "norm_before_residual": True, "norm_before_fc": True},
    "speculators-window": {"style": "speculators", **checkpoints.sliding(4, "sliding_attention")},
    "eagle3.1": {"style": "speculators", "fc_norm": True, "norm_output": True},
    "four-layers": {"style": "speculators", "fc_norm": True, "aux_layer_ids": (0, 1, 2, 3)},
    "mrope": {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_model(tmp_path_factory.mktemp("target"), "llama")


class Run:
    """One request's entries in a paged pool with scattered pages."""

    def __init__(self, head: Eagle3Head) -> None:
        self.head = head
        self.table = torch.tensor([[9, 2, 11, 5, 1, 8, 3]], dtype=torch.int32)
        self.kv = head.new_kv_pool(12 * PAGE)
        with torch.inference_mode():
            self.kv.data.fill_(7.0)  # reading slot 0 or an unwritten slot changes the result

    def step(
        self,
        tokens: Tensor,
        features: Tensor,
        slots: Tensor,
        visible: Tensor,
        masks: list[int],
        base: int,
        rope: Tensor,
    ) -> Tensor:
        metadata = AttentionMetadata(
            query_offsets=np.array([0, len(tokens)], dtype=np.int32),
            page_table_BP=self.table.numpy(),
            base_B=np.array([base], dtype=np.int32),
            slot_N=slots.int().numpy(),
            visible_N=visible.int().numpy(),
            ancestors_N=np.array(masks, dtype=np.int64),
        )
        return self.head.forward(tokens, features, rope, self.head.plan(metadata, PAGE), self.kv)


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS.keys())
def test_the_head_equals_a_straightforward_implementation(
    tmp_path: Path, target: Path, options: dict[str, Any]
) -> None:
    """Extend over committed tokens in two chunks, then two tree levels fed with the parents' own outputs."""
    path = checkpoints.write_eagle3(tmp_path, **options)
    names = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual", "qk_norm")
    plain = PlainHead(path, **{name: options.get(name, False) for name in names})
    generator = torch.Generator().manual_seed(3)
    n = 11  # committed tokens 0 .. 11; entries for tokens 1 .. 11 (the last one is the tree's root)
    tokens = torch.randint(0, 96, (n + 1,), generator=generator)
    spec = read_eagle3_spec(path, read_spec(target))
    taps = torch.randn(n, len(spec.tap_layers) * 64, generator=generator)
    head = checkpoints.load_eagle3(path, target)
    features = load_fusion(path, spec)(taps)
    torch.testing.assert_close(features, plain.fuse(taps), atol=TOLERANCE, rtol=0)
    embedding = plain.w.get("embed_tokens.weight", load_file(target / "model.safetensors")["model.embed_tokens.weight"])

    run = Run(head)
    slots = torch.arange(1, n + 1)
    outs = [
        run.step(
            tokens[1:][part], features[part], slots[part], slots[part] + 1, [0] * len(slots[part]), 0, slots[part] - 1
        )
        for part in (slice(0, 6), slice(6, n))
    ]
    window = options.get("sliding_window")
    expected = plain(tokens[1:], features, slots - 1, sees(n, window), embedding)
    fed = plain.norm(expected, "norm.weight") if options.get("norm_output") else expected
    torch.testing.assert_close(torch.cat(outs), fed, atol=TOLERANCE, rtol=0)
    logits = head.logits(outs[-1])
    torch.testing.assert_close(logits, plain.logits(expected)[6:], atol=TOLERANCE, rtol=0)
    assert logits.shape[1] == spec.draft_vocab_size == len(target_ids_of(head))

    # Tree: root row 0 = token 11 (its entry exists), rows 1, 2 its children, row 3 a child of 2, row 4 of 1.
    base, root_feature = n, outs[-1][-1:]
    drafts = torch.tensor([3, 17, 60, 41])
    level1 = run.step(
        drafts[:2],
        root_feature.expand(2, -1),
        torch.tensor([base + 1, base + 2]),
        torch.tensor([base + 1] * 2),
        [0b010, 0b100],
        base,
        torch.tensor([n, n]),
    )
    level2 = run.step(
        drafts[2:],
        level1[[1, 0]],
        torch.tensor([base + 3, base + 4]),
        torch.tensor([base + 1] * 2),
        [0b01100, 0b10010],
        base,
        torch.tensor([n + 1] * 2),
    )
    for node, path_rows in ((level2[0], (1, 2)), (level2[1], (0, 3))):
        child, leaf = path_rows
        all_tokens = torch.cat([tokens[1:], drafts[[child, leaf]]])
        all_features = torch.cat([features, fed[-1:], level1[child : child + 1]])
        size = n + 2
        dense = plain(all_tokens, all_features, torch.arange(size), sees(size, window), embedding)[-1]
        dense = plain.norm(dense, "norm.weight") if options.get("norm_output") else dense
        torch.testing.assert_close(node, dense, atol=2 * TOLERANCE, rtol=0)


def sees(num_rows: int, window: int | None) -> Tensor:
    """Return the mask [n, n] of one path: a row attends to itself and earlier rows, within a window to the last w."""
    distance = torch.arange(num_rows)[:, None] - torch.arange(num_rows)
    return (distance >= 0) & (distance < (window or num_rows))


def target_ids_of(head: Eagle3Head) -> Tensor:
    assert head.vocab.target_ids is not None
    return head.vocab.target_ids


def test_target_ids_are_the_draft_ids_plus_d2t(tmp_path: Path, target: Path) -> None:
    path = checkpoints.write_eagle3(tmp_path)
    tensors = load_file(path / "model.safetensors")
    assert torch.equal(target_ids_of(checkpoints.load_eagle3(path, target)), tensors["t2d"].nonzero()[:, 0])


def test_a_bin_file_loads_like_safetensors(tmp_path: Path, target: Path) -> None:
    first = checkpoints.load_eagle3(checkpoints.write_eagle3(tmp_path / "a"), target)
    second = checkpoints.load_eagle3(checkpoints.write_eagle3(tmp_path / "b", bin_file=True), target)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(first.logits(x), second.logits(x))


def test_a_stored_buffer_of_the_rotary_embedding_is_ignored(tmp_path: Path, target: Path) -> None:
    path = checkpoints.write_eagle3(tmp_path)
    without = checkpoints.load_eagle3(path, target)
    checkpoints.edit_weights(path, add={"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert torch.equal(checkpoints.load_eagle3(path, target)._input_norm_H, without._input_norm_H)


def test_feature_layers_are_normalised_to_capture_before(tmp_path: Path) -> None:
    spec = read_spec(checkpoints.write_model(tmp_path / "target", "llama", num_hidden_layers=12))
    assert default_tap_layers(12) == (2, 6, 9)
    for style, ids, taps in (
        ("safeailab", None, (2, 6, 9)),
        ("specforge", (1, 5, 8), (2, 6, 9)),
        ("specforge", (2, 4, 10), (3, 5, 11)),
        ("speculators", (3, 5, 11), (3, 5, 11)),
        ("speculators", None, (2, 6, 9)),
    ):
        path = checkpoints.write_eagle3(tmp_path / "head", style=style, aux_layer_ids=ids)
        assert read_eagle3_spec(path, spec).tap_layers == taps


@pytest.mark.parametrize(
    ("options", "windows"),
    [
        (checkpoints.sliding(2048, "sliding_attention", "full_attention"), (2048, None)),
        # Unused fields of the target's configuration: without layer types, or in full ones, there is no window.
        (checkpoints.sliding(2048, *["full_attention"] * 36), (None, None)),
        ({"sliding_window": 32768, "use_sliding_window": False}, (None, None)),
        ({"sliding_window": 32768, "use_sliding_window": True}, (None, None)),
        # Qwen3's own rule.
        ({"qk_norm": True, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}, (None, 9)),
        ({"qk_norm": True, "sliding_window": 9, "use_sliding_window": False, "max_window_layers": 1}, (None, None)),
    ],
)
def test_windows_are_those_of_the_layer_types(
    tmp_path: Path, target: Path, options: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    path = checkpoints.write_eagle3(tmp_path, style="speculators", num_hidden_layers=2, **options)
    assert read_eagle3_spec(path, read_spec(target)).layers.windows == windows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (checkpoints.sliding(4, "chunked_attention"), "not supported: write 'sliding_attention' or 'full_attention'"),
        (checkpoints.sliding(4, "sliding_attention", "full_attention"), "equal to the number of `layer_types`"),
        (checkpoints.sliding(0, "sliding_attention"), "which has no width: write sliding_window"),
    ],
)
def test_incomplete_windows_are_refused(tmp_path: Path, target: Path, options: dict[str, Any], message: str) -> None:
    path = checkpoints.write_eagle3(tmp_path, style="speculators", **options)
    with pytest.raises(ValueError, match=message):
        read_eagle3_spec(path, read_spec(target))


def drop(*names: str) -> Callable[[Path], None]:
    return lambda path: checkpoints.edit_weights(path, remove=names)


def add(name: str) -> Callable[[Path], None]:
    return lambda path: checkpoints.edit_weights(path, add={name: torch.ones(3)})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop("midlayer.hidden_norm.weight"), "'midlayer.hidden_norm.weight' is missing"),
        (drop("lm_head.weight"), "'lm_head.weight' is missing"),
        (drop("d2t"), "'d2t' is missing"),
        (add("fc.bias"), "unknown tensors: fc.bias"),
        (add("layers.1.mlp.up_proj.weight"), r"unknown tensors: layers\.1\.mlp\.up_proj\.weight"),
        (
            lambda path: checkpoints.edit_config(path, head_dim=16),
            r"midlayer.self_attn.q_proj.weight is \(64, 128\), config.json asks for \(128, 128\): .*head_dim",
        ),
        (lambda path: checkpoints.edit_config(path, num_key_value_heads=2), r"k_proj.weight is \(32, 128\)"),
        (lambda path: checkpoints.edit_config(path, intermediate_size=95), r"gate_proj.weight is \(96, 64\)"),
        (lambda path: checkpoints.edit_config(path, num_hidden_layers=2), r"'layers.1.input_\w+.weight' is missing"),
        (lambda path: checkpoints.edit_config(path, vocab_size=97), "vocabulary of 97 tokens, the target has 96"),
        (lambda path: checkpoints.edit_config(path, target_hidden_size=65), "hidden size 65, this one has 64"),
        (lambda path: checkpoints.edit_config(path, num_hidden_layers=1, hidden_act="relu"), "activation 'relu'"),
        (
            lambda path: checkpoints.edit_config(
                path, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, num_hidden_layers=1
            ),
            r"feature layers \[1, 2, 3\] of eagle_config do not fit a target of 3 layers, whose last is 2: .* one less",
        ),
        (
            lambda path: checkpoints.edit_config(path, eagle_aux_hidden_state_layer_ids=[0, 2, 4]),
            r"feature layers \[0, 2, 4\] do not fit a target of 3 layers",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, target: Path, damage: Callable[[Path], None], message: str
) -> None:
    path = checkpoints.write_eagle3(tmp_path)
    damage(path)
    with pytest.raises(ValueError, match=message):
        checkpoints.load_eagle3(path, target)


def test_the_fusion_names_missing_and_unknown_tensors(tmp_path: Path, target: Path) -> None:
    spec = read_eagle3_spec(checkpoints.write_eagle3(tmp_path), read_spec(target))
    checkpoints.edit_weights(tmp_path, add={"input_norm.weight": torch.ones(192)})
    with pytest.raises(ValueError, match=r"unknown tensors: input_norm\.weight"):
        load_fusion(tmp_path, spec)
    checkpoints.edit_weights(tmp_path, remove=("fc.weight", "input_norm.weight"))
    with pytest.raises(ValueError, match=r"'fc.weight' is missing"):
        load_fusion(tmp_path, spec)


@pytest.mark.parametrize("model_type", ["phi3", "qwen2", "qwen3"])
@pytest.mark.parametrize("style", ["safeailab", "specforge"])
def test_a_head_has_llamas_layer_though_it_names_its_targets(
    tmp_path: Path, target: Path, style: str, model_type: str
) -> None:
    path = checkpoints.write_eagle3(tmp_path, style=style)
    expected = read_eagle3_spec(path, read_spec(target))
    checkpoints.edit_config(path, model_type=model_type, sliding_window=7, max_window_layers=0)
    assert read_eagle3_spec(path, read_spec(target)) == expected
    checkpoints.load_eagle3(path, target)


def edit_layers(path: Path, **changes: Any) -> None:
    """Overwrite fields of the layers' configuration in speculators' format."""
    raw = json.loads((path / "config.json").read_text())
    checkpoints.edit_config(path, transformer_layer_config=raw["transformer_layer_config"] | changes)


def test_biases_are_read_from_the_layers_configuration(tmp_path: Path, target: Path) -> None:
    nested = checkpoints.write_eagle3(tmp_path / "nested", style="speculators")
    edit_layers(nested, attention_bias=True, mlp_bias=True)
    flat = checkpoints.write_eagle3(tmp_path / "flat", style="safeailab")
    checkpoints.edit_config(flat, attention_bias=True, mlp_bias=True)
    for path in (nested, flat):
        spec = read_eagle3_spec(path, read_spec(target)).layers
        assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == (True, True, True)
    edit_layers(nested, attention_bias=False, mlp_bias=False)
    checkpoints.edit_config(nested, attention_bias=True, mlp_bias=True)  # beside the layers it says nothing of them
    spec = read_eagle3_spec(nested, read_spec(target)).layers
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == (False, False, False)


@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
def test_a_null_field_counts_as_absent(tmp_path: Path, target: Path, qk_norm: bool) -> None:
    sizes = {"num_key_value_heads": 8, "head_dim": 8}
    path = checkpoints.write_eagle3(tmp_path, style="speculators", qk_norm=qk_norm, **sizes)
    expected = read_eagle3_spec(path, read_spec(target))
    edit_layers(path, **dict.fromkeys((*sizes, "rope_theta", "attention_bias", "hidden_act", "vocab_size")))
    assert read_eagle3_spec(path, read_spec(target)) == expected


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: edit_layers(path, model_type="gpt_oss"), "type 'gpt_oss' are not supported; supported: llama, q"),
        (drop("layers.0.self_attn.q_norm.weight"), r"'midlayer.self_attn.q_norm.weight' is missing"),
        (
            lambda path: checkpoints.edit_config(path, speculators_model_type="mlp"),
            "type 'mlp' in the format of speculators, of which 'eagle3', 'peagle', 'dspark' and 'dflash' are supported",
        ),
    ],
)
def test_speculators_configurations_name_their_layers(
    tmp_path: Path, target: Path, damage: Callable[[Path], None], message: str
) -> None:
    path = checkpoints.write_eagle3(tmp_path, style="speculators", qk_norm=True, head_dim=24)
    damage(path)
    with pytest.raises(ValueError, match=message):
        checkpoints.load_eagle3(path, target)


def test_a_model_is_not_taken_for_a_head(target: Path) -> None:
    with pytest.raises(ValueError, match="not an EAGLE-3 head"):
        read_eagle3_spec(target, read_spec(target))
