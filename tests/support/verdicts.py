"""Verdicts from logits alone, as the target and the engine reach them together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verifier.acceptance.coupled import verify
from workers.sampling.sampler import coupled_scores, process_logits
from workers.settings import Rule
from workers.types import DraftProbs, SamplingBatch, TreeBatch, Verdict


def accept(
    trees: TreeBatch,
    logits_NV: Tensor,
    params: SamplingBatch,
    root_position_B: Tensor,
    rules: Sequence[Rule] | None = None,
    probs: DraftProbs | None = None,
) -> list[Verdict]:
    """Return the verdicts of B trees from the target's logits [N, V] at every row, roots included.

    params: one entry per request. rules: None = all coupled.
    """
    rules = [Rule.COUPLED] * len(root_position_B) if rules is None else list(rules)
    assert logits_NV.shape[0] == len(trees.token_N), "one row of logits per tree row, no more and no fewer"
    request_N = torch.arange(len(root_position_B)).repeat_interleave(trees.offsets.diff())
    params_N = params.rows(request_N)
    processed_NV = process_logits(logits_NV, params_N)
    index_N = root_position_B[request_N] + trees.depth_N + 1
    drawn = coupled_scores(processed_NV, params_N, index_N).argmax(-1).tolist()
    return verify(
        trees,
        probs,
        drawn,
        rules=rules,
        params=lambda own: params.rows(torch.tensor(own)),
        root_position_B=root_position_B.tolist(),
        processed=lambda rows: processed_NV[rows],
    )
