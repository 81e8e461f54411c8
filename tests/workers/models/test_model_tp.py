"""Models split over 2 and 4 gloo processes equal a single process."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drafter.proposers.base import FeatureHead
from drafter.proposers.eagle import FcHead
from tests.support import checkpoints
from tests.support.forked import in_ranks
from workers.models.decoder import Decoder
from workers.models.eagle3_format import read_eagle3_spec
from workers.models.fc_head_format import read_eagle_spec, read_mtp_spec
from workers.models.fusion import load_fusion
from workers.models.layers import SINGLE, RankWeights, Runtime, TensorParallel, shard_vocab
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.types import AttentionMetadata

PAGE = 4

MODELS = {
    # 97 and 98 divide neither by 2 nor by 4; 2 kv heads are replicated at T = 4; the biases must be added once.
    "llama": {
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "intermediate_size": 98,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "qwen2": {"tie_word_embeddings": True, "vocab_size": 97},
    "qwen3": {"head_dim": 24},
}
HYBRID_MOES = ("qwen3_5_moe_text", "qwen3_next")


def packed(first_slot: int = 0) -> AttentionMetadata:
    """Return prompts of 9 and 5 rows, each on its own pages."""
    slots = [*range(first_slot, first_slot + 9), *range(first_slot, first_slot + 5)]
    return AttentionMetadata(
        query_offsets=np.array([0, 9, 14], dtype=np.int32),
        page_table_BP=np.array([[5, 2, 7], [1, 6, 3]], dtype=np.int32),
        base_B=np.zeros(2, dtype=np.int32),
        slot_N=np.array(slots, dtype=np.int32),
        visible_N=np.array(slots, dtype=np.int32) + 1,
        ancestors_N=np.zeros(14, dtype=np.int64),
        read_seat_B=np.zeros(2, dtype=np.int32),
        write_seat_B=np.array([2, 1], dtype=np.int32),
    )


def tokens() -> Tensor:
    rng = random.Random(0)
    return torch.tensor([rng.randrange(96) for _ in range(14)])


def run_models(folder: Path, tp: TensorParallel) -> dict[str, Tensor]:
    """Return logits and taps of every model, then the draft heads' outputs on the last one's features."""
    results = {}
    metadata = packed()
    taps = torch.zeros(0)
    for name in ("qwen3_5", *HYBRID_MOES, *checkpoints.LATENT, *MODELS):
        decoder = load_decoder(folder / name, read_spec(folder / name), Runtime(tp=tp), tap_layers=(0, 1, 2))
        kv = decoder.new_kv_pool(8 * PAGE, num_seats=2)
        hidden = decoder.forward(tokens(), torch.from_numpy(metadata.slot_N), decoder.plan(metadata, PAGE), kv)
        results[name] = decoder.full_logits(hidden.final_ND)
        shard = decoder.logits(hidden.final_ND)
        start, end = decoder.vocab_range
        assert torch.equal(shard[:, : end - start], results[name][:, start:end])
        assert hidden.taps_N3D is not None
        results[f"{name} taps"] = taps = hidden.taps_N3D
    target, spec = folder / "qwen3", read_spec(folder / "qwen3")
    path = folder / "eagle3"
    fused = load_fusion(path, read_eagle3_spec(path, spec))(taps)
    runtime, eagle = Runtime(tp=tp), folder / "eagle"
    heads: dict[str, tuple[FeatureHead, Tensor]] = {
        "eagle3": (checkpoints.load_eagle3(path, target, runtime), fused),
        "eagle": (
            FcHead.load(read_eagle_spec(eagle, spec), eagle, target, runtime),
            taps[:, :64],
        ),
        "mtp": (FcHead.load(read_mtp_spec(target, spec), target, target, runtime), taps[:, :64]),
    }
    metadata = packed(first_slot=1)
    for name, (head, features) in heads.items():
        kv = head.new_kv_pool(8 * PAGE)
        out = head.forward(tokens(), features, torch.from_numpy(metadata.slot_N - 1), head.plan(metadata, PAGE), kv)
        results |= {name: out, f"{name} logits": head.logits(out)}
    return results


def worker(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{size}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    results = run_models(folder, TensorParallel(rank, size, dist.group.WORLD))
    torch.save(results, folder / f"result-{size}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name, overrides in MODELS.items():
        checkpoints.write_model(path / name, name, **overrides)
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    checkpoints.write_hybrid(path / "qwen3_5", **heads)
    for name in HYBRID_MOES:
        checkpoints.write_hybrid(path / name, name, **heads, **checkpoints.HYBRID_MOE)
    for name, config in checkpoints.LATENT.items():
        checkpoints.write_model(path / name, name, **config)
    checkpoints.write_eagle3(
        path / "eagle3", draft_vocab_size=41, head_dim=20, num_hidden_layers=2, style="speculators"
    )
    checkpoints.write_eagle(path / "eagle", num_hidden_layers=2, intermediate_size=98, num_key_value_heads=2)
    checkpoints.add_mtp(path / "qwen3", "qwen3")
    return path


@pytest.mark.parametrize("size", [2, 4])
def test_split_models_equal_the_whole(folder: Path, size: int) -> None:
    expected = run_models(folder, SINGLE)
    in_ranks(worker, size, size, folder)
    for rank in range(size):
        actual = torch.load(folder / f"result-{size}-{rank}.pt", weights_only=True)
        for name, value in expected.items():
            torch.testing.assert_close(
                actual[name], value, atol=5e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_ranks_hold_only_their_share(folder: Path) -> None:
    spec = read_spec(folder / "llama")
    for rank in range(4):
        decoder = Decoder(RankWeights(folder / "llama", Runtime(tp=TensorParallel(rank, 4))), spec)
        layer = decoder._layers[0]
        assert layer.attention.qkv.shape == ((8 // 4 + 2) * 8, 64)
        assert layer.attention.o.shape == (64, 16)
        assert layer.mlp.down.shape[1] in (24, 25)
        assert decoder.new_kv_pool(PAGE).data.shape == (3, PAGE, 2, 1, 8)


@pytest.mark.parametrize(("vocab", "size"), [(96, 4), (97, 4), (97, 2), (5, 4), (3, 8)])
def test_vocabulary_shards_cover_every_token_once(vocab: int, size: int) -> None:
    shards = [shard_vocab(vocab, TensorParallel(rank, size)) for rank in range(size)]
    assert [token for start, end, _ in shards for token in range(start, end)] == list(range(vocab))
    assert len({width for _, _, width in shards}) == 1
