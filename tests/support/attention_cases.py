"""Attention batches and their dense reference, shared by the tests of all kernels."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.kernels.select import Kernels
from workers.types import AttentionMetadata

CHAIN = [-1, 0, 1, 2]
TWO_BY_TWO = [-1, 0, 0, 1, 1, 2, 2]
RAGGED = [-1, 0, 0, 1, 1, 1, 2, 3]
LONG_CHAIN = [-1, *range(63)]


def paths_of(parents: list[int]) -> list[list[int]]:
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    return paths


def moved(metadata: AttentionMetadata, base_B: np.ndarray, page_table_BP: np.ndarray) -> AttentionMetadata:
    """Return the same rows behind other bases and on other pages: the twin of `TiledPlan.move`."""
    shift_N = (base_B - metadata.base_B)[metadata.owner_N]
    return replace(
        metadata,
        page_table_BP=page_table_BP,
        base_B=base_B,
        slot_N=metadata.slot_N + shift_N,
        visible_N=metadata.visible_N + shift_N,
    )


def trees_behind(
    base_B: np.ndarray, page_size: int, *, num_rows: int = 17, pages_each: int | None = None
) -> AttentionMetadata:
    """Return a step of chains of `num_rows` rows behind prefixes of these lengths.

    Pages are numbered in order, `pages_each` for each request; None = as many as it needs.
    """
    row_N, base_N = np.tile(np.arange(num_rows), len(base_B)), base_B.repeat(num_rows)
    pages_B = -(-(base_B + num_rows) // page_size)
    given_B = pages_B if pages_each is None else np.full_like(pages_B, pages_each)
    page_BP = 1 + (given_B.cumsum() - given_B)[:, None] + np.arange(pages_B.max())
    return AttentionMetadata(
        query_offsets=num_rows * np.arange(len(base_B) + 1, dtype=np.int32),
        page_table_BP=np.where(np.arange(pages_B.max()) < pages_B[:, None], page_BP, 0).astype(np.int32),
        base_B=base_B.astype(np.int32),
        slot_N=(base_N + row_N).astype(np.int32),
        visible_N=base_N.astype(np.int32),
        ancestors_N=(2 << row_N) - 1,
    )


def busiest(programs: Iterable[int], processors: int = 132) -> int:
    """Return the work of the busiest processor if each program goes, in this order, to the first that is free."""
    free = [0] * processors
    for work in programs:
        heapq.heapreplace(free, free[0] + int(work))
    return max(free)


class Batch:
    """Requests of (prefix length, tree parents) or (first position, number of prompt rows) on shuffled pages.

    `keys[n]` lists the logical slots that row n attends to, in path order, for the dense reference.
    """

    def __init__(self, requests: list[tuple[int, list[int] | int]], page_size: int, seed: int = 42) -> None:
        self.page_size = page_size
        self.keys: list[list[int]] = []
        self.owner: list[int] = []
        offsets, base, slots, visible, ancestors = [0], [], [], [], []
        lengths = []
        for request, (start, shape) in enumerate(requests):
            if isinstance(shape, int):
                rows = [(start + i, start + i + 1, 0, list(range(start + i + 1))) for i in range(shape)]
                base.append(0)
            else:
                rows = [
                    (start + row, start, sum(1 << r for r in path), [*range(start), *(start + r for r in path)])
                    for row, path in enumerate(paths_of(shape))
                ]
                base.append(start)
            for slot, seen, mask, keys in rows:
                slots.append(slot)
                visible.append(seen)
                ancestors.append(mask - (1 << 64) if mask >> 63 else mask)
                self.keys.append(keys)
                self.owner.append(request)
            offsets.append(len(slots))
            lengths.append(start + len(rows))
        pages_each = max(-(-length // page_size) for length in lengths)
        order = list(range(1, len(requests) * pages_each + 1))
        random.Random(seed).shuffle(order)
        self.table = torch.tensor(order, dtype=torch.int32).view(len(requests), pages_each)
        for request, length in enumerate(lengths):
            self.table[request, -(-length // page_size) :] = 0  # padded as by the scheduler
        self.num_slots = (len(order) + 1) * page_size
        self.metadata = AttentionMetadata(
            query_offsets=np.array(offsets, dtype=np.int32),
            page_table_BP=self.table.numpy(),
            base_B=np.array(base, dtype=np.int32),
            slot_N=np.array(slots, dtype=np.int32),
            visible_N=np.array(visible, dtype=np.int32),
            ancestors_N=np.array(ancestors, dtype=np.int64),
        )

    def physical(self, request: int, logical: list[int]) -> Tensor:
        slot = torch.tensor(logical)
        return self.table[request].long()[slot // self.page_size] * self.page_size + slot % self.page_size

    def dense(
        self,
        q: Tensor,
        kv: Tensor,
        scale: float,
        window: int | None = None,
        first_slot: int = 0,
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Attend for each row separately in float64, over its contiguous keys."""
        rows = []
        groups = q.shape[1] // kv.shape[2]
        for row, keys in enumerate(self.keys):
            kept = [slot for slot in keys[-(window or len(keys)) :] if slot >= first_slot]
            own = kv[self.physical(self.owner[row], kept)].double().repeat_interleave(groups, dim=2)
            score = torch.einsum("hd,shd->hs", q[row].double(), own[:, 0]) * scale
            score = score if softcap is None else softcap * (score / softcap).tanh()
            weight = score.exp()
            total = weight.sum(-1) + (0 if sink is None else sink.double().exp())
            rows.append((torch.einsum("hs,shd->hd", weight, own[:, 1]) / total[:, None]).flatten())
        return torch.stack(rows)

    def causal(self, q: Tensor, kv: Tensor, scale: float) -> Tensor:
        """Compute plain causal attention in float64 over each root-to-leaf path as one sequence, with its prefix."""
        groups = q.shape[1] // kv.shape[2]
        row_of = {(self.owner[row], keys[-1]): row for row, keys in enumerate(self.keys)}
        rows = torch.full((len(self.keys), q.shape[1] * q.shape[2]), torch.nan, dtype=torch.float64)
        for row, keys in reversed(list(enumerate(self.keys))):
            if not rows[row].isnan().any():
                continue  # part of a longer path
            request = self.owner[row]
            k_HSd, v_HSd = kv[self.physical(request, keys)].double().repeat_interleave(groups, 2).permute(1, 2, 0, 3)
            q_HSd = torch.zeros_like(k_HSd)  # the queries of committed tokens are irrelevant
            own = [(place, row_of[request, key]) for place, key in enumerate(keys) if (request, key) in row_of]
            for place, other in own:
                q_HSd[:, place] = q[other].double()
            out_HSd = F.scaled_dot_product_attention(q_HSd, k_HSd, v_HSd, is_causal=True, scale=scale)
            for place, other in own:
                rows[other] = out_HSd[:, place].flatten()
        return rows


def compare(
    kernels: Kernels,
    batch: Batch,
    *,
    device: torch.device | str = "cpu",
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-5,
    window: int | None = None,
    first_slot: int = 0,
    causal: bool = False,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> None:
    """Assert that a kernel set agrees within `tolerance` with the reference per row or on paths."""
    generator = torch.Generator().manual_seed(42)
    kv = torch.randn(batch.num_slots, 2, kv_heads, head_dim, generator=generator).to(dtype)
    q = torch.randn(len(batch.keys), q_heads, head_dim, generator=generator).to(dtype)
    prepared = kernels.plan(
        batch.metadata,
        batch.page_size,
        windows=(None, window),
        group_size=q_heads // kv_heads,
        kv_heads=kv_heads,
        first_slot=first_slot,
        dtype=dtype,
        device=device,
    )
    scale = head_dim**-0.5
    sink = torch.linspace(-1, 4, q_heads).to(dtype) if has_sinks else None
    sink_there = None if sink is None else sink.to(device)
    actual = kernels.tree_attention(q.to(device), kv.to(device), prepared, scale, window, softcap, sink_there).cpu()
    expected = batch.causal(q, kv, scale) if causal else batch.dense(q, kv, scale, window, first_slot, softcap, sink)
    assert actual.dtype == dtype
    assert (actual.double() - expected).abs().max().item() < tolerance
