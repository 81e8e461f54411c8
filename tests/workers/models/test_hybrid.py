"""A Qwen3.5 equals transformers' class: prompts, chunks, every node of trees, and what follows an accepted path.

Two correct orders of float32 sums differ by 1e-4 of logits up to 10, since the borders of chunks move.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support import checkpoints
from tests.support.attention_cases import paths_of
from workers.kernels.block_scaled import KEPT_TYPES, BlockScaled, reordered
from workers.kernels.select import TORCH
from workers.kv_cache import KVPool
from workers.models.base import BaseDecoder
from workers.models.checkpoint import Weights
from workers.models.draft_methods import METHODS, check_kinds
from workers.models.layers import Runtime
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.models.specs import Specs, check_parallel
from workers.types import AttentionMetadata, Folds

torch.set_num_threads(1)

PAGE, SEATS, KEPT = 16, 4, [5, 6, 7]
"""Sequences have seats from SEATS on downwards; states are kept in seats KEPT."""
Keeps = Sequence[tuple[int, int]]
"""Rows, and the seats for the states behind them."""


MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "qwen3_5_moe_text": checkpoints.HYBRID_MOE,
    "qwen3_next": checkpoints.HYBRID_MOE,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module", params=MODELS)
def any_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return checkpoints.write_hybrid(folder, request.param, **MODELS[request.param])


class Oracle:
    """Transformers' logits after the tokens of a sequence."""

    def __init__(self, path: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        return self._model(torch.tensor([tokens])).logits[0]


class Run:
    """Sequences in a model's pools, each on its own seat and pages, with the state of an engine."""

    def __init__(self, model: BaseDecoder, num: int = 1, num_pages: int = 16) -> None:
        self.model, self.num_pages = model, num_pages
        num_slots = (num * self.num_pages + 1) * PAGE
        self.kv: KVPool = model.new_kv_pool(num_slots, num_seats=max(KEPT), num_tree_rows=64 * num)
        self.texts: list[list[int]] = [[] for _ in range(num)]
        self._folds: Folds | None = None

    def forward(self, trees: list[list[int]], tokens: list[list[int]], keeps: Keeps = ()) -> list[Tensor]:
        """Run a step: trees (parents) of the first requests, then chunks (parents []) of others; return the logits."""
        offsets, rows, masks, base, read, write = [0], [], [], [], [], []
        for request, (parents, own) in enumerate(zip(trees, tokens, strict=True)):
            done, seat = len(self.texts[request]), SEATS - request
            depth = [len(path) - 1 for path in paths_of(parents)] or range(len(own))
            rows += [
                (token, done + depth[i], done + i, done if parents else done + i + 1) for i, token in enumerate(own)
            ]
            masks += [sum(1 << bit for bit in path) for path in paths_of(parents)] or [0] * len(own)
            offsets.append(len(rows))
            base.append(done if parents else 0)
            read.append(seat if done else 0)
            write.append(0 if parents else seat)
            if not parents:
                self.texts[request] += own
        token, position, slot, visible = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
        table = np.arange(1, 1 + len(trees) * self.num_pages, dtype=np.int32).reshape(len(trees), -1)
        attention = AttentionMetadata(
            query_offsets=np.array(offsets, dtype=np.int32),
            page_table_BP=table,
            base_B=np.array(base, dtype=np.int32),
            slot_N=slot,
            visible_N=visible,
            ancestors_N=np.array(masks, dtype=np.uint64).view(np.int64),
            read_seat_B=np.array(read, dtype=np.int32),
            write_seat_B=np.array(write, dtype=np.int32),
            keep_row_K=np.array([row for row, _ in keeps], dtype=np.int32),
            keep_seat_K=np.array([seat for _, seat in keeps], dtype=np.int32),
        )
        if self._folds is not None and self.kv.states is not None:
            self.model.fold(self._folds, self.kv)
            self._folds = None
        plan = self.model.plan(attention, PAGE)
        hidden = self.model.forward(torch.from_numpy(token), torch.from_numpy(position), plan, self.kv)
        logits = self.model.full_logits(hidden.final_ND)
        return [logits[a:b] for a, b in pairwise(offsets)]

    @torch.inference_mode()
    def accept(self, paths: list[list[int]], tokens: list[list[int]], keeps: Keeps = ()) -> None:
        """Commit the accepted rows, roots included, of the last step's trees. keeps: rows of all paths together."""
        begins = np.cumsum([0, *map(len, tokens)]).tolist()
        moved: tuple[list[int], list[int]] = ([], [])
        for request, rows in enumerate(paths):
            first = (1 + request * self.num_pages) * PAGE + len(self.texts[request])
            moved[0].extend(first + row for row in rows)
            moved[1].extend(first + i for i in range(len(rows)))
            self.texts[request] += [tokens[request][row] for row in rows]
        TORCH.copy_slots(self.kv.data, *map(torch.tensor, moved))
        self._folds = Folds(
            offsets=torch.tensor([0, *np.cumsum(list(map(len, paths)))], dtype=torch.int32),
            row_A=torch.tensor([begins[r] + row for r, rows in enumerate(paths) for row in rows], dtype=torch.int32),
            seat_F=torch.tensor([SEATS - request for request in range(len(paths))], dtype=torch.int32),
            keep_row_K=torch.tensor([row for row, _ in keeps], dtype=torch.int32),
            keep_seat_K=torch.tensor([seat for _, seat in keeps], dtype=torch.int32),
        )


def some_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(96) for _ in range(count)]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert (actual - expected).abs().max().item() < 5e-4


def test_prompts_and_chunks_have_the_logits_of_transformers(any_path: Path) -> None:
    rng, oracle, model = random.Random(0), Oracle(any_path), load_decoder(any_path, read_spec(any_path))
    tokens = some_tokens(rng, 200)
    expected = oracle.logits(tokens)
    assert expected.std() > 1, "logits too flat to tell models apart"
    assert_close(Run(model).forward([[]], [tokens])[0], expected)
    for sizes in ([1] * 12 + [188], [64, 65, 71], [3, 2, 130, 65]):
        run, ends = Run(model), np.cumsum([0, *sizes]).tolist()
        assert_close(torch.cat([run.forward([[]], [tokens[a:b]])[0] for a, b in pairwise(ends)]), expected)


def test_every_node_has_the_logits_of_its_path_and_accepted_rows_move_the_state_on(path: Path) -> None:
    """Trees of 1 to 64 rows of two requests, some only a root, beside the chunks of a third."""
    rng, oracle, model = random.Random(1), Oracle(path), load_decoder(path, read_spec(path))
    run = Run(model, 3)
    run.forward([[], []], [some_tokens(rng, 5), some_tokens(rng, 70)])
    for step in range(8):
        sizes = [rng.choice([1, 2, 9, 64]), rng.choice([1, 5, 30])]
        trees = [[-1, *(rng.randrange(max(0, row - 6), row) for row in range(1, size))] for size in sizes]
        tokens = [some_tokens(rng, size) for size in sizes]
        before = [list(text) for text in run.texts]
        chunk = some_tokens(rng, rng.choice([1, 7, 20]))
        logits = run.forward([*trees, []], [*tokens, chunk])
        paths = []
        for request, parents in enumerate(trees):
            of_rows = paths_of(parents)
            for row in {0, rng.randrange(len(parents)), len(parents) - 1} if step % 2 else {len(parents) - 1}:
                text = before[request] + [tokens[request][r] for r in of_rows[row]]
                assert_close(logits[request][row], oracle.logits(text)[-1])
            paths.append(rng.choice(of_rows))
        assert_close(logits[2], oracle.logits(before[2] + chunk)[len(before[2]) :])
        run.accept(paths, tokens)


def test_a_seat_that_had_another_request_begins_with_nothing(path: Path) -> None:
    rng, model = random.Random(2), load_decoder(path, read_spec(path))
    run, tokens = Run(model), some_tokens(rng, 9)
    fresh = run.forward([[]], [tokens])[0]
    run.forward([[]], [some_tokens(rng, 30)])
    run.texts[0] = []
    assert torch.equal(run.forward([[]], [tokens])[0], fresh)
    assert run.kv.states is not None
    assert not run.kv.states.states[:, 0].any() and not run.kv.states.inputs[:, 0].any(), "the null seat was written"


def test_a_state_is_exact_after_hundreds_of_trees(tmp_path: Path) -> None:
    """Paths of trees, folded step by step, leave the state that the whole text leaves in few chunks."""
    path = checkpoints.write_hybrid(tmp_path, num_hidden_layers=2, layer_types=["linear_attention"] * 2)
    rng, model = random.Random(3), load_decoder(path, read_spec(path))
    run, whole = Run(model, num_pages=100), Run(model, num_pages=100)
    run.forward([[]], [some_tokens(rng, 3)])
    for _ in range(400):
        parents = [-1, *(rng.randrange(row) for row in range(1, rng.choice([1, 2, 4, 7])))]
        tokens = some_tokens(rng, len(parents))
        run.forward([parents], [tokens])
        run.accept([rng.choice(paths_of(parents))], [tokens])
    last = some_tokens(rng, 1)
    logits = run.forward([[-1]], [last])[0]
    text = run.texts[0]
    whole.forward([[]], [text[:300]])
    whole.forward([[]], [text[300:]])
    assert len(text) > 700
    assert_close(logits, whole.forward([[-1]], [last])[0])
    assert run.kv.states is not None and whole.kv.states is not None
    one, other = run.kv.states.states[:, SEATS], whole.kv.states.states[:, SEATS]
    assert (one - other).abs().max() < 1e-5 * other.abs().max()


def test_states_are_kept_behind_exactly_the_rows_that_are_named(path: Path) -> None:
    """Of a chunk within a piece, where pieces meet, and behind its last row; and of the folded path of a tree."""
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


def test_sixteen_bits_keep_their_states_in_float32(path: Path) -> None:
    rng, exact = random.Random(8), load_decoder(path, read_spec(path))
    half = load_decoder(path, read_spec(path), Runtime(dtype=torch.bfloat16))
    tokens, parents, drafts = some_tokens(rng, 20), [-1, 0, 0, 2], some_tokens(rng, 4)
    logits = []
    for model in (exact, half):
        run = Run(model)
        run.forward([[]], [tokens])
        run.forward([parents], [drafts])
        run.accept([[0, 2, 3]], [drafts])
        logits.append(run.forward([[-1, 0]], [[5, 6]])[0])
        assert run.kv.states is not None and run.kv.states.states.dtype == torch.float32
    assert (logits[1] - logits[0]).abs().mean() < 0.1 * logits[0].std()


def test_fp8_blocks_of_a_hybrid_are_read_by_section_and_head(tmp_path: Path) -> None:
    path = checkpoints.write_hybrid(tmp_path / "exact", hidden_size=128)
    checkpoints.dequantize_fp8(checkpoints.quantize_fp8(path, (32, 64)), tmp_path / "whole")
    tokens = some_tokens(random.Random(9), 12)
    one, other = (Run(load_decoder(at, read_spec(at))).forward([[]], [tokens])[0] for at in (path, tmp_path / "whole"))
    assert_close(one, other)
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
