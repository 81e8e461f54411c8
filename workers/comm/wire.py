"""The only place that knows field order and width on the wire: message <-> one flat uint8 buffer.

Layout of a body: a table of int32 dims (scalars, then every field's shape, -1 for an absent part), then each tensor's
bytes, each aligned to 16. The bulk field (the features of a DraftRequest) comes last, so that on CUDA it can stay on
the device while the host reads the rest. Collectives reject uint16, int16 and uint64, so everything travels as bytes.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.types import (
    AttentionMetadata,
    DraftCosts,
    DraftProbs,
    DraftReply,
    DraftRequest,
    SamplingBatch,
    ScoredRows,
    TargetStep,
    TreeBatch,
    TreeTrace,
)

_ALIGN = 16
_PADDING = [bytes(count) for count in range(_ALIGN)]
_I32, _I64, _F32, _U8 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.uint8)


class Kind(IntEnum):
    """The content of a frame."""

    STOP = 0
    HEARTBEAT = 1
    DRAFT_REQUEST = 2
    DRAFT_REPLY = 3
    TARGET_STEP = 4
    PROBE = 5


class Field(NamedTuple):
    """One field: its width on the wire, its dtype in memory, its rank, and whether it is an array or a tensor."""

    name: str
    wire: np.dtype
    memory: np.dtype
    ndim: int = 1
    is_array: bool = False


def _ints(*names: str) -> list[Field]:
    return [Field(name, _I32, _I32) for name in names]


TREE_FIELDS = [
    *_ints("offsets", "token_N"),
    Field("parent_N", np.dtype(np.int16), _I32),
    Field("depth_N", np.dtype(np.int8), _I32),
    Field("ancestors_N", _I64, _I64),
    Field("kind_N", _U8, _U8),
    Field("weight_N", np.dtype(np.float16), _F32),
]
SAMPLING_FIELDS = [
    Field("temperature_B", _F32, _F32),
    Field("top_k_B", _I32, _I32),
    Field("top_p_B", _F32, _F32),
    Field("min_p_B", _F32, _F32),
    Field("seed_B", _I64, _I64),
]
ATTENTION_FIELDS = [
    Field("query_offsets", _I32, _I32, is_array=True),
    Field("page_table_BP", _I32, _I32, ndim=2, is_array=True),
    *(Field(name, _I32, _I32, is_array=True) for name in ("base_B", "slot_N", "visible_N")),
    Field("ancestors_N", _I64, _I64, is_array=True),
]
PROBS_FIELDS = [*_ints("offsets", "id_S"), Field("weight_S", np.dtype(np.uint16), _I32)]
REQUEST_FIELDS = [
    *_ints("offsets", "start_B", "token_M"),
    Field("page_table_BP", _I32, _I32, ndim=2),
    *_ints("rule_B", "auto_B", "num_nodes_B", "max_depth_B"),
    Field("min_prob_B", _F32, _F32),
    Field("path_prob_B", _F32, _F32),
    Field("constraints_U", _U8, _U8),
]
COST_FIELDS = [
    *_ints("nodes_T"),
    Field("verify_ms_T", _F32, _F32),
    Field("draft_ms_3", _F32, _F32),
    Field("base_tokens_1", _F32, _F32),
    Field("calibration_D2", _F32, _F32, ndim=2),
]
TRACED_FIELDS = _ints("traced_B")
TRACE_FIELDS = [
    *_ints("offsets", "token_T"),
    Field("parent_T", np.dtype(np.int16), _I32),
    Field("depth_T", np.dtype(np.int8), _I32),
    Field("prob_T", _F32, _F32),
    Field("weight_T", np.dtype(np.float16), _F32),
    Field("reason_T", _U8, _U8),
]
PRUNED_FIELDS = [Field("pruned_GD", _I32, _I32, ndim=2)]
STEP_FIELDS = [
    *_ints("copy_source", "copy_target", "token_N", "position_N"),
    *_ints("sample_row_R", "request_R", "draw_index_R"),
    Field("constraints_U", _U8, _U8),
]
SCORED_FIELDS = _ints("row_S", "token_S", "num_top_S")

Message = DraftRequest | DraftReply | TargetStep
EMPTY = torch.empty(0, dtype=torch.uint8)


class Packed(NamedTuple):
    """A message as bytes: `meta` is on the CPU, `bulk` (possibly empty) on the device of its tensor."""

    kind: Kind
    meta: Tensor
    bulk: Tensor


def pack(message: Message) -> Packed:
    """Convert a message to bytes. Raises OverflowError if a value does not fit its wire width."""
    match message:
        case DraftRequest():
            features = message.features_MH
            bulk = EMPTY if features is None else features.contiguous().reshape(-1).view(torch.uint8)
            width = [-1, 0] if features is None else [features.shape[1], _DTYPES.index(features.dtype)]
            parts = [(REQUEST_FIELDS, message), (SAMPLING_FIELDS, message.sampling), (COST_FIELDS, message.costs)]
            parts.append((TRACED_FIELDS, message))
            return Packed(Kind.DRAFT_REQUEST, _pack_fields(parts, width), bulk)
        case DraftReply():
            parts = [(TREE_FIELDS, message.trees), (PROBS_FIELDS, message.probs), (PRUNED_FIELDS, message)]
            parts.append((TRACE_FIELDS, message.trace))
            scalars = [min(int(message.seconds * 1e6), 2**31 - 1), message.num_levels, message.num_run]
            return Packed(Kind.DRAFT_REPLY, _pack_fields(parts, scalars), EMPTY)
        case TargetStep():
            parts = [(STEP_FIELDS, message), (ATTENTION_FIELDS, message.attention), (SAMPLING_FIELDS, message.sampling)]
            parts.append((SCORED_FIELDS, message.scored))
            scalars = [int(message.has_logprobs), int(message.has_sampled), int(message.has_draws)]
            return Packed(Kind.TARGET_STEP, _pack_fields(parts, scalars), EMPTY)


def unpack(kind: Kind, meta: Tensor, bulk: Tensor) -> Message:
    """Convert bytes to a message. Its fields are on the CPU, copied, except for the bulk field, a view of `bulk`."""
    match kind:
        case Kind.DRAFT_REQUEST:
            parts = [REQUEST_FIELDS, SAMPLING_FIELDS, COST_FIELDS, TRACED_FIELDS]
            (fields, sampling, costs, traced), (width, dtype) = _unpack_fields(parts, meta, num_scalars=2)
            assert fields is not None and sampling is not None
            return DraftRequest(
                **fields,
                sampling=SamplingBatch(**sampling),
                costs=DraftCosts(**costs) if costs else None,
                features_MH=None if width < 0 else bulk.view(_DTYPES[dtype]).reshape(-1, width),
                traced_B=traced["traced_B"] if traced else None,
            )
        case Kind.DRAFT_REPLY:
            parts = [TREE_FIELDS, PROBS_FIELDS, PRUNED_FIELDS, TRACE_FIELDS]
            (tree, probs, pruned, trace), scalars = _unpack_fields(parts, meta, num_scalars=3)
            microseconds, num_levels, num_run = scalars
            assert tree is not None and pruned is not None
            return DraftReply(
                trees=TreeBatch(**tree),
                probs=DraftProbs(**probs) if probs else None,
                pruned_GD=pruned["pruned_GD"],
                num_levels=num_levels,
                num_run=num_run,
                seconds=microseconds * 1e-6,
                trace=TreeTrace(**trace) if trace else None,
            )
        case Kind.TARGET_STEP:
            parts = [STEP_FIELDS, ATTENTION_FIELDS, SAMPLING_FIELDS, SCORED_FIELDS]
            (fields, attention, sampling, scored), flags = _unpack_fields(parts, meta, num_scalars=3)
            assert fields is not None and attention is not None and sampling is not None
            return TargetStep(
                **fields,
                attention=AttentionMetadata(**attention),
                sampling=SamplingBatch(**sampling),
                has_logprobs=bool(flags[0]),
                has_sampled=bool(flags[1]),
                has_draws=bool(flags[2]),
                scored=ScoredRows(**scored) if scored else None,
            )
        case _:
            raise ValueError(f"a {kind.name} frame carries no message")


_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _pack_fields(parts: list[tuple[list[Field], Any]], scalars: list[int]) -> Tensor:
    dims: list[int] = list(scalars)
    pieces: list[bytes] = []
    for fields, value in parts:
        for spec in fields:
            array = None if value is None else getattr(value, spec.name)
            if array is None:
                dims += [-1] * spec.ndim
                continue
            if not spec.is_array:
                array = array.numpy() if array.is_cpu else array.cpu().numpy()
            dims += array.shape
            piece = _narrow(spec, array).tobytes()
            pieces += (piece, _PADDING[-len(piece) % _ALIGN])
    table = np.array(dims, dtype=np.int32).tobytes()
    # Joining bytes takes a third of the time of copying each field into an array.
    return torch.frombuffer(bytearray().join((table, _PADDING[-len(table) % _ALIGN], *pieces)), dtype=torch.uint8)


def _unpack_fields(
    parts: list[list[Field]], meta: Tensor, num_scalars: int
) -> tuple[list[dict[str, Any] | None], list[int]]:
    data = meta.numpy().copy()  # the channel reuses its buffer
    num_dims = num_scalars + sum(spec.ndim for fields in parts for spec in fields)
    table = data[: 4 * num_dims].view(np.int32).tolist()
    scalars, at = table[:num_scalars], num_scalars
    begin = _aligned(4 * num_dims)
    values: list[dict[str, Any] | None] = []
    for fields in parts:
        value: dict[str, Any] | None = {}
        for spec in fields:
            shape = table[at : at + spec.ndim]
            at += spec.ndim
            if shape[0] < 0:
                value = None
                continue
            assert value is not None
            end = begin + math.prod(shape) * spec.wire.itemsize
            array = data[begin:end].view(spec.wire)
            if spec.ndim > 1:
                array = array.reshape(shape)
            array = array if spec.wire is spec.memory else array.astype(spec.memory)
            value[spec.name] = array if spec.is_array else torch.from_numpy(array)
            begin = _aligned(end)
        values.append(value)
    return values, scalars


def _narrow(spec: Field, array: np.ndarray) -> np.ndarray:
    assert array.dtype == spec.memory and array.ndim == spec.ndim, (spec, array.dtype, array.shape)
    if spec.wire is spec.memory:
        return array
    narrow = array.astype(spec.wire)
    if spec.wire.kind in "iu" and not np.array_equal(narrow, array):
        raise OverflowError(f"{spec.name} holds a value that does not fit {spec.wire}")
    return narrow


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
