"""The decoder equals transformers' classes, and a tree node equals its path as a plain sequence.

Logits are compared in float32 (< 1e-4): whole prompts, chunks, single tokens over shuffled pages, trees.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
import traceback
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support import checkpoints
from workers.kernels.select import TORCH
from workers.kv_cache import KVPool, OutOfPages, PageAllocator
from workers.models import checkpoint as checkpoint_module
from workers.models.checkpoint import Weights
from workers.models.decoder import Decoder
from workers.models.layers import Runtime, TensorParallel
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.models.specs import TransformersSpec, check_parallel
from workers.types import AttentionMetadata, Hidden

torch.set_num_threads(1)

PAGE = 4

MODELS = {
    "llama": ("llama", {}),
    "llama-tied-llama3": ("llama", {"tie_word_embeddings": True, "rope_parameters": checkpoints.LLAMA3_ROPE}),
    "llama-legacy-llama3": ("llama", {"rope_parameters": checkpoints.LLAMA3_ROPE, "legacy_rope": True}),
    "llama-legacy-theta": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}, "legacy_rope": True},
    ),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 8}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("llama", {"head_dim": 20}),
    "llama-sharded": ("llama", {"shards": 3}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3-biases": ("qwen3", {"head_dim": 24, "attention_bias": True, "num_key_value_heads": 2}),
}


@pytest.fixture(scope="module", params=MODELS, ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = MODELS[request.param]
    return checkpoints.write_model(tmp_path_factory.mktemp(request.param), family, **overrides)


class PagedRun:
    """A minimal engine: a decoder with requests on random pages."""

    def __init__(self, decoder: Decoder, num_requests: int = 1, pages_each: int = 24, seed: int = 0) -> None:
        pages = list(range(1, num_requests * pages_each + 1))
        random.Random(seed).shuffle(pages)
        self.decoder = decoder
        self.table = torch.tensor(pages, dtype=torch.int32).view(num_requests, pages_each)
        self.kv = decoder.new_kv_pool((len(pages) + 1) * PAGE)

    def forward(self, parts: list[Chunk | Tree | None]) -> tuple[list[Tensor], Hidden]:
        """Run one packed forward with a part per request (None = no rows); return the logits per request."""
        offsets, tokens, positions, slots, visible, ancestors, base = [0], [], [], [], [], [], []
        for part in parts:
            rows = part.rows() if part else []
            for token, position, slot, seen, mask in rows:
                tokens.append(token)
                positions.append(position)
                slots.append(slot)
                visible.append(seen)
                ancestors.append(mask - (1 << 64) if mask >> 63 else mask)
            offsets.append(offsets[-1] + len(rows))
            base.append(part.start if isinstance(part, Tree) else 0)
        metadata = AttentionMetadata(
            query_offsets=np.array(offsets, dtype=np.int32),
            page_table_BP=self.table.numpy(),
            base_B=np.array(base, dtype=np.int32),
            slot_N=np.array(slots, dtype=np.int32),
            visible_N=np.array(visible, dtype=np.int32),
            ancestors_N=np.array(ancestors, dtype=np.int64),
        )
        plan = self.decoder.plan(metadata, PAGE)
        hidden = self.decoder.forward(torch.tensor(tokens), torch.tensor(positions), plan, self.kv)
        logits = self.decoder.full_logits(hidden.final_ND)
        return [logits[a:b] for a, b in itertools.pairwise(offsets)], hidden

    def slot(self, request: int, logical: int) -> int:
        return int(self.table[request, logical // PAGE]) * PAGE + logical % PAGE


class Chunk:
    """Return prompt tokens at positions start, start + 1, ..."""

    def __init__(self, tokens: list[int], start: int) -> None:
        self.tokens, self.start = tokens, start

    def rows(self) -> list[tuple[int, int, int, int, int]]:
        return [(t, self.start + i, self.start + i, self.start + i + 1, 0) for i, t in enumerate(self.tokens)]


class Tree:
    """Return a draft tree whose root is the token at `start`; parents breadth-first, -1 for the root."""

    def __init__(self, tokens: list[int], parents: list[int], start: int) -> None:
        self.tokens, self.parents, self.start = tokens, parents, start
        self.paths: list[list[int]] = []
        for row, parent in enumerate(parents):
            self.paths.append([*(self.paths[parent] if parent >= 0 else []), row])

    def rows(self) -> list[tuple[int, int, int, int, int]]:
        return [
            (self.tokens[row], self.start + len(path) - 1, self.start + row, self.start, sum(1 << r for r in path))
            for row, path in enumerate(self.paths)
        ]


def random_tree(rng: random.Random, num_nodes: int, start: int, vocab: int) -> Tree:
    """Return a random tree in breadth-first order, in which parents never decrease."""
    parents, floor = [-1], 0
    for row in range(1, num_nodes):
        floor = rng.randint(floor, row - 1)
        parents.append(floor)
    return Tree([rng.randrange(vocab) for _ in range(num_nodes)], parents, start)


def load(path: Path, dtype: torch.dtype = torch.float32, tap_layers: tuple[int, ...] = ()) -> Decoder:
    decoder = load_decoder(path, read_spec(path), Runtime(dtype=dtype), tap_layers)
    assert isinstance(decoder, Decoder)
    return decoder


def oracle(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def oracle_logits(model: Any, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0]


def random_tokens(count: int, seed: int = 1, vocab: int = 96) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(count)]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max().item() < tolerance


def test_logits_equal_transformers_for_prompts_chunks_and_single_tokens(checkpoint: Path) -> None:
    tokens = random_tokens(45)
    expected = oracle_logits(oracle(checkpoint), tokens)
    assert expected.std() > 0.3, "logits too flat to tell models apart"
    decoder = load(checkpoint)

    whole, _ = PagedRun(decoder).forward([Chunk(tokens, 0)])
    assert_close(whole[0], expected)

    run = PagedRun(decoder, seed=2)
    pieces = [run.forward([Chunk(tokens[a:b], a)])[0][0] for a, b in ((0, 13), (13, 14), (14, 30), (30, 45))]
    assert_close(torch.cat(pieces), expected)

    run = PagedRun(decoder, seed=3)
    single = [run.forward([Chunk([token], position)])[0][0] for position, token in enumerate(tokens)]
    assert_close(torch.cat(single), expected)


def test_tree_logits_equal_each_path_as_a_sequence_in_a_mixed_batch(checkpoint: Path) -> None:
    """One packed forward pass contains ragged trees, a single root, a request without rows and two prompt chunks."""
    rng = random.Random(4)
    model, decoder = oracle(checkpoint), load(checkpoint)
    prompts = [random_tokens(n, seed=n) for n in (9, 26, 3, 17, 12, 6, 11)]
    trees: list[Tree | None] = [random_tree(rng, n, len(p), 96) for n, p in zip((1, 17, 5, 30), prompts, strict=False)]
    parts: list[Chunk | Tree | None] = [*trees, Chunk(prompts[4], 0), None, Chunk(prompts[6][5:], 5)]
    run = PagedRun(decoder, num_requests=7, pages_each=16, seed=5)
    before = [Chunk(p, 0) for p in prompts[:4]] + [None, None, Chunk(prompts[6][:5], 0)]
    run.forward(before)

    logits, _ = run.forward(parts)

    for request, tree in enumerate(trees):
        assert tree is not None
        for row, path in enumerate(tree.paths):
            sequence = prompts[request] + [tree.tokens[r] for r in path]
            assert_close(logits[request][row], oracle_logits(model, sequence)[-1])
    assert_close(logits[4], oracle_logits(model, prompts[4]))
    assert logits[5].shape[0] == 0
    assert_close(logits[6], oracle_logits(model, prompts[6])[5:])


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_a_mistral_that_sees_runs_alone(tmp_path: Path, prefix: str) -> None:
    plain = checkpoints.write_model(tmp_path / "plain", "mistral", head_dim=16, sliding_window=None)
    both, stored = tmp_path / "both", load_file(plain / "model.safetensors")
    both.mkdir()
    head = "lm_head.weight" if prefix.startswith("model.") else "language_model.lm_head.weight"
    tensors = {prefix + name.removeprefix("model."): tensor for name, tensor in stored.items() if "lm_head" not in name}
    eyes = {f"{prefix.partition('language_model')[0]}vision_tower.patch_conv.weight": torch.ones(4)}
    save_file(tensors | eyes | {head: stored["lm_head.weight"]}, both / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((plain / "config.json").read_text())
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    (both / "config.json").write_text(json.dumps(config))
    spec, tokens = read_spec(both), random_tokens(20)
    assert not isinstance(spec, TransformersSpec) and spec == read_spec(plain)
    one, other = (PagedRun(load_decoder(path, spec)).forward([Chunk(tokens, 0)])[0][0] for path in (plain, both))
    assert torch.equal(one, other)
    text = json.loads((checkpoints.write_model(tmp_path / "new", "ministral3") / "config.json").read_text())
    (both / "config.json").write_text(json.dumps(config | {"text_config": text}))
    assert isinstance(read_spec(both), TransformersSpec)


def test_taps_are_the_residual_stream_before_the_named_layers(tmp_path: Path) -> None:
    path = checkpoints.write_model(tmp_path, "llama", num_hidden_layers=7)
    tokens = random_tokens(10)
    with torch.no_grad():
        states = oracle(path).model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    _, hidden = PagedRun(load(path, tap_layers=(2, 3, 4))).forward([Chunk(tokens, 0)])
    assert hidden.taps_N3D is not None
    assert_close(hidden.taps_N3D, torch.cat([states[i][0] for i in (2, 3, 4)], dim=-1))
    _, plain = PagedRun(load(path)).forward([Chunk(tokens, 0)])
    assert plain.taps_N3D is None


def test_an_accepted_path_is_compacted_into_consecutive_slots(tmp_path: Path) -> None:
    """Nodes 2 and 6 of the 2x2 tree are accepted; the next token equals a fresh prefill of prompt + root + path."""
    path = checkpoints.write_model(tmp_path, "llama")
    prompt, root, bonus = random_tokens(14), 42, 11
    tree = Tree([root, 7, 9, 5, 6, 8, 4], [-1, 0, 0, 1, 1, 2, 2], len(prompt))
    run = PagedRun(load(path))
    run.forward([Chunk(prompt, 0)])
    run.forward([tree])
    P = tree.start

    source, target = [run.slot(0, P + row) for row in (2, 6)], [run.slot(0, P + 1), run.slot(0, P + 2)]
    with torch.inference_mode():
        TORCH.copy_slots(run.kv.data, torch.tensor(source), torch.tensor(target))

    logits, _ = run.forward([Chunk([bonus], P + 3)])
    expected = oracle_logits(oracle(path), [*prompt, root, 9, 4, bonus])[-1:]
    assert_close(logits[0], expected)
    assert logits[0].argmax() == expected.argmax()


def test_a_pool_takes_what_a_slot_takes() -> None:
    assert KVPool(2, 8, 1, 2, torch.float32, "cpu").data.nbytes == 8 * KVPool.bytes_per_slot(2, 1, 2, torch.float32)


def test_the_page_allocator_accounts_for_every_page_and_never_gives_page_0() -> None:
    allocator = PageAllocator(6)
    first, second = allocator.alloc(2), allocator.alloc(3)
    assert sorted(first + second) == [1, 2, 3, 4, 5]
    with pytest.raises(OutOfPages, match="1 KV pages requested, 0 of 5 free"):
        allocator.alloc(1)
    allocator.free(first)
    with pytest.raises(OutOfPages):
        allocator.alloc(3)
    assert allocator.num_free == 2, "a failed allocation takes nothing"
    with pytest.raises(AssertionError, match="not allocated"):
        allocator.free(first[:1])
    with pytest.raises(AssertionError, match="not allocated"):
        allocator.free([0])
    assert sorted(allocator.alloc(2)) == sorted(first)


def test_bfloat16_weights_are_cast_on_the_fly(tmp_path: Path) -> None:
    path = checkpoints.write_model(tmp_path, "llama")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    checkpoints.edit_config(path, dtype="bfloat16")
    tokens = random_tokens(20)
    expected = oracle_logits(oracle(path), tokens)
    assert read_spec(path).dtype == "bfloat16"
    assert_close(PagedRun(load(path, dtype=torch.float32)).forward([Chunk(tokens, 0)])[0][0], expected)
    half = PagedRun(load(path, dtype=torch.bfloat16)).forward([Chunk(tokens, 0)])[0][0]
    assert half.dtype == torch.float32
    assert (half - expected).abs().mean() < 0.05 * expected.std()


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pytorch_file_of_either_format_is_read(tmp_path: Path, is_zip: bool) -> None:
    """Zip archives are mapped; what torch wrote before 1.6 cannot be."""
    tensor = torch.arange(6.0).view(3, 2)
    torch.save({"fc.weight": tensor}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    assert torch.equal(Weights(tmp_path).get("fc.weight", 0, 1, 3), tensor[1:2])


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_that_could_run_code_is_rejected_with_advice(tmp_path: Path, is_zip: bool) -> None:
    content = {"fc.weight": torch.ones(2), "arguments": Namespace(lr=1)}
    torch.save(content, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(
        ValueError, match=r"more than tensors \(argparse.Namespace\).*safetensors.torch.save_file"
    ) as told:
        Weights(tmp_path)
    assert "weights_only" not in "".join(traceback.format_exception(told.value))


@pytest.mark.parametrize("content", [{"state_dict": {"fc.weight": torch.ones(2)}}, [torch.ones(2)]])
def test_a_pickle_of_another_structure_is_rejected_with_advice(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no plain mapping of names to tensors; .*safetensors.torch.save_file"):
        Weights(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("size", [0, 4, 5000])
def test_a_truncated_file_is_named(tmp_path: Path, name: str, size: int) -> None:
    content = {"fc.weight": torch.ones(20000)}
    (save_file if name.endswith(".safetensors") else torch.save)(content, tmp_path / name)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:size])
    with pytest.raises(ValueError, match=f"{name} cannot be read .*: fetch or copy it again"):
        Weights(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "'MambaForCausalLM' is not supported"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "bitsandbytes are not supported; write",
        ),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"draft_vocab_size": 8}, 'EAGLE-3 draft head, .* write speculative_config: {"method": "eagle3"'),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                    "original_max_position_embeddings": 64,
                }
            },
            "rope type 'longrope'",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "not a valid llama configuration.*factor"),
    ],
)
def test_an_unsupported_model_is_an_error_with_the_supported_ones(tmp_path: Path, change: dict, message: str) -> None:
    path = checkpoints.write_model(tmp_path, "llama")
    checkpoints.edit_config(path, **change)
    with pytest.raises(ValueError, match=message):
        read_spec(path)


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    path = checkpoints.write_model(tmp_path, "llama")
    checkpoints.edit_weights(path, add={"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    load(path)
    checkpoints.edit_weights(path, add={"model.layers.0.self_attn.q_proj.bias": torch.ones(64)})
    with pytest.raises(ValueError, match=r"unknown tensors: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(path)
    name = "model.layers.1.mlp.up_proj.weight"
    checkpoints.edit_weights(path, remove=(name,))
    with pytest.raises(ValueError, match=f"{name}' is missing"):
        load(path)


def test_a_tied_model_that_repeats_its_embedding_as_a_head_holds_it_once(tmp_path: Path) -> None:
    path = checkpoints.write_model(tmp_path, "llama", tie_word_embeddings=True)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    checkpoints.edit_weights(path, add={"lm_head.weight": embedding.clone()})
    decoder = load(path, dtype=torch.float16)  # whose weights are not packed
    assert decoder._head._linear.weight.data_ptr() == decoder._embedding_VD.data_ptr()


@pytest.mark.parametrize("row", [0, 3, 95])
def test_a_tied_model_that_stores_another_head_uses_that(
    tmp_path: Path, row: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers; a head that differs in a single row is another one."""
    monkeypatch.setattr(checkpoint_module, "_COMPARED_ROWS", 7)
    path = checkpoints.write_model(tmp_path, "llama", tie_word_embeddings=True)
    head = load_file(path / "model.safetensors")["model.embed_tokens.weight"].clone()
    head[row] += 1
    checkpoints.edit_weights(path, add={"lm_head.weight": head})
    tokens = random_tokens(20)
    with caplog.at_level(logging.INFO):
        decoder = load(path)
    assert "tie_word_embeddings, but stores a different lm_head.weight" in caplog.text
    assert_close(PagedRun(decoder).forward([Chunk(tokens, 0)])[0][0], oracle_logits(oracle(path), tokens))
    shards = [load_decoder(path, read_spec(path), Runtime(tp=TensorParallel(rank, 2))) for rank in range(2)]
    assert torch.equal(torch.cat([shard.logits(head) for shard in shards], dim=1), decoder.logits(head))


@pytest.mark.parametrize(
    ("field", "value", "tensor", "found", "expected"),
    [
        ("num_key_value_heads", 2, "layers.0.self_attn.k_proj", (32, 64), (16, 64)),
        ("num_attention_heads", 16, "layers.0.self_attn.q_proj", (64, 64), (128, 64)),
        ("head_dim", 4, "layers.0.self_attn.q_proj", (64, 64), (32, 64)),
        ("intermediate_size", 48, "layers.0.mlp.gate_proj", (96, 64), (48, 64)),
        ("hidden_size", 32, "embed_tokens", (96, 64), (96, 32)),
        ("vocab_size", 90, "embed_tokens", (96, 64), (90, 64)),
    ],
)
def test_a_tensor_of_the_wrong_shape_is_named_with_the_field(
    tmp_path: Path, field: str, value: int, tensor: str, found: tuple[int, int], expected: tuple[int, int]
) -> None:
    path = checkpoints.write_model(tmp_path, "qwen3", head_dim=8)
    checkpoints.edit_config(path, **{field: value})
    message = re.escape(f"model.{tensor}.weight is {found}, config.json asks for {expected}: look at its ")
    with pytest.raises(ValueError, match=f"{message}.*{field}"):
        load(path)


def test_a_vocabulary_head_of_another_size_is_named(tmp_path: Path) -> None:
    path = checkpoints.write_model(tmp_path, "llama")
    checkpoints.edit_weights(path, add={"lm_head.weight": torch.ones(90, 64)})
    with pytest.raises(ValueError, match=r"lm_head.weight is \(90, 64\), config.json asks for \(96, 64\)"):
        load(path)


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    path = checkpoints.write_model(tmp_path, "llama", tie_word_embeddings=True)
    checkpoints.edit_config(path, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"'lm_head.weight' is missing"):
        load(path)


def test_parallel_sizes_that_do_not_fit_are_refused_with_those_that_do(tmp_path: Path) -> None:
    spec = read_spec(checkpoints.write_model(tmp_path, "llama", num_key_value_heads=2))
    for size in (1, 2, 4, 8):
        check_parallel(spec, size)
    for size in (0, 3, 5, 16):
        with pytest.raises(ValueError, match=rf"tensor_parallel_size {size} .* use one of 1, 2, 4, 8"):
            check_parallel(spec, size)


def test_a_tap_outside_the_model_is_refused(tmp_path: Path) -> None:
    path = checkpoints.write_model(tmp_path, "llama")
    with pytest.raises(ValueError, match="feature layer 4 is outside a model of 3 layers"):
        load(path, tap_layers=(1, 2, 4))


def test_a_slice_is_the_same_rows_of_the_whole(tmp_path: Path) -> None:
    weights = Weights(checkpoints.write_model(tmp_path, "llama", shards=2))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    name = "model.layers.0.mlp.down_proj.weight"
    whole = weights.get(name)
    assert torch.equal(torch.cat([weights.get(name, 1, rank, 5) for rank in range(5)], dim=1), whole)
    assert torch.equal(torch.cat([weights.get(name, 0, rank, 3) for rank in range(3)]), whole)
    with pytest.raises(ValueError, match="unknown tensors"):
        weights.finish()


def test_end_of_text_ids_come_from_both_configs(tmp_path: Path) -> None:
    path = checkpoints.write_model(tmp_path, "llama")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    assert read_spec(path).eos_token_ids == (1, 5)
