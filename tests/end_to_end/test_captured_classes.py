"""transformers' classes in CUDA graphs, on a simulated device: which can be captured, and their replays' results."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from drafter.proposers.eagle import FcHead
from tests.support import checkpoints
from tests.support.attention_cases import CHAIN, TWO_BY_TWO, Batch
from tests.workers.models.test_architectures import KNOWN

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("a simulated device is for machines without one", allow_module_level=True)

from tests.support.simulated_cuda import simulated_cuda
from workers.config import DraftConfig, EngineConfig, TreeConfig
from workers.cuda_graphs import decoder_graphs
from workers.kernels.select import kernels_for
from workers.models.fc_head_format import read_mtp_spec
from workers.models.layers import Runtime
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.models.specs import TransformersSpec

torch.set_num_threads(1)

IN_BRIEF = {"gemma-2", "gemma-3n", "gpt-neox", "granite-swa (sinks)", "mixtral", "phi-3.5-moe", "qwen3-moe"}
UNCAPTURED = {"gemma-3n", "phi-3.5-moe"}  # make tensors of what lies on the host
STEPS = [
    Batch([(20, CHAIN)], 16),
    Batch([(9, [-1])], 16),
    Batch([(9, [-1]), (33, TWO_BY_TWO)], 16),
    Batch([(20, CHAIN)], 16),
]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in IN_BRIEF else pytest.mark.full) for name in KNOWN],
)
def test_replayed_steps_equal_eager_steps(tmp_path: Path, name: str) -> None:
    """Experts in 16 bits, because their product synchronizes with the host in other types."""
    model_type, settings = checkpoints.ARCHITECTURES[name]
    path = checkpoints.write_model(tmp_path, model_type, **settings)
    spec = read_spec(path)
    assert isinstance(spec, TransformersSpec)
    draft = DraftConfig(method="ngram", model_path="", tree=TreeConfig(kind="chain", num_speculative_tokens=8))
    config = EngineConfig(
        model_path=str(path), device="cuda", max_num_seqs=2, max_model_len=128, max_num_batched_tokens=24, draft=draft
    )
    with simulated_cuda() as cuda:
        device = torch.device("cuda", 0)
        dtype = torch.bfloat16 if spec.has_experts else torch.float32
        model = load_decoder(path, spec, Runtime(device=device, dtype=dtype, kernels=kernels_for(device)))
        assert model.can_be_captured is (name not in UNCAPTURED)
        if not model.can_be_captured:
            return
        pools = [model.new_kv_pool(32 * 16) for _ in range(2)]
        context = torch.randn(pools[0].data[:, 16:].shape).to(device, dtype)
        for pool in pools:
            pool.data[:, 16:] = context
        replayed = decoder_graphs(model, pools[0], config)
        for step in STEPS:
            tokens = torch.randint(0, 90, (len(step.keys),))
            positions = torch.tensor([len(keys) - 1 for keys in step.keys], dtype=torch.int32)
            cuda.waits.clear()
            final_ND, *_ = replayed(step.metadata, tokens, positions)
            assert not cuda.waits
            alone = model.forward(tokens.to(device), positions.to(device), model.plan(step.metadata, 16), pools[1])
            assert alone.final_ND.std() > 1e-3
            # A padded step may sum in another order, so numbers of 16 bits may be rounded differently.
            error_N = (final_ND.float() - alone.final_ND.float()).norm(dim=-1) / alone.final_ND.float().norm(dim=-1)
            assert float(error_N.max()) < (0.02 if dtype == torch.bfloat16 else 1e-4)
        assert sum(graph.num_replays for graph in cuda.graphs) == len(STEPS)


def test_latent_attention_runs_on_a_device_without_graphs(tmp_path: Path) -> None:
    """Its plan is torch's, whose shapes follow from the requests; all else is Triton's."""
    path = checkpoints.write_model(tmp_path, "deepseek_v3", **checkpoints.LATENT["deepseek_v3"])
    checkpoints.add_mtp(path, "deepseek_v3")
    spec, step = read_spec(path), STEPS[2]
    tokens = torch.randint(0, 90, (len(step.keys),), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([len(keys) - 1 for keys in step.keys], dtype=torch.int32)
    expected = load_decoder(path, spec)
    pool = expected.new_kv_pool(32 * 16)
    final_ND = expected.forward(tokens, positions, expected.plan(step.metadata, 16), pool).final_ND
    with simulated_cuda():
        device = torch.device("cuda", 0)
        runtime = Runtime(device=device, kernels=kernels_for(device))
        model, head = load_decoder(path, spec, runtime), FcHead.load(read_mtp_spec(path, spec), path, path, runtime)
        assert runtime.kernels.NAME == "triton" and not model.can_be_captured and not head.can_be_captured
        plan = model.plan(step.metadata, 16)
        here = model.forward(tokens.to(device), positions.to(device), plan, model.new_kv_pool(32 * 16))
        assert (here.final_ND.cpu() - final_ND).abs().max() < 1e-4


def test_experts_are_captured_if_their_product_needs_no_host(tmp_path: Path) -> None:
    model_type, settings = checkpoints.ARCHITECTURES["mixtral"]
    path = checkpoints.write_model(tmp_path, model_type, **settings)
    with simulated_cuda():
        for dtype, capability, expected in (
            (torch.bfloat16, (9, 0), True),
            (torch.bfloat16, (10, 3), True),
            (torch.bfloat16, (8, 0), False),
            (torch.bfloat16, (12, 0), False),
            (torch.float16, (9, 0), False),
        ):
            model = load_decoder(
                path, read_spec(path), Runtime(device="cuda", dtype=dtype, kernels=kernels_for("cuda"))
            )
            with mock.patch("torch.cuda.get_device_capability", lambda device, value=capability: value):
                assert model.can_be_captured is expected
