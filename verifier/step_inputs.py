"""Builds the two messages that leave rank 0 in a step: the DraftRequest and the TargetStep.

The rows of a step are ordered: first the trees of all decoding requests, then the prompt chunks.
Legend: B requests, N rows, R sampled rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from verifier.draft_inputs import DraftInput
from verifier.prefix_cache import Keep
from verifier.request import Request
from verifier.tree import PromptChunk, TreeMetadata, chunk_metadata, tree_metadata
from workers.config import TreeRules
from workers.sampling.logits_state import pack_logits_states
from workers.types import (
    AttentionMetadata,
    DraftCosts,
    DraftRequest,
    Folds,
    LearnRows,
    SamplingBatch,
    ScoredRows,
    TargetStep,
    TreeBatch,
)

_LEARN_IDS = 1 << 30


class Move(NamedTuple):
    """The KV of one accepted token, moved between two logical slots of a request."""

    request: Request
    source: int  # the slot of the tree row
    target: int  # the slot of the token's position


class Fold(NamedTuple):
    """The accepted rows of a request's tree, which its recurrent state takes in: rows of the last step."""

    request: Request
    rows: list[int]  # the root, then the path


class StepInputs:
    """Builds a step's messages. It keeps the parameters of the last batch, which is mostly that of the next step.

    has_states: the target has recurrent states. learns: the drafter learns from what is verified.
    """

    def __init__(
        self, page_size: int, eos_token_ids: tuple[int, ...], *, has_states: bool = False, learns: bool = False
    ) -> None:
        self._learns = learns
        self._page_size = page_size
        self._eos_token_ids = eos_token_ids
        self._has_states = has_states
        self._drafted: _DraftParams | None = None
        self._verified: _BatchParams | None = None

    def draft_request(
        self,
        inputs: Mapping[Request, DraftInput],
        features_MH: Tensor | None,
        costs: DraftCosts | None,
        candidate_MH: Tensor | None = None,
    ) -> DraftRequest:
        """Build the message to the drafter. features_MH: for all fed rows in order, if the drafter reads features.

        candidate_MH: the same for a head being scored.
        """
        requests = list(inputs)
        if self._drafted is None or self._drafted.batch.requests != requests:
            self._drafted = _draft_params_of(requests)
        params, auto_B, rules, traced_B, learn = self._drafted
        return DraftRequest(
            offsets=_int32(list(accumulate((len(own.tokens) for own in inputs.values()), initial=0))),
            start_B=_int32([request.num_fed for request in requests]),
            token_M=_int32([token for own in inputs.values() for token in own.tokens]),
            page_table_BP=torch.from_numpy(page_table(requests)),
            rule_B=params.rule_B,
            auto_B=auto_B,
            num_nodes_B=_int32([own.num_nodes for own in inputs.values()]),
            max_depth_B=_int32([own.max_depth for own in inputs.values()]),
            rules=rules,
            constraints_U=self._constraints(requests, params),
            sampling=params.sampling,
            costs=costs,
            features_MH=features_MH,
            traced_B=traced_B,
            learn=learn if self._learns or candidate_MH is not None else None,
            candidate_MH=candidate_MH,
        )

    def target_step(
        self,
        trees: TreeBatch,
        decode: list[Request],
        prefill: Sequence[tuple[Request, PromptChunk]] = (),
        moves: Sequence[Move] = (),
        folds: Sequence[Fold] = (),
        keeps: Sequence[Keep] = (),
    ) -> TargetStep:
        """Build one forward over all trees and chunks. It samples every tree row and the last row of each prompt.

        keeps: of the chunks and of the folds.
        """
        num_trees, num_tree_rows = len(decode), len(trees.token_N)
        root_B = np.array([len(request.tokens) - 1 for request in decode], dtype=np.int32)
        meta = tree_metadata(trees, root_B)
        if prefill:
            chunk_meta = chunk_metadata([chunk for _, chunk in prefill])
            meta = TreeMetadata(*map(np.concatenate, zip(meta, chunk_meta, strict=True)))
        prompt_tokens = [token for request, chunk in prefill for token in request.tokens[chunk.start : chunk.stop]]

        requests = decode + [request for request, _ in prefill]
        begins = list(accumulate((chunk.stop - chunk.start for _, chunk in prefill), initial=num_tree_rows))
        finishing = [i for i, (request, chunk) in enumerate(prefill) if chunk.stop == len(request.tokens)]
        sample_row_R = _append(np.arange(num_tree_rows, dtype=np.int32), [begins[i + 1] - 1 for i in finishing])
        owner_N = np.arange(num_trees, dtype=np.int32).repeat(np.diff(trees.offsets.numpy()))
        request_R = _append(owner_N, [num_trees + i for i in finishing])
        params = sampled = self._verified = _params_of(requests, self._verified)
        if len(finishing) < len(prefill):  # an unfinished prompt draws no token
            sampled = _params_of([*decode, *(prefill[i][0] for i in finishing)])
        is_one_row_each = not prefill and len(request_R) == num_trees
        seats = {}
        if self._has_states:
            read = [request.seat for request in decode] + [request.read_seat for request, _ in prefill]
            written = [0] * num_trees + [request.seat for request, _ in prefill]
            rows, kept = _kept(
                keeps, {request: begin - chunk.start for (request, chunk), begin in zip(prefill, begins, strict=False)}
            )
            columns = {"read_seat_B": read, "write_seat_B": written, "keep_row_K": rows, "keep_seat_K": kept}
            seats = {name: _int32(column).numpy() for name, column in columns.items()}
        return TargetStep(
            copy_source=_physical_slots(moves, [move.source for move in moves], self._page_size),
            copy_target=_physical_slots(moves, [move.target for move in moves], self._page_size),
            token_N=torch.from_numpy(_append(trees.token_N.numpy(), prompt_tokens)),
            position_N=torch.from_numpy(meta.position_N),
            sample_row_R=torch.from_numpy(sample_row_R),
            request_R=torch.from_numpy(request_R),
            draw_index_R=torch.from_numpy(meta.position_N[sample_row_R] + 1),
            constraints_U=self._constraints(requests, params),
            attention=AttentionMetadata(
                query_offsets=_append(trees.offsets.numpy(), begins[1:]),
                page_table_BP=page_table(requests),
                base_B=_append(root_B, [0] * len(prefill)),
                slot_N=meta.slot_N,
                visible_N=meta.visible_N,
                ancestors_N=meta.ancestors_N,
                **seats,
            ),
            sampling=params.sampling if is_one_row_each else params.sampling.rows(torch.from_numpy(request_R)),
            has_logprobs=sampled.has_logprobs,
            has_sampled=sampled.has_sampled,
            has_draws=sampled.has_draws,
            scored=_scored_rows(prefill, begins),
            folds=_folds(folds, keeps),
        )

    def _constraints(self, requests: list[Request], params: _BatchParams) -> Tensor:
        states = [request.logits_state(self._eos_token_ids) for request in requests] if params.has_constraints else []
        return pack_logits_states(states)


class _BatchParams(NamedTuple):
    """The parameters of a batch of requests, which never change."""

    requests: list[Request]
    sampling: SamplingBatch
    rule_B: Tensor  # int32
    has_logprobs: bool
    has_sampled: bool
    has_draws: bool
    has_constraints: bool


def _params_of(requests: list[Request], last: _BatchParams | None = None) -> _BatchParams:
    """Return the requests' parameters, which are `last` if that is the same batch."""
    if last is not None and last.requests == requests:
        return last
    params = [request.submit.sampling for request in requests]
    return _BatchParams(
        requests=requests,
        sampling=SamplingBatch.stack(params),
        rule_B=_int32([request.rule for request in requests]),
        has_logprobs=any(own.num_logprobs is not None for own in params),
        has_sampled=any(request.rule.is_sampled for request in requests),
        has_draws=any(not request.rule.is_sampled for request in requests),
        has_constraints=any(request.is_constrained for request in requests),
    )


class _DraftParams(NamedTuple):
    """What the drafter is told of a batch of requests in every step."""

    batch: _BatchParams
    auto_B: Tensor  # int32
    rules: TreeRules[Tensor]
    traced_B: Tensor | None
    learn: LearnRows


def _draft_params_of(requests: list[Request]) -> _DraftParams:
    limits = [request.limits for request in requests if request.limits is not None]
    assert len(limits) == len(requests), "only requests that may be drafted for are sent to the drafter"
    return _DraftParams(
        batch=_params_of(requests),
        auto_B=_int32([limit.auto for limit in limits]),
        rules=TreeRules.stack(limits, lambda values: torch.from_numpy(np.array(values, dtype=np.float32))),
        traced_B=_traced(requests),
        learn=LearnRows(
            id_B=_int32([1 + request.id % _LEARN_IDS if request.submit.may_learn else 0 for request in requests]),
            num_prompt_B=_int32([request.num_prompt for request in requests]),
            tenant_B=_int32([request.submit.tenant for request in requests]),
        ),
    )


def _scored_rows(prefill: Sequence[tuple[Request, PromptChunk]], begins: Sequence[int]) -> ScoredRows | None:
    """Return the prompt rows to score; `begins` are the rows at which the chunks begin. None if there are none."""
    rows: list[int] = []
    tokens: list[int] = []
    num_top: list[int] = []
    for (request, chunk), begin in zip(prefill, begins, strict=False):
        if positions := request.to_score(chunk.start, chunk.stop):
            rows += range(begin + positions.start - chunk.start, begin + positions.stop - chunk.start)
            tokens += request.tokens[positions.start + 1 : positions.stop + 1]
            num_top += [request.submit.num_prompt_logprobs or 0] * len(positions)
    return ScoredRows(row_S=_int32(rows), token_S=_int32(tokens), num_top_S=_int32(num_top)) if rows else None


def _folds(folds: Sequence[Fold], keeps: Sequence[Keep]) -> Folds | None:
    if not folds:
        return None
    offsets = list(accumulate((len(fold.rows) for fold in folds), initial=0))
    ends = {fold.request: end - fold.request.num_computed for fold, end in zip(folds, offsets[1:], strict=True)}
    rows, kept = _kept(keeps, ends)
    return Folds(
        offsets=_int32(offsets),
        row_A=_int32([row for fold in folds for row in fold.rows]),
        seat_F=_int32([fold.request.seat for fold in folds]),
        keep_row_K=_int32(rows),
        keep_seat_K=_int32(kept),
    )


def _kept(keeps: Sequence[Keep], row_of: Mapping[Request, int]) -> tuple[list[int], list[int]]:
    """Return the rows behind which states of these requests are kept, and their seats.

    row_of: the row that the request's position 0 would have.
    """
    own = [keep for keep in keeps if keep.request in row_of]
    return [row_of[keep.request] + keep.position - 1 for keep in own], [keep.seat for keep in own]


def _traced(requests: list[Request]) -> Tensor | None:
    """Return which requests ask for the trace of their trees, or None if none does."""
    asks = [int(request.submit.has_trees) for request in requests]
    return _int32(asks) if any(asks) else None


def page_table(requests: list[Request]) -> np.ndarray:
    """Return the page table [B, P] int32, padded with the null page 0."""
    width = max((len(request.pages) for request in requests), default=0)
    rows = (request.pages.tobytes().ljust(4 * width, b"\0") for request in requests)
    return np.frombuffer(bytearray().join(rows), dtype=np.int32).reshape(len(requests), width)


def _physical_slots(moves: Sequence[Move], slots: list[int], page_size: int) -> Tensor:
    """Return where these logical slots of the moves' requests lie."""
    if not moves:
        return torch.empty(0, dtype=torch.int32)
    slot_C = np.array(slots, dtype=np.int32)
    pages = [move.request.pages[index] for move, index in zip(moves, (slot_C // page_size).tolist(), strict=True)]
    return torch.from_numpy(np.array(pages, dtype=np.int32) * page_size + slot_C % page_size)


def _append(array: np.ndarray, more: list[int]) -> np.ndarray:
    """Append values of the array's dtype."""
    return np.concatenate([array, np.array(more, dtype=array.dtype)]) if more else array


def _int32(values: list[int]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int32))
