"""Grows draft trees level by level for a batch of requests: `grow` is a pure function of draft distributions.

One level:
  1. read      the draft's distribution q at every frontier node (`expand`), edited by the request's constraints
  2. score     the candidate children and their chance to survive            (`drafter.tree.score`)
  3. take      each request's growth picks children and the next frontier    (`drafter.tree.budgeted`,
  `drafter.tree.best_first`)
and at the end, for requests under `auto`, one cut through all trees of the batch where a further node costs more than
it is worth (`drafter.tree.cost_model`). Sampled trees are never cut: their budgets are set before anything is drawn.

Requests that are all searched may grow in one go instead (`drafter.tree.tree_graphs`), up to that cut.

Probabilities and noise live on the logits' device; the trees' few integers live on the host, in numpy.
Legend: B requests, R rows of a request, F frontier nodes, K children, N nodes, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from drafter.tree.best_first import Search
from drafter.tree.budgeted import Dealt
from drafter.tree.cost_model import TreeCostModel
from drafter.tree.frontier import Candidates, DraftVocabulary, Frontier, GrowLimits, Nodes, SampledNodes, Uncut
from drafter.tree.policy import DynamicTreePolicy, TreePolicy
from drafter.tree.score import Scores, score
from drafter.tree.tree_graphs import TreeGraphs
from workers.kernels.select import TORCH, Kernels
from workers.sampling.logits_edits import ConstrainedRow
from workers.sampling.logits_processors import constrain
from workers.sampling.logits_state import LogitsState
from workers.transfer import to_device
from workers.types import DraftCosts, DraftProbs, Rule, SamplingBatch, TreeBatch

Expand = Callable[[Frontier], Tensor | Candidates]
"""Runs one level through the draft model and returns its logits [F, V], or n-gram candidates."""


class Growth(Protocol):
    """How some requests' trees grow."""

    def frontier(self) -> Frontier:
        """The nodes to be read next; none = this growth is done."""
        ...

    def take(self, level: Frontier, scores: Scores) -> None:
        """The scores of the frontier's candidate children."""
        ...

    def nodes(self) -> Nodes:
        """Every node of every tree, the roots included."""
        ...


class Grown(NamedTuple):
    trees: TreeBatch
    probs: DraftProbs | None  # None = nothing was sampled
    pruned_BD: np.ndarray  # int32: nodes of depth 1 .. D that pruning kept out
    num_levels: int  # levels read, the roots' included
    num_run: int  # nodes run through the draft model, the roots not counted


def grow(
    roots: Tensor | Candidates,
    root_token_B: np.ndarray,
    root_index_B: np.ndarray,
    *,
    limits: GrowLimits,
    sampling: SamplingBatch,
    policy: TreePolicy,
    expand: Expand,
    vocab: DraftVocabulary,
    logits_states: dict[int, LogitsState] | None = None,
    costs: DraftCosts | None = None,
    kernels: Kernels = TORCH,
    tree_graphs: TreeGraphs | None = None,
) -> Grown:
    """One tree per request.

    roots: the draft's distribution at each root. root_index_B: index of the token drawn at the root (the root's
    position + 1); a child of a depth-d node stands for index root_index + d. sampling: on the host. `expand` is called
    once per level below the roots, only with nodes that need it. logits_states: constrained requests. costs: needed by
    `limits.auto_B`. tree_graphs: grows all levels at once where it can; then nothing is expanded.
    """
    budget = TreeCostModel(costs) if costs is not None else None
    pruned_BD = np.zeros((len(root_token_B), int(limits.max_depth_B.max(initial=0))), dtype=np.int32)
    logits_states = logits_states or {}
    are_simple = all(logits_state.has_only_penalties for logits_state in logits_states.values())
    if tree_graphs is not None and costs is not None and are_simple and _is_searched(limits, policy).all():
        assert isinstance(roots, Tensor), "only draft models are tree_graphs"
        uncut = tree_graphs(roots, root_token_B, root_index_B, limits, sampling, logits_states, costs.calibration_D2)
        if uncut is not None:
            return _grown(uncut, [], limits, budget, pruned_BD)
    _prepare_noise(roots, root_index_B, limits, sampling, vocab)
    growths = _growths(root_token_B, root_index_B, limits, sampling, policy, budget, pruned_BD)
    editor = _Editor(logits_states, vocab)
    has_truncation = sampling.needs.truncates  # asked on the host, once for all levels
    num_levels = num_run = 0
    while True:
        level, owner_F = _merge([growth.frontier() for growth in growths])
        if not len(level.request_F):
            break
        draft = expand(level) if num_levels else _take_rows(roots, level.request_F)
        num_run += len(level.request_F) if num_levels else 0
        num_levels += 1
        if editor.is_needed:
            draft = editor.edit(draft, level)
        params = sampling.rows(torch.from_numpy(level.request_F))
        index_F = root_index_B[level.request_F] + level.depth
        rule_F = limits.rule_B[level.request_F]
        scores = score(
            draft, params, rule_F, index_F, policy.max_children, vocab, kernels, has_truncation=has_truncation
        )
        for i, growth in enumerate(growths):
            if len(growths) == 1:
                growth.take(level, scores)
            elif (owner_F == i).any():
                growth.take(level.rows(owner_F == i), scores.rows(owner_F == i))
    uncut = Uncut(Nodes.concatenate([growth.nodes() for growth in growths]), num_levels, num_run)
    sampled = [nodes for growth in growths if isinstance(growth, Dealt) for nodes in growth.sampled]
    return _grown(uncut, sampled, limits, budget, pruned_BD)


def _grown(
    uncut: Uncut,
    sampled: Sequence[SampledNodes],
    limits: GrowLimits,
    budget: TreeCostModel | None,
    pruned_BD: np.ndarray,
) -> Grown:
    nodes, num_levels, num_run = uncut
    if budget is not None:
        nodes = _cut(nodes, limits, budget, budget.draft_ms(num_levels, num_run), pruned_BD)
    trees = _pack(nodes, len(pruned_BD))
    return Grown(trees, _pack_probs(sampled, trees), pruned_BD, num_levels, num_run)


def _prepare_noise(
    roots: Tensor | Candidates,
    root_index_B: np.ndarray,
    limits: GrowLimits,
    sampling: SamplingBatch,
    vocab: DraftVocabulary,
) -> None:
    """The noise of all levels in one call. What a shallow tree does not read, the next steps' trees do."""
    if isinstance(roots, Candidates):
        return  # noise at single tokens is cheaper than a row of it
    needs_B = (limits.rule_B == Rule.COUPLED.value) & (sampling.temperature_B > 0).numpy()
    seeds = sampling.seed_B.numpy()[needs_B].tolist()
    vocab.noise.prepare(seeds, root_index_B[needs_B].tolist(), limits.max_depth_B[needs_B].tolist(), roots.device)


def _is_searched(limits: GrowLimits, policy: TreePolicy) -> np.ndarray:
    """Bool [B]: `auto` searches dynamic trees best-first, if children may be reconsidered; other trees are dealt."""
    return (limits.auto_B > 0) & (limits.rule_B < Rule.TRAVERSAL.value) & isinstance(policy, DynamicTreePolicy)


def _growths(
    root_token_B: np.ndarray,
    root_index_B: np.ndarray,
    limits: GrowLimits,
    sampling: SamplingBatch,
    policy: TreePolicy,
    budget: TreeCostModel | None,
    pruned_BD: np.ndarray,
) -> list[Growth]:
    is_searched_B = _is_searched(limits, policy)
    growths: list[Growth] = []
    if not is_searched_B.all() or not len(is_searched_B):
        growths.append(
            Dealt(
                np.flatnonzero(~is_searched_B), root_token_B, root_index_B, limits, sampling, policy, budget, pruned_BD
            )
        )
    if is_searched_B.any():
        assert budget is not None, "auto needs costs"
        growths.append(Search(np.flatnonzero(is_searched_B), root_token_B, limits, budget))
    return growths


def _merge(levels: list[Frontier]) -> tuple[Frontier, np.ndarray]:
    """One level sorted by request, and which of `levels` each row came from."""
    if len(levels) == 1:
        return levels[0], np.zeros(len(levels[0].request_F), dtype=np.int64)
    owner_F = np.repeat(np.arange(len(levels)), [len(level.request_F) for level in levels])
    arrays = (np.concatenate(parts) for parts in zip(*(level[1:] for level in levels), strict=True))
    both = Frontier(max(level.depth for level in levels if len(level.request_F)) if len(owner_F) else 0, *arrays)
    order = np.argsort(both.request_F, kind="stable")
    return both.rows(order), owner_F[order]


def _take_rows(draft: Tensor | Candidates, rows: np.ndarray) -> Tensor | Candidates:
    if isinstance(draft, Candidates):
        return Candidates(draft.token_FK[rows], draft.log_q_FK[rows])
    return draft[to_device(rows, draft.device)]


class _Editor:
    """Applies constraints to draft logits, along each node's own path."""

    def __init__(self, logits_states: dict[int, LogitsState], vocab: DraftVocabulary) -> None:
        self.is_needed = bool(logits_states)
        self._logits_states = logits_states
        self._path: dict[tuple[int, int], list[int]] = {}  # tokens below the root, by request and row
        self._vocab = vocab

    def edit(self, draft: Tensor | Candidates, level: Frontier) -> Tensor | Candidates:
        if isinstance(draft, Candidates):
            return draft  # what lookup found is proposed as it is; the target's own constraints decide
        rows = []
        columns = (level.request_F, level.row_F, level.parent_row_F, level.token_F)
        nodes = zip(*(column.tolist() for column in columns), strict=True)
        for i, (request, row, parent, token) in enumerate(nodes):
            if request in self._logits_states:
                path = [*self._path[request, parent], token] if row else []
                self._path[request, row] = path
                rows.append(ConstrainedRow(i, self._logits_states[request], path))
        return constrain(draft, rows, self._vocab.columns)


def _cut(nodes: Nodes, limits: GrowLimits, budget: TreeCostModel, draft_ms: float, pruned_BD: np.ndarray) -> Nodes:
    """Without the nodes that are not worth their verification; the best of each request stays, so that none starves."""
    may_cut_N = (limits.auto_B > 0)[nodes.request_N] & (limits.rule_B < Rule.TRAVERSAL.value)[nodes.request_N]
    open_N = may_cut_N & (nodes.row_N > 0)
    if not open_N.any():
        return nodes
    entries = np.flatnonzero(open_N)
    order = np.lexsort((nodes.row_N[entries], nodes.request_N[entries], -nodes.weight_N[entries]))
    ranked = entries[order]
    # Nodes that stay whatever the budget says: other requests' trees.
    fixed = nodes.weight_N[(nodes.row_N > 0) & ~may_cut_N]
    count = budget.best_count(nodes.weight_N[ranked], draft_ms, fixed)
    keep_N = ~open_N
    keep_N[ranked[:count]] = True
    first_of_request = np.unique(nodes.request_N[ranked], return_index=True)[1]
    keep_N[ranked[first_of_request]] = True
    cut = np.flatnonzero(~keep_N)
    np.add.at(pruned_BD, (nodes.request_N[cut], nodes.depth_N[cut] - 1), 1)
    return nodes.rows(keep_N)


def _pack(nodes: Nodes, num_requests: int) -> TreeBatch:
    """Rows renumbered without gaps, by request, then row."""
    order = np.lexsort((nodes.row_N, nodes.request_N))
    nodes = nodes.rows(order)
    count_B = np.bincount(nodes.request_N, minlength=num_requests)
    offsets = np.concatenate([[0], count_B.cumsum()])
    row_N = np.arange(len(order)) - offsets[nodes.request_N]
    new_row = np.full((num_requests, int(nodes.row_N.max(initial=0)) + 1), -1, dtype=np.int64)
    new_row[nodes.request_N, nodes.row_N] = row_N
    parent_N = np.where(nodes.parent_row_N < 0, -1, new_row[nodes.request_N, nodes.parent_row_N])
    ancestors_N = np.uint64(1) << row_N.astype(np.uint64)
    for depth in range(1, int(nodes.depth_N.max(initial=0)) + 1):
        (at,) = (nodes.depth_N == depth).nonzero()
        ancestors_N[at] |= ancestors_N[offsets[nodes.request_N[at]] + parent_N[at]]
    return TreeBatch(
        offsets=torch.from_numpy(offsets.astype(np.int32)),
        token_N=torch.from_numpy(nodes.token_N.astype(np.int32)),
        parent_N=torch.from_numpy(parent_N.astype(np.int32)),
        depth_N=torch.from_numpy(nodes.depth_N.astype(np.int32)),
        ancestors_N=torch.from_numpy(ancestors_N.view(np.int64)),
        kind_N=torch.from_numpy(nodes.kind_N),
        weight_N=torch.from_numpy(nodes.weight_N.astype(np.float32)),
    )


def _pack_probs(sampled: Sequence[SampledNodes], trees: TreeBatch) -> DraftProbs | None:
    """The distributions of the nodes whose children were sampled, by the rows of `trees` (which keep their places)."""
    if not sampled:
        return None
    at_F = np.concatenate([trees.offsets.numpy()[nodes.request_F] + nodes.row_F for nodes in sampled])
    has_FS = [nodes.weight_FS > 0 for nodes in sampled]
    size_F = np.concatenate([has.sum(1) for has in has_FS])
    id_S = np.concatenate([nodes.id_FS[has] for nodes, has in zip(sampled, has_FS, strict=True)])
    weight_S = np.concatenate([nodes.weight_FS[has] for nodes, has in zip(sampled, has_FS, strict=True)])
    if (at_F[1:] < at_F[:-1]).any():  # of several requests, level by level
        order = np.argsort(np.repeat(at_F, size_F), kind="stable")
        id_S, weight_S = id_S[order], weight_S[order]
    offsets = np.zeros(len(trees.token_N) + 1, dtype=np.int32)
    offsets[at_F + 1] = size_F
    return DraftProbs(
        offsets=torch.from_numpy(offsets.cumsum(dtype=np.int32)),
        id_S=torch.from_numpy(id_S.astype(np.int32)),
        weight_S=torch.from_numpy(weight_S.astype(np.int32)),
    )
