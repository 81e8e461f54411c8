"""CUDA graphs that grow whole trees: `grow_on_device` over static buffers, captured for each bucket of requests.

    TreeGraphs(run, plan, ...)                       the buffers and the graphs
        .odds_of(trees)                              whether a graph grows such trees
        .set_roots(roots, hidden_MX, row_G)          where this step's trees begin, set by the draft model's `extend`
        (trees) -> UnprunedTrees | None              one replay, one copy to the host

Legend: B requests of a bucket, G of a step, M fed rows, N nodes of a tree, R = 1 + N rows, D levels, V draft
vocabulary, X width of the draft model's output, H width of a feature: X or 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafter.tree.device import PARAMETERS, GrowInputs, StaticOptions, parameter_columns, static_rows
from drafter.tree.frontier import DraftVocabulary, TreeNodes, TreeRequests, TreeRoots, UnprunedTrees
from drafter.tree.score import child_kinds
from workers.config import EngineConfig
from workers.cuda_graphs import MAX_ROWS, Recorder, Size
from workers.kernels.select import Kernels
from workers.sampling.logits_processors import write_token_counts
from workers.transfer import to_host
from workers.types import AttentionMetadata, NodeKind, as_signed64

MAX_LOGITS = 1 << 24
"""Logits of one level, empty rows included; beyond, the computation outweighs the launches that a graph saves."""

_LOGITS_EDITS = ((False, False), (True, False), (True, True))
"""The combinations of (truncation, penalties) that have a graph. Truncation leaves requests without it unchanged."""

_NO_BASE = 1
"""The root's slot of a padding request, never before a model's first slot."""

_TABLE_ROW_BYTES = 8 * len(PARAMETERS)

_NO_PENALTIES = np.array([[1.0, 0.0, 0.0]])
"""Repetition, frequency and presence."""

_UNCALIBRATED = torch.zeros(1)
"""The fit of weights that stay as they are."""

RunRows = Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(plan, tokens_N, features_NH, positions_N) -> (features for the children [N, H], logits [N, V]) of packed rows."""


def buckets(max_requests: int, num_nodes: int, vocab_size: int) -> list[int]:
    """Return the numbers of requests that get graphs, largest first: powers of two, as in `workers.cuda_graphs`."""
    top = Size.of(1, max_requests).requests
    return [
        requests
        for requests in (top >> i for i in range(top.bit_length()))
        if requests * num_nodes <= min(MAX_ROWS, MAX_LOGITS // vocab_size)
    ]


class TreeGraphs:
    """`grow_on_device` over static buffers; a step replays the graph of the next larger bucket.

    Args:
        run: the draft model's pass over tree rows.
        root_logits: its logits [B, V] at roots, from its outputs [B, X] there.
        plan: plans its attention, for kernels whose plans can be moved.
        example_1X: a row of its output, on the device.
        reads_features: whether its output is also the feature for the children; otherwise they read none.
        root_position: the root's position in the draft model, less the root's slot.
        is_captured: see `workers.cuda_graphs.Graphs`.
    """

    def __init__(
        self,
        run: RunRows,
        root_logits: Callable[[Tensor], Tensor],
        plan: Callable[[AttentionMetadata], Any],
        example_1X: Tensor,
        vocab: DraftVocabulary,
        kernels: Kernels,
        config: EngineConfig,
        *,
        reads_features: bool = True,
        root_position: int = 0,
        is_captured: bool = True,
    ) -> None:
        assert config.draft is not None
        self._run, self._root_logits, self._page_size = run, root_logits, config.page_size
        self._root_position = root_position
        self._tree, self._vocab, self._kernels = config.draft.tree, vocab, kernels
        self._table_width = config.pages_for(config.max_model_len)
        device = example_1X.device
        self._static_4R = static_rows(self._tree.paths, device) if self._tree.paths else None
        sizes = buckets(config.max_num_seqs, self._tree.num_speculative_tokens, vocab.size)
        if self._tree.paths and vocab.size < self._tree.num_children:
            sizes = []
        B, D, V = max(sizes, default=0), self._tree.longest_path, vocab.size
        self._hidden_BX = example_1X.new_zeros(B, example_1X.shape[1])
        self._features_BH = self._hidden_BX if reads_features else self._hidden_BX[:, :0]
        self._noise_BDV = example_1X.new_zeros(B, D, V, dtype=torch.float32)
        self._count_BV = example_1X.new_zeros(B, V, dtype=torch.float32)
        # The calibration of each level, then the parameters of each request: one copy sends both.
        self._sent = example_1X.new_zeros(_odds_bytes(D) + _TABLE_ROW_BYTES * B, dtype=torch.uint8)
        self._odds_D, self._parameters = _views(self._sent, D)
        self._plans: dict[int, Any] = {n: plan(self._attention(n)) for n in sizes}
        self._recorder = Recorder(device)
        self._grow: dict[tuple[int, bool, bool], Callable[[], Tensor]] = {}
        for key in ((size, *edits) for size, edits in product(sizes, _LOGITS_EDITS)):
            grow = partial(self._grow_padded, *key)
            self._grow[key] = self._recorder.record(grow) if is_captured else grow

    @property
    def report(self) -> dict[str, str | int]:
        """Time and memory that capturing took, for the rank's topology report."""
        return {f"tree_{name}": value for name, value in self._recorder.report.items()}

    def odds_of(self, trees: TreeRequests) -> Tensor | None:
        """Return the calibration [D] under which a graph grows all of these trees; None if none can.

        No graph grows sampled trees, or trees of which only some are under `auto`. A static one may have no thresholds
        and not be traced, since a graph neither counts nor names what is kept out of it.
        """
        limits = trees.limits
        has_thresholds = any(column_B.any() for column_B in limits.rules.values)
        if (
            limits.is_sampled_B.any()
            or (self._static_4R is not None and (has_thresholds or trees.traced_B is not None))
            or (limits.is_auto_B.any() and not limits.is_auto_B.all())
        ):
            return None
        if not limits.is_auto_B.any():
            return _UNCALIBRATED
        return None if trees.costs is None else trees.costs.log_odds_D

    def set_roots(self, roots: TreeRoots, hidden_MX: Tensor, row_G: Tensor) -> Tensor:
        """Set where the trees of this step begin. Return the outputs at their roots, which the next call overwrites."""
        self._roots = roots
        if len(row_G) > len(self._hidden_BX):
            return hidden_MX[row_G]  # and no graph grows so many trees
        return torch.index_select(hidden_MX, 0, row_G, out=self._hidden_BX[: len(row_G)])

    def __call__(self, trees: TreeRequests) -> UnprunedTrees | None:
        """Grow the trees of this step, or return None if no graph fits them.

        The caller is in inference mode, which takes longer to enter than most operations here take.
        trees: with no constraints but penalties. All levels and rows count as run, whatever they hold, because all of
        them took time.
        """
        log_odds_D, limits, sampling = self.odds_of(trees), trees.limits, trees.sampling
        if log_odds_D is None:
            return None
        num_trees = len(trees.root_token_B)
        num_requests = Size.of(1, num_trees).requests
        has_penalties = bool(trees.logits_states)
        key = num_requests, has_penalties or sampling.needs.truncates, has_penalties
        if not num_trees or key not in self._grow:
            return None
        kind_G = child_kinds(limits.rule_B, sampling.temperature_B.numpy() > 0)
        penalties_G3 = _NO_PENALTIES
        if has_penalties:
            penalties_G3 = np.repeat(_NO_PENALTIES, num_trees, axis=0)
            for g, logits_state in trees.logits_states.items():
                penalties_G3[g] = logits_state.constraints.penalties
        has_noise_G = kind_G == NodeKind.COUPLED.value
        position_G = self._roots.base_G + self._root_position
        # Padding requests have parameters of zero, so their stale values in other buffers have no effect.
        num_levels = self._tree.longest_path
        sent = torch.zeros(_odds_bytes(num_levels) + _TABLE_ROW_BYTES * num_requests, dtype=torch.uint8)
        own_log_odds_D, table = (view.numpy() for view in _views(sent, num_levels))
        log_odds_D.numpy().take(range(num_levels), axis=0, out=own_log_odds_D, mode="clip")
        for column, values_G in enumerate(parameter_columns(trees, position_G, has_noise_G, penalties_G3)):
            table[:num_trees, column] = values_G
        self._sent[: len(sent)].copy_(sent, non_blocking=True)
        self._fill_noise(has_noise_G.nonzero()[0], trees)
        if has_penalties:
            write_token_counts(self._count_BV[:num_requests], trees.logits_states, self._vocab.columns)
        self._plans[num_requests].move(*self._places(num_requests))
        (grown_B5R,) = to_host(self._grow[key]())
        grown_G5R = grown_B5R[:num_trees]
        b, row = np.nonzero(grown_G5R[:, 3] > 0)
        token, parent, depth, weight, path_prob = grown_G5R[b, :, row].T
        nodes = TreeNodes(
            request_N=b,
            row_N=row,
            parent_row_N=np.where(row == 0, -1, parent).astype(np.int64),
            depth_N=depth.astype(np.int64),
            token_N=token.astype(np.int64),
            weight_N=weight.astype(np.float32),
            kind_N=np.where(row == 0, NodeKind.ROOT.value, kind_G[b]).astype(np.uint8),
            path_prob_N=path_prob,
        )
        return UnprunedTrees(
            nodes=nodes,
            sampled=[],
            pruned_BD=np.zeros((num_trees, int(limits.max_depth_B.max())), dtype=np.int32),
            num_levels=num_levels,
            num_run=(num_levels - 1) * num_trees * self._tree.num_speculative_tokens,
        )

    def _grow_padded(self, num_requests: int, has_truncation: bool, has_penalties: bool) -> Tensor:
        """Return token, parent, depth, weight and path_prob of every row, float64 [B, 5, R]. A graph captures this."""
        from drafter.tree.triton_growth import grow_on_device  # torch kernels, which capture none, need no Triton

        plan = self._plans[num_requests]

        def read(token_BN: Tensor, in_BNH: Tensor, position_BN: Tensor, ancestors_BN: Tensor) -> tuple[Tensor, Tensor]:
            plan.set_ancestors(ancestors_BN.flatten())
            out_NH, logits_NV = self._run(plan, token_BN.flatten(), in_BNH.flatten(0, 1), position_BN.flatten())
            return out_NH.view_as(in_BNH), logits_NV.view(*token_BN.shape, -1)

        options = StaticOptions(
            tree=self._tree,
            vocab=self._vocab,
            kernels=self._kernels,
            has_truncation=has_truncation,
            has_penalties=has_penalties,
            static_4R=self._static_4R,
        )
        inputs = GrowInputs(
            features_BH=self._features_BH[:num_requests],
            noise_BDV=self._noise_BDV[:num_requests],
            count_BV=self._count_BV[:num_requests],
            table=self._parameters[:num_requests],
            log_odds_D=self._odds_D,
        )
        nodes = grow_on_device(inputs, options, self._root_logits(self._hidden_BX[:num_requests]), read)
        return torch.stack([field.double() for field in nodes[:5]], dim=1)

    def _fill_noise(self, noisy: np.ndarray, trees: TreeRequests) -> None:
        """Fill in the noise of the requests `noisy`: the children of depth-d nodes stand for index root + d."""
        if not len(noisy):
            return
        D = self._tree.longest_path
        seeds = trees.sampling.seed_B.numpy()[noisy].repeat(D).tolist()
        indices = (trees.root_index_B[noisy, None] + np.arange(D)).ravel().tolist()
        noise_NV = self._vocab.noise.rows(seeds, indices, self._noise_BDV.device).expand(len(seeds), -1)
        if len(noisy) == noisy[-1] + 1:  # the first ones, which is all but always so: one copy
            self._noise_BDV[: len(noisy)].copy_(noise_NV.view(len(noisy), D, -1))
            return
        for g, noise_DV in zip(noisy.tolist(), noise_NV.split(D), strict=True):
            self._noise_BDV[g].copy_(noise_DV)

    def _attention(self, num_requests: int) -> AttentionMetadata:
        """Return the attention of all rows but the roots, for trees on the null page: `_places` moves them."""
        N = self._tree.num_speculative_tokens
        row_N = np.arange(1, 1 + N, dtype=np.int32)
        base_B = np.full(num_requests, _NO_BASE, dtype=np.int32)
        return AttentionMetadata(
            query_offsets=np.arange(num_requests + 1, dtype=np.int32) * N,
            page_table_BP=np.zeros((num_requests, self._table_width), dtype=np.int32),
            base_B=base_B,
            slot_N=(base_B[:, None] + row_N).ravel(),
            visible_N=base_B.repeat(N),
            # While the tree grows, any row may become an ancestor of any other.
            ancestors_N=np.full(num_requests * N, as_signed64((2 << N) - 1)),
        )

    def _places(self, num_requests: int) -> tuple[np.ndarray, np.ndarray]:
        """Return base and pages of each tree.

        Padding requests, and rows beyond the pages of their request, write to the null page and read it.
        """
        table_GP = self._roots.page_table_GP
        num_trees, num_pages = table_GP.shape
        base_B = np.full(num_requests, _NO_BASE, dtype=np.int32)
        base_B[:num_trees] = self._roots.base_G
        width = min(num_pages + -(-self._tree.num_speculative_tokens // self._page_size), self._table_width)
        table_BP = np.zeros((num_requests, width), dtype=np.int32)
        table_BP[:num_trees, :num_pages] = table_GP
        return base_B, table_BP


def _odds_bytes(num_levels: int) -> int:
    """Return the bytes of the calibration, float32 padded to the alignment of the float64 table after it."""
    return 8 * -(-num_levels // 2)


def _views(sent: Tensor, num_levels: int) -> tuple[Tensor, Tensor]:
    """Return what is sent to a graph, uint8, as the calibration [D] and the table of its requests."""
    odds, table = sent.tensor_split([_odds_bytes(num_levels)])
    return odds.view(torch.float32)[:num_levels], table.view(torch.float64).view(-1, len(PARAMETERS))
