"""The drafter: a draft model, and how trees are grown from it. Its only per-request state is the KV pages.

Drafter(proposer, policy, ...)
.draft(message) -> DraftReply      feed the new rows, grow the trees that the message asks for
.prefetch_noise(message)           compute ahead what the next trees read
"""

from __future__ import annotations

import time

import torch

from drafter.proposers.base import Proposer
from drafter.tree.frontier import TreeRequests
from drafter.tree.grow import grow
from drafter.tree.policy import TreePolicy
from workers.config import EngineConfig, TreeRules
from workers.kernels.select import TORCH, Kernels
from workers.sampling.grammar import Grammars
from workers.sampling.logits_state import pack_logits_states
from workers.settings import Rule, SamplingSettings
from workers.types import DraftCosts, DraftReply, DraftRequest, SamplingBatch


class Drafter:
    """Answers draft requests.

    is_hybrid: all children of a sampled node but the last are its most likely tokens. max_depth: of trees, if the draft
    model has a limit. grammars: required if a request has a grammar.
    """

    def __init__(
        self,
        proposer: Proposer,
        policy: TreePolicy,
        *,
        is_hybrid: bool = False,
        max_depth: int | None = None,
        kernels: Kernels = TORCH,
        grammars: Grammars | None = None,
    ) -> None:
        self.proposer, self._policy, self._is_hybrid, self._max_depth = proposer, policy, is_hybrid, max_depth
        self._kernels, self._grammars = kernels, grammars

    @torch.inference_mode()
    def draft(self, message: DraftRequest) -> DraftReply:
        """Feed the new rows and grow one tree for each request that wants one."""
        began = time.perf_counter()
        roots = self.proposer.extend(message)
        trees = TreeRequests.of(message, is_hybrid=self._is_hybrid, max_depth=self._max_depth)
        grown = grow(trees, roots, self.proposer, self._policy, kernels=self._kernels, grammars=self._grammars)
        return grown.reply(time.perf_counter() - began)

    @torch.inference_mode()
    def prefetch_noise(self, message: DraftRequest, device: torch.device) -> None:
        """Compute the noise that the next trees will read, wherever their roots will be, while the target verifies."""
        noisy = (message.num_nodes_B > 0) & (message.rule_B == Rule.COUPLED) & (message.sampling.temperature_B > 0)
        root_index_B = message.start_B + message.offsets.diff()
        # The next root is at most a tree's depth and one token further on; its tree may be as deep again.
        counts = 2 * message.max_depth_B + 1
        seeds, first, num = (values_B[noisy].tolist() for values_B in (message.sampling.seed_B, root_index_B, counts))
        self.proposer.vocab.noise.prepare(seeds, first, num, device)


def warm_up_requests(config: EngineConfig, width: int) -> list[DraftRequest]:
    """Return requests for a tree of every kind of node on the null page, whose contents are never read.

    Drafting them loads and compiles most of what is loaded or compiled on first use, before a real request waits for
    it. width: of the features; 0 = none.
    """
    assert config.draft is not None
    tree = config.draft.tree
    num_pages = config.pages_for(2)
    zero_1 = torch.zeros(1, dtype=torch.int32)
    costs = DraftCosts(
        nodes_T=torch.tensor([0, tree.num_speculative_tokens], dtype=torch.int32),
        verify_ms_T=torch.ones(2),
        draft_ms_3=torch.zeros(3),
        base_tokens_1=torch.ones(1),
        log_odds_D=torch.zeros(1),
    )
    return [
        DraftRequest(
            offsets=torch.tensor([0, 1], dtype=torch.int32),
            start_B=zero_1 + 1,
            token_M=zero_1,
            page_table_BP=zero_1.expand(1, num_pages).contiguous(),
            rule_B=zero_1 + rule.value,
            auto_B=zero_1 + tree.prune.auto,
            num_nodes_B=zero_1 + tree.num_speculative_tokens,
            max_depth_B=zero_1 + tree.longest_path,
            rules=TreeRules().each(lambda value: torch.tensor([value])),
            constraints_U=pack_logits_states([None]),
            sampling=SamplingBatch.stack([sampling]),
            costs=costs if tree.prune.auto else None,
            features_MH=torch.zeros(1, width, dtype=getattr(torch, config.dtype)) if width else None,
        )
        for rule, sampling in (
            (Rule.COUPLED, SamplingSettings(temperature=0.0)),
            (Rule.COUPLED, SamplingSettings()),
            (Rule.TRAVERSAL, SamplingSettings(top_p=0.999)),
        )
    ]
