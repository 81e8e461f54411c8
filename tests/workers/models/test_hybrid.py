"""Tests what only a hybrid has: seats of states, states that are kept, the layout and the limits of a Qwen3.5."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import checkpoints
from tests.support.model_runs import KEPT, SEATS, Run, some_tokens
from workers.kernels.block_scaled import KEPT_TYPES, BlockScaled, reordered
from workers.models.checkpoint import Weights
from workers.models.draft_methods import METHODS, check_kinds
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.models.specs import Specs, check_parallel

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_hybrid(tmp_path_factory.mktemp("hybrid"))


def test_a_seat_that_had_another_request_begins_with_nothing(path: Path) -> None:
    rng, model = random.Random(2), load_decoder(path, read_spec(path))
    run, tokens = Run(model), some_tokens(rng, 9)
    fresh = run.forward([[]], [tokens])[0]
    run.forward([[]], [some_tokens(rng, 30)])
    run.texts[0] = []
    assert torch.equal(run.forward([[]], [tokens])[0], fresh)
    assert run.kv.states is not None
    assert not run.kv.states.states[:, 0].any() and not run.kv.states.inputs[:, 0].any(), "the null seat was written"


def test_states_are_kept_behind_exactly_the_rows_that_are_named(path: Path) -> None:
    """Rows are named within a piece of a chunk, where pieces meet, at its end, and on the folded path of a tree."""
    rng, model = random.Random(10), load_decoder(path, read_spec(path))
    text, drafts = some_tokens(rng, 140), some_tokens(rng, 6)
    run = Run(model)
    run.forward([[]], [text], list(zip([94, 127, 139], KEPT, strict=True)))
    for length, seat in zip([95, 128, 140], KEPT, strict=True):
        assert_holds(run, seat, text[:length])
    run.forward([[-1, 0, 0, 2, 3, 3]], [drafts])
    run.accept([[0, 2, 3, 5]], [drafts], [(1, 6), (2, 5)])
    run.forward([[-1]], [[1]])
    path_tokens = text + [drafts[row] for row in (0, 2, 3, 5)]
    for seat, tokens in ((6, path_tokens[:142]), (5, path_tokens[:143]), (7, text), (SEATS, path_tokens)):
        assert_holds(run, seat, tokens)


def assert_holds(run: Run, seat: int, tokens: list[int]) -> None:
    """Check that a seat has the state behind these tokens."""
    fresh = Run(run.model)
    fresh.forward([[]], [tokens])
    assert run.kv.states is not None and fresh.kv.states is not None
    one, other = run.kv.states, fresh.kv.states
    assert (one.states[:, seat] - other.states[:, SEATS]).abs().max() < 1e-4 * other.states.abs().max()
    assert (one.inputs[:, seat] - other.inputs[:, SEATS]).abs().max() < 1e-4 * other.inputs.abs().max()


def test_a_checkpoint_with_a_vision_tower_has_the_text_model_of_the_plain_one(path: Path, tmp_path: Path) -> None:
    wrapped = checkpoints.write_hybrid(tmp_path, is_wrapped=True)
    spec, plain = read_spec(wrapped), read_spec(path)
    assert (spec.family, spec.delta, spec.dtype, spec.eos_token_ids) == (plain.family, plain.delta, "bfloat16", (1,))
    assert Specs.from_json(Specs(target=spec).to_json()).target == spec
    tokens = some_tokens(random.Random(4), 20)
    one, other = (Run(load_decoder(at, read_spec(at))).forward([[]], [tokens])[0] for at in (path, wrapped))
    assert torch.equal(one, other)


def test_fp8_blocks_of_a_section_change_their_rows(tmp_path: Path) -> None:
    path = checkpoints.quantize_fp8(checkpoints.write_hybrid(tmp_path, hidden_size=128), (32, 64))
    weights = Weights(path, torch.bfloat16, kept=KEPT_TYPES)
    name = "model.layers.0.linear_attn.in_proj_qkv.weight"
    part = weights.matrix(name, 0, 1, 2, section=(64, 192))
    assert isinstance(part, BlockScaled)
    row_O = torch.arange(64).flip(0)
    found = reordered(part, row_O)
    assert isinstance(found, BlockScaled)
    assert torch.equal(found.dequantized(), weights.get(name)[128:192][row_O])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen4_exp", "architectures": ["Qwen4ForCausalLM"]}, "qwen4_exp is not supported: its layers"),
        ({"model_type": "kimi_linear"}, "KDA"),
        ({"model_type": "qwen3_next", "mlp_only_layers": [1]}, "mlp_only_layers, which have no experts"),
        ({"model_type": "qwen3_5_moe_text", "norm_topk_prob": False}, "norm_topk_prob False"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim 3 is not implemented; take a Qwen3.5"),
        ({"attn_output_gate": False}, "attn_output_gate False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid'"),
    ],
)
def test_other_hybrids_are_refused_by_name_before_anything_is_imported(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_text"} | change))
    with pytest.raises(ValueError, match=message):
        check_kinds(tmp_path, None)


@pytest.mark.parametrize(
    "change", [{"linear_num_value_heads": 3}, {"linear_key_head_dim": 8}, {"linear_value_head_dim": 24}]
)
def test_sizes_that_are_not_implemented_are_refused(path: Path, tmp_path: Path, change: dict[str, int]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | change))
    with pytest.raises(ValueError, match="must be a multiple of linear_num_key_heads 2, and the head widths"):
        read_spec(tmp_path)


def test_ranks_must_divide_the_key_heads_of_the_delta_nets(tmp_path: Path) -> None:
    spec = read_spec(checkpoints.write_hybrid(tmp_path, num_attention_heads=8))
    check_parallel(spec, 2)
    with pytest.raises(ValueError, match="must divide the 2 key heads of a gated delta net; use one of 1, 2"):
        check_parallel(spec, 4)


def test_a_hybrid_does_not_draft(path: Path) -> None:
    read = METHODS["draft_model"].read_spec
    assert read is not None
    with pytest.raises(ValueError, match="hybrid"):
        read(str(path), read_spec(path))
