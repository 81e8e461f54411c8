"""Tree attention over the paged KV cache in plain torch: the counterpart of `workers.kernels.triton_attention`.

Legend: N packed rows, B requests of one group, R rows and S key slots of a request (padded to the group's widest),
H = Hkv key-value heads, G = Hq / Hkv query heads per key-value head, d head width.

`plan` runs once per step and converts `AttentionMetadata` to index tensors and additive masks. `tree_attention` runs
once per layer, with one gather and one scaled_dot_product_attention per group. Query heads that share a key-value head
are folded into the rows (X = R * G of them), so keys are never repeated, and any SDPA backend with a mask works.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.kernels.host import bits_of, keys_N
from workers.transfer import to_device
from workers.types import AttentionMetadata

_BLOCK_ROWS, _BLOCK_KEYS = 16, 512
"""In bfloat16 SDPA on a CPU adds in the same order, whatever is beside a row, if it gets multiples of these."""
_GROUP_OVERHEAD = 2048
"""Cost of an additional group in (row, key) pairs: about 50 us of call overhead on one CPU thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Requests of similar size that share one padded attention call."""

    rows: slice | Tensor  # the packed rows, [B*R]; padding repeats a request's last row
    slots: slice | Tensor  # [B*S] physical slots; padding repeats a request's last slot; a slice is read in place
    shape: tuple[int, int, int]  # B, R, S
    masks: dict[int | None, Tensor]  # per window: additive [B, 1, X, S] with X >= R*G

    def queries(self, q_NHd: Tensor, num_kv_heads: int, num_padded: int) -> Tensor:
        """Gather this group's queries, [B, H, X, d]. num_padded: X; zeros follow the queries."""
        q_BRHGd = self.rows_of(q_NHd).unflatten(2, (num_kv_heads, -1))
        q_BHXd = q_BRHGd.transpose(1, 2).reshape(self.shape[0], num_kv_heads, -1, q_NHd.shape[-1])
        num_missing = num_padded - q_BHXd.shape[2]
        return F.pad(q_BHXd, (0, 0, 0, num_missing)) if num_missing else q_BHXd

    def rows_of(self, q_NHd: Tensor) -> Tensor:
        """Gather this group's rows, [B, R, Hq, d]."""
        q = q_NHd[self.rows] if isinstance(self.rows, slice) else q_NHd.index_select(0, self.rows)
        return q.unflatten(0, self.shape[:2])

    def entries(self, kv_slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather entries [2, B, H, S, d] from one layer [slots, 2, H, d], and convert them to `dtype`."""
        B, _, S = self.shape
        is_fp8 = kv_slots.element_size() == 1
        stored = kv_slots.view(torch.uint8) if is_fp8 else kv_slots
        kv = stored[self.slots] if isinstance(self.slots, slice) else stored.index_select(0, self.slots)
        kv = _from_fp8(kv, dtype) if is_fp8 else kv
        return kv.view(B, S, *kv.shape[1:]).permute(2, 0, 3, 1, 4)


def _from_fp8(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert the bytes of e4m3 values, which every `dtype` holds exactly."""
    if stored.device.type == "cuda":
        return stored.view(torch.float8_e4m3fn).to(dtype)
    # On CPU torch converts one value at a time; looking them up takes half of its time (0.5 ns each, 2026-11-27).
    return _fp8_values(dtype).index_select(0, stored.int().view(-1)).view(stored.shape)


@functools.cache
def _fp8_values(dtype: torch.dtype) -> Tensor:
    """Return the value of every byte, [256]."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedPlan:
    """One step's attention, for all layers. Read-only."""

    write_slots_N: Tensor  # int64, physical slot that each row writes
    groups: tuple[RowGroup, ...]
    order_N: Tensor | None  # position of row n in the groups' concatenated outputs; None = in order


def plan(
    metadata: AttentionMetadata,
    page_size: int,
    *,
    windows: Sequence[int | None] = (None,),
    group_size: int = 1,
    kv_heads: int = 1,
    first_slot: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    into: MaskedPlan | None = None,
) -> MaskedPlan:
    """See `workers.kernels.select.Kernels.plan`. Masks are additive in `dtype`."""
    offsets = metadata.query_offsets
    owner_N = metadata.owner_N
    write_slots_N = metadata.physical(owner_N, metadata.slot_N, page_size)

    # Keys of a request: logical slots 0 .. the last one that any of its rows may attend to.
    rows_B = offsets[1:] - offsets[:-1]
    (some,) = rows_B.nonzero()
    last = np.maximum.reduceat(keys_N(metadata, owner_N), offsets[some]) if len(some) else some
    sizes = dict(zip(some.tolist(), zip(rows_B[some].tolist(), last.tolist(), strict=True), strict=True))
    parts = [
        _plan_group(members, sizes, metadata, page_size, windows, group_size, first_slot, dtype, device)
        for members in _group_by_size(sizes)
    ]
    in_order = len(parts) <= 1 and all(isinstance(group.rows, slice) for group, _ in parts)
    return MaskedPlan(
        write_slots_N=to_device(write_slots_N, device),
        groups=tuple(group for group, _ in parts),
        order_N=None
        if in_order
        else to_device(_order(np.concatenate([row_N for _, row_N in parts]), len(owner_N)), device),
    )


def plan_by_paths(
    metadata: AttentionMetadata,
    page_size: int,
    *,
    windows: Sequence[int | None] = (None,),
    group_size: int = 1,
    kv_heads: int = 1,
    first_slot: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    into: MaskedPlan | None = None,
) -> MaskedPlan:
    """Plan attention whose results for a row depend on that row's path alone, in bfloat16 on a CPU.

    `plan` gives all rows of a tree the same keys, so what a row adds up, and in which order, depends on its siblings.
    Here a path has its keys in the order of its positions, and rows are computed with the first path that they are on.
    """
    owner_N, offsets = metadata.owner_N, metadata.query_offsets
    members: dict[tuple[int, int], list[_Path]] = defaultdict(list)
    for b in range(metadata.num_requests):
        for path in _paths(metadata, b, np.arange(offsets[b], offsets[b + 1])):
            R, S = len(path.row_R), len(path.slot_S)
            members[-(-R * group_size // _BLOCK_ROWS) * _BLOCK_ROWS, -(-S // _BLOCK_KEYS) * _BLOCK_KEYS].append(path)
    groups, rows = [], [np.zeros(0, dtype=np.int64)]
    for (X, S), paths in members.items():
        R = max(len(path.row_R) for path in paths)
        row_BR = np.stack([np.pad(path.row_R, (0, R - len(path.row_R)), "edge") for path in paths])
        key_BS = np.stack([np.pad(path.slot_S, (0, S - len(path.slot_S)), "edge") for path in paths])
        end_BR1 = np.stack([np.pad(path.end_R, (0, R - len(path.end_R)), "edge") for path in paths])[..., None]
        key_S, masks = np.arange(S), {}
        for window in dict.fromkeys(windows):
            visible_BRS = (key_S < end_BR1) & (key_S >= first_slot)
            visible_BRS &= window is None or key_S >= end_BR1 - window
            mask_B1XS = _additive(visible_BRS, group_size, dtype)
            masks[window] = to_device(F.pad(mask_B1XS, (0, 0, 0, X - mask_B1XS.shape[2])), device)
        owner_B1 = owner_N[row_BR[:, :1]]
        groups.append(
            RowGroup(
                rows=to_device(row_BR.reshape(-1), device),
                slots=to_device(metadata.physical(owner_B1, key_BS, page_size).reshape(-1), device),
                shape=(len(paths), R, S),
                masks=masks,
            )
        )
        rows.append(row_BR.reshape(-1))
    return MaskedPlan(
        write_slots_N=to_device(metadata.physical(owner_N, metadata.slot_N, page_size), device),
        groups=tuple(groups),
        order_N=to_device(_order(np.concatenate(rows), len(owner_N)), device),
    )


class _Path(NamedTuple):
    """Rows that see the beginnings of one list of keys."""

    row_R: np.ndarray  # packed rows
    end_R: np.ndarray  # how many keys each of them sees
    slot_S: np.ndarray  # logical slots, by position


def _paths(metadata: AttentionMetadata, b: int, row_R: np.ndarray) -> Iterator[_Path]:
    """Divide the rows of a request into the paths of its tree, each row in the first that has it."""
    ancestors_R = metadata.ancestors_N[row_R]
    end_R = metadata.visible_N[row_R] + bits_of(ancestors_R).sum(-1)
    is_left_R = np.ones(len(row_R), dtype=bool)
    while is_left_R.any():
        deepest = int(np.where(is_left_R, end_R, -1).argmax())
        is_on_path_R = is_left_R & (ancestors_R & ~ancestors_R[deepest] == 0)
        (node_T,) = bits_of(ancestors_R[deepest]).nonzero()
        slot_S = np.concatenate((np.arange(metadata.visible_N[row_R[deepest]]), metadata.base_B[b] + node_T))
        yield _Path(row_R[is_on_path_R], end_R[is_on_path_R], slot_S)
        is_left_R &= ~is_on_path_R


def _order(row_P: np.ndarray, num_rows: int) -> Tensor:
    """Invert the map from output position to packed row. Padding repeats rows and their outputs, so any one works."""
    order_N = np.empty(num_rows, dtype=np.int64)
    order_N[row_P] = np.arange(len(row_P))
    return torch.from_numpy(order_N)


def tree_attention(
    q_NHd: Tensor,
    kv_slots: Tensor,
    plan: MaskedPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """See `workers.kernels.select.Kernels.tree_attention`. SDPA computes the softmax in float32."""
    _, num_heads, d = q_NHd.shape
    H = kv_slots.shape[2]
    G = num_heads // H
    outputs = []
    for group in plan.groups:
        B, R, _ = group.shape
        if kv_slots.shape[1] == 1:
            outputs.append(_latent_attention(group, q_NHd, kv_slots, scale, window))
            continue
        mask = group.masks[window]
        q_BHXd = group.queries(q_NHd, H, mask.shape[2])
        k_BHSd, v_BHSd = group.entries(kv_slots, q_NHd.dtype).unbind(0)
        if softcap is None and sink_H is None:
            out = F.scaled_dot_product_attention(q_BHXd, k_BHSd, v_BHSd, attn_mask=mask, scale=scale)
        else:
            sink_H1X = None if sink_H is None else sink_H.view(H, 1, G).expand(H, R, G).reshape(H, 1, R * G)
            out = _attention_by_scores(q_BHXd, k_BHSd, v_BHSd, mask, scale, softcap, sink_H1X)
        outputs.append(out[:, :, : R * G].view(B, H, R, G, d).transpose(1, 2).reshape(B * R, num_heads * d))
    if plan.order_N is None:
        return outputs[0] if outputs else q_NHd.reshape(0, num_heads * d)
    return torch.cat(outputs).index_select(0, plan.order_N)


def _latent_attention(group: RowGroup, q_NHd: Tensor, kv_slots: Tensor, scale: float, window: int | None) -> Tensor:
    """Attention over latents, whose mask is planned for a single head: [B*R, Hq * d].

    Rows are SDPA's heads and heads its rows. So neither the mask nor the latents, of many heads, are repeated.
    """
    q_BRHd, mask_BR1S = group.rows_of(q_NHd), group.masks[window].transpose(1, 2)
    (latent_B1Sd,) = group.entries(kv_slots, q_NHd.dtype)
    latent_BRSd = latent_B1Sd.expand(-1, q_BRHd.shape[1], -1, -1)
    out = F.scaled_dot_product_attention(q_BRHd, latent_BRSd, latent_BRSd, attn_mask=mask_BR1S, scale=scale)
    return out.flatten(2).flatten(0, 1)


def _attention_by_scores(
    q_BHXd: Tensor,
    k_BHSd: Tensor,
    v_BHSd: Tensor,
    mask_B1XS: Tensor,
    scale: float,
    softcap: float | None,
    sink_H1X: Tensor | None,
) -> Tensor:
    """Attention with softcap or sinks, which SDPA does not support."""
    score_BHXS = q_BHXd @ k_BHSd.transpose(2, 3) * scale
    if softcap is not None:
        score_BHXS = softcap * (score_BHXS / softcap).tanh()
    score_BHXS = score_BHXS + mask_B1XS
    if sink_H1X is not None:
        sink_BHX1 = sink_H1X.to(score_BHXS.dtype).transpose(1, 2).expand(len(q_BHXd), -1, -1, -1)
        score_BHXS = torch.cat((score_BHXS, sink_BHX1), dim=-1)
    p_BHXS = score_BHXS.softmax(-1, dtype=torch.float32)[..., : k_BHSd.shape[2]]
    return p_BHXS.to(q_BHXd.dtype) @ v_BHSd


def _group_by_size(sizes: dict[int, tuple[int, int]]) -> list[list[int]]:
    """Group requests of similar size: sorted by keys, or by rows (so that single rows stay together) if cheaper."""
    by_keys = _groups(sorted(sizes.items(), key=lambda item: (item[1][1], item[1][0], item[0])))
    if len({R for R, _ in sizes.values()}) <= 1:
        return by_keys[0]
    by_rows = _groups(sorted(sizes.items(), key=lambda item: (item[1], item[0])))
    return min(by_keys, by_rows, key=lambda grouping: grouping[1])[0]


def _groups(ordered: list[tuple[int, tuple[int, int]]]) -> tuple[list[list[int]], int]:
    """Group greedily: join the previous group if padding costs less than an additional group. Also return the cost."""
    groups: list[list[int]] = []
    rows = keys = cost = total = 0
    for b, (R, S) in ordered:
        merged = (len(groups[-1]) + 1) * max(rows, R) * max(keys, S) if groups else 0
        if groups and merged <= cost + R * S + _GROUP_OVERHEAD:
            groups[-1].append(b)
            total += merged - cost
            rows, keys, cost = max(rows, R), max(keys, S), merged
        else:
            groups.append([b])
            rows, keys, cost = R, S, R * S
            total += cost + _GROUP_OVERHEAD
    return [sorted(members) for members in groups], total


def _plan_group(
    members: list[int],
    sizes: dict[int, tuple[int, int]],
    metadata: AttentionMetadata,
    page_size: int,
    windows: Sequence[int | None],
    group_size: int,
    first_slot: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[RowGroup, np.ndarray]:
    """Plan the RowGroup of some requests. Also return the packed row of each output position [B*R]."""
    B = len(members)
    rows_B, keys_B = (np.array([sizes[b][i] for b in members]) for i in (0, 1))
    R, S = int(rows_B.max()), int(keys_B.max())
    member_B = np.array(members)
    start_B = metadata.query_offsets[member_B]
    row_R, key_S = np.arange(R), np.arange(S)
    row_BR = start_B[:, None] + np.minimum(row_R, rows_B[:, None] - 1)
    # Padding repeats the request's last key, so that no other request's slots are read.
    key_BS = np.minimum(key_S, keys_B[:, None] - 1)
    slots_BS = metadata.physical(member_B[:, None], key_BS, page_size)
    masks = {
        window: to_device(
            _additive(_visible(metadata, member_B, row_BR, key_S, window, first_slot), group_size, dtype), device
        )
        for window in dict.fromkeys(windows)
    }
    first = int(start_B[0])
    is_plain = members[-1] - members[0] == B - 1 and bool((rows_B == R).all())
    is_plain = is_plain and metadata.query_offsets[members[-1] + 1] - first == B * R
    group = RowGroup(
        rows=slice(first, first + B * R) if is_plain else to_device(row_BR.reshape(-1), device),
        slots=one_run(slots_BS) or to_device(slots_BS.reshape(-1), device),
        shape=(B, R, S),
        masks=masks,
    )
    return group, row_BR.reshape(-1)


def one_run(slots_BS: np.ndarray) -> slice | None:
    """Return the slots as a slice if they are consecutive, as the pages of a single request often are."""
    slots = slots_BS.reshape(-1)
    if slots[-1] - slots[0] != len(slots) - 1 or not (slots[1:] - slots[:-1] == 1).all():
        return None
    return slice(int(slots[0]), int(slots[-1]) + 1)


def _additive(visible_BRS: np.ndarray, group_size: int, dtype: torch.dtype) -> Tensor:
    """Return an additive mask, [B, 1, R*G, S], with each row repeated per query head."""
    mask = np.where(visible_BRS, np.float32(0), np.float32(-np.inf))
    return torch.from_numpy(mask.repeat(group_size, axis=1)[:, None]).to(dtype)


def _visible(
    metadata: AttentionMetadata,
    member_B: np.ndarray,
    row_BR: np.ndarray,
    key_S: np.ndarray,
    window: int | None,
    first_slot: int,
) -> np.ndarray:
    """Return bool [B, R, S], True if the row attends to the key: the rule of `AttentionMetadata`, then the window."""
    visible_BR1 = metadata.visible_N[row_BR][..., None]
    ancestors_BR = metadata.ancestors_N[row_BR]
    is_prefix_BRS = key_S < visible_BR1
    if not ancestors_BR.any():
        allowed_BRS = is_prefix_BRS & (key_S >= first_slot)
        return allowed_BRS if window is None else allowed_BRS & (key_S > visible_BR1 - 1 - window)
    base_B = metadata.base_B[member_B]
    allowed_BRS, first = is_prefix_BRS.copy(), int(base_B.min())
    node_B1T = key_S[first:] - base_B[:, None, None]  # for keys that may be in a tree
    shift_B1T = np.minimum(np.maximum(node_B1T, 0), 63)  # numpy's clip takes three times as long
    allowed_BRS[..., first:] |= (ancestors_BR[..., None] >> shift_B1T & 1).astype(bool) & (node_B1T == shift_B1T)
    allowed_BRS &= key_S >= first_slot
    if window is None:
        return allowed_BRS
    # Along a row's path, the prefix has positions 0 .. visible - 1, followed by the ancestors in row order.
    count_BR64 = bits_of(ancestors_BR).cumsum(axis=-1)
    index_B1S = np.clip(key_S - base_B[:, None], 0, 63)[:, None]
    place_BRS = np.where(is_prefix_BRS, key_S, visible_BR1 + np.take_along_axis(count_BR64, index_B1S, axis=2) - 1)
    own_BR1 = visible_BR1 + count_BR64[..., -1:] - 1
    return allowed_BRS & (place_BRS > own_BR1 - window)
