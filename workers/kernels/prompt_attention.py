"""Long chunks of prompts are attended to by PyTorch's flash attention, which is made for them; see `PromptPlan`.

On an H200 the layer of an 8B model (32 query and 8 key-value heads of width 128, bfloat16) attends with 2,048 rows to
8,192 keys before them in 0.50 ms, and our kernel, which is made for trees, in 1.05; to 32,768 in 1.7 and 4.0 ms.

Legend: N packed rows, B requests, R rows and S keys of a chunk, H key-value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from workers.kernels.torch_attention import one_run
from workers.transfer import to_device
from workers.types import AttentionMetadata

FEWEST_ROWS, FEWEST_PAIRS = 256, 1 << 22
"""Rows of a long chunk, and rows times keys: for less a pass gains less than its graph saves in launches."""

TYPES = (torch.float16, torch.bfloat16)
"""Types of the queries that flash attention takes."""


def is_flash_width(head_dim: int) -> bool:
    """Return whether flash attention takes heads of this width without padding them."""
    return head_dim <= 256 and head_dim % 8 == 0


def long_chunks(
    metadata: AttentionMetadata, first_slot: int, dtype: torch.dtype, device: torch.device | str
) -> list[int]:
    """Return the requests whose rows are a long chunk: each sees all slots up to its own.

    There are none where flash attention does not run: in float32, and on compute capability 7.
    """
    device = torch.device(device)
    if len(metadata.slot_N) < FEWEST_ROWS or dtype not in TYPES:
        return []
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return []
    offsets, found = metadata.query_offsets, []
    for b in (np.diff(offsets) >= FEWEST_ROWS).nonzero()[0].tolist():
        own = slice(offsets[b], offsets[b + 1])
        visible_R = metadata.visible_N[own]
        is_causal = visible_R[0] > first_slot and (np.diff(visible_R) == 1).all()
        if is_causal and len(visible_R) * int(visible_R[-1]) >= FEWEST_PAIRS and not metadata.ancestors_N[own].any():
            found.append(b)
    return found


class _Chunk(NamedTuple):
    rows: slice
    slots: slice | Tensor  # int64 [S], physical; a slice is read in place
    num_keys: int


class PromptPlan:
    """One step's attention, for all layers: that of its long chunks, and a kernel set's plan for all other rows.

    tiled: returns the set's own plan of a step. Layers with a window take that of the whole step.
    """

    def __init__(
        self,
        metadata: AttentionMetadata,
        page_size: int,
        requests: Sequence[int],
        *,
        first_slot: int,
        device: torch.device | str,
        tiled: Callable[[AttentionMetadata], Any],
    ) -> None:
        self._tiled, self._metadata = tiled, metadata
        self.write_slots_N = to_device(metadata.physical(metadata.owner_N, metadata.slot_N, page_size), device)
        self._chunks = []
        is_other_N = np.ones(len(metadata.slot_N), dtype=bool)
        count_B = np.diff(metadata.query_offsets)
        for b in requests:
            rows = slice(*metadata.query_offsets[b : b + 2].tolist())
            key_S = np.arange(first_slot, metadata.visible_N[rows.stop - 1])
            slot_S = metadata.physical(np.array(b), key_S, page_size)
            self._chunks.append(_Chunk(rows, one_run(slot_S) or to_device(slot_S, device), len(key_S)))
            is_other_N[rows], count_B[b] = False, 0
        (other_N,) = is_other_N.nonzero()
        self._others = None
        if len(other_N):
            step = replace(
                metadata,
                query_offsets=np.append(0, count_B.cumsum()).astype(np.int32),
                slot_N=metadata.slot_N[other_N],
                visible_N=metadata.visible_N[other_N],
                ancestors_N=metadata.ancestors_N[other_N],
            )
            self._others = to_device(other_N, device), tiled(step)

    @cached_property
    def whole(self) -> Any:
        """The set's own plan of all rows."""
        return self._tiled(self._metadata)

    def attend(self, q_NHd: Tensor, kv_slots: Tensor, scale: float, tree_attention: Callable[..., Tensor]) -> Tensor:
        """Attend in one layer, without a window, a softcap or sinks: [N, Hq * d]. tree_attention: the set's."""
        if len(self._chunks) == 1 and self._others is None:
            return _causal(self._chunks[0], q_NHd, kv_slots, scale)
        out_NX = q_NHd.new_empty(len(q_NHd), q_NHd[0].numel())
        for chunk in self._chunks:
            out_NX[chunk.rows] = _causal(chunk, q_NHd, kv_slots, scale)
        if self._others is not None:
            row_M, plan = self._others
            out_NX.index_copy_(0, row_M, tree_attention(q_NHd.index_select(0, row_M), kv_slots, plan, scale))
        return out_NX


def _causal(chunk: _Chunk, q_NHd: Tensor, kv_slots: Tensor, scale: float) -> Tensor:
    """Let the last row of a chunk see all of its keys, and each row before it one less: [R, Hq * d]."""
    if isinstance(chunk.slots, slice):
        kv_S2Hd = kv_slots[chunk.slots]
    else:  # in words of eight bytes, for the time is that of the elements and not of the bytes
        kv_S2Hd = kv_slots.view(torch.int64).index_select(0, chunk.slots).view(kv_slots.dtype)
    k_1HSd, v_1HSd = kv_S2Hd.to(q_NHd.dtype).permute(1, 2, 0, 3)[:, None]
    q_1HRd = q_NHd[chunk.rows].transpose(0, 1)[None]
    mask = causal_lower_right(q_1HRd.shape[2], chunk.num_keys)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # cuDNN would build a plan for every new number of rows
        out_1HRd = F.scaled_dot_product_attention(q_1HRd, k_1HSd, v_1HSd, attn_mask=mask, scale=scale, enable_gqa=True)
    return out_1HRd[0].transpose(0, 1).flatten(1)
