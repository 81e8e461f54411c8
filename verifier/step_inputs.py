"""Packs a scheduled step into the two messages that leave rank 0: DraftRequest and TargetStep.

Rows of a step are ordered: the trees of all decoding requests, then the prompt chunks. Legend: B requests, N rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from verifier.draft_inputs import DraftInput
from verifier.request import Request
from verifier.tree import PromptChunk, TreeMetadata, chunk_metadata, tree_metadata
from workers.sampling.logits_state import pack_logits_states
from workers.types import AttentionMetadata, DraftCosts, DraftRequest, SamplingBatch, TargetStep, TreeBatch


class Move(NamedTuple):
    """One accepted token's KV on its way from a tree row's slot to its place, as logical slots of a request."""

    request: Request
    source: int
    target: int


def pack_draft(
    inputs: Mapping[Request, DraftInput],
    features_MH: Tensor | None,
    eos_token_ids: tuple[int, ...],
    costs: DraftCosts | None,
) -> DraftRequest:
    """One message to the drafter. features_MH: of all rows fed, in the order of `inputs`, if the drafter reads any."""
    requests = list(inputs)
    lasting = _lasting(tuple(requests))
    limits = [request.limits for request in requests if request.limits is not None]
    assert len(limits) == len(requests), "only requests that speculate are sent to the drafter"
    return DraftRequest(
        offsets=_int32(list(accumulate((len(own.tokens) for own in inputs.values()), initial=0))),
        start_B=_int32([request.num_fed for request in requests]),
        token_M=_int32([token for own in inputs.values() for token in own.tokens]),
        page_table_BP=page_table(requests),
        rule_B=lasting.rule_B,
        auto_B=_int32([limit.auto for limit in limits]),
        num_nodes_B=_int32([own.num_nodes for own in inputs.values()]),
        max_depth_B=_int32([own.max_depth for own in inputs.values()]),
        min_prob_B=torch.tensor([limit.min_prob for limit in limits], dtype=torch.float32),
        path_prob_B=torch.tensor([limit.path_prob for limit in limits], dtype=torch.float32),
        constraints_U=pack_logits_states([request.logits_state(eos_token_ids) for request in requests]),
        sampling=lasting.sampling,
        costs=costs,
        features_MH=features_MH,
    )


def pack_target(
    trees: TreeBatch,
    decode: list[Request],
    prefill: list[tuple[Request, PromptChunk]],
    moves: list[Move],
    page_size: int,
    eos_token_ids: tuple[int, ...],
) -> TargetStep:
    """One forward over all trees and chunks. Tokens are drawn at every tree row and after each finished prompt."""
    sizes = [end - begin for begin, end in pairwise(trees.offsets.tolist())]
    num_trees = len(sizes)
    sizes += [chunk.stop - chunk.start for _, chunk in prefill]
    root_B = np.array([len(request.tokens) - 1 for request in decode], dtype=np.int32)
    meta = tree_metadata(trees, root_B)
    if prefill:
        chunk_meta = chunk_metadata([chunk for _, chunk in prefill])
        meta = TreeMetadata(*map(np.concatenate, zip(meta, chunk_meta, strict=True)))
    prompt_tokens = [token for request, chunk in prefill for token in request.tokens[chunk.start : chunk.stop]]

    requests = decode + [request for request, _ in prefill]
    offsets = list(accumulate(sizes, initial=0))
    finishing = [i for i, (request, chunk) in enumerate(prefill, num_trees) if chunk.stop == len(request.tokens)]
    sample_row_R = _joined(np.arange(offsets[num_trees], dtype=np.int32), [offsets[i + 1] - 1 for i in finishing])
    request_R = _joined(np.arange(num_trees, dtype=np.int32).repeat(sizes[:num_trees]), finishing)
    lasting = drawing = _lasting(tuple(requests))
    if len(finishing) < len(prefill):  # who computes but a part of his prompt draws nothing
        drawing = _made_lasting([*decode, *(requests[i] for i in finishing)])
    is_row_each = not prefill and len(request_R) == num_trees
    return TargetStep(
        copy_source=_int32([_physical(move.request, move.source, page_size) for move in moves]),
        copy_target=_int32([_physical(move.request, move.target, page_size) for move in moves]),
        token_N=torch.from_numpy(_joined(trees.token_N.numpy(), prompt_tokens)),
        position_N=torch.from_numpy(meta.position_N),
        sample_row_R=torch.from_numpy(sample_row_R),
        request_R=torch.from_numpy(request_R),
        draw_index_R=torch.from_numpy(meta.position_N[sample_row_R] + 1),
        constraints_U=pack_logits_states([request.logits_state(eos_token_ids) for request in requests]),
        attention=AttentionMetadata(
            query_offsets=_int32(offsets),
            page_table_BP=page_table(requests),
            base_B=torch.from_numpy(_joined(root_B, [0] * len(prefill))),
            slot_N=torch.from_numpy(meta.slot_N),
            visible_N=torch.from_numpy(meta.visible_N),
            ancestors_N=torch.from_numpy(meta.ancestors_N),
        ),
        sampling=lasting.sampling if is_row_each else lasting.sampling.rows(torch.from_numpy(request_R)),
        has_logprobs=drawing.has_logprobs,
        has_sampled=drawing.has_sampled,
        has_draws=drawing.has_draws,
    )


class _Lasting(NamedTuple):
    """What requests asked for, which never changes."""

    sampling: SamplingBatch
    rule_B: Tensor  # int32
    has_logprobs: bool
    has_sampled: bool
    has_draws: bool


@lru_cache(maxsize=2)
def _lasting(requests: tuple[Request, ...]) -> _Lasting:
    """Kept for the last drafter's and the last target's requests: mostly they are those of the step before."""
    return _made_lasting(requests)


def _made_lasting(requests: Sequence[Request]) -> _Lasting:
    params = [request.submit.sampling for request in requests]
    return _Lasting(
        sampling=SamplingBatch.stack(params),
        rule_B=_int32([request.rule for request in requests]),
        has_logprobs=any(own.num_logprobs is not None for own in params),
        has_sampled=any(request.rule.is_sampled for request in requests),
        has_draws=any(not request.rule.is_sampled for request in requests),
    )


def page_table(requests: list[Request]) -> Tensor:
    """[B, P] int32, padded with the null page 0."""
    width = max((len(request.pages) for request in requests), default=0)
    rows = (request.pages.tobytes().ljust(4 * width, b"\0") for request in requests)
    table = np.frombuffer(bytearray().join(rows), dtype=np.int32)
    return torch.from_numpy(table.reshape(len(requests), width))


def _physical(request: Request, slot: int, page_size: int) -> int:
    return request.pages[slot // page_size] * page_size + slot % page_size


def _joined(array: np.ndarray, more: list[int]) -> np.ndarray:
    """The array, and more of its type behind it."""
    return np.concatenate([array, np.array(more, dtype=array.dtype)]) if more else array


def _int32(values: list[int]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int32))
