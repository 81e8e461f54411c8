"""On a CUDA machine: sampled drafts and their verdicts equal those on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drafter.tree.frontier import DraftVocabulary
from drafter.tree.sample import quantize
from tests.support.sampled_trees import TREE, draft, pack
from verifier.acceptance.rejection import accept_rejection
from workers.settings import Rule, SamplingSettings
from workers.types import SamplingBatch, Verdict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing was shown about rejection there"),
]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_drafts_are_quantised_alike(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    target_ids = torch.randperm(128256, generator=generator)[:32000].sort().values
    log_q_FV = (3 * torch.randn(8, 32000, generator=generator) / temperature).log_softmax(-1)
    here, there = (
        quantize(log_q_FV.to(device), DraftVocabulary(target_size=128256, target_ids=target_ids.to(device)))
        for device in ("cpu", "cuda")
    )
    # The last of 512 tokens may be another token of the same weight.
    kept_FS = here.weight_FS > here.weight_FS[:, -1:]
    assert (here.weight_FS == there.weight_FS).all() and (here.id_FS == there.id_FS)[kept_FS].all()


@pytest.mark.parametrize("rule", [Rule.TRAVERSAL, Rule.RECURSIVE])
def test_verdicts_are_those_of_the_host(rule: Rule) -> None:
    rng, vocab, num = np.random.default_rng(0), 500, 60
    each = [draft(rng, vocab, TREE, seed, root_position=3) for seed in range(num)]
    trees, probs = pack(each)
    params = SamplingBatch.stack([SamplingSettings(seed=seed) for seed in range(num)])
    logits_NV = torch.from_numpy(rng.dirichlet(np.full(vocab, 0.3), size=len(trees.token_N))).log().float()

    def verdicts(device: str) -> list[Verdict]:
        return accept_rejection(trees, logits_NV.to(device), params, np.full(num, 3), probs, [rule] * num)

    assert verdicts("cuda") == verdicts("cpu")
