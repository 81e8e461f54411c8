"""Tree attention over paged KV in plain torch: the twin of every attention kernel, on CPU and CUDA alike.

    plan(metadata, page_size, *, windows=(None,), group_size=1, first_slot=0, dtype, device) -> AttentionPlan
    tree_attention(q_NHd, kv_slots, plan, scale, window=None) -> [N, Hq * d]

Legend: N packed rows, B requests of one group, R rows and S key slots of a request (padded to the group's widest),
H = Hkv key-value heads, G = Hq / Hkv query heads per key-value head, d head width.

`plan` runs once per step and turns `AttentionMetadata` into index tensors and additive masks; `tree_attention` runs
once per layer and does one gather and one scaled_dot_product_attention per group. Query heads that share a key-value
head are folded into the rows (R * G of them), so keys are never repeated and any SDPA that takes a mask will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.types import AttentionMetadata

_GROUP_OVERHEAD = 2048
"""What one more group costs, in (row, key) pairs: about 50 us of calls, as measured on one CPU thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Requests of similar size that share one padded attention call."""

    rows: slice | Tensor  # the packed rows, [B*R]; padding repeats a request's last row
    slots: Tensor  # [B*S] int64 physical slots; padding repeats a request's last slot
    shape: tuple[int, int, int]  # B, R, S
    masks: dict[int | None, Tensor]  # per window: additive [B, 1, R*G, S]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """One step's attention, ready for every layer. Read-only; lives until the step ends."""

    write_slots_N: Tensor  # int64, physical slot that each row writes
    groups: tuple[RowGroup, ...]
    order_N: Tensor | None  # where row n lies in the groups' concatenated outputs; None = already in order


def plan(
    metadata: AttentionMetadata,
    page_size: int,
    *,
    windows: Sequence[int | None] = (None,),
    group_size: int = 1,
    first_slot: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> AttentionPlan:
    """Prepare one step. Indices are computed on the CPU and moved once; metadata on CUDA costs a synchronisation.

    Args:
        windows: the distinct sliding windows of the model's layers (None = full attention). A window w lets a row see
            itself and the w - 1 positions before it, along its own path.
        group_size: query heads per key-value head (on this rank).
        first_slot: logical slots below it are never attended to (1 for an EAGLE drafter, whose slot 0 is empty).
        dtype: that of the queries; masks are additive in it.
    """
    host = _to_host(metadata)
    offsets: list[int] = host.query_offsets.tolist()
    num_requests = len(offsets) - 1
    page_table = host.page_table_BP.long()
    owner_N = torch.repeat_interleave(torch.arange(num_requests), host.query_offsets.diff().long())
    slot_N = host.slot_N.long()
    write_slots_N = page_table[owner_N, slot_N // page_size] * page_size + slot_N % page_size

    # Keys of a request: logical slots 0 .. last one any of its rows may see.
    last_N = torch.maximum(host.visible_N.long(), _highest_visible(host, owner_N)).tolist()
    sizes = {
        b: (offsets[b + 1] - offsets[b], max(last_N[offsets[b] : offsets[b + 1]]))
        for b in range(num_requests)
        if offsets[b + 1] > offsets[b]
    }
    groups: list[RowGroup] = []
    order_N = torch.empty(len(slot_N), dtype=torch.int64)
    start = 0
    for members in _group_by_size(sizes):
        group, real_rows, places = _plan_group(
            members, sizes, offsets, host, page_table, page_size, windows, group_size, first_slot, dtype, device
        )
        groups.append(group)
        order_N[real_rows] = places + start
        start += group.shape[0] * group.shape[1]
    in_order = len(groups) <= 1 and all(isinstance(group.rows, slice) for group in groups)
    return AttentionPlan(
        write_slots_N=write_slots_N.to(device),
        groups=tuple(groups),
        order_N=None if in_order else order_N.to(device),
    )


def tree_attention(
    q_NHd: Tensor, kv_slots: Tensor, plan: AttentionPlan, scale: float, window: int | None = None
) -> Tensor:
    """Attention of packed rows over their own slots of one layer.

    Args:
        q_NHd: [N, Hq, d] rotated queries (any strides; d contiguous).
        kv_slots: [slots, 2, Hkv, d] one layer of a KVPool, this step's keys already written.
        scale: factor on the scores, 1 / sqrt(d).
        window: one of the windows given to `plan`.

    Returns:
        [N, Hq * d] in q's dtype; softmax in float32 inside SDPA.
    """
    num_rows, num_heads, d = q_NHd.shape
    H = kv_slots.shape[2]
    G = num_heads // H
    outputs = []
    for group in plan.groups:
        B, R, S = group.shape
        rows = group.rows
        q = q_NHd[rows] if isinstance(rows, slice) else q_NHd.index_select(0, rows)
        q_BHRd = q.view(B, R, H, G, d).transpose(1, 2).reshape(B, H, R * G, d)
        k_BHSd, v_BHSd = kv_slots.index_select(0, group.slots).view(B, S, 2, H, d).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q_BHRd, k_BHSd, v_BHSd, attn_mask=group.masks[window], scale=scale)
        outputs.append(out.view(B, H, R, G, d).transpose(1, 2).reshape(B * R, num_heads * d))
    if plan.order_N is None:
        return outputs[0] if outputs else q_NHd.reshape(0, num_heads * d)
    return torch.cat(outputs).index_select(0, plan.order_N)


def _to_host(metadata: AttentionMetadata) -> AttentionMetadata:
    return AttentionMetadata(
        query_offsets=metadata.query_offsets.cpu(),
        page_table_BP=metadata.page_table_BP.cpu(),
        base_B=metadata.base_B.cpu(),
        slot_N=metadata.slot_N.cpu(),
        visible_N=metadata.visible_N.cpu(),
        ancestors_N=metadata.ancestors_N.cpu(),
    )


def _bits(mask: Tensor) -> Tensor:
    """int64 [...] bitmasks -> int64 [..., 64] of 0 and 1 (an arithmetic shift keeps bit 63 right)."""
    return (mask[..., None] >> torch.arange(64)) & 1


def _highest_visible(metadata: AttentionMetadata, owner_N: Tensor) -> Tensor:
    """One past the highest tree slot that each row sees, 0 without ancestors."""
    highest_N = (_bits(metadata.ancestors_N) * torch.arange(1, 65)).amax(dim=-1)
    return torch.where(highest_N > 0, metadata.base_B.long()[owner_N] + highest_N, 0)


def _group_by_size(sizes: dict[int, tuple[int, int]]) -> list[list[int]]:
    """Greedy grouping by (keys, rows): join a neighbour when padding costs less than one more group would."""
    groups: list[list[int]] = []
    rows = keys = cost = 0
    for b, (R, S) in sorted(sizes.items(), key=lambda item: (item[1][1], item[1][0], item[0])):
        merged = (len(groups[-1]) + 1) * max(rows, R) * max(keys, S) if groups else 0
        if groups and merged <= cost + R * S + _GROUP_OVERHEAD:
            groups[-1].append(b)
            rows, keys, cost = max(rows, R), max(keys, S), merged
        else:
            groups.append([b])
            rows, keys, cost = R, S, R * S
    return [sorted(members) for members in groups]


def _plan_group(
    members: list[int],
    sizes: dict[int, tuple[int, int]],
    offsets: list[int],
    metadata: AttentionMetadata,
    page_table: Tensor,
    page_size: int,
    windows: Sequence[int | None],
    group_size: int,
    first_slot: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[RowGroup, Tensor, Tensor]:
    """The RowGroup of these requests, their packed rows, and each such row's place in the group's [B*R] output."""
    B = len(members)
    R = max(sizes[b][0] for b in members)
    S = max(sizes[b][1] for b in members)
    member_B = torch.tensor(members)
    start_B = torch.tensor([offsets[b] for b in members])
    rows_B = torch.tensor([sizes[b][0] for b in members])
    keys_B = torch.tensor([sizes[b][1] for b in members])
    row_R = torch.arange(R)
    row_BR = start_B[:, None] + torch.minimum(row_R, rows_B[:, None] - 1)
    key_S = torch.arange(S)
    # Padding repeats the request's own last key, so that nothing of another request is ever touched.
    key_BS = torch.minimum(key_S, keys_B[:, None] - 1)
    slots_BS = page_table[member_B[:, None], key_BS // page_size] * page_size + key_BS % page_size
    masks = {
        window: torch.zeros(B, R, S, dtype=dtype)
        .masked_fill_(~_visible(metadata, member_B, row_BR, key_S, window, first_slot), float("-inf"))
        .repeat_interleave(group_size, dim=1)[:, None]
        .to(device)
        for window in dict.fromkeys(windows)
    }
    first = offsets[members[0]]
    is_plain = members[-1] - members[0] == B - 1 and all(sizes[b][0] == R for b in members)
    is_plain = is_plain and offsets[members[-1] + 1] - first == B * R
    group = RowGroup(
        rows=slice(first, first + B * R) if is_plain else row_BR.view(-1).to(device),
        slots=slots_BS.view(-1).to(device),
        shape=(B, R, S),
        masks=masks,
    )
    is_real_BR = row_R < rows_B[:, None]
    return group, row_BR[is_real_BR], is_real_BR.view(-1).nonzero()[:, 0]


def _visible(
    metadata: AttentionMetadata,
    member_B: Tensor,
    row_BR: Tensor,
    key_S: Tensor,
    window: int | None,
    first_slot: int,
) -> Tensor:
    """Boolean [B, R, S]: may the row see the key? The rule of `AttentionMetadata`, then the window."""
    visible_BR1 = metadata.visible_N.long()[row_BR][..., None]
    ancestors_BR = metadata.ancestors_N[row_BR]
    is_prefix_BRS = key_S < visible_BR1
    has_tree = bool((ancestors_BR != 0).any())
    if not has_tree:
        allowed_BRS = is_prefix_BRS & (key_S >= first_slot)
        return allowed_BRS if window is None else allowed_BRS & (key_S > visible_BR1 - 1 - window)
    bit_BR64 = _bits(ancestors_BR)
    node_BS = key_S - metadata.base_B.long()[member_B][:, None]
    index_BRS = node_BS.clamp(0, 63)[:, None].expand(-1, row_BR.shape[1], -1)
    is_tree_BRS = bit_BR64.gather(2, index_BRS).bool() & ((node_BS >= 0) & (node_BS < 64))[:, None]
    allowed_BRS = (is_prefix_BRS | is_tree_BRS) & (key_S >= first_slot)
    if window is None:
        return allowed_BRS
    # Along the row's path the prefix has places 0 .. visible - 1 and its ancestors follow in row order.
    count_BR64 = bit_BR64.cumsum(dim=-1)
    place_BRS = torch.where(is_prefix_BRS, key_S, visible_BR1 + count_BR64.gather(2, index_BRS) - 1)
    own_BR1 = visible_BR1 + count_BR64[..., -1:] - 1
    return allowed_BRS & (place_BRS > own_BR1 - window)
