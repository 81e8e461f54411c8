"""Whole trees at once: the search of `drafter.search` in static shapes, so that one CUDA graph grows every level.

    grow_unrolled(...) -> Rows            the growth: a function of tensors that looks at no value on the host
    Unrolled(run, plan, ...)              the buffers that it reads, and its graphs
        .start = Start(...)               where this step's trees begin, told by the draft model's `extend`
        (roots, ...) -> Uncut | None      one replay, one copy to the host

A tree has 1 + N rows, whatever it holds; what is not there weighs nothing. A level is

    1. read     every row of the tree so far, in one forward pass
    2. score    the children of the rows that the last level brought, behind the penalties of their own paths
    3. keep     each request's best of tree and children: the next tree, breadth-first, row 0 the root

Rows are paid for whether they hold a node or not. So a node that was read is simply read again, in whatever row it has
come to, and neither its keys and values nor what it hands to its children has to follow it there. For the same reason
costs are not asked while a tree grows: every node that is kept is read, as long as there are levels. That makes it the
best tree that there is, where `Search` may run out of rows; the cut at the end is the same.

Legend: B requests of a bucket, G of a step, N nodes of a tree, R = 1 + N rows, F rows that are scored, K children,
C = R + F K candidates, D levels, V draft vocabulary, H width of a feature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.budget import calibrated
from drafter.level import DraftVocabulary, GrowLimits, Nodes, Uncut
from drafter.prune import passes_min, passes_path
from drafter.score import Best, best_children, confidence_tau, kinds
from workers.config import EngineConfig, TreeConfig
from workers.constraints import lay_counts, penalize
from workers.graphs import MAX_ROWS, Planner, Recorder, Size
from workers.kernels.choose import Kernels
from workers.sampling import process_blindly
from workers.standings import Standing
from workers.types import AttentionMetadata, NodeKind, Rule, SamplingBatch, as_signed64

MAX_LOGITS = 1 << 24
"""Logits of one level, rows without a node included: beyond, work outweighs the launches that a graph saves."""

_EDITS = ((False, False), (True, False), (True, True))
"""What may be done to logits, (cuts, penalties): a graph for each. Who asks for no cut is not cut."""

Run = Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(plan, tokens_N, features_NH, positions_N) -> (features for the children [N, H], logits [N, V]) of packed rows."""

Read = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The same of all rows but the roots: (token, feature, depth, ancestors), each [B, N, ...] -> [B, N, ...]."""


class Asks(NamedTuple):
    """What each request asks for, float64 [B], in which all of it is exact: it travels to the device as one table.
    Zeros ask for nothing."""

    token_B: Tensor  # the root's
    base_B: Tensor  # the root's slot and position
    has_noise_B: Tensor  # 1 = children follow the target's noise
    num_nodes_B: Tensor
    max_depth_B: Tensor
    min_prob_B: Tensor
    path_prob_B: Tensor
    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    tau_B: Tensor  # see `drafter.score.confidence_tau`
    repetition_B: Tensor  # penalties
    frequency_B: Tensor
    presence_B: Tensor

    @staticmethod
    def table(
        token_B: np.ndarray,
        base_B: Tensor,
        has_noise_B: np.ndarray,
        limits: GrowLimits,
        sampling: SamplingBatch,
        penalties_B3: np.ndarray,
    ) -> Tensor:
        """[B, columns] on the host: `Asks(*table.unbind(1))` is what it tells."""
        columns = (
            token_B, base_B, has_noise_B,
            limits.num_nodes_B, limits.max_depth_B, limits.min_prob_B, limits.path_prob_B,
            sampling.temperature_B, sampling.top_k_B, sampling.top_p_B, sampling.min_p_B,
            confidence_tau(sampling.temperature_B.numpy(), limits.rule_B == Rule.COUPLED.value),
            *penalties_B3.T,
        )  # fmt: skip
        return torch.stack([torch.as_tensor(column).double() for column in columns], dim=1)

    def scoring(self, rows_each: int) -> Scoring:
        """For so many rows of each request."""
        params = SamplingBatch(
            temperature_B=self.temperature_B.float().repeat_interleave(rows_each),
            top_k_B=self.top_k_B.int().repeat_interleave(rows_each),
            top_p_B=self.top_p_B.float().repeat_interleave(rows_each),
            min_p_B=self.min_p_B.float().repeat_interleave(rows_each),
            seed_B=self.token_B.long().repeat_interleave(rows_each),  # of no use: noise is given
        )
        tau_B = torch.where(self.tau_B > 0, self.tau_B, 1).float()  # nobody's rows must not be NaN
        return Scoring(params, tau_B.repeat_interleave(rows_each))


class Scoring(NamedTuple):
    """How logits [F, V] become scores and weights, see `drafter.score`."""

    params: SamplingBatch
    tau_F: Tensor


class Rows(NamedTuple):
    """Nodes, or candidates for one, [B, R] or [B, C]. What weighs 0 is none, whatever else is said of it."""

    token: Tensor  # int64
    parent: Tensor  # int64, its row; a root is its own
    depth: Tensor  # int64
    weight: Tensor  # float32
    path_prob: Tensor  # float64
    column: Tensor  # int64, the token's in the logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a growth of static shape is made for."""

    tree: TreeConfig
    vocab: DraftVocabulary
    kernels: Kernels
    has_cuts: bool  # some request may have min-p, top-k or top-p
    has_penalties: bool


def grow_unrolled(
    roots_BV: Tensor,
    features_BH: Tensor,
    noise_BDV: Tensor,
    count_BV: Tensor,
    asks: Asks,
    fit_D2: Tensor,
    read: Read,
    rules: Rules,
) -> Rows:
    """The trees [B, R].

    roots_BV, features_BH: the draft's logits at each root, and what the root hands to its children. noise_BDV: the
    target's noise for the children of each level. count_BV: what `penalize` is told of the text so far. fit_D2:
    calibration of each level's children.
    """
    num_nodes = rules.tree.num_nodes
    row_N = torch.arange(1, 1 + num_nodes, device=roots_BV.device)
    is_root_R = torch.arange(1 + num_nodes, device=roots_BV.device) == 0
    is_root_BR = is_root_R.expand(len(roots_BV), -1)
    none_BR = torch.zeros_like(is_root_BR, dtype=torch.int64)
    rows = Rows(
        asks.token_B.long()[:, None] * is_root_R, none_BR, none_BR, is_root_BR.float(), is_root_BR.double(), none_BR
    )
    # What an earlier step left there is nobody's.
    noise_BDV = noise_BDV * asks.has_noise_B.float()[:, None, None]
    hidden_BRH, source_BR = features_BH[:, None], none_BR
    logits_BFV, scoring, of_rows = roots_BV[:, None], asks.scoring(1), asks.scoring(num_nodes)
    path_BFN = none_BR[:, None, 1:]  # which rows but the root are on the way to each that is scored
    for depth in range(rules.tree.max_depth):
        if depth > 0:
            feature_BRH = hidden_BRH.gather(1, source_BR[:, :, None].expand(-1, -1, hidden_BRH.shape[-1]))
            ancestors_BR = _ancestors(rows.parent, depth)
            given = (rows.token, feature_BRH, rows.depth, ancestors_BR)
            hidden_BNH, logits_BFV = read(*(field[:, 1:] for field in given))
            hidden_BRH, scoring = torch.cat((features_BH[:, None], hidden_BNH), dim=1), of_rows
            path_BFN = ancestors_BR[:, 1:, None] >> row_N & 1
        if rules.has_penalties:
            logits_BFV = _penalized(logits_BFV.float(), count_BV, path_BFN, rows.column[:, 1:], asks)
        best = _score(logits_BFV, noise_BDV[:, depth], scoring, rules)
        rows, source_BR = _keep(rows, _children(rows, depth, best, asks, fit_D2[depth]), asks.num_nodes_B)
    return rows


def _penalized(logits_BFV: Tensor, count_BV: Tensor, path_BFN: Tensor, column_BN: Tensor, asks: Asks) -> Tensor:
    """As `workers.constraints` does it, of every column at once."""
    on_path_BFV = torch.zeros_like(logits_BFV)
    on_path_BFV.scatter_add_(2, column_BN[:, None].expand_as(path_BFN), path_BFN.to(logits_BFV.dtype))
    settings = (asks.repetition_B, asks.frequency_B, asks.presence_B)
    return penalize(logits_BFV, count_BV[:, None], on_path_BFV, *(each_B.float()[:, None, None] for each_B in settings))


def _score(logits_BFV: Tensor, noise_BV: Tensor, scoring: Scoring, rules: Rules) -> Best:
    """The candidate children of each row, [B, F, ...]."""
    is_cut, cut = rules.has_cuts, rules.kernels.cut
    x_FV = process_blindly(logits_BFV.flatten(0, 1), scoring.params, has_min_p=is_cut, has_top=is_cut, cut=cut)
    log_q_FV = x_FV.log_softmax(-1)
    scored_FV = (log_q_FV.view_as(logits_BFV) + noise_BV[:, None]).flatten(0, 1)
    best = best_children(log_q_FV, scored_FV, scoring.tau_F, rules.tree.max_children, rules.vocab, rules.kernels)
    return Best(*(field.unflatten(0, logits_BFV.shape[:2]) for field in best))


def _children(rows: Rows, depth: int, best: Best, asks: Asks, fit_2: Tensor) -> Rows:
    """The candidates [B, F K] that the rows of this depth bring, in the order of their parents, best first.

    best: of the root (depth 0), or of all other rows.
    """
    first, num_scored = min(depth, 1), best.top_prob_F.shape[1]
    parents = Rows(*(field[:, first : first + num_scored] for field in rows))
    is_open_BF = (
        (parents.depth == depth)
        & (depth < asks.max_depth_B[:, None])
        & passes_path(parents.path_prob, asks.path_prob_B[:, None])
        & passes_min(best.top_prob_F, asks.min_prob_B[:, None])
    )
    weight_BFK = parents.weight[:, :, None] * calibrated(best.weight_FK, fit_2)
    is_weight_BFK = is_open_BF[:, :, None] & (weight_BFK > 0)  # what is not a number is none
    row_F1 = torch.arange(first, first + num_scored, device=weight_BFK.device)[:, None]
    return Rows(
        token=best.token_FK.flatten(1),
        parent=row_F1.expand_as(weight_BFK).flatten(1),
        depth=torch.full_like(weight_BFK, depth + 1, dtype=torch.int64).flatten(1),
        weight=torch.where(is_weight_BFK, weight_BFK, 0.0).flatten(1),
        path_prob=(parents.path_prob[:, :, None] * best.prob_FK).flatten(1),
        column=best.column_FK.flatten(1),
    )


def _keep(rows: Rows, children: Rows, num_nodes_B: Tensor) -> tuple[Rows, Tensor]:
    """The root and the num_nodes best of each request, in their order; the earlier of equals. Also [B, R] the row that
    each one's parent had in `rows`."""
    pool = Rows(*(torch.cat(pair, dim=1) for pair in zip(rows, children, strict=True)))
    (_, R), (_, C) = rows.weight.shape, pool.weight.shape
    best = pool.weight.sort(dim=1, descending=True, stable=True)
    rank_R = torch.arange(R, device=pool.weight.device)
    is_kept_BR = (best.values[:, :R] > 0) & (rank_R <= num_nodes_B[:, None])
    kept_BR = torch.where(is_kept_BR, best.indices[:, :R], C).sort(dim=1).values  # C = none
    at_BR = kept_BR.clamp(max=C - 1)
    chosen = Rows(*(field.gather(1, at_BR) for field in pool))
    row_BC = torch.zeros_like(pool.parent).scatter(1, at_BR, rank_R.expand_as(at_BR))
    parent_BR, weight_BR = row_BC.gather(1, chosen.parent), chosen.weight * (kept_BR < C)
    return chosen._replace(parent=parent_BR, weight=weight_BR), chosen.parent


def _ancestors(parent_BR: Tensor, depth: int) -> Tensor:
    """int64 bitmasks [B, R] of each row's path, itself included, in trees of that depth; twice as far each time."""
    row_R = torch.arange(parent_BR.shape[1], device=parent_BR.device)
    mask_BR = (torch.ones_like(row_R) << row_R).expand_as(parent_BR)
    for _ in range(depth.bit_length()):
        mask_BR = mask_BR | mask_BR.gather(1, parent_BR)
        parent_BR = parent_BR.gather(1, parent_BR)
    return mask_BR


class Start(NamedTuple):
    """Where the trees of a step begin."""

    base_G: Tensor  # int32 on the host, the roots' slots and positions
    page_table_GP: Tensor  # int32 on the host
    features_GH: Tensor  # what each root hands to its children


def buckets(max_requests: int, num_nodes: int, vocab_size: int) -> list[int]:
    """Numbers of requests that there are graphs for, the largest first: powers of two, as in `workers.graphs`."""
    top = Size.of(1, max_requests).requests
    return [
        requests
        for requests in (top >> i for i in range(top.bit_length()))
        if requests * num_nodes <= min(MAX_ROWS, MAX_LOGITS // vocab_size)
    ]


class Unrolled:
    """`grow_unrolled` over static buffers, replayed for as many requests as the next bucket has.

    run, plan: the draft model's pass over tree rows, and how its attention is planned: by kernels whose plans
    stay in place. example_1H: a feature, on the device. is_captured: see `workers.graphs.Graphs`.
    """

    def __init__(
        self,
        run: Run,
        plan: Planner,
        example_1H: Tensor,
        vocab: DraftVocabulary,
        kernels: Kernels,
        config: EngineConfig,
        *,
        is_captured: bool = True,
    ) -> None:
        assert config.draft is not None
        self.start: Start
        self._run, self._plan, self._page_size = run, plan, config.page_size
        self._tree, self._vocab, self._kernels = config.draft.tree, vocab, kernels
        self._table_width = config.pages_for(config.max_model_len)
        sizes = buckets(config.max_num_seqs, self._tree.num_nodes, vocab.size)
        B, D, V = max(sizes, default=0), self._tree.max_depth, vocab.size
        self._features_BH = example_1H.new_zeros(B, example_1H.shape[1])
        self._roots_BV = example_1H.new_zeros(B, V, dtype=torch.float32)
        self._noise_BDV = example_1H.new_zeros(B, D, V, dtype=torch.float32)
        self._count_BV = example_1H.new_zeros(B, V, dtype=torch.float32)
        self._asks = example_1H.new_zeros(B, len(Asks._fields), dtype=torch.float64)
        self._fit_D2 = example_1H.new_zeros(D, 2, dtype=torch.float32)
        no_table = torch.zeros(0, self._table_width, dtype=torch.int32)
        nobody = Start(torch.zeros(0, dtype=torch.int32), no_table, self._features_BH[:0])
        self._plans: dict[int, Any] = {n: plan(self._attention(nobody, n)) for n in sizes}
        self._recorder = Recorder(example_1H.device)
        self._grow: dict[tuple[int, bool, bool], Callable[[], Tensor]] = {}
        for size, (has_cuts, has_penalties) in product(sizes, _EDITS):
            grow = partial(self._grown, size, has_cuts, has_penalties)
            self._grow[size, has_cuts, has_penalties] = self._recorder.record(grow) if is_captured else grow

    @property
    def report(self) -> dict[str, str | int]:
        """What capturing took, for the topology that a rank tells."""
        return {f"tree_{name}": value for name, value in self._recorder.report.items()}

    @torch.inference_mode()
    def __call__(
        self,
        roots_GV: Tensor,
        root_token_G: np.ndarray,
        root_index_G: np.ndarray,
        limits: GrowLimits,
        sampling: SamplingBatch,
        standings: dict[int, Standing],
        fit_D2: Tensor,
    ) -> Uncut | None:
        """The trees of the requests that `start` is about; see `drafter.grow.grow`. standings: with penalties alone.
        fit_D2: calibration as it travels.

        None = there is no graph for them. All levels and rows of the trees count as run, whatever they hold: that is
        what was paid for.
        """
        num_trees, num_requests = len(roots_GV), Size.of(1, len(roots_GV)).requests
        has_penalties = bool(standings)
        chosen = num_requests, has_penalties or sampling.asked.cuts, has_penalties
        if not num_trees or chosen not in self._grow:
            return None
        kind_G = kinds(limits.rule_B, sampling.temperature_B.numpy() > 0)
        penalties_G3 = np.array([[1.0, 0.0, 0.0]] * num_trees)
        for g, standing in standings.items():
            penalties_G3[g] = standing.constraints.penalties
        has_noise_G = kind_G == NodeKind.COUPLED.value
        asks = Asks.table(root_token_G, self.start.base_G, has_noise_G, limits, sampling, penalties_G3)
        # Requests beyond the step's ask for nothing; what else an earlier step left of them is of no account.
        self._asks[:num_requests].copy_(F.pad(asks, (0, 0, 0, num_requests - num_trees)), non_blocking=True)
        self._roots_BV[:num_trees].copy_(roots_GV)
        self._features_BH[:num_trees].copy_(self.start.features_GH)
        level_D = torch.arange(self._tree.max_depth).clamp(max=len(fit_D2) - 1)
        self._fit_D2.copy_(fit_D2[level_D], non_blocking=True)
        self._fill_noise(np.flatnonzero(has_noise_G), root_index_G, sampling)
        if has_penalties:
            lay_counts(self._count_BV[:num_requests], standings, self._vocab.columns)
        self._plan(self._attention(self.start, num_requests), into=self._plans[num_requests])
        token, parent, depth, weight = self._grow[chosen]().cpu().numpy()[:, :num_trees]
        b, row = np.nonzero(weight > 0)
        nodes = Nodes(
            request_N=b,
            row_N=row,
            parent_row_N=np.where(row == 0, -1, parent[b, row]).astype(np.int64),
            depth_N=depth[b, row].astype(np.int64),
            token_N=token[b, row].astype(np.int64),
            weight_N=weight[b, row].astype(np.float32),
            kind_N=np.where(row == 0, NodeKind.ROOT, kind_G[b]).astype(np.uint8),
        )
        num_levels = self._tree.max_depth
        return Uncut(nodes, num_levels, (num_levels - 1) * num_trees * self._tree.num_nodes)

    def _grown(self, num_requests: int, has_cuts: bool, has_penalties: bool) -> Tensor:
        """[4, B, R] float64: token, parent, depth and weight of every row."""
        asks = Asks(*self._asks[:num_requests].unbind(1))
        plan = self._plans[num_requests]

        def read(token_BN: Tensor, in_BNH: Tensor, depth_BN: Tensor, ancestors_BN: Tensor) -> tuple[Tensor, Tensor]:
            plan.set_ancestors(ancestors_BN.flatten())
            position_BN = asks.base_B.long()[:, None] + depth_BN
            out_NH, logits_NV = self._run(plan, token_BN.flatten(), in_BNH.flatten(0, 1), position_BN.flatten())
            return out_NH.view_as(in_BNH), logits_NV.view(*token_BN.shape, -1)

        rules = Rules(
            tree=self._tree,
            vocab=self._vocab,
            kernels=self._kernels,
            has_cuts=has_cuts,
            has_penalties=has_penalties,
        )
        rows = grow_unrolled(
            self._roots_BV[:num_requests],
            self._features_BH[:num_requests],
            self._noise_BDV[:num_requests],
            self._count_BV[:num_requests],
            asks,
            self._fit_D2,
            read,
            rules,
        )
        return torch.stack([field.double() for field in rows[:4]])

    def _fill_noise(self, noisy: np.ndarray, root_index_G: np.ndarray, sampling: SamplingBatch) -> None:
        """The noise of the requests `noisy` at all levels: a child of a depth-d node stands for index root + d."""
        if not len(noisy):
            return
        D = self._tree.max_depth
        seeds = sampling.seed_B[noisy].repeat_interleave(D).tolist()
        indices = (root_index_G[noisy, None] + np.arange(D)).ravel().tolist()
        noise_NV = self._vocab.noise.rows(seeds, indices, self._noise_BDV.device)
        for place, noise_DV in zip(noisy.tolist(), noise_NV.expand(len(seeds), -1).split(D), strict=True):
            self._noise_BDV[place].copy_(noise_DV)

    def _attention(self, start: Start, num_requests: int) -> AttentionMetadata:
        """Of all rows but the roots. Whoever has no page there, or is nobody, writes to the null page and reads it."""
        N, padding = self._tree.num_nodes, num_requests - len(start.base_G)
        base_B = F.pad(start.base_G, (0, padding), value=1)  # never before a model's first slot
        more_pages = min(-(-N // self._page_size), self._table_width - start.page_table_GP.shape[1])
        return AttentionMetadata(
            query_offsets=torch.arange(num_requests + 1, dtype=torch.int32) * N,
            page_table_BP=F.pad(start.page_table_GP, (0, more_pages, 0, padding)),
            base_B=base_B,
            slot_N=(base_B[:, None] + torch.arange(1, 1 + N)).flatten(),
            visible_N=base_B.repeat_interleave(N),
            # Any row may come to have any other above it.
            ancestors_N=torch.full((num_requests * N,), as_signed64((2 << N) - 1), dtype=torch.int64),
        )
