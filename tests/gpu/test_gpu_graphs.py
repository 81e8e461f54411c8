"""On a CUDA machine: replayed steps and trees equal those without graphs."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.drafter.tree.test_tree_graphs import assert_same_trees, proposers
from tests.support.attention_cases import Batch
from tests.support.engines import BUNDLED, DYNAMIC, bundled
from tests.workers.test_cuda_graphs import STEPS
from workers.cuda_graphs import Recorder, decoder_graphs
from workers.kernels.select import kernels_for
from workers.models.layers import Runtime
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.sampling.sampler import process_logits_static
from workers.settings import SamplingSettings
from workers.types import SamplingBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing was shown about graphs here"),
]


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
