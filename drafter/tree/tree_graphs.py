"""CUDA graphs that grow whole trees: `best_first_device` over static buffers, captured for each bucket of requests.

    TreeGraphs(run, plan, ...)              the buffers that a growth reads, and its graphs
        .start = Start(...)               where this step's trees begin, told by the draft model's `extend`
        (roots, ...) -> Uncut | None      one replay, one copy to the host

Legend: B requests of a bucket, G of a step, N nodes of a tree, R = 1 + N rows, D levels, V draft vocabulary, H width of
a feature.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.tree.best_first_device import Asks, Rules, grow_on_device
from drafter.tree.frontier import DraftVocabulary, GrowLimits, Nodes, Uncut
from drafter.tree.score import kinds
from workers.config import EngineConfig
from workers.cuda_graphs import MAX_ROWS, Planner, Recorder, Size
from workers.kernels.select import Kernels
from workers.sampling.logits_processors import write_token_counts
from workers.sampling.logits_state import LogitsState
from workers.types import AttentionMetadata, NodeKind, SamplingBatch, as_signed64

MAX_LOGITS = 1 << 24
"""Logits of one level, rows without a node included: beyond, work outweighs the launches that a graph saves."""

_EDITS = ((False, False), (True, False), (True, True))
"""What may be done to logits, (cuts, penalties): a graph for each. Who asks for no cut is not cut."""

Run = Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(plan, tokens_N, features_NH, positions_N) -> (features for the children [N, H], logits [N, V]) of packed rows."""


class Start(NamedTuple):
    """Where the trees of a step begin."""

    base_G: Tensor  # int32 on the host, the roots' slots and positions
    page_table_GP: Tensor  # int32 on the host
    features_GH: Tensor  # what each root hands to its children


def buckets(max_requests: int, num_nodes: int, vocab_size: int) -> list[int]:
    """Numbers of requests that there are graphs for, the largest first: powers of two, as in `workers.cuda_graphs`."""
    top = Size.of(1, max_requests).requests
    return [
        requests
        for requests in (top >> i for i in range(top.bit_length()))
        if requests * num_nodes <= min(MAX_ROWS, MAX_LOGITS // vocab_size)
    ]


class TreeGraphs:
    """`grow_on_device` over static buffers, replayed for as many requests as the next bucket has.

    run, plan: the draft model's pass over tree rows, and how its attention is planned: by kernels whose plans
    stay in place. example_1H: a feature, on the device. is_captured: see `workers.cuda_graphs.Graphs`.
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
        sizes = buckets(config.max_num_seqs, self._tree.num_speculative_tokens, vocab.size)
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
        for size, (has_truncation, has_penalties) in product(sizes, _EDITS):
            grow = partial(self._grown, size, has_truncation, has_penalties)
            self._grow[size, has_truncation, has_penalties] = self._recorder.record(grow) if is_captured else grow

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
        logits_states: dict[int, LogitsState],
        fit_D2: Tensor,
    ) -> Uncut | None:
        """The trees of the requests in `start`; see `drafter.tree.grow`. logits_states: with penalties alone.
        fit_D2: calibration as it travels.

        None = there is no graph for them. All levels and rows of the trees count as run, whatever they hold: that is
        what was paid for.
        """
        num_trees, num_requests = len(roots_GV), Size.of(1, len(roots_GV)).requests
        has_penalties = bool(logits_states)
        chosen = num_requests, has_penalties or sampling.needs.truncates, has_penalties
        if not num_trees or chosen not in self._grow:
            return None
        kind_G = kinds(limits.rule_B, sampling.temperature_B.numpy() > 0)
        penalties_G3 = np.array([[1.0, 0.0, 0.0]] * num_trees)
        for g, logits_state in logits_states.items():
            penalties_G3[g] = logits_state.constraints.penalties
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
            write_token_counts(self._count_BV[:num_requests], logits_states, self._vocab.columns)
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
        return Uncut(nodes, num_levels, (num_levels - 1) * num_trees * self._tree.num_speculative_tokens)

    def _grown(self, num_requests: int, has_truncation: bool, has_penalties: bool) -> Tensor:
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
            has_truncation=has_truncation,
            has_penalties=has_penalties,
        )
        rows = grow_on_device(
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
        N, padding = self._tree.num_speculative_tokens, num_requests - len(start.base_G)
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
