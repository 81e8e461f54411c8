"""On a CUDA machine: replayed steps and trees equal those without graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.drafter import Drafter
from drafter.methods import load_proposer
from drafter.tree.policy import make_tree_policy
from tests.drafter.tree.test_tree_graphs import TREE, assert_same_trees, message, proposers
from tests.support import checkpoints
from tests.support.attention_cases import Batch
from tests.support.engine_here import Alone
from tests.support.engines import BUNDLED, DYNAMIC, bundled
from tests.workers.test_cuda_graphs import STEPS
from workers.config import DraftConfig, EngineConfig
from workers.cuda_graphs import Recorder, decoder_graphs
from workers.kernels.select import kernels_for
from workers.models.draft_methods import read_specs
from workers.models.layers import Runtime
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.sampling.sampler import process_logits_static
from workers.settings import SamplingSettings
from workers.types import SamplingBatch, TreeBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing was shown about graphs here"),
]
VOCAB = 128_256


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.25)], ids=str)
def test_replayed_steps_equal_the_same_steps_launched_one_by_one(dtype: torch.dtype, tolerance: float) -> None:
    spec = read_spec(BUNDLED / "target")
    model = load_decoder(
        BUNDLED / "target", spec, Runtime(device="cuda", dtype=dtype, kernels=kernels_for("cuda")), tap_layers=(0, 2)
    )
    config = bundled(DYNAMIC, max_num_seqs=8, max_model_len=128)
    pools = [model.new_kv_pool(32 * 16) for _ in range(2)]
    replayed = decoder_graphs(model, pools[1], config)
    print(replayed.report)
    context = torch.randn(pools[0].data[:, 16:].shape, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        for pool in pools:
            pool.data[:, 16:] = context.to("cuda", dtype)
    for number, step in enumerate([*STEPS, *STEPS, Batch([(60, 12)], 16)]):
        tokens = torch.randint(0, 2048, (len(step.keys),), generator=torch.Generator().manual_seed(number))
        positions = torch.tensor([len(keys) - 1 for keys in step.keys], dtype=torch.int32)
        alone = model.forward(tokens.cuda(), positions.cuda(), model.plan(step.metadata, 16), pools[0])
        final_ND, taps_N3D = replayed(step.metadata, tokens, positions)
        assert (final_ND - alone.final_ND).abs().max() < tolerance
        assert (taps_N3D - alone.taps_N3D).abs().max() < tolerance
    assert (pools[1].data[:, 16:] - pools[0].data[:, 16:]).abs().max() < tolerance


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_replayed_trees_are_those_that_grow_level_by_level(method: str) -> None:
    by_level, at_once = proposers(method, "cuda", is_captured=True)
    print(at_once.tree_graphs.report)
    for _ in range(2):  # the second time over buffers that hold other steps
        assert_same_trees(by_level, at_once, "cuda")


HEADS: dict[str, tuple[str, Callable[..., Path], dict[str, Any]]] = {
    "eagle3": ("eagle3", checkpoints.write_eagle3, {"draft_vocab_size": None}),
    "p-eagle": ("eagle3", checkpoints.write_eagle3, {"draft_vocab_size": None, "parallel": {"ptd_token_id": 2}}),
    "dspark": ("dspark", checkpoints.write_block, {}),
    "dspark of few tokens": ("dspark", checkpoints.write_block, {"markov_head_type": "gated", "draft_vocab_size": 900}),
    "dflash": ("dflash", checkpoints.write_block, {"style": "z-lab", "markov_rank": 0}),
}


@pytest.mark.parametrize("name", HEADS)
def test_trees_of_many_requests_and_a_whole_vocabulary_are_replayed(tmp_path: Path, name: str) -> None:
    """Large trees of three requests, then of 64 and of 33, as the drafter of an engine grows them."""
    method, write, options = HEADS[name]
    target = checkpoints.write_model(tmp_path / "target", "qwen3", head_dim=8, vocab_size=VOCAB)
    head = write(tmp_path / "head", vocab_size=VOCAB, **options)
    draft = DraftConfig(method=method, model_path=str(head), placement="colocated", tree=TREE)  # type: ignore[arg-type]
    config = EngineConfig(
        model_path=str(target), draft=draft, device="cuda", max_num_seqs=64, max_model_len=64, num_pages=300
    )
    specs = read_specs(config)
    assert specs.draft is not None
    policy = make_tree_policy(TREE, has_leaf_siblings=specs.draft.has_marginals)
    made = []
    for kernels in ("torch", "auto"):
        world = Alone.of(replace(config, kernels=kernels), 1, torch.device("cuda", 0))  # type: ignore[arg-type]
        made.append(load_proposer(world, specs, kernels_for(world.device, world.config.kernels)))
    by_level, at_once = made
    assert by_level.tree_graphs is None and at_once.tree_graphs is not None
    at_once.expand = None  # type: ignore[assignment, method-assign]
    generator, fed = torch.Generator().manual_seed(1), [1] * 64
    for size, step in ((3, (2, 14, 4)), (64, (4, 4, 3)), (33, (1, 4, 2))):
        asked = message(dict.fromkeys(range(size), step), fed, at_once.width, generator, "cuda")
        expected, got = (Drafter(proposer, policy).draft(asked) for proposer in (by_level, at_once))
        for field in TreeBatch.__slots__:
            torch.testing.assert_close(getattr(got.trees, field), getattr(expected.trees, field), atol=1e-4, rtol=0)
        assert len(got.trees.token_N) > 3 * size
        fed = [count + step[0] * (b < size) for b, count in enumerate(fed)]


def test_top_k_and_top_p_of_a_large_vocabulary_are_replayed() -> None:
    logits_RV = torch.zeros(64, 32_000, device="cuda")
    params = SamplingBatch.stack([SamplingSettings(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01)] * 64, "cuda")
    run = partial(
        process_logits_static,
        logits_RV,
        params,
        has_min_p=True,
        has_top=True,
        threshold=kernels_for("cuda").truncation_threshold,
    )
    replay = Recorder(logits_RV.device).record(run)
    logits_RV.copy_(torch.randn(64, 32_000, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(replay(), run())
