"""Grow draft trees for a batch of requests: `grow` is a pure function of draft distributions.

Each level takes three steps:

  1. read      run the frontier through the draft model (`expand`) and apply the requests' constraints to its logits
  2. score     choose candidate children and estimate their chance to survive   (`drafter.tree.score`)
  3. grow      add children to the trees and choose the next frontier           (one of the two growths below)

There are two algorithms, because a threshold and a budget ask for different trees:

  `budgeted.BudgetedGrowth`      splits each node's budget among its children. Whether a node is expanded depends on its
                                 own path alone, so a threshold removes a subtree and changes nothing else, static trees
                                 keep their form, and sampled trees stay unbiased. It serves all trees but those of
  `best_first.BestFirstGrowth`   keeps the best candidates of the whole tree. It accepts more tokens with as many nodes,
                                 and serves dynamic trees under `auto` unless they are sampled.

`triton_growth` is either of them again, in static shapes that CUDA graphs can hold: a level of all trees in one replay,
without the host in between (`drafter.tree.tree_graphs`), where all requests of the message are as the service is
configured and none is sampled.

At the end, one cut through all trees under `auto` drops the nodes that cost more to verify than they are worth
(`drafter.tree.cost_model`). Sampled trees are never cut: their budgets are set before anything is drawn.

Probabilities and noise live on the logits' device; the trees' few integers live on the host, in numpy.
Legend: B requests, R rows of a request, F frontier nodes, K children, N nodes, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from drafter.tree.best_first import BestFirstGrowth
from drafter.tree.budgeted import BudgetedGrowth
from drafter.tree.cost_model import TreeCostModel
from drafter.tree.frontier import (
    DraftVocabulary,
    Frontier,
    NgramCandidates,
    RootLogits,
    TreeNodes,
    TreeRequests,
    UnprunedTrees,
)
from drafter.tree.growth import Growth
from drafter.tree.pack import cut, pack_probs, pack_trees, prune
from drafter.tree.policy import DynamicTreePolicy, TreePolicy
from drafter.tree.score import score
from drafter.tree.trace import trace_trees
from workers.kernels.select import TORCH, Kernels
from workers.sampling.grammar import Grammars
from workers.sampling.grammar_masks import grammar_masks
from workers.sampling.logits_edits import Columns, ConstrainedRow
from workers.sampling.logits_processors import constrain
from workers.sampling.logits_state import LogitsState
from workers.settings import Rule
from workers.transfer import to_device
from workers.types import DraftProbs, DraftReply, TreeBatch, TreeTrace


class WholeTrees(Protocol):
    """Grows all levels of the trees at once."""

    def __call__(self, trees: TreeRequests) -> UnprunedTrees | None:
        """Grow the trees; None = they are expanded level by level."""
        ...

    def learn(self, kept: TreeNodes, cost_model: TreeCostModel) -> None:
        """Learn from what the cost model kept of them how large the next ones may be."""
        ...


class DraftDistributions(Protocol):
    """A draft model, as far as trees are grown from it; see `drafter.proposers.base.Proposer`."""

    vocab: DraftVocabulary

    @property
    def tree_graphs(self) -> WholeTrees | None:
        """Grow all levels of the trees at once; None = they are expanded level by level."""
        ...

    def expand(self, frontier: Frontier) -> Tensor | NgramCandidates:
        """Return the logits [F, V] of one level of the trees, or n-gram candidates."""
        ...


class GrownTrees(NamedTuple):
    """One tree per request, pruned and packed, and the work that growing them took."""

    trees: TreeBatch
    probs: DraftProbs | None  # None = no node was sampled
    pruned_BD: np.ndarray  # int32: nodes of depth 1 .. D that pruning kept out
    num_levels: int  # levels run, the roots' included
    num_run: int  # rows run through the draft model; roots not counted
    trace: TreeTrace | None = None  # None = no request is traced

    def reply(self, seconds: float) -> DraftReply:
        """Return the message that answers a DraftRequest. seconds: of this step on the drafter's clock."""
        return DraftReply(
            trees=self.trees,
            probs=self.probs,
            pruned_GD=torch.from_numpy(self.pruned_BD),
            num_levels=self.num_levels,
            num_run=self.num_run,
            seconds=seconds,
            trace=self.trace,
        )


def grow(
    trees: TreeRequests,
    roots: RootLogits,
    model: DraftDistributions,
    policy: TreePolicy,
    *,
    kernels: Kernels = TORCH,
    grammars: Grammars | None = None,
) -> GrownTrees:
    """Grow one tree per request.

    Args:
        roots: the draft's distribution at each root; not asked for where the model's `tree_graphs` grow the trees.
        model: `expand` is called once per level below the roots, only with nodes that need it.
        grammars: required if a request has a grammar.
    """
    cost_model = TreeCostModel(trees.costs) if trees.costs is not None else None
    grown, whole = None, model.tree_graphs
    if whole is not None and _only_penalize(trees.logits_states):
        grown = whole(trees)
    if grown is None:
        whole = None
        read = roots() if callable(roots) else roots
        constraints = _PathConstraints(trees.logits_states, model.vocab, grammars)
        grown = _by_level(trees, read, model, policy, cost_model, kernels, constraints)
    return _finish(grown, trees, cost_model, whole)


def _by_level(
    trees: TreeRequests,
    roots: Tensor | NgramCandidates,
    model: DraftDistributions,
    policy: TreePolicy,
    cost_model: TreeCostModel | None,
    kernels: Kernels,
    constraints: _PathConstraints,
) -> UnprunedTrees:
    limits, sampling = trees.limits, trees.sampling
    dynamic = policy if isinstance(policy, DynamicTreePolicy) else None
    is_best_first_B = ~limits.is_sampled_B & (dynamic is not None)
    growths: list[Growth] = []
    best_first, budgeted = np.flatnonzero(is_best_first_B), np.flatnonzero(~is_best_first_B)
    if dynamic is not None and len(best_first):
        growths.append(BestFirstGrowth(best_first, trees, cost_model, has_leaf_siblings=dynamic.has_leaf_siblings))
    if len(budgeted) or not len(best_first):
        growths.append(BudgetedGrowth(budgeted, trees, policy, cost_model))
    _prepare_noise(roots, trees, model.vocab)
    has_truncation = sampling.needs.truncates  # read on the host, once for all levels
    num_levels = num_run = 0
    while True:
        frontier, owner_F = _merge([growth.frontier() for growth in growths])
        if not len(frontier.request_F):
            break
        draft = model.expand(frontier) if num_levels else _rows(roots, frontier.request_F)
        draft, is_dead_F = constraints.apply(draft, frontier)
        num_run += len(frontier.request_F) if num_levels else 0
        num_levels += 1
        scores = score(
            draft,
            sampling.rows(torch.from_numpy(frontier.request_F)),
            limits.rule_B[frontier.request_F],
            trees.root_index_B[frontier.request_F] + frontier.depth,
            policy.max_children,
            model.vocab,
            kernels,
            has_truncation=has_truncation,
        )
        if is_dead_F is not None:
            scores = scores.without_children(is_dead_F)
        for i, growth in enumerate(growths):
            if len(growths) == 1:
                growth.add_children(frontier, scores)
            elif (owner_F == i).any():
                growth.add_children(frontier.rows(owner_F == i), scores.rows(owner_F == i))
    nodes = TreeNodes.concatenate([growth.nodes() for growth in growths])
    return UnprunedTrees(
        nodes=nodes.rows(np.lexsort((nodes.row_N, nodes.request_N))),
        sampled=[nodes for growth in growths for nodes in growth.sampled],
        pruned_BD=np.add.reduce([growth.pruned_BD for growth in growths], dtype=np.int32),
        num_levels=num_levels,
        num_run=num_run,
        pruned=[] if trees.traced_B is None else [nodes for growth in growths for nodes in growth.pruned()],
    )


def _finish(
    grown: UnprunedTrees, asked: TreeRequests, cost_model: TreeCostModel | None, whole: WholeTrees | None
) -> GrownTrees:
    """Prune by thresholds what has not been, cut the trees under `auto`, then pack all of them.

    whole: has grown them; None = level by level.
    """
    nodes, sampled, pruned_BD, num_levels, num_run, kept_out = grown
    nodes, removed, failed = prune(nodes, asked.limits)
    np.add.at(pruned_BD, (removed.request_N, removed.depth_N - 1), 1)
    is_kept_N, kept = None, nodes
    if cost_model is not None:
        is_kept_N = cut(nodes, asked.limits, cost_model, cost_model.draft_ms(num_levels, num_run))
        np.add.at(pruned_BD, (nodes.request_N[~is_kept_N], nodes.depth_N[~is_kept_N] - 1), 1)
        kept = nodes.rows(is_kept_N)
        if whole is not None:
            whole.learn(kept, cost_model)
    trees = pack_trees(kept, len(pruned_BD))
    trace = None if asked.traced_B is None else trace_trees(nodes, is_kept_N, [*kept_out, failed], asked.traced_B)
    return GrownTrees(trees, pack_probs(sampled, trees), pruned_BD, num_levels, num_run, trace)


def _only_penalize(logits_states: Mapping[int, LogitsState]) -> bool:
    """Return True if penalties are the only constraints: the tree graphs apply no others."""
    return all(logits_state.has_only_penalties for logits_state in logits_states.values())


def _prepare_noise(roots: Tensor | NgramCandidates, trees: TreeRequests, vocab: DraftVocabulary) -> None:
    """Compute the noise of all levels in one call. What a shallow tree leaves unread, the next steps' trees read."""
    if isinstance(roots, NgramCandidates):
        return  # noise at single tokens is cheaper than a row of it
    needs_B = (trees.limits.rule_B == Rule.COUPLED.value) & (trees.sampling.temperature_B > 0).numpy()
    seeds, first, num = (
        values_B[needs_B].tolist()
        for values_B in (trees.sampling.seed_B.numpy(), trees.root_index_B, trees.limits.max_depth_B)
    )
    vocab.noise.prepare(seeds, first, num, roots.device)


def _merge(frontiers: list[Frontier]) -> tuple[Frontier, np.ndarray]:
    """Return one frontier sorted by request, and which of `frontiers` each row came from."""
    if len(frontiers) == 1:
        return frontiers[0], np.zeros(len(frontiers[0].request_F), dtype=np.int64)
    owner_F = np.repeat(np.arange(len(frontiers)), [len(frontier.request_F) for frontier in frontiers])
    arrays = (np.concatenate(parts) for parts in zip(*(frontier[1:] for frontier in frontiers), strict=True))
    depth = max((frontier.depth for frontier in frontiers if len(frontier.request_F)), default=0)
    merged = Frontier(depth, *arrays)
    order = np.argsort(merged.request_F, kind="stable")
    return merged.rows(order), owner_F[order]


def _rows(roots: Tensor | NgramCandidates, at: np.ndarray) -> Tensor | NgramCandidates:
    return roots.rows(at) if isinstance(roots, NgramCandidates) else roots[to_device(at, roots.device)]


class _PathConstraints:
    """Applies the requests' constraints to draft logits, along each node's own path."""

    def __init__(
        self, logits_states: Mapping[int, LogitsState], vocab: DraftVocabulary, grammars: Grammars | None
    ) -> None:
        self._logits_states, self._grammars = logits_states, grammars
        self._has_grammar = any(state.constraints.grammar for state in logits_states.values())
        self._path: dict[tuple[int, int], list[int]] = {}  # tokens below the root, by request and row
        self._vocab = vocab

    def apply(
        self, draft: Tensor | NgramCandidates, frontier: Frontier
    ) -> tuple[Tensor | NgramCandidates, np.ndarray | None]:
        """Return the constrained logits of a frontier; every level must be passed, from the roots on.

        The second result is bool [F], the nodes that no token of the draft vocabulary may follow, or None. N-gram
        candidates are proposed as they are, since the target's own constraints decide; only grammars mask them.
        """
        if not self._logits_states or (isinstance(draft, NgramCandidates) and not self._has_grammar):
            return draft, None
        rows = []
        fields = (frontier.request_F, frontier.row_F, frontier.parent_row_F, frontier.token_F)
        nodes = zip(*(field.tolist() for field in fields), strict=True)
        for i, (request, row, parent, token) in enumerate(nodes):
            if request in self._logits_states:
                path = [*self._path[request, parent], token] if row else []
                self._path[request, row] = path
                rows.append(ConstrainedRow(i, self._logits_states[request], path))
        columns = self._vocab.columns if isinstance(draft, Tensor) else Columns(0, self._vocab.target_size)
        masks = grammar_masks(rows, columns, self._grammars) if self._has_grammar else None
        is_dead_F = None
        if masks is not None:
            is_dead_F = np.zeros(len(frontier.request_F), dtype=bool)
            is_dead_F[masks.row_Q] = masks.is_dead_Q
        if isinstance(draft, Tensor):
            return constrain(draft, rows, columns, masks), is_dead_F
        if masks is not None:
            token_QK, log_q_FK = draft.token_FK[masks.row_Q], draft.log_q_FK.copy()
            is_allowed_QK = np.take_along_axis(masks.allowed(columns.width), token_QK, axis=1)
            log_q_FK[masks.row_Q] = np.where(is_allowed_QK, log_q_FK[masks.row_Q], -np.inf)
            draft = NgramCandidates(draft.token_FK, log_q_FK)
        return draft, is_dead_F
