"""CUDA graphs that grow whole trees: their levels over static buffers, captured for each shape of trees.

    TreeGraphs(run, logits, ...)                     the buffers and the graphs
        .odds_of(trees)                              whether graphs grow such trees
        .set_roots(roots, hidden_MX, row_G)          where this step's trees begin, set by the draft model's `extend`
        (trees) -> UnprunedTrees | None              a replay for each level, one copy to the host
        .learn(kept, cost_model)                     how large the next trees under `auto` may be
    BlockTreeGraphs(head, ...)                       the same for heads that draft every depth in one pass: no level
                                                     runs a layer, its logits are looked up

A shape is a number of requests and of nodes. It has two graphs: of the first level, and of any other, which is replayed
once for each. So trees may have any depth.

Legend: B requests of a shape, G of a step, M fed rows, N nodes of a shape, R = 1 + N rows, F rows that are read,
D levels, V draft vocabulary, X width of the draft model's output, H width of a feature: X or 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafter.tree.cost_model import TreeCostModel
from drafter.tree.device import PARAMETERS, GrowInputs, StaticOptions, TreeTensors, parameter_columns, static_rows
from drafter.tree.frontier import DraftVocabulary, TreeNodes, TreeRequests, TreeRoots, UnprunedTrees
from drafter.tree.score import child_kinds
from workers.config import EngineConfig
from workers.cuda_graphs import Recorder, Size
from workers.kernels.select import Kernels
from workers.sampling.logits_processors import write_token_counts
from workers.transfer import to_host
from workers.types import AttentionMetadata, NodeKind, as_signed64

MAX_TREE_ROWS = 1024
"""Rows of a level, empty ones included; beyond, the computation outweighs the launches that a graph saves."""
_FEW_ROWS = 128
"""Fewer rows of a level take as long, for the weights are read in any case."""

MAX_BLOCK_LOGITS = 1 << 26
"""Logits of a pass that drafts every depth, 268 MB: 299 requests of 7 depths of 32,000 tokens, 63 of 151,936."""

_LOGITS_EDITS = ((False, False), (True, False), (True, True))
"""The combinations of (truncation, penalties) that have a graph. Truncation leaves requests without it unchanged."""

_NO_BASE = 1
"""The root's slot of a padding request, never before a model's first slot."""

TABLE_ROW_BYTES = 8 * len(PARAMETERS)
_LEVEL = PARAMETERS.index("level")
STATE_ROW_BYTES = 5 * 8 + 8 + 4
"""The bytes of a row in `TreeTensors.state_5BR`, `path_prob_BR` and `weight_BR`, which one copy brings to the host."""

_NO_PENALTIES = np.array([[1.0, 0.0, 0.0]])
"""Repetition, frequency and presence."""

_UNCALIBRATED = torch.zeros(1)
"""The fit of weights that stay as they are."""

RunRows = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""(plan, tokens_N, features_NH, positions_N) -> outputs [N, X] of packed rows."""


class Shape(NamedTuple):
    """The numbers of requests and of nodes of each tree for which graphs are captured."""

    requests: int
    nodes: int


def shapes(config: EngineConfig) -> list[Shape]:
    """Return all shapes, those of the most rows first.

    Powers of two of requests, as in `workers.cuda_graphs`; as many nodes as trees may have, and lower powers of two
    that give a level _FEW_ROWS or more.
    """
    assert config.draft is not None
    most = config.draft.tree.num_speculative_tokens
    top = Size.of(1, config.max_num_seqs).requests
    found = [
        Shape(requests, nodes)
        for requests in (1 << i for i in range(top.bit_length()))
        for nodes in {most} | {1 << i for i in range(1, most.bit_length()) if requests << i >= _FEW_ROWS}
        if nodes <= most and requests * nodes <= MAX_TREE_ROWS
    ]
    return sorted(found, key=lambda shape: (-shape.requests * shape.nodes, shape))


def block_shapes(config: EngineConfig, depth: int, vocab_size: int) -> list[Shape]:
    """Return the shapes of heads that draft `depth` tokens in one pass, whose logits all exist at once."""
    return [shape for shape in shapes(config) if shape.requests * depth * vocab_size <= MAX_BLOCK_LOGITS]


class TreeGraphs:
    """Growth over static buffers; a step replays the graphs of the next larger shape.

    Args:
        run: the draft model's pass over tree rows.
        logits: its logits [N, V] from its outputs [N, X].
        plan: plans its attention, for kernels whose plans can be moved; None = no level attends to anything.
        example_1X: a row of its output, on the device.
        made: the shapes, if not all of `shapes`.
        reads_features: whether its output is also the feature for the children; otherwise they read none.
        has_leaf_siblings: see `drafter.tree.policy.DynamicTreePolicy`.
        root_position: the root's position in the draft model, less the root's slot.
        is_captured: see `workers.cuda_graphs.Graphs`.
    """

    def __init__(
        self,
        run: RunRows,
        logits: Callable[[Tensor], Tensor],
        plan: Callable[[AttentionMetadata], Any] | None,
        example_1X: Tensor,
        vocab: DraftVocabulary,
        kernels: Kernels,
        config: EngineConfig,
        *,
        made: list[Shape] | None = None,
        reads_features: bool = True,
        has_leaf_siblings: bool = False,
        root_position: int = 0,
        is_captured: bool = True,
    ) -> None:
        assert config.draft is not None
        self._has_leaf_siblings = has_leaf_siblings
        self._run, self._logits, self._page_size = run, logits, config.page_size
        self._root_position = root_position
        self._tree, self._vocab, self._kernels = config.draft.tree, vocab, kernels
        self._table_width = config.pages_for(config.max_model_len)
        device = example_1X.device
        self._static_4R = static_rows(self._tree.paths, device) if self._tree.paths else None
        made = shapes(config) if made is None else made
        if self._tree.paths and vocab.size < self._tree.num_children:
            made = []
        B, D = max((shape.requests for shape in made), default=0), self._tree.longest_path
        self._hidden_BX = example_1X.new_zeros(B, example_1X.shape[1])
        self._features_BH = self._hidden_BX if reads_features else self._hidden_BX[:, :0]
        self._count_BV = example_1X.new_zeros(B, vocab.size, dtype=torch.float32)
        # The calibration of each level, then the parameters of each request: one copy sends both.
        self._sent = example_1X.new_zeros(_odds_bytes(D) + TABLE_ROW_BYTES * B, dtype=torch.uint8)
        self._odds_D, self._parameters = _views(self._sent, D)
        N, R = (max((s.requests * (s.nodes + extra) for s in made), default=0) for extra in (0, 1))
        self._state = example_1X.new_zeros(STATE_ROW_BYTES * R, dtype=torch.uint8)
        self._inputs = example_1X.new_zeros(4 * N, dtype=torch.int64)
        self._feature = example_1X.new_zeros(N * self._features_BH.shape[1])
        self._plans: dict[Shape, Any] = {shape: plan and plan(self._attention(shape)) for shape in made}
        self._wanted_nodes, self._wanted_levels = self._tree.num_speculative_tokens, D
        self._recorder = Recorder(device)
        self._grow: dict[tuple[Shape, bool, bool], tuple[Callable[[], None], Callable[[], None]]] = {}
        for shape, edits in product(made, _LOGITS_EDITS):
            levels: list[Callable[[], None]] = [
                partial(add, shape, *edits) for add in (self._add_first, self._add_further)
            ]
            first, further = (self._recorder.record(level) if is_captured else level for level in levels)
            self._grow[shape, *edits] = first, further

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

    def _size_of(self, trees: TreeRequests) -> tuple[Shape, int] | None:
        """Return the shape with the fewest rows, and the fewest levels, that hold these trees; None if no shape does.

        Trees under `auto` may be smaller than their limits: they are as large as the last ones suggest.
        """
        limits, requests = trees.limits, Size.of(1, len(trees.root_token_B)).requests
        num_nodes = int(limits.num_nodes_B.max())
        num_levels = int(np.minimum(limits.max_depth_B, limits.num_nodes_B).max())
        own = [shape for shape in self._plans if shape.requests == requests]
        if own and limits.is_auto_B.any():
            num_nodes = min(num_nodes, self._wanted_nodes, max(own).nodes)
            num_levels = min(num_levels, self._wanted_levels)
        shape = min((shape for shape in own if shape.nodes >= num_nodes), default=None)
        if shape is None:
            return None
        paths = self._tree.paths[: shape.nodes]  # of a static tree: they end where it does
        return shape, min(max(1, num_levels), len(paths[-1]) if paths else self._tree.longest_path)

    def learn(self, kept: TreeNodes, cost_model: TreeCostModel) -> None:
        """Learn from this step's trees, as cut, how large the next ones may be.

        They may have a node and a level more than have paid, so that growth is noticed, and at most one less than now.
        """
        num_nodes = int(np.bincount(kept.request_N).max()) - 1
        num_levels = cost_model.best_depth(kept.depth_N, kept.weight_N, self._rows_per_level)
        self._wanted_nodes = max(num_nodes + 1, self._wanted_nodes - 1)
        self._wanted_levels = max(num_levels + 1, self._wanted_levels - 1)

    def __call__(self, trees: TreeRequests) -> UnprunedTrees | None:
        """Grow the trees of this step, or return None if no graph fits them.

        The caller is in inference mode, which takes longer to enter than most operations here take.
        trees: with no constraints but penalties. All levels and rows count as run, whatever they hold, because all of
        them took time.
        """
        log_odds_D, limits, sampling = self.odds_of(trees), trees.limits, trees.sampling
        num_trees = len(trees.root_token_B)
        if log_odds_D is None or not num_trees or (size := self._size_of(trees)) is None:
            return None
        shape, num_levels = size
        num_requests, self._rows_per_level = shape.requests, num_trees * shape.nodes
        has_penalties = bool(trees.logits_states)
        kind_G = child_kinds(limits.rule_B, sampling.temperature_B.numpy() > 0)
        penalties_G3 = _NO_PENALTIES
        if has_penalties:
            penalties_G3 = np.repeat(_NO_PENALTIES, num_trees, axis=0)
            for g, logits_state in trees.logits_states.items():
                penalties_G3[g] = logits_state.constraints.penalties
        position_G = self._roots.base_G + self._root_position
        # Padding requests have parameters of zero, so their stale values in other buffers have no effect.
        most_levels = self._tree.longest_path
        sent = torch.zeros(_odds_bytes(most_levels) + TABLE_ROW_BYTES * num_requests, dtype=torch.uint8)
        own_log_odds_D, table = (view.numpy() for view in _views(sent, most_levels))
        log_odds_D.numpy().take(range(most_levels), axis=0, out=own_log_odds_D, mode="clip")
        has_noise_G = kind_G == NodeKind.COUPLED.value
        for column, values_G in enumerate(parameter_columns(trees, position_G, has_noise_G, penalties_G3)):
            table[:num_trees, column] = values_G
        self._sent[: len(sent)].copy_(sent, non_blocking=True)
        if has_penalties:
            write_token_counts(self._count_BV[:num_requests], trees.logits_states, self._vocab.columns)
        if self._plans[shape] is not None:
            self._plans[shape].move(*self._places(num_requests))
        first, further = self._grow[shape, has_penalties or sampling.needs.truncates, has_penalties]
        first()
        for _ in range(num_levels - 1):
            further()
        (grown,) = to_host(self._state[: STATE_ROW_BYTES * num_requests * (1 + shape.nodes)])
        state_5BR, path_prob_BR, weight_BR = (part.numpy() for part in _state_views(torch.from_numpy(grown), shape))
        b, row = np.nonzero(weight_BR[:num_trees] > 0)
        token, parent, depth = state_5BR[:3, b, row]
        depth = np.abs(depth)  # that of leaf siblings is negative
        nodes = TreeNodes(
            request_N=b,
            row_N=row,
            parent_row_N=np.where(row == 0, -1, parent),
            depth_N=depth,
            token_N=token,
            weight_N=weight_BR[b, row],
            kind_N=np.where(row == 0, NodeKind.ROOT.value, kind_G[b]).astype(np.uint8),
            path_prob_N=path_prob_BR[b, row],
        )
        return UnprunedTrees(
            nodes=nodes,
            sampled=[],
            pruned_BD=np.zeros((num_trees, int(limits.max_depth_B.max())), dtype=np.int32),
            num_levels=num_levels,
            num_run=(num_levels - 1) * self._rows_per_level,
        )

    def _add_first(self, shape: Shape, has_truncation: bool, has_penalties: bool) -> None:
        """Grow the trees' first level. A graph captures this."""
        roots_B1X = self._hidden_BX[: shape.requests, None]
        self._add(shape, has_truncation, has_penalties, self._tensors(shape), roots_B1X, is_first=True)

    def _add_further(self, shape: Shape, has_truncation: bool, has_penalties: bool) -> None:
        """Read all rows and grow another level. A graph captures this."""
        trees = self._tensors(shape)
        self._add(shape, has_truncation, has_penalties, trees, self._read(shape, trees), is_first=False)

    def _read(self, shape: Shape, trees: TreeTensors) -> Tensor:
        """Return the draft model's outputs [B, N, X] at all rows but the roots."""
        token_BN, position_BN, ancestors_BN, _ = trees.inputs_4BN
        plan = self._plans[shape]
        plan.set_ancestors(ancestors_BN.flatten())
        out_NX = self._run(plan, token_BN.flatten(), trees.feature_BNH.flatten(0, 1), position_BN.flatten())
        return out_NX.view(*token_BN.shape, -1)

    def _level_logits(self, trees: TreeTensors, hidden_BFX: Tensor, own: slice) -> Tensor:
        """Return the logits [rows, V] of the children of some requests' rows."""
        return self._logits(hidden_BFX[own].flatten(0, 1))

    def _add(
        self,
        shape: Shape,
        has_truncation: bool,
        has_penalties: bool,
        trees: TreeTensors,
        hidden_BFX: Tensor,
        *,
        is_first: bool,
    ) -> None:
        from drafter.tree.triton_growth import add_level  # torch kernels, which capture none, need no Triton

        options = StaticOptions(
            tree=self._tree,
            vocab=self._vocab,
            kernels=self._kernels,
            has_truncation=has_truncation,
            has_penalties=has_penalties,
            has_leaf_siblings=self._has_leaf_siblings,
            static_4R=None if self._static_4R is None else self._static_4R[:, : 1 + shape.nodes],
        )
        inputs = GrowInputs(
            features_BH=self._features_BH[: shape.requests],
            count_BV=self._count_BV[: shape.requests],
            table=self._parameters[: shape.requests],
            log_odds_D=self._odds_D,
        )
        logits = partial(self._level_logits, trees, hidden_BFX)
        add_level(trees, inputs, options, logits, hidden_BFX, is_first=is_first)

    def _tensors(self, shape: Shape) -> TreeTensors:
        """Return the views of the buffers that trees of this shape have."""
        B, N = shape
        inputs_4BN, H = self._inputs[: 4 * B * N].view(4, B, N), self._features_BH.shape[1]
        feature_BNH = self._feature[: B * N * H].view(B, N, H)
        return TreeTensors(*_state_views(self._state, shape), inputs_4BN, feature_BNH)

    def _attention(self, shape: Shape) -> AttentionMetadata:
        """Return the attention of all rows but the roots, for trees on the null page: `_places` moves them."""
        num_requests, N = shape
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


class BlockTreeGraphs(TreeGraphs):
    """The same for heads that draft every depth in one pass. `set_block` replaces `set_roots`.

    children: of the head, (block's hidden [B, D, H], base [B, D, V], request_F, depth_F, token_F) -> logits [F, V].
    hidden_1H: a row of its outputs.
    """

    def __init__(
        self,
        children: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor],
        hidden_1H: Tensor,
        vocab: DraftVocabulary,
        kernels: Kernels,
        config: EngineConfig,
        depth: int,
        *,
        has_leaf_siblings: bool,
        is_captured: bool = True,
    ) -> None:
        made = block_shapes(config, depth, vocab.size)
        B = max((shape.requests for shape in made), default=0)
        self._children, self._request_B = children, torch.arange(B, device=hidden_1H.device)
        self._hidden_BDH = hidden_1H.new_zeros(B, depth, hidden_1H.shape[1])
        self._base_BDV = hidden_1H.new_zeros(B, depth, vocab.size, dtype=torch.float32)
        super().__init__(
            _run_nothing,
            _run_nothing,
            None,
            hidden_1H[:, :0],
            vocab,
            kernels,
            config,
            made=made,
            has_leaf_siblings=has_leaf_siblings,
            is_captured=is_captured,
        )

    def set_block(self, roots: TreeRoots, hidden_GDH: Tensor, base_GDV: Tensor) -> None:
        """Set where the trees of this step begin, and what the pass says of every depth."""
        self._roots = roots
        if len(hidden_GDH) <= len(self._hidden_BDH):  # no graph grows more trees
            self._hidden_BDH[: len(hidden_GDH)].copy_(hidden_GDH)
            self._base_BDV[: len(base_GDV)].copy_(base_GDV)

    def _read(self, shape: Shape, trees: TreeTensors) -> Tensor:
        return trees.feature_BNH  # [B, N, 0]: nothing runs

    def _level_logits(self, trees: TreeTensors, hidden_BFX: Tensor, own: slice) -> Tensor:
        table, request_B = (column[: len(hidden_BFX)][own] for column in (self._parameters, self._request_B))
        if hidden_BFX is trees.feature_BNH:
            token_BF, depth_B = trees.inputs_4BN[0, own], table[:, _LEVEL].long()
        else:  # of the roots
            token_BF, depth_B = table[:, :1].long(), torch.zeros_like(request_B)
        depth_B = depth_B.clamp(max=self._base_BDV.shape[1] - 1)  # capturing counts levels that no tree has
        request_F, depth_F = (each_B[:, None].expand_as(token_BF).flatten() for each_B in (request_B, depth_B))
        return self._children(self._hidden_BDH, self._base_BDV, request_F, depth_F, token_BF.flatten())


def _run_nothing(*_: Any) -> Tensor:
    raise AssertionError("no level runs a layer")


def _odds_bytes(num_levels: int) -> int:
    """Return the bytes of the calibration, float32 padded to the alignment of the float64 table after it."""
    return 8 * -(-num_levels // 2)


def _views(sent: Tensor, num_levels: int) -> tuple[Tensor, Tensor]:
    """Return what is sent to a graph, uint8, as the calibration [D] and the table of its requests."""
    odds, table = sent.tensor_split([_odds_bytes(num_levels)])
    return odds.view(torch.float32)[:num_levels], table.view(torch.float64).view(-1, len(PARAMETERS))


def _state_views(state: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Return bytes as the state [5, B, R], path probabilities [B, R] and weights [B, R] of trees of this shape."""
    requests, rows = shape.requests, 1 + shape.nodes
    count = 8 * requests * rows
    fields, probs, weights, _ = state.tensor_split([5 * count, 6 * count, 13 * count // 2])
    return (
        fields.view(torch.int64).view(5, requests, rows),
        probs.view(torch.float64).view(requests, rows),
        weights.view(torch.float32).view(requests, rows),
    )
