"""The only place that knows the layout on the wire: message <-> one flat uint8 buffer.

The fields of a message's class give its arrays, see `workers.types.column`.

Layout of a body: a table of int32 dims (scalars, then every field's shape, -1 for an absent part), then each tensor's
bytes, each aligned to 16. The bulk field (the features of a DraftRequest) comes last, so that on CUDA it can stay on
the device while the host reads the rest. Collectives reject uint16, int16 and uint64, so everything travels as bytes.
"""

from __future__ import annotations

import math
from dataclasses import Field, fields
from enum import IntEnum
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from workers.types import DraftReply, DraftRequest, HeadState, NewHead, TargetStep

_ALIGN = 16
_PADDING = [bytes(count) for count in range(_ALIGN)]


class Kind(IntEnum):
    """The content of a frame."""

    STOP = 0
    HEARTBEAT = 1
    DRAFT_REQUEST = 2
    DRAFT_REPLY = 3
    TARGET_STEP = 4
    PROBE = 5
    NEW_HEAD = 6
    HEAD_STATE = 7


class Column(NamedTuple):
    """One array: its width on the wire, its dtype in memory, its rank, and whether it is an array or a tensor."""

    name: str
    wire: np.dtype
    memory: np.dtype
    ndim: int
    is_array: bool


class Part(NamedTuple):
    """Arrays that are there together, or none of them: a message's own, or those of one of its fields."""

    name: str
    """The field; "" = the message itself."""
    kind: type | None
    """The class of the field's value; None = these are arrays of the message."""
    columns: list[Column]

    def of(self, message: Any) -> Any:
        """Return what has the arrays; None = nothing."""
        return message if self.kind is None else getattr(message, self.name)


class Layout(NamedTuple):
    """How a class of messages travels."""

    parts: list[Part]
    scalars: dict[str, type]
    """Booleans, integers, and times in seconds, which travel in microseconds."""
    bulk: str | None

    @staticmethod
    def of(message: type) -> Layout:
        """Read the fields of a class; `workers.types.column` describes its arrays."""
        own: list[Column] = []
        layout, bulk = Layout([Part("", None, own)], {}, None), None
        hints = get_type_hints(message)
        for spec in fields(message):
            hint = hints[spec.name]
            is_optional = isinstance(hint, UnionType)
            kind = get_args(hint)[0] if is_optional else hint
            if spec.metadata.get("is_bulk"):
                bulk = spec.name
            elif kind in (bool, int, float):
                layout.scalars[spec.name] = kind
            elif kind not in (Tensor, np.ndarray):
                kind = get_origin(kind) or kind
                layout.parts.append(Part(spec.name, kind, _columns_of(kind)))
            elif is_optional:
                layout.parts.append(Part(spec.name, None, [_column_of(spec, kind)]))
            else:
                own.append(_column_of(spec, kind))
        return layout._replace(bulk=bulk)


def _columns_of(kind: type) -> list[Column]:
    hints = get_type_hints(kind)
    return [_column_of(spec, hints[spec.name]) for spec in fields(kind)]


def _column_of(spec: Field[Any], kind: Any) -> Column:
    memory = spec.metadata.get("memory", "int32")
    wire, ndim = spec.metadata.get("wire", memory), spec.metadata.get("ndim", 1)
    return Column(spec.name, np.dtype(wire), np.dtype(memory), ndim, kind is np.ndarray)


Message = DraftRequest | DraftReply | TargetStep | NewHead | HeadState
_MESSAGES: dict[Kind, type[Message]] = {
    Kind.DRAFT_REQUEST: DraftRequest,
    Kind.DRAFT_REPLY: DraftReply,
    Kind.TARGET_STEP: TargetStep,
    Kind.NEW_HEAD: NewHead,
    Kind.HEAD_STATE: HeadState,
}
_KINDS = {message: kind for kind, message in _MESSAGES.items()}
_LAYOUTS = {kind: Layout.of(message) for kind, message in _MESSAGES.items()}
_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
_MOST = 2**31 - 1
EMPTY = torch.empty(0, dtype=torch.uint8)


class Packed(NamedTuple):
    """A message as bytes: `meta` is on the CPU, `bulk` (possibly empty) on the device of its tensor."""

    kind: Kind
    meta: Tensor
    bulk: Tensor


def pack(message: Message) -> Packed:
    """Convert a message to bytes. Raises OverflowError if a value does not fit its wire width."""
    kind = _KINDS[type(message)]
    layout, bulk = _LAYOUTS[kind], EMPTY
    scalars = [
        min(int(1e6 * getattr(message, name)), _MOST) if type is float else int(getattr(message, name))
        for name, type in layout.scalars.items()
    ]
    if layout.bulk is not None:
        rows = getattr(message, layout.bulk)
        scalars += [-1, 0] if rows is None else [rows.shape[1], _DTYPES.index(rows.dtype)]
        bulk = EMPTY if rows is None else rows.contiguous().reshape(-1).view(torch.uint8)
    return Packed(kind, _pack_parts([(part.columns, part.of(message)) for part in layout.parts], scalars), bulk)


def unpack(kind: Kind, meta: Tensor, bulk: Tensor) -> Message:
    """Convert bytes to a message. Its fields are on the CPU, copied, except for the bulk field, a view of `bulk`."""
    if kind not in _LAYOUTS:
        raise ValueError(f"a {kind.name} frame carries no message")
    layout = _LAYOUTS[kind]
    num_scalars = len(layout.scalars) + 2 * (layout.bulk is not None)
    values, scalars = _unpack_parts([part.columns for part in layout.parts], meta, num_scalars)
    found: dict[str, Any] = {
        name: number * 1e-6 if type is float else type(number)
        for (name, type), number in zip(layout.scalars.items(), scalars, strict=False)
    }
    for part, value in zip(layout.parts, values, strict=True):
        if part.kind is None:
            found |= {part.name: None} if value is None else value
        else:
            found[part.name] = None if value is None else part.kind(**value)
    if layout.bulk is not None:
        width, dtype = scalars[-2:]
        found[layout.bulk] = None if width < 0 else bulk.view(_DTYPES[dtype]).reshape(-1, width)
    return _MESSAGES[kind](**found)


def _pack_parts(parts: list[tuple[list[Column], Any]], scalars: list[int]) -> Tensor:
    dims: list[int] = list(scalars)
    pieces: list[bytes] = []
    for columns, value in parts:
        for spec in columns:
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


def _unpack_parts(
    parts: list[list[Column]], meta: Tensor, num_scalars: int
) -> tuple[list[dict[str, Any] | None], list[int]]:
    data = meta.numpy().copy()  # the channel reuses its buffer
    num_dims = num_scalars + sum(spec.ndim for columns in parts for spec in columns)
    table = data[: 4 * num_dims].view(np.int32).tolist()
    scalars, at = table[:num_scalars], num_scalars
    begin = _aligned(4 * num_dims)
    values: list[dict[str, Any] | None] = []
    for columns in parts:
        value: dict[str, Any] | None = {}
        for spec in columns:
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


def _narrow(spec: Column, array: np.ndarray) -> np.ndarray:
    assert array.dtype == spec.memory and array.ndim == spec.ndim, (spec, array.dtype, array.shape)
    if spec.wire is spec.memory:
        return array
    narrow = array.astype(spec.wire)
    if spec.wire.kind in "iu" and not np.array_equal(narrow, array):
        raise OverflowError(f"{spec.name} holds a value that does not fit {spec.wire}")
    return narrow


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
